"""The epilogue of the Blackwell kernel: accumulators in tensor memory ->
registers -> what is fused -> rounded to the output's type in shared memory ->
output.

A thread holds one pixel of a sub-tile, with all of its filters. Two ways lead
through what is fused behind: in registers, a thread a pixel, or after shared
memory, where neighbouring threads have neighbouring filters.
"""

from std.collections import Optional
from std.sys.info import size_of

from ...conv.access import OutputTarget
from ..epilogue.callbacks import (
    LOOPED,
    EpilogueVisitor,
    Subtile,
    Visited,
)
from ..epilogue.fused_output import (
    ElementwiseComputeLambda,
    ElementwiseLambda,
    FusedOutput,
)
from ..epilogue.params import EpilogueParams
from ..im2col.tiles import Tile, TileGeometry
from ..pipeline.barrier import sync_threads, sync_warp
from ..pipeline.chunks import CHUNK_BYTES, load_chunk, store_chunk, swizzled
from ..pipeline.ring import RingPosition
from ..tma.copy import (
    SharedAddress,
    commit_stores,
    fence_async_proxy,
    store_tile,
    wait_stores_read,
)
from ..tma.descriptor import TensorMap
from ..limits import WARP
from .config import EPILOGUE_THREADS, TMEM_COLUMNS, Conv2dConfig
from .epilogue_fragment import (
    BufferedResidual,
    PixelFragments,
    rounded_chunk,
)
from .epilogue_load import subtile_at, subtiles_of
from .layout import layout_of
from .mma import accumulator_type
from .split_k import PartialSums
from .scheduler import ClusterPlace
from .smem import SharedStorage
from .tmem import (
    lane_offset,
    order_after_barrier,
    order_before_barrier,
    read_row,
)

comptime EPILOGUE_NAME = 1
"""The named barrier of the epilogue's threads."""


struct TileEpilogue[
    Output: OutputTarget,
    Visitor: EpilogueVisitor,
    //,
    config: Conv2dConfig,
    *,
    has_residual: Bool,
    register_based: Bool,
    elementwise_lambda_fn: Optional[ElementwiseLambda],
    elementwise_compute_lambda_fn: Optional[ElementwiseComputeLambda],
](TrivialRegisterPassable):
    """One thread of the epilogue, and where it is in the pipelines.

    Parameters:
        Output: The output, and what the graph compiler fused behind it.
        Visitor: What is made of the values before they are rounded.
        config: The configuration.
        has_residual: Whether a residual is added.
        register_based: Whether what is fused behind is computed in registers,
            or after shared memory.
        elementwise_lambda_fn: Stores values, instead of the kernel; with a
            function here or below, `Output` has nothing fused behind it.
        elementwise_compute_lambda_fn: Changes values before they are stored, by
            the kernel or by `elementwise_lambda_fn`.
    """

    comptime Work = FusedOutput[
        Self.Output,
        Self.elementwise_lambda_fn,
        Self.elementwise_compute_lambda_fn,
    ]
    comptime out_type = Self.Output.dtype
    comptime width = CHUNK_BYTES // size_of[Self.out_type]()
    """Filters of a chunk."""
    comptime size = Self.config.output_tile_shape[1]
    """Filters of a sub-tile."""
    comptime chunks = Self.size // Self.width
    comptime row_bytes = Self.config.output_row_bytes()
    comptime stage_stride_cols = (
        TMEM_COLUMNS // Self.config.num_accum_pipeline_stages
    )
    comptime split_k = Self.config.split_k()
    comptime Values = SIMD[DType.float32, Self.size]
    comptime sum_type = accumulator_type(Self.config.types.act)
    comptime Sums = SIMD[Self.sum_type, Self.size]
    comptime Chunk = SIMD[Self.out_type, Self.width]
    comptime Params = EpilogueParams[Self.Output, Self.Visitor]
    comptime Storage = SharedStorage[Self.config]
    comptime Place = ClusterPlace[Self.config]
    comptime layout = layout_of(Self.config)
    comptime ThreadPlace = PixelFragments[Self.layout]
    comptime Visited = Visited[Self.ThreadPlace]
    comptime State = Self.Visitor.State
    comptime stores_tiles = not (Self.Work.stores or Self.Visitor.discards)
    """Whether TMA stores the output."""
    comptime stores_registers = Self.Work.stores and Self.register_based
    """Whether threads hand what they have to the work behind the epilogue."""

    var storage: Self.Storage
    var place: Self.Place
    var thread: UInt32
    var tmem: UInt32
    """The address of the warp's lanes."""
    var accumulator: RingPosition[Self.config.num_accum_pipeline_stages]
    var output: RingPosition[Self.config.num_output_stages]
    var residual: RingPosition[Self.Storage.residual_stages]
    var partials: PartialSums[Self.config]
    """Not used without split-K."""
    var count: UInt32
    """Sub-tiles that have been visited."""

    @always_inline
    def __init__(
        out self,
        storage: Self.Storage,
        place: Self.Place,
        thread: UInt32,
        tmem: UInt32,
    ):
        """A thread, before its first tile.

        Args:
            storage: The block's shared memory.
            place: The block's.
            thread: From 0 to `EPILOGUE_THREADS - 1`.
            tmem: The address of the tensor memory.
        """
        self.storage = storage
        self.place = place
        self.thread = thread
        self.tmem = tmem + lane_offset(thread // WARP)
        self.accumulator = type_of(self.accumulator)()
        self.output = type_of(self.output)()
        self.residual = type_of(self.residual)()
        self.partials = type_of(self.partials)(storage, place, thread)
        self.count = 0

    @always_inline
    def _visited(self, geometry: TileGeometry, tile: Tile) -> Self.Visited:
        """What the visitor is told of this thread and a tile."""
        comptime rows = UInt32(Self.config.block_tile_shape[0])
        return Self.Visited(
            geometry=geometry,
            tile=tile,
            place=Self.ThreadPlace(self.thread),
            reducer=tile.pixel // rows,
            memory=self.storage.visitors(),
        )

    @always_inline
    def start(self, params: Self.Params, geometry: TileGeometry):
        """What comes before the first tile."""
        comptime if Self.Visitor.starts:
            params.visitor.start(self._visited(geometry, Tile()))
            sync_threads[EPILOGUE_THREADS](EPILOGUE_NAME)

    @always_inline
    def store(
        mut self,
        ref map: TensorMap,
        params: Self.Params,
        geometry: TileGeometry,
        tile: Tile,
    ):
        """Stores a tile. All threads of the epilogue.

        Args:
            map: The output's descriptor `[groups, N*Z*P*Q, K/groups]`.
            params: The epilogue's.
            geometry: The problem.
            tile: The tile.
        """
        var state = params.visitor.begin(self._visited(geometry, tile))
        self.storage.accumulators().wait(self.accumulator)
        order_after_barrier()
        var count = subtiles_of[Self.config](geometry, tile)
        comptime if Self.split_k > 1:
            self._send_sums(count)
            self.partials.wait()
        for subtile in range(self.place.split, count, UInt32(Self.split_k)):
            var sums = self._read(subtile)
            comptime if Self.split_k > 1:
                sums = self.partials.add(subtile, sums)
            else:
                if subtile + 1 == count:
                    self._release_accumulator()
            self._store_subtile(
                map,
                params,
                state,
                geometry,
                tile,
                subtile,
                sums.cast[DType.float32](),
            )
            self.count += 1
        params.visitor.end(state, self._visited(geometry, tile))
        comptime if Self.split_k > 1:
            self.partials.release()
            # There may have been no sub-tile of this block's.
            self._release_accumulator()
        self.accumulator.step()

    @always_inline
    def _read(self, subtile: UInt32) -> Self.Sums:
        """This thread's pixel of a sub-tile, from tensor memory."""
        return read_row[Self.sum_type, Self.size](
            self.tmem
            + self.accumulator.stage * UInt32(Self.stage_stride_cols)
            + subtile * UInt32(Self.size)
        )

    @always_inline
    def _send_sums(self, count: UInt32):
        """Sends the sub-tiles that other blocks store, of `count`."""
        self.partials.acquire()
        for subtile in range(count):
            if not self.partials.is_own(subtile):
                self.partials.send(subtile, self._read(subtile))
        self.partials.publish()

    @always_inline
    def finish(self):
        """Waits until the output buffers have been read, and lets the tensor
        memory be freed."""
        order_before_barrier()
        sync_warp()
        if self.thread % WARP == 0:
            var barrier = self.storage.dealloc()
            comptime if Self.config.cta_group == 2:
                barrier.arrive_at(self.place.leader())
                barrier.arrive_at(self.place.leader() + 1)
            else:
                barrier.arrive()
        if self.thread == 0:
            wait_stores_read[0]()

    @always_inline
    def _release_accumulator(self):
        """Tells the thread that multiplies that this warp has read all of an
        accumulator."""
        order_before_barrier()
        sync_warp()
        if self.thread % WARP == 0:
            var empty = self.storage.accumulators().empty(
                self.accumulator.stage
            )
            comptime if Self.config.cta_group == 2:
                empty.arrive_at(self.place.leader())
            else:
                empty.arrive()

    @always_inline
    def _store_subtile(
        mut self,
        ref map: TensorMap,
        params: Self.Params,
        mut state: Self.State,
        geometry: TileGeometry,
        tile: Tile,
        index: UInt32,
        sums: Self.Values,
    ):
        """Visits and stores a sub-tile of a tile."""
        var subtile = Subtile(part=index, block=0, count=self.count)
        var values = self._visit(params, state, geometry, tile, subtile, sums)
        var filter = tile.filter + index * UInt32(Self.size)
        var filters = tile.filter_end(geometry)
        var buffer = self.storage.outputs() + self.output.stage * UInt32(
            Self.Storage.OUTPUT_BYTES
        )
        comptime if Self.stores_registers or Self.Visitor.discards:
            comptime if not Self.Visitor.discards:
                self._store_registers(
                    params, geometry, tile.pixel, filter, filters, values
                )
            comptime if Self.Visitor.shares(Self.layout):
                sync_threads[EPILOGUE_THREADS](EPILOGUE_NAME)
        else:
            self._write_rows(
                params, geometry, tile.pixel, filter, filters, values, buffer
            )
            self._await_next_buffer()
            comptime if not Self.register_based and (
                Self.Work.computes or Self.Work.stores
            ):
                self._compute_rows(
                    params, geometry, tile.pixel, filter, filters, buffer
                )
            comptime if Self.stores_tiles:
                if self.thread == 0:
                    store_tile[3](
                        map, buffer, subtile_at(geometry, tile, filter)
                    )
                    commit_stores()
            self.output.step()
        params.visitor.postreduce(state, self._visited(geometry, tile), subtile)

    @always_inline
    def _visit(
        mut self,
        params: Self.Params,
        mut state: Self.State,
        geometry: TileGeometry,
        tile: Tile,
        subtile: Subtile,
        sums: Self.Values,
    ) -> Self.Values:
        """What the visitor makes of a sub-tile; of several forms, the one that
        takes whatever the others do not."""
        var at = self._visited(geometry, tile)
        var ring = self.storage.residuals()
        var residual = BufferedResidual[Self.layout](
            Self.has_residual,
            ring.full(self.residual.stage),
            self.residual.parity,
            ring.address(self.residual.stage),
            at.place,
        )
        var values = sums
        params.visitor.previsit(state, at, subtile)
        comptime if Self.Visitor.looped or Self.Visitor.forms == 1:
            comptime form = LOOPED if Self.Visitor.looped else 0
            values = params.visitor.visit[form=form, size=Self.size](
                state, at, subtile, 0, residual, sums
            )
        else:
            comptime for form in range(Self.Visitor.forms):
                if params.visitor.is_form[form]():
                    values = params.visitor.visit[form=form, size=Self.size](
                        state, at, subtile, 0, residual, sums
                    )
        params.visitor.reduce(state, at, subtile)
        comptime if Self.has_residual:
            sync_warp()
            if self.thread % WARP == 0:
                ring.empty(self.residual.stage).arrive()
            self.residual.step()
        return values

    @always_inline
    def _await_next_buffer(self):
        """Waits until all threads have written the present buffer, and the
        TMA has read the next one: it has to keep no more than the
        others."""
        comptime if Self.stores_tiles:
            fence_async_proxy()
            if self.thread == 0:
                wait_stores_read[Self.config.num_output_stages - 2]()
        sync_threads[EPILOGUE_THREADS](EPILOGUE_NAME)

    @always_inline
    def _write_rows(
        self,
        params: Self.Params,
        geometry: TileGeometry,
        pixel: UInt32,
        filter: UInt32,
        filters: UInt32,
        values: Self.Values,
        buffer: SharedAddress,
    ):
        """Writes this thread's pixel of a sub-tile to a buffer, after what is
        computed of it in registers."""
        var row = pixel + self.thread
        comptime for chunk in range(Self.chunks):
            var rounded = rounded_chunk[Self.out_type, chunk](values)
            comptime if Self.Work.computes and Self.register_based:
                var first = filter + UInt32(chunk * Self.width)
                if row < geometry.pixels() and first < filters:
                    rounded = Self.Work.compute[Self.width](
                        params.output, params.shape, row, first, rounded
                    )
            store_chunk(
                buffer + swizzled[Self.row_bytes](self.thread, UInt32(chunk)),
                rounded,
            )

    @always_inline
    def _store_registers(
        self,
        params: Self.Params,
        geometry: TileGeometry,
        pixel: UInt32,
        filter: UInt32,
        filters: UInt32,
        values: Self.Values,
    ):
        """Has the fused work store this thread's pixel of a sub-tile."""
        var row = pixel + self.thread
        if row >= geometry.pixels():
            return
        comptime for chunk in range(Self.chunks):
            var first = filter + UInt32(chunk * Self.width)
            if first < filters:
                Self.Work.store[Self.width](
                    params.output,
                    params.shape,
                    row,
                    first,
                    geometry.filters,
                    rounded_chunk[Self.out_type, chunk](values),
                )

    @always_inline
    def _compute_rows(
        self,
        params: Self.Params,
        geometry: TileGeometry,
        pixel: UInt32,
        filter: UInt32,
        filters: UInt32,
        buffer: SharedAddress,
    ):
        """Has the fused work compute, or store, what all threads have written
        to a buffer, neighbouring threads neighbouring filters."""
        for step in range(Self.chunks):
            var index = UInt32(step * EPILOGUE_THREADS) + self.thread
            var line, chunk = divmod(index, UInt32(Self.chunks))
            var address = buffer + swizzled[Self.row_bytes](line, chunk)
            var row = pixel + line
            var first = filter + chunk * UInt32(Self.width)
            if row < geometry.pixels() and first < filters:
                var rounded = load_chunk[Self.out_type](address)
                comptime if Self.Work.stores:
                    Self.Work.store[Self.width](
                        params.output,
                        params.shape,
                        row,
                        first,
                        geometry.filters,
                        rounded,
                    )
                else:
                    store_chunk(
                        address,
                        Self.Work.compute[Self.width](
                            params.output, params.shape, row, first, rounded
                        ),
                    )
        comptime if not Self.Work.stores:
            fence_async_proxy()
            sync_threads[EPILOGUE_THREADS](EPILOGUE_NAME)
