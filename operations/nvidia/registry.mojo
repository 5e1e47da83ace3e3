"""The kernels of NVIDIA GPUs, in the order in which they are asked."""

from ..conv.fields import GPU_KERNELS
from ..conv.registry import Registry
from .generic.depthwise_launch import Depthwise
from .generic.grouped_launch import Grouped
from .generic.implicit_gemm_launch import ImplicitGemm
from .generic.reference_launch import Reference
from .sm100.launch import Gemm as BlackwellGemm
from .sm90.diagonal.launch import Diagonal
from .sm90.gemm.launch import Gemm as HopperGemm
from .sm90.stem.launch import Stem
from .stream import Stream

comptime GPU_REGISTRY = Registry[
    Stream,
    Stem,
    Diagonal,
    Depthwise,
    HopperGemm,
    BlackwellGemm,
    Grouped,
    ImplicitGemm,
    Reference,
]
"""The kernels of a GPU: special ones before general ones."""


def check_registry():
    """Does not compile unless Python's list of the kernels is the registry's.
    """
    comptime assert len(GPU_REGISTRY.codes()) == len(GPU_KERNELS)
    comptime for i in range(len(GPU_KERNELS)):
        comptime assert (
            GPU_REGISTRY.codes()[i] == GPU_KERNELS[i]
        ), "GPU_KERNELS of python/maxconv/_fields.py is not the registry's"
