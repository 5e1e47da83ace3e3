"""Transposes filters on the device from the op's other layouts into the
kernels' own, `[K, T, R, S, C / groups]`."""

from max.gpu import barrier, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import external_memory
from std.math import ceildiv
from std.sys.info import size_of

from ..conv.fields import LAYOUT_FCRS, LAYOUT_RSCF
from ..conv.memory import Reads, Writes
from ..conv.problem import ConvProblem, layout_name
from .limits import MAX_BLOCKS

comptime SIDE = 32
"""Rows and columns of a tile."""

comptime LINES = 8
"""Rows that a block's threads move at once."""


def transpose_kernel[
    dtype: DType
](
    source: Reads[dtype],
    target: Writes[dtype],
    matrices: Int64,
    rows: Int64,
    columns: Int64,
):
    """Transposes matrices, a tile of one at a time.

    Args:
        source: `[matrices, rows, columns]`.
        target: `[matrices, columns, rows]`.
        matrices: How many.
        rows: Of each in `source`.
        columns: Of each in `source`.
    """
    var tile = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=16
    ]()
    var height, width = Int(rows), Int(columns)
    var down, across = ceildiv(height, SIDE), ceildiv(width, SIDE)
    var line, lane = divmod(Int(thread_idx.x), SIDE)
    var tiles = Int(matrices) * down * across
    for index in range(Int(block_idx.x), tiles, Int(grid_dim.x)):
        var rest, column_tile = divmod(index, across)
        var matrix, row_tile = divmod(rest, down)
        var base = matrix * height * width
        var column = column_tile * SIDE
        var row = row_tile * SIDE
        for i in range(line, SIDE, LINES):
            if row + i < height and column + lane < width:
                tile[unsafe_offset=i * (SIDE + 1) + lane] = source[
                    unsafe_offset=base + (row + i) * width + column + lane
                ]
        barrier()
        for i in range(line, SIDE, LINES):
            if column + i < width and row + lane < height:
                target[
                    unsafe_offset=base + (column + i) * height + row + lane
                ] = tile[unsafe_offset=lane * (SIDE + 1) + i]
        barrier()


def pack_filter[
    dtype: DType
](
    ctx: DeviceContext,
    problem: ConvProblem,
    layout: Int,
    source: Reads[dtype],
    packed: Writes[dtype],
) raises:
    """Enqueues the transposition of a filter.

    Parameters:
        dtype: The filter's type.

    Args:
        ctx: The device; nothing is waited for.
        problem: The convolution, valid, with a filter that is not empty.
        layout: `LAYOUT_RSCF` or `LAYOUT_FCRS`.
        source: The filter in device memory.
        packed: Where to, as many elements.

    Raises:
        On another layout; what the driver refused.
    """
    var matrices: Int
    var rows: Int
    var columns: Int
    if layout == LAYOUT_RSCF:
        matrices = 1
        rows = problem.gemm_k()
        columns = problem.filters
    elif layout == LAYOUT_FCRS:
        matrices = problem.filters
        rows = problem.group_channels()
        columns = problem.taps()
    else:
        raise Error(
            t"filter_layout: {layout_name(layout)} is packed for a CPU; a GPU"
            t" takes KRSC, RSCF and FCRS"
        )
    var tiles = matrices * ceildiv(rows, SIDE) * ceildiv(columns, SIDE)
    ctx.enqueue_function[transpose_kernel[dtype]](
        source,
        packed,
        Int64(matrices),
        Int64(rows),
        Int64(columns),
        grid_dim=min(tiles, MAX_BLOCKS),
        block_dim=SIDE * LINES,
        shared_mem_bytes=SIDE * (SIDE + 1) * size_of[dtype](),
    )
