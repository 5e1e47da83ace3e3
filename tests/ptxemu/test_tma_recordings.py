"""The model of TMA against what an H200 did (``tests/ptxemu/data/README.md``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ptxemu.tma import (
    DataType,
    Descriptor,
    Im2colDescriptor,
    Swizzle,
    TiledDescriptor,
    load,
    packed_strides,
    store,
    validate,
)

DATA = Path(__file__).parent / "data"
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """A recorded case: what was asked for, and what came of it."""

    number: int
    descriptor: Descriptor
    coordinates: tuple[int, ...]
    offsets: tuple[int, ...]
    is_store: bool
    refused: bool
    faulted: bool
    memory: Array

    @property
    def tensor(self) -> Array:
        """The tensor that was loaded from or stored to, before."""
        count = math.prod(self.descriptor.global_dim)
        return (np.arange(count) % 65521 + 1).astype(np.uint16)


def rows(name: str, memory: str) -> Iterator[tuple[int, dict[str, int], dict[str, Any], Array]]:
    """Each case's number, parameters, per-case arrays, and memory."""
    with np.load(DATA / name) as archive:
        arrays = {key: archive[key] for key in archive.files}
    columns = [str(column) for column in arrays["columns"]]
    start = arrays["start"]
    for i, row in enumerate(arrays["params"].tolist()):
        results = {key: arrays[key][i] for key in ("encode_result", "outcome") if key in arrays}
        values = arrays[memory][start[i] : start[i + 1]]
        yield i, dict(zip(columns, row, strict=True)), results, values


def im2col_cases() -> Iterator[Case]:
    for i, at, results, memory in rows("tma_im2col_h200.npz", "shared_memory"):
        axes = "whd"[: at["rank"] - 2]
        dims = (at["C"], *(at[axis.upper()] for axis in axes), at["N"])
        descriptor = Im2colDescriptor(
            data_type=DataType.UINT16,
            global_address=0,
            global_dim=dims,
            global_strides=packed_strides(dims, DataType.UINT16),
            pixel_box_lower_corner=tuple(at[f"lower_{axis}"] for axis in axes),
            pixel_box_upper_corner=tuple(at[f"upper_{axis}"] for axis in axes),
            channels_per_pixel=at["channels_per_pixel"],
            pixels_per_column=at["pixels_per_column"],
            element_strides=(1, *(at[f"stride_{axis}"] for axis in axes), 1),
            swizzle=Swizzle(at["swizzle"]),
        )
        yield Case(
            number=i,
            descriptor=descriptor,
            coordinates=(at["c"], *(at[axis] for axis in axes), at["n"]),
            offsets=tuple(at[f"offset_{axis}"] for axis in axes),
            is_store=False,
            refused=bool(results["encode_result"]),
            faulted=False,
            memory=memory,
        )


def tile_cases() -> Iterator[Case]:
    for i, at, results, memory in rows("tma_tile_h200.npz", "bytes"):
        rank = at["rank"]

        def per_axis(name: str, at: dict[str, int] = at, rank: int = rank) -> tuple[int, ...]:
            return tuple(at[f"{name}{axis}"] for axis in range(rank))

        descriptor = TiledDescriptor(
            data_type=DataType.UINT16,
            global_address=0,
            global_dim=per_axis("dim"),
            global_strides=packed_strides(per_axis("dim"), DataType.UINT16),
            box_dim=per_axis("box"),
            element_strides=per_axis("element_stride"),
            swizzle=Swizzle(at["swizzle"]),
        )
        yield Case(
            number=i,
            descriptor=descriptor,
            coordinates=per_axis("coordinate"),
            offsets=(),
            is_store=bool(at["store"]),
            refused=bool(results["encode_result"]),
            faulted=bool(results["outcome"] != 1),
            memory=memory,
        )


@pytest.fixture(scope="module")
def im2col() -> list[Case]:
    return list(im2col_cases())


@pytest.fixture(scope="module")
def tile() -> list[Case]:
    return list(tile_cases())


def test_validate_refuses_what_the_driver_refused_and_nothing_else(
    im2col: list[Case], tile: list[Case]
) -> None:
    wrong = [case for case in im2col + tile if bool(validate(case.descriptor)) != case.refused]
    assert wrong == []
    assert sum(case.refused for case in im2col) == 6


def loads_that_differ(cases: list[Case]) -> list[int]:
    different = []
    for case in cases:
        before = np.full(case.memory.size, 0xAB, np.uint8)
        after = load(
            case.descriptor, case.tensor, case.coordinates, case.offsets, shared_memory=before
        )
        if not np.array_equal(after, case.memory):
            different.append(case.number)
    return different


def test_every_im2col_load(im2col: list[Case]) -> None:
    done = [case for case in im2col if not case.refused]
    assert len(done) == 1220
    assert loads_that_differ(done) == []


def test_every_tiled_load(tile: list[Case]) -> None:
    done = [case for case in tile if not case.is_store]
    assert len(done) == 500
    assert not any(case.faulted for case in done)
    assert loads_that_differ(done) == []


def test_every_tiled_store(tile: list[Case]) -> None:
    done = [case for case in tile if case.is_store and not case.faulted]
    assert len(done) == 29
    different = []
    for case in done:
        words = np.arange(case.descriptor.shared_memory_bytes // 2 + 1)
        shared_memory = (words % 64007 + 1).astype(np.uint16).view(np.uint8)
        assert isinstance(case.descriptor, TiledDescriptor)
        after = store(case.descriptor, shared_memory, case.coordinates, case.tensor)
        recorded = case.memory.view(np.uint16)
        # The 32 words behind the tensor went on counting: nothing may have written there.
        behind = (np.arange(after.size, after.size + 32) % 65521 + 1).astype(np.uint16)
        if not np.array_equal(np.concatenate([after, behind]), recorded):
            different.append(case.number)
    assert different == []


def test_the_stores_that_failed_are_errors(tile: list[Case]) -> None:
    failed = [case for case in tile if case.faulted]
    assert len(failed) == 30
    shared_memory = np.zeros(1 << 18, np.uint8)
    for case in failed:
        assert isinstance(case.descriptor, TiledDescriptor)
        with pytest.raises(ValueError, match=r"coordinates: \(.*\) has a negative entry"):
            store(case.descriptor, shared_memory, case.coordinates, case.tensor)


def test_the_recordings_reach_what_they_are_for(im2col: list[Case], tile: list[Case]) -> None:
    assert {case.descriptor.tensor_rank for case in im2col} == {3, 4, 5}
    assert {case.descriptor.tensor_rank for case in tile} == {1, 2, 3, 4, 5}
    for cases in (im2col, tile):
        assert {case.descriptor.swizzle for case in cases} == {0, 1, 2, 3}
        assert max(max(case.descriptor.element_strides) for case in cases) >= 3
