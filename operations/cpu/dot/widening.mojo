"""Dot products of 8-bit integers on every CPU: integers become 16 bits wide, and
`vpmaddwd` adds two products on x86, where elsewhere the compiler multiplies them.

A word of 4 bytes is two pairs of 16 bits. Both operands become pairs in memory: a
block's activations once, filter panels once for all pixels of a block. On Arm
`sdot` adds four products of int8 as they are.

(Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, PMADDWD;
Arm Architecture Reference Manual, SDOT.)
"""

from std.collections import Optional
from std.memory import bitcast
from std.sys.info import CompilationTarget
from std.sys.intrinsics import llvm_intrinsic

from ...conv.fields import KERNEL_WIDENING, PANEL
from ...conv.memory import Reads, Writes, sum_type
from ..config import CPU_TILE, LANES
from ..features import ANY_CPU
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
from .vector_unit import L1_SLICE_BYTES, VectorUnit, tiles_together

comptime PAIR_CYCLES = 0.5
"""Of the products of a pair of 16 bits with a register of filters: a
multiplication and an addition."""

comptime LATENCY_CYCLES = 3.0
"""Of a pair, however few registers there are: operands are loaded."""


def _has_dot_product(dtype: DType) -> Bool:
    """Whether an instruction multiplies bytes as they are.

    Args:
        dtype: Of the activations.
    """
    comptime if LANES == 4 and CompilationTarget.has_neon_int8_dotprod():
        return dtype == DType.int8
    return False


@always_inline
def _add_pairs(
    sums: SIMD[DType.int32, LANES],
    pixel: SIMD[DType.uint32, LANES],
    filters: SIMD[DType.uint32, LANES],
) -> SIMD[DType.int32, LANES]:
    """Adds the products of the two int16 of each lane."""
    comptime x86 = CompilationTarget.is_x86()
    comptime if x86 and LANES == 8 and CompilationTarget.has_avx2():
        return sums + llvm_intrinsic[
            "llvm.x86.avx2.pmadd.wd",
            SIMD[DType.int32, LANES],
            has_side_effect=False,
        ](
            bitcast[DType.int16, 2 * LANES](pixel),
            bitcast[DType.int16, 2 * LANES](filters),
        )
    elif x86 and LANES == 16 and CompilationTarget.has_avx512f():
        return sums + llvm_intrinsic[
            "llvm.x86.avx512.pmaddw.d.512",
            SIMD[DType.int32, LANES],
            has_side_effect=False,
        ](
            bitcast[DType.int16, 2 * LANES](pixel),
            bitcast[DType.int16, 2 * LANES](filters),
        )
    else:
        var x = bitcast[DType.int32, LANES](pixel)
        var y = bitcast[DType.int32, LANES](filters)
        var low = ((x << 16) >> 16) * ((y << 16) >> 16)
        return sums + low + (x >> 16) * (y >> 16)


@no_inline
def widen_words[
    dtype: DType
](elements: Reads[dtype], count: Int, to: Writes[dtype]):
    """Writes elements as 16 bits.

    Parameters:
        dtype: Of the elements, 8 bits wide.

    Args:
        elements: The elements.
        count: How many.
        to: Where to, twice as much; may overlap all that is read, if it ends
            where that ends.
    """
    comptime wide = DType.int16 if dtype == DType.int8 else DType.uint16
    comptime vector = WORD * LANES
    var target = to.unsafe_bitcast[Scalar[wide]]()
    var whole = count // vector * vector
    for i in range(0, whole, vector):
        var bytes = elements.unsafe_load[width=vector](i)
        target.unsafe_store[alignment=1](i, bytes.cast[wide]())
    for i in range(whole, count):
        target[unsafe_offset=i] = elements[unsafe_offset=i].cast[wide]()


@always_inline
def _pair[
    lanes: Int, //, which: Int
](words: SIMD[DType.uint32, lanes]) -> SIMD[DType.uint32, lanes]:
    """The first or the second two bytes of each word, as two int16."""
    comptime first = UInt32(16 * which)
    var low = bitcast[DType.int32, lanes](words << (24 - first)) >> 24
    var high = bitcast[DType.int32, lanes](words << (16 - first)) >> 24
    return bitcast[DType.uint32, lanes]((low & 0xFFFF) | (high << 16))


@no_inline
def widen_panel[
    dtype: DType
](panel: Reads[dtype], words: Int, to: Writes[dtype]):
    """Writes the pairs of a panel: both of each word in turn, those of all
    filters side by side.

    Parameters:
        dtype: Of the activations; the panel has the bits of int8.

    Args:
        panel: The panel, `[words][PANEL][WORD]`.
        words: How many of each filter.
        to: Where to, `[words][2][PANEL][WORD]`.
    """
    var source = panel.unsafe_bitcast[UInt32]()
    var target = to.unsafe_bitcast[UInt32]()
    for word in range(words):
        comptime for lane in range(0, PANEL, LANES):
            var filters = source.unsafe_load[width=LANES](word * PANEL + lane)
            comptime for which in range(2):
                target.unsafe_store(
                    (2 * word + which) * PANEL + lane, _pair[which](filters)
                )


struct Widening(VectorUnit):
    """Dot products of integers on every CPU."""

    comptime kernel = KERNEL_WIDENING
    comptime lanes = LANES
    comptime slice_bytes = L1_SLICE_BYTES
    comptime rows = CPU_TILE.rows
    comptime tiles = tiles_together(CPU_TILE.rows, CPU_TILE.panels)
    comptime single_rows = 0
    comptime panels = CPU_TILE.panels
    comptime single_panels = CPU_TILE.panels
    comptime step_words = 1

    @staticmethod
    def feature(dtype: DType) -> Optional[Int]:
        if dtype == DType.int8 or dtype == DType.uint8:
            return ANY_CPU
        return None

    @staticmethod
    def spread(dtype: DType) -> Int:
        return 1 if _has_dot_product(dtype) else 2

    @staticmethod
    def takes_few(dtype: DType) -> Bool:
        return Self.spread(dtype) > 1

    @staticmethod
    def build_refusal() -> Optional[String]:
        return None

    @staticmethod
    def widen[dtype: DType](panel: Reads[dtype], words: Int, to: Writes[dtype]):
        widen_panel(panel, words, to)

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
        multiply_panels[Self, dtype](
            activation, filter, sums, OutputLines[dtype].none()
        )

    @staticmethod
    def add[
        dtype: DType
    ](
        sums: SIMD[sum_type(dtype), Self.lanes],
        pixel: SIMD[DType.uint32, Self.lanes],
        filters: SIMD[DType.uint32, Self.lanes],
    ) -> SIMD[sum_type(dtype), Self.lanes]:
        var integers = rebind[SIMD[DType.int32, LANES]](sums)
        comptime if _has_dot_product(dtype):
            integers = llvm_intrinsic[
                "llvm.aarch64.neon.sdot.v4i32.v16i8",
                SIMD[DType.int32, LANES],
                has_side_effect=False,
            ](
                integers,
                bitcast[DType.int8, WORD * LANES](pixel),
                bitcast[DType.int8, WORD * LANES](filters),
            )
        else:
            integers = _add_pairs(integers, pixel, filters)
        return rebind[SIMD[sum_type(dtype), Self.lanes]](integers)

    @staticmethod
    def instruction(dtype: DType) -> String:
        if _has_dot_product(dtype):
            return "sdot, 128 bits"
        var name = "vpmaddwd" if CompilationTarget.is_x86() else (
            "int32 multiply-add"
        )
        return String(t"{name}, {8 * WORD * LANES} bits")

    @staticmethod
    def chunk_cycles(rows: Int, panels: Int) -> Float64:
        var registers = Float64(rows * panels * PANEL // LANES)
        var pair = max(LATENCY_CYCLES, registers * PAIR_CYCLES)
        return Float64(2 * CHUNK_WORDS) * pair
