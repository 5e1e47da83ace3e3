"""The kernel of the mean over pixels, as Mojo compiles it, is exact for small integers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pytest
from tests import overlap, ptx
from tests.emulated.convolution import Array, bfloat16, floats
from tests.emulated.reductions import run_kernel


class Problem(NamedTuple):
    """The shape, the GPU's multiprocessors, and whether vectors may be loaded."""

    dtype: str
    images: int
    pixels: int
    channels: int
    units: int = 4
    aligned: bool = True

    def __str__(self) -> str:
        """As the Mojo side reads it."""
        return "x".join(map(str, (*self[:-1], int(self.aligned))))


#: Every width of loads and number of lanes; images of fewer pixels than a block has rows, and of
#: more than are in flight; lanes without channels; images that 2, 4 and 8 blocks share.
PROBLEMS: Final = (
    Problem("bfloat16", 1, 1, 8),
    Problem("bfloat16", 2, 49, 40),
    Problem("bfloat16", 1, 600, 72),
    Problem("bfloat16", 3, 5, 33),
    Problem("bfloat16", 2, 70, 3),
    Problem("bfloat16", 2, 49, 96, aligned=False),
    Problem("bfloat16", 8, 49, 240, units=4),
    Problem("bfloat16", 6, 20, 64, units=4),
    Problem("bfloat16", 3, 37, 240, units=4),
    Problem("bfloat16", 1, 1500, 32, units=1),
    Problem("bfloat16", 1, 3000, 16, units=2),
    Problem("bfloat16", 1, 9001, 8, units=16),
    Problem("bfloat16", 2, 700, 5, units=4),
    Problem("float32", 2, 49, 20),
    Problem("float32", 5, 16, 128, units=2),
    Problem("float32", 1, 2100, 16, units=4),
)


@dataclass(frozen=True)
class Launch:
    """What the Mojo side passes for a problem."""

    kernel: str
    blocks: int
    cluster: int
    shared_bytes: int
    geometry: bytes
    ptx: str

    @classmethod
    def of(cls, line: str, folder: Path) -> Launch:
        """Reads a line of the Mojo side."""
        name, blocks, cluster, shared, geometry = line.split()
        text = (folder / f"{name}.ptx").read_text()
        return cls(name, int(blocks), int(cluster), int(shared), bytes.fromhex(geometry), text)


def run(problem: Problem, launch: Launch, input: Array, seed: int) -> Array:
    """Runs the kernel; returns its outputs."""
    return run_kernel(
        launch.ptx,
        problem.dtype,
        input,
        (problem.images, problem.channels),
        launch.geometry,
        seed=seed,
        grid=launch.blocks,
        block=256,
        cluster=launch.cluster,
        shared_bytes=launch.shared_bytes,
    )


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[Problem, Launch]:
    """The problems, with the kernels' PTX."""
    folder, lines = ptx.emit_once("emit_mean", tmp_path_factory, *map(str, PROBLEMS))
    return {problem: Launch.of(line, folder) for problem, line in zip(PROBLEMS, lines, strict=True)}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_means_are_exact(launches: dict[Problem, Launch], problem: Problem) -> None:
    """Sums of small integers are; the mean is rounded as the kernel says."""
    rng = np.random.default_rng(PROBLEMS.index(problem))
    shape = (problem.images, problem.pixels, problem.channels)
    input = rng.integers(-3, 4, shape).astype(np.float32)
    # Every channel its own.
    input[:, 0] = np.arange(problem.channels) % 199
    found = run(problem, launches[problem], input, seed=problem.channels)
    expected = input.sum(1) * np.float32(1 / np.float32(problem.pixels))
    if problem.dtype == "bfloat16":
        expected = floats(bfloat16(expected))
    assert np.array_equal(found, expected)


def test_what_is_not_finite_stays_in_its_channel(launches: dict[Problem, Launch]) -> None:
    """The last channels and pixels are also what lanes without any load."""
    problem = Problem("bfloat16", 2, 49, 40)
    input = np.ones((2, 49, 40), np.float32)
    input[1, -1, -1] = np.inf
    found = run(problem, launches[problem], input, seed=1)
    assert found[1, -1] == np.inf
    found[1, -1] = 1
    assert (found == 1).all()


def test_every_kernel_runs(launches: dict[Problem, Launch]) -> None:
    """And clusters of every size do."""
    kernels = {launch.kernel for launch in launches.values()}
    wide = {f"bfloat16-8-{lanes}" for lanes in (4, 8, 16, 32)}
    assert wide | {"bfloat16-1-32"} <= kernels
    assert {launch.cluster for launch in launches.values()} == {1, 2, 4, 8}


def test_kernels_wait_for_earlier_ones(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, _ = ptx.emit_once("emit_mean", tmp_path_factory, *map(str, PROBLEMS))
    overlap.check(folder.glob("*.ptx"))
