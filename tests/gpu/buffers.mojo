"""Buffers of the GPU programs: their elements, and what they are filled with."""

from max.gpu.host import DeviceBuffer, DeviceContext

from operations.conv.memory import Reads, Writes
from operations.conv.problem import SPATIAL, ConvProblem
from kernels import (
    POISON,
    THREADS,
    fill_constant,
    fill_integers,
    fill_random,
)

comptime GUARD = 4096
"""Elements in front of and behind an output that no kernel may touch."""

comptime BLOCKS = 132 * 8
"""Blocks of the auxiliary kernels."""


def elements_of(problem: ConvProblem) -> Tuple[Int, Int, Int]:
    """Elements of activation, filter and output."""
    var pixels = problem.batch
    for axis in range(SPATIAL):
        pixels *= problem.input[axis]
    return (
        pixels * problem.channels,
        problem.filters * problem.gemm_k(),
        problem.gemm_m() * problem.filters,
    )


def data_of[
    dtype: DType
](buffer: DeviceBuffer[dtype], offset: Int = 0) -> Writes[dtype]:
    """A buffer's elements, behind `offset`."""
    return (
        buffer.unsafe_ptr()
        .unsafe_mut_cast[True]()
        .unsafe_origin_cast[MutUntrackedOrigin]()
        .unsafe_offset(offset)
    )


def reads_of[dtype: DType](buffer: DeviceBuffer[dtype]) -> Reads[dtype]:
    """A buffer's elements, to read."""
    return data_of(buffer).as_imm().unsafe_origin_cast[ImmUntrackedOrigin]()


def put_integers[
    dtype: DType
](
    ctx: DeviceContext, buffer: DeviceBuffer[dtype], magnitude: Int, seed: Int
) raises:
    """Fills a buffer with integers from -magnitude to magnitude."""
    ctx.enqueue_function[fill_integers[dtype]](
        buffer,
        Int64(len(buffer)),
        Int32(magnitude),
        Int32(seed),
        grid_dim=BLOCKS,
        block_dim=THREADS,
    )


def put_random[
    dtype: DType
](ctx: DeviceContext, buffer: DeviceBuffer[dtype], seed: Int) raises:
    """Fills a buffer with random values."""
    ctx.enqueue_function[fill_random[dtype]](
        buffer,
        Int64(len(buffer)),
        Int32(seed),
        grid_dim=BLOCKS,
        block_dim=THREADS,
    )


def put_constant[
    dtype: DType
](ctx: DeviceContext, buffer: DeviceBuffer[dtype], value: Float32) raises:
    """Fills a buffer with one value."""
    ctx.enqueue_function[fill_constant[dtype]](
        buffer,
        Int64(len(buffer)),
        value,
        grid_dim=BLOCKS,
        block_dim=THREADS,
    )


def poison[
    dtype: DType
](ctx: DeviceContext, buffer: DeviceBuffer[dtype]) raises:
    """Fills a buffer with what nobody expects."""
    put_constant(ctx, buffer, POISON)
