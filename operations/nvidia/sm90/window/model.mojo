"""How long a tiling of the Hopper window kernel should take: of what keeps a
multiprocessor busy the most, the latency of a block's tiles, or the bytes."""

from std.collections import Optional
from std.math import ceildiv

from ....conv.memory import element_bytes
from ....conv.operands import Device, Operands
from ....conv.problem import SPATIAL, ConvProblem
from ...limits import MAX_BOX, MAX_SHARED_BYTES, MMA_K_BYTES
from ...pipeline.chunks import CHUNK_BYTES
from ..wgmma import MMA_M
from .geometry import WindowGeometry
from .tiling import (
    FEWEST_FILTERS,
    MAX_SLICES,
    ROWS,
    Image,
    WindowTiling,
    most_consumers,
    width_of,
)

# The model's constants. Rates are those of the implicit GEMM's model
# (sm90/gemm/model.mojo), which timings were fitted to; what is counted in
# cycles of a warpgroup is an estimate that no timing has corrected.

comptime CLOCK = 1.8e9
"""Cycles of a second."""

comptime LAUNCH_SECONDS = 1.5e-6
"""From a launch's begin to its first load, and from its last store to its end.
"""

comptime SHARED_BYTES_PER_CYCLE = 128.0
"""Of shared memory, that a multiply reads."""

comptime WRITE_SHARE = 0.33
"""Of the bytes that TMA writes to shared memory, the part that costs a
multiply's reads their cycle."""

comptime RECEIVED_BYTES_PER_CYCLE = 52.6
"""That each multiprocessor gets from the L2, at most, if all load."""

comptime ROW_CYCLES = 2.0
"""Of TMA for a pixel of a box, however few its bytes."""

comptime PARTIAL_ROW_CYCLES = 4.9
"""The same for a pixel that ends beyond the channels."""

comptime MEMORY_BYTES_PER_SECOND = 4.0e12
"""Of device memory."""

comptime LOAD_CYCLES = 1200.0
"""From a window's load to its first byte."""

comptime WAIT_CYCLES = 150.0
"""Of a slice: its barriers, the fence, and the end of its multiplies."""

comptime ISSUE_CYCLES = 30.0
"""Of a warpgroup to issue a multiply, at least."""

comptime STORE_CYCLES = 70.0
"""Of a multiprocessor to store a multiply's pixels, and as much for every
`STORED_TOGETHER` values of a thread."""

comptime STORED_TOGETHER = 8.0
"""Values of a thread that are stored in `STORE_CYCLES`."""

comptime STORE_LATENCY_CYCLES = 500.0
"""Of a warpgroup, from its last multiply to its next."""

comptime RESIDUAL_CYCLES = 700.0
"""The same, more for a residual."""

comptime PART_CYCLES = 150.0
"""To add up one more part of a sum."""

comptime HIDDEN_SHARE = 0.75
"""Of what keeps a multiprocessor busy less than something else, the part that
takes no further time."""

comptime OVERLAP_SHARE = 0.2
"""What the shorter of computation and memory traffic adds to the longer."""


@fieldwise_init
struct Tiled(ImplicitlyCopyable, Movable):
    """A problem with a tiling."""

    var tiling: WindowTiling
    var geometry: WindowGeometry
    var seconds: Float64
    """The model's; `Float64.MAX` where the tiling cannot run the problem."""


def all_tilings(problem: ConvProblem, operands: Operands) -> List[WindowTiling]:
    """The tilings to choose from.

    Args:
        problem: The convolution.
        operands: Its operands.
    """
    var image = Image(problem)
    var bytes = problem.channels * element_bytes(operands.types.input)
    var most = most_consumers(problem.filters)
    var all = List[WindowTiling]()
    for row_bytes in materialize[ROWS]():
        if ceildiv(bytes, row_bytes) > MAX_SLICES:
            continue
        # Half of a row more than once would be for nothing.
        if row_bytes >= 2 * bytes and row_bytes > MMA_K_BYTES:
            continue
        for square in [True, False]:
            if square and image.rows == 1:
                continue
            for parts in [1, 2, 4]:
                if parts > ceildiv(bytes, row_bytes) * problem.filter[0]:
                    continue
                for rows in range(1, most + 1):
                    if rows > 1 and image.rows == 1:
                        continue
                    for columns in range(1, most // rows + 1):
                        if rows * columns * parts <= most:
                            all.append(
                                WindowTiling(
                                    square, rows, columns, parts, row_bytes
                                )
                            )
    return all^


def tiled(
    problem: ConvProblem,
    operands: Operands,
    device: Device,
    tiling: WindowTiling,
) -> Tiled:
    """A problem with a tiling.

    Args:
        problem: The convolution, with at least one output; nothing refuses it.
        operands: Its operands.
        device: The device.
        tiling: Of a block.
    """
    var geometry = WindowGeometry(
        problem,
        tiling,
        element_bytes=element_bytes(operands.types.input),
    )
    var seconds = Float64.MAX
    if fits(geometry):
        seconds = _seconds(problem, operands, device, tiling, geometry)
    return Tiled(tiling, geometry, seconds)


def fits(geometry: WindowGeometry) -> Bool:
    """Whether shared memory and TMA's boxes hold a problem that is cut.

    Args:
        geometry: The problem.
    """
    var row = Int(geometry.box_columns // geometry.stride[2])
    var rows = Int(geometry.box_bytes) // (
        row * Int(geometry.pixel_chunks) * CHUNK_BYTES
    )
    return (
        geometry.shared_bytes <= MAX_SHARED_BYTES
        and geometry.box_columns <= MAX_BOX
        and rows <= MAX_BOX
    )


def fastest_tiling(
    problem: ConvProblem, operands: Operands, device: Device
) -> Tiled:
    """The tiling that the model finds fastest.

    Args:
        problem: The convolution, with at least one output.
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


def smallest_shared_bytes(problem: ConvProblem, operands: Operands) -> Int:
    """Shared memory of the tiling that needs least, or `Int.MAX` if boxes of TMA
    hold none of the windows.

    Args:
        problem: The convolution.
        operands: Its operands.
    """
    var least = Int.MAX
    for tiling in all_tilings(problem, operands):
        var geometry = WindowGeometry(
            problem,
            tiling,
            element_bytes=element_bytes(operands.types.input),
        )
        var bytes = geometry.shared_bytes
        if bytes < least:
            geometry.shared_bytes = 0
            if fits(geometry):
                least = bytes
    return least


def _seconds(
    problem: ConvProblem,
    operands: Operands,
    device: Device,
    tiling: WindowTiling,
    geometry: WindowGeometry,
) -> Float64:
    """The model's time of a tiling that fits."""
    var width = FEWEST_FILTERS << width_of(problem.filters)
    var team = Float64(tiling.team())
    var taps = Float64(problem.filter[1] * problem.filter[2])
    var steps = Float64(geometry.steps)
    var multiplies = (
        taps
        * Float64(problem.filter[0])
        * Float64(
            Int(geometry.slices.value - 1) * Int(geometry.depth)
            + Int(geometry.last_depth)
        )
    )
    var multiply = Float64((MMA_M + width) * MMA_K_BYTES) / (
        SHARED_BYTES_PER_CYCLE
    )
    var window = steps * Float64(geometry.window_bytes)
    var shared = (
        team * multiplies * multiply
        + WRITE_SHARE * window / SHARED_BYTES_PER_CYCLE
    )
    var row_bytes = tiling.row_bytes
    var partial = (
        problem.channels * element_bytes(operands.types.input) % row_bytes != 0
    )
    var pixels = window / Float64(row_bytes)
    var loads = pixels * ROW_CYCLES
    if partial:
        loads += (
            pixels
            * (PARTIAL_ROW_CYCLES - ROW_CYCLES)
            / Float64(geometry.slices.value)
        )
    loads = max(loads, window / RECEIVED_BYTES_PER_CYCLE)
    var values = Float64(width // 2)
    if geometry.together == 0:
        values *= 4.0
    var store = team * STORE_CYCLES * (1.0 + values / STORED_TOGETHER)
    var most = max(max(shared, loads), store)
    var busy = most + (1 - HIDDEN_SHARE) * (shared + loads + store - most)

    var parts = Float64(tiling.parts)
    var own_steps = Float64(ceildiv(Int(geometry.steps), tiling.parts))
    var step = multiplies / steps * ISSUE_CYCLES + WAIT_CYCLES
    step = max(step, LOAD_CYCLES / Float64(geometry.stages - 1))
    var own = own_steps * step + STORE_LATENCY_CYCLES
    own += (parts - 1) * PART_CYCLES
    if operands.residual:
        own += RESIDUAL_CYCLES
    var rounds = Float64(ceildiv(Int(geometry.tiles), device.units))
    # A part multiplies its first slice while the others' filters come.
    var filters = Float64(geometry.filter_bytes)
    var first_bytes = parts * (
        filters / Float64(geometry.slices.value)
        + Float64(geometry.window_bytes)
    )
    var first = (
        LOAD_CYCLES
        + (first_bytes + (1 - HIDDEN_SHARE) * filters)
        / RECEIVED_BYTES_PER_CYCLE
    )
    var tile = max(busy, own) + (1 - HIDDEN_SHARE) * min(busy, own)
    var cycles = first + rounds * tile
    var computation = cycles / CLOCK + LAUNCH_SECONDS
    var memory = _operand_bytes(problem, operands) / MEMORY_BYTES_PER_SECOND
    return max(computation, memory) + OVERLAP_SHARE * min(computation, memory)


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
