"""Single loads and stores: swizzles, fills, strides, and what the instruction refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxemu.tma import (
    NAN_FILL,
    DataType,
    Descriptor,
    Im2colDescriptor,
    OobFill,
    Swizzle,
    TiledDescriptor,
    load,
    packed_strides,
    store,
    swizzle_address,
    swizzle_bits,
    swizzle_period,
)

Array = npt.NDArray[Any]

# The tables of the PTX ISA (9.0, 5.5.7): which 16-byte chunk stands at each place of each line of
# 128 bytes, until the pattern repeats.
TABLES: dict[Swizzle, list[str]] = {
    Swizzle.NONE: ["01234567"],
    Swizzle.B32: ["01234567", "10325476"],
    Swizzle.B64: ["01234567", "10325476", "23016745", "32107654"],
    Swizzle.B128: [
        "01234567",
        "10325476",
        "23016745",
        "32107654",
        "45670123",
        "54761032",
        "67452301",
        "76543210",
    ],
    Swizzle.B128_ATOM_32B: ["01234567", "23016745", "45670123", "67452301"],
    Swizzle.B128_ATOM_64B: ["01234567", "45670123"],
}
FLIP = Swizzle.B128_ATOM_32B_FLIP_8B


def tiled(**changes: Any) -> TiledDescriptor:
    """A descriptor of a tensor of 16-bit integers, four rows of 24, with some fields changed."""
    fields: dict[str, Any] = {
        "data_type": DataType.UINT16,
        "global_address": 0,
        "global_dim": (24, 4),
        "box_dim": (16, 2),
        "element_strides": (1, 1),
    }
    fields |= changes
    fields.setdefault("global_strides", packed_strides(fields["global_dim"], fields["data_type"]))
    return TiledDescriptor(**fields)


def im2col(**changes: Any) -> Im2colDescriptor:
    """A descriptor of two images of 3 x 3 pixels of 8 channels, with some fields changed."""
    fields: dict[str, Any] = {
        "data_type": DataType.UINT16,
        "global_address": 0,
        "global_dim": (8, 3, 3, 2),
        "global_strides": (16, 48, 144),
        "pixel_box_lower_corner": (0, 0),
        "pixel_box_upper_corner": (0, 0),
        "channels_per_pixel": 8,
        "pixels_per_column": 4,
        "element_strides": (1, 1, 1, 1),
    }
    return Im2colDescriptor(**(fields | changes))


def counting(shape: tuple[int, ...]) -> Array:
    """Numbers from 1, no two alike."""
    return (np.arange(np.prod(shape)) + 1).astype(np.uint16).reshape(shape)


@pytest.mark.parametrize("swizzle", TABLES)
def test_a_swizzle_is_the_documented_table(swizzle: Swizzle) -> None:
    lines = np.arange(4096).reshape(-1, 8, 16)
    table = TABLES[swizzle]
    wanted = np.stack([line[list(map(int, table[i % len(table)]))] for i, line in enumerate(lines)])
    placed = np.empty(4096, np.int64)
    placed[swizzle_address(np.arange(4096), swizzle)] = np.arange(4096)
    assert np.array_equal(placed.reshape(wanted.shape), wanted)
    assert max(swizzle_period(swizzle), 128) == 128 * len(table)


def test_the_flip_exchanges_halves_of_chunks_in_every_other_line() -> None:
    addresses = np.arange(4096)
    atoms = swizzle_address(addresses, Swizzle.B128_ATOM_32B)
    odd = addresses // 128 % 2 == 1
    wanted = np.where(odd, np.where(atoms % 16 < 8, atoms + 8, atoms - 8), atoms)
    assert np.array_equal(swizzle_address(addresses, FLIP), wanted)


@pytest.mark.parametrize("swizzle", Swizzle)
def test_a_swizzle_undoes_itself(swizzle: Swizzle) -> None:
    addresses = np.arange(4096)
    once = swizzle_address(addresses, swizzle)
    assert np.array_equal(np.sort(once), addresses)
    assert np.array_equal(swizzle_address(once, swizzle), addresses)
    if swizzle:
        assert np.array_equal(once // swizzle.span, addresses // swizzle.span)


def test_the_swizzles_in_words() -> None:
    assert [swizzle_bits(swizzle) for swizzle in Swizzle] == [
        "",
        "bit 4 ^= bit 7",
        "bits 4-5 ^= bits 7-8",
        "bits 4-6 ^= bits 7-9",
        "bits 5-6 ^= bits 7-8",
        "bits 5-6 ^= bits 7-8, bit 3 ^= bit 7",
        "bit 6 ^= bit 7",
    ]


def test_a_box_in_the_middle() -> None:
    tensor = counting((4, 24))
    got = load(tiled(), tensor, (8, 1)).view(np.uint16)
    assert np.array_equal(got.reshape(2, 16), tensor[1:3, 8:24])


def test_a_box_over_the_edges() -> None:
    tensor = counting((4, 24))
    wanted = np.zeros((2, 16), np.uint16)
    wanted[1, 8:] = tensor[0, :8]
    got = load(tiled(), tensor, (-8, -1)).view(np.uint16)
    assert np.array_equal(got.reshape(2, 16), wanted)


def test_element_strides_skip_but_not_along_dimension_0() -> None:
    tensor = counting((9, 24))
    descriptor = tiled(global_dim=(24, 9), box_dim=(16, 7), element_strides=(2, 3))
    got = load(descriptor, tensor, (0, 1)).view(np.uint16)
    assert np.array_equal(got.reshape(3, 16), tensor[1:8:3, :16])


def test_padded_strides_and_elements_of_a_byte() -> None:
    memory = np.arange(200, dtype=np.uint8)
    descriptor = tiled(
        data_type=DataType.UINT8, global_dim=(20, 4), global_strides=(48,), box_dim=(32, 4)
    )
    wanted = np.zeros((4, 32), np.uint8)
    for row in range(4):
        wanted[row, :20] = memory[row * 48 : row * 48 + 20]
    assert np.array_equal(load(descriptor, memory, (0, 0)).reshape(4, 32), wanted)


@pytest.mark.parametrize(
    "data_type", [DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32, DataType.FLOAT64]
)
def test_nan_outside_the_tensor(data_type: DataType) -> None:
    size = data_type.bits // 8
    kinds: dict[DataType, Any] = {DataType.FLOAT32: np.float32, DataType.FLOAT64: np.float64}
    kind = kinds.get(data_type, np.float16)
    tensor = np.ones((2, 16), f"u{size}")
    descriptor = tiled(
        data_type=data_type,
        global_dim=(16, 2),
        box_dim=(16, 3),
        oob_fill=OobFill.NAN_REQUEST_ZERO_FMA,
    )
    got = load(descriptor, tensor, (0, 0))
    inside, outside = got[: 32 * size], got[32 * size :]
    assert np.array_equal(inside.view(f"u{size}"), tensor.reshape(-1))
    assert np.all(outside.view("<u2") == NAN_FILL)
    bits = outside.view("<u2").astype("<u4") << 16
    values = bits.view(np.float32) if data_type is DataType.BFLOAT16 else outside.view(kind)
    assert np.isnan(values).all()


def test_what_a_load_leaves_as_it_was() -> None:
    tensor = counting((4, 24))
    descriptor = tiled(swizzle=Swizzle.B64)
    before = np.full(1024, 0xAB, np.uint8)
    after = load(descriptor, tensor, (0, 0), shared_memory=before, offset=256)
    assert np.all(before == 0xAB)
    # Rows of 32 bytes, 64 apart; line 2 of 128 bytes exchanges chunks 0, 1 with 2, 3.
    wanted = before.copy()
    wanted[256 + 32 : 256 + 64] = tensor[0, :16].view(np.uint8)
    wanted[256 + 96 : 256 + 128] = tensor[1, :16].view(np.uint8)
    assert np.array_equal(after, wanted)


@pytest.mark.parametrize("offset", [0, 128, 384, 896, 1152])
@pytest.mark.parametrize("swizzle", [s for s in Swizzle if s is not FLIP])
def test_the_swizzle_depends_on_the_address(swizzle: Swizzle, offset: int) -> None:
    elements = (swizzle.span or 128) // 2
    tensor = counting((16, 64))
    descriptor = tiled(global_dim=(64, 16), box_dim=(elements, 16), swizzle=swizzle)
    after = load(descriptor, tensor, (0, 0), offset=offset)
    table = TABLES[swizzle]
    for row in range(16):
        for chunk in range(elements // 8):
            at = offset + row * 2 * elements + 16 * chunk
            line, place = divmod(at // 16, 8)
            found = table[line % len(table)].index(str(place))
            start = line * 128 + found * 16
            got = after[start : start + 16].view(np.uint16)
            assert np.array_equal(got, tensor[row, 8 * chunk : 8 * chunk + 8])


def test_a_traversal_of_rows_and_images() -> None:
    tensor = counting((2, 3, 3, 8))
    descriptor = im2col(
        pixel_box_upper_corner=(-1, -1), pixels_per_column=10, element_strides=(1, 1, 1, 1)
    )
    got = load(descriptor, tensor, (0, 1, 0, 0), (1, 0)).view(np.uint16).reshape(10, 8)
    pixels = [(0, 0, 1), (0, 1, 0), (0, 1, 1)]
    pixels += [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    for row, (n, h, w) in enumerate(pixels):
        assert np.array_equal(got[row], tensor[n, h, w + 1])
    # Behind the last image there is nothing, but three pixels are missing to a column of ten.
    assert not got[7:].any()


@settings(deadline=None)
@given(data=st.data())
def test_a_store_is_the_inverse_of_a_load(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 5))
    sizes = st.integers(1, 5)
    dims = (8 * data.draw(st.integers(1, 9)), *(data.draw(sizes) for _ in range(rank - 1)))
    swizzle = data.draw(st.sampled_from(Swizzle))
    widest = (swizzle.span or 256) // 16
    box = (8 * data.draw(st.integers(1, widest)), *(data.draw(sizes) for _ in range(rank - 1)))
    steps = (1, *(data.draw(st.integers(1, 3)) for _ in range(rank - 1)))
    where = (8 * data.draw(st.integers(0, 4)), *(data.draw(sizes) - 1 for _ in range(rank - 1)))
    offset = 128 * data.draw(st.integers(0, 9))
    descriptor = tiled(global_dim=dims, box_dim=box, element_strides=steps, swizzle=swizzle)
    tensor = counting(dims[::-1])
    shared_memory = load(descriptor, tensor, where, offset=offset)
    before = np.zeros_like(tensor)
    after = store(descriptor, shared_memory, where, before, offset=offset)
    wanted = np.zeros_like(tensor)
    box_slices = [
        slice(start, start + extent, step)
        for start, extent, step in zip(where, box, steps, strict=True)
    ]
    index = tuple(reversed(box_slices))
    wanted[index] = tensor[index]
    assert np.array_equal(after, wanted)
    assert not before.any()


TENSOR = counting((4, 24))
IMAGES = counting((2, 3, 3, 8))


@pytest.mark.parametrize(
    ("descriptor", "arguments", "message"),
    [
        (tiled(), {"coordinates": (0,)}, "coordinates: (0,) has 1 entries; 2 are needed, one a "),
        (
            tiled(),
            {"coordinates": (0, 1 << 31)},
            "coordinates: (0, 2147483648); entries of 32 bits are allowed",
        ),
        (
            tiled(),
            {"coordinates": (4, 0)},
            "coordinates: (4, 0) starts 8 bytes into a row; multiples of 16 bytes are allowed",
        ),
        (
            tiled(),
            {"filter_offsets": (0,)},
            "filter_offsets: (0,) has 1 entries; 0 are needed by a tiled load",
        ),
        (
            im2col(),
            {"filter_offsets": (0,)},
            "filter_offsets: (0,) has 1 entries; 2 are needed, one a spatial dimension",
        ),
        (
            im2col(),
            {"filter_offsets": (0, 256)},
            "filter_offsets: (0, 256); 0 to 255 are allowed at rank 4",
        ),
        (
            im2col(),
            {"filter_offsets": (-1, 0)},
            "filter_offsets: (-1, 0); 0 to 255 are allowed at rank 4",
        ),
        (tiled(), {"offset": 64}, "offset: 64; multiples of 128 are allowed"),
        (tiled(), {"offset": -128}, "offset: -128; multiples of 128 are allowed"),
        (
            tiled(),
            {"tensor": TENSOR[:3]},
            "tensor: 144 bytes; the descriptor's dimensions and strides reach 192",
        ),
        (
            tiled(),
            {"tensor": TENSOR[:, ::2]},
            "tensor: not contiguous; a contiguous array is allowed",
        ),
        (
            tiled(),
            {"shared_memory": np.zeros(63, np.uint8)},
            "shared_memory: 63 bytes; the box reaches 64",
        ),
        (
            tiled(),
            {"shared_memory": np.zeros(64, np.uint16)},
            "shared_memory: uint16 of 1 dimensions; uint8 of 1 is allowed",
        ),
        (
            tiled(global_strides=(40,)),
            {},
            "descriptor: global_strides[0]: 40; multiples of 16 are allowed (TMA moves",
        ),
        (
            tiled(data_type=DataType.PACKED_16U4_ALIGN8B, global_dim=(32, 4), box_dim=(32, 4)),
            {},
            "data_type: CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B; only types of whole bytes are",
        ),
        (
            im2col(),
            {"coordinates": (0, 0, IMAGES.shape[1], 0)},
            "coordinates: (0, 0, 3, 0) starts at H 3; ",
        ),
        (
            im2col(global_dim=(8, 3, (1 << 32) - 1, 2), pixel_box_upper_corner=(0, 2)),
            {},
            "global_dim: (8, 3, 4294967295, 2) puts the end of the pixel box at 4294967297; up to",
        ),
    ],
)
def test_what_a_load_refuses(
    descriptor: Descriptor, arguments: dict[str, Any], message: str
) -> None:
    is_im2col = isinstance(descriptor, Im2colDescriptor)
    defaults: dict[str, Any] = {
        "tensor": IMAGES if is_im2col else TENSOR,
        "coordinates": (0,) * descriptor.tensor_rank,
        "filter_offsets": (0, 0) if is_im2col else (),
    }
    with pytest.raises(ValueError) as raised:
        load(descriptor, **(defaults | arguments))
    assert str(raised.value).startswith(message)


def test_what_a_store_refuses() -> None:
    shared_memory = np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match=r"^coordinates: \(0, -1\) has a negative entry; a store"):
        store(tiled(), shared_memory, (0, -1), TENSOR)
    with pytest.raises(ValueError, match=r"^shared_memory: 48 bytes; the box reaches 64$"):
        store(tiled(), shared_memory[:48], (0, 0), TENSOR)
    not_tiled: Any = im2col()
    with pytest.raises(TypeError, match=r"^descriptor: Im2colDescriptor; a TiledDescriptor is"):
        store(not_tiled, shared_memory, (0, 0, 0, 0), IMAGES)
    with pytest.raises(TypeError, match=r"^coordinates: .* holds a float; integers are allowed"):
        load(tiled(), TENSOR, (0, 1.5))  # type: ignore[arg-type]  # what is tested


def test_every_type_of_whole_bytes() -> None:
    taken = set()
    for data_type in DataType:
        descriptor = tiled(
            data_type=data_type, global_dim=(128, 1), global_strides=(1024,), box_dim=(128, 1)
        )
        try:
            got = load(descriptor, np.full(1024, 0x40, np.uint8), (0, 0))
        except ValueError as refusal:
            assert str(refusal).startswith(f"data_type: {data_type.driver_name}; ")
        else:
            # Of 0x40404040, the TF32 types drop the lower 13 bits.
            rounded = data_type in {DataType.TFLOAT32, DataType.TFLOAT32_FTZ}
            value = [0x00, 0x40, 0x40, 0x40] if rounded else [0x40] * 4
            assert np.array_equal(got, np.resize(np.array(value, np.uint8), got.size))
            taken.add(data_type)
    assert taken == set(list(DataType)[:13])
