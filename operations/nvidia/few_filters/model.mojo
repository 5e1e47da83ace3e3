"""How a block's warps cut an image, and how long that should take: of what keeps
a multiprocessor busy the most, or the latency of a block's tiles."""

from std.math import ceildiv

from ...conv.memory import element_bytes
from ...conv.operands import Device, Operands
from ...conv.problem import SPATIAL, ConvProblem
from ..limits import WARP
from ..pipeline.chunks import CHUNK_BYTES
from .geometry import STORE_ELEMENTS, Images, WindowGeometry
from .tile import (
    JOINED_TAPS,
    MATRIX_ROWS,
    STEP_CHUNKS,
    TILES,
    Tiling,
    WarpTile,
    tile_of,
)

# The model's constants: an H200's rates, and counts of instructions of the
# compiled kernels, which compare the kernel's own tilings.

comptime CLOCK = 1.8e9
"""Cycles of a second."""

comptime LAUNCH_SECONDS = 2.5e-6
"""Of a launch, and of a block's first loads."""

comptime MULTIPLY_CYCLES = 1.7
"""Of one `mma.sync` on a multiprocessor's four tensor cores: 16 pixels, 8
filters, 32 bytes, at 60 % of the rate of `wgmma`."""

comptime SHARED_BYTES_PER_CYCLE = 128.0
"""Of shared memory."""

comptime MATRICES_BYTES = 512.0
"""That a load of four matrices reads."""

comptime L2_BYTES_PER_CYCLE = 21.0
"""Of a multiprocessor, where all load."""

comptime LINE_BYTES = 128
"""Of memory, that a warp's copies ask for in one cycle. A slice that is not all
of its pixel's channels is in lines of its own."""

comptime MEMORY_BYTES_PER_SECOND = 4.0e12
"""Of device memory."""

comptime COPY_INSTRUCTIONS = 24.0
"""Of a warp that starts the copies of a chunk each."""

comptime STEP_INSTRUCTIONS = 8.0
"""Of a warp's step, beside its loads and multiplies."""

comptime STORE_INSTRUCTIONS = 70.0
"""Of a warp that stores a piece each."""

comptime WRITE_INSTRUCTIONS = 12.0
"""Of a warp that writes the sums of a multiply to its shared memory."""

comptime HIDDEN_SHARE = 0.7
"""Of what keeps a multiprocessor busy less than something else, the part that
takes no further time."""

comptime SCHEDULERS = 4.0
"""Instructions of a multiprocessor in a cycle."""

comptime STEP_CYCLES = 45.0
"""From a step's first load to its first multiply."""

comptime OWN_MULTIPLY_CYCLES = 6.8
"""Of one multiply on a warp's own tensor core."""

comptime SLICE_CYCLES = 120.0
"""Of a slice's wait and barrier."""

comptime INSTRUCTION_CYCLES = 2.0
"""Of an instruction of a warp that has its scheduler for itself."""

comptime LOAD_CYCLES = 1500.0
"""From a window's first copy to its last byte."""

comptime STORE_CYCLES = 200.0
"""To wait for what a tile's stores read."""

comptime PART_CYCLES = 100.0
"""To add the sums of one more part."""

comptime SHARED_BYTES = 99 * 1024
"""Shared memory that a block may have on every GPU since Ampere."""


@fieldwise_init
struct Tiled(ImplicitlyCopyable, Movable):
    """A problem with a tiling."""

    var geometry: WindowGeometry
    var warps: Int
    """Of a block."""
    var blocks: Int
    """Of the launch."""
    var seconds: Float64
    """The model's; `Float64.MAX` where shared memory does not hold it."""


def window_geometry(
    problem: ConvProblem, operands: Operands, tiling: Tiling
) -> WindowGeometry:
    """A problem, cut.

    Args:
        problem: The convolution; nothing refuses it.
        operands: Its operands.
        tiling: Of a block.
    """
    return WindowGeometry(
        problem,
        materialize[TILES]()[tile_of(problem.filters)],
        tiling,
        input_bytes=element_bytes(operands.types.input),
        output_bytes=element_bytes(operands.types.output),
        placed=operands.types.fused_output,
    )


def smallest_shared_bytes(problem: ConvProblem, operands: Operands) -> Int:
    """Shared memory of the tiling that needs least.

    Args:
        problem: The convolution.
        operands: Its operands.
    """
    var least = Int.MAX
    for along_rows in [True, False]:
        var tiling = Tiling(1, 1, 1, along_rows, STEP_CHUNKS, 2)
        least = min(
            least, window_geometry(problem, operands, tiling).shared_bytes
        )
    return least


def fastest_tiling(
    problem: ConvProblem, operands: Operands, device: Device
) -> Tiled:
    """The tiling that the model finds fastest.

    Args:
        problem: The convolution, with at least one output; nothing refuses it.
        operands: Its operands.
        device: The device.
    """
    var all = all_tilings(problem, operands)
    var best = tiled(problem, operands, device, all[0])
    for i in range(1, len(all)):
        var next = tiled(problem, operands, device, all[i])
        if next.seconds < best.seconds:
            best = next
    return best


def all_tilings(problem: ConvProblem, operands: Operands) -> List[Tiling]:
    """The tilings to choose from, the one that needs least shared memory among
    them.

    Args:
        problem: The convolution.
        operands: Its operands.
    """
    var rows = Images(problem).rows
    var tile = materialize[TILES]()[tile_of(problem.filters)]
    var all = List[Tiling]()
    for along_rows in [False, True]:
        if along_rows and rows == 1:
            continue
        for chunks in _slices(problem, operands):
            for shape in range(_SHAPES * _SHAPES * _SHAPES):
                var tiling = Tiling(
                    1 << shape // (_SHAPES * _SHAPES),
                    1 << shape // _SHAPES % _SHAPES,
                    1 << shape % _SHAPES,
                    along_rows,
                    chunks,
                    2,
                )
                if (
                    tiling.warps() > tile.warps
                    or tiling.parts * STEP_CHUNKS > chunks
                ):
                    continue
                all.append(tiling)
                tiling.stages = 3
                all.append(tiling)
    return all^


def tiled(
    problem: ConvProblem, operands: Operands, device: Device, tiling: Tiling
) -> Tiled:
    """A problem with a tiling.

    Args:
        problem: The convolution, with at least one output; nothing refuses it.
        operands: Its operands.
        device: The device.
        tiling: Of a block.
    """
    var geometry = window_geometry(problem, operands, tiling)
    if geometry.shared_bytes > SHARED_BYTES:
        return Tiled(geometry, 1, 1, Float64.MAX)
    var tile = materialize[TILES]()[tile_of(problem.filters)]
    var resident = _resident(tile, tiling.warps(), geometry)
    return Tiled(
        geometry,
        tiling.warps(),
        min(Int(geometry.tiles), device.units * resident),
        _seconds(problem, operands, device, tiling, geometry, resident),
    )


comptime _SHAPES = 4
"""Numbers of warps along an axis: 1, 2, 4, 8."""

comptime _MAX_SLICE = 10
"""Chunks of the widest slice."""


def _slices(problem: ConvProblem, operands: Operands) -> List[Int]:
    """The widths of slices to choose from, in chunks."""
    var bytes = problem.channels * element_bytes(operands.types.input)
    var all = ceildiv(bytes, STEP_CHUNKS * CHUNK_BYTES) * STEP_CHUNKS
    var widths = [all] if all <= _MAX_SLICE else List[Int]()
    for width in [2, 4, 8]:
        if width < all:
            widths.append(width)
    return widths^


def _resident(tile: WarpTile, warps: Int, geometry: WindowGeometry) -> Int:
    """Blocks that a multiprocessor holds."""
    # The driver keeps 1 KiB of each block's shared memory for itself.
    var by_memory = (SHARED_BYTES + 1024) // (geometry.shared_bytes + 1024)
    return max(1, min(by_memory, tile.resident(warps)))


def _seconds(
    problem: ConvProblem,
    operands: Operands,
    device: Device,
    tiling: Tiling,
    geometry: WindowGeometry,
    resident: Int,
) -> Float64:
    """The model's time of a tiling."""
    var tile = materialize[TILES]()[tile_of(problem.filters)]
    var tiles = Int(geometry.tiles)
    var busy = _busy_cycles(problem, operands, tile, tiling, geometry)
    var own = _own_cycles(problem, tile, tiling, geometry)
    var cycles = max(
        busy * Float64(ceildiv(tiles, device.units)),
        own * Float64(ceildiv(tiles, device.units * resident)),
    )
    var filters = Int(geometry.filter_bytes) // CHUNK_BYTES
    var first = (
        Float64(ceildiv(filters, tiling.warps() * WARP)) * COPY_INSTRUCTIONS
    )
    var bytes = _operand_bytes(problem, operands)
    return LAUNCH_SECONDS + max(
        (first + cycles) / CLOCK, bytes / MEMORY_BYTES_PER_SECOND
    )


def _steps(problem: ConvProblem, geometry: WindowGeometry) -> Int:
    """Multiplies of a sum, one after the other."""
    var steps = Int(geometry.slices) * Int(geometry.chunks) // STEP_CHUNKS
    return steps * problem.taps()


def _busy_cycles(
    problem: ConvProblem,
    operands: Operands,
    tile: WarpTile,
    tiling: Tiling,
    geometry: WindowGeometry,
) -> Float64:
    """Cycles of a multiprocessor for a tile: of tensor cores, shared memory,
    schedulers, loads or their lines, whichever are most, and a share of the
    others."""
    var warps = Float64(geometry.warps)
    var parts = Float64(tiling.parts)
    var steps = Float64(_steps(problem, geometry))
    var products = warps * Float64(tile.rows) * Float64(tile.columns()) * steps
    var rows = Float64(tile.rows)
    if geometry.joined != 0:
        rows = Float64(tile.rows + JOINED_TAPS - 1) / Float64(JOINED_TAPS)
    var loads = warps * steps * (rows + Float64(tile.columns()) / 2)
    var pixels = Float64(geometry.window_rows) * Float64(
        geometry.window_columns
    )
    var window = pixels * Float64(geometry.pixel_chunks) * Float64(CHUNK_BYTES)
    var outputs = warps * Float64(tile.rows * MATRIX_ROWS * problem.filters)
    var shared = (
        loads * MATRICES_BYTES + window + 8 * parts * outputs
    ) / SHARED_BYTES_PER_CYCLE
    var copies = pixels * Float64(geometry.slices) * Float64(geometry.chunks)
    var width = CHUNK_BYTES // element_bytes(operands.types.output)
    var stored = outputs / Float64(
        1 if geometry.stores == STORE_ELEMENTS else width
    )
    var written = warps * Float64(tile.rows * tile.columns())
    var instructions = (
        (copies * COPY_INSTRUCTIONS + stored * STORE_INSTRUCTIONS)
        / Float64(WARP)
        + parts * written * WRITE_INSTRUCTIONS
        + loads
        + products
        + warps * steps * STEP_INSTRUCTIONS
    )
    var multiplies = products * MULTIPLY_CYCLES
    var issue = instructions / SCHEDULERS
    var loaded = window / L2_BYTES_PER_CYCLE
    var lines = window / Float64(LINE_BYTES)
    if geometry.slices > 1:
        var bytes = Int(geometry.chunks) * CHUNK_BYTES
        var of_slice = ceildiv(bytes, LINE_BYTES)
        lines = pixels * Float64(Int(geometry.slices) * of_slice)
    var most = max(max(multiplies, shared), max(max(issue, loaded), lines))
    var all = multiplies + shared + issue + loaded + lines
    return most + (1 - HIDDEN_SHARE) * (all - most)


def _own_cycles(
    problem: ConvProblem,
    tile: WarpTile,
    tiling: Tiling,
    geometry: WindowGeometry,
) -> Float64:
    """Cycles of a block for a tile, if it has a multiprocessor for itself."""
    var threads = tiling.warps() * WARP
    var of_slice = ceildiv(Int(geometry.chunks) // STEP_CHUNKS, tiling.parts)
    var steps = Float64(of_slice * problem.taps())
    var products = steps * Float64(tile.rows * tile.columns())
    if geometry.joined != 0:
        steps /= Float64(JOINED_TAPS)
    var pixels = Int(geometry.window_rows) * Int(geometry.window_columns)
    var copies = ceildiv(pixels * Int(geometry.chunks), threads)
    var slice = (
        steps * STEP_CYCLES
        + products * OWN_MULTIPLY_CYCLES
        + Float64(copies) * COPY_INSTRUCTIONS * INSTRUCTION_CYCLES
        + SLICE_CYCLES
    )
    slice = max(slice, LOAD_CYCLES / Float64(geometry.stages - 1))
    var patches = tile.rows // tile.patch_rows()
    var pieces = Int(geometry.pieces.value) * tile.patch_rows()
    var stores = Float64(patches * ceildiv(pieces, WARP * tiling.parts))
    var writes = Float64(tile.rows * tile.columns())
    var issued = stores * STORE_INSTRUCTIONS + writes * WRITE_INSTRUCTIONS
    return (
        Float64(geometry.slices) * slice
        + issued * INSTRUCTION_CYCLES
        + STORE_CYCLES
        + Float64(tiling.parts - 1) * PART_CYCLES
    )


def _operand_bytes(problem: ConvProblem, operands: Operands) -> Float64:
    """Bytes of activation, residual and output."""
    var elements = problem.batch * problem.channels
    for axis in range(SPATIAL):
        elements *= problem.input[axis]
    var output = problem.gemm_m() * problem.filters
    output *= element_bytes(operands.types.output)
    if operands.residual:
        output *= 2
    return Float64(elements * element_bytes(operands.types.input) + output)
