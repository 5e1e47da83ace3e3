"""Heron's operators: the convolution that each becomes computes it, on this machine's CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.reference import conv_reference

from maxconv import _cli as cli
from maxconv._fields import Layout, encode_scalars
from maxconv._library_files import Family
from maxconv._native import Call, host
from maxconv._packing import pack_filter
from maxconv._problem import ConvProblem
from maxconv.tuner.asked import asked_of
from maxconv.tuner.heron import (
    OPERATORS,
    BatchedProduct,
    Convolution,
    MatrixProduct,
    Operator,
    PrefixSum,
    TransposedConvolution,
    VectorProduct,
    load_operators,
    operator_problems,
)
from maxconv.tuner.space import TARGET_NAMES, open_space

Array = npt.NDArray[Any]


def convolved(problem: ConvProblem, x: Array, krsc: Array) -> Array:
    """What the kernels compute in float32, as PyTorch's calls run them."""
    layout = {1: "KSC", 2: "KRSC", 3: "KTRSC"}[problem.spatial_rank]
    packed = pack_filter(krsc, layout, groups=problem.groups, dtype="float32")
    activation = np.ascontiguousarray(x, np.float32)
    assert activation.shape == problem.input_shape
    output = np.full(tuple(map(int, problem.output_shape)), np.nan, np.float32)
    call = Call.of(
        activation.shape,
        output.shape,
        packed.data.size,
        problem.geometry(filter_layout=Layout.PACKED),
        encode_scalars(),
    )
    prepared = host(Family("float32", "float32", "float32", scaled=False)).prepare(call)
    addresses = (activation.ctypes.data, packed.data.ctypes.data, 0, 0, 0)
    prepared.run(*addresses, output.ctypes.data, 1, 0)
    return output


def direct(operator: Convolution, x: Array, krsc: Array) -> Array:
    rank = len(operator.filter)
    return conv_reference(
        x,
        krsc,
        stride=(operator.stride,) * rank,
        dilation=(operator.dilation,) * rank,
        pad_before=(operator.padding,) * rank,
        pad_after=(operator.padding,) * rank,
    )


def transposed(operator: TransposedConvolution, x: Array, ckrs: Array) -> Array:
    """The definition: each input adds the filter, scaled by it, where it stands in the output."""
    batch, height, width, _ = x.shape
    _, filters, rows, columns = ckrs.shape
    step, pad = operator.stride, operator.padding
    whole = np.zeros(
        (batch, (height - 1) * step + rows, (width - 1) * step + columns, filters), np.float64
    )
    for i in range(height):
        for j in range(width):
            patch = np.einsum("nc,ckrs->nrsk", x[:, i, j], ckrs)
            whole[:, i * step : i * step + rows, j * step : j * step + columns] += patch
    more = operator.output_padding
    padded = np.pad(whole, [(0, 0), (0, more), (0, more), (0, 0)])
    return padded[:, pad : padded.shape[1] - pad, pad : padded.shape[2] - pad]


def product(_: Operator, first: Array, second: Array) -> Array:
    return np.asarray(first @ np.swapaxes(second, -1, -2))


def vector_product(_: Operator, first: Array, second: Array) -> Array:
    return np.asarray(second @ first)


def prefix_sum(operator: PrefixSum, first: Array, _: Array) -> Array:
    ends = (first[:, :i].sum(1) for i in range(operator.outputs))
    return np.stack(list(ends), 1)


#: A small one of each operator: its operands' shapes, and what it computes, in float64.
CASES: dict[str, tuple[Operator, tuple[int, ...], tuple[int, ...], Callable[..., Array]]] = {
    "c1d": (Convolution((2, 19, 8), 16, (3,), padding=4), (2, 19, 8), (16, 3, 8), direct),
    "c2d": (
        Convolution((2, 9, 8, 16), 24, (3, 3), stride=2, padding=1),
        (2, 9, 8, 16),
        (24, 3, 3, 16),
        direct,
    ),
    "c3d": (
        Convolution((1, 4, 6, 7, 8), 16, (3, 3, 3), padding=1),
        (1, 4, 6, 7, 8),
        (16, 3, 3, 3, 8),
        direct,
    ),
    "dil": (
        Convolution((2, 11, 12, 8), 16, (3, 3), padding=1, dilation=2),
        (2, 11, 12, 8),
        (16, 3, 3, 8),
        direct,
    ),
    "t2d": (
        TransposedConvolution((2, 7, 6, 8), 16, (3, 3), padding=1),
        (2, 7, 6, 8),
        (8, 16, 3, 3),
        transposed,
    ),
    "t2d whose phases have different filters": (
        TransposedConvolution((2, 5, 6, 8), 16, (3, 3), stride=2, padding=1, output_padding=1),
        (2, 5, 6, 8),
        (8, 16, 3, 3),
        transposed,
    ),
    "t2d whose phases are one convolution": (
        TransposedConvolution((2, 5, 6, 8), 16, (2, 2), stride=2),
        (2, 5, 6, 8),
        (8, 16, 2, 2),
        transposed,
    ),
    "t2d of which phases are empty": (
        TransposedConvolution((2, 5, 6, 8), 16, (1, 1), stride=2),
        (2, 5, 6, 8),
        (8, 16, 1, 1),
        transposed,
    ),
    "t2d that is cut": (
        TransposedConvolution((1, 9, 8, 8), 16, (3, 3), stride=3, padding=2),
        (1, 9, 8, 8),
        (8, 16, 3, 3),
        transposed,
    ),
    "gemm": (MatrixProduct(37, 48, 24), (37, 48), (24, 48), product),
    "gemv": (VectorProduct(40, 24), (24,), (40, 24), vector_product),
    "bmm": (BatchedProduct(3, 21, 16, 32), (3, 21, 16), (3, 32, 16), product),
    "scan": (PrefixSum(5, 24, 40), (5, 24), (40, 24), prefix_sum),
    "scan in blocks": (PrefixSum(5, 64, 64, block=16), (5, 64), (16, 16), prefix_sum),
}


@pytest.mark.parametrize("name", CASES)
def test_the_convolutions_of_an_operator_compute_it(name: str) -> None:
    operator, *shapes, define = CASES[name]
    rng = np.random.default_rng(5)
    first, second = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    if isinstance(operator, PrefixSum):
        second = operator.triangle
    assert (first.shape, second.shape) == (shapes[0], shapes[1])
    pairs = operator.operands(first, second)
    outputs = [
        convolved(problem, *pair)
        for problem, pair in zip(operator.convolutions, pairs, strict=True)
    ]
    expected = define(operator, first.astype(np.float64), second.astype(np.float64))
    found = operator.result(outputs, first)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


def test_a_transposed_convolution_is_as_many_as_its_phases_differ() -> None:
    counts = {name: len(case[0].convolutions) for name, case in CASES.items()}
    assert counts["t2d"] == 1
    assert counts["t2d whose phases have different filters"] == 4
    assert counts["t2d whose phases are one convolution"] == 1
    assert CASES["t2d whose phases are one convolution"][0].convolutions[0].filters == 64
    assert counts["t2d of which phases are empty"] == 1
    assert CASES["t2d of which phases are empty"][0].convolutions[0].filters == 16


def test_every_operator_of_heron_has_shapes_and_a_small_one_is_tested() -> None:
    assert load_operators().keys() == OPERATORS.keys()
    assert {name.split()[0] for name in CASES} == OPERATORS.keys()
    for name, shapes in load_operators().items():
        assert len(shapes) >= 5, name
        assert {type(operator) for operator in shapes.values()} == {OPERATORS[name]}
    assert load_operators()["gemm"]["G3"] == MatrixProduct(m=32, k=2048, n=1000)
    gemm = load_operators()["gemm"]["G3"].convolutions[0].gemm
    assert (gemm.m, gemm.k, gemm.n) == (32, 2048, 1000)
    with pytest.raises(ValueError, match="scan: blocks of 7 do not divide 64 inputs for 64"):
        PrefixSum(5, 64, 64, block=7)


def test_the_suite_has_names_and_operators() -> None:
    every = operator_problems()
    assert len({named.name for named in every}) == len(every) == 53
    chosen = operator_problems(["gemm", "bmm"])
    names = [named.name for named in chosen]
    assert [name for name in names if re.fullmatch(r"heron\.(gemm|bmm)\.[GB]\d", name)] == names
    assert [named.family for named in chosen] == [name.split(".")[1] for name in names]
    with pytest.raises(ValueError, match="operator: 'gem' is no operator; c1d, c2d, c3d, dil, t"):
        operator_problems(["gem"])
    parser = cli.build_parser(["tune"])
    args = parser.parse_args(["tune", "--suite", "heron", "--operator", "gemm", "bmm"])
    assert [each.name for each in asked_of(args)] == names
    args = parser.parse_args(["tune", "--suite", "problems", "--operator", "gemm"])
    with pytest.raises(ValueError, match="--operator: it goes with --suite heron"):
        asked_of(args)


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_every_target_takes_the_suite(target: str) -> None:
    for named in operator_problems():
        assert open_space(named.problem, target).problem == named.problem, named.name
