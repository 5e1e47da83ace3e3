"""Arm's matrix multiplications: `bfmmla`, `smmla` and `usmmla`, which multiply two
pixels by two filters, 8 bytes of products deep, and add to a register of 2 x 2 sums.

`bfmmla` multiplies four products of bfloat16 and adds to float32; `smmla` eight of
int8, `usmmla` of uint8 and int8, and add to int32. (Arm Architecture Reference
Manual, FEAT_BF16 and FEAT_I8MM.)
"""

from std.collections import Array, Optional
from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import CompilationTarget

from ...conv.fields import KERNEL_MMLA, PANEL
from ...conv.memory import Reads, Writes, sum_type
from ...conv.panels import interleaved_products
from ..features import ARM_BF16, ARM_I8MM
from ..unit import ONES, opaque
from .mma import (
    CHUNK_WORDS,
    ActivationTile,
    DotUnit,
    FilterTile,
    OutputLines,
    Sums,
)

comptime Words = SIMD[DType.uint32, 4]
"""Two words of each of two pixels or filters."""

comptime MAX_ROWS = 6
"""Pixels of the largest register tile: 24 of 32 registers hold sums."""

comptime FILTER_PAIRS = PANEL // 2
"""Registers of filters, and of sums for each pair of pixels."""


def _name(dtype: DType) -> String:
    """The instruction that multiplies activations of a type."""
    if dtype == DType.bfloat16:
        return "bfmmla"
    return "smmla" if dtype == DType.int8 else "usmmla"


def _instruction(dtype: DType) -> String:
    """The same with its operands, behind what lets an assembler take it whatever
    the target is."""
    if dtype == DType.bfloat16:
        return ".arch_extension bf16\n " + _name(dtype) + " $0.4s, $1.8h, $2.8h"
    return ".arch_extension i8mm\n " + _name(dtype) + " $0.4s, $1.16b, $2.16b"


@always_inline
def _dot[
    dtype: DType, sum_type: DType
](pixel: SIMD[DType.uint32, 2], filter: SIMD[DType.uint32, 2]) -> Scalar[
    sum_type
]:
    """The sum of 8 bytes of products."""
    comptime if dtype.is_integral():
        comptime count = 8
        var x = bitcast[dtype, count](pixel).cast[sum_type]()
        var w = bitcast[DType.int8, count](filter).cast[sum_type]()
        return (x * w).reduce_add()
    else:
        comptime count = 4
        var x = bitcast[dtype, count](pixel).cast[sum_type]()
        var w = bitcast[dtype, count](filter).cast[sum_type]()
        return (x * w).reduce_add()


@always_inline
def _multiply_pairs[
    dtype: DType, sum_type: DType, emulated: Bool
](sums: SIMD[sum_type, 4], pixels: Words, filters: Words) -> SIMD[sum_type, 4]:
    """Adds the products of two pixels and two filters: `[pixel][filter]`."""
    comptime if emulated:
        var result = sums
        comptime for i in range(2):
            comptime for j in range(2):
                result[2 * i + j] += _dot[dtype, sum_type](
                    pixels.slice[2, offset=2 * i](),
                    filters.slice[2, offset=2 * j](),
                )
        return result
    else:
        return inlined_assembly[
            _instruction(dtype),
            SIMD[sum_type, 4],
            constraints="=w,w,w,0",
            has_side_effect=False,
        ](pixels, filters, sums)


@always_inline
def _two_words(at: Reads[DType.uint32]) -> SIMD[DType.uint32, 2]:
    """Eight bytes, at any address."""
    return at.unsafe_load[width=2, alignment=1]()


@no_inline
def _multiply_tile[
    dtype: DType, rows: Int, emulated: Bool
](activation: ActivationTile[dtype], filter: FilterTile[dtype], sums: Sums):
    """Multiplies `rows` pixels, of which the last has a pair of its own if they
    are odd, by a panel."""
    comptime sums_type = sum_type(dtype)
    comptime pairs = (rows + 1) // 2
    comptime step = interleaved_products(dtype)
    var acc = Array[SIMD[sums_type, 4], pairs * FILTER_PAIRS](fill=0)
    var weights = filter.elements.unsafe_bitcast[UInt32]()
    for j in range(activation.chunks):
        var pixels = activation.elements.unsafe_offset(
            Int(activation.offsets[unsafe_offset=j])
        )
        for word in range(0, activation.words(j), 2):
            var a = Array[Words, pairs](fill=0)
            comptime for i in range(pairs):
                var first = pixels.unsafe_offset(
                    2 * i * activation.row_stride + step * word
                )
                comptime last = min(2 * i + 1, rows - 1) - 2 * i
                var second = first.unsafe_offset(last * activation.row_stride)
                a[i] = _two_words(first.unsafe_bitcast[UInt32]()).join(
                    _two_words(second.unsafe_bitcast[UInt32]())
                )
            comptime for four in range(FILTER_PAIRS // 2):
                var here = weights.unsafe_offset(word * PANEL + 4 * four)
                # The two words of each filter come side by side.
                var both = here.unsafe_load[width=4]().interleave(
                    here.unsafe_load[width=4](PANEL)
                )
                comptime for half in range(2):
                    var b = both.slice[4, offset=4 * half]()
                    comptime for i in range(pairs):
                        comptime at = i * FILTER_PAIRS + 2 * four + half
                        acc[at] = _multiply_pairs[dtype, sums_type, emulated](
                            acc[at], a[i], b
                        )
        weights = weights.unsafe_offset(CHUNK_WORDS * PANEL)
    var to = sums.elements.unsafe_bitcast[Scalar[sums_type]]()
    comptime for i in range(rows):
        comptime for pair in range(FILTER_PAIRS):
            comptime at = i // 2 * FILTER_PAIRS + pair
            to.unsafe_store(
                i * sums.stride + 2 * pair,
                acc[at].slice[2, offset=i % 2 * 2](),
            )


@no_inline
def _multiply_registers[
    dtype: DType, emulated: Bool
](chunks: Int, sums: Writes[DType.float32]):
    """`_multiply_tile` of operands that stay in registers."""
    comptime sums_type = sum_type(dtype)
    comptime pairs = MAX_ROWS // 2
    var acc = Array[SIMD[sums_type, 4], pairs * FILTER_PAIRS](fill=0)
    var b = opaque(Words(ONES))
    var a = Array[Words, pairs](fill=0)
    comptime for i in range(pairs):
        b = opaque(b)
        a[i] = b
    for _ in range(chunks * CHUNK_WORDS // 2):
        comptime for at in range(pairs * FILTER_PAIRS):
            b = opaque(b)
            acc[at] = _multiply_pairs[dtype, sums_type, emulated](
                acc[at], a[at // FILTER_PAIRS], b
            )
    var to = sums.unsafe_bitcast[Scalar[sums_type]]()
    comptime for at in range(pairs * FILTER_PAIRS):
        to.unsafe_store(4 * at, acc[at])


struct MatrixUnit[emulated: Bool](DotUnit):
    """Arm's matrix multiplications.

    Parameters:
        emulated: Whether other instructions compute the same, so that tests run
            on any CPU.
    """

    comptime kernel = KERNEL_MMLA
    comptime rows = MAX_ROWS
    comptime tiles = 1
    comptime single_rows = 0
    comptime panels = 1
    comptime single_panels = 1
    comptime step_words = 2

    @staticmethod
    def feature(dtype: DType) -> Optional[Int]:
        if dtype == DType.bfloat16:
            return ARM_BF16
        if dtype == DType.int8 or dtype == DType.uint8:
            return ARM_I8MM
        return None

    @staticmethod
    def tile_rows(rows: Int) -> Int:
        return min(Self.rows, rows)

    @staticmethod
    def build_refusal() -> Optional[String]:
        comptime if CompilationTarget.has_neon() or Self.emulated:
            return None
        return String("mmla: the compiler's target is no Arm CPU")

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
        outputs: OutputLines[dtype],
    ):
        comptime for rows in range(1, MAX_ROWS + 1):
            if activation.rows == rows:
                _multiply_tile[dtype, rows, Self.emulated](
                    activation, filter, sums
                )

    @staticmethod
    def instruction(dtype: DType) -> String:
        return _name(dtype)

    @staticmethod
    def multiply_registers[
        dtype: DType
    ](chunks: Int, sums: Writes[DType.float32]):
        _multiply_registers[dtype, Self.emulated](chunks, sums)

    @staticmethod
    def chunk_cycles(rows: Int, panels: Int) -> Float64:
        # Two multiplications a cycle.
        var pairs = (rows + 1) // 2
        return Float64(CHUNK_WORDS // 2 * pairs * FILTER_PAIRS) / 2
