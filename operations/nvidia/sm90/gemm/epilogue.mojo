"""The collective epilogue of the Hopper kernel: accumulators -> what is fused
-> rounded to the output's type in shared memory -> output.

    loader, a warp a consumer:       for each of the consumer's tiles, for each
                                     of its sub-tiles that this block stores:
                                     fill a buffer with the residual; one thread
                                     where TMA does it
    consumer:                        for each of them: wait for the residual;
                                     visit the values; write them to a buffer;
                                     store it
"""

from max.gpu import block_idx, grid_dim
from std.sys.info import size_of
from std.utils import IndexList, StaticTuple

from ....conv.access import OutputTarget
from ....conv.operands import OperandTypes
from ...run_time import run_time
from ...epilogue.callbacks import (
    LOOPED,
    EpilogueVisitor,
    Subtile,
    Visited,
)
from ...epilogue.params import EpilogueParams
from ...im2col.tiles import Tile, TileGeometry
from ...tma.copy import (
    SharedAddress,
    commit_stores,
    store_tile,
)
from ...tma.descriptor import TensorMap
from .config import Sm90Config
from .legality import layout_of, stores_any_filters
from .epilogue_buffers import EpilogueBuffers
from .epilogue_config import (
    CONSUMER_THREADS,
    MATRIX_VALUES,
    ROW_BYTES,
    SUBTILE_FILTERS,
    panel_filters,
    panels,
)
from .epilogue_fragment import (
    SharedResidual,
    WarpgroupFragments,
    write_fragment,
)
from .epilogue_fused_store import FusedStore
from .epilogue_load import load_residual
from .epilogue_rows import RowStore
from .epilogue_unaligned_rows import UnalignedRowStore, is_unaligned
from .epilogue_values import select_values, values_of, visited_values
from .mma import Accumulators
from .split_k import OwnSubtiles


struct CollectiveEpilogue[
    Output: OutputTarget,
    Visitor: EpilogueVisitor,
    config: Sm90Config,
    sum_type: DType,
](TrivialRegisterPassable):
    """One consumer's epilogue: its buffers, and where it is in them.

    Parameters:
        Output: The output, and what the graph compiler fused behind it.
        Visitor: What is made of the values before they are stored.
        config: The configuration.
        sum_type: Of the accumulators.
    """

    comptime out_type = Self.Output.dtype
    comptime epilogue = Self.config.epilogue
    comptime fused_output = Self.Output.computes or Self.Output.stores
    comptime stores = not Self.Visitor.discards
    comptime takes_sums = Self.out_type == DType.int32
    """Whether the output makes of the sums what visitors would."""
    comptime tma_store = (
        Self.epilogue.tma_store and not Self.fused_output and Self.stores
    )
    comptime element_bytes = size_of[Self.out_type]()
    comptime any_filters = (
        Self.Visitor.any_filters
        and Self.stores
        and Self.config.unaligned
        and stores_any_filters(
            OperandTypes.unfused(Self.out_type, Self.out_type)
        )
        and not Self.fused_output
    )
    """Whether pixels of output and residual may be no multiple of 16 bytes."""
    comptime pixels = Self.epilogue.pixels(Self.element_bytes)
    comptime values = Self.epilogue.values(Self.element_bytes)
    comptime sums = (
        Self.config.consumer_pixels()
        * Self.config.consumer_filters()
        // CONSUMER_THREADS
    )
    """Of a thread."""
    comptime fragment = min(
        Self.epilogue.fragment_size,
        # With more values of four bytes beside so many sums, registers spill.
        8 if Self.sums >= 128 and Self.element_bytes == 4 else Self.values,
    )
    comptime filter_subtiles = Self.config.filter_subtiles()
    comptime subtiles = Self.filter_subtiles * Self.config.consumer_pixels() // Self.pixels
    comptime adds_residual = (
        Self.epilogue.num_epi_load_stages > 0 and Self.Visitor.adds_residual
    )
    comptime in_place = (
        Self.adds_residual and Self.epilogue.reuse_c and Self.stores
    )
    comptime Buffers = EpilogueBuffers[
        Self.epilogue,
        tma_store=Self.tma_store,
        in_place=Self.in_place,
        shares=(
            Self.Visitor.shares(Self.layout)
            or Self.fused_output
            or Self.epilogue.whole_rows
        ),
    ]
    comptime Params = EpilogueParams[Self.Output, Self.Visitor]
    comptime Sums = Accumulators[
        Self.config.mma_rows(), Self.config.mma_columns(), Self.sum_type
    ]
    comptime Values = SIMD[DType.float32, Self.values]
    comptime layout = layout_of(Self.config, Self.out_type)
    comptime ThreadPlace = WarpgroupFragments[Self.layout]
    comptime Visited = Visited[Self.ThreadPlace]
    comptime State = Self.Visitor.State

    var buffers: Self.Buffers
    var memory: SharedAddress
    """The visitor's."""
    var place: Self.ThreadPlace
    var count: UInt32
    """Sub-tiles that have been visited."""
    var own: OwnSubtiles
    """Those of the tile that this block stores."""

    @staticmethod
    def visitor_bytes() -> Int:
        """Shared memory of a consumer's visitor."""
        return Self.Visitor.shared_bytes(Self.layout)

    @always_inline
    def __init__(
        out self,
        barriers: SharedAddress,
        buffers: SharedAddress,
        memory: SharedAddress,
        consumer: UInt32,
        thread: UInt32,
    ):
        """The epilogue of a consumer.

        Args:
            barriers: Of the consumer's residual ring.
            buffers: The consumer's `EpilogueConfig.buffers`.
            memory: The consumer's `visitor_bytes`.
            consumer: Which.
            thread: Of the consumer's warpgroup; of the loader, its lane.
        """
        self.place = Self.ThreadPlace(thread)
        self.buffers = Self.Buffers(
            barriers, buffers, consumer, thread, self.place.lane
        )
        self.memory = memory
        self.count = 0
        self.own = OwnSubtiles(0, 0)

    # The loader.

    @staticmethod
    @always_inline
    def loads_with_warp(geometry: TileGeometry) -> Bool:
        """Whether all threads of the loader's warp `load`, and not one alone.

        Args:
            geometry: The problem.
        """
        comptime if Self.adds_residual:
            return Self._unaligned(geometry)
        else:
            return False

    @always_inline
    def load(
        mut self,
        ref map: TensorMap,
        params: Self.Params,
        geometry: TileGeometry,
        tile: Tile,
    ):
        """Fills buffers with the residual of the sub-tiles that this block
        stores of the consumer's part of a tile. One thread, or the warp if it
        `loads_with_warp`; only if the visitor has a residual.

        Args:
            map: The residual's descriptor, `[N*P, Q, K]`, im2col, if one thread
                loads.
            params: The epilogue's.
            geometry: The problem.
            tile: The consumer's part.
        """
        load_residual[Self.config, Self.any_filters](
            self.buffers, map, params.residual, geometry, tile
        )

    # The consumer.

    @always_inline
    def _visited(self, geometry: TileGeometry, tile: Tile) -> Self.Visited:
        """What the visitor is told of this thread and a tile."""
        var block = UInt32(block_idx.x)
        comptime if Self.config.keeps_pace():
            block += UInt32(block_idx.y) * UInt32(grid_dim.x)
        return Self.Visited(
            geometry=geometry,
            tile=tile,
            place=self.place,
            reducer=block * UInt32(Self.config.consumers)
            + self.buffers.consumer,
            memory=self.memory,
        )

    @always_inline
    def start(self, params: Self.Params, geometry: TileGeometry):
        """What comes before the consumer's first tile."""
        comptime if Self.Visitor.starts:
            params.visitor.start(self._visited(geometry, Tile()))
            self.buffers.sync()

    @always_inline
    def begin(
        self, params: Self.Params, geometry: TileGeometry, tile: Tile
    ) -> Self.State:
        """What can be fetched before the tile is multiplied.

        Args:
            params: The epilogue's.
            geometry: The problem.
            tile: The consumer's part.
        """
        return params.visitor.begin(self._visited(geometry, tile))

    @always_inline
    def store(
        mut self,
        ref map: TensorMap,
        params: Self.Params,
        begun: Self.State,
        sums: Self.Sums,
        geometry: TileGeometry,
        tile: Tile,
    ):
        """Stores the sub-tiles of a consumer's part of a tile, of one group, that
        are this block's own; what lies beyond the output is dropped.

        Args:
            map: The output's descriptor.
            params: The epilogue's.
            begun: What `begin` returned.
            sums: The consumer's values, waited for.
            geometry: The problem.
            tile: The consumer's part; its `pixel` is the consumer's first.
        """
        self.own = OwnSubtiles.of[Self.config, Self.subtiles](geometry, tile)
        comptime if Self.config.splits():
            if self.own.count == 0:
                return
        var state = begun
        comptime if Self.takes_sums:
            self._store_plain(map, params, sums, geometry, tile)
        else:
            comptime if not Self.fused_output and Self.stores:
                if params.visitor.is_identity():
                    self._store_plain(map, params, sums, geometry, tile)
                    return
            if params.visitor.has_forms():
                comptime for form in range(Self.Visitor.forms):
                    if params.visitor.is_form[form]():
                        self._store_visited[form](
                            map, params, state, sums, geometry, tile
                        )
                        return
            comptime if Self.Visitor.looped:
                self._store_looped(map, params, state, sums, geometry, tile)

    @always_inline
    def _store_plain(
        mut self,
        ref map: TensorMap,
        params: Self.Params,
        sums: Self.Sums,
        geometry: TileGeometry,
        tile: Tile,
    ):
        """`store` with nothing to visit."""
        comptime for i in range(Self.subtiles):
            if self.own.has(UInt32(i)):
                var buffer = self.buffers.next_output(self._unaligned(geometry))
                write_fragment[Self.out_type](
                    buffer,
                    self.place,
                    0,
                    values_of[
                        Self.layout, i, 0, Self.values, as_bits=Self.takes_sums
                    ](sums),
                )
                self._store_buffer(
                    map,
                    params,
                    buffer,
                    geometry,
                    tile,
                    UInt32(i),
                    False,
                )

    @always_inline
    def _store_visited[
        form: Int
    ](
        mut self,
        ref map: TensorMap,
        params: Self.Params,
        mut state: Self.State,
        sums: Self.Sums,
        geometry: TileGeometry,
        tile: Tile,
    ):
        """`store` with a form of the visitor that is known."""
        var at = self._visited(geometry, tile)
        var loads = self._loads(params)
        var before = SharedAddress(0)
        comptime for i in range(Self.subtiles):
            comptime count = visited_values(Self.layout, i, Self.Sums.width)
            comptime size = (
                count if Self.Visitor.whole_subtiles else min(
                    Self.fragment, count
                )
            )
            if self.own.has(UInt32(i)):
                var source = self.buffers.await_residual(loads)
                var subtile = self._subtile(UInt32(i))
                params.visitor.previsit(state, at, subtile)
                var buffer = SharedAddress(0)
                comptime for first in range(0, count, size):
                    comptime group = UInt32(first // MATRIX_VALUES)
                    var values = params.visitor.visit[form=form, size=size](
                        state,
                        at,
                        subtile,
                        group,
                        SharedResidual[Self.layout](loads, source, self.place),
                        values_of[Self.layout, i, first, size](sums),
                    )
                    comptime if first == 0:
                        comptime if Self.epilogue.delay_store and i > 0:
                            if UInt32(i) > self.own.first:
                                self._store_subtile(
                                    map,
                                    params,
                                    state,
                                    before,
                                    geometry,
                                    tile,
                                    UInt32(i - 1),
                                    loads,
                                )
                        comptime if Self.stores:
                            buffer = self.buffers.next(
                                loads, source, self._unaligned(geometry)
                            )
                    comptime if Self.stores:
                        write_fragment[Self.out_type](
                            buffer, self.place, group, values
                        )
                comptime if Self.stores:
                    # TMA reads whole rows, and drops what lies beyond a tile.
                    comptime for group in range(
                        count // MATRIX_VALUES, Self.values // MATRIX_VALUES
                    ):
                        write_fragment[Self.out_type, MATRIX_VALUES](
                            buffer,
                            self.place,
                            UInt32(group),
                            SIMD[DType.float32, MATRIX_VALUES](0),
                        )
                params.visitor.reduce(state, at, subtile)
                self.buffers.leave_residual(loads)
                comptime if Self.epilogue.delay_store:
                    before = buffer
                else:
                    self._store_subtile(
                        map,
                        params,
                        state,
                        buffer,
                        geometry,
                        tile,
                        UInt32(i),
                        loads,
                    )
        self._end_stores(map, params, state, before, geometry, tile, loads)

    @always_inline
    def _store_looped(
        mut self,
        ref map: TensorMap,
        params: Self.Params,
        mut state: Self.State,
        sums: Self.Sums,
        geometry: TileGeometry,
        tile: Tile,
    ):
        """`store` with the visitor's form `LOOPED`. The loop over fragments is
        not unrolled: the form holds all activations."""
        var at = self._visited(geometry, tile)
        var loads = self._loads(params)
        comptime count = UInt32(Self.values // Self.fragment)
        comptime groups = UInt32(Self.fragment // MATRIX_VALUES)
        var buffer = SharedAddress(0)
        var source = SharedAddress(0)
        var end = UInt32(run_time(Self.subtiles * Int(count)))
        comptime if Self.config.splits():
            end = self.own.end() * count
        for i in range(self.own.first * count, end):
            var index, step = divmod(i, count)
            var subtile = self._subtile(index)
            if step == 0:
                source = self.buffers.await_residual(loads)
                params.visitor.previsit(state, at, subtile)
            var values = params.visitor.visit[form=LOOPED, size=Self.fragment](
                state,
                at,
                subtile,
                step * groups,
                SharedResidual[Self.layout](loads, source, self.place),
                select_values[Self.layout, Self.subtiles, Self.fragment](
                    sums, i
                ),
            )
            if step == 0:
                comptime if Self.epilogue.delay_store:
                    if index > self.own.first:
                        self._store_subtile(
                            map,
                            params,
                            state,
                            buffer,
                            geometry,
                            tile,
                            index - 1,
                            loads,
                        )
                comptime if Self.stores:
                    buffer = self.buffers.next(
                        loads, source, self._unaligned(geometry)
                    )
            comptime if Self.stores:
                write_fragment[Self.out_type](
                    buffer, self.place, step * groups, values
                )
            if step == count - 1:
                params.visitor.reduce(state, at, subtile)
                self.buffers.leave_residual(loads)
                comptime if not Self.epilogue.delay_store:
                    self._store_subtile(
                        map,
                        params,
                        state,
                        buffer,
                        geometry,
                        tile,
                        index,
                        loads,
                    )
        self._end_stores(map, params, state, buffer, geometry, tile, loads)

    @always_inline
    def _subtile(self, index: UInt32) -> Subtile:
        """A sub-tile of a tile.

        Args:
            index: Its place in the order of visits.
        """
        var block, part = divmod(index, UInt32(Self.filter_subtiles))
        return Subtile(
            part=part, block=block, count=self.count + index - self.own.first
        )

    @staticmethod
    @always_inline
    def _unaligned(geometry: TileGeometry) -> Bool:
        """Whether pixels of the output are no multiple of 16 bytes. Their rows
        are stored by threads side by side, whatever the configuration says."""
        comptime if Self.any_filters:
            return is_unaligned[Self.out_type](geometry)
        else:
            return False

    @always_inline
    def _loads(self, params: Self.Params) -> Bool:
        """Whether there is a residual."""
        comptime if Self.adds_residual:
            return params.visitor.reads_residual()
        else:
            return False

    @always_inline
    def _end_stores(
        mut self,
        ref map: TensorMap,
        params: Self.Params,
        mut state: Self.State,
        buffer: SharedAddress,
        geometry: TileGeometry,
        tile: Tile,
        loads: Bool,
    ):
        """Stores the last sub-tile if stores are delayed, gives all residual
        buffers back, and lets the visitor end the tile."""
        comptime if Self.epilogue.delay_store:
            self._store_subtile(
                map,
                params,
                state,
                buffer,
                geometry,
                tile,
                self.own.end() - 1,
                loads,
            )
        self.buffers.release_all(loads, self.own.count)
        params.visitor.end(state, self._visited(geometry, tile))
        self.count += self.own.count

    @always_inline
    def _store_buffer(
        mut self,
        ref map: TensorMap,
        params: Self.Params,
        buffer: SharedAddress,
        geometry: TileGeometry,
        tile: Tile,
        index: UInt32,
        loads: Bool,
    ):
        """Stores a sub-tile from its buffer, and releases the residual's buffer
        if that is what was stored."""
        var block, part = divmod(index, UInt32(Self.filter_subtiles))
        var pixel = tile.pixel + block * UInt32(Self.pixels)
        var filter = tile.filter + part * SUBTILE_FILTERS
        self.buffers.publish(self._unaligned(geometry))
        comptime if Self.tma_store:
            if self.buffers.thread == 0:
                comptime panel_bytes = Self.pixels * ROW_BYTES
                comptime for panel in range(panels[Self.out_type]()):
                    comptime column = panel * panel_filters[Self.out_type]()
                    store_tile[3](
                        map,
                        buffer + UInt32(panel * panel_bytes),
                        IndexList[3](
                            Int(filter - tile.group * geometry.group_filters)
                            + column,
                            Int(pixel),
                            Int(tile.group),
                        ),
                    )
                commit_stores()
            self.buffers.release_stored(loads, index - self.own.first)
        elif Self.fused_output:
            FusedStore[Self.Output, Self.pixels](self.buffers.thread).store(
                params.output,
                params.shape,
                geometry,
                buffer,
                pixel,
                filter,
                tile.filter_end(geometry),
            )
            self.buffers.release_stored(loads, index - self.own.first)
        else:
            comptime Rows = RowStore[
                Self.Output,
                Self.layout,
                Self.epilogue.whole_rows,
                # Visitors that keep more would spill.
                Self.visitor_bytes() == 0,
            ]
            comptime if Self.any_filters:
                if self._unaligned(geometry):
                    UnalignedRowStore[Self.Output, Self.pixels](
                        self.place.warp, self.place.lane
                    ).store(
                        params.output,
                        geometry,
                        buffer,
                        pixel,
                        filter,
                        tile.filter_end(geometry),
                    )
                    self.buffers.release_stored(loads, index - self.own.first)
                    return
            var rows = Rows(self.place.warp, self.place.lane)
            var chunks = StaticTuple[Rows.Chunks, Rows.held]()
            comptime for panel in range(Rows.held):
                chunks[panel] = rows.load[panel](buffer)
            # The buffer has been read; a fence behind stores waits for them.
            comptime if Rows.many:
                self.buffers.release_stored(loads, index - self.own.first)
            comptime for panel in range(Rows.held):
                rows.store[panel](
                    params.output,
                    params.shape,
                    geometry,
                    chunks[panel],
                    pixel,
                    filter,
                    tile.filter_end(geometry),
                )
            comptime if not Rows.many:
                self.buffers.release_stored(loads, index - self.own.first)

    @always_inline
    def _store_subtile(
        mut self,
        ref map: TensorMap,
        params: Self.Params,
        mut state: Self.State,
        buffer: SharedAddress,
        geometry: TileGeometry,
        tile: Tile,
        index: UInt32,
        loads: Bool,
    ):
        """`_store_buffer` and the visitor's `postreduce`."""
        comptime if Self.stores:
            self._store_buffer(
                map, params, buffer, geometry, tile, index, loads
            )
        elif Self.Visitor.shares(Self.layout):
            self.buffers.sync()
        params.visitor.postreduce(
            state, self._visited(geometry, tile), self._subtile(index)
        )
