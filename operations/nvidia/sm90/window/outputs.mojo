"""The epilogue and the stores of the Hopper window kernel, from registers."""

from std.sys.info import size_of
from std.utils import StaticTuple

from ....conv.access import OutputTarget
from ....conv.epilogue import Epilogue
from ....conv.fields import ACTIVATION_NONE
from ...epilogue.activations import DeviceActivation, run_time
from ...geometry import IMAGE, spatial
from ...limits import WARP
from .geometry import TilePlace, WindowGeometry
from .tiling import neighbours

comptime EARLY_BYTES = 32
"""Of a thread's residual, at most, that is loaded before the first of it is
added."""


@fieldwise_init
struct WindowPixel(TrivialRegisterPassable):
    """An output pixel of a thread."""

    var exists: Bool
    """Whether it is in the image."""
    var index: Int
    """Counted over all images."""

    @always_inline
    def __init__(
        out self,
        geometry: WindowGeometry,
        place: TilePlace,
        thread: UInt32,
        half: Int32,
    ):
        """Finds it.

        Args:
            geometry: The problem.
            place: Of the multiply's first pixel.
            thread: Of the warpgroup.
            half: 0 for the upper one, 1 for the one 8 rows of the multiply
                below.
        """
        var warp, lane = divmod(Int32(thread), Int32(WARP))
        var row = (
            place.row + warp * geometry.warp_rows + half * geometry.half_rows
        )
        var column = (
            place.column
            + warp * geometry.warp_columns
            + half * geometry.half_columns
            + lane // 4
        )
        var line = Int(place.plane) * Int(geometry.rows) + Int(row)
        self.exists = row < geometry.rows and column < geometry.columns
        self.index = line * Int(geometry.columns) + Int(column)


struct WindowOutputs[
    bias_type: DType,
    residual_type: DType,
    Output: OutputTarget,
    columns: Int,
]:
    """The end of a multiply of 64 pixels.

    Where the filters in shared memory are in the order that `filter_map` makes,
    a thread has neighbouring filters of its two pixels, and stores them at once:
    the four threads of a pixel store one run of bytes. Otherwise it loads and
    stores one by one.

    Parameters:
        bias_type: Of the bias.
        residual_type: Of the residual.
        Output: How the output is reached.
        columns: Filters of the multiply.
    """

    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime Sums = StaticTuple[Float32, Self.columns // 2]
    comptime vector = neighbours(Self.columns)
    comptime pieces = Self.columns // (2 * Self.vector)
    """Vectors that a thread has: of each part of the filters, those of its upper
    pixel and of its lower one."""
    comptime Values = SIMD[DType.float32, Self.vector]
    comptime Residual = SIMD[Self.residual_type, Self.vector]
    comptime Early = StaticTuple[Self.Residual, Self.pieces]
    comptime loads_early = Self.pieces * Self.vector * size_of[
        Self.residual_type
    ]() <= EARLY_BYTES
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
        var early = Self.Early(fill=0)
        comptime if Self.loads_early:
            if epilogue.has_residual and geometry.together == 1:
                comptime for piece in range(Self.pieces):
                    var pixel = WindowPixel(
                        geometry, place, thread, Int32(piece % 2)
                    )
                    var k = Self._filter(thread, UInt32(piece // 2))
                    if pixel.exists and k < geometry.filters.value:
                        early[piece] = epilogue.load_residual[
                            Self.vector, Self.vector
                        ](Self._offset(geometry, pixel, k))
        # A loop, so that what evaluates the epilogue is compiled once.
        for piece in range(run_time(Self.pieces)):
            var pixel = WindowPixel(geometry, place, thread, Int32(piece % 2))
            var values = Self._of_piece(sums, 0)
            var residual = early[0]
            comptime for other in range(1, Self.pieces):
                if piece == UInt32(other):
                    values = Self._of_piece(sums, other)
                    residual = early[other]
            if not pixel.exists:
                continue
            if geometry.together == 1:
                var k = Self._filter(thread, piece // 2)
                if k < geometry.filters.value:
                    Self._store_vector(
                        epilogue, output, geometry, pixel, k, values, residual
                    )
            else:
                Self._store_singly(
                    epilogue,
                    output,
                    geometry,
                    pixel,
                    piece // 2 * UInt32(4 * Self.vector) + thread % 4 * 2,
                    values,
                )

    @staticmethod
    @always_inline
    def _filter(thread: UInt32, part: UInt32) -> UInt32:
        """The first filter of a thread's neighbours."""
        return (part * 4 + thread % 4) * UInt32(Self.vector)

    @staticmethod
    @always_inline
    def _offset(geometry: WindowGeometry, pixel: WindowPixel, k: UInt32) -> Int:
        """The offset of an output element."""
        return pixel.index * Int(geometry.filters.value) + Int(k)

    @staticmethod
    @always_inline
    def _of_piece(sums: Self.Sums, piece: Int) -> Self.Values:
        """The sums of a piece; columns `8*j + 2*t` and the next for each j."""
        var values = Self.Values(0)
        comptime for i in range(Self.vector):
            var j = piece // 2 * (Self.vector // 2) + i // 2
            values[i] = sums[4 * j + 2 * (piece % 2) + i % 2]
        return values

    @staticmethod
    @always_inline
    def _finish(
        epilogue: Self.FusedWork, sums: Self.Values, residual: Self.Residual
    ) -> SIMD[Self.Output.dtype, Self.vector]:
        """What follows scale and bias, and the rounding."""
        comptime exact = not Self.Output.dtype.is_half_float()
        var values = sums
        var steps = run_time(1)
        if (
            epilogue.has_residual
            or epilogue.final_activation.code != ACTIVATION_NONE
        ):
            steps += 1
        for step in range(steps):
            var activation = epilogue.activation
            if step > 0:
                activation = epilogue.final_activation
                if epilogue.has_residual:
                    values = residual.cast[DType.float32]().fma(
                        Self.Values(epilogue.beta), values
                    )
            values = DeviceActivation.of(activation).apply[exact=exact](values)
        return values.cast[Self.Output.dtype]()

    @staticmethod
    @always_inline
    def _store_vector(
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: WindowGeometry,
        pixel: WindowPixel,
        k: UInt32,
        sums: Self.Values,
        early: Self.Residual,
    ):
        """The epilogue of neighbouring filters of a pixel, and their store."""
        comptime vector = Self.vector
        var offset = Self._offset(geometry, pixel, k)
        var residual = early
        comptime if not Self.loads_early:
            residual = epilogue.load_residual[vector, vector](offset)
        var values = epilogue.scaled[vector, vector](sums, Int(k))
        values += epilogue.load_bias[vector, vector](Int(k))
        # Only what is fused asks where a pixel is.
        var position = geometry.position(
            UInt32(pixel.index)
        ) if Self.placed else 0
        output.store[vector](
            Int(position[IMAGE]),
            spatial(position),
            Int(k),
            offset,
            Self._finish(epilogue, values, residual),
        )

    @staticmethod
    @always_inline
    def _store_singly(
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: WindowGeometry,
        pixel: WindowPixel,
        first: UInt32,
        sums: Self.Values,
    ):
        """The epilogue of filters of a pixel, pairs of neighbours 8 apart, and
        their stores."""
        var filters = geometry.filters.value
        var values = sums
        var residual = Self.Residual(0)
        comptime for i in range(Self.vector):
            var k = first + UInt32(i // 2 * 8 + i % 2)
            if k < filters:
                values[i] = epilogue.scaled[1](values[i], Int(k))[0]
                values[i] += epilogue.load_bias[1](Int(k))[0]
                residual[i] = epilogue.load_residual[1](
                    Self._offset(geometry, pixel, k)
                )[0]
        var rounded = Self._finish(epilogue, values, residual)
        var position = geometry.position(
            UInt32(pixel.index)
        ) if Self.placed else 0
        for at in range(run_time(Self.vector)):
            var value = rounded[0]
            comptime for i in range(1, Self.vector):
                value = rounded[i] if at == UInt32(i) else value
            var k = first + at // 2 * 8 + at % 2
            if k < filters:
                output.store[1](
                    Int(position[IMAGE]),
                    spatial(position),
                    Int(k),
                    Self._offset(geometry, pixel, k),
                    value,
                )
