"""Outputs for `emit_sm100`: memory, and what stands for work that the graph
compiler fused."""

from std.utils import IndexList

from operations.conv.access import MemoryOutput, OutputTarget
from operations.conv.memory import Writes
from operations.conv.problem import SPATIAL, ConvProblem

comptime OUTPUT = 0x1111000000000000
"""What stands for the output's address."""


trait TestOutput(OutputTarget):
    """An output that a test can make."""

    @staticmethod
    def of(problem: ConvProblem) -> Self:
        """The output of a problem, at `OUTPUT`."""
        ...


@fieldwise_init
struct Plain[element_type: DType](TestOutput):
    """An output with nothing fused behind it."""

    comptime dtype = Self.element_type
    comptime computes = False
    comptime stores = False

    var memory: MemoryOutput[Self.element_type]

    @staticmethod
    def of(problem: ConvProblem) -> Self:
        return Self(
            MemoryOutput(Writes[Self.dtype](unsafe_from_address=OUTPUT))
        )

    @always_inline
    def data(self) -> Writes[Self.dtype]:
        return self.memory.data()

    @always_inline
    def compute[
        width: Int, alignment: Int = width
    ](
        self,
        n: Int,
        at: IndexList[SPATIAL],
        filter: Int,
        value: SIMD[Self.dtype, width],
    ) -> SIMD[Self.dtype, width]:
        return value

    @always_inline
    def store[
        width: Int, alignment: Int = width
    ](
        self,
        n: Int,
        at: IndexList[SPATIAL],
        filter: Int,
        offset: Int,
        value: SIMD[Self.dtype, width],
    ):
        self.memory.store[width, alignment](n, at, filter, offset, value)


@fieldwise_init
struct Placed[element_type: DType, stored: Bool](TestOutput):
    """What stands for work that the graph compiler fused: it adds the image
    and the pixel's position, each modulo 4, and the filter's parity. Stored, it
    goes to `[K, N, Z, P, Q]`."""

    comptime dtype = Self.element_type
    comptime computes = not Self.stored
    comptime stores = Self.stored

    var elements: Writes[Self.element_type]
    var images: Int
    var extents: IndexList[SPATIAL]

    @staticmethod
    def of(problem: ConvProblem) -> Self:
        return Self(
            Writes[Self.dtype](unsafe_from_address=OUTPUT),
            problem.batch,
            problem.output,
        )

    @always_inline
    def data(self) -> Writes[Self.dtype]:
        return self.elements

    @always_inline
    def compute[
        width: Int, alignment: Int = width
    ](
        self,
        n: Int,
        at: IndexList[SPATIAL],
        filter: Int,
        value: SIMD[Self.dtype, width],
    ) -> SIMD[Self.dtype, width]:
        var place = n % 4 + at[0] % 4 + at[1] % 4 + at[2] % 4
        var result = value
        comptime for i in range(width):
            result[i] += Scalar[Self.dtype](place + (filter + i) % 2)
        return result

    @always_inline
    def store[
        width: Int, alignment: Int = width
    ](
        self,
        n: Int,
        at: IndexList[SPATIAL],
        filter: Int,
        offset: Int,
        value: SIMD[Self.dtype, width],
    ):
        var computed = self.compute[width](n, at, filter, value)
        comptime for i in range(width):
            var plane = (filter + i) * self.images + n
            var row = (plane * self.extents[0] + at[0]) * self.extents[1]
            var pixel = (row + at[1]) * self.extents[2] + at[2]
            self.elements.unsafe_store(pixel, computed[i])
