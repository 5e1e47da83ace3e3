"""The Hopper window kernel, for convolutions with few filters: windows of the
image in shared memory, all taps multiplied from there by wgmma.

A block keeps all filters in shared memory and computes tiles, one after the
other:

    a warp a part:      for each tile, for each of the part's slices of its
                        channels: load the slice of the tile's window
    a warpgroup each 64 pixels and part:
                        for each tile:
                            for each of the part's slices:
                                for each tap: multiply pixels by filters
                            add up the parts, finish, store

An input pixel leaves the L2 once a tile, not once a tap. TMA writes zeros
where a window lies outside the image, and its swizzle is a function of the
address in shared memory, so that a multiply may begin at any pixel of a window.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.memory import external_memory
from max.gpu.primitives.warp import broadcast
from max.gpu.sync import syncwarp
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of
from std.utils import IndexList, StaticTuple

from ....conv.access import OutputTarget
from ....conv.epilogue import Epilogue
from ...epilogue.activations import keep_branch
from ...im2col.traversal import ROW_BYTES
from ...limits import MMA_K_BYTES, PATTERN_BYTES, WARP, WARPGROUP
from ...overlap import wait_for_earlier_kernels
from ...pipeline.barrier import BARRIER_BYTES, Barrier, publish_barriers
from ...pipeline.chunks import CHUNK_BYTES, shared_pointer
from ...tma.copy import SharedAddress, load_tile
from ...tma.descriptor import TensorMap
from ..wgmma import MMA_M
from .geometry import HALF_FILTERS, WindowGeometry
from .outputs import WindowOutputs
from .pixels import WindowThread
from .registers import opaque
from .tiling import BARRIERS_BYTES, MAX_SLICES, most_threads

comptime STEP_CHUNKS = UInt32(MMA_K_BYTES // CHUNK_BYTES)
"""From a multiply's products to the next ones of the same rows."""

comptime FREQUENT_TAPS = Int32(3)
"""Along w."""

comptime MAX_DEPTH = ROW_BYTES // MMA_K_BYTES
"""Multiplies of a tap of a slice, at most."""


@fieldwise_init
struct WindowStorage(TrivialRegisterPassable):
    """The layout of a block's shared memory: barriers, filters, windows of each
    part, sums of each part but the first."""

    var base: SharedAddress
    var stages: SharedAddress
    """Of the part."""
    var sums: SharedAddress
    var part_barriers: SharedAddress
    """Of the part: `full` of every stage, then `empty` of every stage."""

    @always_inline
    def __init__(out self, geometry: WindowGeometry, part: UInt32):
        """Lays it out.

        Args:
            geometry: The problem.
            part: The thread's.
        """
        self.base = SharedAddress(
            Int(
                external_memory[
                    UInt8,
                    address_space=AddressSpace.SHARED,
                    alignment=PATTERN_BYTES,
                ]()
            )
        )
        var stages = UInt32(geometry.stages)
        var first = geometry.stages_at(self.base)
        self.stages = first + part * stages * geometry.stage_bytes
        self.sums = (
            first + UInt32(geometry.parts) * stages * geometry.stage_bytes
        )
        var before = UInt32(2 + MAX_SLICES) + 2 * part * stages
        self.part_barriers = self.base + before * BARRIER_BYTES

    @always_inline
    def filters(self) -> SharedAddress:
        """The filters' address."""
        return self.base + BARRIERS_BYTES

    @always_inline
    def sums_full(self) -> Barrier:
        """The barrier that completes when the other parts' sums are there."""
        return Barrier(self.base)

    @always_inline
    def sums_empty(self) -> Barrier:
        """The barrier that completes when they may be overwritten."""
        return Barrier(self.base + BARRIER_BYTES)

    @always_inline
    def filters_full(self, slice: UInt32) -> Barrier:
        """The barrier that completes when a slice of all filters has come.

        Args:
            slice: Of the channels.
        """
        return Barrier(self.base + (2 + slice) * BARRIER_BYTES)

    @always_inline
    def full(self, stage: UInt32) -> Barrier:
        """The barrier that completes when a stage has its window.

        Args:
            stage: Of the part.
        """
        return Barrier(self.part_barriers + stage * BARRIER_BYTES)

    @always_inline
    def empty(self, geometry: WindowGeometry, stage: UInt32) -> Barrier:
        """The barrier that completes when a stage may be overwritten.

        Args:
            geometry: The problem.
            stage: Of the part.
        """
        return self.full(UInt32(geometry.stages) + stage)


@fieldwise_init
struct WindowPosition(TrivialRegisterPassable):
    """A stage of a part, and the parity of the round that it is in."""

    var stage: UInt32
    var parity: UInt32
    var address: SharedAddress

    @always_inline
    def step(mut self, geometry: WindowGeometry):
        """Moves to the next stage.

        Args:
            geometry: The problem.
        """
        self.stage += 1
        self.address += geometry.stage_bytes
        if self.stage == UInt32(geometry.stages):
            self.address -= self.stage * geometry.stage_bytes
            self.stage = 0
            self.parity ^= 1


@fieldwise_init
struct WindowKernel[
    dtype: DType,
    bias_type: DType,
    residual_type: DType,
    Output: OutputTarget,
    columns: Int,
]:
    """The kernel of a number of filters.

    Parameters:
        dtype: Of activation and filter: bfloat16, float16, or float32 that TMA
            rounds to tf32.
        bias_type: Of the bias.
        residual_type: Of the residual.
        Output: How the output is reached.
        columns: Filters of a multiply, the problem's or more: 8, 16, 32 or 64.
    """

    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime Sums = StaticTuple[Float32, Self.columns // 2]
    """Of thread t, register r is of pixel `16*(t/32) + (t%32)/4 + 8*((r/2)%2)`
    and of the multiply's column `8*(r/4) + 2*(t%4) + r%2`."""
    comptime Outputs = WindowOutputs[
        Self.bias_type, Self.residual_type, Self.Output, Self.columns
    ]
    comptime half_filters = min(Self.columns, HALF_FILTERS)

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
            Int32(most_threads(Self.columns))
        ),
        `nvvm.minctasm`=SIMDLength(1),
    )
    @__llvm_arg_metadata(activation, `nvvm.grid_constant`)
    @__llvm_arg_metadata(filter, `nvvm.grid_constant`)
    def run(
        activation: TensorMap,
        filter: TensorMap,
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: WindowGeometry,
    ):
        """A block: every tile whose number is its own, modulo the blocks.

        Args:
            activation: Descriptor of the activation `[N, D, H, W, C]`, a
                window's phase, or a part of its row, a box.
            filter: Descriptor of the filter, taps of some filters a box.
            epilogue: What happens before the store.
            output: The output.
            geometry: The problem.
        """
        var group, thread = divmod(UInt32(thread_idx.x), UInt32(WARPGROUP))
        # The assembler then knows that a warp's threads go the same way.
        group = broadcast(group)
        var warp = broadcast(thread // UInt32(WARP))
        var consumers = geometry.team.value * UInt32(geometry.parts)
        var part, member = geometry.team.split(group)
        if group >= consumers:
            part = warp
        var storage = WindowStorage(geometry, part)
        if thread_idx.x == 0:
            Self._init(geometry, storage)
        barrier()
        wait_for_earlier_kernels()
        if group < consumers:
            Self._consume(
                epilogue, output, geometry, storage, part, member, thread
            )
        elif thread % UInt32(WARP) == 0:
            Self._produce(
                activation, filter, epilogue, geometry, storage, Int32(part)
            )

    @staticmethod
    @always_inline
    def _init(geometry: WindowGeometry, storage: WindowStorage):
        """Initializes the barriers; one thread."""
        comptime warps = WARPGROUP // WARP
        var team_warps = Int(geometry.team.value) * warps
        for slice in range(geometry.slices.value):
            storage.filters_full(slice).init(1)
        # One part has no use for it, and a barrier no fewer arrivals.
        storage.sums_full().init(max(1, Int(geometry.parts) - 1) * team_warps)
        storage.sums_empty().init(team_warps)
        var first = storage.full(0).address
        for index in range(geometry.parts * geometry.stages):
            var part, stage = divmod(index, geometry.stages)
            var at = UInt32(2 * part * geometry.stages + stage)
            Barrier(first + at * BARRIER_BYTES).init(1)
            at += UInt32(geometry.stages)
            Barrier(first + at * BARRIER_BYTES).init(team_warps)
        publish_barriers()

    @staticmethod
    @always_inline
    def _load_filters(
        ref filter: TensorMap,
        geometry: WindowGeometry,
        storage: WindowStorage,
        slice: UInt32,
    ):
        """Loads a slice of all filters; one thread."""
        var bytes = UInt32(geometry.taps) * geometry.tap_bytes
        var full = storage.filters_full(slice)
        full.arrive_expecting(Int(bytes))
        var to = storage.filters() + slice * bytes
        var half_bytes = geometry.tap_bytes // UInt32(geometry.halves)
        for tap in range(Int32(0), geometry.taps, geometry.box_taps):
            for half in range(geometry.halves):
                var at = IndexList[5](
                    Int(slice) * Int(geometry.slice_channels), 0, 0, 0, Int(tap)
                )
                if geometry.together == 1:
                    at[2] = Int(half) * 4
                else:
                    at[1] = Int(half) * HALF_FILTERS
                load_tile(to, filter, full.address, at)
                to += half_bytes * UInt32(geometry.box_taps)

    @staticmethod
    @always_inline
    def _produce(
        ref activation: TensorMap,
        ref filter: TensorMap,
        epilogue: Self.FusedWork,
        geometry: WindowGeometry,
        storage: WindowStorage,
        part: Int32,
    ):
        """Loads the part's slices of the block's windows, and of the filters
        when it first comes to them; one thread. The first part's also asks for
        residuals."""
        var position = WindowPosition(0, 0, storage.stages)
        for tile in range(
            Int32(block_idx.x), geometry.tiles, Int32(grid_dim.x)
        ):
            var place = geometry.place(tile)
            var n, z = geometry.planes.split(UInt32(place.plane))
            var depth = geometry.start[0] + Int32(z) * geometry.stride[0]
            var row = geometry.start[1] + place.row * geometry.stride[1]
            var column = geometry.start[2] + place.column * geometry.stride[2]
            for step in range(part, geometry.steps, geometry.parts):
                var t, slice = geometry.slices.split(UInt32(step))
                if tile == Int32(block_idx.x) and t == 0:
                    Self._load_filters(filter, geometry, storage, slice)
                storage.empty(geometry, position.stage).wait(
                    position.parity ^ 1
                )
                var full = storage.full(position.stage)
                full.arrive_expecting(Int(geometry.window_bytes))
                for phase in range(geometry.phases):
                    var to = (
                        position.address
                        + UInt32(phase) * geometry.phase_chunks * CHUNK_BYTES
                    )
                    for box in range(geometry.boxes):
                        load_tile(
                            to,
                            activation,
                            full.address,
                            IndexList[5](
                                Int(slice) * Int(geometry.slice_channels),
                                Int(
                                    column + phase + box * geometry.box_columns
                                ),
                                Int(row),
                                Int(depth + Int32(t) * geometry.dilation[0]),
                                Int(n),
                            ),
                        )
                        to += geometry.box_bytes
                position.step(geometry)
            if part == 0:
                Self.Outputs.prefetch_residual(epilogue, geometry, place)

    @staticmethod
    @always_inline
    def _consume(
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: WindowGeometry,
        storage: WindowStorage,
        part: UInt32,
        member: UInt32,
        thread: UInt32,
    ):
        """A warpgroup: 64 pixels of each of the block's tiles."""
        var member_row, member_column = geometry.team_columns.split(member)
        var member_chunks = (
            member_row * geometry.multiply_row_chunks
            + member_column * geometry.multiply_column_chunks
        )
        var row = Int32(member_row) * geometry.multiply_rows
        var column = Int32(member_column) * geometry.multiply_columns
        var position = WindowPosition(0, 0, storage.stages)
        var round = UInt32(0)
        var plane_taps = UInt32(geometry.taps_h * geometry.taps_w)
        var own = WindowThread[Self.columns](geometry, row, column, thread)
        var bias = Self.Outputs.Bias(0)
        if part == 0:
            bias = Self.Outputs.bias(epilogue, geometry, own)
        var changes = opaque(UInt32(Int(Self.Outputs.changes(epilogue))))
        var first_t, first_slice = geometry.slices.split(part)
        var tile = Int32(block_idx.x)
        while tile < geometry.tiles:
            var sums = Self.Outputs.begin(bias)
            var pixels = own.pixels(geometry, geometry.place(tile))
            var early = Self.Outputs.Early(fill=0)
            if part == 0:
                early = Self.Outputs.load_early(epilogue, geometry, pixels, own)
            var step = Int32(part)
            var t, slice = first_t, first_slice
            # A part has a step at least.
            while True:
                if tile == Int32(block_idx.x):
                    storage.filters_full(slice).wait(0)
                storage.full(position.stage).wait(position.parity)
                var tap = (slice * UInt32(geometry.taps_d) + t) * plane_taps
                Self._multiply_slice(
                    sums,
                    geometry,
                    slice,
                    position.address // CHUNK_BYTES + member_chunks,
                    (storage.filters() + tap * geometry.tap_bytes)
                    // CHUNK_BYTES,
                )
                syncwarp()
                if thread % UInt32(WARP) == 0:
                    storage.empty(geometry, position.stage).arrive()
                position.step(geometry)
                step += Int32(geometry.parts)
                if step >= geometry.steps:
                    break
                slice += UInt32(geometry.parts)
                while slice >= geometry.slices.value:
                    slice -= geometry.slices.value
                    t += 1
            if geometry.parts > 1:
                Self._exchange(
                    sums, geometry, storage, part, member, thread, round
                )
            round ^= 1
            if part == 0:
                if changes != 0:
                    Self.Outputs.finish(
                        epilogue, geometry, sums, early, pixels, own
                    )
                Self.Outputs.store(output, geometry, sums, pixels, own)
            tile += Int32(grid_dim.x)

    @staticmethod
    @always_inline
    def _multiply_slice(
        mut sums: Self.Sums,
        geometry: WindowGeometry,
        slice: UInt32,
        window: UInt32,
        filters: UInt32,
    ):
        """Adds the products of a slice: as many multiplies a tap as it has."""
        var depth = geometry.depth
        if slice == geometry.slices.value - 1:
            depth = geometry.last_depth
        # Apart, so that nothing but multiplies is in the loop of taps.
        comptime for known in range(1, MAX_DEPTH + 1):
            if depth == Int32(known):
                Self._multiply[known](sums, geometry, window, filters)
                return
            # A table of jumps would take longer.
            keep_branch()

    @staticmethod
    @always_inline
    def _multiply[
        depth: Int
    ](
        mut sums: Self.Sums,
        geometry: WindowGeometry,
        window: UInt32,
        filters: UInt32,
    ):
        """Adds the products of a slice: all taps along h and w, `depth`
        multiplies each. `window` is the first pixel's, `filters` the first tap's
        address, in chunks."""
        wgmma_fence_aligned()
        # One tap has no time for the loops.
        if geometry.taps_h * geometry.taps_w == 1:
            Self._multiply_tap[depth](sums, geometry, window, filters)
        else:
            var first = window
            var b = filters
            for _ in range(geometry.taps_h):
                Self._multiply_row[depth](sums, geometry, first, b)
                first += geometry.tap_row_chunks
                b += geometry.row_filter_chunks
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[0]()
        # Keeps the compiler from reading a sum before the wait, whose effect on
        # registers it does not know.
        comptime for r in range(Self.columns // 2):
            sums[r] = inlined_assembly[
                "", Float32, constraints="=f,0,~{memory}"
            ](sums[r])

    @staticmethod
    @always_inline
    def _multiply_row[
        depth: Int
    ](
        mut sums: Self.Sums,
        geometry: WindowGeometry,
        window: UInt32,
        filters: UInt32,
    ):
        """Issues the multiplies of a row of taps: without a loop for the most
        frequent number, whose loop would take longer than its multiplies."""
        var tap_filters = geometry.tap_bytes // CHUNK_BYTES
        var a = window
        var b = filters
        var next = geometry.tap_chunks
        var after = geometry.odd_tap_chunks
        if geometry.taps_w == FREQUENT_TAPS:
            comptime for tap in range(Int(FREQUENT_TAPS)):
                Self._multiply_tap[depth](sums, geometry, a, b)
                b += tap_filters
                a += next if tap % 2 == 0 else after
        else:
            for _ in range(geometry.taps_w):
                Self._multiply_tap[depth](sums, geometry, a, b)
                b += tap_filters
                a += next
                swap(next, after)

    @staticmethod
    @always_inline
    def _multiply_tap[
        depth: Int
    ](mut sums: Self.Sums, geometry: WindowGeometry, a: UInt32, b: UInt32):
        """Issues the multiplies of a tap of a slice; the pixels' and the filters'
        addresses are in chunks."""
        comptime products = MMA_K_BYTES // size_of[Self.dtype]()
        comptime for k in range(depth):
            comptime at = UInt32(k) * STEP_CHUNKS
            sums = wgmma_async[
                MMA_M,
                Self.columns,
                products,
                a_type=Self.dtype,
                b_type=Self.dtype,
            ](
                _descriptor[Self.dtype](a + at, geometry.pixels_half),
                _descriptor[Self.dtype](b + at, geometry.filters_half),
                sums,
            )

    @staticmethod
    @always_inline
    def _exchange(
        mut sums: Self.Sums,
        geometry: WindowGeometry,
        storage: WindowStorage,
        part: UInt32,
        member: UInt32,
        thread: UInt32,
        round: UInt32,
    ):
        """Adds the other parts' sums of a tile to the first part's, through
        shared memory."""
        comptime count = Self.columns // 2
        comptime member_elements = UInt32(count * WARPGROUP)
        var team = geometry.team.value
        var own = member * member_elements + thread
        if part > 0:
            var data = shared_pointer[DType.float32](
                storage.sums + 4 * ((part - 1) * team * member_elements + own)
            )
            storage.sums_empty().wait(round ^ 1)
            comptime for r in range(count):
                data.unsafe_store(r * WARPGROUP, sums[r])
            syncwarp()
            if thread % UInt32(WARP) == 0:
                storage.sums_full().arrive()
        else:
            storage.sums_full().wait(round)
            for other in range(UInt32(geometry.parts) - 1):
                var data = shared_pointer[DType.float32](
                    storage.sums + 4 * (other * team * member_elements + own)
                )
                comptime for r in range(count):
                    sums[r] += data.unsafe_load(r * WARPGROUP)
            syncwarp()
            if thread % UInt32(WARP) == 0:
                storage.sums_empty().arrive()


@always_inline
def _descriptor[
    dtype: DType
](chunk: UInt32, half: UInt32) -> WGMMADescriptor[dtype]:
    """A descriptor of the rows that begin at a chunk of shared memory.

    Parameters:
        dtype: Of the rows.
    """
    var bits = UInt64(chunk) | UInt64(half) << 32
    return WGMMADescriptor[dtype](Int64(bits))
