"""The model of TMA against an H200 and its driver: types, interleaved layouts, limits.

``tests/ptxemu/data/README.md`` says what was recorded in ``tma_fields_h200.npz``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ptxemu.tma import (
    NAN_FILL,
    DataType,
    Descriptor,
    Im2colDescriptor,
    Interleave,
    OobFill,
    TiledDescriptor,
    load,
    store,
    validate,
)

FILE = Path(__file__).parent / "data" / "tma_fields_h200.npz"
ADDRESS = 1 << 20
LOADED = np.zeros(1 << 20, np.uint8)
LOADED[: 2 * 65520] = np.arange(1, 65521, dtype="<u2").view(np.uint8)
SHARED = np.arange(1, 8193, dtype="<u2").view(np.uint8)

Archive = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="module")
def archive() -> Archive:
    with np.load(FILE) as file:
        return {key: file[key] for key in file.files}


def descriptor_of(at: dict[str, int]) -> Descriptor | None:
    """The descriptor of a row; none where a number is no member of its enumeration."""
    rank = at["rank"]

    def entries(name: str, count: int) -> tuple[int, ...]:
        return tuple(at[f"{name}{i}"] for i in range(count))

    fields: dict[str, Any] = {
        "data_type": at["data_type"],
        "global_address": ADDRESS + at["address"],
        "global_dim": entries("dim", rank),
        "global_strides": entries("stride", rank - 1),
        "element_strides": entries("element_stride", rank),
        "interleave": at["interleave"],
        "swizzle": at["swizzle"],
        "l2_promotion": at["l2_promotion"],
        "oob_fill": at["oob_fill"],
    }
    try:
        if at["kind"] != 1:
            return TiledDescriptor(box_dim=entries("box", rank), **fields)
        return Im2colDescriptor(
            pixel_box_lower_corner=entries("lower", max(rank - 2, 0)),
            pixel_box_upper_corner=entries("upper", max(rank - 2, 0)),
            channels_per_pixel=at["channels_per_pixel"],
            pixels_per_column=at["pixels_per_column"],
            **fields,
        )
    except ValueError:
        return None


def rows(columns: npt.NDArray[Any], params: npt.NDArray[Any]) -> list[dict[str, int]]:
    names = [str(column) for column in columns]
    return [dict(zip(names, row, strict=True)) for row in params.tolist()]


def test_validate_answers_as_the_driver_did(archive: Archive) -> None:
    cases = rows(archive["verdict_columns"], archive["verdict_params"])
    answers = archive["encode_result"].tolist()
    wrong = []
    for at, answer in zip(cases, answers, strict=True):
        descriptor = descriptor_of(at)
        refused = descriptor is None or bool(validate(descriptor))
        if refused != bool(answer):
            wrong.append(at)
    assert wrong == []
    assert len(answers) > 10_000
    assert min(Counter(answers).values()) > 4_000


def moved(at: dict[str, int], descriptor: Descriptor, size: int) -> npt.NDArray[np.uint8]:
    """What the model makes of a recorded instruction: the memory that was recorded."""
    where = tuple(at[f"coordinate{i}"] for i in range(at["rank"]))
    if isinstance(descriptor, TiledDescriptor) and at["kind"] == 2:
        before = np.full(size, 0xEE, np.uint8)
        return store(descriptor, SHARED, where, before, offset=at["offset"])
    offsets = [at[f"filter_offset{i}"] for i in range(at["rank"] - 2)] if at["kind"] == 1 else []
    before = np.full(size, 0xAB, np.uint8)
    return load(descriptor, LOADED, where, offsets, shared_memory=before, offset=at["offset"])


def test_every_load_and_store(archive: Archive) -> None:
    start, different, done = archive["start"], [], Counter[tuple[int, int]]()
    for i, at in enumerate(rows(archive["columns"], archive["params"])):
        if archive["outcome"][i] != 1:
            continue
        descriptor = descriptor_of(at)
        assert descriptor is not None
        memory = archive["bytes"][start[i] : start[i + 1]]
        if not np.array_equal(moved(at, descriptor, memory.size), memory):
            different.append(at)
        done[at["kind"], at["interleave"]] += 1
    assert different == []
    assert set(done) == {(kind, slices) for kind in range(3) for slices in range(3)}
    assert done.total() > 500


def test_every_instruction_that_failed_is_an_error(archive: Archive) -> None:
    said = Counter[tuple[int, str]]()
    for i, at in enumerate(rows(archive["columns"], archive["params"])):
        outcome = int(archive["outcome"][i])
        if outcome == 1:
            continue
        descriptor = descriptor_of(at)
        assert descriptor is not None
        with pytest.raises(ValueError) as raised:
            moved(at, descriptor, 1 << 17)
        said[outcome, str(raised.value).split(":")[0]] += 1
    # An illegal instruction because of a coordinate, a misaligned address in shared memory.
    assert set(said) == {(-715, "coordinates"), (-716, "offset")}
    assert min(said.values()) >= 12


@pytest.mark.parametrize("data_type", list(DataType)[:13])
def test_the_bits_of_every_type(archive: Archive, data_type: DataType) -> None:
    kind = f"<u{data_type.bits // 8}"
    own = archive["word_type"] == data_type
    word, loaded, stored = (
        archive[name][own].astype(kind) for name in ("word", "word_loaded", "word_stored")
    )
    word = np.resize(word, 512)  # rows of whole 16 bytes
    descriptor = TiledDescriptor(
        data_type=data_type,
        global_address=ADDRESS,
        global_dim=(128, 4),
        global_strides=(128 * word.itemsize,),
        box_dim=(128, 5),
        element_strides=(1, 1),
    )
    after = load(descriptor, word, (0, 0)).view(kind)
    assert np.array_equal(after[: loaded.size], loaded[:512])
    assert np.all(after[512:] == archive["fill"][data_type, 0].astype(kind))
    written = store(descriptor, np.resize(word, 640).view(np.uint8), (0, 0), np.zeros_like(word))
    assert np.array_equal(written[: stored.size], stored[:512])
    rounded = data_type in {DataType.TFLOAT32, DataType.TFLOAT32_FTZ}
    assert np.array_equal(loaded, archive["word"][own].astype(kind)) != rounded
    assert np.array_equal(stored, archive["word"][own].astype(kind))


@pytest.mark.parametrize("data_type", list(DataType)[6:13])
def test_the_nan_of_every_type(archive: Archive, data_type: DataType) -> None:
    count = data_type.bits // 16
    recorded = archive["fill"][data_type, 1].astype(f"<u{2 * count}").reshape(1).view("<u2")
    assert recorded.tolist() == [NAN_FILL] * count
    descriptor = TiledDescriptor(
        data_type=data_type,
        global_address=ADDRESS,
        global_dim=(16,),
        global_strides=(),
        box_dim=(16,),
        element_strides=(1,),
        oob_fill=OobFill.NAN_REQUEST_ZERO_FMA,
    )
    after = load(descriptor, np.zeros(64, "<u2"), (16,))
    assert set(after.view("<u2").tolist()) == {NAN_FILL}


def test_the_recordings_reach_what_they_are_for(archive: Archive) -> None:
    cases = rows(archive["columns"], archive["params"])
    assert {at["swizzle"] for at in cases if at["interleave"]} == {0, 1, 2, 3}
    sliced = [at for at in cases if at["interleave"] == Interleave.B32]
    assert {at["rank"] for at in sliced} == {3, 4, 5}
    assert any(at["offset"] % 1024 for at in cases if at["swizzle"])
    images = [at for at in cases if at["kind"] == 1]
    assert any(at[f"element_stride{at['rank'] - 1}"] > 1 for at in images)
    assert any(at["stride0"] == 0 for at in cases)
