"""AVX512-BF16: `vdpbf16ps`, which multiplies two products of each of 16 filters
and adds them to float32.

(Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.) Sums
round to nearest even; denormal operands and sums count as zeros.
"""

from std.collections import Array, Optional
from std.sys._assembly import inlined_assembly
from std.sys.info import CompilationTarget

from ...conv.fields import KERNEL_AVX512_BF16, PANEL
from ..features import AVX512_BF16
from .mma import ActivationTile, DotUnit, FilterTile, Sums, chunk_products

comptime Vector = SIMD[DType.float32, PANEL]
comptime Pairs = SIMD[DType.uint32, PANEL]
"""Two products of each filter, or one pixel's two activations, repeated."""

comptime CHUNK_PAIRS = 16
"""Pairs of products of a chunk."""

comptime MAX_ROWS = 14
"""Pixels of the largest register tile: with two panels 28 of 32 registers hold
sums."""


@always_inline
def _multiply(sums: Vector, pixel: Pairs, filters: Pairs) -> Vector:
    """Adds two products of each filter."""
    return inlined_assembly[
        "vdpbf16ps $2, $1, $0",
        Vector,
        constraints="=v,v,v,0",
        has_side_effect=False,
    ](pixel, filters, sums)


@no_inline
def _multiply_tile[
    dtype: DType, rows: Int, panels: Int
](activation: ActivationTile[dtype], filter: FilterTile[dtype], sums: Sums):
    """Multiplies `rows` pixels by `panels` panels."""
    comptime pairs = chunk_products(dtype) // 2
    var acc = Array[Vector, rows * panels](fill=Vector(0))
    var weights = filter.elements.unsafe_bitcast[UInt32]()
    var row_stride = activation.row_stride
    var panel_stride = filter.panel_stride // 2
    for j in range(activation.chunks):
        var pixels = activation.elements.unsafe_offset(
            Int(activation.offsets[unsafe_offset=j])
        )
        for pair in range(pairs):
            var b = Array[Pairs, panels](fill=Pairs(0))
            comptime for p in range(panels):
                b[p] = weights.unsafe_load[width=PANEL](
                    p * panel_stride + pair * PANEL
                )
            comptime for i in range(rows):
                var a = Pairs(
                    pixels.unsafe_offset(i * row_stride + 2 * pair)
                    .unsafe_bitcast[UInt32]()
                    .unsafe_load[alignment=2]()
                )
                comptime for p in range(panels):
                    acc[i * panels + p] = _multiply(
                        acc[i * panels + p], a, b[p]
                    )
        weights = weights.unsafe_offset(pairs * PANEL)
    comptime for i in range(rows):
        comptime for p in range(panels):
            sums.elements.unsafe_store(
                i * sums.stride + p * PANEL, acc[i * panels + p]
            )


struct Avx512(DotUnit):
    """AVX512-BF16."""

    comptime kernel = KERNEL_AVX512_BF16
    comptime rows = MAX_ROWS
    comptime single_rows = 0
    comptime panels = 2
    comptime single_panels = 2

    @staticmethod
    def feature(dtype: DType) -> Optional[Int]:
        """See `DotUnit`. AVX512-FP16 adds in float16, which loses too much."""
        if dtype == DType.bfloat16:
            return AVX512_BF16
        return None

    @staticmethod
    def build_refusal() -> Optional[String]:
        comptime if CompilationTarget.has_avx512f():
            return None
        return String(
            "avx512_bf16: the compiler takes this CPU for one without AVX-512"
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
                comptime for half in range(MAX_ROWS // 2 + 1):
                    comptime known = max(1, 2 * half)
                    if rows == known and filter.panels == panels:
                        _multiply_tile[dtype, known, panels](rest, filter, to)
            rest = rest.behind(rows)
            to = to.behind(rows)

    @staticmethod
    def chunk_cycles(rows: Int, panels: Int) -> Float64:
        # One multiplication a cycle, whose latency six hide.
        return Float64(CHUNK_PAIRS * max(6, rows * panels))
