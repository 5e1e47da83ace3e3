"""Dot products in vector registers of x86: a lane adds up the products that 4 bytes
hold, for each of a panel's filters.

- AVX512-BF16: `vdpbf16ps`, two products of bfloat16. Sums are float32 and round
  to nearest even; denormal operands and sums count as zeros.
- AVX512-VNNI and AVX-VNNI: `vpdpbusd`, four products of an unsigned activation
  and a signed filter. Sums are int32.

(Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.)
"""

from std.collections import Array, Optional
from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import CompilationTarget

from ...conv.fields import (
    KERNEL_AVX512_BF16,
    KERNEL_AVX512_VNNI,
    KERNEL_AVX_VNNI,
    PANEL,
)
from ...conv.memory import Reads, Writes, sum_type
from ...conv.kernel import kernel_name
from ..features import AVX512_BF16, AVX512_VNNI, AVX_VNNI
from ..near_rows import near_address
from ..register_output import RegisterOutput
from ..rounding import quantized_by_avx512, rounded_by_avx512_bf16
from .few_filters import multiply_few
from .mma import (
    CHUNK_WORDS,
    WORD,
    ActivationTile,
    FilterTile,
    OutputLines,
    Sums,
)
from .vector_tile import multiply_panels
from .vector_unit import (
    L1_SLICE_BYTES,
    L2_SLICE_BYTES,
    VectorUnit,
    near_word,
    slices_of,
    tiles_together,
)

comptime TILES_AT_ONCE = 16
"""Register tiles that are multiplied by some panels before the next ones, where
their outputs go to memory at once."""

comptime LATENCY_STEPS = 6
"""Multiplications, one a cycle, that hide the latency of one."""


def _name(kernel: Int) -> String:
    """The instruction that multiplies."""
    return "vdpbf16ps" if kernel == KERNEL_AVX512_BF16 else "vpdpbusd"


@always_inline
def _instruction[
    lanes: Int, sum_type: DType, //, name: String
](
    sums: SIMD[sum_type, lanes],
    pixel: SIMD[DType.uint32, lanes],
    filters: SIMD[DType.uint32, lanes],
) -> SIMD[sum_type, lanes]:
    """Adds the products of a word of each filter by one instruction."""
    # Registers 16 to 31, which `v` allows, have no VEX encoding.
    comptime constraints: StaticString = (
        "=x,x,x,0" if name.startswith("{vex}") else "=v,v,v,0"
    )
    return inlined_assembly[
        name + " $2, $1, $0",
        SIMD[sum_type, lanes],
        constraints=constraints,
        has_side_effect=False,
    ](pixel, filters, sums)


@always_inline
def dot_bfloat16[
    lanes: Int, //
](
    sums: SIMD[DType.float32, lanes],
    pixel: SIMD[DType.uint32, lanes],
    filters: SIMD[DType.uint32, lanes],
) -> SIMD[DType.float32, lanes]:
    """Adds both products of each pair of bfloat16, by AVX512-BF16.

    Args:
        sums: What to add to.
        pixel: Pairs of activations.
        filters: Pairs of a filter.
    """
    return _instruction["vdpbf16ps"](sums, pixel, filters)


struct X86Unit[
    code: Int,
    register_lanes: Int,
    max_rows: Int,
    tile_panels: Int,
    cycles: Float64,
](VectorUnit):
    """Dot products in vector registers.

    Parameters:
        code: The `KERNEL_*` code.
        register_lanes: Lanes of a register.
        max_rows: Pixels of the largest register tile, an even number.
        tile_panels: Its panels.
        cycles: Of a multiplication of whole registers.
    """

    comptime kernel = Self.code
    comptime lanes = Self.register_lanes
    comptime slice_bytes = (
        L2_SLICE_BYTES if Self.register_lanes == PANEL else L1_SLICE_BYTES
    )
    comptime rows = Self.max_rows
    comptime tiles = tiles_together(Self.max_rows, Self.tile_panels)
    comptime single_rows = 0
    comptime panels = Self.tile_panels
    comptime single_panels = Self.tile_panels
    comptime step_words = 1

    @staticmethod
    def feature(dtype: DType) -> Optional[Int]:
        """See `DotUnit`. AVX512-FP16 adds in float16, which loses too much."""
        if Self.code == KERNEL_AVX512_BF16:
            if dtype == DType.bfloat16:
                return AVX512_BF16
            return None
        if dtype != DType.int8 and dtype != DType.uint8:
            return None
        if Self.code == KERNEL_AVX512_VNNI:
            return AVX512_VNNI
        return AVX_VNNI

    @staticmethod
    def flips(dtype: DType) -> Bool:
        return dtype == DType.int8

    @staticmethod
    def build_refusal() -> Optional[String]:
        comptime if Self.code == KERNEL_AVX_VNNI:
            comptime if CompilationTarget.has_avx2():
                return None
            return String(
                "avx_vnni: the compiler takes this CPU for one without AVX2"
            )
        else:
            comptime if CompilationTarget.has_avx512f():
                return None
            return String(
                t"{kernel_name(Self.code)}: the compiler takes this CPU for one"
                t" without AVX-512"
            )

    @staticmethod
    def takes_few(dtype: DType) -> Bool:
        """See `DotUnit`. Sums of AVX-VNNI, of half as many registers, would leave
        some."""
        return Self.code == KERNEL_AVX512_VNNI

    @staticmethod
    def multiply[
        dtype: DType
    ](
        mut state: Int,
        activation: ActivationTile[dtype],
        filter: FilterTile[dtype],
        sums: Sums,
        outputs: OutputLines[dtype],
    ):
        comptime if Self.takes_few(dtype):
            if filter.few > 0:
                multiply_few[Self, dtype](activation, filter, sums)
                return
        multiply_panels[Self, dtype](activation, filter, sums, outputs)

    @staticmethod
    def stores_outputs(dtype: DType) -> Bool:
        """See `DotUnit`. AVX-VNNI has no registers for what rounds."""
        return Self.code != KERNEL_AVX_VNNI and Bool(Self.feature(dtype))

    @staticmethod
    def tiles_at_once(dtype: DType, chunks: Int) -> Int:
        # What a call costs beside its products is shared by more pixels, whose
        # activations stay in L1 for the next panels.
        if slices_of[Self](dtype, chunks, Self.panels) > 1:
            return Self.tiles
        return TILES_AT_ONCE

    @staticmethod
    def round[
        dtype: DType, registers: Int
    ](
        output: RegisterOutput[dtype],
        values: Array[SIMD[DType.float32, Self.lanes], registers],
    ) -> SIMD[dtype, registers * Self.lanes]:
        """See `VectorUnit`. Denormal numbers of bfloat16 become zeros."""
        comptime Register = SIMD[DType.float32, 16]
        comptime Outputs = SIMD[dtype, registers * Self.lanes]
        comptime if dtype == DType.bfloat16:
            var pairs = rounded_by_avx512_bf16(
                rebind[Register](values[0]), rebind[Register](values[1])
            )
            return rebind[Outputs](bitcast[dtype, 32](pairs))
        else:
            return rebind[Outputs](
                quantized_by_avx512[dtype](
                    output.byte_steps,
                    rebind[Register](values[0]),
                    rebind[Register](values[1]),
                    rebind[Register](values[2]),
                    rebind[Register](values[3]),
                )
            )

    @staticmethod
    def widen[dtype: DType](panel: Reads[dtype], words: Int, to: Writes[dtype]):
        # `spread` is 1.
        pass

    @staticmethod
    def add[
        dtype: DType
    ](
        sums: SIMD[sum_type(dtype), Self.lanes],
        pixel: SIMD[DType.uint32, Self.lanes],
        filters: SIMD[DType.uint32, Self.lanes],
    ) -> SIMD[sum_type(dtype), Self.lanes]:
        comptime encoding = "{vex} " if Self.code == KERNEL_AVX_VNNI else ""
        return _instruction[encoding + _name(Self.code)](sums, pixel, filters)

    @always_inline
    @staticmethod
    def add_word[
        dtype: DType, row: Int
    ](
        sums: SIMD[sum_type(dtype), Self.lanes],
        pixel: Reads[DType.uint32],
        row_bytes: Int,
        filters: SIMD[DType.uint32, Self.lanes],
    ) -> SIMD[sum_type(dtype), Self.lanes]:
        """See `VectorUnit`. `vdpbf16ps` broadcasts what it reads for nothing,
        where a load that does takes longer than the multiplication."""
        comptime if Self.code == KERNEL_AVX512_BF16:
            return inlined_assembly[
                "vdpbf16ps " + near_address[row]() + "{1to16}, $1, $0",
                SIMD[sum_type(dtype), Self.lanes],
                constraints="=v,v,r,0,r,~{memory}",
            ](filters, pixel, sums, row_bytes)
        return Self.add[dtype](
            sums, {near_word[row](pixel, row_bytes)}, filters
        )

    @staticmethod
    def instruction(dtype: DType) -> String:
        var bits = Self.lanes * 8 * WORD
        return String(t"{_name(Self.code)}, {bits} bits")

    @staticmethod
    def chunk_cycles(rows: Int, panels: Int) -> Float64:
        var registers = Float64(rows * panels * PANEL // Self.lanes)
        var step = max(Float64(LATENCY_STEPS), registers * Self.cycles)
        return Float64(CHUNK_WORDS) * step


comptime Avx512Bf16 = X86Unit[KERNEL_AVX512_BF16, PANEL, 14, 2, 1.0]
"""AVX512-BF16: with two panels 28 of 32 registers hold sums."""

comptime Avx512Vnni = X86Unit[KERNEL_AVX512_VNNI, PANEL, 14, 2, 1.0]
"""AVX512-VNNI, in the same tile."""

comptime AvxVnni = X86Unit[KERNEL_AVX_VNNI, PANEL // 2, 6, 1, 0.5]
"""AVX-VNNI: 12 of 16 registers hold sums."""
