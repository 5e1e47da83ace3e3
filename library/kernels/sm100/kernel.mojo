"""The kernel of a library of `gpu.mojo`."""

from operations.nvidia.sm100.launch import Gemm as Kernel
