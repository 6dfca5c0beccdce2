"""One matrix product as one kernel whose tiles wait for arriving rows and announce finished ones.

:mod:`ficco.compute.tiled.worklist` decides what is computed in which order, without a device;
:mod:`ficco.compute.tiled.products` puts that on a device, and launches the kernel of its
architecture:
:mod:`ficco.compute.tiled.hopper`, in CUDA C++ (``hopper.cpp``), or
:mod:`ficco.compute.tiled.portable`, in Triton.
"""
