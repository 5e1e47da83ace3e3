"""Loads of the Hopper stem kernel's producer, and access to shared memory."""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of

from ....conv.memory import Reads
from ...pipeline.chunks import shared_pointer
from ...tma.copy import SharedAddress


@always_inline
def load_shared[
    dtype: DType, width: SIMDLength
](address: SharedAddress) -> SIMD[dtype, width]:
    """Reads shared memory at a multiple of the vector's bytes."""
    return shared_pointer[dtype](address).unsafe_load[
        width=width, alignment=Int(width) * size_of[dtype]()
    ](0)


@always_inline
def store_shared[
    dtype: DType, width: SIMDLength
](address: SharedAddress, value: SIMD[dtype, width]):
    """Writes shared memory at a multiple of the vector's bytes."""
    shared_pointer[dtype](address).unsafe_store[
        alignment=Int(width) * size_of[dtype]()
    ](0, value)


@always_inline
def load_element_if(condition: Bool, data: Reads) -> UInt16:
    """The bits of a 16-bit element of read-only memory, zeros unless the
    condition holds."""
    return inlined_assembly[
        """{
        .reg .pred p;
        setp.ne.b32 p, $2, 0;
        mov.b16 $0, 0;
        @p ld.global.nc.b16 $0, [$1];
        }""",
        UInt16,
        constraints="=&h,l,r",
        has_side_effect=False,
    ](UInt64(Int(data)), UInt32(condition))


@always_inline
def load_quad_if(condition: Bool, data: Reads) -> SIMD[DType.uint32, 2]:
    """The bits of a quad of read-only memory, zeros unless the condition
    holds."""
    var bits = inlined_assembly[
        """{
        .reg .pred p;
        setp.ne.b32 p, $2, 0;
        mov.b64 $0, 0;
        @p ld.global.nc.b64 $0, [$1];
        }""",
        UInt64,
        constraints="=&l,l,r",
        has_side_effect=False,
    ](UInt64(Int(data)), UInt32(condition))
    return bitcast[DType.uint32, 2](bits)
