"""The kernels of group normalization, as Mojo compiles them, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from tests import overlap, ptx
from tests.emulated.convolution import Array, bfloat16, floats

from maxconv._fields import Activation
from ptxemu import Machine

EPSILON: Final = 2.0**-10

Exact = npt.NDArray[np.float64]


class Problem(NamedTuple):
    """The shape, the GPU's multiprocessors, and whether vectors may be loaded."""

    dtype: str
    images: int
    pixels: int
    channels: int
    groups: int
    units: int = 4
    aligned: bool = True
    activation: int = Activation.SILU

    def __str__(self) -> str:
        """As the Mojo side reads it."""
        return "x".join(map(str, (*self[:-2], int(self.aligned), int(self.activation))))


#: Every width of loads and number of lanes; images of fewer pixels than a block has rows, and
#: shared by several blocks, the last of which has fewer; groups of one channel, of more than a
#: block has threads, and that are no power of two; lanes without channels.
PROBLEMS: Final = (
    Problem("bfloat16", 1, 1, 8, 2),
    Problem("bfloat16", 2, 49, 40, 8),
    Problem("bfloat16", 1, 700, 72, 9),
    Problem("bfloat16", 2, 70, 3, 3),
    Problem("bfloat16", 3, 20, 64, 16),
    Problem("bfloat16", 2, 49, 96, 32, aligned=False),
    Problem("bfloat16", 1, 300, 256, 32, units=8),
    Problem("bfloat16", 1, 40, 600, 2),
    Problem("bfloat16", 2, 333, 128, 128, activation=Activation.NONE),
    Problem("float32", 2, 49, 20, 5),
    Problem("float32", 1, 900, 16, 4, activation=Activation.NONE),
)


@dataclass(frozen=True)
class Launches:
    """What the Mojo side passes for a problem."""

    name: str
    blocks: int
    finishing: int
    shared_bytes: int
    finishing_bytes: int
    sums: int
    workspace: int
    geometry: bytes
    groups: bytes
    activation: bytes
    folder: Path

    @classmethod
    def of(cls, line: str, folder: Path) -> Launches:
        """Reads a line of the Mojo side."""
        name, *rest = line.split()
        blocks, finishing, shared, finishing_shared, sums, workspace = map(int, rest[:6])
        geometry, groups, activation = map(bytes.fromhex, rest[6:])
        return cls(
            name, blocks, finishing, shared, finishing_shared, sums, workspace, geometry, groups,
            activation, folder,
        )  # fmt: skip

    def ptx(self, kernel: str, dtype: str) -> str:
        """Returns a kernel's text."""
        name = f"{kernel}-{dtype}" + ("" if kernel == "finish" else f"-{self.name}")
        return (self.folder / f"{name}.ptx").read_text()


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[Problem, Launches]:
    """The problems, with the kernels' PTX."""
    folder, lines = ptx.emit_once("emit_group_norm", tmp_path_factory, *map(str, PROBLEMS))
    return {p: Launches.of(line, folder) for p, line in zip(PROBLEMS, lines, strict=True)}


def run(problem: Problem, launch: Launches, x: Array, weight: Array | None, bias: Array) -> Array:
    """Runs the kernels; returns the output, which nobody has written before."""
    machine = Machine("sm_90a", sms=16, seed=problem.channels)
    whole = problem.dtype == "float32"
    input = machine.alloc(x if whole else bfloat16(x))
    empty = np.zeros(x.shape, np.float32)
    output = machine.alloc(empty if whole else bfloat16(empty), written=False)
    sums = machine.alloc(np.zeros(launch.sums, np.float32), written=False)
    left = launch.workspace - launch.sums
    coefficients = machine.alloc(np.zeros(left, np.float32), written=False)
    vectors = [machine.alloc(bias if weight is None else weight), machine.alloc(bias)]
    affine = np.uint32(weight is not None)

    def enqueue(kernel: str, grid: int, shared_bytes: int, *args: Any) -> None:
        machine.load(launch.ptx(kernel, problem.dtype)).launch(
            args=list(args), grid=grid, block=256, shared_bytes=shared_bytes, budget=40_000_000
        )

    enqueue("moments", launch.blocks, launch.shared_bytes, input, sums, launch.geometry)
    enqueue(
        "finish", launch.finishing, launch.finishing_bytes, input, sums, *vectors, affine,
        coefficients, launch.groups,
    )  # fmt: skip
    enqueue(
        "normalize", launch.blocks, 0, input, coefficients, output, launch.activation,
        launch.geometry,
    )  # fmt: skip
    found = output.read()
    return found if whole else floats(found)


def expected(problem: Problem, x: Array, weight: Array | None, bias: Array) -> Exact:
    """The definition, in float64."""
    grouped = x.astype(np.float64).reshape(*x.shape[:2], problem.groups, -1)
    mean, variance = grouped.mean((1, 3), keepdims=True), grouped.var((1, 3), keepdims=True)
    normal: Exact = ((grouped - mean) / np.sqrt(variance + EPSILON)).reshape(x.shape)
    if weight is not None:
        normal = normal * weight + bias
    if problem.activation == Activation.SILU:
        normal = normal / (1 + np.exp(-normal))
    return normal


def check(problem: Problem, launch: Launches, x: Array, weight: Array | None, bias: Array) -> None:
    """Compares: half a unit of the output's type, and float32 arithmetic before it.

    The scale and the shift are rounded to 2^-24, so that a result has an error of 2^-23 of what
    they are made of; a reciprocal root of 2^-22, an activation for 16 bits of 1.1e-5.
    """
    found, exact = run(problem, launch, x, weight, bias), expected(problem, x, weight, bias)
    unit = 2.0**-8 if problem.dtype == "bfloat16" else 2.0**-24
    grouped = x.astype(np.float64).reshape(*x.shape[:2], problem.groups, -1)
    rate = 1 / np.sqrt(grouped.var((1, 3)) + EPSILON)
    parts = np.abs(x) * np.repeat(rate, x.shape[2] // problem.groups, 1)[:, np.newaxis]
    size = parts * np.abs(1 if weight is None else weight) + np.abs(bias)
    bound = 1.01 * unit * np.abs(exact) + 2.0**-20 * size + 2.0e-5
    assert found.shape == exact.shape
    assert (np.abs(found - exact) <= bound).all()


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_groups(launches: dict[Problem, Launches], problem: Problem) -> None:
    rng = np.random.default_rng(PROBLEMS.index(problem))
    shape = (problem.images, problem.pixels, problem.channels)
    # Every channel has a mean and a deviation of its own, every image too.
    deviation, mean = rng.uniform(0.5, 2, shape[2]), rng.uniform(-3, 3, shape[::2])
    drawn = (rng.standard_normal(shape) * deviation + mean[:, np.newaxis]).astype(np.float32)
    x = drawn if problem.dtype == "float32" else floats(bfloat16(drawn))
    weight, bias = rng.standard_normal((2, problem.channels)).astype(np.float32)
    check(problem, launches[problem], x, weight, bias)


def test_without_weights(launches: dict[Problem, Launches]) -> None:
    problem = PROBLEMS[1]
    x = np.random.default_rng(3).integers(-9, 10, (2, 49, 40)).astype(np.float32)
    check(problem, launches[problem], x, None, np.zeros(40, np.float32))


def test_what_lies_far_from_zero_keeps_its_digits(launches: dict[Problem, Launches]) -> None:
    """With sums of squares, a variance of 1 beside a mean of 4096 would be lost in float32."""
    problem = PROBLEMS[-1]
    rng = np.random.default_rng(4)
    x = (4096 + rng.standard_normal((1, 900, 16))).astype(np.float32)
    launch = launches[problem]
    found = run(problem, launch, x, None, np.zeros(16, np.float32))
    exact = expected(problem, x, None, np.zeros(16, np.float32))
    # x * scale and the shift are 4096, each rounded to 2^-12.
    assert np.abs(found - exact).max() <= 3 * 2.0**-12


def test_every_kernel_runs(launches: dict[Problem, Launches]) -> None:
    names = {(problem.dtype, launch.name) for problem, launch in launches.items()}
    assert {("bfloat16", f"8-{lanes}") for lanes in (4, 8, 16, 32)} <= names
    assert {("bfloat16", "1-4"), ("float32", "4-4")} <= names
    assert any(launch.blocks > launch.finishing for launch in launches.values())


def test_kernels_wait_for_earlier_ones(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, _ = ptx.emit_once("emit_group_norm", tmp_path_factory, *map(str, PROBLEMS))
    overlap.check(folder.glob("*.ptx"))
