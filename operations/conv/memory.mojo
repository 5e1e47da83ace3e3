"""Pointers to operands and scratch, whose lifetimes the caller of a kernel
manages."""

from extensibility import ManagedTensorSlice
from std.memory.alloc import unsafe_alloc

comptime CACHE_LINE = 64
"""Bytes, and the alignment of scratch memory."""

comptime Reads[dtype: DType] = Pointer[Scalar[dtype], ImmUntrackedOrigin]
"""Elements that a kernel reads."""

comptime Writes[dtype: DType] = Pointer[Scalar[dtype], MutUntrackedOrigin]
"""Elements that a kernel writes."""


def element_bytes(dtype: DType) -> Int:
    """Bytes of an element that a convolution reads or writes.

    Args:
        dtype: Its type: float32, int32, or one of 16 or 8 bits.
    """
    if dtype == DType.float32 or dtype == DType.int32:
        return 4
    return 2 if dtype.is_half_float() else 1


def sum_type(dtype: DType) -> DType:
    """The type in which products are added up: int32 of integers, in which
    every sum is exact, else float32.

    Args:
        dtype: Of activation and filter.
    """
    return DType.int32 if dtype.is_integral() else DType.float32


def bits_type(dtype: DType) -> DType:
    """The type that values are moved as. Vectors of half floats are filled,
    selected and sliced as integers: where the CPU does not add in their type,
    the compiler converts each element to float32 and back.

    Args:
        dtype: Of the values.

    Returns:
        `uint16` of half floats, otherwise `dtype`.
    """
    return DType.uint16 if dtype.is_half_float() else dtype


@always_inline
def operand(tensor: ManagedTensorSlice) -> Reads[tensor.dtype]:
    """The elements of an op's operand, which outlive the op's call.

    Args:
        tensor: The operand, contiguous.

    Returns:
        Its first element.
    """
    return tensor.unsafe_ptr().as_imm().unsafe_origin_cast[ImmUntrackedOrigin]()


struct HostBuffer[dtype: DType](Movable):
    """Uninitialized memory that is freed with its owner, also when a kernel
    raises. Keep the owner alive to the last use of `elements`."""

    var elements: Writes[Self.dtype]

    def __init__(out self, count: Int):
        """Allocates.

        Args:
            count: Elements.
        """
        self.elements = unsafe_alloc[Scalar[Self.dtype]](
            max(1, count), alignment=CACHE_LINE
        )

    def __deinit__(deinit self):
        """Frees."""
        self.elements.unsafe_free()
