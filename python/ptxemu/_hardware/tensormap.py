"""Tensor maps: what the driver's encode calls make, as a kernel's argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsInt

from .._errors import MemoryFaultError
from ..tma import DataType, Descriptor, Im2colDescriptor, TiledDescriptor, validate
from .memory import Memory

__all__ = ["TensorMap", "TensorMaps"]

#: Bytes of a tensor map, and their alignment (PTX ISA 9.0, 5.5.8).
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGN = 64

_MAGIC = b"tensormp"


@dataclass(frozen=True)
class TensorMap:
    """A tensor map. The fields are those of ``ptxemu.tma``'s descriptors."""

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
            TypeError: A field is no integer, or no sequence of integers.
            ValueError: A field has no such value, or the driver would refuse the fields.
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
            TypeError: A field is no integer, or no sequence of integers.
            ValueError: A field has no such value, or the driver would refuse the fields.
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


class TensorMaps:
    """The tensor maps that kernels were passed.

    A kernel gets a handle of as many bytes as the driver's opaque ones: a mark and a number.
    """

    def __init__(self) -> None:
        self._maps: list[TensorMap] = []

    def add(self, tensor_map: TensorMap) -> bytes:
        """Adds a tensor map; returns its handle."""
        self._maps.append(tensor_map)
        handle = _MAGIC + (len(self._maps) - 1).to_bytes(8, "little")
        return handle.ljust(TENSOR_MAP_BYTES, b"\xee")

    def at(self, memory: Memory, address: int) -> TensorMap:
        """The tensor map whose handle is at an address.

        Raises:
            MemoryFaultError: There is none.
        """
        first = address - memory.base
        handle = memory.data[first : first + 16].tobytes() if first >= 0 else b""
        number = int.from_bytes(handle[8:16], "little")
        if handle[:8] != _MAGIC or number >= len(self._maps):
            raise MemoryFaultError(f"no tensor map at {memory.where(address)}")
        return self._maps[number]
