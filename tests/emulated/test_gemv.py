"""The kernel for pointwise convolutions of few pixels, as Mojo compiles it, is exact."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pytest
from tests import ptx
from tests.emulated.convolution import Array, bfloat16, floats
from tests.emulated.operands import with_fused
from tests.emulated.values import stored

from ptxemu import Machine


class Problem(NamedTuple):
    """Pixels, channels and filters; whether vectors may be loaded."""

    dtype: str
    pixels: int
    channels: int
    filters: int
    aligned: bool = True

    def __str__(self) -> str:
        """As the Mojo side reads it."""
        return "x".join(map(str, (*self[:-1], int(self.aligned))))


#: Every number of pixels and width of loads; one to 8 loads a lane, and more than are in flight;
#: lanes without channels, warps without filters, and several blocks of several warps.
PROBLEMS: Final = (
    Problem("bfloat16", 1, 1, 1),
    Problem("bfloat16", 1, 4, 20),
    Problem("bfloat16", 1, 10, 33),
    Problem("bfloat16", 1, 28, 1001),
    Problem("bfloat16", 1, 48, 240),
    Problem("bfloat16", 1, 70, 3),
    Problem("bfloat16", 1, 1152, 5),
    Problem("bfloat16", 1, 1153, 3),
    Problem("bfloat16", 1, 2056, 2),
    Problem("bfloat16", 1, 4608, 2),
    Problem("bfloat16", 1, 48, 20, aligned=False),
    Problem("bfloat16", 2, 6, 7),
    Problem("bfloat16", 2, 680, 3),
    Problem("bfloat16", 3, 4, 9),
    Problem("bfloat16", 3, 320, 5),
    Problem("bfloat16", 4, 1160, 2),
    Problem("bfloat16", 5, 13, 3),
    Problem("bfloat16", 6, 8, 20),
    Problem("bfloat16", 8, 20, 11),
    Problem("bfloat16", 8, 1288, 2),
    # Blocks of further pixels, the last ones with fewer.
    Problem("bfloat16", 9, 20, 11),
    Problem("bfloat16", 37, 28, 70),
    Problem("float32", 1, 10, 20),
    Problem("float32", 1, 1152, 3),
    Problem("float32", 4, 28, 9),
    Problem("float32", 7, 261, 2),
    Problem("float8_e4m3fn", 1, 48, 20),
    Problem("float8_e4m3fn", 2, 20, 7),
    Problem("float8_e4m3fn", 8, 592, 3),
    # Sums beyond 2 ** 24, which float32 would round.
    Problem("int8", 1, 2064, 5),
    Problem("int8", 2, 20, 7),
    Problem("int8", 8, 4100, 3),
)


@dataclass(frozen=True)
class Launch:
    """What the Mojo side passes for a problem."""

    blocks: int
    threads: int
    epilogues: tuple[bytes, bytes]
    geometry: bytes
    ptx: str

    @classmethod
    def of(cls, line: str, folder: Path) -> Launch:
        """Reads a line of the Mojo side."""
        name, blocks, threads, *values = line.split()
        bare, fused, geometry = map(bytes.fromhex, values)
        text = (folder / f"{name}.ptx").read_text()
        return cls(int(blocks), int(threads), (bare, fused), geometry, text)


@dataclass(frozen=True)
class Operands:
    """Small integers."""

    activation: Array
    filter: Array
    scale: Array
    bias: Array
    residual: Array

    @classmethod
    def random(cls, problem: Problem, seed: int) -> Operands:
        """Draws them."""
        _, pixels, channels, filters, _ = problem
        rng = np.random.default_rng(seed)
        shapes: tuple[tuple[int, ...], ...] = (
            (pixels, channels),
            (filters, channels),
            (filters,),
            (filters,),
            (pixels, filters),
        )
        drawn = [rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes]
        if problem.dtype == "int8":
            drawn[:2] = (rng.choice([-128, 127], shape).astype(np.float32) for shape in shapes[:2])
        return cls(*drawn)

    def expected(self, problem: Problem, fused: bool) -> Array:
        """The outputs, rounded to their type."""
        with np.errstate(invalid="ignore"):
            total = (self.activation.astype(np.float64) @ self.filter.T).astype(np.float32)
        if fused:
            total = np.maximum(total * self.scale + self.bias, 0) + self.residual
        return total if problem.dtype == "float32" else floats(bfloat16(total))


def run(problem: Problem, launch: Launch, operands: Operands, fused: bool, seed: int) -> Array:
    """Runs the kernel; returns its outputs."""
    machine = Machine("sm_90a", sms=4, seed=seed)
    dtype = problem.dtype
    out_type = "float32" if dtype == "float32" else "bfloat16"
    output = machine.alloc(stored(np.zeros_like(operands.residual), out_type), written=False)
    epilogue = with_fused(
        launch.epilogues[fused],
        machine,
        operands.scale,
        operands.bias,
        stored(operands.residual, out_type),
    )
    machine.load(launch.ptx).launch(
        grid=launch.blocks,
        block=launch.threads,
        args=[
            int(machine.alloc(stored(operands.activation, dtype))).to_bytes(8, "little"),
            machine.alloc(stored(operands.filter, dtype)),
            epilogue,
            int(output).to_bytes(8, "little"),
            launch.geometry,
        ],
        budget=20_000_000,
    )
    found = output.read()
    return found if out_type == "float32" else floats(found)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[Problem, Launch]:
    """The problems, with the kernels' PTX."""
    folder, lines = ptx.emit_once("emit_gemv", tmp_path_factory, *map(str, PROBLEMS))
    return {problem: Launch.of(line, folder) for problem, line in zip(PROBLEMS, lines, strict=True)}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["bare", "fused"])
def test_sums_are_exact(launches: dict[Problem, Launch], problem: Problem, fused: bool) -> None:
    operands = Operands.random(problem, PROBLEMS.index(problem))
    found = run(problem, launches[problem], operands, fused, seed=problem.channels)
    assert np.array_equal(found, operands.expected(problem, fused))


@pytest.mark.parametrize(
    "problem",
    [problem for problem in PROBLEMS if problem.pixels > 1 and problem.dtype == "bfloat16"],
    ids=str,
)
def test_what_is_not_finite_stays_in_its_pixel(
    launches: dict[Problem, Launch], problem: Problem
) -> None:
    """The last channels are also what lanes without channels load."""
    operands = Operands.random(problem, 1)
    operands.activation[1, -1] = np.inf
    operands.filter[:, -1] = 2
    operands.filter[0, -1] = np.nan
    found = run(problem, launches[problem], operands, fused=False, seed=1)
    assert np.isnan(found[:, 0]).all()
    assert (found[1, 1:] == np.inf).all()
    rest = np.arange(problem.pixels) != 1
    assert np.array_equal(found[rest, 1:], operands.expected(problem, False)[rest, 1:])


def test_every_kernel_runs(launches: dict[Problem, Launch]) -> None:
    kernels = {launch.ptx for problem, launch in launches.items() if problem.dtype == "bfloat16"}
    assert len(kernels) == 8
    assert {launch.threads for launch in launches.values()} == {32, 128}
