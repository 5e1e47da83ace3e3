"""The implicit GEMM on tensor cores for any GPU: `mma.sync` of what `cp.async`
brings to shared memory.

A block computes one tile of pixels by filters of one group:

    for each slice of the products:
        wait for this slice
        start the copies of the slice that is `stages - 1` further
        this slice: shared memory -> matrices -> sums
    sums -> shared memory -> epilogue -> output, filters side by side

Nothing is set up before the first copy, so that a problem of few slices takes
little longer than its loads.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    thread_idx,
)
from max.gpu.memory import external_memory
from std.sys.info import size_of
from std.utils import StaticTuple

from ...conv.access import ActivationSource, OutputTarget
from ...conv.epilogue import Epilogue
from ...conv.memory import Reads
from ..limits import WARP
from ..overlap import wait_for_earlier_kernels
from ..pipeline.async_copy import await_copies, close_copies
from ..pipeline.chunks import shared_pointer, swizzled
from ..pipeline.matrices import Sums, load_matrices, multiply, sum_type_of
from ..tma.copy import SharedAddress
from .epilogue import TileEpilogue
from .geometry import MmaGeometry
from .loads import SliceLoads
from .tile import MATRIX_ROWS, ROW_BYTES, MmaTile


@fieldwise_init
struct MmaKernel[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    tile: MmaTile,
    whole: Bool,
]:
    """The kernel of a tile.

    Parameters:
        Source: The activation's type.
        Output: The output's type.
        bias_type: Of the bias.
        residual_type: Of the residual.
        tile: The tile.
        whole: Whether a group's channels are whole chunks, at addresses that
            are too.
    """

    comptime dtype = Self.Source.dtype
    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime Loads = SliceLoads[Self.Source, Self.tile, Self.whole]
    comptime rows = Self.tile.warp_pixels() // MATRIX_ROWS
    """Multiplies of a warp along the pixels."""
    comptime columns = Self.tile.warp_filters() // MATRIX_ROWS
    """Pairs of multiplies along the filters."""
    comptime sum_type = sum_type_of(Self.dtype)
    comptime Totals = StaticTuple[
        Sums[Self.dtype], 2 * Self.rows * Self.columns
    ]
    comptime Outputs = TileEpilogue[
        Self.Output,
        Self.bias_type,
        Self.residual_type,
        Self.sum_type,
        Self.tile,
    ]

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
            Int32(Self.tile.threads())
        ),
        `nvvm.minctasm`=SIMDLength(
            Self.tile.resident() if Self.whole else min(
                Self.tile.resident(), 2 if size_of[Self.dtype]() == 1 else 3
            )
        ),
    )
    def run(
        activation: Self.Source,
        filter: Reads[Self.dtype],
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: MmaGeometry,
        aligned: Int32,
    ):
        """A block: one tile; filters innermost, groups outermost.

        Args:
            activation: The activation.
            filter: `[K, T, R, S, C / groups]`.
            epilogue: The epilogue.
            output: The output.
            geometry: The problem.
            aligned: Not 0 if outputs, bias and residual may be accessed
                `TileEpilogue.chunk` filters at a time.
        """
        comptime assert Self.tile.is_valid(), "warps divide the tile evenly"
        var stages = UInt32(
            Int(
                external_memory[
                    UInt8, address_space=AddressSpace.SHARED, alignment=128
                ]()
            )
        )
        var rest, filter_tile = geometry.filter_tiles.split(UInt32(block_idx.x))
        var group, pixel_tile = geometry.pixel_tiles.split(rest)
        var pixel = Int(pixel_tile) * Self.tile.pixels
        var first = filter_tile * UInt32(Self.tile.filters)
        var filters = geometry.general.group_filters.value
        var outputs = Self.Outputs(
            epilogue,
            output,
            geometry,
            pixel=pixel,
            filter=group * filters + first,
            filters=filters - first,
        )
        var loads = Self.Loads(
            activation,
            filter,
            geometry,
            pixel=pixel,
            first=first,
            group=group,
        )
        wait_for_earlier_kernels()
        comptime if Self.whole:
            outputs.prefetch()
        var totals = Self._multiply(loads, geometry, stages)
        var ahead = outputs.ahead(aligned != 0)
        Self._write_sums(stages, totals)
        barrier()
        outputs.store(stages, ahead, aligned != 0)

    @staticmethod
    @always_inline
    def _multiply(
        loads: Self.Loads, geometry: MmaGeometry, stages: SharedAddress
    ) -> Self.Totals:
        """The sums of the warp's part of a tile; shared memory is free again
        when every thread has returned."""
        comptime ahead = Self.tile.stages - 1
        comptime bytes = UInt32(Self.tile.stage_bytes())
        comptime last = UInt32(Self.tile.stages * Self.tile.stage_bytes())
        comptime slice = Int32(Self.Loads.slice)
        var slices = (geometry.general.depth + slice - 1) // slice
        var totals = Self.Totals(fill=Sums[Self.dtype](0))
        comptime for i in range(ahead):
            if Int32(i) < slices:
                var stage = stages + UInt32(i) * bytes
                loads.finish(loads.start(geometry, Int32(i), stage), stage)
            close_copies()
        var reads = UInt32(0)
        var writes = UInt32(ahead) * bytes
        for index in range(slices):
            await_copies[ahead - 1]()
            barrier()
            var further = index + Int32(ahead)
            var held = Self.Loads.Held(fill=Self.Loads.Chunk(0))
            if further < slices:
                held = loads.start(geometry, further, stages + writes)
            close_copies()
            Self._multiply_slice(totals, stages + reads)
            if further < slices:
                loads.finish(held, stages + writes)
            reads = reads + bytes if reads + bytes < last else 0
            writes = writes + bytes if writes + bytes < last else 0
        await_copies[0]()
        barrier()
        return totals

    @staticmethod
    @always_inline
    def _multiply_slice(mut totals: Self.Totals, stage: SharedAddress):
        """Adds the products of a slice that are the warp's."""
        var lane = UInt32(thread_idx.x) % UInt32(WARP)
        var part, row, column = Self._place()
        # Rows of a load of four matrices: the upper and the lower 8 pixels, of
        # one chunk and of the next.
        var pixel = row + lane % 16
        var pixel_chunk = lane // 16
        # Two chunks of the first 8 filters, then of the next 8.
        var filter = column + lane % 8 + lane // 16 * 8
        var filter_chunk = lane // 8 % 2
        var filters = stage + UInt32(Self.tile.pixels * ROW_BYTES)
        comptime for step in range(Self.tile.warp_steps()):
            var chunk = 2 * (
                part * UInt32(Self.tile.warp_steps()) + UInt32(step)
            )
            var a = StaticTuple[StaticTuple[UInt32, 4], Self.rows]()
            comptime for i in range(Self.rows):
                a[i] = load_matrices[4](
                    stage
                    + swizzled[ROW_BYTES](
                        pixel + UInt32(i * MATRIX_ROWS), chunk + pixel_chunk
                    )
                )
            comptime for j in range(Self.columns):
                var b = load_matrices[4](
                    filters
                    + swizzled[ROW_BYTES](
                        filter + UInt32(j * MATRIX_ROWS), chunk + filter_chunk
                    )
                )
                comptime for i in range(Self.rows):
                    comptime for half in range(2):
                        comptime at = 2 * (i * Self.columns + j) + half
                        totals[at] = multiply[Self.dtype](
                            totals[at],
                            a[i],
                            StaticTuple[UInt32, 2](
                                b[2 * half], b[2 * half + 1]
                            ),
                        )

    @staticmethod
    @always_inline
    def _place() -> Tuple[UInt32, UInt32, UInt32]:
        """Which products of a slice are the warp's, and its first pixel and
        filter of the tile."""
        var warp = UInt32(thread_idx.x) // UInt32(WARP)
        comptime columns = UInt32(Self.tile.filter_warps)
        comptime rows = UInt32(Self.tile.pixel_warps)
        var column = warp % columns
        var row = warp // columns % rows
        return (
            warp // (columns * rows),
            row * UInt32(Self.tile.warp_pixels()),
            column * UInt32(Self.tile.warp_filters()),
        )

    @staticmethod
    @always_inline
    def _write_sums(sums: SharedAddress, totals: Self.Totals):
        """Writes the thread's sums to its warp's part, a row a pixel."""
        var lane = UInt32(thread_idx.x) % UInt32(WARP)
        var part, row, column = Self._place()
        comptime stride = UInt32(Self.tile.sums_stride())
        var data = shared_pointer[Self.sum_type](
            sums
            + 4
            * (
                part * UInt32(Self.tile.part_elements())
                + (row + lane // 4) * stride
                + column
                + lane % 4 * 2
            )
        )
        comptime for i in range(Self.rows):
            comptime for j in range(2 * Self.columns):
                var values = totals[2 * i * Self.columns + j]
                comptime for half in range(2):
                    data.unsafe_store[alignment=8](
                        (i * MATRIX_ROWS + 8 * half) * Int(stride) + 8 * j,
                        values.slice[2, offset=2 * half](),
                    )
