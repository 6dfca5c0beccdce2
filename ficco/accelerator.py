"""PyTorch's module for GPUs of any vendor: ``torch.cuda`` serves NVIDIA's and AMD's.

All code but engines and kernels uses GPUs by this name, so that another module is added only here.
"""

from torch import cuda as gpu

__all__ = ["gpu"]
