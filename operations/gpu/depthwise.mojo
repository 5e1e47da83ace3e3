"""The GPU's depthwise kernel: one input channel a filter, so that a thread
multiplies what it loads with no other thread's help."""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.memory import external_memory
from max.gpu.sync import barrier
from std.sys._assembly import inlined_assembly
from std.utils import IndexList, StaticTuple

from ..conv.access import ActivationSource, OutputTarget
from ..conv.epilogue import Epilogue
from ..conv.memory import Reads
from ..conv.problem import SPATIAL
from .depthwise_geometry import THREADS, DepthwiseConfig, DepthwiseGeometry


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


@always_inline
def _keep_order():
    """Keeps the compiler from loading all of a filter ahead, for which there
    are too few registers."""
    inlined_assembly["", NoneType, constraints="~{memory}"]()


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
    comptime Sums = StaticTuple[Self.Vector, Self.pixels]
    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime SharedFilter = Pointer[
        Float32, MutUntrackedOrigin, address_space=AddressSpace.SHARED
    ]

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
        `nvvm.minctasm`=SIMDLength(2),
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
            data.unsafe_store(Int(tap * filters + k), value)
        barrier()
        return data

    @staticmethod
    @always_inline
    def _weight(
        weights: Self.SharedFilter, geometry: DepthwiseGeometry, tap: UInt32
    ) -> Self.Vector:
        """The thread's filters at a tap."""
        var filters = geometry.lanes.value * UInt32(Self.width)
        return weights.unsafe_load[width=Self.width, alignment=Self.width * 4](
            Int(tap * filters)
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
        n: Int,
        d: Int32,
        h: Int32,
        w: Int32,
        channel: Int,
    ) -> Self.Loaded:
        """Loads a pixel of the image."""
        var line = (n * Int(geometry.depth) + Int(d)) * Int(
            geometry.height
        ) + Int(h)
        var offset = (line * Int(geometry.width) + Int(w)) * Int(
            geometry.channels
        ) + channel
        return activation.load[Self.width](
            n, IndexList[SPATIAL](Int(d), Int(h), Int(w)), channel, offset
        )

    @staticmethod
    @always_inline
    def _load_checked(
        activation: Self.Source,
        geometry: DepthwiseGeometry,
        n: Int,
        d: Int32,
        h: Int32,
        w: Int32,
        channel: Int,
    ) -> Self.Loaded:
        """Loads a pixel, zeros if it lies outside the image: the nearest pixel
        is loaded there, so that there is no branch."""
        var inside = (
            UInt32(d) < UInt32(geometry.depth)
            and UInt32(h) < UInt32(geometry.height)
            and UInt32(w) < UInt32(geometry.width)
        )
        var value = Self._load(
            activation,
            geometry,
            n,
            _nearest(d, geometry.depth),
            _nearest(h, geometry.height),
            _nearest(w, geometry.width),
            channel,
        )
        return value if inside else Self.Loaded(0)

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
        """Adds all taps of a square filter: each input pixel is loaded once,
        for all the outputs that it reaches."""
        comptime taps = Self.config.taps
        comptime stride = Self.config.stride
        comptime input_rows = Self.config.input_rows()
        comptime input_columns = Self.config.input_columns()
        comptime ahead = input_rows if taps == 3 else 2
        var loaded = StaticTuple[Self.Loaded, ahead * input_columns](
            fill=Self.Loaded(0)
        )
        comptime for i in range(input_rows + ahead - 1):
            comptime if taps > 3:
                _keep_order()
            comptime if i < input_rows:
                comptime for j in range(input_columns):
                    var h = item.h + Int32(i)
                    var w = item.w + Int32(j)
                    comptime at = i % ahead * input_columns + j
                    comptime if checked:
                        loaded[at] = Self._load_checked(
                            activation, geometry, item.image, item.d, h, w, k
                        )
                    else:
                        loaded[at] = Self._load(
                            activation, geometry, item.image, item.d, h, w, k
                        )
            comptime row = i - (ahead - 1)
            comptime if row >= 0:
                comptime for j in range(input_columns):
                    var value = loaded[
                        row % ahead * input_columns + j
                    ].cast[DType.float32]()
                    Self._spread[row, j](geometry, weights, value, sums)

    @staticmethod
    @always_inline
    def _spread[
        row: Int, column: Int
    ](
        geometry: DepthwiseGeometry,
        weights: Self.SharedFilter,
        value: Self.Vector,
        mut sums: Self.Sums,
    ):
        """Adds an input pixel of the item to the outputs that it reaches."""
        comptime taps = Self.config.taps
        comptime stride = Self.config.stride
        comptime for p in range(Self.rows):
            comptime r = row - p * stride
            comptime if r >= 0 and r < taps:
                comptime for q in range(Self.columns):
                    comptime s = column - q * stride
                    comptime if s >= 0 and s < taps:
                        comptime at = p * Self.columns + q
                        sums[at] = value.fma(
                            Self._weight(
                                weights, geometry, UInt32(r * taps + s)
                            ),
                            sums[at],
                        )

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
                var h = item.h + r * geometry.dilation_h
                for s in range(geometry.taps_w):
                    var weight = Self._weight(weights, geometry, tap)
                    tap += 1
                    comptime for q in range(Self.columns):
                        var w = (
                            item.w
                            + s * geometry.dilation_w
                            + Int32(q) * geometry.step_w
                        )
                        var value = Self._load_checked(
                            activation, geometry, item.image, d, h, w, channel
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
