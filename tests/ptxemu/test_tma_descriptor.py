"""Fields, names and derived sizes of TMA descriptors, and how one is printed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from ptxemu.tma import (
    DataType,
    Im2colDescriptor,
    Interleave,
    L2Promotion,
    OobFill,
    Swizzle,
    TiledDescriptor,
    explain,
    packed_strides,
)

# The enumerators of cuda.h (CUDA 13.0), in the order of their values.
NAMES: dict[Any, tuple[str, str]] = {
    DataType: (
        "CU_TENSOR_MAP_DATA_TYPE_",
        "UINT8 UINT16 UINT32 INT32 UINT64 INT64 FLOAT16 FLOAT32 FLOAT64 BFLOAT16 FLOAT32_FTZ "
        "TFLOAT32 TFLOAT32_FTZ 16U4_ALIGN8B 16U4_ALIGN16B 16U6_ALIGN16B",
    ),
    Interleave: ("CU_TENSOR_MAP_INTERLEAVE_", "NONE 16B 32B"),
    Swizzle: (
        "CU_TENSOR_MAP_SWIZZLE_",
        "NONE 32B 64B 128B 128B_ATOM_32B 128B_ATOM_32B_FLIP_8B 128B_ATOM_64B",
    ),
    L2Promotion: ("CU_TENSOR_MAP_L2_PROMOTION_", "NONE L2_64B L2_128B L2_256B"),
    OobFill: ("CU_TENSOR_MAP_FLOAT_OOB_FILL_", "NONE NAN_REQUEST_ZERO_FMA"),
}

TILED = TiledDescriptor(
    data_type=DataType.FLOAT16,
    global_address=0x7F0000,
    global_dim=(40, 9, 5),
    global_strides=(80, 720),
    box_dim=(24, 7, 2),
    element_strides=(3, 2, 1),
)
IM2COL = Im2colDescriptor(
    data_type=DataType.UINT8,
    global_address=0,
    global_dim=(32, 9, 7, 5, 2),
    global_strides=(32, 288, 2016, 10080),
    pixel_box_lower_corner=(-1, 0, -2),
    pixel_box_upper_corner=(-1, -2, 1),
    channels_per_pixel=16,
    pixels_per_column=100,
    element_strides=(1, 2, 1, 3, 1),
    swizzle=Swizzle.B32,
    oob_fill=OobFill.NONE,
)


@pytest.mark.parametrize("kind", NAMES)
def test_names_and_values_are_the_drivers(kind: Any) -> None:
    prefix, names = NAMES[kind]
    assert [member.driver_name for member in kind] == [prefix + name for name in names.split()]
    assert [member.value for member in kind] == list(range(len(kind)))


def test_importing_the_package_imports_neither_max_nor_torch_nor_matplotlib() -> None:
    code = (
        "import sys, ptxemu, ptxemu.tma; others = ('max', 'maxconv', 'torch', 'matplotlib'); "
        "print([m for m in others if m in sys.modules])"
    )
    run = [sys.executable, "-c", code]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_bits_of_the_types() -> None:
    bits = [data_type.bits for data_type in DataType]
    assert bits == [8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6]
    assert [d for d in DataType if d.is_packed] == list(DataType)[13:]
    assert [d for d in DataType if d.is_float] == list(DataType)[6:13]


def test_packed_strides() -> None:
    assert packed_strides((40, 9, 5), DataType.FLOAT16) == (80, 720)
    assert packed_strides((40,), DataType.FLOAT16) == ()
    huge = packed_strides((1 << 32, 1 << 32, 1 << 32, 2), DataType.FLOAT64)
    assert huge == (1 << 35, 1 << 67, 1 << 99)


def test_sizes_of_a_box() -> None:
    assert TILED.tensor_rank == 3
    # The element stride of dimension 0 is ignored: 24, not 8.
    assert TILED.box_elements == (24, 4, 2)
    assert (TILED.row_bytes, TILED.rows, TILED.row_pitch) == (48, 8, 48)
    assert (TILED.transaction_bytes, TILED.shared_memory_bytes) == (384, 384)
    swizzled = dataclasses.replace(TILED, swizzle=Swizzle.B64)
    assert (swizzled.transaction_bytes, swizzled.shared_memory_bytes) == (384, 512)


def test_sizes_of_a_column() -> None:
    assert IM2COL.axes == ("C", "W", "H", "D", "N")
    assert IM2COL.traversal_end == (8, 5, 6)
    assert (IM2COL.row_bytes, IM2COL.rows, IM2COL.row_pitch) == (16, 100, 32)
    assert (IM2COL.transaction_bytes, IM2COL.shared_memory_bytes) == (1600, 3200)


def test_fields_become_their_types() -> None:
    changes: dict[str, Any] = {
        "data_type": 9,
        "swizzle": 3,
        "global_dim": np.array([64, 2, 2]),
        "box_dim": [64, 1, 1],
    }
    descriptor = dataclasses.replace(TILED, **changes)
    assert descriptor.data_type is DataType.BFLOAT16
    assert descriptor.swizzle is Swizzle.B128
    assert descriptor.global_dim == (64, 2, 2)
    assert all(type(size) is int for size in descriptor.global_dim)
    assert descriptor == dataclasses.replace(descriptor)
    assert hash(descriptor) == hash(dataclasses.replace(descriptor))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"swizzle": 7},
            ValueError,
            "swizzle: 7 is no Swizzle; NONE (0), B32 (1), B64 (2), B128 (3), B128_ATOM_32B (4), "
            "B128_ATOM_32B_FLIP_8B (5), B128_ATOM_64B (6) are allowed",
        ),
        (
            {"interleave": -1},
            ValueError,
            "interleave: -1 is no Interleave; NONE (0), B16 (1), B32 (2) are allowed",
        ),
        (
            {"data_type": "float16"},
            TypeError,
            "data_type: 'float16' holds a str; integers are allowed",
        ),
        (
            {"box_dim": (24, 7.0, 2)},
            TypeError,
            "box_dim: (24, 7.0, 2) holds a float; integers are allowed",
        ),
        ({"box_dim": 24}, TypeError, "box_dim: 24 is an int; a sequence of integers is allowed"),
        (
            {"global_address": (0,)},
            TypeError,
            "global_address: (0,) holds a tuple; integers are allowed",
        ),
    ],
)
def test_a_field_of_a_wrong_type(
    changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as raised:
        dataclasses.replace(TILED, **changes)
    assert str(raised.value) == message


def test_a_printed_box() -> None:
    assert explain(dataclasses.replace(TILED, swizzle=Swizzle.B64)).splitlines() == [
        "cuTensorMapEncodeTiled",
        "  tensorDataType         CU_TENSOR_MAP_DATA_TYPE_FLOAT16 (16 bits)",
        "  tensorRank             3",
        "  globalAddress          0x7f0000",
        "  globalDim              [0] 40, [1] 9, [2] 5",
        "  globalStrides          [1] 80, [2] 720 bytes",
        "  boxDim                 [0] 24, [1] 7, [2] 2",
        "  elementStrides         [0] 3, [1] 2, [2] 1",
        "  interleave             CU_TENSOR_MAP_INTERLEAVE_NONE",
        "  swizzle                CU_TENSOR_MAP_SWIZZLE_64B",
        "  l2Promotion            CU_TENSOR_MAP_L2_PROMOTION_NONE",
        "  oobFill                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
        "",
        "one load",
        "  moves                  384 bytes, which its barrier has to expect",
        "  box                    [0] 24, [1] 4, [2] 2 elements",
        "  shared memory          8 rows of 48 bytes, 64 apart: 512 bytes",
        "  address bits           bits 4-5 ^= bits 7-8: aligned to 512 bytes, the first row is in "
        "order",
        "  outside the tensor     zero",
        "",
        "the driver takes it",
    ]


def test_a_printed_column() -> None:
    changes: dict[str, Any] = {
        "data_type": DataType.FLOAT16,
        "l2_promotion": L2Promotion.L2_256B,
        "oob_fill": OobFill.NAN_REQUEST_ZERO_FMA,
        "swizzle": Swizzle.NONE,
    }
    lines = explain(dataclasses.replace(IM2COL, **changes)).splitlines()
    assert lines[0] == "cuTensorMapEncodeIm2col"
    assert lines[4:11] == [
        "  globalDim              C 32, W 9, H 7, D 5, N 2",
        "  globalStrides          W 32, H 288, D 2016, N 10080 bytes",
        "  pixelBoxLowerCorner    W -1, H 0, D -2",
        "  pixelBoxUpperCorner    W -1, H -2, D 1",
        "  channelsPerPixel       16",
        "  pixelsPerColumn        100",
        "  elementStrides         C 1, W 2, H 1, D 3, N 1",
    ]
    assert lines[13:] == [
        "  l2Promotion            CU_TENSOR_MAP_L2_PROMOTION_L2_256B",
        "  oobFill                CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA",
        "",
        "one load",
        "  moves                  3200 bytes, which its barrier has to expect",
        "  column                 100 pixels of 16 channels",
        "  traversal along W      from -1 in steps of 2 below 8",
        "  traversal along H      from 0 in steps of 1 below 5",
        "  traversal along D      from -2 in steps of 3 below 6",
        "  shared memory          100 rows of 32 bytes, 32 apart: 3200 bytes",
        "  outside the tensor     NaN",
        "",
        "the driver takes it",
    ]


def test_a_printed_refusal() -> None:
    lines = explain(dataclasses.replace(TILED, global_strides=(80,))).splitlines()
    assert "  globalStrides          80 bytes" in lines
    assert "one load" not in lines
    assert lines[-2:] == [
        "the driver refuses it",
        "  global_strides: (80,); 2 entries are needed (rank 3, innermost stride implied)",
    ]


def test_a_printed_interleave() -> None:
    sliced = explain(dataclasses.replace(TILED, interleave=Interleave.B16)).splitlines()
    assert "  box                    [0] 8, [1] 1, [2] 2 slices of 16 bytes" in sliced
    image = dataclasses.replace(IM2COL, interleave=Interleave.B32, swizzle=Swizzle.B32)
    lines = explain(image).splitlines()
    column = f"{image.pixels_per_column} pixels, slices of 32 bytes"
    assert f"  column                 {column}" in lines
    assert "  globalDim              W 32, H 9, D 7, C 5, N 2" in lines
    assert "  traversal along W      from -1 in steps of 1 below 31" in lines
    assert "  shared memory          100 rows of 32 bytes, 32 apart: 3200 bytes" in lines


def test_a_printed_swizzle_of_blackwell() -> None:
    descriptor = dataclasses.replace(TILED, swizzle=Swizzle.B128_ATOM_64B)
    assert "the driver refuses it" in explain(descriptor)
    assert explain(descriptor, compute_capability=100).endswith("the driver takes it")
