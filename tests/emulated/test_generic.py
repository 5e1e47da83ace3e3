"""The kernels on CUDA cores, and that for few input channels, as Mojo compiles them, are exact."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from tests import ptx
from tests.emulated.convolution import bfloat16, floats
from tests.emulated.operands import with_fused
from tests.emulated.values import stored
from tests.emulated.ways import bare_or_fused
from tests.reference import conv_reference

from maxconv._problem import ConvProblem
from maxconv._problems import parse_problem
from maxconv.bench.gpu.operands import geometry
from ptxemu import Machine

Array = npt.NDArray[Any]


class Problem(NamedTuple):
    """A kernel, a convolution, and the blocks where they are not the plan's."""

    kernel: str
    conv: ConvProblem
    blocks: int | None = None
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        """As the Mojo side reads it."""
        return "x".join(map(str, (self.kernel, self.dtype, *geometry(self.conv))))


#: Vectors of channels and single ones; blocks of one tile, of several, and with a last one less;
#: tiles beyond the pixels and the filters; strides, dilations, paddings.
PROBLEMS: Final = (
    Problem("depthwise", parse_problem("2x5x7x24:24x3x3", padding=1, groups=24)),
    Problem("depthwise", parse_problem("1x6x9x6:12x2x4", stride=(2, 1), groups=6)),
    Problem("depthwise", parse_problem("1x9x9x5:5x3x3", dilation=2, padding=2, groups=5)),
    # Windows along w: of several times the taps that they hold, of phases, of outputs apart, which
    # need not all be there; what does not fill items; padding on one side.
    Problem("depthwise", parse_problem("2x19x16:16x4", padding=(3, 0), groups=16)),
    Problem("depthwise", parse_problem("1x37x264:264x3", dilation=2, padding=2, groups=264)),
    Problem("depthwise", parse_problem("1x41x8:8x11", stride=2, padding=(2, 5), groups=8)),
    Problem("depthwise", parse_problem("1x67x8:8x7", stride=4, dilation=6, padding=9, groups=8)),
    Problem("depthwise", parse_problem("2x29x12:12x3", dilation=12, padding=(12, 3), groups=12)),
    Problem("depthwise", parse_problem("1x7x19x24:24x9x1", padding=(4, 4, 0, 0), groups=24)),
    Problem("strips", parse_problem("2x9x11x72:72x3x3", padding=1, groups=72)),
    Problem("strips", parse_problem("1x12x9x16:16x5x5", stride=2, padding=2, groups=16)),
    Problem("grouped", parse_problem("2x5x7x12:36x3x3", padding=1, groups=3)),
    Problem("grouped", parse_problem("2x5x7x12:36x3x3", padding=1, groups=3), 2),
    Problem("implicit_gemm", parse_problem("1x6x7x12:9x3x3", padding=1)),
    Problem("implicit_gemm", parse_problem("2x9x11x10:9x3x3", padding=1), 1),
    Problem("implicit_gemm", parse_problem("2x9x11x16:40x3x3", padding=1, groups=2), 3),
    Problem("implicit_gemm", parse_problem("4x12x12x8:72x2x2", stride=(1, 2))),
    Problem("implicit_gemm", parse_problem("3x12x12x7:70x2x2"), 2),
    *(
        Problem(kernel, conv, dtype=dtype)
        for dtype in ("int8", "float8_e4m3fn")
        for kernel, conv in (
            ("depthwise", parse_problem("2x5x7x24:24x3x3", padding=1, groups=24)),
            ("depthwise", parse_problem("1x6x9x6:12x2x4", stride=(2, 1), groups=6)),
            ("strips", parse_problem("2x9x11x80:80x3x3", padding=1, groups=80)),
            ("strips", parse_problem("1x12x9x16:16x5x5", stride=2, padding=2, groups=16)),
            ("grouped", parse_problem("2x5x7x12:36x3x3", padding=1, groups=3)),
            ("grouped", parse_problem("1x5x7x9:6x3x2", groups=3)),
            ("implicit_gemm", parse_problem("1x6x7x12:9x3x3", padding=1)),
            ("implicit_gemm", parse_problem("2x9x11x10:9x3x3", padding=1)),
        )
    ),
    Problem("stem", parse_problem("1x13x14x3:32x3x3", stride=2, padding=1)),
    Problem("stem", parse_problem("2x9x20x4:40x3x3", padding=1), 1),
)


@dataclass(frozen=True)
class Launch:
    """What the Mojo side passes for a problem."""

    kernel: str
    blocks: int
    threads: int
    shared_bytes: int
    epilogues: tuple[bytes, bytes]
    geometry: bytes
    behind: int
    ptx: str

    @classmethod
    def of(cls, line: str, folder: Path) -> Launch:
        """Reads a line of the Mojo side."""
        name, blocks, threads, shared, bare, fused, shape, behind = line.split()
        return cls(
            kernel=name,
            blocks=int(blocks),
            threads=int(threads),
            shared_bytes=int(shared),
            epilogues=(bytes.fromhex(bare), bytes.fromhex(fused)),
            geometry=bytes.fromhex(shape),
            behind=int(behind),
            ptx=(folder / f"{name}.ptx").read_text(),
        )


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[Launch]:
    """Of the problems, with the kernels' PTX."""
    folder, lines = ptx.emit_once("emit_generic", tmp_path_factory, *map(str, PROBLEMS))
    assert len(lines) == len(PROBLEMS)
    return [Launch.of(line, folder) for line in lines]


@bare_or_fused(PROBLEMS)
def test_sums_are_exact(launches: list[Launch], index: int, fused: bool) -> None:
    """Of small integers; outputs are rounded to their type."""
    problem, launch = PROBLEMS[index].conv, launches[index]
    rng = np.random.default_rng(index)

    def drawn(*shape: Any, least: int = -3, most: int = 3) -> Array:
        return rng.integers(least, most + 1, [int(size) for size in shape]).astype(np.float32)

    dtype = PROBLEMS[index].dtype
    # Every int8: float32 adds up no more of them than it can without rounding.
    least, most = (-128, 127) if dtype == "int8" else (-3, 3)
    layout = "KRSC" if len(problem.stride) == 2 else "KSC"
    x = drawn(*problem.input_shape, least=least, most=most)
    w = drawn(*problem.filter_shape(layout), least=least, most=most)
    scale, bias = drawn(problem.filters), drawn(problem.filters)
    residual = drawn(*problem.output_shape)
    machine = Machine("sm_90a", sms=4, seed=index)
    output = machine.alloc(bfloat16(np.zeros_like(residual)), written=False)
    epilogue = with_fused(launch.epilogues[fused], machine, scale, bias, bfloat16(residual))
    activation, filter = machine.alloc(stored(x, dtype)), machine.alloc(stored(w, dtype))
    machine.load(launch.ptx).launch(
        grid=PROBLEMS[index].blocks or launch.blocks,
        block=launch.threads,
        shared_bytes=launch.shared_bytes,
        args=[
            int(activation).to_bytes(8, "little"),
            filter,
            epilogue,
            int(output).to_bytes(8, "little"),
            launch.geometry,
            *([launch.behind] if launch.behind >= 0 else []),
        ],
        budget=40_000_000,
    )
    expected = conv_reference(
        x,
        w,
        stride=problem.stride,
        dilation=problem.dilation,
        pad_before=problem.pad_before,
        pad_after=problem.pad_after,
        groups=problem.groups,
    ).astype(np.float32)
    if fused:
        expected = np.maximum(expected * scale + bias, 0) + residual
    assert np.array_equal(floats(output.read()), floats(bfloat16(expected)))


def test_every_kernel_runs(launches: list[Launch]) -> None:
    """On blocks of several tiles too, where blocks take tiles in turn."""
    kinds = {"depthwise", "strips", "grouped", "implicit_gemm", "stem"}
    assert {launch.kernel.split("-")[0] for launch in launches} == kinds
    in_turn = zip(PROBLEMS, launches, strict=True)
    assert {p.kernel for p, launch in in_turn if p.blocks and p.blocks < launch.blocks} == {
        "grouped",
        "implicit_gemm",
        "stem",
    }
