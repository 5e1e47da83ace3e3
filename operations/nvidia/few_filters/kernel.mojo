"""Convolutions with few filters: windows of the image in shared memory, all taps
multiplied from there by `mma.sync`.

A block keeps all filters in shared memory and computes tiles, one after the
other:

    for each tile, and each slice of the channels:
        wait for the slice of the tile's window
        start the copies of the slice that is `stages - 1` further
        for each tap: window, filters -> matrices -> sums
        behind the last slice: sums -> epilogue -> output, each warp its own

An input pixel leaves the L2 once a tile, not once a tap. Where the filter has 3
taps along h, a window's row is also read from shared memory once for all three.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.memory import external_memory
from std.utils import StaticTuple

from ...conv.access import ActivationSource, OutputTarget
from ...conv.epilogue import Epilogue
from ...conv.memory import Reads
from ..limits import WARP
from ..overlap import wait_for_earlier_kernels
from ..pipeline.async_copy import await_copies, close_copies
from ..pipeline.chunks import CHUNK_BYTES
from ..pipeline.matrices import Sums, load_matrices, multiply
from ..tma.copy import SharedAddress
from .geometry import TilePlace, WindowGeometry
from .loads import WindowLoads, load_filters
from .store import WarpStore
from .tile import (
    JOINED_TAPS,
    MATRIX_FILTERS,
    MATRIX_ROWS,
    STEP_CHUNKS,
    WarpTile,
)


@fieldwise_init
struct WindowKernel[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    tile: WarpTile,
]:
    """The kernel of a number of filters.

    Parameters:
        Source: The activation's type; in memory.
        Output: The output's type.
        bias_type: Of the bias.
        residual_type: Of the residual.
        tile: Of a warp.
    """

    comptime dtype = Self.Source.dtype
    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime rows = Self.tile.rows
    comptime columns = Self.tile.columns()
    comptime pair = min(2, Self.columns)
    """Multiplies whose filters one load brings."""
    comptime Totals = StaticTuple[Sums[Self.dtype], Self.rows * Self.columns]
    comptime Store = WarpStore[
        Self.dtype, Self.Output, Self.bias_type, Self.residual_type, Self.tile
    ]

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
            Int32(WARP * Self.tile.warps)
        ),
        `nvvm.minctasm`=SIMDLength(Self.tile.resident(Self.tile.warps)),
    )
    def run(
        activation: Self.Source,
        filter: Reads[Self.dtype],
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: WindowGeometry,
    ):
        """A block: every tile whose number is its own, modulo the blocks.

        Args:
            activation: The activation.
            filter: `[K, R, S, C]`.
            epilogue: The epilogue.
            output: The output.
            geometry: The problem.
        """
        var filters = UInt32(
            Int(
                external_memory[
                    UInt8, address_space=AddressSpace.SHARED, alignment=128
                ]()
            )
        )
        var stages = filters + geometry.filter_bytes
        var end = stages + UInt32(geometry.stages) * geometry.stage_bytes
        var loads = WindowLoads[Self.Source](activation, geometry)
        wait_for_earlier_kernels()
        load_filters[Self.tile.filters](filter, geometry, filters)
        var current = Int32(block_idx.x)
        var next_tile = current
        var next_slice = Int32(0)
        var writes = stages
        for _ in range(geometry.stages - 1):
            if next_tile < geometry.tiles:
                loads.start(geometry, next_tile, next_slice, writes)
            close_copies()
            writes += geometry.stage_bytes
            next_slice += 1
            if next_slice == geometry.slices:
                next_slice = 0
                next_tile += Int32(grid_dim.x)
        var reads = stages
        var part, warp = divmod(
            UInt32(thread_idx.x) // UInt32(WARP), geometry.warps
        )
        # A pixel's parts are `warps` patches apart.
        var patch = end + (part * geometry.warps + warp) * geometry.patch_bytes
        var warp_row, warp_column = divmod(warp, geometry.warp_columns)
        var row = Int32(warp_row) * geometry.warp_tile_rows
        var column = Int32(warp_column) * geometry.warp_tile_columns
        var first = part * UInt32(STEP_CHUNKS * CHUNK_BYTES)
        var window = first + Self._window(geometry, UInt32(row), UInt32(column))
        var taps = first + filters + Self._filter_lane(geometry)
        var steps = _steps(geometry, part)
        var slice = Int32(0)
        var totals = Self.Totals(fill=Sums[Self.dtype](0))
        while current < geometry.tiles:
            if geometry.stages == 3:
                await_copies[1]()
            else:
                await_copies[0]()
            barrier()
            if next_tile < geometry.tiles:
                loads.start(geometry, next_tile, next_slice, writes)
            close_copies()
            next_slice += 1
            if next_slice == geometry.slices:
                next_slice = 0
                next_tile += Int32(grid_dim.x)
            var at = taps + UInt32(slice) * geometry.chunks * CHUNK_BYTES
            if geometry.joined != 0:
                Self._multiply[JOINED_TAPS](
                    totals, geometry, reads + window, at, steps
                )
            else:
                Self._multiply[1](totals, geometry, reads + window, at, steps)
            slice += 1
            if slice == geometry.slices:
                slice = 0
                var place = TilePlace.of(geometry, current)
                place.row += row
                place.column += column
                Self.Store.store(
                    epilogue, output, geometry, totals, place, patch, part
                )
                totals = Self.Totals(fill=Sums[Self.dtype](0))
                current += Int32(grid_dim.x)
            reads += geometry.stage_bytes
            if reads == end:
                reads = stages
            writes += geometry.stage_bytes
            if writes == end:
                writes = stages

    @staticmethod
    @always_inline
    def _window(
        geometry: WindowGeometry, row: UInt32, column: UInt32
    ) -> UInt32:
        """What a thread loads of the warp's first multiply and of the first
        tap: the upper and the lower 8 pixels, of one chunk and of the next."""
        var lane = UInt32(thread_idx.x) % UInt32(WARP)
        return (
            row * UInt32(geometry.row_stride) * geometry.row_bytes
            + (column + lane % UInt32(MATRIX_ROWS)) * geometry.pitch
            + lane // UInt32(MATRIX_ROWS) * CHUNK_BYTES
        )

    @staticmethod
    @always_inline
    def _filter_lane(geometry: WindowGeometry) -> UInt32:
        """What a thread loads of the first filters: two chunks of 8 filters,
        then of the next 8."""
        var lane = UInt32(thread_idx.x) % UInt32(WARP)
        var filter = lane % UInt32(MATRIX_FILTERS)
        comptime if Self.pair == 2:
            filter += lane // UInt32(MATRIX_ROWS) * UInt32(MATRIX_FILTERS)
        return (
            filter * geometry.filter_pitch
            + lane // UInt32(MATRIX_FILTERS) % 2 * CHUNK_BYTES
        )

    @staticmethod
    @always_inline
    def _multiply[
        joined: Int
    ](
        mut totals: Self.Totals,
        geometry: WindowGeometry,
        window: SharedAddress,
        filters: SharedAddress,
        steps: UInt32,
    ):
        """Adds the products of a slice that are the part's: all taps."""
        var columns = geometry.general.columns.value
        var tap_bytes = UInt32(Self.tile.filters) * geometry.filter_pitch
        var rows = geometry.general.rows.value
        comptime if joined > 1:
            rows = 1
        var dilation = geometry.general.dilation
        var step = geometry.parts * UInt32(STEP_CHUNKS * CHUNK_BYTES)
        for r in range(rows):
            var row = window + r * UInt32(dilation[1]) * geometry.row_bytes
            for s in range(columns):
                var pixels = row + geometry.column_bytes(
                    s * UInt32(dilation[2])
                )
                var taps = filters + (r * columns + s) * tap_bytes
                for _ in range(steps):
                    Self._multiply_step[joined](
                        totals,
                        geometry.step_bytes,
                        geometry.filter_pitch,
                        columns * tap_bytes,
                        pixels,
                        taps,
                    )
                    pixels += step
                    taps += step

    @staticmethod
    @always_inline
    def _multiply_step[
        joined: Int
    ](
        mut totals: Self.Totals,
        step_bytes: UInt32,
        filter_pitch: UInt32,
        row_bytes: UInt32,
        pixels: SharedAddress,
        filters: SharedAddress,
    ):
        """Adds the products of two chunks of a tap, or of `joined` taps along
        h, `row_bytes` of filters apart."""
        var a = StaticTuple[StaticTuple[UInt32, 4], Self.rows + joined - 1]()
        comptime for i in range(Self.rows + joined - 1):
            a[i] = load_matrices[4](pixels + UInt32(i) * step_bytes)
        comptime for j in range(0, Self.columns, Self.pair):
            comptime for r in range(joined):
                var b = load_matrices[2 * Self.pair](
                    filters
                    + UInt32(r) * row_bytes
                    + UInt32(j * MATRIX_FILTERS) * filter_pitch
                )
                comptime for i in range(Self.rows):
                    comptime for half in range(Self.pair):
                        comptime at = i * Self.columns + j + half
                        totals[at] = multiply[Self.dtype](
                            totals[at],
                            a[i + r],
                            StaticTuple[UInt32, 2](
                                b[2 * half], b[2 * half + 1]
                            ),
                        )


@always_inline
def _steps(geometry: WindowGeometry, part: UInt32) -> UInt32:
    """Multiplies of a tap of a slice that are a part's."""
    var steps = geometry.chunks // UInt32(STEP_CHUNKS)
    return (steps - part + geometry.parts - 1) // geometry.parts
