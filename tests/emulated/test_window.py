"""Hopper's window kernels, as Mojo compiles them, are exact."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

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
from ptxemu import EmulatorError, Machine, TensorMap
from ptxemu.tma import DataType, L2Promotion, Swizzle


class Tiling(NamedTuple):
    """How a block cuts a problem: whether a multiply's pixels are a square, multiplies along h and
    w, parts of a sum, bytes of a row. All 0: what the plan takes."""

    square: int = 0
    rows: int = 0
    columns: int = 0
    parts: int = 0
    row_bytes: int = 0


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

#: Every number of filters, and those between; every length of a row; squares of pixels and rows of
#: them, tiles of several multiplies in both directions and beyond the image; several images; slices
#: and ends of slices, parts of a sum; strides, dilations, padding that is not symmetric; one row,
#: also of several boxes; taps, stride and padding along d; one tap, of images and of volumes.
PROBLEMS: Final = (
    Problem(Tiling(1, 2, 1, 1, 32), parse_problem("2x9x35x16:16x3x3", padding=1)),
    Problem(Tiling(1, 1, 2, 1, 64), parse_problem("1x11x20x32:16x3x3", padding=1)),
    Problem(Tiling(0, 2, 1, 1, 32), parse_problem("1x9x70x16:1x3x3", padding=1)),
    Problem(Tiling(1, 1, 1, 2, 64), parse_problem("1x6x17x72:4x3x3", padding=1)),
    Problem(Tiling(1, 1, 1, 4, 64), parse_problem("2x5x16x128:3x3x3", padding=1)),
    Problem(Tiling(0, 1, 2, 1, 32), parse_problem("1x3x150x8:1x1x5", padding=(0, 0, 2, 2))),
    Problem(
        Tiling(1, 1, 1, 1, 64), parse_problem("1x9x18x24:12x3x3", stride=2, padding=(0, 1, 2, 0))
    ),
    Problem(Tiling(0, 2, 1, 1, 32), parse_problem("1x7x133x40:16x3x3", stride=(1, 2), padding=1)),
    Problem(Tiling(1, 1, 1, 1, 32), parse_problem("1x15x9x16:9x3x3", stride=(2, 1), padding=1)),
    Problem(Tiling(1, 2, 2, 1, 32), parse_problem("1x9x20x16:5x3x2", dilation=(2, 3), padding=3)),
    Problem(Tiling(1, 1, 3, 1, 64), parse_problem("1x10x19x24:7x5x7", padding=(2, 2, 3, 3))),
    Problem(Tiling(0, 1, 2, 2, 64), parse_problem("3x7x9x72:12x1x1")),
    Problem(Tiling(1, 1, 1, 1, 32), parse_problem("2x9x11x16:3x1x1", stride=2)),
    Problem(Tiling(1, 2, 1, 1, 32), parse_problem("2x6x17x16:16x2x2", padding=(1, 0, 0, 1))),
    Problem(Tiling(0, 1, 2, 1, 64), parse_problem("2x275x24:11x5", stride=2, padding=2)),
    Problem(
        Tiling(1, 1, 1, 1, 32), parse_problem("1x3x6x9x16:8x1x3x3", padding=(0, 0, 1, 1, 1, 1))
    ),
    Problem(Tiling(1, 1, 2, 2, 128), parse_problem("1x3x6x20x96:3x3x3x3", padding=1)),
    Problem(
        Tiling(0, 1, 1, 1, 64),
        parse_problem("2x5x4x9x32:8x2x3x3", stride=(2, 1, 1), dilation=(2, 1, 1), padding=1),
    ),
    Problem(Tiling(1, 1, 1, 1, 32), parse_problem("1x4x4x8:8x3x3", padding=7)),
    Problem(Tiling(0, 1, 4, 1, 64), parse_problem("2x600x32:32x11", dilation=5, padding=25)),
    Problem(Tiling(0, 1, 2, 1, 128), parse_problem("1x150x64:64x7", padding=3)),
    Problem(Tiling(1, 2, 1, 1, 64), parse_problem("1x16x20x32:32x3x3", padding=1)),
    Problem(Tiling(1, 1, 2, 1, 64), parse_problem("1x9x16x32:64x3x3", padding=1)),
    Problem(Tiling(1, 1, 1, 2, 64), parse_problem("1x8x10x40:40x3x3", padding=1)),
    Problem(Tiling(1, 1, 1, 1, 128), parse_problem("1x9x8x104:20x3x3", padding=1)),
    Problem(Tiling(1, 1, 1, 1, 64), parse_problem("1x8x9x32:50x2x3", padding=1)),
    Problem(Tiling(1, 1, 2, 2, 64), parse_problem("1x9x17x64:24x3x3", stride=2, padding=1)),
    Problem(PLANNED, parse_problem("1x16x32x40:12x3x3", padding=1)),
    Problem(PLANNED, parse_problem("1x1x1x16:4x1x1", stride=2)),
    Problem(PLANNED, parse_problem("5x1x1x16:4x1x1", stride=2)),
    Problem(PLANNED, parse_problem("1x24x20x64:64x3x3", stride=2, padding=1)),
    Problem(Tiling(0, 1, 3, 1, 32), parse_problem("2x3x6x20x16:3x1x1x1")),
    Problem(Tiling(0, 1, 1, 1, 64), parse_problem("3x7x13x32:32x1x1")),
    Problem(Tiling(0, 1, 2, 1, 128), parse_problem("1x11x19x64:50x1x1")),
    Problem(Tiling(1, 1, 1, 1, 32), parse_problem("1x3x6x9x16:16x3x3x3", padding=1)),
    Problem(Tiling(1, 1, 1, 1, 64), parse_problem("1x8x16x24:16x3x3", padding=1), "float16"),
    Problem(Tiling(1, 2, 1, 1, 32), parse_problem("1x8x16x8:3x3x3", padding=1), "float16"),
    Problem(Tiling(1, 1, 1, 1, 64), parse_problem("1x6x16x12:9x3x3", padding=1), "float32"),
    Problem(Tiling(1, 1, 2, 2, 32), parse_problem("1x6x16x16:16x3x3", padding=1), "float32"),
    Problem(Tiling(0, 1, 1, 1, 128), parse_problem("1x90x32:64x3", padding=1), "float32"),
    Problem(
        Tiling(1, 2, 1, 1, 32),
        parse_problem("1x7x17x16:12x3x3", padding=1),
        "bfloat16",
        "float32",
    ),
    Problem(
        Tiling(1, 1, 1, 1, 32),
        parse_problem("1x7x16x16:32x3x3", padding=1),
        "bfloat16",
        "float32",
    ),
    Problem(Tiling(1, 1, 1, 1, 32), parse_problem("2x7x17x16:16x3x3", padding=1), placed=True),
    Problem(Tiling(0, 1, 1, 2, 32), parse_problem("2x7x16x32:3x3x3", padding=1), placed=True),
    Problem(Tiling(0, 1, 1, 1, 32), parse_problem("2x3x6x9x16:12x1x1x1"), placed=True),
    Problem(
        Tiling(1, 1, 1, 1, 64),
        parse_problem("1x3x6x19x16:56x2x3x3", stride=(1, 2, 2)),
        placed=True,
    ),
)

#: What is refused, and a part of the sentence.
REFUSED: Final[tuple[tuple[str, dict[str, int], str], ...]] = (
    ("1x9x9x16:16x3x3", {"groups": 2}, "window takes one group; here 2"),
    ("1x9x9x16:65x3x3", {}, "window takes up to 64 filters; here 65"),
    ("1x9x9x12:8x3x3", {}, "pixels in multiples of 16 bytes; here 12 channels of 24 bytes"),
    ("1x40x40x16:8x17x17", {"padding": 8}, "takes up to 256 taps; here (1, 17, 17)"),
    ("1x9x9x16:8x3x3", {"stride": 3}, "takes strides 1 and 2 along w; here (1, 3, 3)"),
    ("1x9x9x2056:16x3x3", {}, "pixels of up to 4096 bytes; here 2056 channels of 4112 bytes"),
    ("1x9x9x2048:16x3x3", {}, "bytes of shared memory for 16 filters (1, 3, 3) of 2048 channels"),
    ("1x999x999x16:8x3x3", {"dilation": 400}, "windows of up to 256 rows and columns; here filter"),
)

SMS = 4

_KINDS = {
    "bfloat16": DataType.BFLOAT16,
    "float16": DataType.FLOAT16,
    "float32": DataType.TFLOAT32,
}
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_SWIZZLES = {32: Swizzle.B32, 64: Swizzle.B64, 128: Swizzle.B128}


@dataclass(frozen=True)
class Launch:
    """What the Mojo side passes for a problem."""

    kernel: str
    tiles: int
    threads: int
    shared_bytes: int
    row_bytes: int
    stages: int
    together: int
    boxes: int
    step: int
    """Of the activation's boxes along w."""
    tensors: tuple[tuple[int, ...], ...]
    """Extents and box of the activation, extents, steps and box of the filter."""
    epilogues: tuple[bytes, bytes, bytes]
    """None; with a scale; without."""
    output: bytes
    geometry: bytes
    ptx: str

    @classmethod
    def of(cls, line: str, folder: Path) -> Launch:
        """Reads a line of the Mojo side."""
        words = line.split()
        tiles, threads, shared, row, stages, together, boxes = map(int, words[1:8])
        views = [tuple(map(int, word.split(","))) for word in (*words[8:10], *words[11:14])]
        *epilogues, output, shape = map(bytes.fromhex, words[14:])
        text = (folder / f"{words[0]}.ptx").read_text()
        block = threads, shared, row, stages, together, boxes
        bare, scaled, unscaled = epilogues
        passed = (bare, scaled, unscaled), output, shape
        return cls(words[0], tiles, *block, int(words[10]), tuple(views), *passed, text)

    def maps(self, dtype: str, activation: int, kernel: int) -> tuple[TensorMap, TensorMap]:
        """The descriptors of activation and filter."""
        image, box, sizes, steps, taps = self.tensors
        size = _BYTES[dtype]
        options: dict[str, Any] = {
            "swizzle": _SWIZZLES[self.row_bytes],
            "l2_promotion": L2Promotion.L2_256B,
        }
        strides = [size * int(np.prod(image[:axis])) for axis in range(1, 5)]
        every = (1, self.step, 1, 1, 1)
        kind = _KINDS[dtype]
        return (
            TensorMap.tiled(kind, activation, image, strides, box, every, **options),
            TensorMap.tiled(kind, kernel, sizes, [size * n for n in steps[1:]], taps, **options),
        )


def run(
    problem: Problem, launch: Launch, operands: Operands, fused: int, seed: int, text: str = ""
) -> Array:
    """Runs the kernel, or a changed text of it, on fewer blocks than tiles, with one of the
    epilogues; returns its outputs."""
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
    activation, kernel = (
        machine.alloc(stored(values, problem.dtype))
        for values in (operands.activation, operands.filter)
    )
    machine.load(text or launch.ptx).launch(
        grid=min(launch.tiles, SMS),
        block=launch.threads,
        shared_bytes=launch.shared_bytes,
        args=[
            *launch.maps(problem.dtype, int(activation), int(kernel)),
            epilogue,
            with_pointer(launch.output, OUTPUT, output),
            launch.geometry,
        ],
        budget=40_000_000,
    )
    return loaded(output.read(), out)


def _emit(factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    refused = (Problem(PLANNED, parse_problem(text, **given)) for text, given, _ in REFUSED)
    return ptx.emit_once("emit_window", factory, *map(str, (*PROBLEMS, *refused)))


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


@pytest.mark.parametrize("index", range(len(PROBLEMS)), ids=map(str, PROBLEMS))
def test_sums_without_a_scale_are_exact(launches: list[Launch], index: int) -> None:
    """They begin with the bias; an activation that takes a loop, another behind the residual."""
    problem = PROBLEMS[index]
    operands = Operands.random(problem.conv, index)
    found = run(problem, launches[index], operands, 2, seed=index)
    assert np.array_equal(found, operands.expected(problem, fused=True, scaled=False))


@pytest.mark.parametrize("index", [0, 4, 6, 8, 14, 17, 22, 25])
def test_outputs_are_of_their_own_pixels(launches: list[Launch], index: int) -> None:
    problem = PROBLEMS[index]
    taps = int(problem.conv.taps)
    for tap in {0, taps // 2, taps - 1}:
        operands = Operands.coordinates(problem.conv, tap)
        found = run(problem, launches[index], operands, fused=False, seed=tap)
        assert np.array_equal(found, operands.expected(problem, fused=False))


@pytest.mark.parametrize("index", [0, 3, 6, 11, 19])
def test_what_is_not_finite_stays_in_its_pixels(launches: list[Launch], index: int) -> None:
    """Zeros beside the image, and behind the last channel, multiply no number."""
    problem = PROBLEMS[index]
    operands = Operands.random(problem.conv, index)
    operands.activation[(0,) * (operands.activation.ndim - 1)][-1] = np.inf
    operands.filter[:] = np.abs(operands.filter) + 1
    found = run(problem, launches[index], operands, fused=False, seed=1)
    expected = operands.expected(problem, fused=False)
    assert np.isinf(expected).any()
    assert np.isfinite(expected).any()
    assert np.array_equal(found, expected)


def test_every_kernel_runs_in_every_way(launches: list[Launch]) -> None:
    kernels = {launch.kernel for launch in launches}
    assert {f"bfloat16-bfloat16-0-{filters}" for filters in (8, 16, 32, 64)} <= kernels
    assert {(launch.row_bytes, launch.together) for launch in launches} == {
        (row_bytes, together) for row_bytes in (32, 64, 128) for together in (0, 1)
    }
    assert any(launch.tiles > SMS for launch in launches)
    assert {launch.boxes for launch in launches} == {1, 2}
    assert {launch.step for launch in launches} == {1, 2}


def test_refusals(tmp_path_factory: pytest.TempPathFactory) -> None:
    _, lines = _emit(tmp_path_factory)
    for line, (_, _, words) in zip(lines[len(PROBLEMS) :], REFUSED, strict=True):
        assert line.startswith("refused ")
        assert words in line


@pytest.mark.parametrize("filters", [8, 16, 32, 64])
def test_registers_suffice(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, filters: int
) -> None:
    """Nothing is spilled, and no multiply waits for the one before it."""
    folder, _ = _emit(tmp_path_factory)
    report = ptx.assemble(folder / f"bfloat16-bfloat16-0-{filters}.ptx", tmp_path)
    assert ptx.NO_SPILLS in report
    assert "serialized" not in report


def test_a_broken_kernel_is_reported(launches: list[Launch]) -> None:
    index = 1
    problem, launch = PROBLEMS[index], launches[index]
    text, found = re.subn(r"wgmma\.wait_group\.sync\.aligned\s+0;", "", launch.ptx)
    assert found
    operands = Operands.random(problem.conv, index)
    with pytest.raises(EmulatorError):
        for seed in range(8):
            run(problem, launch, operands, fused=False, seed=seed, text=text)
