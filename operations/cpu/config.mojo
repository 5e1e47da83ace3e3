"""What the CPU kernels share: the register tile of the machine that they are
compiled for, and how they reach the activation."""

from std.collections import Optional
from std.sys.info import CompilationTarget, simd_width_of

from ..conv.fields import PANEL
from ..conv.operands import OperandTypes
from ..conv.kernel import kernel_name

comptime LANES = min(PANEL, simd_width_of[DType.float32]())
"""Lanes of a float32 register; a panel is `PANEL / LANES` registers wide."""

comptime HALF_PANEL = PANEL // 2
"""Filters of half a panel: a last one of no more takes half the registers, where a
panel is several."""

comptime HAS_HALF_PANELS = LANES <= HALF_PANEL
"""Whether half a panel is whole registers."""


def vector_registers() -> Int:
    """How many vector registers the target's instruction set names."""
    comptime if CompilationTarget.is_x86():
        return 32 if CompilationTarget.has_avx512f() else 16
    return 32


@fieldwise_init
struct CpuTile(ImplicitlyCopyable, Movable):
    """The register tile of the CPU kernels and the block that feeds it."""

    var rows: Int
    """Output pixels of a register tile."""
    var panels: Int
    """Filter panels of a register tile."""
    var max_depth: Int
    """Products accumulated between two spills of a tile, chosen so that a row
    block of activations stays in L2."""
    var max_accumulators: Int
    """Float32 values of the largest block of partial sums."""

    def columns(self) -> Int:
        """Filters of a register tile."""
        return self.panels * PANEL

    def elements(self) -> Int:
        """Accumulators of a register tile."""
        return self.rows * self.columns()

    @staticmethod
    def for_registers(lanes: Int, registers: Int) -> CpuTile:
        """The tile that fills a register file: accumulators, one register for
        each vector of the filter, one for the broadcast activation and one
        spare.

        Args:
            lanes: Float32 lanes of a register.
            registers: Registers that the instruction set names.
        """
        var panels = 2 if lanes == PANEL else 1
        var vectors = panels * PANEL // lanes
        var rows = (registers - vectors - 2) // vectors
        return CpuTile(
            rows=rows,
            panels=panels,
            max_depth=1152,
            max_accumulators=48 * 1024,
        )


comptime CPU_TILE = CpuTile.for_registers(LANES, vector_registers())
"""The tile of the machine that this is compiled for."""

comptime MOST_TILE_PANELS = 4 if LANES == PANEL else CPU_TILE.panels
"""Filter panels of the widest register tile."""


def tile_panels(rows: Int) -> Int:
    """Filter panels of a register tile of so many pixels: tiles of far fewer
    pixels than `CPU_TILE` leave registers for more of them.

    Args:
        rows: Output pixels, from 1 to `CPU_TILE.rows`.
    """
    var vectors = MOST_TILE_PANELS * PANEL // LANES
    if (rows + 1) * vectors + 2 <= vector_registers():
        return MOST_TILE_PANELS
    return CPU_TILE.panels


def wide_tile_rows() -> Int:
    """Output pixels of the largest register tile of `MOST_TILE_PANELS`."""
    var rows = CPU_TILE.rows
    while tile_panels(rows) < MOST_TILE_PANELS:
        rows -= 2
    return rows


def reads_in_place(input: DType, fused_input: Bool) -> Bool:
    """Whether register tiles can read the activation where it lies: in memory,
    as float32.

    Args:
        input: Of the activation.
        fused_input: Whether loads compute what stands in front of the op.
    """
    return input == DType.float32 and not fused_input


def fused_input_refusal(kernel: Int, types: OperandTypes) -> Optional[String]:
    """Why a kernel that reads the activation from memory is not built for an
    op, or None.

    Args:
        kernel: Its `KERNEL_*` code.
        types: Of the operands.
    """
    if not types.fused_input:
        return None
    return String(
        t"{kernel_name(kernel)} reads the activation from memory, but here"
        t" other work is fused in front of it"
    )


def integer_refusal(kernel: Int, types: OperandTypes) -> Optional[String]:
    """Why a kernel that multiplies floats is not built for an op, or None.

    Args:
        kernel: Its `KERNEL_*` code.
        types: Of the operands.
    """
    if not types.input.is_integral():
        return None
    return String(t"{kernel_name(kernel)} does not multiply {types.input}")
