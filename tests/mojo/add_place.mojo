"""What a graph may fuse behind a convolution, for kernels that are emitted."""

from extensibility.managed_tensor_slice import ComputeOutputFusion
from std.utils import IndexList


@fieldwise_init
struct AddPlace(ComputeOutputFusion):
    """What a graph may fuse: adds to an element what depends on its place."""

    var unit: Int32

    def compute[
        dtype: DType,
        rank: Int,
        simd_width: SIMDLength,
        element_alignment: Int = 1,
    ](self, idx: IndexList[rank], val: SIMD[dtype, simd_width]) -> SIMD[
        dtype, simd_width
    ]:
        """Adds `unit` times the index's weighted sum, modulo 8."""
        var place = 0
        comptime for axis in range(rank):
            place += (2 * axis + 1) * idx[axis]
        var result = val
        comptime for i in range(Int(simd_width)):
            var number = Int32((place + (2 * rank - 1) * i) % 8) * self.unit
            result[i] += number.cast[dtype]()
        return result
