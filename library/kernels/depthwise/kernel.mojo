"""The kernel of a library of `gpu.mojo`."""

from operations.nvidia.generic.depthwise_launch import Depthwise as Kernel
