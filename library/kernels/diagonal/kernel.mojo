"""The kernel of a library of `gpu.mojo`."""

from operations.nvidia.sm90.diagonal.launch import Diagonal as Kernel
