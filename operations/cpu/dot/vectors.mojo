"""Dot products in vector registers: a lane adds up the products that 4 bytes hold,
for each of a panel's filters.

- AVX512-BF16: `vdpbf16ps`, two products of bfloat16. Sums are float32 and round
  to nearest even; denormal operands and sums count as zeros.
- AVX512-VNNI and AVX-VNNI: `vpdpbusd`, four products of an unsigned activation
  and a signed filter. Sums are int32.

(Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.)
"""

from std.collections import Array, Optional
from std.sys._assembly import inlined_assembly
from std.sys.info import CompilationTarget

from ...conv.fields import (
    KERNEL_AVX512_BF16,
    KERNEL_AVX512_VNNI,
    KERNEL_AVX_VNNI,
    PANEL,
)
from ...conv.memory import Writes, sum_type
from ...conv.panels import interleaved_products
from ...conv.registry import kernel_name
from ..features import AVX512_BF16, AVX512_VNNI, AVX_VNNI
from ..unit import ONES, opaque
from .mma import (
    CHUNK_WORDS,
    WORD,
    ActivationTile,
    DotUnit,
    FilterTile,
    Sums,
)

comptime LATENCY_STEPS = 6
"""Multiplications, one a cycle, that hide the latency of one."""


def _name(kernel: Int) -> String:
    """The instruction that multiplies."""
    return "vdpbf16ps" if kernel == KERNEL_AVX512_BF16 else "vpdpbusd"


@always_inline
def _instruction[
    lanes: Int, //, name: String, sum_type: DType
](
    sums: SIMD[sum_type, lanes],
    pixel: SIMD[DType.uint32, lanes],
    filters: SIMD[DType.uint32, lanes],
) -> SIMD[sum_type, lanes]:
    """Adds the products of a word of each filter by one instruction."""
    # Registers 16 to 31, which `v` allows, have no VEX encoding.
    comptime constraints: StaticString = (
        "=x,x,x,0" if lanes < PANEL else "=v,v,v,0"
    )
    return inlined_assembly[
        name + " $2, $1, $0",
        SIMD[sum_type, lanes],
        constraints=constraints,
        has_side_effect=False,
    ](pixel, filters, sums)


@always_inline
def _multiply[
    lanes: Int, sum_type: DType, //, kernel: Int
](
    sums: SIMD[sum_type, lanes],
    pixel: SIMD[DType.uint32, lanes],
    filters: SIMD[DType.uint32, lanes],
) -> SIMD[sum_type, lanes]:
    """Adds the products of a word of each filter."""
    comptime encoding = "{vex} " if kernel == KERNEL_AVX_VNNI else ""
    return _instruction[encoding + _name(kernel), sum_type](
        sums, pixel, filters
    )


@no_inline
def _multiply_tile[
    dtype: DType, kernel: Int, lanes: Int, rows: Int, panels: Int
](activation: ActivationTile[dtype], filter: FilterTile[dtype], sums: Sums):
    """Multiplies `rows` pixels by `panels` panels."""
    comptime sums_type = sum_type(dtype)
    comptime vectors = panels * PANEL // lanes
    comptime step = interleaved_products(dtype)
    comptime Words = SIMD[DType.uint32, lanes]
    var acc = Array[SIMD[sums_type, lanes], rows * vectors](fill=0)
    var weights = filter.elements.unsafe_bitcast[UInt32]()
    var row_stride = activation.row_stride
    var panel_stride = filter.panel_stride // step
    for j in range(activation.chunks):
        var pixels = activation.elements.unsafe_offset(
            Int(activation.offsets[unsafe_offset=j])
        )
        for word in range(activation.words(j)):
            var b = Array[Words, vectors](fill=Words(0))
            comptime for v in range(vectors):
                comptime panel = v * lanes // PANEL
                comptime lane = v * lanes % PANEL
                b[v] = weights.unsafe_load[width=lanes](
                    panel * panel_stride + word * PANEL + lane
                )
            comptime for i in range(rows):
                var a = Words(
                    pixels.unsafe_offset(i * row_stride + step * word)
                    .unsafe_bitcast[UInt32]()
                    .unsafe_load[alignment=1]()
                )
                comptime for v in range(vectors):
                    acc[i * vectors + v] = _multiply[kernel](
                        acc[i * vectors + v], a, b[v]
                    )
        weights = weights.unsafe_offset(CHUNK_WORDS * PANEL)
    var to = sums.elements.unsafe_bitcast[Scalar[sums_type]]()
    comptime for i in range(rows):
        comptime for v in range(vectors):
            to.unsafe_store(i * sums.stride + v * lanes, acc[i * vectors + v])


@no_inline
def _multiply_registers[
    dtype: DType, kernel: Int, lanes: Int, rows: Int, panels: Int
](chunks: Int, sums: Writes[DType.float32]):
    """`_multiply_tile` of operands that stay in registers."""
    comptime sums_type = sum_type(dtype)
    comptime vectors = panels * PANEL // lanes
    comptime Words = SIMD[DType.uint32, lanes]
    var acc = Array[SIMD[sums_type, lanes], rows * vectors](fill=0)
    var a = Words(ONES)
    var b = Array[Words, vectors](fill=Words(0))
    comptime for v in range(vectors):
        a = opaque(a)
        b[v] = a
    for _ in range(chunks * CHUNK_WORDS):
        comptime for at in range(rows * vectors):
            a = opaque(a)
            acc[at] = _multiply[kernel](acc[at], a, b[at % vectors])
    var to = sums.unsafe_bitcast[Scalar[sums_type]]()
    comptime for at in range(rows * vectors):
        to.unsafe_store(at * lanes, acc[at])


struct VectorUnit[
    code: Int, lanes: Int, max_rows: Int, tile_panels: Int, cycles: Float64
](DotUnit):
    """Dot products in vector registers.

    Parameters:
        code: The `KERNEL_*` code.
        lanes: Of a register.
        max_rows: Pixels of the largest register tile, an even number.
        tile_panels: Its panels.
        cycles: Of a multiplication of whole registers.
    """

    comptime kernel = Self.code
    comptime rows = Self.max_rows
    comptime single_rows = 0
    comptime panels = Self.tile_panels
    comptime single_panels = Self.tile_panels
    comptime skips_zeros = True

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
    def begin() -> Int:
        return 0

    @staticmethod
    def end():
        pass

    @staticmethod
    def multiply[
        dtype: DType
    ](
        mut state: Int,
        activation: ActivationTile[dtype],
        filter: FilterTile[dtype],
        sums: Sums,
    ):
        # Odd numbers of rows are not instantiated: the last one goes alone.
        var rest = activation
        var to = sums
        while rest.rows > 0:
            var rows = 1 if rest.rows == 1 else rest.rows // 2 * 2
            comptime for panels in range(1, Self.panels + 1):
                comptime for half in range(Self.max_rows // 2 + 1):
                    comptime known = max(1, 2 * half)
                    if rows == known and filter.panels == panels:
                        _multiply_tile[
                            dtype, Self.code, Self.lanes, known, panels
                        ](rest, filter, to)
            rest = rest.behind(rows)
            to = to.behind(rows)

    @staticmethod
    def instruction(dtype: DType) -> String:
        var bits = Self.lanes * 8 * WORD
        return String(t"{_name(Self.code)}, {bits} bits")

    @staticmethod
    def multiply_registers[
        dtype: DType
    ](chunks: Int, sums: Writes[DType.float32]):
        _multiply_registers[
            dtype, Self.code, Self.lanes, Self.rows, Self.panels
        ](chunks, sums)

    @staticmethod
    def chunk_cycles(rows: Int, panels: Int) -> Float64:
        var registers = Float64(rows * panels * PANEL // Self.lanes)
        var step = max(Float64(LATENCY_STEPS), registers * Self.cycles)
        return Float64(CHUNK_WORDS) * step


comptime Avx512Bf16 = VectorUnit[KERNEL_AVX512_BF16, PANEL, 14, 2, 1.0]
"""AVX512-BF16: with two panels 28 of 32 registers hold sums."""

comptime Avx512Vnni = VectorUnit[KERNEL_AVX512_VNNI, PANEL, 14, 2, 0.5]
"""AVX512-VNNI, in the same tile."""

comptime AvxVnni = VectorUnit[KERNEL_AVX_VNNI, PANEL // 2, 6, 1, 0.5]
"""AVX-VNNI: 12 of 16 registers hold sums."""
