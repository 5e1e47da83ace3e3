"""The kernel of a library of `gpu.mojo`."""

from operations.nvidia.generic.implicit_gemm_launch import (
    ImplicitGemm as Kernel,
)
