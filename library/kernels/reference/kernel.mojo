"""The kernel of a library of `gpu.mojo`."""

from operations.nvidia.generic.reference_launch import Reference as Kernel
