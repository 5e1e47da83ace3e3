"""The kernels of NVIDIA GPUs, in the order in which they are asked."""

from ..conv.fields import GPU_KERNELS
from ..conv.kernel import kernel_name
from ..conv.registry import Registry
from .device import target_capability
from .few_filters.launch import FewFilters
from .generic.depthwise_launch import Depthwise
from .generic.dp4a_launch import Dp4a
from .generic.gemv_launch import Gemv
from .generic.grouped_launch import Grouped
from .generic.implicit_gemm_launch import ImplicitGemm
from .generic.reference_launch import Reference
from .inspect import GpuKernel, PtxWriter
from .sm100.launch import Gemm as BlackwellGemm
from .sm80.launch import Mma
from .sm90.diagonal.launch import Diagonal
from .sm90.gemm.launch import Gemm as HopperGemm, Unaligned
from .sm90.stem.launch import Stem
from .sm90.window.launch import Window
from .stream import Stream

comptime _KERNELS = _Kernels[
    Gemv,
    Stem,
    Window,
    Diagonal,
    Depthwise,
    FewFilters,
    HopperGemm,
    Unaligned,
    BlackwellGemm,
    Mma,
    Dp4a,
    Grouped,
    ImplicitGemm,
    Reference,
]

comptime GPU_REGISTRY = _KERNELS.registry
"""The kernels of a GPU: special ones before general ones."""


struct _Kernels[*Kernels: GpuKernel]:
    """A GPU's kernels, in order."""

    comptime registry = Registry[Stream, *Self.Kernels]

    @staticmethod
    def inspect[
        wanted: StaticString, dtype: DType
    ](writer: PtxWriter[dtype]) raises:
        """Writes those that run on the GPU that this is compiled for."""
        comptime capability = target_capability()
        comptime for i in range(Self.Kernels.length):
            comptime Kernel = Self.Kernels[i]
            comptime if (
                (wanted == "" or wanted == kernel_name(Kernel.code))
                and not Kernel.device_refusal(capability)
                and not Kernel.type_refusal(writer.types)
            ):
                Kernel.inspect(writer)


def inspect_kernels[dtype: DType, wanted: StaticString](folder: String) raises:
    """Writes the kernels of the GPU that this is compiled for as PTX, a file
    for each configuration, and prints the files' names and their dynamic shared
    memory.

    Parameters:
        dtype: Of activation and filter.
        wanted: The name of the kernel, as Python has it, or nothing for all.

    Args:
        folder: Where to.

    Raises:
        If a file cannot be written.
    """
    _KERNELS.inspect[wanted](PtxWriter[dtype](folder))


def check_registry():
    """Does not compile unless Python's list of the kernels is the registry's.
    """
    comptime assert len(GPU_REGISTRY.codes()) == len(GPU_KERNELS)
    comptime for i in range(len(GPU_KERNELS)):
        comptime assert (
            GPU_REGISTRY.codes()[i] == GPU_KERNELS[i]
        ), "GPU_KERNELS of python/maxconv/_fields.py is not the registry's"
