"""The epilogue and the stores of the Hopper window kernel, from registers."""

from std.sys.info import size_of
from std.utils import IndexList, StaticTuple

from ....conv.access import OutputTarget
from ....conv.epilogue import Epilogue
from ....conv.fields import ACTIVATION_NONE
from ....conv.problem import SPATIAL
from ...epilogue.activations import DeviceActivation, run_time
from ...geometry import IMAGE, spatial
from ...limits import WARP
from .geometry import TilePlace, WindowGeometry
from .tiling import neighbours


comptime EARLY_BYTES = 32
"""Of a thread's residual, at most, that is loaded before the multiplies."""


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
    comptime Rounded = SIMD[Self.Output.dtype, Self.vector]
    comptime Early = StaticTuple[Self.Residual, Self.pieces]
    comptime loads_early = Self.pieces * Self.vector * size_of[
        Self.residual_type
    ]() <= EARLY_BYTES
    comptime placed = Self.Output.computes or Self.Output.stores
    """Whether stores ask where a pixel is."""

    @staticmethod
    @always_inline
    def load_early(
        epilogue: Self.FusedWork,
        geometry: WindowGeometry,
        place: TilePlace,
        thread: UInt32,
    ) -> Self.Early:
        """Loads the residual, if it is little and the thread has neighbouring
        filters, while the sums are not there yet.

        Args:
            epilogue: The epilogue.
            geometry: The problem.
            place: Of the multiply's first pixel.
            thread: Of the warpgroup.
        """
        var early = Self.Early(fill=0)
        comptime if Self.loads_early:
            if epilogue.has_residual and geometry.together == 1:
                comptime for piece in range(Self.pieces):
                    early[piece] = Self._residual(
                        epilogue,
                        geometry,
                        WindowPixel(geometry, place, thread, Int32(piece % 2)),
                        thread,
                        UInt32(piece // 2),
                    )
        return early

    @staticmethod
    @always_inline
    def store(
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: WindowGeometry,
        sums: Self.Sums,
        early: Self.Early,
        place: TilePlace,
        thread: UInt32,
    ):
        """Applies the epilogue, and stores what is in the image.

        Args:
            epilogue: The epilogue.
            output: The output.
            geometry: The problem.
            sums: The thread's.
            early: What `load_early` returned.
            place: Of the multiply's first pixel.
            thread: Of the warpgroup.
        """
        var upper = WindowPixel(geometry, place, thread, 0)
        var lower = WindowPixel(geometry, place, thread, 1)
        comptime if not Self.placed:
            if epilogue.is_identity():
                comptime for piece in range(Self.pieces):
                    Self._store_pixel(
                        output,
                        geometry,
                        upper if piece % 2 == 0 else lower,
                        thread,
                        UInt32(piece // 2),
                        Self._of_piece(sums, piece).cast[Self.Output.dtype](),
                    )
                return
        var following = Self.Residual(0)
        # A loop, so that what evaluates the epilogue is compiled once.
        for piece in range(run_time(Self.pieces)):
            var values = Self._of_piece(sums, 0)
            var residual = early[0]
            comptime for other in range(1, Self.pieces):
                if piece == UInt32(other):
                    values = Self._of_piece(sums, other)
                    residual = early[other]
            var pixel = upper if piece % 2 == 0 else lower
            var part = piece // 2
            comptime if Self.loads_early:
                if geometry.together == 0:
                    residual = Self._residual(
                        epilogue, geometry, pixel, thread, part
                    )
            else:
                # Of both pixels together.
                residual = following
                if piece % 2 == 0:
                    residual = Self._residual(
                        epilogue, geometry, upper, thread, part
                    )
                    following = Self._residual(
                        epilogue, geometry, lower, thread, part
                    )
            if pixel.exists:
                Self._store_pixel(
                    output,
                    geometry,
                    pixel,
                    thread,
                    part,
                    Self._finish(
                        epilogue, geometry, thread, part, values, residual
                    ),
                )

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
    def _filter[
        i: Int
    ](geometry: WindowGeometry, thread: UInt32, part: UInt32) -> UInt32:
        """The filter of value `i` of a part's vector: neighbours, or pairs of
        neighbours 8 apart."""
        if geometry.together == 1:
            return (part * 4 + thread % 4) * UInt32(Self.vector) + UInt32(i)
        return (
            part * UInt32(4 * Self.vector)
            + thread % 4 * 2
            + UInt32(i // 2 * 8 + i % 2)
        )

    @staticmethod
    @always_inline
    def _offset(geometry: WindowGeometry, pixel: WindowPixel, k: UInt32) -> Int:
        """The offset of an output element."""
        return pixel.index * Int(geometry.filters.value) + Int(k)

    @staticmethod
    @always_inline
    def _finish(
        epilogue: Self.FusedWork,
        geometry: WindowGeometry,
        thread: UInt32,
        part: UInt32,
        sums: Self.Values,
        residual: Self.Residual,
    ) -> Self.Rounded:
        """The epilogue of a pixel's part, rounded."""
        comptime exact = not Self.Output.dtype.is_half_float()
        var values = Self._biased(epilogue, geometry, thread, part, sums)
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
    def _residual(
        epilogue: Self.FusedWork,
        geometry: WindowGeometry,
        pixel: WindowPixel,
        thread: UInt32,
        part: UInt32,
    ) -> Self.Residual:
        """The residual of a pixel's part, 0 where there is none."""
        var residual = Self.Residual(0)
        if not (epilogue.has_residual and pixel.exists):
            return residual
        if geometry.together == 1:
            var k = Self._filter[0](geometry, thread, part)
            if k < geometry.filters.value:
                residual = epilogue.load_residual[Self.vector, Self.vector](
                    Self._offset(geometry, pixel, k)
                )
        else:
            comptime for i in range(Self.vector):
                var k = Self._filter[i](geometry, thread, part)
                if k < geometry.filters.value:
                    residual[i] = epilogue.load_residual[1](
                        Self._offset(geometry, pixel, k)
                    )[0]
        return residual

    @staticmethod
    @always_inline
    def _biased(
        epilogue: Self.FusedWork,
        geometry: WindowGeometry,
        thread: UInt32,
        part: UInt32,
        sums: Self.Values,
    ) -> Self.Values:
        """The sums of a part with scale and bias."""
        var values = sums
        if geometry.together == 1:
            var k = Self._filter[0](geometry, thread, part)
            if k < geometry.filters.value:
                values = epilogue.scaled[Self.vector, Self.vector](
                    values, Int(k)
                )
                values += epilogue.load_bias[Self.vector, Self.vector](Int(k))
        else:
            comptime for i in range(Self.vector):
                var k = Self._filter[i](geometry, thread, part)
                if k < geometry.filters.value:
                    values[i] = epilogue.scaled[1](values[i], Int(k))[0]
                    values[i] += epilogue.load_bias[1](Int(k))[0]
        return values

    @staticmethod
    @always_inline
    def _store_pixel(
        output: Self.Output,
        geometry: WindowGeometry,
        pixel: WindowPixel,
        thread: UInt32,
        part: UInt32,
        values: Self.Rounded,
    ):
        """Stores a pixel's outputs of a part: at once, or one by one."""
        if not pixel.exists:
            return
        # Only what is fused asks where a pixel is.
        var position = geometry.position(
            UInt32(pixel.index)
        ) if Self.placed else 0
        if geometry.together == 1:
            var k = Self._filter[0](geometry, thread, part)
            if k < geometry.filters.value:
                output.store[Self.vector](
                    Int(position[IMAGE]),
                    spatial(position),
                    Int(k),
                    Self._offset(geometry, pixel, k),
                    values,
                )
            return
        comptime if Self.placed:
            for at in range(run_time(Self.vector)):
                var value = values[0]
                comptime for i in range(1, Self.vector):
                    value = values[i] if at == UInt32(i) else value
                var k = Self._filter[0](geometry, thread, part)
                k += at // 2 * 8 + at % 2
                if k < geometry.filters.value:
                    output.store[1](
                        Int(position[IMAGE]),
                        spatial(position),
                        Int(k),
                        Self._offset(geometry, pixel, k),
                        value,
                    )
        else:
            comptime for i in range(Self.vector):
                var k = Self._filter[i](geometry, thread, part)
                if k < geometry.filters.value:
                    output.store[1](
                        0,
                        IndexList[SPATIAL](0),
                        Int(k),
                        Self._offset(geometry, pixel, k),
                        values[i],
                    )
