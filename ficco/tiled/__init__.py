"""One matrix product as one kernel whose tiles wait for arriving rows and announce finished ones.

:mod:`ficco.tiled.worklist` decides what is computed in which order, without a device;
:mod:`ficco.tiled.products` puts that on a device, and launches the kernel of its architecture:
:mod:`ficco.tiled.hopper`, in CUDA C++ (``hopper.cpp``), or :mod:`ficco.tiled.portable`, in Triton.
"""
