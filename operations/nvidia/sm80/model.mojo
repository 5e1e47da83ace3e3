"""How long a tile should take: the latency of its slices, what a multiprocessor
stores, and bytes."""

from std.math import ceildiv

from ...conv.memory import element_bytes
from ...conv.operands import Operands
from ...conv.problem import SPATIAL, ConvProblem
from ..pipeline.chunks import CHUNK_BYTES
from .geometry import WORD_BYTES
from .tile import ROW_BYTES, TILES, MmaTile

# The model's constants, fitted to 1,090 timings of four tiles on 145 problems of
# up to 6 us on an H100, in graphs where launches overlap, half of them with bias,
# SiLU and a residual; they are within 12 % of these (standard deviation). Loads
# of less than chunks are of a fit before.

comptime LAUNCH_SECONDS = 1.64e-6
"""From a launch's begin to its first multiply, and from its last to its end.
"""

comptime LATE_SLICE_SECONDS = 0.157e-6
"""Of a slice, more, that is not loaded before the first multiply."""

comptime MULTIPLY_SECONDS = 0.177e-6 / 1024
"""Of an element of a warp's part of the tile, in a slice."""

comptime STORE_SECONDS = 0.0339e-6 / 1024
"""Of an element that a multiprocessor stores."""

comptime FUSED_SECONDS = 0.302e-6
"""Of a tile whose epilogue makes anything of the values."""

comptime FUSED_STORE_SECONDS = 0.0815e-6 / 1024
"""Of an element that a multiprocessor stores then, more."""

comptime L2_BYTES_PER_SECOND = 46.2e9
"""Of the slices of all tiles, in chunks, for each multiprocessor that the device
has."""

comptime CROSSING_SHARE = 2.0
"""What such a byte costs where a row of a slice ends within a tap's channels."""

comptime WORDS_PER_SECOND = 2.75e9
"""Of the slices of a multiprocessor's tiles, where words are loaded."""

comptime ELEMENTS_PER_SECOND = 1.75e9
"""The same, where single elements of 16 or 8 bits are."""

comptime MEMORY_BYTES_PER_SECOND = 5.1e12
"""Of operands, beside all this."""

comptime COMPARED_SECONDS = 5.2e-6
"""Up to here the model may be compared with another kernel's. Beyond, a
multiprocessor's tiles are many, and it finds them too fast by up to 40 %."""


@fieldwise_init
struct Predicted(ImplicitlyCopyable, Movable):
    """A tile, and how long a problem takes with it."""

    var tile: Int
    """Which of `TILES`."""
    var seconds: Float64


def loads_chunks(problem: ConvProblem, operands: Operands) -> Bool:
    """Whether a group's channels are whole chunks, at addresses that are too.

    Args:
        problem: The convolution.
        operands: Its operands.
    """
    var bytes = problem.group_channels() * element_bytes(operands.types.input)
    return operands.aligned() and bytes % CHUNK_BYTES == 0


def loads_words(problem: ConvProblem, operands: Operands) -> Bool:
    """Whether they are whole words of several elements, if no chunks.

    Args:
        problem: The convolution.
        operands: Its operands.
    """
    var bytes = element_bytes(operands.types.input)
    return (
        bytes < WORD_BYTES
        and operands.aligned()
        and problem.group_channels() * bytes % WORD_BYTES == 0
    )


def fastest_tile(
    problem: ConvProblem, operands: Operands, multiprocessors: Int
) -> Predicted:
    """The tile that the model finds fastest.

    Args:
        problem: The convolution.
        operands: Its operands.
        multiprocessors: Of the device.
    """
    var tiles = materialize[TILES]()
    var best = Predicted(0, 0.0)
    for index in range(len(tiles)):
        var seconds = predicted_seconds(
            tiles[index], problem, operands, multiprocessors
        )
        if index == 0 or seconds < best.seconds:
            best = Predicted(index, seconds)
    return best


def predicted_seconds(
    tile: MmaTile,
    problem: ConvProblem,
    operands: Operands,
    multiprocessors: Int,
) -> Float64:
    """The model's time of a problem.

    Args:
        tile: Of a block.
        problem: The convolution.
        operands: Its operands.
        multiprocessors: Of the device.

    Returns:
        Seconds.
    """
    var bytes = element_bytes(operands.types.input)
    var tiles = (
        ceildiv(problem.gemm_m(), tile.pixels)
        * ceildiv(problem.group_filters(), tile.filters)
        * problem.groups
    )
    var slices = Float64(ceildiv(problem.gemm_k() * bytes, ROW_BYTES))
    var part = tile.warp_pixels() * tile.warp_filters() // tile.product_warps
    var turns = ceildiv(tiles, multiprocessors)
    var stored = turns * tile.pixels * tile.filters
    var fused = 0.0
    if operands.visits():
        fused = FUSED_SECONDS + FUSED_STORE_SECONDS * Float64(stored)
    return (
        LAUNCH_SECONDS
        + fused
        + slices * MULTIPLY_SECONDS * Float64(part)
        + LATE_SLICE_SECONDS * max(0.0, slices - Float64(tile.stages - 1))
        + STORE_SECONDS * Float64(stored)
        + slices
        * _slice_seconds(tile, problem, operands, tiles, multiprocessors)
        + _operand_bytes(problem, operands) / MEMORY_BYTES_PER_SECOND
    )


def _slice_seconds(
    tile: MmaTile,
    problem: ConvProblem,
    operands: Operands,
    tiles: Int,
    multiprocessors: Int,
) -> Float64:
    """To load a slice of every tile: chunks from the L2, that all share, and
    less by the threads of each multiprocessor.

    Args:
        tile: Of a block.
        problem: The convolution.
        operands: Its operands.
        tiles: Of the problem.
        multiprocessors: Of the device.
    """
    var bytes = element_bytes(operands.types.input)
    if loads_chunks(problem, operands):
        var loaded = Float64(tiles * tile.stage_bytes())
        if _rows_cross_taps(problem, bytes):
            loaded *= CROSSING_SHARE
        return loaded / (L2_BYTES_PER_SECOND * Float64(multiprocessors))
    var rate = ELEMENTS_PER_SECOND * Float64(bytes)
    if bytes == WORD_BYTES or loads_words(problem, operands):
        rate = WORDS_PER_SECOND * WORD_BYTES
    var turns = ceildiv(tiles, multiprocessors)
    return Float64(turns * tile.stage_bytes()) / rate


def _rows_cross_taps(problem: ConvProblem, bytes: Int) -> Bool:
    """Whether rows of slices begin or end within the channels of a tap.

    Args:
        problem: The convolution.
        bytes: Of an element.
    """
    var channels = problem.group_channels() * bytes
    return (
        channels != problem.gemm_k() * bytes
        and channels % ROW_BYTES != 0
        and ROW_BYTES % channels != 0
    )


def _operand_bytes(problem: ConvProblem, operands: Operands) -> Float64:
    """Bytes of activation, filter, residual and output."""
    var elements = problem.batch * problem.channels
    for axis in range(SPATIAL):
        elements *= problem.input[axis]
    elements += problem.filters * problem.gemm_k()
    var output = problem.gemm_m() * problem.filters
    output *= element_bytes(operands.types.output)
    if operands.residual:
        output *= 2
    return Float64(elements * element_bytes(operands.types.input) + output)
