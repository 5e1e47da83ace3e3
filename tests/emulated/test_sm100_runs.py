"""The Blackwell convolution on the emulator: right in every configuration that ships, on problems
that reach every role's edge, whatever the order in which warps run and copies complete.

The emulator reports races, deadlocks, misuse of barriers and tensor memory, and what is leaked.
Operands are small integers, so results must be exact.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests import blackwell
from tests.blackwell import Kernel, Program
from tests.emulated.sm100_convolution import Case, Fused, run

from maxconv._problem import ConvProblem
from ptxemu import (
    DeadlockError,
    EmulatorError,
    FenceError,
    RaceError,
    UnfinishedError,
)

CANDIDATES = 9
RELU, LEAKY_RELU = 1, 3
HARD_SWISH, HARD_SIGMOID = 6, 10


def problem(
    images: int,
    size: tuple[int, ...],
    channels: int,
    filters: int,
    taps: tuple[int, ...],
    stride: int | tuple[int, ...] = 1,
    dilation: int | tuple[int, ...] = 1,
    padding: tuple[int | tuple[int, ...], int | tuple[int, ...]] = (1, 1),
    groups: int = 1,
) -> ConvProblem:
    """A problem; one number is every dimension's."""

    def each(value: int | tuple[int, ...]) -> tuple[int, ...]:
        return (value,) * len(size) if isinstance(value, int) else value

    return ConvProblem(
        batch=images,
        input_size=size,
        channels=channels,
        filters=filters,
        filter_size=taps,
        stride=each(stride),
        dilation=each(dilation),
        pad_before=each(padding[0]),
        pad_after=each(padding[1]),
        groups=groups,
    )


FURTHER_SEEDS = [pytest.param(seed, marks=pytest.mark.extended) for seed in range(1, 4)]

#: Six tiles and partial ones of 128 pixels and filters; 80 channels are a slice and a part of one.
PARTIAL = problem(3, (9, 11), 80, 200, (2, 3))
WALKS = {
    "one_tile": problem(1, (5, 7), 64, 64, (1, 1), padding=(0, 0)),
    "strided": problem(2, (21, 13), 72, 136, (3, 2), (2, 3), (2, 1), ((1, 0), (3, 2))),
    "one_dimension": problem(2, (150,), 24, 72, (5,), 2, 1, (3, 1)),
    "three_dimensions": problem(
        2, (5, 7, 6), 24, 72, (3, 2, 3), (1, 2, 1), (1, 1, 2), ((1, 0, 2), (0, 1, 2))
    ),
    "groups": problem(2, (9, 9), 48, 144, (3, 3), groups=3),
    "few_channels": problem(1, (12, 12), 8, 8, (3, 3)),
}
ALL_FUSED = Fused(bias=True, scale=True, activation=LEAKY_RELU, final_activation=RELU, beta=2.0)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program that describes launches."""
    return blackwell.program(tmp_path_factory)


@pytest.fixture(scope="module")
def kernels(program: Program) -> dict[str, Kernel]:
    """Every kernel, compiled."""
    return program.kernels()


def check(program: Program, kernel: Kernel, case: Case, seed: int, sms: int = 0) -> None:
    """Runs a case, whose result must be exact."""
    np.testing.assert_array_equal(
        run(program, kernel, case, seed, sms).output, case.expected(kernel)
    )


@pytest.mark.parametrize("seed", [0, *FURTHER_SEEDS])
@pytest.mark.parametrize("index", range(CANDIDATES))
def test_partial_tiles_in_several_waves(
    program: Program, kernels: dict[str, Kernel], index: int, seed: int
) -> None:
    check(program, kernels[f"plain-{index}"], Case(PARTIAL, seed=seed), seed)


@pytest.mark.parametrize("index", [0, 1, 6])
@pytest.mark.parametrize("name", WALKS)
def test_walks(program: Program, kernels: dict[str, Kernel], name: str, index: int) -> None:
    check(program, kernels[f"plain-{index}"], Case(WALKS[name]), len(name))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float8", "int8"])
def test_types(program: Program, kernels: dict[str, Kernel], dtype: str, index: int) -> None:
    """float8 as e4m3 by e5m2, and e5m2 by itself."""
    assert [kernels[f"float8-{i}"].act for i in (0, 1)] == ["float8_e4m3fn", "float8_e5m2"]
    assert kernels["float8-1"].filter == "float8_e5m2"
    fused = Fused(bias=True, scale=True, activation=RELU)
    case = Case(problem(2, (9, 11), 80, 72, (3, 3)), fused, seed=3)
    check(program, kernels[f"{dtype}-{index}"], case, index)


@pytest.mark.parametrize("activation", [HARD_SWISH, HARD_SIGMOID])
def test_ramps(program: Program, kernels: dict[str, Kernel], activation: int) -> None:
    """One formula of the kernel's, with and without its argument as a factor."""
    fused = Fused(bias=True, scale=True, activation=activation)
    check(program, kernels["float16-0"], Case(problem(1, (6, 7), 16, 24, (1, 1)), fused, seed=4), 1)


@dataclass(frozen=True)
class Cancelling(Case):
    """Sums near 2^25, positive of one half of the channels and negative of the other."""

    def operands(self) -> dict[str, npt.NDArray[Any]]:
        """As large as int8 gets, but for their lowest bits."""
        drawn = super().operands()
        rng = np.random.default_rng(self.seed)
        for name in ("activation", "filter"):
            drawn[name] = 127.0 - rng.integers(0, 2, drawn[name].shape)
        drawn["filter"][..., : int(self.problem.channels) // 2] *= -1
        return drawn


def test_partial_sums_of_integers(program: Program, kernels: dict[str, Kernel]) -> None:
    """Blocks that share a tile add integers: their partial sums do not fit float32."""
    kernel = kernels["int8-8"]
    assert kernel.split_k == 2
    case = Cancelling(problem(1, (5, 7), 4096, 64, (1, 1), padding=(0, 0)), seed=1)
    assert (np.abs(case.expected(kernel)) < 2048).any()
    check(program, kernel, case, 1)


@pytest.mark.parametrize("seed", [0, *FURTHER_SEEDS])
@pytest.mark.parametrize("index", [0, 1, 7])
def test_residual(program: Program, kernels: dict[str, Kernel], index: int, seed: int) -> None:
    check(program, kernels[f"residual-{index}"], Case(PARTIAL, ALL_FUSED, seed), seed)


@pytest.mark.parametrize("name", ["computes-0", "computes-1", "stores-0", "stores-1"])
def test_fused_work(program: Program, kernels: dict[str, Kernel], name: str) -> None:
    """In registers and after shared memory, each with and without a residual, in 3-D."""
    kernel = kernels[name]
    assert {
        kernels[f"{kind}-{i}"].registers for kind in ("computes", "stores") for i in (0, 1)
    } == {
        0,
        1,
    }
    beta = 2.0 if kernel.residual else 0.0
    fused = Fused(bias=True, activation=RELU, beta=beta)
    check(program, kernel, Case(WALKS["three_dimensions"], fused), 5)


@pytest.mark.parametrize(
    ("name", "beta"),
    [
        ("lambda-computes-0", 0.0),
        # A residual that is multiplied with 0 leaves the function where it is.
        ("lambda-computes-2", 0.0),
        ("lambda-stores-1", 0.0),
        ("lambda-both-0", 2.0),
    ],
)
def test_functions_behind_the_epilogue(
    program: Program, kernels: dict[str, Kernel], name: str, beta: float
) -> None:
    """One that computes, one that stores into memory that it captures, and both, on partial tiles
    of pixels and filters."""
    of_them = [kernel for kernel in kernels.values() if kernel.has_lambda]
    assert {(k.lambda_computes, k.registers) for k in of_them} >= {(1, 0), (1, 1), (0, 1)}
    assert {k.name for k in of_them if k.residual} == {"lambda-computes-2", "lambda-both-0"}
    fused = Fused(bias=True, activation=LEAKY_RELU, beta=beta)
    case = Case(problem(2, (9, 11), 24, 72, (1, 2)), fused, seed=len(name))
    check(program, kernels[name], case, len(name))


@pytest.fixture(scope="module")
def every_program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program with every kind of work on every configuration."""
    return blackwell.program(tmp_path_factory, "EVERY")


@pytest.fixture(scope="module")
def every_kernel(every_program: Program) -> dict[str, Kernel]:
    """Its kernels."""
    return every_program.kernels()


@pytest.mark.extended
@pytest.mark.parametrize("index", range(CANDIDATES))
@pytest.mark.parametrize(
    "kind",
    [
        *("residual", "computes", "computes-rows", "stores", "stores-rows"),
        *("float16", "float32", "float8", "int8"),
    ],
)
def test_every_kind_of_work(
    every_program: Program, every_kernel: dict[str, Kernel], kind: str, index: int
) -> None:
    """On every configuration that ships, over partial tiles in several waves."""
    kernel = every_kernel[f"{kind}-{index}"]
    assert kernel.residual or kind != "residual"
    beta = 2.0 if kernel.residual else 0.0
    fused = Fused(bias=True, scale=True, activation=LEAKY_RELU, final_activation=RELU, beta=beta)
    size = problem(2, (9, 11), 80, 200 if kernel.tile_n > 64 else 72, (2, 3))
    check(every_program, kernel, Case(size, fused, seed=index), index)


@pytest.mark.parametrize("sms", [4, 8])
def test_every_multiprocessor_count(program: Program, kernels: dict[str, Kernel], sms: int) -> None:
    """One cluster takes all the work, or each has its own and none is left."""
    case = Case(problem(1, (23, 23), 64, 264, (1, 1), padding=(0, 0)))
    check(program, kernels["plain-6"], case, sms, sms)


#: What is taken out of a kernel, by what, and what the emulator calls it.
FAULTS: dict[str, tuple[str, str, type[EmulatorError] | tuple[type[EmulatorError], ...]]] = {
    "an arrival too many": (
        r"mov\.b32 \t(%r\d+), 4;(\n\t// begin inline asm\n\tmbarrier\.init)",
        r"mov.b32 \t\1, 5;\2",
        DeadlockError,
    ),
    "bytes too few": (r"mov\.b32 \t(%r\d+), 32768;", r"mov.b32 \t\1, 32752;", DeadlockError),
    "no commit of a stage": (
        r"tcgen05\.commit[^;]*;(?=.*tcgen05\.commit)",
        "",
        DeadlockError,
    ),
    "no commit of an accumulator": (
        r"tcgen05\.commit[^;]*;(?!.*tcgen05\.commit)",
        "",
        DeadlockError,
    ),
    "barriers not published": (r"fence\.mbarrier_init[^;]*;", "", FenceError),
    "output not published": (r"fence\.proxy\.async\.shared::cta;", "", FenceError),
    "tensor memory read too early": (r"tcgen05\.wait::ld[^;]*;", "", RaceError),
    "output stored too early": (r"bar\.sync (%r\d+), 128;", "", RaceError),
    "output buffer written too early": (
        r"cp\.async\.bulk\.wait_group[^;]*;",
        "",
        (RaceError, UnfinishedError),
    ),
    "tensor memory not freed": (r"tcgen05\.dealloc[^;]*;", "", UnfinishedError),
}
_SEES_CLUSTER = r"mbarrier\.try_wait\.parity\.acquire\.cluster[^;]*;"
#: As ``FAULTS``, of a kernel whose tiles four blocks share.
SHARED_FAULTS: dict[str, tuple[str, str, type[EmulatorError]]] = {
    "partial sums sent too early": (
        f"{_SEES_CLUSTER}(?=.*{_SEES_CLUSTER})",
        "setp.eq.u32 complete, 0, 0;",
        RaceError,
    ),
    "partial sums added too early": (
        f"{_SEES_CLUSTER}(?!.*{_SEES_CLUSTER})",
        "setp.eq.u32 complete, 0, 0;",
        RaceError,
    ),
    "a partial sum not told of": (
        r"mbarrier\.arrive\.release\.cluster[^;]*;(?=.*mbarrier\.arrive\.release\.cluster)",
        "",
        DeadlockError,
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        *FAULTS,
        "partial sums added too early",
        *(
            pytest.param(name, marks=pytest.mark.extended)
            for name in SHARED_FAULTS
            if name != "partial sums added too early"
        ),
    ],
)
def test_a_faulty_kernel_is_found_out(
    program: Program, kernels: dict[str, Kernel], name: str
) -> None:
    """What the other tests rely on."""
    kernel = kernels["plain-7" if name in SHARED_FAULTS else "plain-0"]
    pattern, replacement, error = {**FAULTS, **SHARED_FAULTS}[name]
    text, count = re.subn(pattern, replacement, kernel.ptx, flags=re.DOTALL)
    assert count
    with pytest.raises(error):
        run(program, kernel, Case(PARTIAL), 0, ptx=text)
