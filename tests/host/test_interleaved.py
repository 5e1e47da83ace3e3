"""The interleaved layouts' address map, the kernels' tile maps, and what dp4a refuses."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests import ptx

from maxconv._blocked_filter import array_of_krsc, krsc_of_array
from maxconv._fields import BLOCKS
from maxconv._inspect import emit
from maxconv._problem import ConvProblem
from maxconv._problems import parse_problem
from maxconv.bench.gpu.operands import geometry

#: N, H, W of images, and K, R, S of filters: every extent 1, and none equal to another; of how many
#: blocks of channels.
IMAGES = ((1, 1, 1, 1), (2, 3, 3, 5), (3, 2, 1, 7), (1, 4, 9, 1), (2, 1, 5, 6))
FILTERS = ((4, 1, 1, 1), (12, 2, 3, 5), (20, 1, 7, 1), (4, 4, 2, 2))

#: Channels of a block, whether images are neighbours, and an image; the same of filters.
BLOCKED = [
    (x, last, n, c * x, h, w) for x, last, (n, c, h, w) in itertools.product(BLOCKS, (0, 1), IMAGES)
]
BLOCKED_FILTERS = [(x, k, c * x, r, s) for x, (k, c, r, s) in itertools.product(BLOCKS, FILTERS)]

#: Filters, pixels and channels of the tiles, as DESIGN has them: tile_M, tile_N, tile_K.
TILES = ((64, 128, 32), (32, 32, 32))

#: Output pixels, filters and channels: below, at and beyond the tiles.
SIZES = tuple(
    itertools.product((1, 31, 32, 33, 128, 129, 700), (4, 32, 36, 64, 68, 200), (4, 32, 36, 96))
)

#: P, Q, N and K of batch-blocked tensors: below, at and beyond the tiles.
BATCHES = tuple(itertools.product(((1, 1), (3, 5), (7, 2)), (1, 32, 33, 300), (4, 64, 68)))

#: A tile, a word of a step, and a filter or pixel.
SHARED = ((0, 0, 0), (0, 0, 63), (0, 1, 5), (0, 7, 63), (1, 3, 31))

#: Channels of a block, whether images are neighbours, and bytes of an access: those of dp4a, and
#: those of tensor cores.
ACCESSES = tuple(itertools.product(BLOCKS, (0, 1), (4, 16)))

#: Output pixels, filters, multiprocessors; the tile.
CHOICES = (
    ((128 * 132, 64, 132), 0),
    ((128 * 131, 64, 132), 1),
    ((128 * 66, 128, 132), 0),
    ((128 * 66, 64, 132), 1),
    ((128 * 1000, 32, 132), 1),
    ((128 * 1000, 36, 132), 0),
    ((1, 4, 1), 1),
)

Refused = tuple[ConvProblem, int, str]

#: A problem, the operands' address within a line of memory, and what the message says.
REFUSED: Sequence[Refused] = (
    (parse_problem("1x5x5x8:8x3x3", padding=1), 0, "None"),
    (parse_problem("1x5x5x8:8x3x3", padding=1), 4, "None"),
    (
        parse_problem("1x5x5x8:8x3x3", padding=1),
        2,
        "dp4a reads 4 elements an access: operands at multiples of 4 bytes; here one is at a "
        "multiple of 2",
    ),
    (parse_problem("1x5x5x8:8x3x3"), 13, "here one is at a multiple of 1"),
    (parse_problem("1x5x5x6:8x3x3"), 0, "multiples of 4 channels and filters; here 6 and 8"),
    (parse_problem("1x5x5x8:10x3x3"), 0, "multiples of 4 channels and filters; here 8 and 10"),
    (parse_problem("1x5x5x8:8x3x3", groups=2), 0, "dp4a takes one group; here 2"),
    (
        parse_problem("1x3x5x5x8:8x1x3x3"),
        0,
        "dp4a takes two spatial dimensions; here input (3, 5, 5) and filter (1, 3, 3)",
    ),
    (parse_problem("1x3x5x5x8:8x3x3x3"), 0, "dp4a takes two spatial dimensions"),
    (
        parse_problem("65536x256x128x4:4x1x1"),
        0,
        "dp4a takes fewer than 2147483648 output pixels; here 2147483648",
    ),
    (parse_problem("1x1x1x4:2097124x1x1"), 0, "dp4a takes up to 2097120 filters; here 2097124"),
)


def questions() -> list[str]:
    """Those of `tests/mojo/dp4a_maps.mojo`, in the order in which the tests read the answers."""
    asked: list[tuple[object, ...]] = [("image", *sizes) for sizes in BLOCKED]
    asked += [("known", n, 4 * c, h, w) for n, c, h, w in IMAGES]
    asked += [("index", *sizes) for sizes in BLOCKED]
    asked += [("filter", *sizes) for sizes in BLOCKED_FILTERS]
    asked += [("batch", i, *pq, n, k) for i in range(2) for pq, n, k in BATCHES]
    asked += [("access", *access) for access in ACCESSES]
    asked += [("shared", *place) for place in SHARED]
    asked += [("tile", index, *sizes) for index in range(2) for sizes in SIZES]
    asked += [("choose", *sizes) for sizes, _ in CHOICES]
    asked += [("refuse", address, *geometry(problem)) for problem, address, _ in REFUSED]
    return [",".join(map(str, words)) for words in (*asked, ("types",), ("layouts",))]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """The lines by the questions' first word; those of several lines come last."""
    folder = tmp_path_factory.mktemp("dp4a")
    program = folder / "dp4a_maps"
    ptx.build("dp4a_maps", program)
    asked = questions()
    first, *others = asked
    lines = ptx.run(program, Path(first), *others)
    words = [question.split(",")[0] for question in asked[:-2]]

    def of(word: str) -> list[str]:
        if word == "types":
            return lines[len(words) : len(words) + 7]
        if word == "layouts":
            return lines[len(words) + 7 :]
        return [line for line, own in zip(lines, words, strict=False) if own == word]

    return of


def test_the_address_map_is_that_of_the_layout(answers: Callable[[str], list[str]]) -> None:
    """Every element of every image, and the formula of the design."""
    found = answers("image")
    assert len(found) == len(BLOCKED)
    for (x, last, n, c, h, w), line in zip(BLOCKED, found, strict=True):
        offsets = np.array(line.split(), np.int64).reshape(n, c, h, w)
        # Where each element lies: elements that name their coordinates, in memory.
        names = np.arange(n * c * h * w).reshape(n, c, h, w)
        order = (1, 3, 4, 0, 2) if last else (0, 1, 3, 4, 2)
        memory = names.reshape(n, c // x, x, h, w).transpose(order).reshape(-1)
        assert np.array_equal(memory[offsets], names)
        batch, channel, row, column = np.indices((n, c, h, w))
        s0, s1, s2 = x * w, x * w * h, w * h * c
        formula = channel % x + x * column + s0 * row + s1 * (channel // x) + s2 * batch
        if last:
            pixel = column + w * row + w * h * (channel // x)
            formula = channel % x + x * (batch + n * pixel)
        assert np.array_equal(offsets, formula)


def test_the_map_of_a_gpus_kernels_is_the_same(answers: Callable[[str], list[str]]) -> None:
    general = dict(zip(BLOCKED, answers("image"), strict=True))
    wanted = [general[4, 0, n, 4 * c, h, w] for n, c, h, w in IMAGES]
    assert answers("known") == wanted


def test_the_index_in_the_tensor(answers: Callable[[str], list[str]]) -> None:
    """Of the last element: it is the last in the tensor."""
    for (x, last, n, c, h, w), line in zip(BLOCKED, answers("index"), strict=True):
        shape = (c // x, h, w, n, x) if last else (n, c // x, h, w, x)
        assert line == str(tuple(size - 1 for size in shape))


def test_the_filters_map_is_that_of_its_layout(answers: Callable[[str], list[str]]) -> None:
    """And Python packs filters by it, and back."""
    found = answers("filter")
    assert len(found) == len(BLOCKED_FILTERS)
    for (x, k, c, r, s), line in zip(BLOCKED_FILTERS, found, strict=True):
        offsets = np.array(line.split(), np.int64).reshape(k, c, r, s)
        names = np.arange(k * c * r * s, dtype=np.int32).reshape(k, c, r, s)
        krsc = names.transpose(0, 2, 3, 1)
        packed = array_of_krsc(krsc, x)
        assert packed.shape == (c // x, r, s, k, x)
        assert np.array_equal(packed.reshape(-1)[offsets], names)
        assert sorted(offsets.reshape(-1)) == list(range(offsets.size))
        assert np.array_equal(krsc_of_array(packed), krsc)


def test_channels_behind_the_last_are_zeros() -> None:
    filter = np.arange(1, 1 + 4 * 2 * 3 * 6, dtype=np.int16).reshape(4, 2, 3, 6)
    packed = array_of_krsc(filter, 4)
    assert packed.shape == (2, 2, 3, 4, 4)
    assert np.array_equal(packed[0].transpose(2, 0, 1, 3), filter[..., :4])
    assert np.array_equal(packed[1, ..., :2].transpose(2, 0, 1, 3), filter[..., 4:])
    assert not packed[1, ..., 2:].any()


def test_the_tile_map(answers: Callable[[str], list[str]]) -> None:
    """The grid, and where each block begins; no output is left out or computed twice."""
    found = answers("tile")
    cases = [(tile, sizes) for tile in TILES for sizes in SIZES]
    for ((tile_m, tile_n, tile_k), (pixels, filters, channels)), line in zip(
        cases, found, strict=True
    ):
        across, down, steps, *firsts = map(int, line.split())
        assert (across, down) == (-(-pixels // tile_n), -(-filters // tile_m))
        assert steps == -(-channels // tile_k)
        assert firsts[:across] == [x * tile_n for x in range(across)]
        assert firsts[across:] == [y * tile_m for y in range(down)]
        assert firsts[across - 1] < pixels
        assert firsts[-1] < filters


def test_the_batch_map(answers: Callable[[str], list[str]]) -> None:
    """A block computes a pixel of some images; no output is left out or computed twice."""
    cases = [(tile, *case) for tile in TILES for case in BATCHES]
    for ((tile_m, tile_n, _), (p, q), n, k), line in zip(cases, answers("batch"), strict=True):
        across, images, filters, *firsts = map(int, line.split())
        assert (across, images, filters) == (p * q, -(-n // tile_n), -(-k // tile_m))
        blocks = itertools.product(range(across), range(images), range(filters))
        wanted = [(x // q, x % q, y * tile_n, z * tile_m) for x, y, z in blocks]
        assert firsts == [number for origin in wanted for number in origin]


def test_accesses_are_aligned_to_the_strides(answers: Callable[[str], list[str]]) -> None:
    for (x, last, size), line in zip(ACCESSES, answers("access"), strict=True):
        integers, halves = line.split(". ")
        name = f"C/{x}HWN{x}" if last else f"NC/{x}HW{x}"
        for sentence, elements, dtype in (
            (integers, size, "int8"),
            (halves, size // 2, "bfloat16"),
        ):
            refused = (
                f"accesses of {size} bytes are {elements} elements of {dtype}; the strides of "
                f"{name} are multiples of {x}"
            )
            assert sentence == ("None" if x % elements == 0 else refused)


def test_words_of_shared_memory(answers: Callable[[str], list[str]]) -> None:
    """Filters column-major, and behind them pixels row-major, of words of 4 channels."""
    for (tile, word, i), line in zip(SHARED, answers("shared"), strict=True):
        tile_m, tile_n, tile_k = TILES[tile]
        behind = tile_k // 4 * tile_m
        assert line == f"{word * tile_m + i} {behind + word * tile_n + i}"


def test_the_tile_is_chosen_by_its_blocks(answers: Callable[[str], list[str]]) -> None:
    assert [int(line) for line in answers("choose")] == [tile for _, tile in CHOICES]


def test_what_is_refused(answers: Callable[[str], list[str]]) -> None:
    for (_, _, sentence), line in zip(REFUSED, answers("refuse"), strict=True):
        assert sentence in line


def test_layouts_and_types_are_refused(answers: Callable[[str], list[str]]) -> None:
    assert answers("types") == [
        "None",
        "dp4a takes activations in NC/4HW4; here NHWC",
        "sm80 takes activations in NHWC; here NC/4HW4",
        "dp4a takes int8 and uint8, and gives float32, bfloat16, float16 or sums; here bfloat16 and"
        " bfloat16",
        "dp4a reads the activation from memory, but here other work is fused in front of it",
        "dp4a takes a GPU of compute capability 6.1 or more",
        "None",
    ]


def test_a_filters_layout_is_the_activations(answers: Callable[[str], list[str]]) -> None:
    assert answers("layouts") == [
        "None",
        "filter_layout: code 4 is not 0 to 3",
        "filter_layout: code 1 is not 4: beside an activation in NC/4HW4 a filter is in C/4RSK4",
        "None",
        "filter: 7 elements do not match 576 = what 8 filters of 9 taps and 8 channels take in "
        "layout C/4RSK4",
        "(2, 5, 7, 12)",
        "input: shape (2, 3, 5, 7, 8) ends with 8; in layout NC/4HW4 it ends with 4",
        "(7, 3, 5, 32)",
        "None",
        "input: layout C/8HWN8 has blocks of 8 channels; blocks of 4, 16, 32 are allowed",
        "None",
        "None",
        "input: layout C/64HWN64 has blocks of 64 channels; blocks of 4, 16, 32 are allowed",
    ]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What ``maxconv inspect --kernel dp4a`` writes for the oldest GPU that it knows."""
    written = emit(tmp_path_factory.mktemp("inspected"), "sm_80", "int8", "dp4a")
    # Two steps of words or the sums, whichever is more; what every GPU gives a block.
    assert set(written.values()) == {4 * 32 * 32, 4 * 64 * 128}
    return list(written)


def test_the_loop_multiplies_every_pair_once(kernels: list[Path]) -> None:
    assert sorted(kernel.stem for kernel in kernels) == [
        f"dp4a-{tile}-{accesses}"
        for tile in ("large", "small")
        for accesses in ("1-1", "4-1", "4-4")
    ]
    for kernel in kernels:
        text = kernel.read_text()
        pairs = 64 if "large" in kernel.stem else 16
        assert text.count("dp4a.s32.s32") == pairs
        words = re.findall(r"ld\.global(?:\.nc)?(\.v4)?\.b32", text)
        assert (".v4" in words) == ("-4" in kernel.stem)
        assert ("" in words) == ("-1" in kernel.stem)
        assert "st.local" not in text, "an array in local memory"
        assert "call" not in re.sub(r"//.*", "", text), "a function that is not inlined"


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_kernels_assemble_without_spills(kernels: list[Path], tmp_path: Path) -> None:
    for kernel in kernels:
        report = ptx.assemble(kernel, tmp_path, "sm_80")
        assert ptx.NO_SPILLS in report, kernel.stem + report
        used = re.search(r"Used (\d+) registers", report)
        threads = 128 if "large" in kernel.stem else 64
        resident = 4 if "large" in kernel.stem else 8
        assert used and int(used[1]) * threads * resident <= ptx.REGISTERS
