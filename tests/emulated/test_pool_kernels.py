"""The pooling kernels, as Mojo compiles them, are exact for small integers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pytest
from tests import overlap, ptx
from tests.emulated.convolution import Array, bfloat16, floats
from tests.emulated.reductions import run_kernel
from tests.reference import pool_reference

Three = tuple[int, int, int]


class Problem(NamedTuple):
    """A pooling of three spatial dimensions."""

    kind: str
    dtype: str
    alone: int
    """Whether means leave out the padding."""
    ceil: int
    batch: int
    channels: int
    input: Three
    window: Three
    stride: Three
    dilation: Three = (1, 1, 1)
    before: Three = (0, 0, 0)
    after: Three = (0, 0, 0)

    def __str__(self) -> str:
        """As the Mojo side reads it."""
        flat = (n for entry in self for n in (entry if isinstance(entry, tuple) else (entry,)))
        return "x".join(map(str, flat))


_STEM = {"window": (1, 3, 3), "stride": (1, 2, 2), "before": (0, 1, 1), "after": (0, 1, 1)}

#: Both types and reductions, known windows and others, vectors of channels and single ones.
PROBLEMS: Final = (
    Problem("largest", "bfloat16", 0, 0, 2, 24, (1, 9, 11), **_STEM),
    Problem("largest", "bfloat16", 0, 0, 1, 7, (1, 6, 9), (1, 5, 5), (1, 1, 1), (1, 1, 1),
            (0, 2, 2), (0, 2, 2)),
    Problem("largest", "float32", 0, 1, 1, 12, (1, 8, 10), (1, 3, 3), (1, 2, 2)),
    Problem("largest", "bfloat16", 0, 0, 1, 16, (4, 5, 6), (2, 3, 2), (2, 1, 2), (1, 1, 2),
            (1, 1, 0), (0, 1, 1)),
    Problem("mean", "bfloat16", 0, 0, 1, 40, (1, 7, 9), **_STEM),
    Problem("mean", "bfloat16", 1, 0, 1, 8, (1, 7, 9), **_STEM),
    Problem("mean", "float32", 0, 1, 1, 5, (1, 8, 9), (1, 4, 4), (1, 3, 3), (1, 1, 1),
            (0, 1, 0), (0, 0, 1)),
    Problem("mean", "float32", 1, 0, 2, 8, (1, 5, 8), (1, 2, 3), (1, 1, 3), (1, 3, 2),
            (0, 1, 2), (0, 0, 1)),
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """What the Mojo side passes for a problem."""

    kernel: str
    blocks: int
    threads: int
    geometry: bytes
    output: tuple[int, ...]
    ptx: str

    @classmethod
    def of(cls, line: str, folder: Path) -> Launch:
        """Reads a line of the Mojo side."""
        name, blocks, threads, geometry, output = line.split()
        text = (folder / f"{name}.ptx").read_text()
        shape = tuple(map(int, output.split("x")))
        return cls(name, int(blocks), int(threads), bytes.fromhex(geometry), shape, text)


def run(problem: Problem, launch: Launch, input: Array) -> Array:
    """Runs the kernel; returns its outputs."""
    return run_kernel(
        launch.ptx,
        problem.dtype,
        input,
        (problem.batch, *launch.output, problem.channels),
        launch.geometry,
        seed=problem.channels,
        grid=launch.blocks,
        block=launch.threads,
    )


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[Problem, Launch]:
    """The problems, with the kernels' PTX."""
    folder, lines = ptx.emit_once("emit_pooling", tmp_path_factory, *map(str, PROBLEMS))
    return {problem: Launch.of(line, folder) for problem, line in zip(PROBLEMS, lines, strict=True)}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_poolings_are_exact(launches: dict[Problem, Launch], problem: Problem) -> None:
    """Below zero for the most part: a zero of padding would be the largest. Sums of small integers
    are exact, and a mean is rounded as the kernel says."""
    rng = np.random.default_rng(PROBLEMS.index(problem))
    input = rng.integers(-90, 11, (problem.batch, *problem.input, problem.channels))
    launch = launches[problem]
    found = run(problem, launch, input.astype(np.float32))
    expected = pool_reference(
        input, problem.window, stride=problem.stride, dilation=problem.dilation,
        pad_before=problem.before, pad_after=problem.after, output=launch.output,
        average=problem.kind == "mean", count_boundary=not problem.alone,
    )  # fmt: skip
    if problem.dtype == "bfloat16":
        # One rounding, from a float32 that is off by one more.
        np.testing.assert_allclose(found, expected, rtol=2.0**-8, atol=0)
        same = found == floats(bfloat16(expected.astype(np.float32)))
        assert same.mean() > 0.99 if problem.kind == "mean" else same.all()
    else:
        np.testing.assert_allclose(found, expected, rtol=2.0**-22 * (problem.kind == "mean"))


def test_not_a_number_is_the_largest(launches: dict[Problem, Launch]) -> None:
    """And stays in its channel and its windows; infinities do not hide it."""
    problem = PROBLEMS[0]
    input = np.full((2, *problem.input, 24), -np.inf, np.float32)
    input[1, 0, 4, 6, 13] = np.nan
    input[1, 0, 4, 5, 13] = np.inf
    found = run(problem, launches[problem], input)
    is_nan = np.isnan(found)
    assert is_nan[1, 0, 2, 3, 13]
    assert is_nan.sum() == 1
    assert found[1, 0, 2, 2, 13] == np.inf
    assert np.isneginf(found[..., :13]).all()


def test_every_kernel_runs(launches: dict[Problem, Launch]) -> None:
    """Of those that the problems are chosen for."""
    kernels = {launch.kernel for launch in launches.values()}
    assert kernels >= {
        "largest-bfloat16-8-3-2",
        "largest-bfloat16-1-5-1",
        "largest-float32-4-3-2",
        "largest-bfloat16-8-0-0",
        "mean-bfloat16-8-3-2",
        "mean-float32-1-0-0",
        "mean-float32-4-0-0",
    }


def test_kernels_wait_for_earlier_ones(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, _ = ptx.emit_once("emit_pooling", tmp_path_factory, *map(str, PROBLEMS))
    overlap.check(folder.glob("*.ptx"))
