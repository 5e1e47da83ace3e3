"""The CPU's kernels."""

from ..conv.fields import CPU_KERNELS, KERNEL_AUTO, PANEL
from ..conv.operands import Device, Operands, OperandTypes
from ..conv.problem import ConvProblem
from ..conv.kernel import built_refusal
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
from .kernel import CpuKernel
from .pool import MaxPool, Pool
from .reference import Reference
from .unit import UnitVisitor
from .winograd.launch import Winograd

comptime CpuKernels[P: Pool] = _Kernels[
    P,
    Depthwise[P],
    Grouped[P],
    DotProduct[P, Amx],
    DotProduct[P, MatrixUnit[emulated=False]],
    FewFilters[P],
    DotProduct[P, Avx512Bf16],
    DotProduct[P, Avx512Vnni],
    DotProduct[P, AvxVnni],
    Pointwise[P],
    Winograd[P],
    DotProduct[P, Widening],
    ImplicitGemm[P],
    Reference[P],
]
"""The kernels on a pool's threads, in the order of `CPU_KERNELS`."""

comptime CpuRegistry[P: Pool] = CpuKernels[P].registry
"""The same as a registry."""

comptime CPU_REGISTRY = CpuRegistry[MaxPool]
"""The kernels on the threads of MAX's runtime."""


struct _Kernels[P: Pool, *Kernels: CpuKernel]:
    """A CPU's kernels, in order."""

    comptime registry = Registry[Self.P, *Self.Kernels]

    @staticmethod
    def visit_unit[
        V: UnitVisitor, //, dtype: DType
    ](threads: Int, mut visitor: V) raises:
        """Visits what multiplies on this CPU, which the kernel of a convolution
        of whole panels says.

        Parameters:
            V: The visitor's type.
            dtype: Of activation and filter.

        Args:
            threads: How many threads there are.
            visitor: What visits it.

        Raises:
            If no kernel takes the type, or what the visitor raises.
        """
        comptime types = OperandTypes.unfused(dtype, dtype)
        var numbers: List[Int] = [1, 4 * PANEL, 4 * PANEL, 1]
        numbers += [1, PANEL, PANEL, 1, 1, 1, 1, 1, 1, 1, 1, 1]
        numbers += [0, 0, 0, 0, 0, 0]
        var kernel = Self.registry.choose[types](
            KERNEL_AUTO,
            ConvProblem.of_numbers(numbers),
            Operands.bare(types),
            Device(0, threads),
        )
        comptime for i in range(Self.Kernels.length):
            comptime Kernel = Self.Kernels[i]
            comptime if not built_refusal[Kernel](types):
                if kernel == Kernel.code:
                    visitor.visit[Kernel.Unit]()


def check_registry():
    """Does not compile unless Python's list of the kernels is the registry's.
    """
    comptime assert len(CPU_REGISTRY.codes()) == len(CPU_KERNELS)
    comptime for i in range(len(CPU_KERNELS)):
        comptime assert (
            CPU_REGISTRY.codes()[i] == CPU_KERNELS[i]
        ), "CPU_KERNELS of python/maxconv/_fields.py is not the registry's"
