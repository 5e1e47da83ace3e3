"""The GPU's general depthwise kernel: any filter, any channels, and any work
fused in front of the op. A filter has one input channel, so that a thread loads
all it multiplies."""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.memory import external_memory
from max.gpu.sync import barrier
from std.utils import IndexList, StaticTuple

from ...conv.access import ActivationSource, OutputTarget
from ...conv.epilogue import Epilogue
from ...conv.memory import Reads
from ...conv.problem import SPATIAL
from ..overlap import wait_for_earlier_kernels
from .depthwise_geometry import (
    COLUMNS,
    RESIDENT,
    THREADS,
    DepthwiseConfig,
    DepthwiseGeometry,
)


@fieldwise_init
struct Item(TrivialRegisterPassable):
    """The output pixels that a thread computes together: the first one, and its
    first input pixel."""

    var image: Int
    var plane: UInt32
    var row: UInt32
    var column: UInt32
    var d: Int32
    var h: Int32
    var w: Int32

    @staticmethod
    @always_inline
    def of(geometry: DepthwiseGeometry, index: UInt32) -> Item:
        """The position of an item.

        Args:
            geometry: The problem.
            index: Of the item.
        """
        var across, w = geometry.items_w.split(index)
        var down, row = geometry.out_rows.split(across)
        var image, plane = geometry.out_planes.split(down)
        var column = w * UInt32(COLUMNS)
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
    """Whether the row exists; otherwise this is the nearest one."""
    var offset: Int
    """Of its first element."""

    @staticmethod
    @always_inline
    def of(
        geometry: DepthwiseGeometry, image: Int, d: Int32, h: Int32
    ) -> InputRow:
        """Finds a row.

        Args:
            geometry: The problem.
            image: The image.
            d: The plane.
            h: The row.
        """
        var inside = UInt32(d) < UInt32(geometry.depth) and UInt32(h) < UInt32(
            geometry.height
        )
        var plane = _nearest(d, geometry.depth)
        var row = _nearest(h, geometry.height)
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
    comptime Vector = SIMD[DType.float32, Self.width]
    comptime Loaded = SIMD[Self.dtype, Self.width]
    comptime filter_row = Self.config.filter_row()
    """Elements of shared memory from a tap to the next."""
    comptime Sums = StaticTuple[Self.Vector, COLUMNS]
    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime SharedFilter = Pointer[
        Float32, MutUntrackedOrigin, address_space=AddressSpace.SHARED
    ]

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
        `nvvm.minctasm`=SIMDLength(RESIDENT),
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
        var vector = slab * geometry.lanes.value + lane
        var together = UInt32(THREADS) // geometry.lanes.value
        wait_for_earlier_kernels()
        var shared = Self._pack_filter(filter, geometry, slab)
        if vector >= geometry.vectors or strip >= together:
            return
        var k = Int(vector) * Self.width
        var weights = shared.unsafe_offset(Int(lane) * Self.width)
        var first = worker * geometry.block_items
        var end = min(first + geometry.block_items, geometry.items)
        for index in range(first + strip, end, together):
            var item = Item.of(geometry, index)
            var sums = Self.Sums(fill=Self.Vector(0))
            Self._sum_taps(activation, geometry, item, k, weights, sums)
            Self._store(epilogue, output, geometry, item, k, sums)

    @staticmethod
    @always_inline
    def _pack_filter(
        filter: Reads[Self.dtype], geometry: DepthwiseGeometry, slab: UInt32
    ) -> Self.SharedFilter:
        """Loads the block's filters into shared memory, `[taps][filters]`."""
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
        """Loads a pixel, or zeros outside the image. There it loads the nearest
        pixel and drops it, so that there is no branch."""
        var value = Self._load(
            activation, geometry, row, _nearest(w, geometry.width), channel
        )
        var inside = row.inside and UInt32(w) < UInt32(geometry.width)
        return value if inside else Self.Loaded(0)

    @staticmethod
    @always_inline
    def _sum_taps(
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
                var line = InputRow.of(
                    geometry, item.image, d, item.h + r * geometry.dilation_h
                )
                for s in range(geometry.taps_w):
                    var weight = Self._weight(weights, tap)
                    tap += 1
                    comptime for q in range(COLUMNS):
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
        """Stores those outputs of an item that exist."""
        var plane = item.image * Int(geometry.out_planes.value) + Int(
            item.plane
        )
        var line = plane * Int(geometry.out_rows.value) + Int(item.row)
        comptime for q in range(COLUMNS):
            var column = item.column + UInt32(q)
            if column < geometry.out_columns:
                var pixel = line * Int(geometry.out_columns) + Int(column)
                var offset = pixel * Int(geometry.filters) + k
                var value = epilogue.apply[Self.width, Self.width](
                    sums[q], k, offset
                )
                output.store[Self.width](
                    item.image,
                    IndexList[SPATIAL](
                        Int(item.plane), Int(item.row), Int(column)
                    ),
                    k,
                    offset,
                    value.cast[Self.Output.dtype](),
                )
