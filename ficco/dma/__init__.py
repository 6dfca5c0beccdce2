"""Engines: what moves bytes and signals and enqueues matrix products. Begin with ``engine``, the
interface of all, and ``cpu``, the reference.

=======================  ===========================================================================
module                   subject
=======================  ===========================================================================
engine                   the interface, and what it is given: slots, programs, calls
choose                   which engine serves a device
cpu                      the CPU engine: threads as queues
cpu_lanes                its calls under way: the threads, their common state, how they fail
cpu_memory               its memory as tensors, and the layout of a slot
cpu_collectives          its collectives, which name a rank that does not come
disturbance              how its calls are disturbed on purpose
host                     host memory that ranks share, and semaphores in it
streams                  what the two GPU engines have in common
cuda                     the CUDA engine
cuda_ops                 the operations of its calls, and how they become fewer
cuda_driver              the driver's calls that it makes
rendezvous               PyTorch's symmetric memory for the ranks of one group
gate                     what threads may not do to a device at the same time
hip                      the HIP engine
hip_api                  the runtime's calls that it makes, in both series of the binding
hip_memory, hip_work     memory that ranks share; PyTorch's work in the order of streams
hip_binding              launches of ficco's kernels
memops                   waits and writes of words, and which of them a launch can see to
products, blas           products of the vendor's library, and its name
cublaslt                 ``c + a @ b`` without a copy of c
collectives              the exchange by the group's own library
probe                    what the self-test asks of a device below any engine
=======================  ===========================================================================
"""
