"""Hopper's kernel for slabs of groups of 16 and 32 channels, as Mojo compiles it, is exact."""

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
from ptxemu import EmulatorError, Machine, TensorMap
from ptxemu.tma import DataType, L2Promotion, Swizzle, packed_strides


class Problem(NamedTuple):
    """A convolution, and what runs it."""

    conv: ConvProblem
    units: int = 1
    """Multiprocessors that it is cut for."""
    placed: bool = False
    """Whether the graph's work that asks where pixels are is fused behind it."""
    ahead: bool = False
    """Whether it is cut for residuals that are loaded several tiles ahead."""

    @property
    def output(self) -> str:
        """The output's type, and the residual's."""
        return "bfloat16"

    def __str__(self) -> str:
        """As the Mojo side reads it."""
        return "x".join(
            map(str, (self.units, int(self.placed), int(self.ahead), *self.conv.numbers()))
        )


def _problem(text: str, groups: int, **given: Any) -> ConvProblem:
    """A 3x3 filter's, padded by 1 unless it says otherwise."""
    return parse_problem(text, groups=groups, **{"padding": 1, **given})


#: Both widths and both strides; one tile and many, windows that are filled again; several slabs,
#: and slabs that lack channels; several blocks of a slab; images that are no whole tiles, padding
#: that is not symmetric, none, and far; planes; the graph's work.
PROBLEMS: Final = (
    Problem(_problem("1x8x8x64:64x3x3", 2)),
    Problem(_problem("12x7x7x64:64x3x3", 2)),
    Problem(_problem("6x14x14x64:64x3x3", 2, stride=2)),
    Problem(_problem("1x8x8x64:64x3x3", 4)),
    Problem(_problem("6x14x14x64:64x3x3", 4, stride=2)),
    Problem(_problem("2x9x20x96:96x3x3", 3), 4),
    Problem(_problem("14x7x7x64:64x3x3", 2), ahead=True),
    Problem(_problem("9x14x14x64:64x3x3", 4, stride=2), ahead=True),
    Problem(_problem("2x19x30x80:80x3x3", 5, stride=2), 2),
    Problem(_problem("1x10x17x32:32x3x3", 1, padding=(0, 1, 2, 0))),
    Problem(_problem("2x17x20x64:64x3x3", 2, stride=2, padding=0)),
    Problem(_problem("1x3x4x48:48x3x3", 3, padding=(5, 4, 3, 6))),
    Problem(_problem("2x3x7x9x64:64x1x3x3", 2, stride=(2, 1, 1), padding=(1, 0, 1, 1, 1, 1)), 2),
    Problem(_problem("3x9x9x64:64x3x3", 2), 2, placed=True),
    Problem(_problem("2x15x17x48:48x3x3", 3, stride=2), placed=True),
)


#: Problems that are not run, and whether an H200 takes the kernel for them: tiles of few outputs,
#: slabs of few channels, and more of them than half of the multiprocessors. Groups of 32 need less.
SUITED: Final = (
    (Problem(_problem("64x14x14x1024:1024x3x3", 32, stride=2)), True),
    (Problem(_problem("1x7x7x1024:1024x3x3", 32)), True),
    (Problem(_problem("64x4x4x1024:1024x3x3", 32)), True),
    (Problem(_problem("64x4x4x1024:1024x3x3", 64)), False),
    (Problem(_problem("64x2x2x1024:1024x3x3", 32)), False),
    (Problem(_problem("64x28x28x512:512x3x3", 32)), True),
    (Problem(_problem("8x160x160x32:32x3x3", 1)), True),
    (Problem(_problem("8x160x160x16:16x3x3", 1)), False),
    (Problem(_problem("8x14x14x4352:4352x3x3", 272)), False),
    (Problem(_problem("8x14x14x3072:3072x3x3", 96)), True),
    (Problem(_problem("1x8x8x8512:8512x3x3", 266)), False),
)


@dataclass(frozen=True)
class Launch:
    """What the Mojo side passes for a problem."""

    kernel: str
    blocks: int
    threads: int
    shared_bytes: int
    stages: int
    window: tuple[int, int]
    """Rows and columns of a box."""
    step: int
    """Of its columns."""
    suits: bool
    """Whether an H200 takes the kernel for the problem."""
    epilogues: tuple[bytes, bytes, bytes]
    """None; with a scale; without."""
    output: bytes
    geometry: bytes
    ptx: str

    @classmethod
    def of(cls, line: str, folder: Path) -> Launch:
        """Reads a line of the Mojo side."""
        words = line.split()
        blocks, threads, shared, stages, rows, columns, step, suits = map(int, words[1:9])
        bare, scaled, unscaled, output, shape = map(bytes.fromhex, words[9:])
        text = (folder / f"{words[0]}.ptx").read_text()
        block = blocks, threads, shared, stages, (rows, columns), step, suits == 1
        return cls(words[0], *block, (bare, scaled, unscaled), output, shape, text)


def _map(tensor: int, shape: tuple[int, ...], box: tuple[int, ...], step: int) -> TensorMap:
    """Of a tensor with channels innermost; boxes of 64 channels."""
    batch, *spatial, channels = shape
    sizes = (channels, *reversed(spatial), *(1,) * (3 - len(spatial)), batch)
    kind = DataType.BFLOAT16
    options: dict[str, Any] = {"swizzle": Swizzle.B128, "l2_promotion": L2Promotion.L2_256B}
    every = (1, step, 1, 1, 1)
    return TensorMap.tiled(
        kind, tensor, sizes, packed_strides(sizes, kind), (64, *box, 1, 1), every, **options
    )


def run(
    problem: Problem, launch: Launch, operands: Operands, fused: int, seed: int, text: str = ""
) -> Array:
    """Runs the kernel, or a changed text of it, with one of the epilogues; returns its outputs."""
    machine = Machine("sm_90a", sms=launch.blocks, seed=seed)
    kind = problem.output
    shape = tuple(map(int, problem.conv.output_shape))
    output = machine.alloc(stored(np.zeros(shape, np.float32), kind), written=False)
    activation, kernel, residual = (
        machine.alloc(stored(values, kind))
        for values in (operands.activation, operands.filter, operands.residual)
    )
    epilogue = with_fused(
        launch.epilogues[fused],
        machine,
        operands.scale,
        operands.bias,
        stored(operands.residual, kind),
    )
    rows, columns = launch.window
    machine.load(text or launch.ptx).launch(
        grid=launch.blocks,
        block=launch.threads,
        shared_bytes=launch.shared_bytes,
        args=[
            _map(int(activation), operands.activation.shape, (columns, rows), launch.step),
            _map(int(output), shape, (8, 8), 1),
            _map(int(residual), shape, (8, 8), 1),
            kernel,
            epilogue,
            with_pointer(launch.output, OUTPUT, output),
            launch.geometry,
        ],
        budget=40_000_000,
    )
    return loaded(output.read(), kind)


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> list[Launch]:
    """Of all problems, with the kernels' PTX."""
    problems = (*PROBLEMS, *(problem for problem, _ in SUITED))
    folder, lines = ptx.emit_once("emit_slabs", tmp_path_factory, *map(str, problems))
    return [Launch.of(line, folder) for line in lines]


@pytest.fixture(scope="module")
def launches(described: list[Launch]) -> list[Launch]:
    """Of those that are run."""
    return described[: len(PROBLEMS)]


@bare_or_fused(PROBLEMS)
def test_sums_are_exact(launches: list[Launch], index: int, fused: bool) -> None:
    problem = PROBLEMS[index]
    operands = Operands.random(problem.conv, index)
    found = run(problem, launches[index], operands, fused, seed=index)
    assert np.array_equal(found, operands.expected(problem, fused))


@pytest.mark.parametrize("index", [1, 4])
def test_other_epilogues_are_exact(launches: list[Launch], index: int) -> None:
    problem = PROBLEMS[index]
    operands = Operands.random(problem.conv, index)
    found = run(problem, launches[index], operands, 2, seed=index)
    assert np.array_equal(found, operands.expected(problem, fused=True, scaled=False))


@pytest.mark.parametrize("index", [0, 2, 3])
def test_outputs_are_of_their_own_pixels(launches: list[Launch], index: int) -> None:
    problem = PROBLEMS[index]
    for tap in (0, 5, 8):
        operands = Operands.coordinates(problem.conv, tap)
        found = run(problem, launches[index], operands, fused=False, seed=tap)
        assert np.array_equal(found, operands.expected(problem, fused=False))


@pytest.mark.parametrize("index", [0, 3, 6])
def test_what_is_not_finite_stays_in_its_group(launches: list[Launch], index: int) -> None:
    problem = PROBLEMS[index]
    operands = Operands.random(problem.conv, index)
    operands.activation[0, 1, 1, 0] = np.inf
    operands.filter[:] = np.abs(operands.filter) + 1
    found = run(problem, launches[index], operands, fused=False, seed=1)
    expected = operands.expected(problem, fused=False)
    group = int(problem.conv.group_channels)
    assert np.isinf(expected[..., :group]).any()
    assert np.isfinite(expected[..., group:]).all()
    assert np.array_equal(found, expected)


def test_what_suits(described: list[Launch]) -> None:
    found = [launch.suits for launch in described[len(PROBLEMS) :]]
    assert found == [suits for _, suits in SUITED]


def test_every_way_is_run(launches: list[Launch]) -> None:
    assert len({launch.kernel[:-2] for launch in launches}) == 4
    assert {launch.kernel[-2:] for launch in launches} == {"-0", "-1"}
    assert max(launch.stages for launch in launches) == 8
    assert any(launch.blocks > 2 for launch in launches)


def test_registers_suffice(launches: list[Launch], tmp_path: Path) -> None:
    """Nothing is spilled, and no multiply waits for the one before it."""
    for launch in {launch.kernel: launch for launch in launches}.values():
        file = tmp_path / f"{launch.kernel}.ptx"
        file.write_text(launch.ptx)
        report = ptx.assemble(file, tmp_path)
        assert ptx.NO_SPILLS in report
        assert "serialized" not in report


def test_a_broken_kernel_is_reported(launches: list[Launch]) -> None:
    index = 0
    problem, launch = PROBLEMS[index], launches[index]
    text, found = re.subn(r"wgmma\.wait_group\.sync\.aligned\s+0;", "", launch.ptx)
    assert found
    operands = Operands.random(problem.conv, index)
    with pytest.raises(EmulatorError):
        run(problem, launch, operands, fused=False, seed=1, text=text)
