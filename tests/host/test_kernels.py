"""Every CPU kernel, element by element and exactly, on named and on random problems.

A Mojo program (tests/mojo/check_kernels.mojo) runs the kernels; here the problems are chosen. It
poisons outputs, guards what lies around them, and needs no tolerance: see its docstring.
"""

from __future__ import annotations

import os
import subprocess
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
    check_everything,
    dot_kernels,
    line_of,
    shrink,
    small_problems,
)

from maxconv._fields import CPU_KERNELS, Activation, Layout
from maxconv._packing import panel_groups
from maxconv._problem import ConvProblem
from maxconv._problems import load_problems


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, compiled."""
    return build("check_kernels", tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def checker(program: Path) -> Iterator[Checker]:
    """The program, running."""
    with Checker(program) as running:
        yield running


def test_named_problems(checker: Checker) -> None:
    ran = {
        name: check_everything(checker, name, shrink(named.problem))
        for name, named in load_problems().items()
    }
    assert all("reference" in kernels and len(kernels) > 1 for kernels in ran.values()), ran
    every = {kernel.name.lower() for kernel in CPU_KERNELS} - {"widening"}
    here = dot_kernels("bfloat16", "float16")
    assert set.union(*ran.values()) == every - (set(FEATURES) - set(here))


def test_features_that_are_left_out_are_not_used(program: Path) -> None:
    line = line_of(load_problems()["odd.asymmetric_padding"].problem, *EPILOGUES[0])
    for features in ("", "avx512_bf16", "amx_bf16,avx512_bf16", "amx_bf16"):
        ran = Checker(program, features=features).check("left_out", line)
        left = dot_kernels("bfloat16", "float16", features={*features.split(",")})
        assert ran & set(FEATURES) == set(left)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=small_problems(), epilogue=st.sampled_from(EPILOGUES))
def test_random_problems(
    checker: Checker, problem: ConvProblem, epilogue: tuple[bool, bool, Activation, Layout]
) -> None:
    checker.check("random", line_of(shrink(problem), *epilogue))


@st.composite
def winograd_problems(draw: st.DrawFn) -> ConvProblem:
    """Draws problems with 2 x 2 or 3 x 3 taps and stride 1 along h and w, mostly odd ones."""
    side = draw(st.sampled_from((2, 3)))
    groups = draw(st.sampled_from((1, 1, 1, 2, 3)))
    width = draw(st.sampled_from((1, 3, 8, 11, 16, 24, 37)))
    group_filters = draw(st.sampled_from((1, 5, 16, 17, 33, 80)))
    deep = draw(st.booleans())
    taps, step, dilation = (draw(st.integers(1, 3)) if deep else 1 for _ in range(3))
    pads = [draw(st.integers(0, 4)) for _ in range(6)]
    if not deep:
        pads[0] = pads[3] = 0
    least = ((taps - 1) * dilation + 1, side, side)
    sizes = (
        max(draw(st.integers(1, longest)), span - before - after)
        for longest, span, before, after in zip(
            (5 if deep else 1, 15, 31), least, pads[:3], pads[3:], strict=True
        )
    )
    return ConvProblem(
        batch=draw(st.integers(1, 3)),
        input_size=tuple(sizes),
        channels=groups * width,
        filters=groups * group_filters,
        filter_size=(taps, side, side),
        stride=(step, 1, 1),
        dilation=(dilation, 1, 1),
        pad_before=tuple(pads[:3]),
        pad_after=tuple(pads[3:]),
        groups=groups,
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=winograd_problems(), epilogue=st.sampled_from(EPILOGUES))
def test_random_problems_of_winograd(
    checker: Checker, problem: ConvProblem, epilogue: tuple[bool, bool, Activation, Layout]
) -> None:
    problem = shrink(problem)
    ran = checker.check("winograd", line_of(problem, *epilogue))
    shared = panel_groups(
        filters=int(problem.filters),
        group_channels=int(problem.group_channels),
        groups=problem.groups,
    )
    assert ("winograd" in ran) == (not problem.is_depthwise and shared == 1)


@st.composite
def input_sizes(
    draw: st.DrawFn,
    longest: tuple[int, ...],
    filter_size: tuple[int, ...],
    dilation: tuple[int, ...],
    pads: list[int],
) -> tuple[int, ...]:
    """Draws an image that the filter fits into, with its padding: three before, three after."""
    return tuple(
        max(draw(st.integers(1, most)), (count - 1) * step + 1 - before - after)
        for most, count, step, before, after in zip(
            longest, filter_size, dilation, pads[:3], pads[3:], strict=True
        )
    )


@st.composite
def strip_problems(draw: st.DrawFn) -> ConvProblem:
    """Draws problems whose filter rows reach over neighbouring rows of the image, of groups with
    enough channels for register tiles that keep to image rows."""
    groups = draw(st.sampled_from((1, 2, 3, 4)))
    width = draw(st.sampled_from((8, 13, 16, 24, 32, 130)))
    deep = draw(st.booleans())
    filter_size = (draw(st.integers(1, 2)) if deep else 1, draw(st.integers(2, 5)), 3)
    stride = (1, draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    dilation = (1, draw(st.integers(1, 2)), draw(st.sampled_from((1, 1, 2))))
    pads = [draw(st.integers(0, 3)) for _ in range(6)]
    if not deep:
        pads[0] = pads[3] = 0
    longest = (3 if deep else 1, 12, 40)
    sizes = draw(input_sizes(longest, filter_size, dilation, pads))
    return ConvProblem(
        batch=draw(st.integers(1, 3)),
        input_size=sizes,
        channels=groups * width,
        filters=groups * draw(st.sampled_from((16, 17, 40))),
        filter_size=filter_size,
        stride=stride,
        dilation=dilation,
        pad_before=tuple(pads[:3]),
        pad_after=tuple(pads[3:]),
        groups=groups,
    )


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=strip_problems(), epilogue=st.sampled_from(EPILOGUES))
def test_random_problems_in_strips(
    checker: Checker, problem: ConvProblem, epilogue: tuple[bool, bool, Activation, Layout]
) -> None:
    assert "implicit_gemm" in checker.check("strips", line_of(shrink(problem), *epilogue))


def test_strips_of_several_slices(checker: Checker) -> None:
    """A slice ends between the filter rows that read one row of the image."""
    problem = ConvProblem(
        batch=1,
        input_size=(5, 10),
        channels=512,
        filters=16,
        filter_size=(3, 3),
        stride=(1, 1),
        dilation=(1, 1),
        pad_before=(1, 1),
        pad_after=(1, 1),
    )
    assert "implicit_gemm" in check_everything(checker, "slices", problem)


@st.composite
def depthwise_problems(draw: st.DrawFn) -> ConvProblem:
    """Draws depthwise problems with the filter widths that have tiles of their own, around the
    widths of those tiles: channels of less than a vector, of several and of each rest."""
    channels = draw(st.sampled_from((7, 16, 19, 31, 32, 33, 40, 48, 49, 63, 64, 83)))
    taps = draw(st.sampled_from((3, 3, 5, 7)))
    deep = draw(st.booleans())
    filter_size = (draw(st.integers(1, 3)) if deep else 1, draw(st.integers(1, 5)), taps)
    stride = (draw(st.integers(1, 2)), draw(st.sampled_from((1, 1, 2))), draw(st.integers(1, 3)))
    dilation = (draw(st.integers(1, 2)), draw(st.sampled_from((1, 1, 2))), draw(st.integers(1, 2)))
    pads = [draw(st.integers(0, 4)) for _ in range(6)]
    if not deep:
        pads[0] = pads[3] = 0
    longest = (5 if deep else 1, 9, 40)
    sizes = draw(input_sizes(longest, filter_size, dilation, pads))
    return ConvProblem(
        batch=draw(st.integers(1, 2)),
        input_size=sizes,
        channels=channels,
        filters=channels,
        filter_size=filter_size,
        stride=stride,
        dilation=dilation,
        pad_before=tuple(pads[:3]),
        pad_after=tuple(pads[3:]),
        groups=channels,
    )


@pytest.fixture(scope="module")
def plain_checker(program: Path) -> Iterator[Checker]:
    """The program, running without any of the instructions that not every CPU has."""
    with Checker(program, features="") as running:
        yield running


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=depthwise_problems(), epilogue=st.sampled_from(EPILOGUES), plain=st.booleans())
def test_random_depthwise_problems(
    checker: Checker,
    plain_checker: Checker,
    problem: ConvProblem,
    epilogue: tuple[bool, bool, Activation, Layout],
    plain: bool,
) -> None:
    running = plain_checker if plain else checker
    assert "depthwise" in running.check("depthwise", line_of(problem, *epilogue))


@pytest.mark.parametrize(
    ("size", "pads", "depth", "groups"),
    [
        # Images of less than a tile, of whole tiles, and with each rest.
        ((1, 2, 2), (0, 0), 1, 1),
        ((1, 1, 2), (1, 1), 1, 1),
        ((1, 7, 10), (0, 0), 1, 1),
        ((1, 7, 10), (1, 1), 1, 1),
        ((1, 9, 14), (0, 1), 1, 3),
        ((4, 6, 5), (1, 0), 2, 1),
        ((3, 5, 8), (1, 1), 3, 2),
    ],
)
def test_winograd_with_two_taps(
    checker: Checker, size: tuple[int, int, int], pads: tuple[int, int], depth: int, groups: int
) -> None:
    problem = ConvProblem(
        batch=2,
        input_size=size,
        channels=20 * groups,
        filters=17 * groups,
        filter_size=(depth, 2, 2),
        stride=(1, 1, 1),
        dilation=(1, 1, 1),
        pad_before=(depth // 2, *pads),
        pad_after=(0, *reversed(pads)),
        groups=groups,
    )
    assert "winograd" in check_everything(checker, "two_taps", problem)


def test_winograd_transforms_large_filters_in_rounds(checker: Checker) -> None:
    """The groups' panels are more than one round's, with any number of threads up to 3."""
    problem = ConvProblem(
        batch=1,
        input_size=(3, 4),
        channels=2 * 272,
        filters=2 * 328,
        filter_size=(3, 3),
        stride=(1, 1),
        dilation=(1, 1),
        pad_before=(1, 1),
        pad_after=(1, 1),
        groups=2,
    )
    assert "winograd" in check_everything(checker, "rounds", problem)


@pytest.mark.parametrize("size", [27, 28, 29, 56, 64])
def test_image_rows_around_the_register_tile(checker: Checker, size: int) -> None:
    """Tiles in place, tiles at an edge and partial tiles meet in one row."""
    problem = ConvProblem(
        batch=1,
        input_size=(3, size),
        channels=16,
        filters=40,
        filter_size=(3, 3),
        stride=(1, 1),
        dilation=(1, 1),
        pad_before=(1, 1),
        pad_after=(1, 1),
    )
    assert "implicit_gemm" in check_everything(checker, f"row{size}", problem)


@pytest.mark.parametrize("pixels", [1, 2, 5, 6, 7, 13, 50])
@pytest.mark.parametrize("filters", [35, 64, 80, 100])
def test_pointwise_around_the_register_tile(checker: Checker, pixels: int, filters: int) -> None:
    """Whole and partial tiles of pixels, and panels that are full, partial and too few."""
    problem = ConvProblem(
        batch=1,
        input_size=(pixels,),
        channels=19,
        filters=filters,
        filter_size=(1,),
        stride=(1,),
        dilation=(1,),
        pad_before=(0,),
        pad_after=(0,),
    )
    assert {"implicit_gemm", "pointwise"} <= check_everything(checker, "tiles", problem)


@pytest.mark.extended
def test_filter_too_large_for_caches(checker: Checker) -> None:
    """Panels are fetched ahead, in several slices, by whole and partial register tiles."""
    problem = ConvProblem(
        batch=1,
        input_size=(28,),
        channels=1168,
        filters=904,
        filter_size=(1,),
        stride=(1,),
        dilation=(1,),
        pad_before=(0,),
        pad_after=(0,),
    )
    assert {"implicit_gemm", "pointwise"} <= check_everything(checker, "streamed", problem)


def test_choices_are_logged_once(program: Path) -> None:
    """A line for each problem, type and kernel, however often it runs, scaled or not."""
    environment = {**os.environ, "MAXCONV_LOG": "dispatch"}
    checker = Checker(program, features="", env=environment, stderr=subprocess.PIPE)
    line = line_of(load_problems()["odd.asymmetric_padding"].problem, *EPILOGUES[0])
    ran = checker.check("first", line)
    others = {"few_filters", "implicit_gemm", "reference"}
    assert checker.check("again", line) == ran == others
    said = checker.process.communicate()[1].splitlines()
    types = ("float32 -> float32", "bfloat16 -> bfloat16", "float16 -> float32")
    problem = (
        "maxconv: 2x(1, 9, 11)x5 -> 7, filter (1, 3, 4), stride (1, 2, 3), dilation (1, 1, 1),"
        " padding (0, 0, 3)/(0, 2, 1), groups 1"
    )
    wanted = sorted(
        f"{problem}, {of}: {kernel}: asked for by config=" for of in types for kernel in ran
    )
    chosen, plans = zip(*(line.split("; ", 1) for line in sorted(said)), strict=True)
    assert list(chosen) == wanted
    # Behind it stands how the kernel runs.
    assert all(plans)
