"""The kernel of a library of `gpu.mojo`."""

from operations.nvidia.generic.gemv_launch import Gemv as Kernel
