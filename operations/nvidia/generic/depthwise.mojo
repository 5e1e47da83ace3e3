"""The GPU's general depthwise kernel: any filter, any channels, and any work
fused in front of the op. A filter has one input channel, so that a thread loads
all it multiplies.

    for every item:     for each row of taps, for each of its phases:
                            load a window of pixels, add a few taps from it,
                            move it on, until the phase has no taps
                        load the residual, finish, store
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.memory import external_memory
from max.gpu.sync import barrier
from std.sys.info import size_of
from std.utils import IndexList, StaticTuple

from ...conv.access import ActivationSource, OutputTarget
from ...conv.epilogue import Epilogue
from ...conv.fields import ACTIVATION_SILU
from ...conv.memory import Reads
from ...conv.problem import SPATIAL
from ...conv.quantization import filter_dtype
from ..epilogue.activations import DeviceActivation, keep_branch
from ..run_time import run_time
from ..overlap import wait_for_earlier_kernels
from ..pipeline.device_memory import prefetch_line
from .depthwise_geometry import (
    COLUMNS,
    RESIDENT,
    THREADS,
    WINDOW,
    WINDOW_TAPS,
    DepthwiseConfig,
    DepthwiseGeometry,
)
from .widen import widen


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
        var set, first = geometry.spacing.split(w)
        var column = set * UInt32(COLUMNS) * geometry.spacing.value + first
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
    comptime Window = StaticTuple[Self.Loaded, WINDOW]
    comptime Old = SIMD[Self.residual_type, Self.width]
    comptime Residual = StaticTuple[Self.Old, COLUMNS]
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
        filter: Reads[filter_dtype(Self.dtype)],
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
            var place = ItemPlace(geometry, item, k)
            Self._ask_for_residual(epilogue, geometry, place)
            Self._sum_taps(activation, geometry, item, k, weights, sums)
            Self._store(epilogue, output, geometry, item, place, sums)

    @staticmethod
    @always_inline
    def _pack_filter(
        filter: Reads[filter_dtype(Self.dtype)],
        geometry: DepthwiseGeometry,
        slab: UInt32,
    ) -> Self.SharedFilter:
        """Loads the block's filters into shared memory, `[taps][filters]`."""
        var shared = external_memory[
            Float32, address_space=AddressSpace.SHARED, alignment=16
        ]()
        var data = Self.SharedFilter(unsafe_from_address=Int(shared))
        var filters = geometry.lanes.value * UInt32(Self.width)
        var first = slab * filters
        var taps = geometry.filter_taps.value
        var there = min(filters, geometry.filters - first) * taps
        var from_ = filter.unsafe_offset(Int(first) * Int(taps))
        # Of 8 bits one by one: the compiler would add what is beside `i` behind
        # a difference that may be negative, to an address in shared memory.
        comptime width = Self.width if size_of[Self.dtype]() > 1 else 1
        for i in range(
            UInt32(thread_idx.x) * UInt32(width),
            there,
            UInt32(THREADS * width),
        ):
            # Neighbouring elements, whether of one filter or of several.
            var loaded = from_.unsafe_load[
                width=width, alignment=width * size_of[Self.dtype]()
            ](Int(i))
            comptime for j in range(width):
                var k, tap = geometry.filter_taps.split(i + UInt32(j))
                data.unsafe_store(
                    Int(tap) * Self.filter_row + Int(k),
                    loaded[j].cast[DType.float32](),
                )
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
    def _load_nearest(
        activation: Self.Source,
        geometry: DepthwiseGeometry,
        row: InputRow,
        w: Int32,
        channel: Int,
    ) -> Self.Loaded:
        """Loads a pixel, or the nearest of the image, so that there is no
        branch."""
        return Self._load(
            activation, geometry, row, _nearest(w, geometry.width), channel
        )

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
        """Adds the taps of any filter, row by row and phase by phase."""
        var channel = k
        comptime if Self.width == 1:
            channel = Int(geometry.multiplier.split(UInt32(k))[0])
        var row_weights = weights
        for t in range(geometry.taps_d):
            var d = item.d + t * geometry.dilation_d
            for r in range(geometry.taps_h):
                var line = InputRow.of(
                    geometry, item.image, d, item.h + r * geometry.dilation_h
                )
                for phase in range(geometry.phases):
                    Self._sum_phase(
                        activation,
                        geometry,
                        line,
                        item.w + phase * geometry.dilation_w,
                        channel,
                        row_weights,
                        phase,
                        sums,
                    )
                row_weights = row_weights.unsafe_offset(
                    Int(geometry.taps_w) * Self.filter_row
                )

    @staticmethod
    @always_inline
    def _sum_phase(
        activation: Self.Source,
        geometry: DepthwiseGeometry,
        line: InputRow,
        first: Int32,
        channel: Int,
        weights: Self.SharedFilter,
        phase: Int32,
        mut sums: Self.Sums,
    ):
        """Adds the taps of a row's phase, some at a time.

        Args:
            activation: The activation.
            geometry: The problem.
            line: The row of the image.
            first: The column that the first output sees at the first tap.
            channel: The thread's first channel.
            weights: The row's.
            phase: The phase.
            sums: To which it adds.
        """
        comptime kept = WINDOW - WINDOW_TAPS
        var loaded = Self.Window(fill=Self.Loaded(0))
        var w = first
        comptime for i in range(kept):
            loaded[i] = Self._load_nearest(
                activation,
                geometry,
                line,
                w + Int32(i) * geometry.window_step,
                channel,
            )
        var tap = phase
        while tap < geometry.taps_w:
            comptime for i in range(kept, WINDOW):
                loaded[i] = Self._load_nearest(
                    activation,
                    geometry,
                    line,
                    w + Int32(i) * geometry.window_step,
                    channel,
                )
            # Zeros outside the image only behind all loads: they would wait.
            var window = Self.Window(fill=Self.Loaded(0))
            comptime for i in range(WINDOW):
                var at = w + Int32(i) * geometry.window_step
                if line.inside and UInt32(at) < UInt32(geometry.width):
                    window[i] = loaded[i]
            comptime for a in range(WINDOW_TAPS):
                if tap < geometry.taps_w:
                    var weight = Self._weight(weights, UInt32(tap))
                    comptime for q in range(COLUMNS):
                        sums[q] = widen(window[q + a]).fma(weight, sums[q])
                tap += geometry.phases
            comptime for i in range(kept):
                loaded[i] = window[i + WINDOW_TAPS]
            w += Int32(WINDOW_TAPS) * geometry.window_step

    @staticmethod
    @always_inline
    def _ask_for_residual(
        epilogue: Self.FusedWork,
        geometry: DepthwiseGeometry,
        first: ItemPlace,
    ):
        """Asks for an item's residual in the L2, which takes no registers."""
        if epilogue.has_residual:
            var place = first
            comptime for q in range(COLUMNS):
                if place.column < geometry.out_columns:
                    prefetch_line(epilogue.residual.unsafe_offset(place.offset))
                place.advance(geometry)

    @staticmethod
    @always_inline
    def _load_residual(
        epilogue: Self.FusedWork,
        geometry: DepthwiseGeometry,
        first: ItemPlace,
    ) -> Self.Residual:
        """Starts loading an item's residual, any where there is no output."""
        var residual = Self.Residual(fill=Self.Old(0))
        if epilogue.has_residual:
            var place = first
            comptime for q in range(COLUMNS):
                residual[q] = epilogue.load_residual[Self.width, Self.width](
                    place.offset if place.column
                    < geometry.out_columns else place.filter
                )
                place.advance(geometry)
        return residual

    @staticmethod
    @always_inline
    def _store(
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: DepthwiseGeometry,
        item: Item,
        first: ItemPlace,
        sums: Self.Sums,
    ):
        """Finishes and stores those outputs of an item that exist."""
        var place = first
        comptime if not (Self.Output.computes or Self.Output.stores):
            if epilogue.is_identity():
                comptime for q in range(COLUMNS):
                    if place.column < geometry.out_columns:
                        Self._store_pixel(
                            output,
                            item,
                            place,
                            sums[q].cast[Self.Output.dtype](),
                        )
                    place.advance(geometry)
                return
        var left = sums
        var old = Self._load_residual(epilogue, geometry, first)
        var bias = epilogue.load_bias[Self.width, Self.width](place.filter)
        # One copy of what may be fused: the outputs move up one by one.
        for _ in range(run_time(COLUMNS)):
            keep_branch()
            if place.column < geometry.out_columns:
                var scaled = epilogue.scaled[Self.width, Self.width](
                    left[0], place.filter
                )
                Self._store_pixel(
                    output,
                    item,
                    place,
                    Self._finish(epilogue, scaled, bias, old[0]),
                )
            place.advance(geometry)
            comptime for q in range(COLUMNS - 1):
                left[q] = left[q + 1]
                old[q] = old[q + 1]

    @staticmethod
    @always_inline
    def _store_pixel(
        output: Self.Output,
        item: Item,
        place: ItemPlace,
        value: SIMD[Self.Output.dtype, Self.width],
    ):
        """Stores a pixel's outputs."""
        output.store[Self.width](
            item.image,
            IndexList[SPATIAL](
                Int(item.plane), Int(item.row), Int(place.column)
            ),
            place.filter,
            place.offset,
            value,
        )

    @staticmethod
    @always_inline
    def _finish(
        epilogue: Self.FusedWork,
        value: Self.Vector,
        bias: Self.Vector,
        residual: Self.Old,
    ) -> SIMD[Self.Output.dtype, Self.width]:
        """A pixel's outputs, rounded; SiLU as outputs of 16 bits need it."""
        comptime if Self.Output.dtype.is_half_float():
            if epilogue.activation.code == ACTIVATION_SILU:
                var activated = DeviceActivation.of(
                    epilogue.activation
                ).evaluate[DeviceActivation.SILU, Self.width, exact=False](
                    value + bias
                )
                return epilogue.add_residual[Self.width](
                    activated, residual
                ).cast[Self.Output.dtype]()
        return epilogue.finish[Self.width](value, bias, residual).cast[
            Self.Output.dtype
        ]()


struct ItemPlace(TrivialRegisterPassable):
    """The address of a thread's outputs of a pixel."""

    var filter: Int
    """The thread's first."""
    var column: UInt32
    var offset: Int
    """Of the first output's element."""
    var step: Int
    """Elements from an item's pixel to the next."""

    @always_inline
    def __init__(out self, geometry: DepthwiseGeometry, item: Item, k: Int):
        """The first pixel of an item.

        Args:
            geometry: The problem.
            item: The item.
            k: The thread's first filter.
        """
        var plane = item.image * Int(geometry.out_planes.value) + Int(
            item.plane
        )
        var line = plane * Int(geometry.out_rows.value) + Int(item.row)
        var pixel = line * Int(geometry.out_columns) + Int(item.column)
        self.filter = k
        self.column = item.column
        self.offset = pixel * Int(geometry.filters) + k
        self.step = Int(geometry.spacing.value) * Int(geometry.filters)

    @always_inline
    def advance(mut self, geometry: DepthwiseGeometry):
        """Moves on to the item's next pixel."""
        self.column += geometry.spacing.value
        self.offset += self.step
