"""The sub-pixel form of a convolution whose input is enlarged, against the definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.reference import conv_reference

from maxconv._problem import ConvProblem
from maxconv._subpixel import fold_array, saves_products

RNG = np.random.default_rng(3)


@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_the_same_convolution(factor: int, taps: int, groups: int) -> None:
    """Small integers, so that sums are exact whatever their order."""
    checked = 0
    for dilation, before, after, size in itertools.product((1, 2), range(4), range(3), (1, 2, 5)):
        if factor * size + before + after < (taps - 1) * dilation + 1:
            continue
        x = RNG.integers(-4, 5, (2, size, 4)).astype(np.float64)
        w = RNG.integers(-4, 5, (6, taps, 4 // groups)).astype(np.float64)
        problem = ConvProblem.from_parts(
            x.shape, filters=6, filter_size=(taps,), group_channels=4 // groups, dilation=dilation,
            padding=(before, after), groups=groups, upsample=factor,
        )  # fmt: skip
        expected = conv_reference(
            np.repeat(x, factor, 1), w, stride=(1,), dilation=(dilation,), pad_before=(before,),
            pad_after=(after,), groups=groups,
        )  # fmt: skip
        assert problem.output_shape == expected.shape
        run, (axis,) = problem.subpixel, problem.subpixel_axes
        folded = fold_array(w, [axis], groups) if factor > 1 else w
        assert folded.shape == (run.filters, *run.filter_size, 4 // groups)
        computed = conv_reference(
            x, folded, stride=run.stride, dilation=run.dilation, pad_before=run.pad_before,
            pad_after=run.pad_after, groups=groups,
        )  # fmt: skip
        assert run.output_shape == computed.shape
        # The filters of each place in a block follow each other in a group.
        places = computed.reshape(2, -1, groups, factor, 6 // groups).swapaxes(2, 3)
        pixels = places.reshape(2, -1, 6)
        np.testing.assert_array_equal(pixels[:, axis.crop :][:, : expected.shape[1]], expected)
        # No block is computed in vain.
        assert pixels.shape[1] - factor < axis.crop + expected.shape[1] <= pixels.shape[1]
        checked += 1
    assert checked > 20


def test_two_axes() -> None:
    problem = ConvProblem.from_parts(
        (1, 4, 5, 3), filters=2, filter_size=(3, 3), group_channels=3, padding=1, upsample=2
    )
    assert problem.output_shape == (1, 8, 10, 2)
    assert str(problem) == "1x4x5x3 -> 2 3x3 p1x1 u2x2"
    run = problem.subpixel
    assert (run.filters, run.filter_size, run.upsamples) == (8, (2, 2), False)
    w = RNG.integers(-9, 10, (2, 3, 3, 3)).astype(np.float64)
    folded = fold_array(w, problem.subpixel_axes, 1)
    np.testing.assert_array_equal(folded[0, 0, 0], w[0, :2, :2].sum((0, 1)))
    np.testing.assert_array_equal(folded[2, 1, 0], w[0, 2, :1].sum(0))
    np.testing.assert_array_equal(folded[7, 1, 1], w[1, 1:, 1:].sum((0, 1)))
    # 16 products a block of four pixels, not 36.
    assert run.gemm.m * run.gemm.n * run.gemm.k == 5 * 6 * 8 * 12


def test_where_it_saves_products() -> None:
    assert saves_products((2, 2), (3, 3), (1, 1), 64)
    assert saves_products((1, 2), (3, 3), (1, 1), 64)
    assert not saves_products((2, 2), (1, 1), (1, 1), 64)
    assert not saves_products((2, 2), (2, 2), (1, 1), 64)
    assert not saves_products((2, 2), (3, 3), (2, 2), 64)
    assert not saves_products((1, 1), (3, 3), (1, 1), 64)
    assert not saves_products((2, 2), (3, 3), (1, 1), 1)


def test_a_stride_is_refused() -> None:
    with pytest.raises(ValueError, match=r"upsample: \(2,\) with stride \(3,\) is not supported"):
        ConvProblem(
            1, (8,), 4, 4, (3,), stride=(3,), dilation=(1,), pad_before=(0,), pad_after=(0,),
            upsample=(2,),
        )  # fmt: skip
