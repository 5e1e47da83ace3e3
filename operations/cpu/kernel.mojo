"""What a kernel of the CPU's registry says beside what every kernel does."""

from ..conv.kernel import ConvKernel
from .gemm.mma import Fma
from .unit import MultiplyUnit


trait CpuKernel(ConvKernel):
    """A kernel of the CPU's registry: unless it says otherwise, one that
    multiplies in float32."""

    comptime Unit: MultiplyUnit = Fma
    """What multiplies, which bounds it where operands are at hand."""
