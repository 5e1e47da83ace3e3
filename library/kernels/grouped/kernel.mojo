"""The kernel of a library of `gpu.mojo`."""

from operations.nvidia.generic.grouped_launch import Grouped as Kernel
