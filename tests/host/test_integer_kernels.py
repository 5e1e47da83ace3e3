"""Every CPU kernel of 8-bit integers, element by element and exactly.

A Mojo program (tests/mojo/check_integers.mojo) runs the kernels; here the problems are chosen. Its
sums are 64-bit integers, its zero points the least, the largest and others.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.host.kernel_checks import (
    EPILOGUES,
    FEATURES,
    Checker,
    build,
    dot_kernels,
    line_of,
    shrink,
    small_problems,
)

from maxconv._fields import Activation, Layout
from maxconv._problem import ConvProblem
from maxconv._problems import load_problems

EVERYWHERE = {"reference", "depthwise", "grouped", "widening", "winograd"}
"""The kernels of integers that every CPU has."""

MAX_WINOGRAD_PRODUCTS = (2**31 - 1) // (255 * 128) // 4
"""Of an output: winograd's sums are 4 times as large."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, compiled."""
    return build("check_integers", tmp_path_factory.mktemp("integers"))


@pytest.fixture(scope="module")
def checker(program: Path) -> Iterator[Checker]:
    """The program, running."""
    with Checker(program) as running:
        yield running


def test_named_problems(checker: Checker) -> None:
    ran = {
        name: checker.check(name, line_of(shrink(named.problem), *EPILOGUES[i % len(EPILOGUES)]))
        for i, (name, named) in enumerate(load_problems().items())
    }
    assert all("reference" in kernels and len(kernels) > 1 for kernels in ran.values()), ran
    assert set.union(*ran.values()) == EVERYWHERE | {*dot_kernels("int8")}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=small_problems(), epilogue=st.sampled_from(EPILOGUES))
def test_random_problems(
    checker: Checker, problem: ConvProblem, epilogue: tuple[bool, bool, Activation, Layout]
) -> None:
    checker.check("random", line_of(shrink(problem), *epilogue))


def test_features_that_are_left_out_are_not_used(program: Path) -> None:
    line = line_of(load_problems()["odd.asymmetric_padding"].problem, *EPILOGUES[0])
    for features in ("", "avx_vnni", "amx_bf16", "avx512_vnni,amx_int8"):
        ran = Checker(program, features=features).check("left_out", line)
        left = dot_kernels("int8", features={*features.split(",")})
        assert ran & {*FEATURES, "widening"} == {*left, "widening"}


def test_depthwise_beyond_float32(checker: Checker) -> None:
    """Where float32 may not hold a sum, the reference adds."""
    problem = ConvProblem(
        batch=1,
        input_size=(23, 25),
        channels=5,
        filters=5,
        filter_size=(23, 23),
        stride=(1, 1),
        dilation=(1, 1),
        pad_before=(0, 1),
        pad_after=(0, 0),
        groups=5,
    )
    assert checker.check("large", line_of(problem, *EPILOGUES[1])) == {"reference"}


@pytest.mark.parametrize("taps", [2, 3])
def test_the_largest_sums(checker: Checker, taps: int) -> None:
    """As many products as winograd takes, whose scaled sums fill int32: all of one sign."""
    problem = ConvProblem(
        batch=1,
        input_size=(5, 4),
        channels=MAX_WINOGRAD_PRODUCTS // taps**2 // 4 * 4,
        filters=17,
        filter_size=(taps, taps),
        stride=(1, 1),
        dilation=(1, 1),
        pad_before=(0, 0),
        pad_after=(0, 0),
        groups=1,
    )
    deeper = dataclasses.replace(problem, channels=problem.channels + 4)
    none = (False, False, Activation.NONE, Layout.RSCF)
    assert "winograd" in checker.check("extremes", line_of(problem, *none))
    assert "winograd" not in checker.check("extremes", line_of(deeper, *none))


def test_winograd_cuts_large_filters_into_rounds(checker: Checker) -> None:
    """A quarter of these filters, a task's usual share, would be too large for a round."""
    problem = ConvProblem(
        batch=1,
        input_size=(3, 4),
        channels=544,
        filters=1040,
        filter_size=(3, 3),
        stride=(1, 1),
        dilation=(1, 1),
        pad_before=(1, 1),
        pad_after=(1, 1),
        groups=1,
    )
    assert "winograd" in checker.check("rounds", line_of(problem, *EPILOGUES[1]))


@pytest.mark.parametrize("filters", [1, 2, 3, 4, 5, 33])
def test_pixels_of_several_register_tiles(checker: Checker, filters: int) -> None:
    """Sums of several tiles are stored together; up to 4 filters have a tile of their own."""
    problem = ConvProblem(
        batch=1,
        input_size=(9, 53),
        channels=72,
        filters=filters,
        filter_size=(3, 1 + filters % 3),
        stride=(1, 1 + filters % 2),
        dilation=(1, 1),
        pad_before=(1, 0),
        pad_after=(0, 1),
        groups=1,
    )
    assert "widening" in checker.check("tiles", line_of(problem, *EPILOGUES[filters % 4]))


def of_groups(
    width: int, taps: tuple[int, ...], image: tuple[int, ...], stride: int = 1, dilation: int = 1
) -> ConvProblem:
    """Returns groups of two panels and more, padded to as many outputs as pixels where each is."""
    pads = tuple((size - 1) * dilation // 2 for size in taps)
    channels = max(width, 16) * (2 + image[-1] % 2)
    return ConvProblem(
        batch=1 + image[-1] % 2,
        input_size=image,
        channels=channels,
        filters=channels,
        filter_size=taps,
        stride=(stride,) * len(taps),
        dilation=(dilation,) * len(taps),
        pad_before=pads,
        # A tap more behind than in front, where there are pads.
        pad_after=tuple(pad + (pad > 0) * (image[-1] % 3 == 0) for pad in pads),
        groups=channels // width,
    )


#: Each form of a filter row that has a tile of its own, and others: taps, stride, dilation.
ROWS = [
    ((3, 3), 1, 1),
    ((3, 3), 2, 1),
    ((3, 3), 1, 2),
    ((5, 5), 1, 1),
    ((1, 1), 1, 1),
    ((1, 1), 2, 1),
    ((2, 4), 1, 1),
    ((3, 3), 3, 1),
    ((5, 5), 2, 2),
    ((2, 3, 3), 1, 1),
    ((3, 3, 3), 2, 1),
    ((7,), 1, 1),
]


@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize(("taps", "stride", "dilation"), ROWS)
def test_narrow_groups(
    checker: Checker, width: int, taps: tuple[int, ...], stride: int, dilation: int
) -> None:
    """Images that tiles divide and others; four widths in turn are the zero points there are."""
    expected = width < 16 or "avx512_vnni" in dot_kernels("int8")
    for index, w in enumerate((1, 2, 5, 7, 8, 13, 14, 15, 16, 23, 28, 29, 34, 43, 75)):
        image = (*(3, 6)[3 - len(taps) :], w)
        if any(
            size + 2 * ((tap - 1) * dilation // 2) < (tap - 1) * dilation + 1
            for size, tap in zip(image, taps, strict=True)
        ):
            continue
        problem = of_groups(width, taps, image, stride, dilation)
        ran = checker.check("groups", line_of(problem, *EPILOGUES[index % len(EPILOGUES)]))
        assert ("grouped" in ran) == expected


def test_narrow_groups_far_beside_the_image(checker: Checker) -> None:
    """Padding wider than a filter: tiles of which no pixel lies inside the image."""
    for width, pads in itertools.product((4, 8, 16), ((0, 40), (40, 0), (17, 3), (2, 2))):
        problem = dataclasses.replace(
            of_groups(width, (3, 3), (4, 9)), pad_before=(5, pads[0]), pad_after=(0, pads[1])
        )
        checker.check("beside", line_of(problem, *EPILOGUES[1]))


def test_narrow_groups_without_vnni(program: Path) -> None:
    """Groups that share a panel are converted to float32, from the same packed filter."""
    with Checker(program, features="") as portable:
        for width, (taps, stride, dilation) in itertools.product((2, 4, 8, 16), ROWS[:4]):
            problem = of_groups(width, taps, (6, 15), stride, dilation)
            ran = portable.check("portable", line_of(problem, *EPILOGUES[1]))
            assert ("grouped" in ran) == (width < 16)


@pytest.mark.parametrize("width", [4, 8, 16])
def test_sums_of_narrow_groups_beyond_float32(checker: Checker, width: int) -> None:
    """`vpdpbusd` adds in int32 what float32 would round."""
    problem = dataclasses.replace(
        of_groups(width, (13, 11), (14, 26)), pad_before=(0, 0), pad_after=(0, 0)
    )
    vnni = "avx512_vnni" in dot_kernels("int8")
    line = line_of(problem, False, False, Activation.NONE, Layout.RSCF)
    assert ("grouped" in checker.check("extremes", line)) == vnni


def test_arm(tmp_path: Path) -> None:
    """What runs on an Arm CPU compiles, with its instructions."""
    target = ("--target-triple", "aarch64-unknown-linux-gnu", "--target-cpu", "neoverse-n1")
    assembly = build("emit_arm", tmp_path, *target, "--emit", "asm").read_text(encoding="utf-8")
    words = {line.split()[0] for line in assembly.splitlines() if line.split()}
    assert words >= {"bfmmla", "smmla", "usmmla", "sdot"}
