"""The kernel of a library of `gpu.mojo`."""

from operations.nvidia.sm80.launch import Mma as Kernel
