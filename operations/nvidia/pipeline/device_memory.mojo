"""Device memory: stores with a predicate in the place of a branch, and what is asked
for in the L2."""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of

from ...conv.memory import Reads
from .chunks import CHUNK_BYTES


@always_inline
def store_if[
    dtype: DType
](
    address: UInt64,
    values: SIMD[dtype, CHUNK_BYTES // size_of[dtype]()],
    condition: Bool,
):
    """Stores 16 bytes to device memory, or not, without a branch.

    Parameters:
        dtype: Of an element.

    Args:
        address: A multiple of 16.
        values: The elements.
        condition: Whether they are stored.
    """
    var words = bitcast[DType.uint32, 4](values)
    inlined_assembly[
        """{
        .reg .pred stored;
        setp.ne.u32 stored, $5, 0;
        @stored st.global.v4.b32 [$0], {$1, $2, $3, $4};
        }""",
        NoneType,
        constraints="l,r,r,r,r,r,~{memory}",
    ](address, words[0], words[1], words[2], words[3], UInt32(condition))


@always_inline
def store_half_if(address: UInt64, value: UInt16, condition: Bool):
    """Stores 2 bytes to device memory, or not, without a branch.

    Args:
        address: A multiple of 2.
        value: The bits.
        condition: Whether they are stored.
    """
    inlined_assembly[
        """{
        .reg .pred stored;
        setp.ne.u32 stored, $2, 0;
        @stored st.global.b16 [$0], $1;
        }""",
        NoneType,
        constraints="l,h,r,~{memory}",
    ](address, value, UInt32(condition))


@always_inline
def prefetch_line(data: Reads[_]):
    """Asks for a line of memory in the L2 (PTX ISA, "prefetch").

    Args:
        data: In the line.
    """
    inlined_assembly["prefetch.global.L2 [$0];", NoneType, constraints="l"](
        UInt64(Int(data))
    )


@always_inline
def prefetch_bytes(address: UInt64, length: UInt32):
    """Asks for global memory in the L2, in whole units of 16 bytes that begin
    in it or before it (PTX ISA, "cp.async.bulk.prefetch").

    Args:
        address: Of the first byte.
        length: How many.
    """
    var first = address & ~UInt64(CHUNK_BYTES - 1)
    var last = (address + UInt64(length)) & ~UInt64(CHUNK_BYTES - 1)
    if last > first:
        inlined_assembly[
            "cp.async.bulk.prefetch.L2.global [$0], $1;",
            NoneType,
            constraints="l,r",
        ](first, UInt32(last - first))
