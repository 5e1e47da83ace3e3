"""Tensor maps: what the driver's encode calls make, as a kernel's argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsInt

from ..tma import DataType, Descriptor, Im2colDescriptor, TiledDescriptor, validate

__all__ = ["TensorMap"]

#: Bytes of a tensor map, and their alignment (PTX ISA 9.0, 5.5.8).
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGN = 64

_MAGIC = b"tensormp"


@dataclass(frozen=True)
class TensorMap:
    """A tensor map. The fields are those of ``maxconv.tma``'s descriptors."""

    descriptor: Descriptor

    @classmethod
    def tiled(
        cls,
        data_type: DataType,
        global_address: SupportsInt,
        global_dim: Sequence[int],
        global_strides: Sequence[int],
        box_dim: Sequence[int],
        element_strides: Sequence[int] | None = None,
        **others: Any,
    ) -> TensorMap:
        """The arguments of ``cuTensorMapEncodeTiled``.

        Args:
            data_type: Of an element.
            global_address: A pointer, or a number.
            global_dim: Elements, innermost first.
            global_strides: Bytes, of dimension 1 and outwards.
            box_dim: Elements of a box.
            element_strides: All 1 by default.
            others: ``interleave``, ``swizzle``, ``l2_promotion``, ``oob_fill``.

        Raises:
            TypeError: As ``TiledDescriptor``.
            ValueError: As ``TiledDescriptor``, or what the driver would refuse.
        """
        steps = element_strides or [1] * len(global_dim)
        descriptor = TiledDescriptor(
            data_type,
            int(global_address),
            tuple(global_dim),
            tuple(global_strides),
            tuple(box_dim),
            tuple(steps),
            **others,
        )
        return cls._checked(descriptor)

    @classmethod
    def im2col(
        cls,
        data_type: DataType,
        global_address: SupportsInt,
        global_dim: Sequence[int],
        global_strides: Sequence[int],
        pixel_box_lower_corner: Sequence[int],
        pixel_box_upper_corner: Sequence[int],
        channels_per_pixel: int,
        pixels_per_column: int,
        element_strides: Sequence[int] | None = None,
        **others: Any,
    ) -> TensorMap:
        """The arguments of ``cuTensorMapEncodeIm2col``.

        Args:
            data_type: Of an element.
            global_address: A pointer, or a number.
            global_dim: ``C, W, [H, [D,]] N``.
            global_strides: Bytes, of dimension 1 and outwards.
            pixel_box_lower_corner: ``W, [H, [D]]``.
            pixel_box_upper_corner: ``W, [H, [D]]``.
            channels_per_pixel: Elements of a row.
            pixels_per_column: Rows.
            element_strides: All 1 by default.
            others: ``interleave``, ``swizzle``, ``l2_promotion``, ``oob_fill``.

        Raises:
            TypeError: As ``Im2colDescriptor``.
            ValueError: As ``Im2colDescriptor``, or what the driver would refuse.
        """
        steps = element_strides or [1] * len(global_dim)
        descriptor = Im2colDescriptor(
            data_type,
            int(global_address),
            tuple(global_dim),
            tuple(global_strides),
            tuple(pixel_box_lower_corner),
            tuple(pixel_box_upper_corner),
            channels_per_pixel,
            pixels_per_column,
            tuple(steps),
            **others,
        )
        return cls._checked(descriptor)

    @classmethod
    def _checked(cls, descriptor: Descriptor) -> TensorMap:
        violations = validate(descriptor, compute_capability=100)
        if violations:
            raise ValueError(f"tensor map: {'; '.join(map(str, violations))}")
        return cls(descriptor)


def handle_bytes(number: int) -> bytes:
    """The bytes that a kernel gets instead of the driver's opaque ones."""
    return (_MAGIC + number.to_bytes(8, "little")).ljust(TENSOR_MAP_BYTES, b"\xee")


def handle_number(data: bytes) -> int | None:
    """The number of a handle; None if the bytes are none."""
    return int.from_bytes(data[8:16], "little") if data[:8] == _MAGIC else None
