"""The kernel of a library of `gpu.mojo`."""

from operations.nvidia.generic.dp4a_launch import Dp4a as Kernel
