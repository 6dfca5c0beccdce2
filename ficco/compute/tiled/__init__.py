"""A matrix product in one kernel whose tiles wait for arriving rows and announce finished rows.

:mod:`ficco.compute.tiled.worklist` orders the tiles, without a device.
:mod:`ficco.compute.tiled.products` uploads the work list and launches the kernel of the device's
architecture: :mod:`ficco.compute.tiled.hopper` in CUDA C++ (``hopper.cpp``), or
:mod:`ficco.compute.tiled.portable` in Triton.
"""
