"""The kernel of a library of `gpu.mojo`."""

from operations.nvidia.sm90.window.launch import Window as Kernel
