"""The kernel of a library of `gpu.mojo`."""

from operations.nvidia.sm90.stem.launch import Stem as Kernel
