"""Every reason for which the driver refuses a descriptor, one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ptxemu.tma import (
    CORNER_RANGE,
    DataType,
    Descriptor,
    Im2colDescriptor,
    Interleave,
    OobFill,
    Swizzle,
    TiledDescriptor,
    _validation,
    validate,
)

TILED = TiledDescriptor(
    data_type=DataType.BFLOAT16,
    global_address=1 << 20,
    global_dim=(64, 16, 16, 4),
    global_strides=(128, 2048, 32768),
    box_dim=(32, 4, 4, 1),
    element_strides=(1, 1, 1, 1),
)
IM2COL = Im2colDescriptor(
    data_type=DataType.BFLOAT16,
    global_address=1 << 20,
    global_dim=(64, 16, 16, 4),
    global_strides=(128, 2048, 32768),
    pixel_box_lower_corner=(-1, -1),
    pixel_box_upper_corner=(-1, -1),
    channels_per_pixel=32,
    pixels_per_column=64,
    element_strides=(1, 1, 1, 1),
)
RANK_1: dict[str, Any] = {
    "global_dim": (64,),
    "global_strides": (),
    "box_dim": (32,),
    "element_strides": (1,),
}
IM2COL_RANKS: dict[int, dict[str, Any]] = {
    rank: {
        "global_dim": (64, *[40] * (rank - 2), 4),
        "global_strides": tuple(128 * 40**i for i in range(rank - 1)),
        "pixel_box_lower_corner": (0,) * (rank - 2),
        "pixel_box_upper_corner": (0,) * (rank - 2),
        "element_strides": (1,) * rank,
    }
    for rank in (3, 4, 5)
}
U4 = DataType.PACKED_16U4_ALIGN8B
U4_PADDED = DataType.PACKED_16U4_ALIGN16B
U6_PADDED = DataType.PACKED_16U6_ALIGN16B
UPPER = "pixel_box_upper_corner[0]"
B16, B32 = Interleave.B16, Interleave.B32

# What a padded packed type needs; 128 elements of it are a row.
PADDED: dict[str, Any] = {"global_dim": (128, 16, 16, 4)}
PADDED_BOX: dict[str, Any] = {"box_dim": (128, 4, 4, 1)}

# (changes, the field at fault): each breaks one rule, and that only. Both kinds of descriptor.
BOTH: list[tuple[dict[str, Any], str]] = [
    ({"global_address": (1 << 20) + 8}, "global_address"),
    ({"global_address": -16}, "global_address"),
    ({"global_address": 1 << 64}, "global_address"),
    ({"interleave": B32, "swizzle": 1, "global_address": 16}, "global_address"),
    ({"global_dim": (0, 16, 16, 4)}, "global_dim[0]"),
    ({"global_dim": (64, 16, 16, 0)}, "global_dim[3]"),
    ({"global_dim": (64, 16, 16, (1 << 32) + 1)}, "global_dim[3]"),
    ({"global_strides": (136, 2048, 32768)}, "global_strides[0]"),
    ({"global_strides": (128, 2048, 32776)}, "global_strides[2]"),
    ({"global_strides": (128, 1 << 40, 32768)}, "global_strides[1]"),
    ({"global_strides": (-128, 2048, 32768)}, "global_strides[0]"),
    ({"interleave": B32, "swizzle": 1, "global_strides": (144, 2048, 32768)}, "global_strides[0]"),
    ({"element_strides": (1, 0, 1, 1)}, "element_strides[1]"),
    ({"element_strides": (1, 1, 9, 1)}, "element_strides[2]"),
    ({"oob_fill": OobFill.NAN_REQUEST_ZERO_FMA, "data_type": DataType.UINT16}, "oob_fill"),
    ({"data_type": U4, "global_dim": (65, 16, 16, 4)}, "global_dim[0]"),
    ({"data_type": U4, "global_address": 8}, "global_address"),
]
TILED_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"global_dim": (), "global_strides": (), "box_dim": (), "element_strides": ()}, "tensor_rank"),
    ({"global_dim": (64, 2, 2, 2, 2, 2)}, "tensor_rank"),
    (RANK_1 | {"interleave": B16}, "tensor_rank"),
    ({"global_strides": (128, 2048)}, "global_strides"),
    ({"element_strides": (1, 1, 1)}, "element_strides"),
    ({"box_dim": (32, 4, 4)}, "box_dim"),
    ({"box_dim": (32, 0, 4, 1)}, "box_dim[1]"),
    ({"box_dim": (32, 4, 257, 1)}, "box_dim[2]"),
    ({"box_dim": (264, 4, 4, 1)}, "box_dim[0]"),
    ({"box_dim": (12, 4, 4, 1)}, "box_dim[0]"),
    ({"interleave": B32, "box_dim": (12, 4, 4, 1)}, "box_dim[0]"),
    ({"box_dim": (64, 32, 32, 2)}, "box_dim"),
    ({"box_dim": (256, 256, 4, 4), "element_strides": (1, 2, 1, 4)}, "box_dim"),
    ({"swizzle": Swizzle.B32}, "box_dim[0]"),
    ({"swizzle": Swizzle.B64, "box_dim": (40, 4, 4, 1)}, "box_dim[0]"),
    ({"swizzle": Swizzle.B128, "box_dim": (72, 4, 4, 1)}, "box_dim[0]"),
    ({"swizzle": Swizzle.B128_ATOM_64B, "box_dim": (72, 4, 4, 1)}, "box_dim[0]"),
    ({"data_type": U6_PADDED, **PADDED, "box_dim": (64, 4, 4, 1)}, "box_dim[0]"),
    ({"data_type": U4_PADDED, **PADDED_BOX}, "global_dim[0]"),
    ({"data_type": U4_PADDED, **PADDED, **PADDED_BOX, "global_address": 16}, "global_address"),
    (
        {"data_type": U6_PADDED, **PADDED, **PADDED_BOX, "global_strides": (144, 2048, 32768)},
        "global_strides[0]",
    ),
    ({"data_type": U4_PADDED, **PADDED, **PADDED_BOX, "swizzle": Swizzle.B64}, "swizzle"),
    ({"data_type": U4_PADDED, **PADDED, **PADDED_BOX, "swizzle": Swizzle.B128_ATOM_64B}, "swizzle"),
    (
        {
            "data_type": U6_PADDED,
            **PADDED,
            **PADDED_BOX,
            "swizzle": Swizzle.B128_ATOM_32B_FLIP_8B,
        },
        "swizzle",
    ),
    ({"data_type": U6_PADDED, **PADDED, **PADDED_BOX, "interleave": B16}, "interleave"),
]
IM2COL_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"global_dim": (64, 16)}, "tensor_rank"),
    ({"global_dim": (64, 2, 2, 2, 2, 2)}, "tensor_rank"),
    ({"global_strides": (128, 2048)}, "global_strides"),
    ({"element_strides": (1, 1)}, "element_strides"),
    ({"pixel_box_lower_corner": (-1,)}, "pixel_box_lower_corner"),
    ({"pixel_box_upper_corner": (-1, -1, -1)}, "pixel_box_upper_corner"),
    ({"channels_per_pixel": 0}, "channels_per_pixel"),
    ({"channels_per_pixel": 264}, "channels_per_pixel"),
    ({"channels_per_pixel": 12}, "channels_per_pixel"),
    ({"swizzle": Swizzle.B32}, "channels_per_pixel"),
    ({"swizzle": Swizzle.B64, "channels_per_pixel": 40}, "channels_per_pixel"),
    ({"swizzle": Swizzle.B128, "channels_per_pixel": 72}, "channels_per_pixel"),
    ({"data_type": U4_PADDED, **PADDED}, "channels_per_pixel"),
    ({"pixels_per_column": 0}, "pixels_per_column"),
    ({"pixels_per_column": 1025}, "pixels_per_column"),
    ({"pixels_per_column": 457, "channels_per_pixel": 256}, "pixels_per_column"),
    ({"global_dim": (64, 1 << 31, 16, 4), "pixel_box_upper_corner": (0, -1)}, UPPER),
    ({"interleave": B16, "global_dim": (1, 16, 16, 4), "pixel_box_upper_corner": (-2, -1)}, UPPER),
    ({"pixel_box_upper_corner": (-17, -1)}, "pixel_box_upper_corner[0]"),
    ({"pixel_box_lower_corner": (-1, 15)}, "pixel_box_upper_corner[1]"),
    *(
        (
            IM2COL_RANKS[rank] | {f"pixel_box_{side}_corner": (*[0] * (rank - 3), value)},
            f"pixel_box_{side}_corner[{rank - 3}]",
        )
        for rank, (low, high) in CORNER_RANGE.items()
        for side, value in (("lower", low - 1), ("upper", high + 1))
    ),
]
BROKEN: list[tuple[Descriptor, dict[str, Any], str]] = [
    *((TILED, changes, field) for changes, field in BOTH + TILED_ONLY),
    *((IM2COL, changes, field) for changes, field in BOTH + IM2COL_ONLY),
]


@pytest.mark.parametrize(("base", "changes", "field"), BROKEN)
def test_what_is_refused(base: Descriptor, changes: dict[str, Any], field: str) -> None:
    violations = validate(dataclasses.replace(base, **changes), compute_capability=100)
    assert [violation.field for violation in violations] == [field]
    (violation,) = violations
    sentence = str(violation)
    assert sentence.startswith(f"{field}: {violation.value}; ")
    assert violation.allowed in sentence
    assert violation.reason in sentence
    assert violation.allowed.endswith(("allowed", "needed"))


# Each limit itself is allowed.
TAKEN: list[tuple[Descriptor, dict[str, Any]]] = [
    *((base, {"global_dim": (64, 16, 16, 1 << 32)}) for base in (TILED, IM2COL)),
    *((base, {"global_strides": (128, (1 << 40) - 16, 32768)}) for base in (TILED, IM2COL)),
    *((base, {"element_strides": (1, 8, 8, 8)}) for base in (TILED, IM2COL)),
    *((base, {"global_address": 16}) for base in (TILED, IM2COL)),
    *(
        (base, {"interleave": B32, "swizzle": swizzle})
        for base in (TILED, IM2COL)
        for swizzle in Swizzle
    ),
    *(
        (base, {"interleave": B16, "swizzle": swizzle})
        for base in (TILED, IM2COL)
        for swizzle in Swizzle
    ),
    *((base, {"oob_fill": OobFill.NAN_REQUEST_ZERO_FMA}) for base in (TILED, IM2COL)),
    *((base, {"swizzle": Swizzle.B64}) for base in (TILED, IM2COL)),
    # The limit on a box: 228 KiB, and its quotients with the steps are rounded down.
    (TILED, {"box_dim": (256, 152, 3, 1)}),
    (TILED, {"box_dim": (256, 256, 3, 256), "element_strides": (1, 1, 4, 1)}),
    (TILED, {"box_dim": (64, 4, 4, 1), "swizzle": Swizzle.B128}),
    (TILED, RANK_1),
    (TILED, {"data_type": U4}),
    (TILED, {"data_type": U4_PADDED, **PADDED, **PADDED_BOX, "swizzle": Swizzle.B128_ATOM_32B}),
    (TILED, {"data_type": U6_PADDED, **PADDED, **PADDED_BOX}),
    (IM2COL, {"channels_per_pixel": 256, "pixels_per_column": 456}),
    (IM2COL, {"channels_per_pixel": 112, "pixels_per_column": 1024}),
    (IM2COL, {"global_dim": (64, (1 << 31) - 1, 16, 4), "pixel_box_upper_corner": (0, -1)}),
    (IM2COL, {"global_dim": (64, 1 << 32, 16, 4), "pixel_box_upper_corner": (0, -1)}),
    (IM2COL, {"pixel_box_upper_corner": (-16, -1)}),
    *((IM2COL, changes) for changes in IM2COL_RANKS.values()),
    *(
        (IM2COL, IM2COL_RANKS[rank] | {"pixel_box_lower_corner": (value,) * (rank - 2)})
        for rank, (value, _) in CORNER_RANGE.items()
    ),
    *(
        (IM2COL, IM2COL_RANKS[rank] | {"pixel_box_upper_corner": (value,) * (rank - 2)})
        for rank, (_, value) in CORNER_RANGE.items()
    ),
]


@pytest.mark.parametrize(("base", "changes"), TAKEN)
def test_what_is_taken(base: Descriptor, changes: dict[str, Any]) -> None:
    assert validate(dataclasses.replace(base, **changes), compute_capability=100) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data_type": U4}, "data_type"),
        ({"data_type": U4_PADDED, **PADDED, **PADDED_BOX}, "data_type"),
        ({"data_type": U6_PADDED, **PADDED, **PADDED_BOX}, "data_type"),
        ({"swizzle": Swizzle.B128_ATOM_32B}, "swizzle"),
        ({"swizzle": Swizzle.B128_ATOM_32B_FLIP_8B}, "swizzle"),
        ({"swizzle": Swizzle.B128_ATOM_64B}, "swizzle"),
    ],
)
def test_what_came_with_blackwell(changes: dict[str, Any], field: str) -> None:
    descriptor = dataclasses.replace(TILED, **changes)
    assert [violation.field for violation in validate(descriptor)] == [field]
    assert validate(descriptor, compute_capability=100) == []


def test_every_rule_is_broken_by_a_case_that_breaks_no_other() -> None:
    lonely = set()
    for base, changes, _ in BROKEN:
        descriptor: Any = dataclasses.replace(base, **changes)
        if list(_validation._lengths(descriptor)):
            lonely.add("_lengths")
            continue
        own = _validation._TILED if isinstance(descriptor, TiledDescriptor) else _validation._IM2COL
        rules: tuple[Any, ...] = (*_validation._COMMON, *own)
        breaking = [rule.__name__ for rule in rules if list(rule(descriptor))]
        if len(breaking) == 1:
            lonely.add(breaking[0])
    all_rules = (*_validation._COMMON, *_validation._TILED, *_validation._IM2COL)
    assert lonely == {"_lengths", *(rule.__name__ for rule in all_rules)}


def test_several_faults_are_all_named() -> None:
    descriptor = dataclasses.replace(
        IM2COL, global_address=8, channels_per_pixel=300, pixels_per_column=0
    )
    fields = [violation.field for violation in validate(descriptor)]
    # 300 channels are too many, and 600 bytes are no multiple of 16.
    assert fields == ["global_address", *["channels_per_pixel"] * 2, "pixels_per_column"]


def test_a_sentence() -> None:
    descriptor = dataclasses.replace(TILED, swizzle=Swizzle.B32)
    assert [str(violation) for violation in validate(descriptor)] == [
        "box_dim[0]: 32 (64 bytes); at most 32 bytes are allowed "
        "(a row fits the span of CU_TENSOR_MAP_SWIZZLE_32B)"
    ]
