"""The kernel of a library of `gpu.mojo`."""

from operations.nvidia.few_filters.launch import FewFilters as Kernel
