"""The dp4a kernel of the interleaved layouts, as Mojo compiles it, is exact."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from tests import ptx
from tests.emulated.convolution import with_pointer
from tests.emulated.operands import OUTPUT, with_fused
from tests.emulated.values import loaded, stored
from tests.emulated.ways import bare_or_fused
from tests.reference import conv_reference

from maxconv._problem import ConvProblem
from maxconv._problems import parse_problem
from maxconv.bench.gpu.operands import geometry
from ptxemu import EmulatorError, Machine

Array = npt.NDArray[Any]

#: Tiles of `tests/mojo/emit_dp4a.mojo`: filters and pixels of each; and the one of the plan.
TILES: Final = ((64, 128), (32, 32))
LARGE, SMALL, PLANNED = 0, 1, 9

#: Accesses: words; vectors of filters; of pixels too.
WORDS, FILTERS, PIXELS = 0, 1, 2


class Problem(NamedTuple):
    """A convolution, and what runs it."""

    tile: int
    conv: ConvProblem
    out: str = "float32"
    alignment: int = 16

    def __str__(self) -> str:
        """As the Mojo side reads it."""
        return "x".join(map(str, (self.out, self.tile, self.alignment, *geometry(self.conv))))


#: Tiles beyond the pixels and the filters, several of both, of one image and of several; fewer
#: channels than a step, whole steps, and steps that end within one; strides, dilations, paddings.
PROBLEMS: Final = (
    Problem(LARGE, parse_problem("2x9x10x24:72x3x3", padding=1)),
    Problem(LARGE, parse_problem("1x13x11x64:40x1x1")),
    Problem(LARGE, parse_problem("2x12x13x36:68x1x1")),
    Problem(LARGE, parse_problem("3x9x8x44:132x2x3", stride=(2, 1), padding=(1, 0, 2, 1))),
    Problem(LARGE, parse_problem("1x12x12x32:64x1x1"), alignment=8),
    Problem(SMALL, parse_problem("1x7x9x4:8x3x3", padding=1)),
    Problem(SMALL, parse_problem("1x9x11x4:4x7x7", stride=2, padding=3)),
    Problem(SMALL, parse_problem("2x8x9x12:36x3x2", dilation=(2, 3), padding=(0, 3, 1, 2))),
    Problem(SMALL, parse_problem("2x6x6x40:36x1x1")),
    Problem(SMALL, parse_problem("2x5x5x132:28x1x1")),
    Problem(SMALL, parse_problem("1x10x7x32:32x1x1", stride=(3, 2))),
    Problem(SMALL, parse_problem("1x1x70x64:64x1x5", padding=(0, 0, 2, 2))),
    Problem(SMALL, parse_problem("1x40x1x20:12x3x1", stride=(2, 1))),
    Problem(SMALL, parse_problem("2x6x5x28:36x3x3", padding=1), alignment=4),
    Problem(SMALL, parse_problem("1x3x3x4:4x3x3")),
    Problem(PLANNED, parse_problem("1x6x6x16:256x1x1")),
    Problem(SMALL, parse_problem("1x5x7x20:40x3x3", padding=1), "bfloat16"),
    Problem(SMALL, parse_problem("1x5x7x20:40x3x3", padding=1), "float16"),
    Problem(SMALL, parse_problem("3x5x7x20:40x3x3", padding=1), "int8"),
    Problem(LARGE, parse_problem("2x8x12x20:72x1x1"), "int8"),
)


def shapes(problem: ConvProblem) -> list[tuple[int, ...]]:
    """Of activation and output, channels last, and between them of the filter, ``[K, R, S, C]``."""
    filter = problem.filter_shape("KRSC")
    every = (problem.input_shape, filter, problem.output_shape)
    return [tuple(int(size) for size in shape) for shape in every]


def interleaved(x: Array) -> Array:
    """``[N, H, W, C]`` as ``[N, C / 4, H, W, 4]``."""
    n, h, w, c = x.shape
    return np.ascontiguousarray(np.moveaxis(x.reshape(n, h, w, c // 4, 4), 3, 1))


def interleaved_filter(filter: Array) -> Array:
    """``[K, R, S, C]`` as ``[C / 4, R, S, K, 4]``."""
    k, r, s, c = filter.shape
    return np.ascontiguousarray(filter.reshape(k, r, s, c // 4, 4).transpose(3, 1, 2, 0, 4))


@dataclass(frozen=True)
class Launch:
    """What the Mojo side passes for a problem."""

    kernel: str
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    epilogues: tuple[bytes, bytes]
    output: bytes
    geometry: bytes
    ptx: str

    @classmethod
    def of(cls, line: str, folder: Path) -> Launch:
        """Reads a line of the Mojo side."""
        name, *numbers, bare, fused, output, shape = line.split()
        blocks, rows, threads, shared = map(int, numbers)
        epilogues = bytes.fromhex(bare), bytes.fromhex(fused)
        text = (folder / f"{name}.ptx").read_text()
        return cls(
            kernel=name,
            grid=(blocks, rows),
            threads=threads,
            shared_bytes=shared,
            epilogues=epilogues,
            output=bytes.fromhex(output),
            geometry=bytes.fromhex(shape),
            ptx=text,
        )


@dataclass(frozen=True)
class Operands:
    """Channels last; the epilogue's are small powers of two and integers, exact in float32."""

    activation: Array
    filter: Array
    scale: Array
    bias: Array
    residual: Array

    @classmethod
    def random(cls, problem: ConvProblem, seed: int) -> Operands:
        """Draws int8 of the full range, its least included."""
        rng = np.random.default_rng(seed)
        shape, filters, _ = shapes(problem)
        activation = rng.integers(-128, 128, shape).astype(np.int8)
        filter = rng.integers(-128, 128, filters).astype(np.int8)
        for values in (activation, filter):
            values.reshape(-1)[:: max(1, values.size // 7)] = -128
        return cls(activation, filter, *_epilogue(problem, rng))

    @classmethod
    def coded(cls, problem: ConvProblem) -> Operands:
        """Activations that name their coordinates; each filter takes one channel of one tap."""
        shape, filters, _ = shapes(problem)
        codes = np.indices(shape).reshape(4, -1).T @ np.array([53, 17, 29, 3])
        activation = (codes % 251 - 125).astype(np.int8).reshape(shape)
        filter = np.zeros(filters, np.int8)
        each = np.arange(filters[0])
        filter.reshape(filters[0], -1)[each, each * 7 % filter[0].size] = 1
        return cls(activation, filter, *_epilogue(problem, np.random.default_rng(0)))

    def expected(self, problem: ConvProblem, out: str, fused: bool) -> Array:
        """The outputs, channels last, rounded to their type."""
        # Integers below 2**53: what float64 holds exactly, as int64 would.
        total = conv_reference(
            self.activation,
            self.filter,
            stride=problem.stride,
            dilation=problem.dilation,
            pad_before=problem.pad_before,
            pad_after=problem.pad_after,
        )
        assert np.abs(total).max() < 2**31
        total = total.astype(np.float32)
        if fused:
            total = np.maximum(total * self.scale + self.bias, 0) + self.residual
        with np.errstate(over="ignore"):
            return loaded(stored(total, out), out)


def _epilogue(problem: ConvProblem, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Scale, bias and residual."""
    _, (filters, *_), output = shapes(problem)
    scale = 2.0 ** rng.integers(-12, -6, filters)
    bias = rng.integers(-30, 31, filters)
    residual = rng.integers(-30, 31, output)
    return scale.astype(np.float32), bias.astype(np.float32), residual.astype(np.float32)


def run(
    problem: Problem, launch: Launch, operands: Operands, fused: bool, seed: int, text: str = ""
) -> Array:
    """Runs the kernel, or a changed text of it; returns its interleaved outputs."""
    machine = Machine("sm_90a", sms=4, seed=seed)
    residual = interleaved(operands.residual)
    output = machine.alloc(stored(np.zeros_like(residual), problem.out), written=False)
    # What the kernel gives before it is rounded to int8 is float32, as its residual.
    given = "float32" if problem.out == "int8" else problem.out
    epilogue = with_fused(
        launch.epilogues[fused], machine, operands.scale, operands.bias, stored(residual, given)
    )
    machine.load(text or launch.ptx).launch(
        grid=launch.grid,
        block=launch.threads,
        shared_bytes=launch.shared_bytes,
        args=[
            int(machine.alloc(interleaved(operands.activation))).to_bytes(8, "little"),
            machine.alloc(interleaved_filter(operands.filter)),
            epilogue,
            with_pointer(launch.output, OUTPUT, output),
            launch.geometry,
        ],
        budget=20_000_000,
    )
    return loaded(output.read(), problem.out)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[Launch]:
    """Of the problems, with the kernels' PTX."""
    folder, lines = ptx.emit_once("emit_dp4a", tmp_path_factory, *map(str, PROBLEMS))
    assert len(lines) == len(PROBLEMS)
    return [Launch.of(line, folder) for line in lines]


@bare_or_fused(PROBLEMS)
def test_sums_are_exact(launches: list[Launch], index: int, fused: bool) -> None:
    problem = PROBLEMS[index]
    operands = Operands.random(problem.conv, index)
    found = run(problem, launches[index], operands, fused, seed=index)
    expected = operands.expected(problem.conv, problem.out, fused)
    assert np.array_equal(found, interleaved(expected))
    assert len(np.unique(expected)) > 1


@pytest.mark.parametrize("index", [0, 2, 3, 5, 7, 8, 10, 12, 18])
def test_outputs_name_what_they_were_made_of(launches: list[Launch], index: int) -> None:
    problem = PROBLEMS[index]
    operands = Operands.coded(problem.conv)
    found = run(problem, launches[index], operands, fused=False, seed=1)
    expected = operands.expected(problem.conv, problem.out, fused=False)
    assert np.array_equal(found, interleaved(expected))


def random_problem(rng: np.random.Generator) -> Problem:
    """A problem of any small sizes, and any tile and alignment."""
    while True:
        taps, (channels, filters) = rng.integers(1, 5, 2), 4 * rng.integers(1, (12, 36), 2)
        pads, strides = rng.integers(0, 4, 4), rng.integers(1, 4, 2)
        if rng.random() < 0.25:
            taps[:], pads[:], strides[:] = 1, 0, 1
        batch, height, width = rng.integers(1, (4, 14, 14))
        try:
            conv = ConvProblem.from_parts(
                (int(batch), int(height), int(width), int(channels)),
                filters=int(filters),
                filter_size=(int(taps[0]), int(taps[1])),
                group_channels=int(channels),
                stride=tuple(strides.tolist()),
                dilation=tuple(rng.integers(1, 4, 2).tolist()),
                padding=tuple(pads.tolist()),
            )
        except ValueError:
            # The filter spans more than the padded image.
            continue
        return Problem(int(rng.integers(2)), conv, alignment=int(rng.choice([4, 8, 16, 16, 16])))


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(4))
def test_random_problems(
    seed: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng([seed, 4])
    problems = [random_problem(rng) for _ in range(24)]
    folder, _ = ptx.emit_once("emit_dp4a", tmp_path_factory, *map(str, PROBLEMS))
    lines = ptx.run(folder / "emit_dp4a", tmp_path, *map(str, problems))
    for index, (problem, line) in enumerate(zip(problems, lines, strict=True)):
        operands, fused = Operands.random(problem.conv, index), index % 2 == 1
        found = run(problem, Launch.of(line, tmp_path), operands, fused, seed=index)
        expected = operands.expected(problem.conv, problem.out, fused)
        assert np.array_equal(found, interleaved(expected)), problem


def test_sums_of_the_largest_products(launches: list[Launch]) -> None:
    """All products are 2**14: sums beyond 2**24, which float32 rounds."""
    index = 9
    problem = PROBLEMS[index]
    operands = Operands.random(problem.conv, 0)
    operands.activation[:], operands.filter[:] = -128, -128
    found = run(problem, launches[index], operands, fused=False, seed=2)
    assert np.all(found == np.float32(132 * 2**14))


def test_every_kernel_runs(launches: list[Launch]) -> None:
    wanted = {f"float32-{tile}-{accesses}" for tile in range(2) for accesses in range(3)}
    assert wanted <= {launch.kernel for launch in launches}
    for problem, launch in zip(PROBLEMS, launches, strict=True):
        conv, accesses = problem.conv, int(launch.kernel[-1])
        # The grid of DESIGN's tile map.
        filters, pixels = TILES[int(launch.kernel[-3])]
        assert launch.grid == (-(-conv.gemm.m // pixels), -(-conv.gemm.n // filters))
        _, height, width, _ = shapes(conv)[0]
        in_place = conv.is_pointwise and height * width % 4 == 0
        aligned = problem.alignment == 16
        assert accesses == (WORDS if not aligned else PIXELS if in_place else FILTERS)


def test_the_loop_is_of_dot_products(launches: list[Launch]) -> None:
    """One for each pair of a thread's filters and pixels, of words that are loaded by fours."""
    for launch in launches:
        tile = int(launch.kernel[-3])
        filters, pixels = ((8, 8), (4, 4))[tile]
        assert launch.ptx.count("dp4a.s32.s32") == filters * pixels
        assert "st.local" not in launch.ptx
        # Of filters and pixels in the loop, and of sums behind it.
        loads = re.findall(r"ld\.shared\.v4\.b32", launch.ptx)
        assert len(loads) == (filters + pixels) // 4 + 1


def test_a_kernel_without_barriers_is_wrong(launches: list[Launch]) -> None:
    index = 9
    problem, launch = PROBLEMS[index], launches[index]
    text, found = re.subn(r"(barrier|bar)\.sync\s+\d+;", "", launch.ptx)
    assert found
    operands = Operands.random(problem.conv, index)
    expected = interleaved(operands.expected(problem.conv, problem.out, fused=False))
    wrong = 0
    for seed in range(4):
        try:
            outputs = run(problem, launch, operands, fused=False, seed=seed, text=text)
        except EmulatorError:
            wrong += 1
        else:
            wrong += not np.array_equal(outputs, expected)
    assert wrong
