"""Which kernels an op is compiled with for a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from maxconv._fields import Kernel, Precision
from maxconv._gpu import gpu_kernels, known_filter
from maxconv.problem import ConvProblem

STEM, DEPTHWISE = Kernel.STEM, Kernel.DEPTHWISE
TILED = {Kernel.SM90, Kernel.SM100}
GROUPED, GEMM = Kernel.GROUPED, Kernel.IMPLICIT_GEMM


def problem(
    channels: int, filters: int, groups: int = 1, taps: tuple[int, int] = (3, 3)
) -> ConvProblem:
    return ConvProblem.from_parts(
        (1, 9, 9, channels),
        filters=filters,
        filter_size=taps,
        group_channels=channels // groups,
        groups=groups,
    )


HALF: dict[str, Any] = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
SINGLE: dict[str, Any] = {"dtype": "float32", "out_dtype": "float32"}
EIGHTH: dict[str, Any] = {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("sizes", "types", "wanted"),
    [
        ((64, 64), HALF, {GEMM} | TILED),
        ((64, 64), SINGLE, {GEMM} | TILED),
        ((64, 64), SINGLE | {"precision": Precision.FLOAT32}, {GEMM}),
        ((64, 64), HALF | {"precision": Precision.FLOAT32}, {GEMM} | TILED),
        ((64, 64), EIGHTH, {GEMM} | TILED),
        ((64, 64), HALF | {"out_dtype": "float32"}, {GEMM} | TILED),
        # Pixels of multiples of 16 bytes.
        ((12, 64), HALF, {GEMM}),
        ((12, 64), SINGLE, {GEMM} | TILED),
        ((24, 64), EIGHTH, {GEMM}),
        ((64, 4), HALF, {GEMM}),
        ((64, 4), SINGLE, {GEMM} | TILED),
        ((8, 64), HALF, {STEM, GEMM} | TILED),
        ((3, 64), HALF, {STEM, GEMM}),
        ((3, 64), SINGLE, {GEMM}),
        ((3, 64), HALF | {"out_dtype": "float32"}, {GEMM}),
        ((64, 64, 64), HALF, {DEPTHWISE, GROUPED}),
        ((64, 64, 64), EIGHTH, {GROUPED}),
        ((64, 512, 64), HALF, {DEPTHWISE, GEMM}),
        # Groups whose taps are matrices on Hopper.
        ((64, 64, 4), HALF, {GROUPED, GEMM} | TILED),
        ((64, 64, 4), HALF | {"out_dtype": "float32"}, {GEMM} | TILED),
        ((64, 64, 4), SINGLE, {GEMM} | TILED),
        ((64, 64, 4, (1, 1)), HALF, {GEMM} | TILED),
        ((128, 128, 2), HALF, {GEMM} | TILED),
        ((64, 24, 4), HALF, {GROUPED}),
    ],
)
def test_what_is_compiled(sizes: Any, types: Any, wanted: set[Kernel]) -> None:
    assert set(gpu_kernels(problem(*sizes), **types)) == wanted


@pytest.mark.parametrize("dtype", ["float8_e5m2", "int8"])
def test_blackwell_s_types_have_one_kernel(dtype: str) -> None:
    types = EIGHTH | {"dtype": dtype}
    assert gpu_kernels(problem(64, 64), **types) == (Kernel.SM100,)
    assert gpu_kernels(problem(64, 64, 64), **types) == (Kernel.SM100,)


def test_one_by_name() -> None:
    assert gpu_kernels(problem(64, 64), Kernel.REFERENCE, **HALF) == (Kernel.REFERENCE,)


def test_symbolic_channels_may_need_any() -> None:
    from max.graph import Dim

    unknown = ConvProblem.from_parts(
        (1, 9, 9, Dim("c")), filters=64, filter_size=(3, 3), group_channels=Dim("c")
    )
    assert set(gpu_kernels(unknown, **HALF)) == {STEM, DEPTHWISE, GEMM} | TILED
    assert known_filter(unknown, [DEPTHWISE]) == {"taps": 3, "stride": 1}


@pytest.mark.parametrize(
    ("kernels", "known"),
    [
        ({DEPTHWISE}, {"taps": 5, "stride": 2, "group_channels": 4}),
        ({GROUPED, GEMM} | TILED, {"taps": 5, "stride": 2, "group_channels": 4}),
        # What is compiled does not depend on the filter, and ops share it.
        ({GEMM, STEM} | TILED, {}),
    ],
)
def test_what_is_known_of_a_filter(kernels: set[Kernel], known: dict[str, int]) -> None:
    filter = ConvProblem.from_parts(
        (1, 9, 9, 64),
        filters=64,
        filter_size=(3, 5),
        group_channels=4,
        groups=16,
        stride=(1, 2),
    )
    assert known_filter(filter, kernels) == known
