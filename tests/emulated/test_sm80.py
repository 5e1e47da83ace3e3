"""The implicit GEMM on any GPU's tensor cores, as Mojo compiles it, is exact."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pytest
from tests import ptx
from tests.emulated.convolution import Array
from tests.emulated.operands import with_fused
from tests.emulated.values import loaded, stored
from tests.emulated.ways import bare_or_fused
from tests.reference import conv_reference

from maxconv._fields import Activation
from maxconv._problem import ConvProblem
from maxconv._problems import parse_problem
from maxconv.bench.gpu.operands import geometry
from ptxemu import EmulatorError, Machine

#: Tiles of `tests/mojo/emit_sm80.mojo`: pixels and filters of each, and the one of the plan.
TILES: Final = ((128, 64), (64, 64), (64, 32), (32, 32))
LARGE, SQUARE, TALL, SMALL, PLANNED = 0, 1, 2, 3, 9


class Problem(NamedTuple):
    """A convolution, and what runs it."""

    tile: int
    conv: ConvProblem
    dtype: str = "bfloat16"
    aligned: bool = True

    def __str__(self) -> str:
        """As the Mojo side reads it."""
        words = (self.dtype, self.tile, int(self.aligned), *geometry(self.conv))
        return "x".join(map(str, words))


#: Tiles beyond the pixels and the filters, several of both; fewer slices than stages and more;
#: slices that end within a tap; chunks that are not whole, within a tap and across taps; groups.
PROBLEMS: Final = (
    Problem(LARGE, parse_problem("2x9x10x24:72x3x3", padding=1)),
    Problem(LARGE, parse_problem("1x13x11x64:40x1x1")),
    Problem(LARGE, parse_problem("1x9x10x10:24x3x3", padding=1)),
    Problem(SQUARE, parse_problem("2x7x9x40:72x3x3", stride=2, padding=(0, 1, 2, 1))),
    Problem(SQUARE, parse_problem("3x5x5x152:64x1x1")),
    Problem(SQUARE, parse_problem("1x8x8x8:130x2x3", dilation=(2, 3), padding=(1, 1, 3, 3))),
    Problem(SQUARE, parse_problem("1x10x9x16:48x3x3", padding=1, groups=2)),
    Problem(TALL, parse_problem("2x9x5x72:40x3x3", padding=1)),
    Problem(TALL, parse_problem("1x9x9x328:48x1x1")),
    Problem(TALL, parse_problem("1x9x8x10:24x3x3", padding=1)),
    Problem(SMALL, parse_problem("2x4x5x72:40x3x3", padding=1)),
    Problem(SMALL, parse_problem("1x7x7x328:48x1x1")),
    Problem(SMALL, parse_problem("1x6x7x8:20x1x1", stride=2)),
    Problem(SMALL, parse_problem("2x6x5x45:33x3x3", padding=1)),
    Problem(SMALL, parse_problem("1x5x6x3:9x7x7", stride=2, padding=3)),
    Problem(SMALL, parse_problem("1x4x6x21:8x2x2", groups=1), aligned=False),
    Problem(SMALL, parse_problem("1x5x5x32:16x3x3", padding=1), aligned=False),
    Problem(SMALL, parse_problem("1x19x12:24x5", stride=2, padding=2)),
    Problem(SMALL, parse_problem("1x3x4x5x16:24x3x2x2", padding=(1, 1, 0, 0, 1, 0))),
    Problem(PLANNED, parse_problem("1x6x6x16:1024x1x1")),
    Problem(SMALL, parse_problem("1x5x5x24:40x3x3", padding=1), "float16"),
    Problem(SQUARE, parse_problem("1x5x7x11:37x3x3", padding=1), "float16"),
    Problem(SMALL, parse_problem("1x5x5x20:40x3x3", padding=1), "float32"),
    Problem(SQUARE, parse_problem("1x5x7x7:33x3x3", stride=2, padding=1), "float32"),
    Problem(LARGE, parse_problem("1x12x12x36:64x1x1"), "float32"),
    Problem(SMALL, parse_problem("1x5x5x48:40x3x3", padding=1), "int8"),
    Problem(SMALL, parse_problem("1x5x5x19:33x3x3", padding=1), "int8"),
    Problem(TALL, parse_problem("1x9x8x160:48x1x1"), "int8"),
    Problem(TALL, parse_problem("1x9x8x40:48x1x1"), "int8"),
    Problem(SMALL, parse_problem("1x5x5x20:33x3x3", padding=1), "int8"),
    Problem(SQUARE, parse_problem("1x5x5x24:48x3x3", padding=1, groups=2), "int8"),
    Problem(SMALL, parse_problem("1x5x5x20:33x3x3", padding=1), "int8", aligned=False),
    Problem(SQUARE, parse_problem("1x5x6x12:16x3x3", padding=1, groups=2), "int8"),
    Problem(LARGE, parse_problem("1x4x4x16:16x3x3", stride=2, padding=1), "int8", aligned=False),
)


@dataclass(frozen=True)
class Launch:
    """What the Mojo side passes for a problem."""

    kernel: str
    blocks: int
    threads: int
    shared_bytes: int
    vectors: int
    epilogues: tuple[bytes, bytes]
    geometry: bytes
    ptx: str

    @classmethod
    def of(cls, line: str, folder: Path) -> Launch:
        """Reads a line of the Mojo side."""
        name, *numbers, bare, fused, shape = line.split()
        blocks, threads, shared, vectors = map(int, numbers)
        epilogues = bytes.fromhex(bare), bytes.fromhex(fused)
        text = (folder / f"{name}.ptx").read_text()
        return cls(name, blocks, threads, shared, vectors, epilogues, bytes.fromhex(shape), text)


@dataclass(frozen=True)
class Operands:
    """Small integers, whose products and sums are exact in float32 in any order."""

    activation: Array
    filter: Array
    scale: Array
    bias: Array
    residual: Array

    @classmethod
    def random(cls, problem: ConvProblem, seed: int, dtype: str = "bfloat16") -> Operands:
        """Draws them."""
        rng = np.random.default_rng(seed)
        filters = problem.filters
        least, most = (-128, 128) if dtype == "int8" else (-3, 4)
        shapes = (
            problem.input_shape,
            (filters, *problem.filter_size, problem.group_channels),
            (filters,),
            (filters,),
            problem.output_shape,
        )
        multiplied = (rng.integers(least, most, shape) for shape in shapes[:2])
        others = (rng.integers(-3, 4, shape) for shape in shapes[2:])
        return cls(*(values.astype(np.float32) for values in (*multiplied, *others)))

    def sums(self, problem: ConvProblem) -> Array:
        """The accumulators."""
        with np.errstate(invalid="ignore"):
            return conv_reference(
                self.activation,
                self.filter,
                stride=problem.stride,
                dilation=problem.dilation,
                pad_before=problem.pad_before,
                pad_after=problem.pad_after,
                groups=problem.groups,
            ).astype(np.float32)

    def scaled(self, sums: Array) -> Array:
        """Accumulators with scale and bias."""
        return sums * self.scale + self.bias

    def expected(self, problem: ConvProblem, dtype: str, fused: bool) -> Array:
        """The outputs, rounded to their type."""
        total = self.sums(problem)
        if fused:
            total = np.maximum(self.scaled(total), 0) + self.residual
        return loaded(stored(total, output_of(dtype)), output_of(dtype))


def output_of(dtype: str) -> str:
    """The output's type, and the residual's."""
    return "float32" if dtype == "int8" else dtype


def run(
    problem: Problem, launch: Launch, operands: Operands, fused: bool, seed: int, text: str = ""
) -> Array:
    """Runs the kernel, or a changed text of it; returns its outputs."""
    machine = Machine("sm_90a", sms=4, seed=seed)
    dtype = problem.dtype
    out = output_of(dtype)
    output = machine.alloc(stored(np.zeros_like(operands.residual), out), written=False)
    epilogue = with_fused(
        launch.epilogues[fused],
        machine,
        operands.scale,
        operands.bias,
        stored(operands.residual, out),
    )
    machine.load(text or launch.ptx).launch(
        grid=launch.blocks,
        block=launch.threads,
        shared_bytes=launch.shared_bytes,
        args=[
            int(machine.alloc(stored(operands.activation, dtype))).to_bytes(8, "little"),
            machine.alloc(stored(operands.filter, dtype)),
            epilogue,
            int(output).to_bytes(8, "little"),
            launch.geometry,
            launch.vectors,
        ],
        budget=20_000_000,
    )
    return loaded(output.read(), out)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[Launch]:
    """Of the problems, with the kernels' PTX."""
    folder, lines = ptx.emit_once("emit_sm80", tmp_path_factory, *map(str, PROBLEMS))
    assert len(lines) == len(PROBLEMS)
    return [Launch.of(line, folder) for line in lines]


@bare_or_fused(PROBLEMS)
def test_sums_are_exact(launches: list[Launch], index: int, fused: bool) -> None:
    problem = PROBLEMS[index]
    operands = Operands.random(problem.conv, index, problem.dtype)
    found = run(problem, launches[index], operands, fused, seed=index)
    assert np.array_equal(found, operands.expected(problem.conv, problem.dtype, fused))


#: Offsets in `Epilogue` of the codes of the activation and the final one.
ACTIVATION, FINAL = 40, 56

#: Both, each pair with a loop of its own or of those that share one.
FORMS: Final = (
    (Activation.NONE, Activation.NONE),
    (Activation.RELU, Activation.RELU),
    (Activation.NONE, Activation.RELU),
    (Activation.SILU, Activation.NONE),
    (Activation.SILU, Activation.RELU),
)


@pytest.mark.parametrize(("activation", "final"), FORMS)
@pytest.mark.parametrize("index", [3, 13], ids=["chunks", "singles"])
def test_activations_are_applied(
    launches: list[Launch], index: int, activation: Activation, final: Activation
) -> None:
    problem, launch = PROBLEMS[index], launches[index]
    codes = bytearray(launch.epilogues[True])
    assert int.from_bytes(codes[ACTIVATION : ACTIVATION + 8], "little") == Activation.RELU
    assert int.from_bytes(codes[FINAL : FINAL + 8], "little") == Activation.NONE
    codes[ACTIVATION : ACTIVATION + 8] = int(activation).to_bytes(8, "little")
    codes[FINAL : FINAL + 8] = int(final).to_bytes(8, "little")
    operands = Operands.random(problem.conv, index)
    launch = replace(launch, epilogues=(launch.epilogues[False], bytes(codes)))
    found = run(problem, launch, operands, fused=True, seed=index)
    values = operands.scaled(operands.sums(problem.conv))
    if activation == Activation.SILU:
        with np.errstate(over="ignore"):
            values = values / (1 + np.exp(-values))
    elif activation == Activation.RELU:
        values = np.maximum(values, 0)
    values = values + operands.residual
    if final == Activation.RELU:
        values = np.maximum(values, 0)
    if activation == Activation.SILU:
        # The quotient of the float32 formula may round to the next bfloat16.
        assert np.all(np.abs(found - values) <= np.abs(values) / 2**8 + 1e-5)
    else:
        expected = loaded(stored(values.astype(np.float32), "bfloat16"), "bfloat16")
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("index", [3, 4, 7, 10, 13, 14])
def test_what_is_not_finite_stays_in_its_pixels(launches: list[Launch], index: int) -> None:
    """Zeros beside the image, and behind the last product, multiply no number."""
    problem = PROBLEMS[index]
    operands = Operands.random(problem.conv, index)
    operands.activation[0, 0, 0, -1] = np.inf
    operands.filter[:] = np.abs(operands.filter) + 1
    found = run(problem, launches[index], operands, fused=False, seed=1)
    expected = operands.expected(problem.conv, problem.dtype, fused=False)
    assert np.isinf(expected).any()
    assert np.isfinite(expected).any()
    assert np.array_equal(found, expected)


def test_every_kernel_runs(launches: list[Launch]) -> None:
    wanted = {f"bfloat16-{tile}-{whole}" for tile in range(4) for whole in (0, 1)}
    assert wanted - {"bfloat16-1-0"} <= {launch.kernel for launch in launches}
    assert {launch.vectors for launch in launches} == {0, 1}
    for problem, launch in zip(PROBLEMS, launches, strict=True):
        if problem.tile != PLANNED:
            pixels, filters = TILES[problem.tile]
            tiles = -(-problem.conv.gemm.m // pixels) * -(-problem.conv.gemm.n // filters)
            assert launch.blocks == tiles * problem.conv.groups


#: Name, change of the text, and what is reported.
BROKEN: Final = (
    ("nobody waits for the copies", r"cp\.async\.wait_group \d+;", "RaceError"),
    ("a barrier is left out", r"barrier\.sync \d+;|bar\.sync \d+;|bar\.sync \t?\d+;", "RaceError"),
)


@pytest.mark.parametrize(("pattern", "report"), [entry[1:] for entry in BROKEN])
def test_a_broken_kernel_is_reported(launches: list[Launch], pattern: str, report: str) -> None:
    index = 10
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
    assert report in reports
