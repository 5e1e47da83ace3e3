"""What stands behind an epilogue: what the graph compiler fused, or functions
of the caller's, as MAX's kernels take them.

A function of the caller's sees values that are rounded to the output's type,
`width` filters of one pixel, and their place `[m, n]` in the implicit GEMM: the
pixel, counted over images and rows, and the first filter. In a row-major matrix
of `N*Z*P*Q` by `K`, that is their place in the output.

It may capture, by `@__parameter` and `@__copy_capture`, what may be passed to a
device, as pointers to device memory: the compiler makes parameters of the
kernel of that, behind the others. What is captured by reference lies on the
host, where no device reads it.
"""

from std.collections import Optional
from std.utils import IndexList

from ...conv.access import OutputTarget
from ..im2col.tiles import OutputShape

comptime ElementwiseLambda = def[
    dtype: DType, width: SIMDLength, *, alignment: Int = 1
](IndexList[2], SIMD[dtype, width]) capturing -> None
"""Stores values at `[m, n]`, or makes something else of them. `n` is a multiple
of `alignment`, which is `width`."""

comptime ElementwiseComputeLambda = def[
    dtype: DType, width: SIMDLength, *, alignment: Int = 1
](IndexList[2], SIMD[dtype, width]) capturing -> SIMD[dtype, width]
"""What to store instead of values at `[m, n]`; `alignment` as for
`ElementwiseLambda`."""


struct FusedOutput[
    Output: OutputTarget,
    elementwise_lambda_fn: Optional[ElementwiseLambda] = None,
    elementwise_compute_lambda_fn: Optional[ElementwiseComputeLambda] = None,
]:
    """An output with the work behind the epilogue.

    Given both functions, `elementwise_compute_lambda_fn` computes first, and
    `elementwise_lambda_fn` stores what it returned.

    Parameters:
        Output: The output, and what the graph compiler fused behind it.
        elementwise_lambda_fn: Stores values, instead of the kernel.
        elementwise_compute_lambda_fn: Changes values before they are stored.
    """

    comptime has_lambda = Bool(Self.elementwise_lambda_fn) or Bool(
        Self.elementwise_compute_lambda_fn
    )
    comptime stores = Self.Output.stores or Bool(Self.elementwise_lambda_fn)
    """Whether the work stores by itself: the output's memory stays as it is."""
    comptime computes = not Self.stores and (
        Self.Output.computes or Self.has_lambda
    )
    """Whether the work changes values before they are stored."""

    @staticmethod
    def refusal() -> String:
        """Why the work cannot be done; empty if it can."""
        comptime if Self.has_lambda and (
            Self.Output.computes or Self.Output.stores
        ):
            return String(
                t"Output: {Self.Output.get_type_name()} has work of the graph"
                t" compiler's behind it, which leaves no place for"
                t" elementwise_lambda_fn or elementwise_compute_lambda_fn; an"
                t" output in memory does"
            )
        return String()

    @staticmethod
    @always_inline
    def _lambda_value[
        width: Int
    ](place: IndexList[2], value: SIMD[Self.Output.dtype, width]) -> type_of(
        value
    ):
        """Values after `elementwise_compute_lambda_fn`, if it is given."""
        comptime if Self.elementwise_compute_lambda_fn:
            comptime compute = Self.elementwise_compute_lambda_fn.value()
            return compute[alignment=width](place, value)
        else:
            return value

    @staticmethod
    @always_inline
    def compute[
        width: Int
    ](
        output: Self.Output,
        shape: OutputShape,
        row: UInt32,
        filter: UInt32,
        value: SIMD[Self.Output.dtype, width],
    ) -> type_of(value):
        """What to store for neighbouring filters of one pixel.

        Parameters:
            width: How many; the first filter is a multiple of as many.

        Args:
            output: The output.
            shape: Its shape.
            row: The pixel, counted over all images.
            filter: The first filter.
            value: The rounded values.
        """
        comptime if Self.has_lambda:
            return Self._lambda_value[width](
                IndexList[2](Int(row), Int(filter)), value
            )
        else:
            var n, at = shape.index(row)
            return output.compute[width](n, at, Int(filter), value)

    @staticmethod
    @always_inline
    def store[
        width: Int
    ](
        output: Self.Output,
        shape: OutputShape,
        row: UInt32,
        filter: UInt32,
        filters: UInt32,
        value: SIMD[Self.Output.dtype, width],
    ):
        """Has the work store neighbouring filters of one pixel.

        Parameters:
            width: How many; the first filter is a multiple of as many.

        Args:
            output: The output.
            shape: Its shape.
            row: The pixel, counted over all images.
            filter: The first filter.
            filters: Of the problem.
            value: The rounded values.
        """
        comptime if Self.elementwise_lambda_fn:
            comptime save = Self.elementwise_lambda_fn.value()
            var place = IndexList[2](Int(row), Int(filter))
            save[alignment=width](
                place, Self._lambda_value[width](place, value)
            )
        else:
            var n, at = shape.index(row)
            output.store[width](
                n,
                at,
                Int(filter),
                Int(row) * Int(filters) + Int(filter),
                value,
            )
