"""The epilogue and the stores of the Hopper window kernel, from registers."""

from std.utils import StaticTuple

from ....conv.access import OutputTarget
from ....conv.epilogue import Epilogue
from ...geometry import IMAGE, spatial
from ...limits import WARP
from .geometry import TilePlace, WindowGeometry
from .tiling import neighbours


struct WindowOutputs[
    bias_type: DType,
    residual_type: DType,
    Output: OutputTarget,
    columns: Int,
]:
    """The end of a multiply of 64 pixels.

    Where the filters in shared memory are in the order that `filter_map` makes,
    a thread has neighbouring filters of its two pixels, and stores them at once:
    the four threads of a pixel store one run of bytes. Otherwise it stores one
    by one.

    Parameters:
        bias_type: Of the bias.
        residual_type: Of the residual.
        Output: How the output is reached.
        columns: Filters of the multiply.
    """

    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime Sums = StaticTuple[Float32, Self.columns // 2]
    comptime vector = neighbours(Self.columns)
    comptime parts = Self.columns // (4 * Self.vector)
    """Vectors of a pixel that a thread has."""
    comptime placed = Self.Output.computes or Self.Output.stores
    """Whether stores ask where a pixel is."""

    @staticmethod
    @always_inline
    def store(
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: WindowGeometry,
        sums: Self.Sums,
        place: TilePlace,
        thread: UInt32,
    ):
        """Applies the epilogue, and stores what is in the image.

        Args:
            epilogue: The epilogue.
            output: The output.
            geometry: The problem.
            sums: The thread's.
            place: Of the multiply's first pixel.
            thread: Of the warpgroup.
        """
        var warp, lane = divmod(thread, UInt32(WARP))
        var row = place.row + Int32(warp) * geometry.warp_rows
        var column = (
            place.column
            + Int32(warp) * geometry.warp_columns
            + Int32(lane // 4)
        )
        var filters = geometry.filters.value
        comptime for half in range(2):
            if row < geometry.rows and column < geometry.columns:
                var line = Int(place.plane) * Int(geometry.rows) + Int(row)
                var pixel = line * Int(geometry.columns) + Int(column)
                if geometry.together == 1:
                    comptime for part in range(Self.parts):
                        var k = (UInt32(part * 4) + lane % 4) * UInt32(
                            Self.vector
                        )
                        if k < filters:
                            var values = SIMD[DType.float32, Self.vector](0)
                            comptime for i in range(Self.vector):
                                comptime j = part * Self.vector // 2 + i // 2
                                values[i] = sums[4 * j + 2 * half + i % 2]
                            Self._store[Self.vector](
                                epilogue, output, geometry, pixel, k, values
                            )
                else:
                    Self._store_singly[half](
                        epilogue, output, geometry, sums, pixel, lane
                    )
            row += geometry.half_rows
            column += geometry.half_columns

    @staticmethod
    @always_inline
    def _store_singly[
        half: Int
    ](
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: WindowGeometry,
        sums: Self.Sums,
        pixel: Int,
        lane: UInt32,
    ):
        """Stores one filter after the other; a loop, so that what evaluates the
        epilogue is compiled once."""
        comptime count = Self.columns // 4
        for at in range(UInt32(count)):
            var value = sums[2 * half]
            comptime for i in range(1, count):
                comptime r = 4 * (i // 2) + 2 * half + i % 2
                value = sums[r] if at == UInt32(i) else value
            var k = at // 2 * 8 + lane % 4 * 2 + at % 2
            if k < geometry.filters.value:
                Self._store[1](epilogue, output, geometry, pixel, k, value)

    @staticmethod
    @always_inline
    def _store[
        width: Int
    ](
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: WindowGeometry,
        pixel: Int,
        k: UInt32,
        sums: SIMD[DType.float32, width],
    ):
        """The epilogue of neighbouring filters of a pixel, and their store."""
        var offset = pixel * Int(geometry.filters.value) + Int(k)
        var value = epilogue.apply[width, width](sums, Int(k), offset)
        # Only what is fused asks where a pixel is.
        var position = geometry.position(UInt32(pixel)) if Self.placed else 0
        output.store[width](
            Int(position[IMAGE]),
            spatial(position),
            Int(k),
            offset,
            value.cast[Self.Output.dtype](),
        )
