"""What the driver refuses when it encodes a descriptor.

The rules are those of the CUDA driver API, "Tensor Map Object Management", for
``cuTensorMapEncodeTiled`` and ``cuTensorMapEncodeIm2col`` (CUDA 13.0), corrected by what driver
580.159 answered on an H200 (``tests/ptxemu/data/README.md``): with slices of 32 bytes it takes
every swizzle, slices do not free the box from multiples of 16 bytes, a box may not be larger than a
multiprocessor's shared memory, and the end of the pixel box is a number of 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ._descriptor import (
    DataType,
    Descriptor,
    Im2colDescriptor,
    Interleave,
    OobFill,
    Swizzle,
    TiledDescriptor,
)

__all__ = ["BOX_BYTES", "CORNER_RANGE", "OFFSET_MAXIMUM", "Violation", "validate"]

#: Smallest and largest entry of a corner by rank.
CORNER_RANGE: dict[int, tuple[int, int]] = {3: (-32768, 32767), 4: (-128, 127), 5: (-16, 15)}

#: Largest filter offset of an im2col load by rank (PTX ISA 9.0, 5.5.4.1). The GPU reports no error
#: for larger ones, it drops their upper bits or adds them to the next offset.
OFFSET_MAXIMUM: dict[int, int] = {3: 65535, 4: 255, 5: 31}


@dataclass(frozen=True)
class Violation:
    """One reason why a descriptor cannot be encoded.

    Attributes:
        field: The field's name, with an index where one entry is wrong.
        value: The value it has.
        allowed: What is allowed.
        reason: Why.
    """

    field: str
    value: object
    allowed: str
    reason: str

    def __str__(self) -> str:
        """One sentence for a message."""
        return f"{self.field}: {self.value}; {self.allowed} ({self.reason})"


#: Bytes that the driver allows in a box: an H200's shared memory per multiprocessor.
BOX_BYTES = 228 * 1024

_AnyDescriptor = TypeVar("_AnyDescriptor", TiledDescriptor, Im2colDescriptor)
_Rule = Callable[[_AnyDescriptor], Iterator[Violation]]


def validate(descriptor: Descriptor, *, compute_capability: int = 90) -> list[Violation]:
    """Returns everything for which the driver would refuse a descriptor; empty if it takes it.

    Where the rank or a sequence's length is wrong, only that is returned: the other rules have
    nothing to look at then.

    Args:
        descriptor: The descriptor.
        compute_capability: The GPU's, times ten. Below 100 the driver takes no packed types and
            no swizzles with atoms; its rules on these from 100 on are those of its documentation.
    """
    lengths = list(_lengths(descriptor))
    if lengths:
        return lengths
    found = [violation for rule in _COMMON for violation in rule(descriptor)]
    if compute_capability < 100:
        found += _blackwell_only(descriptor)
    if isinstance(descriptor, TiledDescriptor):
        return found + [violation for rule in _TILED for violation in rule(descriptor)]
    return found + [violation for rule in _IM2COL for violation in rule(descriptor)]


def _entries(
    name: str, values: Sequence[int], low: int, high: int, reason: str
) -> Iterator[Violation]:
    for i, value in enumerate(values):
        if not low <= value <= high:
            yield Violation(f"{name}[{i}]", value, f"{low} to {high} are allowed", reason)


def _lengths(d: Descriptor) -> Iterator[Violation]:
    rank = d.tensor_rank
    tiled = isinstance(d, TiledDescriptor)
    least = 1 if tiled else 3
    if not least <= rank <= 5:
        why = "TMA has 5 coordinates" if tiled else "channels, one to three spatial dimensions, N"
        yield Violation("tensor_rank", rank, f"{least} to 5 are allowed", why)
        return
    counts = {"global_strides": rank - 1, "element_strides": rank}
    if tiled:
        counts["box_dim"] = rank
    else:
        counts |= {"pixel_box_lower_corner": rank - 2, "pixel_box_upper_corner": rank - 2}
    for name, count in counts.items():
        values = getattr(d, name)
        if len(values) != count:
            why = f"rank {rank}" + (", innermost stride implied" if "global" in name else "")
            yield Violation(name, values, f"{count} entries are needed", why)


def _rank(d: Descriptor) -> Iterator[Violation]:
    if d.interleave and d.tensor_rank < 3:
        yield Violation(
            "tensor_rank", d.tensor_rank, "3 to 5 are allowed", "interleaved layouts have slices"
        )


def _alignment(d: Descriptor) -> tuple[int, str]:
    if d.interleave is Interleave.B32:
        return 32, "slices of 32 bytes"
    if d.data_type.is_padded:
        return 32, f"{d.data_type.driver_name} is read in pieces of 32 bytes"
    return 16, "TMA moves pieces of 16 bytes"


def _address(d: Descriptor) -> Iterator[Violation]:
    unit, why = _alignment(d)
    if d.global_address % unit or not 0 <= d.global_address < 1 << 64:
        yield Violation("global_address", d.global_address, f"multiples of {unit} are allowed", why)


def _dims(d: Descriptor) -> Iterator[Violation]:
    yield from _entries("global_dim", d.global_dim, 1, 1 << 32, "the driver's limit on a size")
    multiple = 128 if d.data_type.is_padded else 2 if d.data_type.is_packed else 1
    if d.global_dim[0] % multiple:
        why = f"{d.data_type.driver_name} is packed"
        allowed = f"multiples of {multiple} are allowed"
        yield Violation("global_dim[0]", d.global_dim[0], allowed, why)


def _strides(d: Descriptor) -> Iterator[Violation]:
    unit, why = _alignment(d)
    for i, stride in enumerate(d.global_strides):
        name = f"global_strides[{i}]"
        if stride % unit:
            yield Violation(name, stride, f"multiples of {unit} are allowed", why)
        if not 0 <= stride < 1 << 40:
            allowed = "0 to 2^40 - 1 are allowed"
            yield Violation(name, stride, allowed, "the driver's limit on a stride")


def _element_strides(d: Descriptor) -> Iterator[Violation]:
    yield from _entries("element_strides", d.element_strides, 1, 8, "the driver's limit on a step")


def _blackwell_only(d: Descriptor) -> Iterator[Violation]:
    why = "compute capability 10.0 brought it"
    if d.data_type.is_packed:
        name = d.data_type.driver_name
        yield Violation("data_type", name, "types of whole bytes are allowed", why)
    if d.swizzle > Swizzle.B128:
        allowed = "swizzles without atoms are allowed"
        yield Violation("swizzle", d.swizzle.driver_name, allowed, why)


def _interleave(d: Descriptor) -> Iterator[Violation]:
    if d.interleave and d.data_type is DataType.PACKED_16U6_ALIGN16B:
        allowed = f"{Interleave.NONE.driver_name} is allowed"
        yield Violation("interleave", d.interleave.driver_name, allowed, d.data_type.driver_name)


#: The swizzles that padded packed types take in one direction at least.
_PACKED_SWIZZLES = {
    DataType.PACKED_16U4_ALIGN16B: (Swizzle.NONE, Swizzle.B128, Swizzle.B128_ATOM_32B),
    DataType.PACKED_16U6_ALIGN16B: (
        Swizzle.NONE,
        Swizzle.B128,
        Swizzle.B128_ATOM_32B,
        Swizzle.B128_ATOM_64B,
    ),
}


def _packed_swizzle(d: Descriptor) -> Iterator[Violation]:
    allowed = _PACKED_SWIZZLES.get(d.data_type)
    if allowed is not None and d.swizzle not in allowed:
        names = ", ".join(swizzle.driver_name for swizzle in allowed)
        yield Violation(
            "swizzle", d.swizzle.driver_name, f"{names} are allowed", d.data_type.driver_name
        )


def _fill(d: Descriptor) -> Iterator[Violation]:
    if d.oob_fill is OobFill.NAN_REQUEST_ZERO_FMA and not d.data_type.is_float:
        yield Violation(
            "oob_fill",
            d.oob_fill.driver_name,
            f"{OobFill.NONE.driver_name} is allowed",
            f"{d.data_type.driver_name} has no NaN",
        )


def _row(d: Descriptor, name: str, elements: int) -> Iterator[Violation]:
    """The rules on the innermost extent of the box, which both kinds have."""
    if d.data_type.is_padded and elements != 128:
        yield Violation(name, elements, "128 is allowed", d.data_type.driver_name)
    size = elements * d.data_type.bits
    if size % 128:
        shown = f"{elements} ({size / 8:g} bytes)"
        yield Violation(name, shown, "multiples of 16 bytes are allowed", "TMA moves such pieces")
    if d.swizzle and not d.interleave and size > 8 * d.swizzle.span:
        shown = f"{elements} ({size / 8:g} bytes)"
        allowed = f"at most {d.swizzle.span} bytes are allowed"
        yield Violation(name, shown, allowed, f"a row fits the span of {d.swizzle.driver_name}")


def _size(d: Descriptor, name: str, value: object, elements: int) -> Iterator[Violation]:
    size = elements * d.data_type.bits // 8
    if size > BOX_BYTES:
        shown, allowed = f"{value} ({size} bytes)", f"at most {BOX_BYTES} bytes are allowed"
        yield Violation(name, shown, allowed, "the shared memory of a multiprocessor")


def _box(d: TiledDescriptor) -> Iterator[Violation]:
    yield from _entries("box_dim", d.box_dim, 1, 256, "the driver's limit on a box")
    yield from _row(d, "box_dim[0]", d.box_dim[0])
    if all(step > 0 for step in d.element_strides):
        # The driver rounds down where the GPU rounds up, so that large boxes with steps pass.
        steps = zip(d.box_dim, d.element_strides, strict=True)
        yield from _size(d, "box_dim", d.box_dim, math.prod(size // step for size, step in steps))


def _channels(d: Im2colDescriptor) -> Iterator[Violation]:
    name, channels = "channels_per_pixel", d.channels_per_pixel
    if not 1 <= channels <= 256:
        yield Violation(name, channels, "1 to 256 are allowed", "the driver's limit on a row")
    yield from _row(d, name, channels)


def _pixels(d: Im2colDescriptor) -> Iterator[Violation]:
    if not 1 <= d.pixels_per_column <= 1024:
        why = "the driver's limit on a column"
        yield Violation("pixels_per_column", d.pixels_per_column, "1 to 1024 are allowed", why)
    elements = d.pixels_per_column * d.channels_per_pixel
    yield from _size(d, "pixels_per_column", d.pixels_per_column, elements)


def _corners(d: Im2colDescriptor) -> Iterator[Violation]:
    low, high = CORNER_RANGE[d.tensor_rank]
    why = f"the driver's range at rank {d.tensor_rank}"
    for name in ("pixel_box_lower_corner", "pixel_box_upper_corner"):
        yield from _entries(name, getattr(d, name), low, high, why)


def _pixel_box(d: Im2colDescriptor) -> Iterator[Violation]:
    for i, (lower, end) in enumerate(zip(d.pixel_box_lower_corner, d.traversal_end, strict=True)):
        if _in_32_bits(end) <= lower:
            axis = d.axes[d.spatial_axes][i]
            size = d.global_dim[d.spatial_axes][i]
            name, upper = f"pixel_box_upper_corner[{i}]", d.pixel_box_upper_corner[i]
            if end >= 1 << 31:
                allowed = f"at most {(1 << 31) - 1 - size} is allowed"
                why = f"the box's end, the {axis} size {size} plus this, is a number of 32 bits"
            else:
                allowed = f"more than {lower - size} is allowed"
                why = f"the box from {lower} to the {axis} size {size} plus this is empty"
            yield Violation(name, upper, allowed, why)


def _in_32_bits(number: int) -> int:
    """What the lower 32 bits of a number are as a signed number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


_COMMON: tuple[Callable[[Descriptor], Iterator[Violation]], ...] = (
    _rank,
    _address,
    _dims,
    _strides,
    _element_strides,
    _interleave,
    _packed_swizzle,
    _fill,
)
_TILED: tuple[_Rule[TiledDescriptor], ...] = (_box,)
_IM2COL: tuple[_Rule[Im2colDescriptor], ...] = (_channels, _pixels, _corners, _pixel_box)
