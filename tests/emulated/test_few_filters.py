"""The GPU's kernels for few filters, as Mojo compiles them, are exact."""

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


class Tiling(NamedTuple):
    """How a block cuts a problem: warps along h, w and the channels, whether a warp's multiplies
    are neighbours along h, chunks of a slice, stages. All 0: what the plan takes."""

    rows: int = 0
    columns: int = 0
    parts: int = 0
    along_rows: int = 0
    chunks: int = 0
    stages: int = 0


class Problem(NamedTuple):
    """A convolution, and what runs it."""

    tiling: Tiling
    conv: ConvProblem
    dtype: str = "bfloat16"
    out: str = ""
    placed: bool = False
    """Whether the graph's work that asks where pixels are is fused behind it."""

    @property
    def output(self) -> str:
        """The output's type, and the residual's."""
        return self.out or self.dtype

    def __str__(self) -> str:
        """As the Mojo side reads it."""
        words = (self.dtype, self.output, int(self.placed), *self.tiling, *geometry(self.conv))
        return "x".join(map(str, words))


PLANNED: Final = Tiling()

#: Every number of filters; tiles beyond the image in both directions, several of both and of
#: images; one slice and several, ends of slices; 2 and 3 stages; joined rows and not; strides,
#: dilations, padding that is not symmetric; one row, volumes of slices; outputs by vectors, runs of
#: pixels and elements.
PROBLEMS: Final = (
    Problem(Tiling(1, 2, 1, 1, 2, 3), parse_problem("2x9x35x16:16x3x3", padding=1)),
    Problem(Tiling(2, 1, 1, 1, 2, 2), parse_problem("1x11x20x32:16x3x3", padding=1)),
    Problem(Tiling(2, 2, 1, 1, 2, 3), parse_problem("1x9x40x16:1x3x3", padding=1)),
    Problem(Tiling(1, 1, 2, 1, 4, 2), parse_problem("1x6x17x72:4x3x3", padding=1)),
    Problem(Tiling(2, 1, 4, 1, 8, 2), parse_problem("2x5x16x128:3x3x3", padding=1)),
    Problem(Tiling(1, 2, 1, 0, 2, 3), parse_problem("1x3x150x8:1x1x5", padding=(0, 0, 2, 2))),
    Problem(
        Tiling(1, 1, 1, 1, 4, 3), parse_problem("1x9x18x24:12x3x3", stride=2, padding=(0, 1, 2, 0))
    ),
    Problem(Tiling(2, 1, 1, 0, 2, 2), parse_problem("1x7x33x40:16x3x3", stride=(1, 2), padding=1)),
    Problem(Tiling(1, 1, 1, 1, 2, 2), parse_problem("1x15x9x16:9x3x3", stride=(2, 1), padding=1)),
    Problem(Tiling(1, 2, 1, 1, 2, 3), parse_problem("1x9x20x16:5x3x2", dilation=(2, 3), padding=3)),
    Problem(Tiling(2, 2, 1, 1, 4, 2), parse_problem("1x10x19x24:7x5x7", padding=(2, 2, 3, 3))),
    Problem(Tiling(1, 1, 4, 0, 10, 3), parse_problem("3x7x9x72:12x1x1")),
    Problem(Tiling(1, 1, 1, 0, 10, 2), parse_problem("2x5x13x72:13x1x1")),
    Problem(Tiling(1, 2, 2, 0, 4, 3), parse_problem("2x6x16x64:16x1x1")),
    Problem(Tiling(1, 2, 1, 1, 2, 2), parse_problem("2x9x11x16:3x1x1", stride=2)),
    Problem(Tiling(1, 1, 1, 1, 2, 2), parse_problem("2x6x17x16:16x2x2", padding=(1, 0, 0, 1))),
    Problem(Tiling(1, 2, 1, 0, 2, 3), parse_problem("2x75x24:11x5", stride=2, padding=2)),
    Problem(
        Tiling(1, 1, 1, 1, 2, 2), parse_problem("1x3x6x9x16:8x1x3x3", padding=(0, 0, 1, 1, 1, 1))
    ),
    Problem(Tiling(1, 1, 1, 1, 2, 2), parse_problem("1x4x4x8:8x3x3", padding=7)),
    Problem(Tiling(1, 1, 1, 1, 2, 2), parse_problem("1x6x24x16:5x2x1")),
    Problem(PLANNED, parse_problem("1x16x32x40:12x3x3", padding=1)),
    Problem(PLANNED, parse_problem("1x1x1x16:4x1x1", stride=2)),
    Problem(Tiling(1, 1, 1, 1, 2, 2), parse_problem("1x8x16x24:16x3x3", padding=1), "float16"),
    Problem(Tiling(2, 1, 1, 1, 2, 3), parse_problem("1x8x16x8:3x3x3", padding=1), "float16"),
    Problem(Tiling(1, 1, 1, 1, 2, 2), parse_problem("1x6x16x12:9x3x3", padding=1), "float32"),
    Problem(Tiling(1, 2, 1, 1, 4, 2), parse_problem("1x6x16x16:16x3x3", padding=1), "float32"),
    Problem(
        Tiling(1, 2, 1, 1, 2, 2),
        parse_problem("1x7x17x16:12x3x3", padding=1),
        "bfloat16",
        "float32",
    ),
    Problem(
        Tiling(1, 2, 1, 1, 2, 2), parse_problem("1x7x16x16:2x3x3", padding=1), "bfloat16", "float32"
    ),
    Problem(
        Tiling(1, 2, 1, 1, 2, 2),
        parse_problem("1x7x16x16:15x3x3", padding=1),
        "bfloat16",
        "float32",
    ),
    Problem(Tiling(1, 1, 1, 1, 2, 2), parse_problem("2x7x17x16:16x3x3", padding=1), placed=True),
    Problem(Tiling(1, 1, 2, 1, 4, 2), parse_problem("2x7x16x32:3x3x3", padding=1), placed=True),
    Problem(Tiling(1, 1, 1, 0, 2, 2), parse_problem("2x3x6x9x16:12x1x1x1"), placed=True),
    Problem(
        Tiling(1, 1, 1, 1, 2, 2),
        parse_problem("1x3x6x9x16:13x1x3x3", stride=(1, 2, 2)),
        placed=True,
    ),
)

#: What is refused, and a part of the sentence.
REFUSED: Final[tuple[tuple[str, dict[str, int], str], ...]] = (
    ("1x9x9x16:16x3x3", {"groups": 2}, "few_filters takes one group; here 2"),
    ("1x9x9x16:17x3x3", {}, "few_filters takes up to 16 filters; here 17"),
    ("1x9x9x12:8x3x3", {}, "pixels in multiples of 16 bytes; here 12 channels of 24 bytes"),
    ("1x9x9x9x16:8x2x3x3", {}, "takes filters of one tap along d without stride and padding there"),
    ("1x9x9x16:8x3x8", {"padding": 4}, "takes up to 7 taps along h and w; here (1, 3, 8)"),
    ("1x9x9x16:8x3x3", {"stride": 3}, "takes strides 1 and 2 along h and w; here (1, 3, 3)"),
    ("1x9x9x4096:16x3x3", {}, "bytes of shared memory for 16 filters (1, 3, 3) of 4096 channels"),
    ("1x999x999x16:8x3x3", {"dilation": 400}, "with dilation (1, 400, 400); a block has 101376"),
)

SMS = 4


@dataclass(frozen=True)
class Launch:
    """What the Mojo side passes for a problem."""

    kernel: str
    tiles: int
    threads: int
    shared_bytes: int
    joined: int
    stores: int
    epilogues: tuple[bytes, bytes]
    output: bytes
    geometry: bytes
    ptx: str

    @classmethod
    def of(cls, line: str, folder: Path) -> Launch:
        """Reads a line of the Mojo side."""
        name, *numbers, bare, fused, output, shape = line.split()
        tiles, threads, shared, joined, stores = map(int, numbers)
        epilogues = bytes.fromhex(bare), bytes.fromhex(fused)
        text = (folder / f"{name}.ptx").read_text()
        passed = bytes.fromhex(output), bytes.fromhex(shape)
        return cls(name, tiles, threads, shared, joined, stores, epilogues, *passed, text)


def run(
    problem: Problem, launch: Launch, operands: Operands, fused: bool, seed: int, text: str = ""
) -> Array:
    """Runs the kernel, or a changed text of it, on fewer blocks than tiles; returns its outputs."""
    machine = Machine("sm_90a", sms=SMS, seed=seed)
    out = problem.output
    output = machine.alloc(stored(np.zeros_like(operands.residual), out), written=False)
    epilogue = with_fused(
        launch.epilogues[fused],
        machine,
        operands.scale,
        operands.bias,
        stored(operands.residual, out),
    )
    machine.load(text or launch.ptx).launch(
        grid=min(launch.tiles, SMS),
        block=launch.threads,
        shared_bytes=launch.shared_bytes,
        args=[
            int(machine.alloc(stored(operands.activation, problem.dtype))).to_bytes(8, "little"),
            machine.alloc(stored(operands.filter, problem.dtype)),
            epilogue,
            with_pointer(launch.output, OUTPUT, output),
            launch.geometry,
        ],
        budget=40_000_000,
    )
    return loaded(output.read(), out)


def _emit(factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    refused = (Problem(PLANNED, parse_problem(text, **given)) for text, given, _ in REFUSED)
    return ptx.emit_once("emit_few_filters", factory, *map(str, (*PROBLEMS, *refused)))


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


@pytest.mark.parametrize("index", [0, 4, 6, 8, 10, 12])
def test_outputs_are_of_their_own_pixels(launches: list[Launch], index: int) -> None:
    problem = PROBLEMS[index]
    taps = int(problem.conv.taps)
    for tap in {0, taps // 2, taps - 1}:
        operands = Operands.coordinates(problem.conv, tap)
        found = run(problem, launches[index], operands, fused=False, seed=tap)
        assert np.array_equal(found, operands.expected(problem, fused=False))


@pytest.mark.parametrize("index", [0, 3, 6, 11, 12])
def test_what_is_not_finite_stays_in_its_pixels(launches: list[Launch], index: int) -> None:
    """Zeros beside the image, and behind the last channel, multiply no number."""
    problem = PROBLEMS[index]
    operands = Operands.random(problem.conv, index)
    operands.activation[0, 0, 0, -1] = np.inf
    operands.filter[:] = np.abs(operands.filter) + 1
    found = run(problem, launches[index], operands, fused=False, seed=1)
    expected = operands.expected(problem, fused=False)
    assert np.isinf(expected).any()
    assert np.isfinite(expected).any()
    assert np.array_equal(found, expected)


def test_every_kernel_runs_in_every_way(launches: list[Launch]) -> None:
    kernels = {launch.kernel for launch in launches}
    assert {f"bfloat16-bfloat16-0-{filters}" for filters in (8, 16)} <= kernels
    assert {(launch.joined, launch.stores) for launch in launches} == {
        (joined, stores) for joined in (0, 1) for stores in (0, 1, 2)
    }
    assert any(launch.tiles > SMS for launch in launches)


def test_refusals(tmp_path_factory: pytest.TempPathFactory) -> None:
    _, lines = _emit(tmp_path_factory)
    for line, (_, _, words) in zip(lines[len(PROBLEMS) :], REFUSED, strict=True):
        assert line.startswith("refused ")
        assert words in line


#: Name, change of the text, and what is reported.
BROKEN: Final = (
    ("nobody waits for the copies", r"cp\.async\.wait_group \d+;"),
    ("a barrier is left out", r"barrier\.sync \d+;|bar\.sync \d+;|bar\.sync \t?\d+;"),
)


@pytest.mark.parametrize("pattern", [entry[1] for entry in BROKEN], ids=[e[0] for e in BROKEN])
def test_a_broken_kernel_is_reported(launches: list[Launch], pattern: str) -> None:
    index = 1
    problem, launch = PROBLEMS[index], launches[index]
    text, found = re.subn(pattern, "", launch.ptx)
    assert found
    operands = Operands.random(problem.conv, index)
    reports = set()
    for seed in range(8):
        try:
            run(problem, launch, operands, fused=False, seed=seed, text=text)
        except EmulatorError as error:
            reports.add(type(error).__name__)
            break
    assert "RaceError" in reports
