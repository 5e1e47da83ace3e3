"""The kernel for depthwise filters and narrow groups, as Mojo compiles it, is exact."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import ptx
from tests.emulated.convolution import BIAS, Array, bfloat16, floats

from ptxemu import DevicePointer, EmulatorError, Machine, TensorMap
from ptxemu.tma import DataType, L2Promotion, Swizzle, packed_strides

#: Taps, stride, batch, height, width, channels, padding, multiprocessors, channels of a group.
#: Depthwise: one image whose last set is half a set; slabs side by side, and one after the other;
#: pairs of narrow images, of which some are not there; several images; stride 2; several steps
#: along the columns; stages that are filled again; steps that are narrow, and less so, because a
#: block has only one. Groups: every width, both strides, slabs that lack channels, and pixels of
#: two images together. Slabs of 72 channels: one, two,
#: a last one of 8 warps and of one, several images, and groups.
PROBLEMS = (
    (3, 1, 1, 7, 56, 64, 1, 1, 1),
    (3, 1, 2, 4, 20, 192, 1, 1, 1),
    (3, 1, 1, 2, 9, 192, 1, 1, 1),
    (3, 1, 5, 5, 7, 64, 1, 1, 1),
    (3, 1, 5, 5, 14, 64, 1, 2, 1),
    (3, 2, 2, 9, 30, 64, 1, 2, 1),
    (3, 1, 1, 3, 120, 64, 1, 1, 1),
    (3, 1, 1, 80, 16, 64, 1, 1, 1),
    (3, 1, 1, 4, 56, 128, 1, 8, 1),
    (3, 2, 1, 8, 96, 64, 1, 2, 1),
    (3, 1, 5, 5, 7, 64, 1, 1, 2),
    (3, 1, 1, 3, 20, 72, 1, 1, 4),
    (3, 2, 1, 5, 18, 64, 1, 1, 4),
    (3, 1, 2, 4, 20, 24, 1, 1, 4),
    (3, 2, 1, 5, 40, 8, 1, 1, 2),
    (3, 1, 1, 4, 9, 136, 1, 1, 8),
    (3, 2, 3, 9, 15, 64, 1, 1, 8),
    (3, 1, 1, 7, 24, 64, 1, 1, 16),
    (3, 1, 5, 5, 7, 48, 1, 1, 16),
    (3, 1, 1, 3, 9, 80, 1, 1, 16),
    (3, 2, 2, 5, 30, 96, 1, 2, 16),
    (3, 2, 3, 9, 14, 64, 1, 1, 16),
    (3, 1, 1, 3, 40, 16, 1, 1, 16),
    (3, 1, 1, 4, 24, 64, 1, 1, 32),
    (3, 2, 3, 9, 14, 96, 1, 1, 32),
    (3, 2, 2, 5, 48, 64, 1, 1, 32),
    (3, 2, 1, 5, 30, 64, 1, 1, 32),
    (3, 1, 1, 5, 24, 72, 1, 1, 1),
    (3, 1, 3, 4, 7, 144, 1, 1, 1),
    (3, 2, 2, 7, 30, 136, 1, 2, 1),
    (3, 1, 1, 3, 40, 80, 1, 1, 8),
    (3, 1, 2, 2, 14, 200, 1, 2, 2),
)

#: Of these those that get infinities and not-a-numbers: of each width of groups one.
NOT_FINITE = (3, 10, 12, 16, 17)

#: Slabs of 64 channels, or of 72. Of others nobody writes the outputs of the channels that are
#: not there, and the emulator does not let them be copied, to nowhere as it is; a residual
#: fills them.
WHOLE = tuple(
    index for index, problem in enumerate(PROBLEMS) if 0 in (problem[5] % 64, problem[5] % 72)
)

#: What a sum that is no number is compared as.
NOT_A_NUMBER = np.float32(12288)


@dataclass(frozen=True)
class Launch:
    """A problem, and what the Mojo side passes for it."""

    problem: tuple[int, ...]
    blocks: int
    threads: int
    shared_bytes: int
    slab: int
    staged_columns: int
    columns: int
    images: int
    height: int
    width: int
    epilogues: tuple[bytes, bytes]
    geometry: bytes
    ptx: str

    @classmethod
    def of(cls, problem: tuple[int, ...], line: str, folder: Path) -> Launch:
        """Reads a line of the Mojo side."""
        words = line.split()
        index, blocks, threads, shared, slab, *box = map(int, words[:10])
        staged, columns, images, height, width = box
        bare, fused, geometry = map(bytes.fromhex, words[10:])
        cut = blocks, threads, shared, slab, staged, columns, images
        text = (folder / f"{index}.ptx").read_text()
        return cls(problem, *cut, height, width, (bare, fused), geometry, text)


@dataclass(frozen=True)
class Operands:
    """Small integers."""

    activation: Array
    filter: Array
    bias: Array
    residual: Array

    @classmethod
    def random(cls, launch: Launch, seed: int) -> Operands:
        """Draws them."""
        taps, _, batch, height, width, channels, _, _, group = launch.problem
        rng = np.random.default_rng(seed)
        shapes: tuple[tuple[int, ...], ...] = (
            (batch, height, width, channels),
            (channels, taps, taps, group),
            (channels,),
            (batch, launch.height, launch.width, channels),
        )
        return cls(*(rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes))

    def expected(self, launch: Launch, fused: bool) -> Array:
        """The convolution, rounded to bfloat16."""
        taps, stride, _, _, _, _, padding, _, group = launch.problem
        around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
        padded = np.pad(self.activation, around)
        total = np.zeros_like(self.residual)
        with np.errstate(invalid="ignore"):
            for r in range(taps):
                for s in range(taps):
                    rows = slice(r, r + (launch.height - 1) * stride + 1, stride)
                    columns = slice(s, s + (launch.width - 1) * stride + 1, stride)
                    for i in range(group):
                        # Channel i of its group, for every filter of the group.
                        pixels = np.repeat(padded[:, rows, columns, i::group], group, axis=-1)
                        total += pixels * self.filter[:, r, s, i]
        if fused:
            total = np.maximum(total + self.bias, 0) + self.residual
        return floats(bfloat16(numbers(total)))


def numbers(values: Array) -> Array:
    """The values, a number where one is none."""
    return np.where(np.isnan(values), NOT_A_NUMBER, values)


def run(launch: Launch, operands: Operands, fused: bool, seed: int, ptx: str = "") -> Array:
    """Runs the kernel, or a changed text of it; returns its outputs."""
    _, _, batch, height, width, channels, *_ = launch.problem
    machine = Machine("sm_90a", sms=launch.blocks, seed=seed)
    activation, residual = (
        machine.alloc(bfloat16(values)) for values in (operands.activation, operands.residual)
    )
    bias = machine.alloc(operands.bias)
    output = machine.alloc(np.full(operands.residual.shape, 0x4442, np.uint16))
    image = (channels, width, height, 1, batch)
    result = (channels, launch.width, launch.height, 1, batch)
    outputs = (launch.slab, launch.columns, 2, 1, launch.images)
    epilogue = launch.epilogues[fused].replace(
        BIAS.to_bytes(8, "little"), int(bias).to_bytes(8, "little")
    )
    machine.load(ptx or launch.ptx).launch(
        grid=launch.blocks,
        block=launch.threads,
        shared_bytes=launch.shared_bytes,
        args=[
            _map(activation, image, (launch.slab, launch.staged_columns, 2, 1, 1)),
            _map(output, result, outputs),
            _map(residual, result, outputs),
            machine.alloc(bfloat16(operands.filter)),
            epilogue,
            int(output).to_bytes(8, "little"),
            launch.geometry,
        ],
        budget=20_000_000,
    )
    return floats(output.read())


def _map(tensor: DevicePointer, sizes: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
    kind = DataType.BFLOAT16
    # Pixels of 64 channels fill a row of the swizzle; wider ones need none.
    swizzle = Swizzle.B128 if box[0] == 64 else Swizzle.NONE
    options: dict[str, Any] = {"swizzle": swizzle, "l2_promotion": L2Promotion.L2_256B}
    return TensorMap.tiled(kind, tensor, sizes, packed_strides(sizes, kind), box, **options)


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Where the kernel's PTX is, and a line for each problem, and what is refused."""
    folder = tmp_path_factory.mktemp("diagonal")
    words = ["x".join(map(str, problem)) for problem in PROBLEMS]
    return folder, ptx.emit("emit_diagonal", folder, *words)


@pytest.fixture(scope="module")
def launches(emitted: tuple[Path, list[str]]) -> list[Launch]:
    """The problems, with the kernel's PTX."""
    folder, lines = emitted
    return [Launch.of(*pair, folder) for pair in zip(PROBLEMS, lines[:-1], strict=True)]


def test_what_was_not_compiled_is_refused(emitted: tuple[Path, list[str]]) -> None:
    _, lines = emitted
    taps, stride, batch, height, width, channels, *_, group = PROBLEMS[-1]
    name = f"diagonal {taps}x{taps}, stride {stride}"
    name += f", groups of {group} channels" if group > 8 else ""
    assert lines[-1].startswith(
        f"{name}: the op was compiled without it; problem "
        f"{batch}x(1, {height}, {width})x{channels} -> {channels}, filter (1, {taps}, {taps}), "
    )


@pytest.mark.parametrize(
    ("index", "fused"),
    [(index, False) for index in WHOLE] + [(index, True) for index in range(len(PROBLEMS))],
)
def test_groups_are_exact(launches: list[Launch], index: int, fused: bool) -> None:
    launch = launches[index]
    operands = Operands.random(launch, index)
    found = run(launch, operands, fused, seed=index)
    assert np.array_equal(found, operands.expected(launch, fused))


def test_the_cuts_reach_their_edges(launches: list[Launch]) -> None:
    taken = {(launch.problem[1], launch.problem[8]) for launch in launches}
    assert taken >= {(stride, group) for stride in (1, 2) for group in (1, 8, 16, 32)}
    assert {launch.images for launch in launches} >= {1, 2, 4}
    assert {launch.columns % 16 for launch in launches} == {0, 8}
    assert {launch.slab for launch in launches} == {64, 72}


def test_few_channels_more_are_no_slab(launches: list[Launch]) -> None:
    """Of 72 and 144 channels: one slab and two."""
    slabs = {72: 1, 144: 2}
    for channels, height in ((72, 5), (144, 4)):
        cut = next(
            cut for cut in launches if cut.problem[3] == height and cut.problem[5] == channels
        )
        assert (cut.slab, cut.threads) == (72, 10 * 32)
        assert -(-channels // cut.slab) == slabs[channels]


def test_blocks_of_one_step(launches: list[Launch]) -> None:
    """They are as many as may be, and have no more stages and outputs than the step."""
    cuts = {launch.problem[:5]: launch for launch in launches}
    narrow, less = cuts[3, 1, 1, 4, 56], cuts[3, 2, 1, 8, 96]
    assert (narrow.blocks, narrow.columns) == (2 * 2 * 4, 16)
    # Two stages of two rows of 18 pixels, whole patterns, and three buffers of two rows.
    assert narrow.shared_bytes == 1024 + 2 * 5 * 1024 + 3 * 2 * 16 * 128
    assert (less.blocks, less.columns) == (2 * 2, 24)


@pytest.mark.parametrize("index", NOT_FINITE)
@pytest.mark.parametrize("fused", [False, True], ids=["bare", "fused"])
def test_what_is_not_finite_stays_in_its_group(
    launches: list[Launch], index: int, fused: bool
) -> None:
    launch = launches[index]
    operands = Operands.random(launch, index)
    channels, group = launch.problem[5], launch.problem[8]
    operands.activation[0, 2, 3, 5] = np.inf
    operands.activation[-1, 0, 0, channels - 1] = np.nan
    found = run(launch, operands, fused, seed=index)
    expected = operands.expected(launch, fused)
    reached = (~np.isfinite(expected) | (expected == NOT_A_NUMBER)).any(axis=(0, 1, 2))
    first = 5 // group * group
    assert set(np.flatnonzero(reached)) <= {
        *range(first, first + group),
        *range(channels - group, channels),
    }
    assert reached[first : first + group].any() and reached[channels - group :].all()
    assert np.array_equal(numbers(found), expected)


def test_a_block_that_does_not_meet_is_reported(launches: list[Launch]) -> None:
    launch = launches[0]
    text = launch.ptx
    at = text.rindex("bar.sync")
    broken = text[:at] + "//" + text[at:]
    with pytest.raises(EmulatorError):
        for seed in range(4):
            run(launch, Operands.random(launch, 0), fused=False, seed=seed, ptx=broken)
