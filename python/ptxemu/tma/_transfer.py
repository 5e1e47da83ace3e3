"""What one TMA instruction moves, byte for byte.

The rules are the PTX ISA's (9.0, 5.5.3 to 5.5.7), as an H200 follows them: every recorded load and
store (``tests/ptxemu/data/README.md``) comes out the same here. What an H200 cannot do (packed
types) is refused; the swizzles with atoms, which its driver does not take either, follow the
documentation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._checks import check_integer
from ._descriptor import (
    DataType,
    Descriptor,
    Im2colDescriptor,
    OobFill,
    TiledDescriptor,
)
from ._swizzle import swizzle_address
from ._validation import OFFSET_MAXIMUM, validate

__all__ = ["NAN_FILL", "TF32_NAN", "Move", "bring", "load", "plan", "store"]

Bytes = npt.NDArray[np.uint8]

#: The 16 bits that fill elements outside the tensor where NaN is asked for, repeated in wider
#: elements.
NAN_FILL = 0x7FF7

#: The only NaN that a load of a TF32 type makes, whatever NaN it read.
TF32_NAN = 0x7FFFE000

#: Types that a load rounds to TF32. A store writes their bits as they are, as both do with every
#: other type: nothing is flushed to zero for the types with FTZ.
_ROUNDED = frozenset({DataType.TFLOAT32, DataType.TFLOAT32_FTZ})


@dataclass(frozen=True)
class Move:
    """Where the bytes of a load or store lie, ``[rows, row bytes]`` each.

    Attributes:
        tensor: Distances from ``global_address``; meaningless outside the tensor.
        inside: Which bytes lie in the tensor.
        shared: Addresses in shared memory.
    """

    tensor: npt.NDArray[np.int64]
    inside: npt.NDArray[np.bool_]
    shared: npt.NDArray[np.int64]


def plan(
    descriptor: Descriptor,
    coordinates: Sequence[int],
    filter_offsets: Sequence[int] = (),
    *,
    offset: int = 0,
) -> Move:
    """Returns which bytes a load or store moves, without moving them.

    Args:
        descriptor: A descriptor that ``validate`` finds nothing in.
        coordinates: One a dimension, innermost first; a store takes none that is negative.
        filter_offsets: For an im2col descriptor one a spatial dimension, ``W, [H, [D]]``.
        offset: Of the box in shared memory, a multiple of 128 bytes.

    Raises:
        TypeError: A coordinate or an offset is no integer.
        ValueError: The GPU would refuse the instruction.
    """
    where = _check_coordinates(descriptor, coordinates)
    offsets = _check_filter_offsets(descriptor, filter_offsets)
    _check_offset(offset)
    tensor, inside = _source(descriptor, where, offsets)
    rows = _rows_in_shared_memory(descriptor) + offset
    return Move(tensor, inside, swizzle_address(rows, descriptor.swizzle))


def bring(descriptor: Descriptor, move: Move, memory: Bytes) -> Bytes:
    """Returns the bytes that a load writes at ``move.shared``.

    Args:
        descriptor: The load's.
        move: Its plan.
        memory: Global memory from ``global_address`` on.
    """
    whole = bool(move.inside.all())
    read = memory[move.tensor if whole else np.where(move.inside, move.tensor, 0)]
    if descriptor.data_type in _ROUNDED:
        read = _round_to_tf32(read.view("<u4")).view(np.uint8)
    if whole:
        return read
    fill = np.full(move.tensor.size // 2, _fill(descriptor), "<u2").view(np.uint8)
    return np.where(move.inside, read, fill.reshape(move.tensor.shape))


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
        coordinates: One a dimension, innermost first; outside the tensor is allowed, but an im2col
            load starts inside the pixel box.
        filter_offsets: For an im2col descriptor one a spatial dimension, ``W, [H, [D]]``.
        shared_memory: Shared memory from address 0 on, before the load; by default zeros, as
            many as the load reaches.
        offset: Where the load writes. The swizzle depends on it.

    Raises:
        TypeError: A coordinate or an offset is no integer.
        ValueError: The driver would refuse the descriptor, the GPU would refuse the instruction,
            memory is too small, or the descriptor is of a packed type.
    """
    _check_descriptor(descriptor)
    move = plan(descriptor, coordinates, filter_offsets, offset=offset)
    memory = _tensor_bytes(descriptor, tensor)
    if shared_memory is None:
        result = np.zeros(offset + descriptor.shared_memory_bytes, np.uint8)
    else:
        result = _shared_bytes(shared_memory, move.shared).copy()
    result[move.shared] = bring(descriptor, move, memory)
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
        ValueError: The driver would refuse the descriptor, the GPU would refuse the instruction,
            memory is too small, or the descriptor is of a packed type.
    """
    if not isinstance(descriptor, TiledDescriptor):
        raise TypeError(
            f"descriptor: {type(descriptor).__name__}; a TiledDescriptor is allowed in a store"
        )
    _check_descriptor(descriptor)
    where = _check_coordinates(descriptor, coordinates)
    if min(where) < 0:
        raise ValueError(
            f"coordinates: {where} has a negative entry; a store takes none (the GPU reports "
            "an illegal instruction)"
        )
    move = plan(descriptor, where, offset=offset)
    result = _tensor_bytes(descriptor, tensor).copy()
    source = _shared_bytes(shared_memory, move.shared)
    result[move.tensor[move.inside]] = source[move.shared[move.inside]]
    stored: npt.NDArray[Any] = result.view(tensor.dtype).reshape(tensor.shape)
    return stored


def _check_descriptor(descriptor: Descriptor) -> None:
    violations = validate(descriptor, compute_capability=100)
    if violations:
        raise ValueError(f"descriptor: {'; '.join(map(str, violations))}")
    if descriptor.data_type.is_packed:
        raise ValueError(
            f"data_type: {descriptor.data_type.driver_name}; only types of whole bytes are "
            "modelled: what TMA makes of a packed one is not recorded"
        )
    if isinstance(descriptor, Im2colDescriptor) and max(descriptor.traversal_end) >= 1 << 31:
        raise ValueError(
            f"global_dim: {descriptor.global_dim} puts the end of the pixel box at "
            f"{max(descriptor.traversal_end)}; up to {(1 << 31) - 1} is modelled: how a traversal "
            "goes on beyond it is not recorded"
        )


def _check_coordinates(descriptor: Descriptor, coordinates: Sequence[int]) -> tuple[int, ...]:
    where = tuple(check_integer("coordinates", entry, tuple(coordinates)) for entry in coordinates)
    if len(where) != descriptor.tensor_rank:
        raise ValueError(
            f"coordinates: {where} has {len(where)} entries; {descriptor.tensor_rank} are "
            "needed, one a dimension"
        )
    if any(not -(1 << 31) <= entry < 1 << 31 for entry in where):
        raise ValueError(f"coordinates: {where}; entries of 32 bits are allowed")
    if not descriptor.interleave and where[0] * descriptor.data_type.bits % 128:
        raise ValueError(
            f"coordinates: {where} starts {where[0] * descriptor.data_type.bits // 8} bytes "
            "into a row; multiples of 16 bytes are allowed (the GPU reports an illegal instruction)"
        )
    if isinstance(descriptor, Im2colDescriptor):
        _check_start(descriptor, where)
    return where


def _check_start(descriptor: Im2colDescriptor, where: tuple[int, ...]) -> None:
    pixel, axes = where[descriptor.spatial_axes], descriptor.axes[descriptor.spatial_axes]
    lower, end = descriptor.pixel_box_lower_corner, descriptor.traversal_end
    for axis, at, low, high in zip(axes, pixel, lower, end, strict=True):
        if not low <= at < high:
            raise ValueError(
                f"coordinates: {where} starts at {axis} {at}; {low} to {high - 1} are "
                "allowed, the pixel box (the GPU reports an illegal instruction)"
            )


def _check_filter_offsets(descriptor: Descriptor, filter_offsets: Sequence[int]) -> tuple[int, ...]:
    entries = tuple(filter_offsets)
    offsets = tuple(check_integer("filter_offsets", entry, entries) for entry in entries)
    count = descriptor.tensor_rank - 2 if isinstance(descriptor, Im2colDescriptor) else 0
    if len(offsets) != count:
        raise ValueError(
            f"filter_offsets: {offsets} has {len(offsets)} entries; {count} are needed"
            + (", one a spatial dimension" if count else " by a tiled load")
        )
    if count and not all(0 <= entry <= OFFSET_MAXIMUM[count + 2] for entry in offsets):
        raise ValueError(
            f"filter_offsets: {offsets}; 0 to {OFFSET_MAXIMUM[count + 2]} are allowed at "
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
    needed = last + descriptor.global_dim[0] * _unit_bytes(descriptor)
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


def _unit_bytes(descriptor: Descriptor) -> int:
    """Bytes of an element of dimension 0 in global memory."""
    return descriptor.interleave.slice_bytes or descriptor.data_type.bits // 8


def _round_to_tf32(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Rounds 32-bit floats to 10 bits of mantissa, ties to even, subnormals like all others."""
    wide = bits.astype(np.uint64)
    rounded = ((wide + 0xFFF + (wide >> 13 & 1)) & 0xFFFFE000).astype("<u4")
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, np.uint32(TF32_NAN), rounded)


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
    rows = _row_starts(descriptor, where, offsets)
    unit = _unit_bytes(descriptor)
    sliced = isinstance(descriptor, TiledDescriptor) and descriptor.interleave
    step = descriptor.element_strides[0] if sliced else 1
    along = rows[:, :1] + np.arange(descriptor.row_elements, dtype=np.int64) * step
    sizes = np.array(descriptor.global_dim, np.int64)
    row_inside = np.all((rows[:, 1:] >= 0) & (rows[:, 1:] < sizes[1:]), axis=1)
    inside = row_inside[:, None] & (along >= 0) & (along < sizes[0])
    start = (rows[:, 1:] @ np.array(descriptor.global_strides, np.int64))[:, None] + along * unit
    source = start[:, :, None] + np.arange(unit, dtype=np.int64)
    return source.reshape(len(rows), -1), np.repeat(inside, unit, axis=1)


def _row_starts(
    descriptor: Descriptor, where: tuple[int, ...], offsets: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """Coordinates of the first element of every row, ``[rows, rank]``."""
    if isinstance(descriptor, TiledDescriptor):
        return _box_rows(descriptor, where)
    start = (*where[descriptor.spatial_axes], where[-1])
    pixels = list(itertools.islice(_traversal(descriptor, start), descriptor.rows))
    rows = np.tile(np.array(where, np.int64), (descriptor.rows, 1))
    rows[:, descriptor.spatial_axes] = np.array([pixel[:-1] for pixel in pixels]) + offsets
    rows[:, -1] = [pixel[-1] for pixel in pixels]
    return rows


def _box_rows(descriptor: TiledDescriptor, where: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Coordinates of the first element of every row of a box, ``[rows, rank]``."""
    counts = (1, *descriptor.box_elements[1:])
    lines = [
        start + np.arange(count, dtype=np.int64) * step
        for start, count, step in zip(where, counts, descriptor.element_strides, strict=True)
    ]
    grids = np.meshgrid(*reversed(lines), indexing="ij")
    return np.stack([grid.reshape(-1) for grid in reversed(grids)], axis=1)


def _traversal(descriptor: Im2colDescriptor, where: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The pixels ``W, [H, [D,]] N`` that an im2col load visits, without its filter offsets.

    A coordinate that reaches the end of the pixel box starts again at the lower corner, and the
    next one outwards takes a step; ``N`` has no end.
    """
    pixel = list(where)
    steps = descriptor.element_strides[descriptor.spatial_axes]
    while True:
        yield tuple(pixel)
        for i, end in enumerate(descriptor.traversal_end):
            pixel[i] += steps[i]
            if pixel[i] < end:
                break
            pixel[i] = descriptor.pixel_box_lower_corner[i]
        else:
            pixel[-1] += descriptor.element_strides[-1]
