"""What a tensor map holds: the arguments of the driver's two encode calls.

Names and values are those of the CUDA driver API, "Tensor Map Object Management" (CUDA 13.0), in
snake case. Every sequence has the innermost dimension first: ``C, W, H, D, N`` for an activation.
The corners are ``W, H, D`` too, although the API's documentation lists them as ``{D, H, W}``: so
CUTLASS passes them (``compute_lower_corner_whd``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TypeAlias

import numpy as np

from ._checks import check_integer, check_integers

__all__ = [
    "DataType",
    "Descriptor",
    "Im2colDescriptor",
    "Interleave",
    "L2Promotion",
    "OobFill",
    "Swizzle",
    "TiledDescriptor",
    "packed_strides",
]


class DataType(IntEnum):
    """``CUtensorMapDataType``: an element's type. 8-bit floats and int8 travel as ``UINT8``."""

    UINT8 = 0
    UINT16 = 1
    UINT32 = 2
    INT32 = 3
    UINT64 = 4
    INT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT32_FTZ = 10
    TFLOAT32 = 11
    TFLOAT32_FTZ = 12
    PACKED_16U4_ALIGN8B = 13
    PACKED_16U4_ALIGN16B = 14
    PACKED_16U6_ALIGN16B = 15

    @property
    def driver_name(self) -> str:
        """The enumerator in ``cuda.h``."""
        return "CU_TENSOR_MAP_DATA_TYPE_" + self.name.removeprefix("PACKED_")

    @property
    def bits(self) -> int:
        """Bits of one element in global memory."""
        return _BITS[self]

    @property
    def is_packed(self) -> bool:
        """Whether an element is smaller than a byte."""
        return self.bits < 8

    @property
    def is_padded(self) -> bool:
        """Whether sixteen packed elements take sixteen bytes of shared memory."""
        return self.name.endswith("ALIGN16B")

    @property
    def is_float(self) -> bool:
        """Whether the driver takes it for a floating-point type."""
        return DataType.FLOAT16 <= self <= DataType.TFLOAT32_FTZ


_BITS = dict(
    zip(DataType, (8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6), strict=True)
)


class Interleave(IntEnum):
    """``CUtensorMapInterleave``: whether channels lie in slices, ``NC/xHWCx``.

    Then a descriptor's dimensions are ``W, [H, [D,]] C/x, N``, whatever the data type: a slice is
    an element of dimension 0. Recorded on an H200; the driver's documentation does not say so.
    """

    NONE = 0
    B16 = 1
    B32 = 2

    @property
    def driver_name(self) -> str:
        """The enumerator in ``cuda.h``."""
        return "CU_TENSOR_MAP_INTERLEAVE_" + ("NONE", "16B", "32B")[self]

    @property
    def slice_bytes(self) -> int:
        """Bytes of a slice of channels of one pixel; 0 for ``NONE``."""
        return (0, 16, 32)[self]


class Swizzle(IntEnum):
    """``CUtensorMapSwizzle``: the order of the chunks of a row in shared memory."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM_32B = 4
    B128_ATOM_32B_FLIP_8B = 5
    B128_ATOM_64B = 6

    @property
    def driver_name(self) -> str:
        """The enumerator in ``cuda.h``."""
        names = (
            "NONE",
            "32B",
            "64B",
            "128B",
            "128B_ATOM_32B",
            "128B_ATOM_32B_FLIP_8B",
            "128B_ATOM_64B",
        )
        return "CU_TENSOR_MAP_SWIZZLE_" + names[self]

    @property
    def span(self) -> int:
        """Bytes within which chunks change places; 0 for ``NONE``."""
        return (0, 32, 64, 128, 128, 128, 128)[self]


class L2Promotion(IntEnum):
    """``CUtensorMapL2promotion``: how many bytes a miss brings into L2."""

    NONE = 0
    L2_64B = 1
    L2_128B = 2
    L2_256B = 3

    @property
    def driver_name(self) -> str:
        """The enumerator in ``cuda.h``."""
        return f"CU_TENSOR_MAP_L2_PROMOTION_{self.name}"


class OobFill(IntEnum):
    """``CUtensorMapFloatOOBfill``: what a load puts where its box lies outside the tensor."""

    NONE = 0
    NAN_REQUEST_ZERO_FMA = 1

    @property
    def driver_name(self) -> str:
        """The enumerator in ``cuda.h``."""
        return f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{self.name}"


def packed_strides(global_dim: Sequence[int], data_type: DataType) -> tuple[int, ...]:
    """Returns the byte strides of a contiguous tensor: one fewer than its dimensions."""
    strides = np.cumprod([int(size) for size in global_dim[:-1]], dtype=object)
    return tuple(int(elements) * data_type.bits // 8 for elements in strides)


_ENUMS = {
    "data_type": DataType,
    "interleave": Interleave,
    "swizzle": Swizzle,
    "l2_promotion": L2Promotion,
    "oob_fill": OobFill,
}


_NUMBERS = ("global_address", "channels_per_pixel", "pixels_per_column")


class _Fields(ABC):
    """Turns the fields of a descriptor into their types, and derives what both kinds have."""

    data_type: DataType
    global_address: int
    global_dim: tuple[int, ...]
    global_strides: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: Interleave
    swizzle: Swizzle
    l2_promotion: L2Promotion
    oob_fill: OobFill

    def __post_init__(self) -> None:
        """Checks the types of the fields; their values are the business of ``validate``."""
        # The subclasses are dataclasses, this base is none.
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            if entry.name in _ENUMS:
                object.__setattr__(self, entry.name, _member(entry.name, value))
            elif entry.name in _NUMBERS:
                object.__setattr__(self, entry.name, check_integer(entry.name, value))
            else:
                object.__setattr__(self, entry.name, check_integers(entry.name, value))

    @property
    def tensor_rank(self) -> int:
        """``tensorRank``: the number of dimensions."""
        return len(self.global_dim)

    @property
    @abstractmethod
    def row_elements(self) -> int:
        """Elements (with interleaving: slices) of a row in shared memory."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows that one load writes."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in shared memory; an element of a padded packed type takes one."""
        bits = 8 if self.data_type.is_padded else self.data_type.bits
        return self.row_elements * (8 * self.interleave.slice_bytes or bits) // 8

    @property
    def row_pitch(self) -> int:
        """Bytes from one row to the next in shared memory: the swizzle's span, where there is one.

        Recorded on an H200: with a swizzle, a row shorter than the span leaves the rest untouched,
        but rows of slices follow each other closely.
        """
        return self.row_bytes if self.interleave else self.swizzle.span or self.row_bytes

    @property
    def transaction_bytes(self) -> int:
        """Bytes that one load announces to its barrier, those outside the tensor included."""
        return self.rows * self.row_bytes

    @property
    def shared_memory_bytes(self) -> int:
        """Bytes of shared memory from the first row to the end of the last row's pitch."""
        return self.rows * self.row_pitch


def _member(name: str, value: object) -> IntEnum:
    kind = _ENUMS[name]
    number = check_integer(name, value)
    if number not in set(kind):
        allowed = ", ".join(f"{member.name} ({member.value})" for member in kind)
        raise ValueError(f"{name}: {number} is no {kind.__name__}; {allowed} are allowed")
    return kind(number)


@dataclass(frozen=True)
class TiledDescriptor(_Fields):
    """The arguments of ``cuTensorMapEncodeTiled``: a load or store moves a box of a tensor.

    Attributes:
        data_type: ``tensorDataType``.
        global_address: ``globalAddress``, in bytes.
        global_dim: ``globalDim``, in elements; in slices with interleaving.
        global_strides: ``globalStrides``, in bytes: those of dimension 1 and outwards.
        box_dim: ``boxDim``, in elements of the tensor; in slices with interleaving.
        element_strides: ``elementStrides``: along dimension ``i`` every ``element_strides[i]``-th
            element of the box is moved, the first included.
        interleave: ``interleave``.
        swizzle: ``swizzle``.
        l2_promotion: ``l2Promotion``.
        oob_fill: ``oobFill``.

    Raises:
        TypeError: A field is no integer, or no sequence of integers.
        ValueError: A number is no member of the enumeration that the field has.
    """

    data_type: DataType
    global_address: int
    global_dim: tuple[int, ...]
    global_strides: tuple[int, ...]
    box_dim: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: Interleave = Interleave.NONE
    swizzle: Swizzle = Swizzle.NONE
    l2_promotion: L2Promotion = L2Promotion.NONE
    oob_fill: OobFill = OobFill.NONE

    @property
    def box_elements(self) -> tuple[int, ...]:
        """Elements that one load moves along each dimension: ``ceil(box / element stride)``.

        Without interleaving the element stride of dimension 0 is ignored. With it, the box is one
        slice thick: its size along the slices is ignored.
        """
        strides = self.element_strides if self.interleave else (1, *self.element_strides[1:])
        counts = [-(-b // s) for b, s in zip(self.box_dim, strides, strict=True)]
        if self.interleave:
            counts[-2] = 1
        return tuple(counts)

    @property
    def row_elements(self) -> int:
        """Elements, or slices, along dimension 0 that one load moves."""
        return self.box_elements[0]

    @property
    def rows(self) -> int:
        """Rows that one load writes, dimension 1 fastest."""
        return math.prod(self.box_elements[1:])


@dataclass(frozen=True)
class Im2colDescriptor(_Fields):
    """The arguments of ``cuTensorMapEncodeIm2col``: a load moves pixels of an ``N[D]HWC`` tensor.

    Attributes:
        data_type: ``tensorDataType``.
        global_address: ``globalAddress``, in bytes.
        global_dim: ``globalDim``: ``C, W, [H, [D,]] N``, or ``W, [H, [D,]] C/x, N`` with
            interleaving.
        global_strides: ``globalStrides``, in bytes: those of dimension 1 and outwards.
        pixel_box_lower_corner: ``pixelBoxLowerCorner``: where the traversal of a row starts,
            ``W, [H, [D]]``.
        pixel_box_upper_corner: ``pixelBoxUpperCorner``: the traversal stays below the tensor's
            size plus this, ``W, [H, [D]]``.
        channels_per_pixel: ``channelsPerPixel``: elements of a row in shared memory; with
            interleaving a load moves one slice of each pixel, whatever this says.
        pixels_per_column: ``pixelsPerColumn``: rows.
        element_strides: ``elementStrides``: the traversal's step in each dimension.
        interleave: ``interleave``.
        swizzle: ``swizzle``.
        l2_promotion: ``l2Promotion``.
        oob_fill: ``oobFill``.

    Raises:
        TypeError: A field is no integer, or no sequence of integers.
        ValueError: A number is no member of the enumeration that the field has.
    """

    data_type: DataType
    global_address: int
    global_dim: tuple[int, ...]
    global_strides: tuple[int, ...]
    pixel_box_lower_corner: tuple[int, ...]
    pixel_box_upper_corner: tuple[int, ...]
    channels_per_pixel: int
    pixels_per_column: int
    element_strides: tuple[int, ...]
    interleave: Interleave = Interleave.NONE
    swizzle: Swizzle = Swizzle.NONE
    l2_promotion: L2Promotion = L2Promotion.NONE
    oob_fill: OobFill = OobFill.NONE

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the dimensions, innermost first; ``C`` are slices where they are interleaved."""
        spatial = "WHD"[: self.tensor_rank - 2]
        return (*spatial, "C", "N") if self.interleave else ("C", *spatial, "N")

    @property
    def spatial_axes(self) -> slice:
        """Which dimensions are ``W, [H, [D]]``."""
        return slice(0, -2) if self.interleave else slice(1, -1)

    @property
    def traversal_end(self) -> tuple[int, ...]:
        """The first coordinate that the traversal does not reach, ``W, [H, [D]]``."""
        sizes = self.global_dim[self.spatial_axes]
        return tuple(s + u for s, u in zip(sizes, self.pixel_box_upper_corner, strict=True))

    @property
    def row_elements(self) -> int:
        """Channels of a pixel, or slices, that one load moves."""
        return 1 if self.interleave else self.channels_per_pixel

    @property
    def rows(self) -> int:
        """Pixels that one load moves."""
        return self.pixels_per_column


Descriptor: TypeAlias = TiledDescriptor | Im2colDescriptor
