"""What one TMA instruction moves, byte for byte.

The rules are the PTX ISA's (9.0, 5.5.3 to 5.5.7), as an H200 follows them: every recorded load and
store (``tests/data/README.md``) comes out the same here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arguments import check_integer, show
from .descriptor import (
    DataType,
    Descriptor,
    Im2colDescriptor,
    Interleave,
    OobFill,
    TiledDescriptor,
)
from .swizzle import swizzle_address
from .validation import OFFSET_MAXIMUM, validate

__all__ = ["NAN_FILL", "load", "store"]

Bytes = npt.NDArray[np.uint8]

#: The 16 bits that fill elements outside the tensor where NaN is asked for, repeated in wider
#: elements. Measured on an H100 by others (the TMA tests of the Ventus project); not in this
#: project's recordings.
NAN_FILL = 0x7FF7

#: Types whose bits arrive as they are. The FTZ and TF32 types may round or flush.
_COPIED = frozenset(DataType) - {
    DataType.FLOAT32_FTZ,
    DataType.TFLOAT32,
    DataType.TFLOAT32_FTZ,
    DataType.PACKED_16U4_ALIGN8B,
    DataType.PACKED_16U4_ALIGN16B,
    DataType.PACKED_16U6_ALIGN16B,
}


def load(
    descriptor: Descriptor,
    tensor: npt.NDArray[Any],
    coordinates: Sequence[int],
    filter_offsets: Sequence[int] = (),
    *,
    shared_memory: Bytes | None = None,
    offset: int = 0,
) -> Bytes:
    """Returns shared memory after a load, ``cp.async.bulk.tensor...shared::cluster.global``.

    Args:
        descriptor: A descriptor that ``validate`` finds nothing in.
        tensor: Global memory from ``global_address`` on, contiguous, of any type and shape.
        coordinates: One a dimension, innermost first; outside the tensor is allowed.
        filter_offsets: For an im2col descriptor one a spatial dimension, ``W, [H, [D]]``.
        shared_memory: Shared memory from address 0 on, before the load; by default zeros, as
            many as the load reaches.
        offset: Where the load writes. The swizzle depends on it.

    Raises:
        TypeError: A coordinate or an offset is no integer.
        ValueError: The driver would refuse the descriptor, the GPU would refuse the instruction,
            memory is too small, or the descriptor has a field whose effect is not known here
            (interleaved layouts; packed, TF32 and FTZ types; an im2col step in ``N``).
    """
    _check_descriptor(descriptor)
    where = _check_coordinates(descriptor, coordinates)
    offsets = _check_filter_offsets(descriptor, filter_offsets)
    _check_offset(offset)
    source, inside = _source(descriptor, where, offsets)
    memory = _tensor_bytes(descriptor, tensor)
    target = swizzle_address(_rows_in_shared_memory(descriptor) + offset, descriptor.swizzle)
    if shared_memory is None:
        result = np.zeros(offset + descriptor.shared_memory_bytes, np.uint8)
    else:
        result = _shared_bytes(shared_memory, target).copy()
    fill = np.resize(np.array([_fill(descriptor)], "<u2").view(np.uint8), source.shape)
    result[target] = np.where(inside, memory[np.where(inside, source, 0)], fill)
    return result


def store(
    descriptor: TiledDescriptor,
    shared_memory: Bytes,
    coordinates: Sequence[int],
    tensor: npt.NDArray[Any],
    *,
    offset: int = 0,
) -> npt.NDArray[Any]:
    """Returns a tensor after a store, ``cp.async.bulk.tensor...global.shared::cta.tile``.

    Args:
        descriptor: A descriptor that ``validate`` finds nothing in.
        shared_memory: Shared memory from address 0 on.
        coordinates: One a dimension, innermost first, none negative; what lies beyond the
            tensor is dropped.
        tensor: Global memory from ``global_address`` on, before the store.
        offset: Where the box lies in shared memory. The swizzle depends on it.

    Raises:
        TypeError: ``descriptor`` is no tiled one, or a coordinate is no integer.
        ValueError: As ``load``.
    """
    if not isinstance(descriptor, TiledDescriptor):
        raise TypeError(
            f"descriptor: {type(descriptor).__name__}; a TiledDescriptor is allowed in a store"
        )
    _check_descriptor(descriptor)
    where = _check_coordinates(descriptor, coordinates)
    if min(where) < 0:
        raise ValueError(
            f"coordinates: {show(where)} has a negative entry; a store takes none (the GPU reports "
            "an illegal instruction)"
        )
    _check_offset(offset)
    target, inside = _source(descriptor, where, ())
    result = _tensor_bytes(descriptor, tensor).copy()
    source = swizzle_address(_rows_in_shared_memory(descriptor) + offset, descriptor.swizzle)
    result[target[inside]] = _shared_bytes(shared_memory, source)[source[inside]]
    stored: npt.NDArray[Any] = result.view(tensor.dtype).reshape(tensor.shape)
    return stored


def _check_descriptor(descriptor: Descriptor) -> None:
    violations = validate(descriptor)
    if violations:
        raise ValueError(f"descriptor: {'; '.join(map(str, violations))}")
    if descriptor.interleave is not Interleave.NONE:
        raise ValueError(
            f"interleave: {descriptor.interleave.driver_name}; only NONE is modelled: where the "
            "slices of an interleaved tensor lie is neither documented nor recorded"
        )
    if descriptor.data_type not in _COPIED:
        raise ValueError(
            f"data_type: {descriptor.data_type.driver_name}; only types whose bits arrive as they "
            "are, are modelled: what TMA makes of this one is not recorded"
        )
    if isinstance(descriptor, Im2colDescriptor) and descriptor.element_strides[-1] != 1:
        raise ValueError(
            f"element_strides[{descriptor.tensor_rank - 1}]: {descriptor.element_strides[-1]}; "
            "only 1 is modelled: a step in N is not recorded"
        )


def _check_coordinates(descriptor: Descriptor, coordinates: Sequence[int]) -> tuple[int, ...]:
    where = tuple(check_integer("coordinates", entry, tuple(coordinates)) for entry in coordinates)
    if len(where) != descriptor.tensor_rank:
        raise ValueError(
            f"coordinates: {show(where)} has {len(where)} entries; {descriptor.tensor_rank} are "
            "needed, one a dimension"
        )
    if any(not -(1 << 31) <= entry < 1 << 31 for entry in where):
        raise ValueError(f"coordinates: {show(where)}; entries of 32 bits are allowed")
    if where[0] * descriptor.data_type.bits % 128:
        raise ValueError(
            f"coordinates: {show(where)} starts {where[0] * descriptor.data_type.bits // 8} bytes "
            "into a row; multiples of 16 bytes are allowed (the GPU reports an illegal instruction)"
        )
    return where


def _check_filter_offsets(descriptor: Descriptor, filter_offsets: Sequence[int]) -> tuple[int, ...]:
    entries = tuple(filter_offsets)
    offsets = tuple(check_integer("filter_offsets", entry, entries) for entry in entries)
    count = descriptor.tensor_rank - 2 if isinstance(descriptor, Im2colDescriptor) else 0
    if len(offsets) != count:
        raise ValueError(
            f"filter_offsets: {show(offsets)} has {len(offsets)} entries; {count} are needed"
            + (", one a spatial dimension" if count else " by a tiled load")
        )
    if count and not all(0 <= entry <= OFFSET_MAXIMUM[count + 2] for entry in offsets):
        raise ValueError(
            f"filter_offsets: {show(offsets)}; 0 to {OFFSET_MAXIMUM[count + 2]} are allowed at "
            f"rank {count + 2}"
        )
    return offsets


def _check_offset(offset: int) -> None:
    if offset < 0 or offset % 128:
        raise ValueError(f"offset: {offset}; multiples of 128 are allowed")


def _tensor_bytes(descriptor: Descriptor, tensor: npt.NDArray[Any]) -> Bytes:
    if not tensor.flags.c_contiguous:
        raise ValueError("tensor: not contiguous; a contiguous array is allowed")
    memory = tensor.reshape(-1).view(np.uint8)
    outer = zip(descriptor.global_dim[1:], descriptor.global_strides, strict=True)
    last = sum((size - 1) * stride for size, stride in outer)
    needed = last + descriptor.global_dim[0] * descriptor.data_type.bits // 8
    if memory.size < needed:
        raise ValueError(
            f"tensor: {memory.size} bytes; the descriptor's dimensions and strides reach {needed}"
        )
    return memory


def _shared_bytes(shared_memory: Bytes, addresses: npt.NDArray[np.int64]) -> Bytes:
    if shared_memory.dtype != np.uint8 or shared_memory.ndim != 1:
        raise ValueError(
            f"shared_memory: {shared_memory.dtype} of {shared_memory.ndim} dimensions; uint8 of 1 "
            "is allowed"
        )
    needed = int(addresses.max()) + 1
    if shared_memory.size < needed:
        raise ValueError(f"shared_memory: {shared_memory.size} bytes; the box reaches {needed}")
    return shared_memory


def _fill(descriptor: Descriptor) -> int:
    return NAN_FILL if descriptor.oob_fill is OobFill.NAN_REQUEST_ZERO_FMA else 0


def _rows_in_shared_memory(descriptor: Descriptor) -> npt.NDArray[np.int64]:
    """Addresses without swizzle of the bytes of every row, ``[rows, row_bytes]``."""
    rows = np.arange(descriptor.rows, dtype=np.int64)[:, None] * descriptor.row_pitch
    return rows + np.arange(descriptor.row_bytes, dtype=np.int64)


def _source(
    descriptor: Descriptor, where: tuple[int, ...], offsets: tuple[int, ...]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Addresses in the tensor of the bytes of every row, and which of them lie inside it.

    Both are ``[rows, row_bytes]``; addresses outside the tensor mean nothing.
    """
    if isinstance(descriptor, Im2colDescriptor):
        pixels = list(itertools.islice(_walk(descriptor, where[1:]), descriptor.rows))
        outer = np.array(pixels, np.int64) + np.array([*offsets, 0], np.int64)
    else:
        outer = _box_rows(descriptor, where)
    sizes = np.array(descriptor.global_dim[1:], np.int64)
    row_inside = np.all((outer >= 0) & (outer < sizes), axis=1)
    row_start = outer @ np.array(descriptor.global_strides, np.int64)
    size = descriptor.data_type.bits // 8
    byte = where[0] * size + np.arange(descriptor.row_bytes, dtype=np.int64)
    byte_inside = (byte >= 0) & (byte < descriptor.global_dim[0] * size)
    return row_start[:, None] + byte, row_inside[:, None] & byte_inside


def _box_rows(descriptor: TiledDescriptor, where: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Coordinates of the rows of a box without dimension 0, ``[rows, rank - 1]``."""
    lines = [
        start + np.arange(count, dtype=np.int64) * step
        for start, count, step in zip(
            where[1:], descriptor.box_elements[1:], descriptor.element_strides[1:], strict=True
        )
    ]
    grids = np.meshgrid(*reversed(lines), indexing="ij")
    columns = [grid.reshape(-1) for grid in reversed(grids)]
    return np.stack(columns, axis=1) if columns else np.zeros((1, 0), np.int64)


def _walk(descriptor: Im2colDescriptor, where: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The pixels ``W, [H, [D,]] N`` that an im2col load visits, without its filter offsets.

    A coordinate that reaches the end of the pixel box starts again at the lower corner, and the
    next one outwards takes a step; ``N`` has no end.
    """
    pixel = list(where)
    while True:
        yield tuple(pixel)
        for i, end in enumerate(descriptor.walk_end):
            pixel[i] += descriptor.element_strides[i + 1]
            if pixel[i] < end:
                break
            pixel[i] = descriptor.pixel_box_lower_corner[i]
        else:
            pixel[-1] += 1
