"""Engines: they move bytes and signals and enqueue matrix products. Begin with ``engine``, the
interface, and ``cpu``, the reference engine.

=======================  ===========================================================================
module                   subject
=======================  ===========================================================================
engine                   the interface
choose                   choice of the engine for a device
cpu                      the CPU engine: threads as lanes, collectives, transfers between hosts
gloo                     messages between hosts by a separate gloo group
host                     host memory that ranks share, and semaphores in it
hosts                    hosts of a group, and the ranks on each
patience                 timeouts of waits for peers, and the warnings before the timeout
gpu                      the GPU engine
gpu_network              its transfers between hosts: by NCCL, or by gloo through the host
driver                   the interface of a vendor's runtime
cuda_driver, hip_driver  the vendors: NVIDIA, AMD
hip_api                  HIP's calls, in both series of the binding
ways                     mechanisms that an environment variable selects
memories                 GPU memory that ranks share, and the signal words in it
rendezvous               PyTorch's symmetric memory for the ranks of one group
watch                    progress of calls for the watchdog: by words or events
lane_ops                 operations of a call on a lane, and how neighbours are merged
memops                   waits and writes of words, and which of them a launch can carry out
replays                  recordings of calls, and their replay
gate                     mutual exclusion of recordings, device-wide waits and calls
messages                 messages of a network step: regions, or the rows of them that a call has
tiles                    a product whose tiles wait, as one launch
collectives              the exchange by the group's own library
=======================  ===========================================================================
"""
