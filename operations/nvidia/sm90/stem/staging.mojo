"""The producer of the Hopper stem kernel: the input pixels of a tile, as quads in
shared memory, with zeros for missing channels and outside the image.

Loads have a predicate rather than a branch, so that many are in flight.
"""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of
from std.sys.intrinsics import _RegisterPackType
from std.utils import StaticTuple

from ....conv.memory import Reads
from ...limits import WARPGROUP
from ...pipeline.chunks import shared_pointer
from ...pipeline.device_memory import prefetch_bytes
from ...tma.copy import SharedAddress
from .geometry import (
    PAIR_CHANNELS,
    PAIRS_TOGETHER,
    PARTS_TOGETHER,
    QUAD,
    QUAD_BYTES,
    QUADS_TOGETHER,
    STRIP_QUADS,
    STRIPS_TOGETHER,
    StemGeometry,
    StemTile,
)


@always_inline
def load_shared[
    dtype: DType, width: SIMDLength
](address: SharedAddress) -> SIMD[dtype, width]:
    """Reads shared memory at a multiple of the vector's bytes."""
    return shared_pointer[dtype](address).unsafe_load[
        width=width, alignment=Int(width) * size_of[dtype]()
    ](0)


@always_inline
def store_shared[
    dtype: DType, width: SIMDLength
](address: SharedAddress, value: SIMD[dtype, width]):
    """Writes shared memory at a multiple of the vector's bytes."""
    shared_pointer[dtype](address).unsafe_store[
        alignment=Int(width) * size_of[dtype]()
    ](0, value)


@always_inline
def load_element_if(condition: Bool, data: Reads) -> UInt16:
    """The bits of a 16-bit element of read-only memory, zeros unless the
    condition holds."""
    return inlined_assembly[
        "@$2 ld.global.nc.b16 $0, [$1];",
        UInt16,
        constraints="=h,l,b,0",
        has_side_effect=False,
    ](UInt64(Int(data)), condition, UInt16(0))


@always_inline
def load_two_if(condition: Bool, data: Reads) -> UInt32:
    """The bits of two 16-bit elements of read-only memory, zeros unless the
    condition holds.

    Args:
        condition: Whether to load.
        data: The first of them, at a multiple of 4 bytes.
    """
    return inlined_assembly[
        "@$2 ld.global.nc.b32 $0, [$1];",
        UInt32,
        constraints="=r,l,b,0",
        has_side_effect=False,
    ](UInt64(Int(data)), condition, UInt32(0))


@always_inline
def load_quad_if(condition: Bool, data: Reads) -> SIMD[DType.uint32, 2]:
    """The bits of a quad of read-only memory, zeros unless the condition
    holds."""
    var bits = inlined_assembly[
        "@$2 ld.global.nc.b64 $0, [$1];",
        UInt64,
        constraints="=l,l,b,0",
        has_side_effect=False,
    ](UInt64(Int(data)), condition, UInt64(0))
    return bitcast[DType.uint32, 2](bits)


@always_inline
def load_words_if(condition: Bool, data: Reads) -> SIMD[DType.uint32, 4]:
    """The bits of 16 bytes of read-only memory, zeros unless the condition
    holds.

    Args:
        condition: Whether to load.
        data: The first element, at a multiple of 16 bytes.
    """
    var words = inlined_assembly[
        "@$5 ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];",
        _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
        constraints="=r,=r,=r,=r,l,b,0,1,2,3",
    ](
        UInt64(Int(data)),
        condition,
        UInt32(0),
        UInt32(0),
        UInt32(0),
        UInt32(0),
    )
    return SIMD[DType.uint32, 4](words[0], words[1], words[2], words[3])


@always_inline
def load_shared_element_if(condition: Bool, address: SharedAddress) -> UInt16:
    """The bits of a 16-bit element of shared memory, zeros unless the condition
    holds."""
    return inlined_assembly[
        "@$2 ld.shared.b16 $0, [$1];",
        UInt16,
        constraints="=h,r,b,0,~{memory}",
    ](address, condition, UInt16(0))


@always_inline
def load_elements_if[
    dtype: DType
](condition: Bool, data: Reads[dtype], c: UInt32, channels: UInt32) -> SIMD[
    dtype, QUAD
]:
    """A quad whose channels are loaded one by one.

    Args:
        condition: Whether to load; zeros unless it holds.
        data: The first channel.
        c: Its number.
        channels: All there are; zeros for those beyond.
    """
    var values = SIMD[DType.uint16, QUAD](0)
    comptime for e in range(QUAD):
        values[e] = load_element_if(
            condition and c + UInt32(e) < channels, data.unsafe_offset(e)
        )
    return bitcast[dtype, QUAD](values)


@fieldwise_init
struct Span(TrivialRegisterPassable):
    """Staged rows or columns that are in the image."""

    var first: UInt32
    var count: UInt32

    @always_inline
    def __init__(out self, start: Int32, extent: Int32, staged: UInt32):
        """Finds them.

        Args:
            start: Of the first staged one in the image; may be outside.
            extent: Of the image.
            staged: How many are staged.
        """
        var first = max(-start, 0)
        self.first = UInt32(first)
        self.count = UInt32(max(min(extent - start, Int32(staged)) - first, 0))

    @always_inline
    def has(self, index: UInt32) -> Bool:
        """Whether it is one.

        Args:
            index: Of the staged ones, or what wrapped below 0.
        """
        return index - self.first < self.count


@fieldwise_init
struct StagedPlane[dtype: DType](TrivialRegisterPassable):
    """Input pixels of a tile in one plane of the image, and what stages them: a
    warpgroup.

    Parameters:
        dtype: Of the activation.
    """

    var first: Reads[Self.dtype]
    """Where the first pixel is, or would be."""
    var odd: UInt32
    """Whether odd many pixels come before it, 0 or 1."""
    var rows: Span
    var columns: Span
    """Of pixels."""
    var to: SharedAddress

    @always_inline
    def fill(self, geometry: StemGeometry, thread: UInt32):
        """Stages them.

        Args:
            geometry: The problem.
            thread: Of the warpgroup.
        """
        if geometry.channels == PAIR_CHANNELS:
            self._fill_pairs(geometry, thread)
        elif geometry.tap_channels != geometry.channels:
            self._fill_strips(geometry, thread)
        elif geometry.channels % QUAD == 0:
            self._fill_quads[True](geometry, thread)
        else:
            self._fill_quads[False](geometry, thread)

    @always_inline
    def prefetch(self, geometry: StemGeometry, thread: UInt32):
        """Asks for their rows in the L2, but for less than 16 bytes at an end.

        Args:
            geometry: The problem.
            thread: Of the warpgroup.
        """
        comptime bytes = UInt32(size_of[Self.dtype]())
        for i in range(thread, self.rows.count, UInt32(WARPGROUP)):
            var row = self.rows.first + i
            var pixel = row * UInt32(geometry.width) + self.columns.first
            var data = self.first.unsafe_offset(
                Int(Int32(pixel * geometry.channels))
            )
            var length = self.columns.count * geometry.channels * bytes
            prefetch_bytes(UInt64(Int(data)), length)

    @always_inline
    def _fill_pairs(self, geometry: StemGeometry, thread: UInt32):
        """Stages pixels of three channels two by two: pairs of 12 bytes that
        begin at a multiple of 4, wherever the row begins."""
        comptime batch = UInt32(PAIRS_TOGETHER * WARPGROUP)
        comptime Words = StaticTuple[UInt32, PAIRS_TOGETHER]
        comptime Halves = StaticTuple[UInt16, PAIRS_TOGETHER]
        comptime Flags = StaticTuple[Bool, PAIRS_TOGETHER]
        var width = UInt32(geometry.width)
        var staged = geometry.staged_quads
        var rows = geometry.staged_rows
        for start in range(
            thread, rows * geometry.staged_units.value + thread, batch
        ):
            var low = Words(fill=0)
            var low_end = Halves(fill=0)
            var high_start = Halves(fill=0)
            var high = Words(fill=0)
            var to = Words(fill=0)
            var has_low = Flags(fill=False)
            var has_high = Flags(fill=False)
            comptime for i in range(PAIRS_TOGETHER):
                var row, pair = geometry.staged_units.split(
                    start + UInt32(i * WARPGROUP)
                )
                # Rows of odd length begin at odd and at even pixels in turn.
                var shift = (self.odd + row * (width & 1)) & 1
                var column = 2 * pair - shift
                var inside = self.rows.has(row)
                var low_inside = inside and self.columns.has(column)
                var high_inside = inside and self.columns.has(column + 1)
                var data = self.first.unsafe_offset(
                    Int(Int32(row * width + column)) * PAIR_CHANNELS
                )
                low[i] = load_two_if(low_inside, data)
                low_end[i] = load_element_if(low_inside, data.unsafe_offset(2))
                high_start[i] = load_element_if(
                    high_inside, data.unsafe_offset(3)
                )
                high[i] = load_two_if(high_inside, data.unsafe_offset(4))
                to[i] = (
                    self.to + (row * geometry.row_quads + column) * QUAD_BYTES
                )
                has_low[i] = row < rows and column < staged.value
                has_high[i] = row < rows and column + 1 < staged.value
            comptime for i in range(PAIRS_TOGETHER):
                if has_low[i]:
                    store_shared(
                        to[i],
                        SIMD[DType.uint32, 2](low[i], UInt32(low_end[i])),
                    )
                if has_high[i]:
                    var middle = UInt32(high_start[i]) | (high[i] << 16)
                    store_shared(
                        to[i] + QUAD_BYTES,
                        SIMD[DType.uint32, 2](middle, high[i] >> 16),
                    )

    @always_inline
    def _fill_quads[whole: Bool](self, geometry: StemGeometry, thread: UInt32):
        """Stages quad by quad.

        Parameters:
            whole: Whether channels come in whole quads, which are loaded at
                once.
        """
        comptime together = QUADS_TOGETHER if whole else PARTS_TOGETHER
        comptime batch = UInt32(together * WARPGROUP)
        comptime Quads = StaticTuple[SIMD[Self.dtype, QUAD], together]
        var quads = geometry.staged_rows * geometry.staged_quads.value
        for start in range(thread, quads + thread, batch):
            var values = Quads(fill=SIMD[Self.dtype, QUAD](0))
            var to = StaticTuple[SharedAddress, together](fill=self.to)
            comptime for i in range(together):
                var row, quad = geometry.staged_quads.split(
                    start + UInt32(i * WARPGROUP)
                )
                to[i] = self.to + (row * geometry.row_quads + quad) * QUAD_BYTES
                var column = quad >> geometry.quad_shift
                var c = (quad - (column << geometry.quad_shift)) * QUAD
                var inside = self.rows.has(row) and self.columns.has(column)
                var pixel = row * UInt32(geometry.width) + column
                var data = self.first.unsafe_offset(
                    Int(Int32(pixel * geometry.channels + c))
                )
                comptime if whole:
                    values[i] = bitcast[Self.dtype, QUAD](
                        load_quad_if(inside, data)
                    )
                else:
                    values[i] = load_elements_if(
                        inside, data, c, geometry.channels
                    )
            comptime for i in range(together):
                if start + UInt32(i * WARPGROUP) < quads:
                    store_shared(to[i], bitcast[DType.uint32, 2](values[i]))

    @always_inline
    def _fill_strips(self, geometry: StemGeometry, thread: UInt32):
        """Stages strips of one channel: each element is loaded once and is in
        as many quads as a quad has columns."""
        comptime batch = UInt32(STRIPS_TOGETHER * WARPGROUP)
        comptime elements = STRIP_QUADS + QUAD - 1
        comptime Elements = SIMD[DType.uint16, 8]
        var strips = geometry.staged_rows * geometry.staged_units.value
        # What the second word of a quad keeps: columns that are taps.
        var kept = UInt32(0)
        if geometry.tap_channels > 2:
            kept = ~UInt32(0) if geometry.tap_channels > 3 else UInt32(0xFFFF)
        for start in range(thread, strips + thread, batch):
            var values = StaticTuple[Elements, STRIPS_TOGETHER](
                fill=Elements(0)
            )
            var to = StaticTuple[SharedAddress, STRIPS_TOGETHER](fill=self.to)
            comptime for i in range(STRIPS_TOGETHER):
                var row, strip = geometry.staged_units.split(
                    start + UInt32(i * WARPGROUP)
                )
                var column = strip * UInt32(STRIP_QUADS)
                to[i] = (
                    self.to + (row * geometry.row_quads + column) * QUAD_BYTES
                )
                var inside = self.rows.has(row)
                var data = self.first.unsafe_offset(
                    Int(Int32(row * UInt32(geometry.width) + column))
                )
                comptime for e in range(elements):
                    values[i][e] = load_element_if(
                        inside and self.columns.has(column + UInt32(e)),
                        data.unsafe_offset(e),
                    )
            comptime for i in range(STRIPS_TOGETHER):
                if start + UInt32(i * WARPGROUP) < strips:
                    _store_strip(to[i], values[i], kept)


@always_inline
def _store_strip(
    to: SharedAddress, values: SIMD[DType.uint16, 8], kept: UInt32
):
    """Stores the quads that begin with each of the first elements.

    Args:
        to: Where to, a multiple of 16 bytes.
        values: The bits of the elements.
        kept: What the second word of a quad keeps.
    """
    comptime words = STRIP_QUADS + 2
    var pairs = SIMD[DType.uint32, 8](0)
    comptime for e in range(words):
        pairs[e] = UInt32(values[e]) | (UInt32(values[e + 1]) << 16)
    comptime for quad in range(0, STRIP_QUADS, 2):
        store_shared(
            to + UInt32(quad * QUAD_BYTES),
            SIMD[DType.uint32, 4](
                pairs[quad],
                pairs[quad + 2] & kept,
                pairs[quad + 1],
                pairs[quad + 3] & kept,
            ),
        )


@always_inline
def visit_planes[
    staging: Bool
](
    activation: Reads,
    geometry: StemGeometry,
    tile: StemTile,
    stage: SharedAddress,
    thread: UInt32,
):
    """Stages the input pixels of a tile, or asks for them in the L2.

    Parameters:
        staging: Whether to stage.

    Args:
        activation: `[N, D, H, W, C]`.
        geometry: The problem.
        tile: Of output pixels.
        stage: Where to.
        thread: Of the warpgroup.
    """
    var h = Int32(tile.row) * geometry.step_h + geometry.start_h
    var w = Int32(tile.column) * geometry.step_w + geometry.start_w
    var z = Int32(tile.plane) * geometry.step_d + geometry.start_d
    var columns = Span(w, geometry.width, geometry.staged_columns)
    var to = stage
    for _ in range(geometry.taps_d):
        # A plane outside the image has no rows.
        var inside = UInt32(z) < UInt32(geometry.depth)
        var height = geometry.height if inside else 0
        var plane = Int(tile.image) * Int(geometry.depth) + Int(z)
        var line = plane * Int(geometry.height) + Int(h)
        var pixel = line * Int(geometry.width) + Int(w)
        var staged = StagedPlane(
            activation.unsafe_offset(pixel * Int(geometry.channels)),
            UInt32(pixel & 1),
            Span(h, height, geometry.staged_rows),
            columns,
            to,
        )
        comptime if staging:
            staged.fill(geometry, thread)
        else:
            staged.prefetch(geometry, thread)
        z += geometry.dilation_d
        to += geometry.staged_rows * geometry.row_quads * QUAD_BYTES
