"""The GPU as PyTorch has it, whatever its vendor: ``torch.cuda`` for NVIDIA's and AMD's.

Whatever is neither an engine nor a kernel uses a GPU by this name, so that another one is met here.
"""

from torch import cuda as gpu

__all__ = ["gpu"]
