"""The kernel of a library of `gpu.mojo`."""

from operations.nvidia.sm90.gemm.launch import Unaligned as Kernel
