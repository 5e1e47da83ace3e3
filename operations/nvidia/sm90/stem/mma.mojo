"""The multiply whose rows come from registers: 64 pixels by some filters by 16
products of 16-bit elements (wgmma)."""

from max.gpu.compute.mma import WGMMADescriptor, _RegisterPackType
from std.sys._assembly import inlined_assembly

comptime Fragment = SIMD[DType.uint32, 4]
"""A thread's fragment of 64 rows by 16 products: the pairs of products 2*(t%4)
and 2*(t%4) + 8 of its two rows, 8 apart; the row changes fastest."""


def _registers(first: Int, count: Int) -> String:
    """The assembly operand `{$first, ...}` of `count` registers."""
    var text = String("{")
    for i in range(count):
        if i > 0:
            text += ", "
        text += String("$") + String(first + i)
    return text + "}"


def _constraints(count: Int) -> String:
    """`count` sums that are read and written, the fragment, the descriptor."""
    var text = String()
    for _ in range(count):
        text += "=f,"
    text += "r,r,r,r,l"
    for i in range(count):
        text += "," + String(i)
    return text + ",~{memory}"


def _instruction[dtype: DType](columns: Int) -> String:
    """The instruction that multiplies a fragment by `columns` filters."""
    comptime element = "bf16" if dtype == DType.bfloat16 else "f16"
    var sums = columns // 2
    return String(
        "wgmma.mma_async.sync.aligned.m64n",
        columns,
        "k16.f32.",
        element,
        ".",
        element,
        " ",
        _registers(0, sums),
        ", ",
        _registers(sums, 4),
        ", $",
        sums + 4,
        ", 1, 1, 1, 0;",
    )


@always_inline
def _multiply_32[
    dtype: DType
](a: Fragment, b: Int64, c: SIMD[DType.float32, 16]) -> SIMD[DType.float32, 16]:
    """`multiply_fragment` by 32 filters, whose descriptor is b."""
    var r = inlined_assembly[
        _instruction[dtype](32),
        _RegisterPackType[
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
        ],
        constraints=_constraints(16),
    ](
        a[0],
        a[1],
        a[2],
        a[3],
        b,
        c[0],
        c[1],
        c[2],
        c[3],
        c[4],
        c[5],
        c[6],
        c[7],
        c[8],
        c[9],
        c[10],
        c[11],
        c[12],
        c[13],
        c[14],
        c[15],
    )
    return SIMD[DType.float32, 16](
        r[0],
        r[1],
        r[2],
        r[3],
        r[4],
        r[5],
        r[6],
        r[7],
        r[8],
        r[9],
        r[10],
        r[11],
        r[12],
        r[13],
        r[14],
        r[15],
    )


@always_inline
def _multiply_64[
    dtype: DType
](a: Fragment, b: Int64, c: SIMD[DType.float32, 32]) -> SIMD[DType.float32, 32]:
    """`multiply_fragment` by 64 filters, whose descriptor is b."""
    var r = inlined_assembly[
        _instruction[dtype](64),
        _RegisterPackType[
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
            Float32,
        ],
        constraints=_constraints(32),
    ](
        a[0],
        a[1],
        a[2],
        a[3],
        b,
        c[0],
        c[1],
        c[2],
        c[3],
        c[4],
        c[5],
        c[6],
        c[7],
        c[8],
        c[9],
        c[10],
        c[11],
        c[12],
        c[13],
        c[14],
        c[15],
        c[16],
        c[17],
        c[18],
        c[19],
        c[20],
        c[21],
        c[22],
        c[23],
        c[24],
        c[25],
        c[26],
        c[27],
        c[28],
        c[29],
        c[30],
        c[31],
    )
    return SIMD[DType.float32, 32](
        r[0],
        r[1],
        r[2],
        r[3],
        r[4],
        r[5],
        r[6],
        r[7],
        r[8],
        r[9],
        r[10],
        r[11],
        r[12],
        r[13],
        r[14],
        r[15],
        r[16],
        r[17],
        r[18],
        r[19],
        r[20],
        r[21],
        r[22],
        r[23],
        r[24],
        r[25],
        r[26],
        r[27],
        r[28],
        r[29],
        r[30],
        r[31],
    )


@always_inline
def multiply_fragment[
    dtype: DType, columns: Int, width: SIMDLength
](
    a: Fragment,
    filters: WGMMADescriptor[dtype],
    c: SIMD[DType.float32, width],
) -> SIMD[DType.float32, width]:
    """Starts adding the products of a fragment and of a tile of filters (PTX
    ISA, "wgmma.mma_async"); a fence comes before, a wait after.

    Parameters:
        dtype: Of the elements: bfloat16 or float16.
        columns: Filters of the tile, 32 or 64.
        width: Sums of a thread: half the columns.

    Args:
        a: The fragment.
        filters: The descriptor of the tile in shared memory.
        c: The sums.

    Returns:
        The new sums, not to be read before the wait.
    """
    comptime assert dtype.is_half_float() and Int(width) == columns // 2
    comptime if columns == 32:
        return rebind[type_of(c)](
            _multiply_32[dtype](
                a, filters.desc, rebind[SIMD[DType.float32, 16]](c)
            )
        )
    elif columns == 64:
        return rebind[type_of(c)](
            _multiply_64[dtype](
                a, filters.desc, rebind[SIMD[DType.float32, 32]](c)
            )
        )
    else:
        comptime assert False, "32 or 64 columns"
