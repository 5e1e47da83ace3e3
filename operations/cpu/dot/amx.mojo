"""AMX: tiles of 16 rows of 64 bytes, and `tdpbf16ps` and `tdpfp16ps`, which
multiply 16 pixels by 16 filters, 32 products deep, and add to float32, and
`tdpbssd` and `tdpbusd`, 64 products of 8 bits deep, which add to int32.

(Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter
18.) Of eight tiles four hold sums, two activations and two filters. Sums round
to nearest even; denormal operands and sums count as zeros.
"""

from std.collections import Array, Optional
from std.sys._assembly import inlined_assembly
from std.sys.info import CompilationTarget, size_of

from ...conv.fields import KERNEL_AMX, PANEL
from ...conv.memory import Reads, Writes
from ...conv.panels import chunk_products
from ..features import AMX_BF16, AMX_FP16, AMX_INT8, ANY_CPU, AVX512_BF16
from ..unit import ONES, tile_outputs
from .mma import (
    CHUNK_WORDS,
    ActivationTile,
    DotUnit,
    FilterTile,
    OutputLines,
    Sums,
    TileOutput,
)
from .register_store import store_from_memory
from .vectors import Avx512Bf16, Avx512Vnni

comptime TILE_ROWS = 16
"""Rows of a tile."""

comptime TILE_BYTES = 64
"""Bytes of a row."""

comptime TOGETHER_BYTES = 1024 * 1024
"""Packed filter that stays in L2, which has 2 MiB on every CPU with AMX. A register
tile reads as many bytes of filters as of activations, so that either may come from
there; this way the outputs of a pixel are written one behind the other."""

comptime MATRIX_WAYS = 16
"""Lines of a set of L1 that pixels of a register tile may take: its 12 ways hold
them with few misses, which a copy costs more than."""

comptime BLOCK_BYTES = 128 * 1024
"""Activations of a block that filters in L2 are multiplied by: a larger one leaves
less of L2 to them, and saves nothing."""

comptime _FIRST_ACTIVATION = 4
"""The first of the two tiles of activations; sums are in front of them."""

comptime _FIRST_FILTER = 6
"""The first of the two tiles of filters."""

comptime _MULTIPLY_CYCLES = 16.0
"""Between two independent multiplications."""

comptime _LATENCY = 52.0
"""Of a multiplication that adds to the sums of another one."""

comptime _LOAD_CYCLES = 9.0
"""Between two loads of whole tiles."""


@always_inline
def _configure(rows: Int):
    """Gives the tiles of sums and activations so many rows, and those of filters
    all. Clears all tiles."""
    # Palette 1; bytes of a row at 16, 2 bytes a tile; rows at 48, a byte a tile.
    var configuration = Array[UInt8, TILE_BYTES](fill=0)
    configuration[0] = 1
    comptime for tile in range(8):
        configuration[16 + 2 * tile] = TILE_BYTES
        configuration[48 + tile] = UInt8(
            TILE_ROWS if tile >= _FIRST_FILTER else rows
        )
    inlined_assembly["ldtilecfg ($0)", NoneType, constraints="r,~{memory}"](
        Pointer(to=configuration)
    )


@always_inline
def _zero[tile: Int]():
    """Clears a tile."""
    inlined_assembly[
        "tilezero %tmm" + String(tile), NoneType, constraints="~{memory}"
    ]()


@always_inline
def _load[tile: Int, once: Bool = False](elements: Reads, stride: Int):
    """Loads a tile, whose rows lie `stride` bytes apart; what is read `once` should
    not stay in L1."""
    comptime instruction = "tileloaddt1" if once else "tileloadd"
    inlined_assembly[
        instruction + " ($0,$1,1), %tmm" + String(tile),
        NoneType,
        constraints="r,r,~{memory}",
    ](elements, stride)


@always_inline
def _store[tile: Int](elements: Writes, stride: Int):
    """Stores a tile, whose rows lie `stride` bytes apart."""
    inlined_assembly[
        "tilestored %tmm" + String(tile) + ", ($0,$1,1)",
        NoneType,
        constraints="r,r,~{memory}",
    ](elements, stride)


def _instruction(dtype: DType) -> String:
    """The multiplication of activations of a type. It takes the activations for
    the rows, which may be unsigned, and int8 filters for the columns."""
    if dtype == DType.bfloat16:
        return "tdpbf16ps"
    if dtype == DType.float16:
        return "tdpfp16ps"
    return "tdpbssd" if dtype == DType.int8 else "tdpbusd"


@always_inline
def _multiply[dtype: DType, sums: Int, activation: Int, filter: Int]():
    """Adds the products of two tiles to a third."""
    inlined_assembly[
        _instruction(dtype)
        + " %tmm"
        + String(filter)
        + ", %tmm"
        + String(activation)
        + ", %tmm"
        + String(sums),
        NoneType,
        constraints="~{memory}",
    ]()


@no_inline
def _multiply_tile[
    dtype: DType, tiles: Int, panels: Int
](
    activation: ActivationTile[dtype],
    filter: FilterTile[dtype],
    sums: Sums,
    half: Int,
):
    """Multiplies `tiles` tiles of activations by as many panels.

    Parameters:
        dtype: Of the operands.
        tiles: 1, or 2, of which the second begins `half` rows behind the first.
        panels: How many.

    Args:
        activation: The activations.
        filter: The panels.
        sums: Where the sums go.
        half: Rows between the first and the second tile.
    """
    comptime element = size_of[dtype]()
    comptime chunk = chunk_products(dtype) * PANEL
    var row_stride = activation.row_stride * element
    var second = half * activation.row_stride
    comptime for tile in range(tiles * panels):
        _zero[tile]()
    var panel = filter.elements
    for j in range(activation.chunks):
        var first = activation.elements.unsafe_offset(
            Int(activation.offsets[unsafe_offset=j])
        )
        comptime for p in range(panels):
            comptime register = _FIRST_FILTER + p % 2
            _load[register, once=True](
                panel.unsafe_offset(p * filter.panel_stride), TILE_BYTES
            )
            comptime for tile in range(tiles):
                comptime if p == 0:
                    _load[_FIRST_ACTIVATION + tile](
                        first.unsafe_offset(tile * second), row_stride
                    )
                _multiply[
                    dtype,
                    tile * panels + p,
                    _FIRST_ACTIVATION + tile,
                    register,
                ]()
        panel = panel.unsafe_offset(chunk)
    comptime for tile in range(tiles):
        comptime for p in range(panels):
            _store[tile * panels + p](
                sums.elements.unsafe_offset(
                    tile * half * sums.stride + p * PANEL
                ),
                sums.stride * size_of[DType.float32](),
            )


struct Amx(DotUnit):
    """AMX."""

    comptime kernel = KERNEL_AMX
    comptime rows = 2 * TILE_ROWS
    comptime tiles = 1
    comptime single_rows = TILE_ROWS
    comptime panels = 2
    comptime single_panels = 4
    comptime step_words = CHUNK_WORDS
    comptime together_bytes = TOGETHER_BYTES
    comptime matrix_ways = MATRIX_WAYS
    comptime block_bytes = BLOCK_BYTES

    @staticmethod
    def feature(dtype: DType) -> Optional[Int]:
        if dtype == DType.bfloat16:
            return AMX_BF16
        if dtype == DType.float16:
            return AMX_FP16
        if dtype == DType.int8 or dtype == DType.uint8:
            return AMX_INT8
        return None

    @staticmethod
    def joins_groups(dtype: DType) -> Bool:
        return dtype.is_half_float()

    @staticmethod
    def tile_rows(rows: Int) -> Int:
        return min(Self.rows, rows)

    @staticmethod
    def build_refusal() -> Optional[String]:
        comptime if CompilationTarget.is_x86():
            return None
        return String("amx: the compiler's target is no x86")

    @staticmethod
    def sum_store_feature(dtype: DType) -> Optional[Int]:
        """See `DotUnit`: integers take AVX-512 alone, which the compiler knows
        of and every CPU with AMX has."""
        comptime if CompilationTarget.has_avx512f():
            if dtype == DType.bfloat16:
                return AVX512_BF16
            if dtype == DType.int8 or dtype == DType.uint8:
                return ANY_CPU
        return None

    @staticmethod
    def store_sums[
        dtype: DType
    ](sums: Sums, rows: Int, tile: TileOutput[dtype]):
        # What the vector units multiply with is not asked for.
        comptime if dtype == DType.bfloat16:
            store_from_memory[Avx512Bf16, dtype](sums, rows, tile)
        comptime if dtype.is_integral():
            store_from_memory[Avx512Vnni, dtype](sums, rows, tile)

    @staticmethod
    def begin() -> Int:
        """See `DotUnit`: the state is the rows of the configuration."""
        return 0

    @staticmethod
    def end():
        inlined_assembly["tilerelease", NoneType, constraints="~{memory}"]()

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
        # Of an odd number both tiles have the row in the middle.
        var rows = activation.rows
        var wide = rows > TILE_ROWS
        var needed = (rows + 1) // 2 if wide else rows
        if state != needed:
            _configure(needed)
            state = needed
        comptime for panels in range(1, Self.single_panels + 1):
            if filter.panels() == panels:
                comptime if panels <= Self.panels:
                    if wide:
                        _multiply_tile[dtype, 2, panels](
                            activation, filter, sums, rows - needed
                        )
                        return
                _multiply_tile[dtype, 1, panels](activation, filter, sums, 0)

    @staticmethod
    def instruction(dtype: DType) -> String:
        return _instruction(dtype)

    @staticmethod
    @no_inline
    def multiply_registers[
        dtype: DType
    ](chunks: Int, sums: Writes[DType.float32]):
        """See `MultiplyUnit`: the operands come by way of the sums' memory."""
        comptime tiles = Self.rows // TILE_ROWS
        comptime stride = Self.panels * PANEL * size_of[DType.float32]()
        var words = sums.unsafe_bitcast[UInt32]()
        for i in range(tile_outputs[Self]()):
            words[unsafe_offset=i] = ONES
        _configure(TILE_ROWS)
        comptime for tile in range(tiles):
            _load[_FIRST_ACTIVATION + tile](sums.as_imm(), stride)
        comptime for p in range(Self.panels):
            _load[_FIRST_FILTER + p](sums.as_imm(), stride)
        for _ in range(chunks):
            comptime for p in range(Self.panels):
                comptime for tile in range(tiles):
                    _multiply[
                        dtype,
                        tile * Self.panels + p,
                        _FIRST_ACTIVATION + tile,
                        _FIRST_FILTER + p,
                    ]()
        comptime for tile in range(tiles):
            comptime for p in range(Self.panels):
                _store[tile * Self.panels + p](
                    sums.unsafe_offset(
                        tile * TILE_ROWS * Self.panels * PANEL + p * PANEL
                    ),
                    stride,
                )
        Self.end()

    @staticmethod
    def chunk_cycles(rows: Int, panels: Int) -> Float64:
        var tiles = 2 if rows > TILE_ROWS else 1
        var multiplied = _MULTIPLY_CYCLES * Float64(tiles * panels)
        var loaded = _LOAD_CYCLES * Float64(tiles + panels)
        return max(max(multiplied, loaded), _LATENCY)
