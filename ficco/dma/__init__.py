"""Engines: what moves bytes and signals and enqueues matrix products. Begin with ``engine``, the
interface of all, and ``cpu``, the reference.

=======================  ===========================================================================
module                   subject
=======================  ===========================================================================
engine                   the interface
choose                   which engine serves a device
cpu                      the CPU engine: threads as queues
cpu_lanes                its memory and its calls in flight: the threads, how they fail
cpu_collectives          its collectives, whose errors name the absent rank
cpu_network              what it sends to other hosts and receives from them
gloo                     messages between hosts by a gloo group of ficco's own
host                     host memory that ranks share, and semaphores in it
hosts                    which ranks of a group share a host
patience                 how long a rank waits for its peers, and the warnings meanwhile
gpu                      the GPU engine
gpu_network              what it sends to other hosts and receives: by NCCL, or gloo and the host
driver                   what it needs of a vendor
cuda_driver, hip_driver  the vendors: NVIDIA, AMD
hip_api                  HIP's calls, in both series of the binding
ways                     the ways among which an engine can be told to choose
memories                 memory that ranks share, and the signal words in it
rendezvous               PyTorch's symmetric memory for the ranks of one group
watch                    what a watchdog reads of calls: words or events
lane_ops                 the operations of a call on a lane, and how they become fewer
memops                   waits and writes of words, and which of them a launch can carry out
replays                  calls that are recorded and replayed
gate                     what threads may not do to a device at the same time
messages                 what of a Plan's Regions goes between hosts, with those rows
tiles                    a product whose tiles wait, as one launch
collectives              the exchange by the group's own library
=======================  ===========================================================================
"""
