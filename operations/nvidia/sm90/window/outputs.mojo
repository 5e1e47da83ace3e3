"""The epilogue and the stores of the Hopper window kernel, from registers."""

from std.memory import bitcast
from std.sys.info import size_of
from std.utils import IndexList, StaticTuple

from ....conv.access import OutputTarget
from ....conv.epilogue import Activation, Epilogue
from ....conv.fields import (
    ACTIVATION_NONE,
    ACTIVATION_RELU,
    ACTIVATION_SILU,
)
from ....conv.memory import Reads
from ....conv.problem import SPATIAL
from ...epilogue.activations import DeviceActivation, keep_branch
from ...run_time import run_time
from ...geometry import IMAGE, spatial
from ...pipeline.device_memory import prefetch_bytes
from .geometry import TilePlace, WindowGeometry
from .pixels import WindowPixel, WindowPixels, WindowThread
from .registers import (
    SumPieces,
    bits_of,
    opaque,
    rounded_to,
    set_value,
    settled,
    value_at,
)


comptime WORD_BYTES = 4

comptime GROUP = 4
"""Values of which other activations are evaluated at once."""

comptime FREQUENT = [ACTIVATION_SILU, ACTIVATION_NONE, ACTIVATION_RELU]
"""Activations of all values at once; others take a loop over them."""

comptime KEPT_COLUMNS = 32
"""Filters of a multiply, at most, of which a thread keeps the bias from tile to
tile, and loads all of the residual before the multiplies."""

comptime FEW_COLUMNS = 16
"""Filters of a multiply, at most, of which a thread loads the residual before
the multiplies also where it is float32, or element by element."""


struct WindowOutputs[
    bias_type: DType,
    residual_type: DType,
    Output: OutputTarget,
    columns: Int,
]:
    """The end of a multiply of 64 pixels.

    Where the filters in shared memory are in the order that `filter_map` makes,
    a thread has neighbouring filters of its two pixels, and loads and stores
    them at once: the four threads of a pixel store one run of bytes. Otherwise
    it does so one by one.

    Parameters:
        bias_type: Of the bias.
        residual_type: Of the residual.
        Output: How the output is reached.
        columns: Filters of the multiply.
    """

    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime Pieces = SumPieces[Self.columns]
    comptime Sums = Self.Pieces.Sums
    comptime vector = Self.Pieces.vector
    comptime pieces = Self.Pieces.count
    comptime Values = Self.Pieces.Values
    comptime Bias = SIMD[DType.float32, Self.columns // 4]
    """Of the thread's filters, part by part."""
    comptime vector_words = Self.vector * size_of[
        Self.residual_type
    ]() // WORD_BYTES
    comptime few = Self.columns <= FEW_COLUMNS
    """Whether registers hold addresses and words of single elements."""
    comptime early_words = Self.vector if Self.few else Self.vector_words
    comptime early_pieces = (
        Self.pieces if Self.columns <= KEPT_COLUMNS else Self.pieces // 2
    )
    """That registers hold beside a tile's sums."""
    comptime Early = StaticTuple[
        SIMD[DType.uint32, Self.early_words], Self.early_pieces
    ]
    """The residual, by pieces. As words: the compiler would convert values where
    they are loaded, and so wait for them there."""
    comptime keeps_bias = Self.columns <= KEPT_COLUMNS
    """Whether a thread has registers for its bias beside a tile's sums."""
    comptime placed = Self.Output.computes or Self.Output.stores
    """Whether stores ask where a pixel is."""

    @staticmethod
    @always_inline
    def prefetch_residual(
        epilogue: Self.FusedWork, geometry: WindowGeometry, place: TilePlace
    ):
        """Asks for a tile's residual in the L2; one thread.

        Args:
            epilogue: The epilogue.
            geometry: The problem.
            place: Of the tile.
        """
        if not epilogue.has_residual:
            return
        comptime size = size_of[Self.residual_type]()
        var pixels = min(geometry.tile_columns, geometry.columns - place.column)
        var bytes = UInt32(pixels) * geometry.filters.value * UInt32(size)
        var last = min(place.row + geometry.tile_rows, geometry.rows)
        for row in range(place.row, last):
            var line = place.plane * geometry.rows + row
            var index = UInt32(line * geometry.columns + place.column)
            var first = Int(UInt64(index) * UInt64(geometry.filters.value))
            prefetch_bytes(
                UInt64(Int(epilogue.residual.unsafe_offset(first))), bytes
            )

    @staticmethod
    @always_inline
    def bias(
        epilogue: Self.FusedWork,
        geometry: WindowGeometry,
        thread: WindowThread[Self.columns],
    ) -> Self.Bias:
        """What the thread's sums begin with.

        Args:
            epilogue: The epilogue.
            geometry: The problem.
            thread: The thread.
        """
        var bias = Self.Bias(0)
        if Self._begins_with_bias(epilogue):
            comptime for part in range(Self.pieces // 2):
                bias = bias.insert[offset=part * Self.vector](
                    Self._of_filters(
                        epilogue.bias, geometry, thread, UInt32(part)
                    )
                )
        var bits = bitcast[DType.uint32, Self.columns // 4](bias)
        comptime for i in range(Self.columns // 4):
            bits[i] = settled(bits[i], geometry.zero())
        return bitcast[DType.float32, Self.columns // 4](bits)

    @staticmethod
    @always_inline
    def begin(bias: Self.Bias) -> Self.Sums:
        """Sums of no products.

        Args:
            bias: What they begin with.
        """
        var sums = Self.Sums(fill=0)
        comptime for piece in range(Self.pieces):
            Self.Pieces.put[piece](
                sums, bias.slice[Self.vector, offset=piece // 2 * Self.vector]()
            )
        return sums

    @staticmethod
    @always_inline
    def load_early(
        epilogue: Self.FusedWork,
        geometry: WindowGeometry,
        pixels: WindowPixels,
        thread: WindowThread[Self.columns],
    ) -> Self.Early:
        """Loads the residual while the sums are not there yet, if registers
        hold it.

        Args:
            epilogue: The epilogue.
            geometry: The problem.
            pixels: The thread's.
            thread: The thread.
        """
        var early = Self.Early(fill=0)
        if not epilogue.has_residual:
            return early
        comptime for together in range(2):
            comptime if Self._is_early(together == 1):
                if geometry.together == Int32(together):
                    comptime for piece in range(Self.early_pieces):
                        early[piece] = early[piece].insert[offset=0](
                            Self._residual[piece, together == 1](
                                epilogue, geometry, pixels, thread
                            )
                        )
        return early

    @staticmethod
    @always_inline
    def changes(epilogue: Self.FusedWork) -> Bool:
        """Whether `finish` changes anything.

        Args:
            epilogue: The epilogue.
        """
        return (
            Self._scales(epilogue)
            or epilogue.has_residual
            or epilogue.activation.code != ACTIVATION_NONE
            or epilogue.final_activation.code != ACTIVATION_NONE
        )

    @staticmethod
    @always_inline
    def finish(
        epilogue: Self.FusedWork,
        geometry: WindowGeometry,
        mut sums: Self.Sums,
        early: Self.Early,
        pixels: WindowPixels,
        thread: WindowThread[Self.columns],
    ):
        """Applies the epilogue but for what the sums began with.

        Args:
            epilogue: The epilogue.
            geometry: The problem.
            sums: The thread's, of all products.
            early: What `load_early` returned.
            pixels: The thread's.
            thread: The thread.
        """
        if Self._scales(epilogue):
            Self._scale(epilogue, geometry, sums, thread)
        var steps = run_time(1)
        if (
            epilogue.has_residual
            or epilogue.final_activation.code != ACTIVATION_NONE
        ):
            steps += 1
        # A loop, so that what evaluates activations is compiled once.
        for step in range(steps):
            var activation = epilogue.activation
            if step > 0:
                activation = epilogue.final_activation
                if epilogue.has_residual:
                    Self._add_residual(
                        epilogue, geometry, sums, early, pixels, thread
                    )
            Self._activate(activation, sums)

    @staticmethod
    @always_inline
    def store(
        output: Self.Output,
        geometry: WindowGeometry,
        sums: Self.Sums,
        pixels: WindowPixels,
        thread: WindowThread[Self.columns],
    ):
        """Rounds the results, and stores what is in the image.

        Args:
            output: The output.
            geometry: The problem.
            sums: The thread's results.
            pixels: The thread's.
            thread: The thread.
        """
        comptime if Self.placed:
            # A loop, so that what is fused is compiled once.
            for piece in range(run_time(Self.pieces)):
                var pixel = pixels.upper
                if piece % 2 == 1:
                    pixel = pixels.lower
                Self._store_placed(
                    output,
                    geometry,
                    pixel,
                    thread,
                    piece // 2,
                    Self.Pieces.chosen(sums, piece),
                )
        else:
            comptime for piece in range(Self.pieces):
                Self._store_plain(
                    output,
                    geometry,
                    pixels.of[piece % 2](),
                    thread,
                    UInt32(piece // 2),
                    Self.Pieces.of[piece](sums),
                )

    @staticmethod
    @always_inline
    def _begins_with_bias(epilogue: Self.FusedWork) -> Bool:
        """Whether sums begin with the bias: it is not scaled."""
        comptime if Self.keeps_bias:
            return epilogue.has_bias and not epilogue.has_scale
        return False

    @staticmethod
    @always_inline
    def _scales(epilogue: Self.FusedWork) -> Bool:
        """Whether sums are scaled, or get the bias at their end."""
        return epilogue.has_scale or (
            epilogue.has_bias and not Self._begins_with_bias(epilogue)
        )

    @staticmethod
    @always_inline
    def _part(part: UInt32) -> UInt32:
        """From a thread's first filter to its first one of a part."""
        return part * UInt32(4 * Self.vector)

    @staticmethod
    @always_inline
    def _single(part: UInt32, i: UInt32) -> UInt32:
        """From a thread's first filter to a value's of a part, where it has pairs
        of neighbours 8 apart."""
        return Self._part(part) + (i // 2 * 8 + i % 2)

    @staticmethod
    @always_inline
    def _offset(
        geometry: WindowGeometry,
        pixel: WindowPixel,
        thread: WindowThread[Self.columns],
    ) -> Int:
        """The offset of the output's element of a thread's first filter."""
        return Int(
            UInt64(pixel.index) * UInt64(geometry.filters.value)
            + UInt64(thread.first)
        )

    @staticmethod
    @always_inline
    def _of_filters[
        dtype: DType
    ](
        data: Reads[dtype],
        geometry: WindowGeometry,
        thread: WindowThread[Self.columns],
        part: UInt32,
    ) -> Self.Values:
        """One number a filter of a part, 0 beyond the last filter."""
        var values = Self.Values(0)
        if geometry.together == 1:
            comptime bytes = Self.vector * size_of[dtype]()
            var k = thread.first + Self._part(part)
            if k < geometry.filters.value:
                values = data.unsafe_load[width=Self.vector, alignment=bytes](
                    Int(k)
                ).cast[DType.float32]()
        else:
            for i in range(run_time(Self.vector)):
                var k = thread.first + Self._single(part, i)
                if k < geometry.filters.value:
                    var value = data.unsafe_load(Int(k)).cast[DType.float32]()
                    set_value(values, i, value)
        return values

    @staticmethod
    @always_inline
    def _scale(
        epilogue: Self.FusedWork,
        geometry: WindowGeometry,
        mut sums: Self.Sums,
        thread: WindowThread[Self.columns],
    ):
        """Scales the sums, and adds the bias that they did not begin with."""
        comptime for part in range(Self.pieces // 2):
            comptime upper = 2 * part
            var scale = Self.Values(1)
            if epilogue.has_scale:
                scale = Self._of_filters(
                    epilogue.scale, geometry, thread, UInt32(part)
                )
            var bias = Self.Values(0)
            if epilogue.has_bias:
                bias = Self._of_filters(
                    epilogue.bias, geometry, thread, UInt32(part)
                )
            comptime for piece in range(upper, upper + 2):
                Self.Pieces.put[piece](
                    sums, Self.Pieces.of[piece](sums) * scale + bias
                )

    @staticmethod
    def _is_early(together: Bool) -> Bool:
        """Whether registers hold words of a residual before the multiplies."""
        return Self.few or (together and Self.residual_type.is_half_float())

    @staticmethod
    @always_inline
    def _words_of(together: Bool) -> Int:
        """Words of a piece's residual: its bytes, or a word an element."""
        return Self.vector_words if together else Self.vector

    @staticmethod
    @always_inline
    def _residual[
        piece: Int, together: Bool
    ](
        epilogue: Self.FusedWork,
        geometry: WindowGeometry,
        pixels: WindowPixels,
        thread: WindowThread[Self.columns],
    ) -> SIMD[DType.uint32, Self._words_of(together)]:
        """The residual of a piece, 0 where there is none."""
        comptime part = UInt32(piece // 2)
        comptime bytes = Self.vector * size_of[Self.residual_type]()
        comptime count = Self._words_of(together)
        var words = SIMD[DType.uint32, count](0)
        var pixel = pixels.of[piece % 2]()
        var data = epilogue.residual.unsafe_offset(
            Self._offset(geometry, pixel, thread)
        )
        comptime if together:
            comptime at = Self._part(part)
            if at < pixel.filters:
                words = bitcast[DType.uint32, count](
                    data.unsafe_load[width=Self.vector, alignment=bytes](
                        Int(at)
                    )
                )
        elif Self.few:
            comptime for i in range(Self.vector):
                comptime at = Self._single(part, UInt32(i))
                if at < pixel.filters:
                    words[i] = bits_of(data.unsafe_load(Int(at)))
        else:
            for i in range(run_time(Self.vector)):
                var at = Self._single(part, i)
                if at < pixel.filters:
                    set_value(words, i, bits_of(data.unsafe_load(Int(at))))
        return words

    @staticmethod
    @always_inline
    def _numbers[
        together: Bool
    ](words: SIMD[DType.uint32, Self._words_of(together)]) -> Self.Values:
        """The residual of a piece as numbers."""
        comptime single = size_of[Self.residual_type]() < WORD_BYTES
        var bits = words
        comptime for i in range(Self._words_of(together)):
            bits[i] = opaque(words[i])
        comptime if single and not together:
            return bitcast[Self.residual_type, Self.vector](
                bits.cast[DType.uint16]()
            ).cast[DType.float32]()
        else:
            return bitcast[Self.residual_type, Self.vector](bits).cast[
                DType.float32
            ]()

    @staticmethod
    @always_inline
    def _add_residual(
        epilogue: Self.FusedWork,
        geometry: WindowGeometry,
        mut sums: Self.Sums,
        early: Self.Early,
        pixels: WindowPixels,
        thread: WindowThread[Self.columns],
    ):
        """Adds the residual, as much of it as the epilogue says."""
        comptime for together in range(2):
            comptime count = Self._words_of(together == 1)
            if geometry.together == Int32(together):
                comptime for piece in range(Self.pieces):
                    var words: SIMD[DType.uint32, count]
                    comptime if (
                        Self._is_early(together == 1)
                        and piece < Self.early_pieces
                    ):
                        words = early[piece].slice[count]()
                    else:
                        words = Self._residual[piece, together == 1](
                            epilogue, geometry, pixels, thread
                        )
                    var values = Self._numbers[together == 1](words).fma(
                        Self.Values(epilogue.beta), Self.Pieces.of[piece](sums)
                    )
                    Self.Pieces.put[piece](sums, values)

    @staticmethod
    @always_inline
    def _activate(activation: Activation, mut sums: Self.Sums):
        """Applies an activation: to all values at once, if it is frequent."""
        comptime exact = not Self.Output.dtype.is_half_float()
        comptime for i in range(len(FREQUENT)):
            comptime code = FREQUENT[i]
            if activation.code == code:
                keep_branch()
                comptime function = DeviceActivation.of(Activation(code, 0, 0))
                comptime for piece in range(Self.pieces):
                    Self.Pieces.put[piece](
                        sums,
                        function.evaluate[function.formula, exact=exact](
                            Self.Pieces.of[piece](sums)
                        ),
                    )
                return
            # Keeps the compiler from making a table of jumps of them all.
            keep_branch()
        var function = DeviceActivation.of(activation)
        # A loop, so that the formulas are compiled once, and of few values, so
        # that registers hold what they compute.
        comptime groups = Self.columns // 2 // GROUP
        for group in range(run_time(groups)):
            var values = SIMD[DType.float32, GROUP](0)
            comptime for other in range(groups):
                if group == UInt32(other):
                    comptime for i in range(GROUP):
                        values[i] = sums[GROUP * other + i]
            values = function.apply[GROUP, exact=exact](values)
            comptime for other in range(groups):
                if group == UInt32(other):
                    comptime for i in range(GROUP):
                        sums[GROUP * other + i] = values[i]

    @staticmethod
    @always_inline
    def _store_plain(
        output: Self.Output,
        geometry: WindowGeometry,
        pixel: WindowPixel,
        thread: WindowThread[Self.columns],
        part: UInt32,
        values: Self.Values,
    ):
        """Stores a pixel's outputs of a part: at once, or one by one."""
        comptime bytes = Self.vector * size_of[Self.Output.dtype]()
        var data = output.data().unsafe_offset(
            Self._offset(geometry, pixel, thread)
        )
        var rounded = rounded_to[Self.Output.dtype](values)
        if geometry.together == 1:
            var at = Self._part(part)
            if at < pixel.filters:
                data.unsafe_store[alignment=bytes](Int(at), rounded)
            return
        comptime if Self.few:
            comptime for i in range(Self.vector):
                var at = Self._single(part, UInt32(i))
                if at < pixel.filters:
                    data.unsafe_store(Int(at), rounded[i])
        else:
            for i in range(run_time(Self.vector)):
                var at = Self._single(part, i)
                if at < pixel.filters:
                    data.unsafe_store(Int(at), value_at(rounded, i))

    @staticmethod
    @always_inline
    def _store_placed(
        output: Self.Output,
        geometry: WindowGeometry,
        pixel: WindowPixel,
        thread: WindowThread[Self.columns],
        part: UInt32,
        values: Self.Values,
    ):
        """The same for what is fused, which asks where a pixel is."""
        var position = geometry.position(pixel.index)
        var n, place = Int(position[IMAGE]), spatial(position)
        var offset = Self._offset(geometry, pixel, thread)
        var rounded = rounded_to[Self.Output.dtype](values)
        if geometry.together == 1:
            var at = Self._part(part)
            if at < pixel.filters:
                output.store[Self.vector](
                    n, place, Int(thread.first + at), offset + Int(at), rounded
                )
            return
        for i in range(run_time(Self.vector)):
            var at = Self._single(part, i)
            if at < pixel.filters:
                output.store[1](
                    n,
                    place,
                    Int(thread.first + at),
                    offset + Int(at),
                    value_at(rounded, i),
                )
