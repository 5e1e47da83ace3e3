"""The CPU's kernels."""

from ..conv.fields import CPU_KERNELS
from ..conv.registry import Registry
from .direct.depthwise import Depthwise
from .direct.few_filters import FewFilters
from .direct.grouped import Grouped
from .dot.amx import Amx
from .dot.arm import MatrixUnit
from .dot.launch import DotProduct
from .dot.vectors import Avx512Bf16, Avx512Vnni, AvxVnni
from .dot.widening import Widening
from .gemm.launch import ImplicitGemm, Pointwise
from .pool import MaxPool, Pool
from .reference import Reference
from .winograd.launch import Winograd

comptime CpuRegistry[P: Pool] = Registry[
    P,
    Depthwise[P],
    Grouped[P],
    DotProduct[P, Amx],
    DotProduct[P, Avx512Bf16],
    DotProduct[P, Avx512Vnni],
    DotProduct[P, AvxVnni],
    DotProduct[P, MatrixUnit[emulated=False]],
    DotProduct[P, Widening],
    FewFilters[P],
    Pointwise[P],
    Winograd[P],
    ImplicitGemm[P],
    Reference[P],
]
"""The kernels on a pool's threads, in the order of `CPU_KERNELS`."""

comptime CPU_REGISTRY = CpuRegistry[MaxPool]
"""The kernels on the threads of MAX's runtime."""


def check_registry():
    """Does not compile unless Python's list of the kernels is the registry's.
    """
    comptime assert len(CPU_REGISTRY.codes()) == len(CPU_KERNELS)
    comptime for i in range(len(CPU_KERNELS)):
        comptime assert (
            CPU_REGISTRY.codes()[i] == CPU_KERNELS[i]
        ), "CPU_KERNELS of python/maxconv/_fields.py is not the registry's"
