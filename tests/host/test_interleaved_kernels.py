"""CPU kernels on interleaved tensors, element by element and exactly.

A Mojo program (tests/mojo/check_interleaved.mojo) runs the kernels, with every cut of their tasks;
here the problems and the layouts are chosen. It orders tensors by the order of the memory, without
the kernels' address map.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.host.kernel_checks import EPILOGUES, Checker, build, dot_kernels, line_of, shrink

from maxconv._fields import BLOCKS, Activation, Layout
from maxconv._problem import ConvProblem
from maxconv._problems import load_problems

Placed = tuple[int, bool]
"""Channels of a block, or 0 for channels last, and whether images are neighbours."""

LAST: Placed = (0, False)
PLACED: list[Placed] = [LAST, *itertools.product(BLOCKS, (False, True))]

#: From and to: every layout to itself, every pair of others in turn, and what MegEngine's CUTLASS
#: kernels pair.
PAIRS = [pair for pair in itertools.product(PLACED, PLACED) if pair != (LAST, LAST)]
SAME = [(placed, placed) for placed in PLACED[1:]]
PAIRINGS = [
    ((4, False), (4, False)),
    ((4, True), (4, True)),
    ((32, False), (32, False)),
    ((4, False), (32, False)),
    ((32, False), (4, False)),
]

EVERYWHERE = {"reference", "widening"}
"""The kernels that every CPU has."""


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checker]:
    """The program, running."""
    with Checker(build("check_interleaved", tmp_path_factory.mktemp("interleaved"))) as running:
        yield running


def check(
    checker: Checker,
    name: str,
    problem: ConvProblem,
    pair: tuple[Placed, Placed],
    epilogue: tuple[bool, bool, Activation, Layout],
) -> set[str]:
    numbers = " ".join(str(int(number)) for placed in pair for number in placed)
    return checker.check(name, f"{line_of(problem, *epilogue)} {numbers}")


def in_blocks(problem: ConvProblem, pair: tuple[Placed, Placed]) -> ConvProblem:
    """The problem, with as many channels and filters as fill the blocks."""
    (x, _), (out_x, _) = pair
    return ConvProblem(
        batch=problem.batch,
        input_size=problem.input_size,
        channels=-(-int(problem.channels) // (x or 1)) * (x or 1),
        filters=-(-int(problem.filters) // (out_x or 1)) * (out_x or 1),
        filter_size=problem.filter_size,
        stride=problem.stride,
        dilation=problem.dilation,
        pad_before=problem.pad_before,
        pad_after=problem.pad_after,
        groups=1,
    )


def test_named_problems(checker: Checker) -> None:
    pairs = itertools.cycle([*PAIRINGS, *SAME, *PAIRS])
    ran = {}
    for i, (name, named) in enumerate(load_problems().items()):
        problem = shrink(named.problem)
        if problem.spatial_rank == 2 and problem.groups == 1:
            pair = next(pairs)
            epilogue = EPILOGUES[i % len(EPILOGUES)]
            ran[name] = check(checker, name, in_blocks(problem, pair), pair, epilogue)
    assert len(ran) > len(PAIRINGS) + len(SAME)
    assert all(kernels >= EVERYWHERE for kernels in ran.values()), ran
    every = {*dot_kernels("int8", "bfloat16", "float16")}
    assert set.union(*ran.values()) == EVERYWHERE | every


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_of_layouts(checker: Checker, pair: tuple[Placed, Placed]) -> None:
    """With a stride and padding, several images, and more than a register tile of everything."""
    problem = ConvProblem(
        batch=3,
        input_size=(9, 11),
        channels=96,
        filters=64,
        filter_size=(3, 2),
        stride=(2, 1),
        dilation=(1, 2),
        pad_before=(1, 0),
        pad_after=(2, 1),
        groups=1,
    )
    assert check(checker, "pairs", problem, pair, EPILOGUES[3]) >= EVERYWHERE


@st.composite
def problems(draw: st.DrawFn) -> tuple[ConvProblem, tuple[Placed, Placed]]:
    """Draws a pair of layouts, and a problem that they hold."""
    pair = draw(st.sampled_from(PAIRS))

    def each(low: int, high: int) -> tuple[int, ...]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    filter_size, dilation = each(1, 4), each(1, 3)
    pad_before, pad_after = each(0, 3), each(0, 3)
    sizes = tuple(
        max(draw(st.integers(1, 20)), (taps - 1) * step + 1 - before - after)
        for taps, step, before, after in zip(
            filter_size, dilation, pad_before, pad_after, strict=True
        )
    )
    problem = ConvProblem(
        batch=draw(st.integers(1, 5)),
        input_size=sizes,
        channels=draw(st.integers(1, 70)),
        filters=draw(st.integers(1, 70)),
        filter_size=filter_size,
        stride=each(1, 3),
        dilation=dilation,
        pad_before=pad_before,
        pad_after=pad_after,
        groups=1,
    )
    return in_blocks(shrink(problem), pair), pair


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=problems(), epilogue=st.sampled_from(EPILOGUES))
def test_random_problems(
    checker: Checker,
    drawn: tuple[ConvProblem, tuple[Placed, Placed]],
    epilogue: tuple[bool, bool, Activation, Layout],
) -> None:
    problem, pair = drawn
    check(checker, "random", problem, pair, epilogue)
