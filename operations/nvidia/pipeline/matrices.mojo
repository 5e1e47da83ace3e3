"""Matrices of 8 rows of 16 bytes: from shared memory to the registers of a warp,
and their products on its tensor cores.

A matrix is one register of each thread: 4 bytes of row `lane / 4`, from byte
`4 * (lane % 4)` on.
"""

from std.sys._assembly import inlined_assembly
from std.sys.info import size_of
from std.sys.intrinsics import _RegisterPackType
from std.utils import StaticTuple

from ...conv.quantization import filter_dtype
from ..tma.copy import SharedAddress

comptime Sums[dtype: DType] = SIMD[sum_type_of(dtype), 4]
"""A thread's sums of 16 rows by 8 columns: two neighbouring columns from
`2 * (lane % 4)` on of row `lane / 4`, then of the row 8 below."""


def sum_type_of(dtype: DType) -> DType:
    """The type of the sums: int32 for integers, otherwise float32.

    Args:
        dtype: Of the elements.
    """
    return DType.int32 if dtype.is_integral() else DType.float32


@always_inline
def load_matrices[
    count: Int
](address: SharedAddress) -> StaticTuple[UInt32, count]:
    """Loads matrices (PTX ISA, "ldmatrix").

    Parameters:
        count: How many: 1, 2 or 4.

    Args:
        address: Of row `lane % 8` of matrix `lane / 8`.

    Returns:
        The matrices.
    """
    comptime if count == 4:
        var four = inlined_assembly[
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
            _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
            constraints="=r,=r,=r,=r,r,~{memory}",
        ](address)
        return StaticTuple[UInt32, count](four[0], four[1], four[2], four[3])
    elif count == 2:
        var two = inlined_assembly[
            "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$0, $1}, [$2];",
            _RegisterPackType[UInt32, UInt32],
            constraints="=r,=r,r,~{memory}",
        ](address)
        return StaticTuple[UInt32, count](two[0], two[1])
    else:
        comptime assert count == 1, "1, 2 or 4 matrices"
        return StaticTuple[UInt32, count](
            inlined_assembly[
                "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {$0}, [$1];",
                UInt32,
                constraints="=r,r,~{memory}",
            ](address)
        )


@always_inline
def multiply[
    dtype: DType
](
    sums: Sums[dtype],
    rows: StaticTuple[UInt32, 4],
    columns: StaticTuple[UInt32, 2],
) -> Sums[dtype]:
    """Adds the products of 16 rows and 8 columns, 32 bytes deep (PTX ISA,
    "mma.sync": m16n8k16, m16n8k8 of tf32, m16n8k32 of int8).

    Parameters:
        dtype: Of the elements: bfloat16, float16, int8, or float32, of which
            the tensor cores read 10 bits of the fraction; uint8 of the rows
            beside int8 of the columns.

    Args:
        sums: The sums.
        rows: The upper and the lower 8 rows' first 16 bytes, then their next.
        columns: The columns' first 16 bytes, then their next.

    Returns:
        The new sums.
    """
    comptime sum_type = sum_type_of(dtype)
    comptime Sum = Scalar[sum_type]
    comptime total = "s32" if dtype.is_integral() else "f32"
    comptime depth = 32 // size_of[dtype]()
    comptime name = String(
        "mma.sync.aligned.m16n8k",
        depth,
        ".row.col.",
        total,
        ".",
        _element[dtype](),
        ".",
        _element[filter_dtype(dtype)](),
        ".",
        total,
        " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
    )
    comptime floats = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    comptime integers = "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r"
    var new = inlined_assembly[
        name,
        _RegisterPackType[Sum, Sum, Sum, Sum],
        constraints=integers if dtype.is_integral() else floats,
        has_side_effect=False,
    ](
        rows[0],
        rows[1],
        rows[2],
        rows[3],
        columns[0],
        columns[1],
        sums[0],
        sums[1],
        sums[2],
        sums[3],
    )
    return Sums[dtype](new[0], new[1], new[2], new[3])


def _element[dtype: DType]() -> StaticString:
    """What PTX calls the elements."""
    comptime if dtype == DType.bfloat16:
        return "bf16"
    elif dtype == DType.float16:
        return "f16"
    elif dtype == DType.int8:
        return "s8"
    elif dtype == DType.uint8:
        return "u8"
    else:
        comptime assert (
            dtype == DType.float32
        ), "bfloat16, float16, float32, int8 or uint8"
        return "tf32"
