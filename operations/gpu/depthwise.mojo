"""The GPU's depthwise kernel: one input channel a filter, so that a thread
multiplies what it loads with no other thread's help."""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.memory import external_memory
from max.gpu.sync import barrier
from std.utils import IndexList, StaticTuple

from ..conv.access import ActivationSource, OutputTarget
from ..conv.epilogue import Epilogue
from ..conv.memory import Reads
from ..conv.problem import SPATIAL
from .depthwise_geometry import (
    THREADS,
    DepthwiseConfig,
    DepthwiseGeometry,
)


@fieldwise_init
struct Item(TrivialRegisterPassable):
    """The output pixels that a thread computes together: the first of them,
    and its first input pixel."""

    var image: Int
    var plane: UInt32
    var row: UInt32
    var column: UInt32
    var d: Int32
    var h: Int32
    var w: Int32

    @staticmethod
    @always_inline
    def of[
        config: DepthwiseConfig
    ](geometry: DepthwiseGeometry, index: UInt32) -> Item:
        """Where an item lies.

        Parameters:
            config: The configuration.

        Args:
            geometry: The problem.
            index: Of the item.
        """
        var across, w = geometry.items_w.split(index)
        var down, h = geometry.items_h.split(across)
        var image, plane = geometry.out_planes.split(down)
        var row = h * UInt32(config.rows())
        var column = w * UInt32(config.columns())
        return Item(
            Int(image),
            plane,
            row,
            column,
            Int32(plane) * geometry.step_d + geometry.start_d,
            Int32(row) * geometry.step_h + geometry.start_h,
            Int32(column) * geometry.step_w + geometry.start_w,
        )


@always_inline
def _nearest(at: Int32, extent: Int32) -> Int32:
    """The nearest of the coordinates from 0 to `extent - 1`."""
    return max(Int32(0), min(at, extent - 1))


@fieldwise_init
struct InputRow(TrivialRegisterPassable):
    """A row of an image."""

    var image: Int
    var d: Int32
    var h: Int32
    var inside: Bool
    """Whether there is such a row; otherwise this is the nearest."""
    var offset: Int
    """Of its first element."""

    @staticmethod
    @always_inline
    def of[
        checked: Bool
    ](geometry: DepthwiseGeometry, image: Int, d: Int32, h: Int32) -> InputRow:
        """Finds a row.

        Parameters:
            checked: Whether it may lie outside the image.

        Args:
            geometry: The problem.
            image: The image.
            d: The plane.
            h: The row.
        """
        var inside = True
        var plane = d
        var row = h
        comptime if checked:
            inside = UInt32(d) < UInt32(geometry.depth) and UInt32(h) < UInt32(
                geometry.height
            )
            plane = _nearest(d, geometry.depth)
            row = _nearest(h, geometry.height)
        var line = (image * Int(geometry.depth) + Int(plane)) * Int(
            geometry.height
        ) + Int(row)
        return InputRow(
            image,
            plane,
            row,
            inside,
            line * Int(geometry.width) * Int(geometry.channels),
        )


@fieldwise_init
struct DepthwiseKernel[
    Source: ActivationSource,
    bias_type: DType,
    residual_type: DType,
    Output: OutputTarget,
    config: DepthwiseConfig,
]:
    """The kernel of a configuration.

    Parameters:
        Source: How the activation is reached; the filter has its type.
        bias_type: Of the bias.
        residual_type: Of the residual.
        Output: How the output is reached.
        config: The configuration.
    """

    comptime dtype = Self.Source.dtype
    comptime width = Self.config.width
    comptime rows = Self.config.rows()
    comptime columns = Self.config.columns()
    comptime pixels = Self.rows * Self.columns
    comptime Vector = SIMD[DType.float32, Self.width]
    comptime Loaded = SIMD[Self.dtype, Self.width]
    comptime Line = StaticTuple[Self.Loaded, Self.config.input_columns()]
    comptime filter_row = Self.config.filter_row()
    """Elements of shared memory from a tap to the next."""
    comptime Sums = StaticTuple[Self.Vector, Self.pixels]
    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime SharedFilter = Pointer[
        Float32, MutUntrackedOrigin, address_space=AddressSpace.SHARED
    ]

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
        `nvvm.minctasm`=SIMDLength(Self.config.resident()),
    )
    def run(
        activation: Self.Source,
        filter: Reads[Self.dtype],
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: DepthwiseGeometry,
    ):
        """A block: its items, and some of the filters.

        Args:
            activation: `[N, D, H, W, C]`.
            filter: `[K, T, R, S, 1]`.
            epilogue: What happens before the store.
            output: `[N, Z, P, Q, K]`.
            geometry: The problem.
        """
        var worker, slab = geometry.slabs.split(UInt32(block_idx.x))
        var strip, lane = geometry.lanes.split(UInt32(thread_idx.x))
        var shared = Self._pack_filter(filter, geometry, slab)
        var vector = slab * geometry.lanes.value + lane
        var together = UInt32(THREADS) // geometry.lanes.value
        if vector >= geometry.vectors or strip >= together:
            return
        var k = Int(vector) * Self.width
        var weights = shared.unsafe_offset(Int(lane) * Self.width)
        var first = worker * geometry.block_items
        var end = min(first + geometry.block_items, geometry.items)
        for index in range(first + strip, end, together):
            var item = Item.of[Self.config](geometry, index)
            var sums = Self.Sums(fill=Self.Vector(0))
            comptime if Self.config.taps > 0:
                if Self._inside(geometry, item):
                    Self._slide[False](
                        activation, geometry, item, k, weights, sums
                    )
                else:
                    Self._slide[True](
                        activation, geometry, item, k, weights, sums
                    )
            else:
                Self._walk(activation, geometry, item, k, weights, sums)
            Self._store(epilogue, output, geometry, item, k, sums)

    @staticmethod
    @always_inline
    def _pack_filter(
        filter: Reads[Self.dtype], geometry: DepthwiseGeometry, slab: UInt32
    ) -> Self.SharedFilter:
        """Brings the block's filters to shared memory, `[taps][filters]`."""
        var shared = external_memory[
            Float32, address_space=AddressSpace.SHARED, alignment=16
        ]()
        var data = Self.SharedFilter(unsafe_from_address=Int(shared))
        var taps = geometry.taps()
        var filters = geometry.lanes.value * UInt32(Self.width)
        var first = slab * filters
        for i in range(UInt32(thread_idx.x), taps * filters, UInt32(THREADS)):
            var k, tap = divmod(i, taps)
            var value = Float32(0)
            if first + k < geometry.filters:
                var from_ = Int(first + k) * Int(taps) + Int(tap)
                value = filter[unsafe_offset=from_].cast[DType.float32]()
            data.unsafe_store(Int(tap) * Self.filter_row + Int(k), value)
        barrier()
        return data

    @staticmethod
    @always_inline
    def _weight(weights: Self.SharedFilter, tap: UInt32) -> Self.Vector:
        """The thread's filters at a tap."""
        return weights.unsafe_load[width=Self.width, alignment=Self.width * 4](
            Int(tap) * Self.filter_row
        )

    @staticmethod
    @always_inline
    def _inside(geometry: DepthwiseGeometry, item: Item) -> Bool:
        """Whether all of an item's input pixels lie in the image."""
        return (
            item.h >= 0
            and item.w >= 0
            and item.h + Int32(Self.config.input_rows()) <= geometry.height
            and item.w + Int32(Self.config.input_columns()) <= geometry.width
            and UInt32(item.d) < UInt32(geometry.depth)
        )

    @staticmethod
    @always_inline
    def _load(
        activation: Self.Source,
        geometry: DepthwiseGeometry,
        row: InputRow,
        w: Int32,
        channel: Int,
    ) -> Self.Loaded:
        """Loads a pixel of the image."""
        var column = UInt32(w) * geometry.channels
        return activation.load[Self.width](
            row.image,
            IndexList[SPATIAL](Int(row.d), Int(row.h), Int(w)),
            channel,
            row.offset + channel + Int(column),
        )

    @staticmethod
    @always_inline
    def _load_checked(
        activation: Self.Source,
        geometry: DepthwiseGeometry,
        row: InputRow,
        w: Int32,
        channel: Int,
    ) -> Self.Loaded:
        """Loads a pixel, zeros if it lies outside the image: the nearest pixel
        is loaded there, so that there is no branch."""
        var value = Self._load(
            activation, geometry, row, _nearest(w, geometry.width), channel
        )
        var inside = row.inside and UInt32(w) < UInt32(geometry.width)
        return value if inside else Self.Loaded(0)

    @staticmethod
    @always_inline
    def _load_row[
        checked: Bool
    ](
        activation: Self.Source,
        geometry: DepthwiseGeometry,
        item: Item,
        row: Int32,
        k: Int,
    ) -> Self.Line:
        """Loads a row of an item's input pixels."""
        var line = InputRow.of[checked](
            geometry, item.image, item.d, item.h + row
        )
        var values = Self.Line(fill=Self.Loaded(0))
        comptime for j in range(Self.config.input_columns()):
            var w = item.w + Int32(j)
            comptime if checked:
                values[j] = Self._load_checked(activation, geometry, line, w, k)
            else:
                values[j] = Self._load(activation, geometry, line, w, k)
        return values

    @staticmethod
    @always_inline
    def _slide[
        checked: Bool
    ](
        activation: Self.Source,
        geometry: DepthwiseGeometry,
        item: Item,
        k: Int,
        weights: Self.SharedFilter,
        mut sums: Self.Sums,
    ):
        """Adds all taps of a filter of known width: each input pixel is loaded
        once, for all the outputs that it reaches. All rows are loaded before
        the first is used, or, where they are too many, one ahead."""
        comptime rows = Self.config.input_rows()
        comptime if Self.config.taps == 3:
            var lines = StaticTuple[Self.Line, rows](
                fill=Self.Line(fill=Self.Loaded(0))
            )
            comptime for i in range(rows):
                lines[i] = Self._load_row[checked](
                    activation, geometry, item, Int32(i), k
                )
            comptime for i in range(rows):
                comptime for p in range(Self.rows):
                    comptime r = i - p * Self.config.stride
                    comptime if r >= 0 and r < Self.config.taps:
                        Self._spread[p](
                            lines[i],
                            weights.unsafe_offset(
                                r * Self.config.taps * Self.filter_row
                            ),
                            sums,
                        )
        else:
            var ahead = Self._load_row[checked](
                activation, geometry, item, 0, k
            )
            for i in range(Int32(rows)):
                var line = ahead
                ahead = Self._load_row[checked](
                    activation, geometry, item, min(i + 1, Int32(rows - 1)), k
                )
                comptime for p in range(Self.rows):
                    var r = i - Int32(p * Self.config.stride)
                    if r >= 0 and r < Int32(Self.config.taps):
                        Self._spread[p](
                            line,
                            weights.unsafe_offset(
                                Int(r) * Self.config.taps * Self.filter_row
                            ),
                            sums,
                        )

    @staticmethod
    @always_inline
    def _spread[
        p: Int
    ](line: Self.Line, weights: Self.SharedFilter, mut sums: Self.Sums):
        """Adds a row of input pixels, times a row of taps, to row `p` of the
        outputs."""
        comptime taps = Self.config.taps
        comptime for s in range(taps):
            var weight = Self._weight(weights, UInt32(s))
            comptime for q in range(Self.columns):
                comptime at = p * Self.columns + q
                var value = line[q * Self.config.stride + s]
                sums[at] = value.cast[DType.float32]().fma(weight, sums[at])

    @staticmethod
    @always_inline
    def _walk(
        activation: Self.Source,
        geometry: DepthwiseGeometry,
        item: Item,
        k: Int,
        weights: Self.SharedFilter,
        mut sums: Self.Sums,
    ):
        """Adds the taps of any filter, one by one."""
        var channel = k
        comptime if Self.width == 1:
            channel = Int(geometry.multiplier.split(UInt32(k))[0])
        var tap = UInt32(0)
        for t in range(geometry.taps_d):
            var d = item.d + t * geometry.dilation_d
            for r in range(geometry.taps_h):
                var line = InputRow.of[True](
                    geometry, item.image, d, item.h + r * geometry.dilation_h
                )
                for s in range(geometry.taps_w):
                    var weight = Self._weight(weights, tap)
                    tap += 1
                    comptime for q in range(Self.columns):
                        var w = (
                            item.w
                            + s * geometry.dilation_w
                            + Int32(q) * geometry.step_w
                        )
                        var value = Self._load_checked(
                            activation, geometry, line, w, channel
                        )
                        sums[q] = value.cast[DType.float32]().fma(
                            weight, sums[q]
                        )

    @staticmethod
    @always_inline
    def _store(
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: DepthwiseGeometry,
        item: Item,
        k: Int,
        sums: Self.Sums,
    ):
        """Stores an item's outputs, those that there are."""
        var plane = item.image * Int(geometry.out_planes.value) + Int(
            item.plane
        )
        comptime for p in range(Self.rows):
            comptime for q in range(Self.columns):
                var row = item.row + UInt32(p)
                var column = item.column + UInt32(q)
                if row < geometry.out_rows and column < geometry.out_columns:
                    var line = plane * Int(geometry.out_rows) + Int(row)
                    var pixel = line * Int(geometry.out_columns) + Int(column)
                    var offset = pixel * Int(geometry.filters) + k
                    var value = epilogue.apply[Self.width, Self.width](
                        sums[p * Self.columns + q], k, offset
                    )
                    output.store[Self.width](
                        item.image,
                        IndexList[SPATIAL](
                            Int(item.plane), Int(row), Int(column)
                        ),
                        k,
                        offset,
                        value.cast[Self.Output.dtype](),
                    )
