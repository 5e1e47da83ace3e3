"""Hopper's kernel for few input channels, as Mojo compiles it, is exact."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pytest
from tests import ptx
from tests.emulated.convolution import Array, with_pointer
from tests.emulated.operands import OUTPUT, Operands, with_fused
from tests.emulated.values import loaded, stored
from tests.emulated.ways import bare_or_fused

from maxconv._problem import ConvProblem
from maxconv._problems import parse_problem
from maxconv.bench.gpu.operands import geometry
from ptxemu import EmulatorError, Machine


class Problem(NamedTuple):
    """A convolution, and the kernel that runs it."""

    conv: ConvProblem
    dtype: str = "bfloat16"
    placed: bool = False
    """Whether the graph's work that asks where pixels are is fused behind it."""
    candidate: int = -1
    """The configuration, or -1 for the plan's."""
    rows: int = 0
    columns: int = 0
    """Of a tile, or 0 for the plan's."""

    @property
    def output(self) -> str:
        """The output's type."""
        return self.dtype

    def __str__(self) -> str:
        """As the Mojo side reads it."""
        cut = self.candidate, self.rows, self.columns
        words = (self.dtype, int(self.placed), *cut, *geometry(self.conv))
        return "x".join(map(str, words))


#: Every number of channels; strides 1 to 5, dilations, padding that is not symmetric and wider than
#: the filter; widths and images of odd and of even pixels, so that rows of three channels begin at
#: every address; tiles beyond the image, of several images, several a block, loaded in several
#: turns; one tile of filters and several, ends of tiles, filters that are stored one by one; one
#: chunk and several; one row, volumes.
PROBLEMS: Final = (
    Problem(parse_problem("2x20x24x3:64x7x7", stride=2, padding=3)),
    Problem(parse_problem("3x15x21x3:32x3x3", stride=2, padding=(0, 1, 0, 1))),
    Problem(parse_problem("3x11x13x3:64x3x3", padding=1)),
    Problem(parse_problem("1x17x40x3:24x3x3", padding=1)),
    Problem(parse_problem("1x12x16x4:200x3x3", padding=1)),
    Problem(parse_problem("1x9x11x4:42x3x3", padding=1)),
    Problem(parse_problem("2x14x13x1:6x5x5", padding=2)),
    Problem(parse_problem("1x12x13x2:40x4x2", padding=(0, 1, 1, 0))),
    Problem(parse_problem("1x10x11x5:48x3x3", stride=(2, 1), padding=1)),
    Problem(parse_problem("1x9x10x6:32x3x3", padding=1)),
    Problem(parse_problem("1x9x9x7:16x3x2", padding=1)),
    Problem(parse_problem("1x14x14x8:64x5x5", stride=2, padding=2)),
    Problem(parse_problem("2x301x1:64x10", stride=5)),
    Problem(parse_problem("2x333x3:64x7", stride=2, padding=3)),
    Problem(parse_problem("1x4x10x12x3:64x3x5x5", stride=(1, 2, 2), padding=(1, 1, 2, 2, 2, 2))),
    Problem(parse_problem("1x5x6x7x4:32x2x3x3", dilation=(2, 1, 1), padding=1)),
    Problem(parse_problem("1x16x15x3:64x3x3", dilation=(3, 2), padding=(3, 3, 2, 2))),
    Problem(parse_problem("2x16x24x3:96x4x4", stride=4)),
    Problem(parse_problem("1x16x32x3:80x8x8", stride=8)),
    Problem(parse_problem("2x9x9x3:64x1x1")),
    Problem(parse_problem("2x9x17x3:128x3x3", padding=1), rows=2, columns=1),
    Problem(parse_problem("2x9x17x3:64x7x7", padding=3), rows=1, columns=17),
    Problem(parse_problem("2x9x17x8:32x3x3", padding=1), rows=5, columns=11),
    Problem(parse_problem("1x9x9x3:32x2x2", stride=3, padding=(0, 2, 5, 0))),
    Problem(parse_problem("1x3x150x3:32x3x3", padding=1)),
    Problem(parse_problem("5x1x1x3:64x3x3", padding=1)),
    Problem(parse_problem("1x50x71x3:16x3x3", stride=2, padding=1), rows=25, columns=35),
    Problem(parse_problem("1x34x40x4:16x5x5", padding=2), rows=33, columns=33),
    Problem(parse_problem("1x9000x2:16x5", stride=2, padding=2)),
    # Few pixels: blocks share the filters.
    Problem(parse_problem("1x500x1:200x16", stride=8)),
    Problem(parse_problem("1x9x14x3:72x3x3", padding=1), "float16"),
    Problem(parse_problem("1x9x14x4:16x3x3", stride=2, padding=1), "float16"),
    Problem(parse_problem("2x9x11x3:64x3x3", padding=1), placed=True),
    Problem(parse_problem("1x3x6x7x3:37x3x3x3", padding=1), placed=True),
    Problem(parse_problem("1x11x12x3:32x7x7", stride=2, padding=3), placed=True),
    Problem(parse_problem("1x11x12x3:64x7x7", stride=2, padding=3), candidate=0),
    Problem(parse_problem("1x11x12x3:128x7x7", padding=3), candidate=1),
    Problem(parse_problem("1x11x12x3:128x3x3", padding=1), candidate=2),
    Problem(parse_problem("1x12x12x4:130x6x6", padding=3), candidate=2),
    # Pixels that begin at any element: runs of all pixels, of rows that end within a warp's, of a
    # pixel each; one element, fewer than a chunk, several tiles of filters.
    Problem(parse_problem("1x2x18x20x3:45x1x7x7", stride=(1, 2, 2), padding=(0, 0, 3, 3, 3, 3))),
    Problem(parse_problem("1x9x14x3:9x3x3", padding=1), rows=4, columns=5),
    Problem(parse_problem("2x7x11x3:1x3x3", padding=1)),
    Problem(parse_problem("1x3x6x9x3:3x3x3x3", padding=1)),
    Problem(parse_problem("1x9x14x3:75x3x3", padding=1), "float16", rows=3, columns=14),
    # One channel: quads of 3, 2 and 4 columns; strips that end in a row, several turns of them.
    Problem(parse_problem("2x9x14x1:16x3x3", padding=1)),
    Problem(parse_problem("2x4x9x21x1:16x3x3x3", padding=1)),
    Problem(parse_problem("1x12x30x1:24x2x6", stride=(1, 2), padding=(0, 1, 3, 2))),
    Problem(parse_problem("1x20x41x1:10x4x4", stride=3, padding=2), "float16"),
    Problem(parse_problem("1x60x130x1:16x3x3", padding=1), rows=20, columns=130),
    Problem(parse_problem("1x9x13x1:16x3x2", dilation=(1, 2), padding=1)),
)

#: The first of them.
STRIPS: Final = len(PROBLEMS) - 6

#: What is refused, and a part of the sentence.
REFUSED: Final[tuple[tuple[str, dict[str, int], str], ...]] = (
    ("1x9x9x4:16x3x3", {"groups": 2}, "stem takes one group; here 2"),
    ("1x9x9x9:16x3x3", {}, "stem takes up to 8 input channels; here 9"),
    ("1x999x999x3:8x3x3", {"dilation": 400}, "with dilation (1, 400, 400); a block has 232448"),
)

SMS = 4

#: Quads that the producer loads at once, at most.
BATCH_QUADS = 8 * 128


@dataclass(frozen=True)
class Launch:
    """What the Mojo side passes for a problem."""

    kernel: str
    blocks: int
    threads: int
    shared_bytes: int
    tiles: int
    stage_quads: int
    epilogues: tuple[bytes, bytes]
    output: bytes
    geometry: bytes
    ptx: str

    @classmethod
    def of(cls, line: str, folder: Path) -> Launch:
        """Reads a line of the Mojo side."""
        name, *numbers, bare, fused, output, shape = line.split()
        blocks, threads, shared, tiles, quads = map(int, numbers)
        epilogues = bytes.fromhex(bare), bytes.fromhex(fused)
        text = (folder / f"{name}.ptx").read_text()
        passed = bytes.fromhex(output), bytes.fromhex(shape)
        return cls(name, blocks, threads, shared, tiles, quads, epilogues, *passed, text)


def run(
    problem: Problem, launch: Launch, operands: Operands, fused: bool, seed: int, text: str = ""
) -> Array:
    """Runs the kernel, or a changed text of it; returns its outputs."""
    machine = Machine("sm_90a", sms=SMS, seed=seed)
    dtype = problem.dtype
    output = machine.alloc(stored(np.zeros_like(operands.residual), dtype), written=False)
    epilogue = with_fused(
        launch.epilogues[fused],
        machine,
        operands.scale,
        operands.bias,
        stored(operands.residual, dtype),
    )
    machine.load(text or launch.ptx).launch(
        grid=launch.blocks,
        block=launch.threads,
        shared_bytes=launch.shared_bytes,
        args=[
            machine.alloc(stored(operands.activation, dtype)),
            machine.alloc(stored(operands.filter, dtype)),
            epilogue,
            with_pointer(launch.output, OUTPUT, output),
            launch.geometry,
        ],
        budget=40_000_000,
    )
    return loaded(output.read(), dtype)


def _emit(factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    refused = (Problem(parse_problem(text, **given)) for text, given, _ in REFUSED)
    return ptx.emit_once("emit_stem", factory, *map(str, (*PROBLEMS, *refused)))


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[Launch]:
    """Of the problems, with the kernels' PTX."""
    folder, lines = _emit(tmp_path_factory)
    return [Launch.of(line, folder) for line in lines[: len(PROBLEMS)]]


@bare_or_fused(PROBLEMS)
def test_sums_are_exact(launches: list[Launch], index: int, fused: bool) -> None:
    problem = PROBLEMS[index]
    operands = Operands.random(problem.conv, index)
    found = run(problem, launches[index], operands, fused, seed=index)
    assert np.array_equal(found, operands.expected(problem, fused))


@pytest.mark.parametrize("index", [0, 1, 2, 6, 11, 12, 16, STRIPS])
def test_outputs_are_of_their_own_pixels(launches: list[Launch], index: int) -> None:
    problem = PROBLEMS[index]
    taps = int(problem.conv.taps)
    for tap in {0, taps - 1}:
        operands = Operands.coordinates(problem.conv, tap)
        found = run(problem, launches[index], operands, fused=False, seed=tap)
        assert np.array_equal(found, operands.expected(problem, fused=False))


@pytest.mark.parametrize("index", [0, 2, 4, 6, 7, STRIPS])
def test_what_is_not_finite_stays_in_its_pixels(launches: list[Launch], index: int) -> None:
    """Channels that are not there, and taps behind the last, multiply zeros."""
    problem = PROBLEMS[index]
    operands = Operands.random(problem.conv, index)
    operands.activation[0, 0, 0, -1] = np.inf
    operands.activation[0, 3, 3, 0] = np.inf
    operands.filter[:] = np.abs(operands.filter) + 1
    found = run(problem, launches[index], operands, fused=False, seed=1)
    expected = operands.expected(problem, fused=False)
    assert np.isinf(expected).any()
    assert np.isfinite(expected).any()
    assert np.array_equal(found, expected)


def test_every_kernel_runs_in_every_way(launches: list[Launch]) -> None:
    kernels = {launch.kernel for launch in launches}
    assert {f"bfloat16-0-{index}" for index in range(3)} <= kernels
    assert any(launch.tiles > launch.blocks for launch in launches)
    assert any(launch.tiles < launch.blocks for launch in launches)
    many = {
        problem.conv.group_channels
        for problem, launch in zip(PROBLEMS, launches, strict=True)
        if launch.stage_quads > BATCH_QUADS
    }
    assert {2, 3, 4} <= many


def test_refusals(tmp_path_factory: pytest.TempPathFactory) -> None:
    _, lines = _emit(tmp_path_factory)
    for line, (_, _, words) in zip(lines[len(PROBLEMS) :], REFUSED, strict=True):
        assert line.startswith("refused ")
        assert words in line


@pytest.mark.parametrize("pattern", [r"mbarrier\.arrive[^;]*;", r"wgmma\.wait_group[^;]*;"])
def test_a_broken_kernel_is_reported(launches: list[Launch], pattern: str) -> None:
    index = 2
    problem, launch = PROBLEMS[index], launches[index]
    text, found = re.subn(pattern, "", launch.ptx)
    assert found
    operands = Operands.random(problem.conv, index)
    with pytest.raises(EmulatorError):
        run(problem, launch, operands, fused=False, seed=0, text=text)
