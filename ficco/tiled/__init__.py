"""One matrix product as one kernel whose tiles wait for arriving rows and announce finished ones.

:mod:`ficco.tiled.worklist` decides what is computed in which order, without a device;
:mod:`ficco.tiled.kernel` compiles and launches the kernel, ``hopper.cpp``.
"""
