"""Scales and zero points of 8-bit integers: exact values, the least error, what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import maxconv
from maxconv import Calibration, Quantization, _calibration

Floats = npt.NDArray[np.float32]


def calibrated(*arrays: Any, **options: Any) -> Quantization:
    calibration = Calibration(**{"method": "minmax"} | options)
    for array in arrays:
        calibration.observe(np.asarray(array, np.float32))
    return calibration.quantization()


def error(x: Floats, found: Quantization) -> float:
    return float(np.mean((found.dequantize(found.quantize(x)).astype(np.float64) - x) ** 2))


@pytest.mark.parametrize(
    ("values", "options", "scale", "zero_point"),
    [
        ([0, 255], {}, 1.0, 0),
        ([-51, 204], {}, 1.0, 51),
        ([-51, 204], {"dtype": "int8"}, 1.0, -77),
        ([-2.55], {}, 0.01, 255),
        ([-2.55], {"dtype": "int8"}, 0.01, 127),
        # 0 is always in the range.
        ([10, 25.5], {}, 0.1, 0),
        ([-63.5, 12], {"dtype": "int8", "symmetric": True}, 0.5, 0),
        ([-1, 254], {"symmetric": True}, 2.0, 128),
        ([0, 0], {}, 1.0, 0),
        ([0], {"dtype": "int8"}, 1.0, -128),
    ],
)
@pytest.mark.parametrize("method", ["minmax", "percentile"])
def test_ranges_of_all_values(
    values: list[float], options: dict[str, Any], scale: float, zero_point: int, method: str
) -> None:
    found = calibrated(values, method=method, percentile=100, **options)
    assert found.scale == np.float32(scale)
    assert found.zero_point == zero_point
    assert (found.dtype, found.axis) == (options.get("dtype", "uint8"), None)


@pytest.mark.parametrize("method", _calibration.METHODS)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_zero_is_an_integer(
    rng: np.random.Generator, method: str, dtype: str, symmetric: bool
) -> None:
    for offset in (-5, -0.3, 0, 0.01, 7):
        x = (rng.standard_normal(500) * rng.uniform(0.01, 100) + offset).astype(np.float32)
        found = calibrated(x, method=method, dtype=dtype, symmetric=symmetric)
        assert found.dequantize(found.quantize([0.0, -0.0])).tolist() == [0, 0]
        if symmetric:
            assert found.zero_point == (0 if dtype == "int8" else 128)
        if method == "minmax":
            # Rounding moves either end of the range by half a step.
            worst = np.abs(found.dequantize(found.quantize(x)) - x).max()
            assert worst <= 1.001 * found.scale


def test_a_percentile_leaves_out_what_is_beyond(rng: np.random.Generator) -> None:
    """To within a bin: a 2048th of the largest value, at worst."""
    x = rng.standard_normal(20_000).astype(np.float32) + 1
    x[:7] = 40
    for percentile in (90.0, 99.0, 99.9):
        found = calibrated(x, method="percentile", percentile=percentile)
        low, high = np.percentile(x.astype(np.float64), [100 - percentile, percentile])
        steps = found.quantize([-1e9, 1e9])
        assert steps.tolist() == [0, 255]
        assert abs(float(found.scale) * 255 - (high - min(low, 0))) <= 2 * 40 / 2048
    whole = calibrated(x, method="percentile", percentile=100)
    assert float(whole.scale) == pytest.approx((40 - x.min()) / 255, rel=1e-6)


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_least_error(rng: np.random.Generator, symmetric: bool) -> None:
    """Of the ranges that a search through many could choose, to within 2 %."""
    draws: dict[str, Floats] = {
        "normal": rng.standard_normal(50_000).astype(np.float32),
        "relu": np.maximum(rng.standard_normal(50_000), 0).astype(np.float32),
        "heavy": rng.standard_t(3, 50_000).astype(np.float32),
        "shifted": (rng.standard_normal(50_000) - 2).astype(np.float32),
    }
    for name, x in draws.items():
        found = calibrated(x, method="mse", symmetric=symmetric)
        low, high = min(float(x.min()), 0), max(float(x.max()), 0)
        best = np.inf
        parts = np.linspace(0.1, 1, 25)
        for first in parts if low < 0 and not symmetric else [1.0]:
            for last in parts:
                if symmetric:
                    scale, zero = last * max(-low, high) / 127, 128
                else:
                    ends = first * low, last * high
                    scale = (ends[1] - ends[0]) / 255
                    zero = round(-ends[0] / scale)
                best = min(best, error(x, Quantization(scale, zero, "uint8")))
        assert error(x, found) <= 1.02 * best, name
    whole = calibrated(draws["heavy"], symmetric=symmetric)
    clipped = calibrated(draws["heavy"], method="mse", symmetric=symmetric)
    assert error(draws["heavy"], clipped) < 0.9 * error(draws["heavy"], whole)


@pytest.mark.parametrize("method", _calibration.METHODS)
@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("sizes", [(1e-3, 1.0, 1e4, 0.0, 1e-6, 3.0), (0.7, 5.0, 2.0, 0.3)])
def test_the_order_of_arrays_does_not_matter(
    rng: np.random.Generator, method: str, axis: int | None, sizes: tuple[float, ...]
) -> None:
    """Nothing is lost when bins become wider, whenever the largest value comes."""
    arrays = [(rng.standard_normal((50, 3, 4)) * size).astype(np.float32) for size in sizes]
    first, last = (
        calibrated(*some, method=method, axis=axis, percentile=95)
        for some in (arrays, arrays[::-1])
    )
    joined = calibrated(np.concatenate(arrays), method=method, axis=axis, percentile=95)
    for other in (last, joined):
        np.testing.assert_array_equal(first.scale, other.scale)
        assert first.zero_point == other.zero_point


def test_memory_is_bounded(rng: np.random.Generator) -> None:
    calibration = Calibration("mse")
    for size in (1e-44, 1e-30, 1e30, 1.0):
        calibration.observe((rng.standard_normal(1000) * size).astype(np.float32))
    histogram = calibration._histogram
    assert histogram is not None
    assert histogram.counts.shape == (1, 2 * _calibration._BINS)
    assert histogram.counts.sum() + histogram.zeros.sum() == 4000


@pytest.mark.parametrize("axis", [None, 0])
def test_large_arrays_are_counted_in_parts(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, axis: int | None
) -> None:
    x = rng.standard_normal((7, 1000)).astype(np.float32)
    whole = calibrated(x, method="percentile", percentile=80, axis=axis)
    monkeypatch.setattr(_calibration, "_AT_ONCE", 60)
    parts = calibrated(x, method="percentile", percentile=80, axis=axis)
    np.testing.assert_array_equal(whole.scale, parts.scale)


# Channels ---------------------------------------------------------------------------------------


def test_channels_have_scales_of_their_own() -> None:
    x = np.zeros((2, 4, 3), np.float32)
    x[0, :, 0] = 255, 25.5, 2.55, 0
    found = calibrated(x, axis=1)
    assert isinstance(found.scale, np.ndarray)
    # What was 0 so far gets a part of the largest.
    expected = np.array([1, 0.1, 0.01, 1 / 256]).astype(np.float32)
    np.testing.assert_allclose(found.scale, expected, rtol=1e-6)
    assert (found.zero_point, found.axis, found.per_channel) == (0, 1, True)
    assert found.quantize(x)[0, :, 0].tolist() == [255, 255, 255, 0]
    np.testing.assert_allclose(found.dequantize(found.quantize(x)), x, rtol=1e-6)
    assert calibrated(np.zeros((2, 3)), axis=-1).scale.tolist() == [1, 1, 1]  # type: ignore[union-attr] # an array


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_channels_share_the_zero_point(rng: np.random.Generator, dtype: str) -> None:
    """And no value is beyond the integers, wherever 0 is in each channel's range."""
    for parts in ((0, 0.5, 1), (0.2, 0.2, 0.2), (0.001, 0, 0), (1, 1, 0.9), (0.5, 0.5, 0.4)):
        sizes = rng.uniform(0.1, 10, 3)
        low, high = -np.array(parts) * sizes, (1 - np.array(parts)) * sizes
        x = rng.uniform(low, high, (400, 3)).astype(np.float32)
        found = calibrated(x, axis=1, dtype=dtype)
        worst = np.abs(found.dequantize(found.quantize(x)) - x).max(axis=0)
        assert (worst <= 0.501 * np.asarray(found.scale)).all()
        if len(set(parts)) == 1:
            assert (np.asarray(found.scale) <= 1.01 * (high - low) / 255).all()


@pytest.mark.parametrize("method", ["mse", "percentile"])
def test_a_channels_histogram_is_its_own(rng: np.random.Generator, method: str) -> None:
    sizes = np.array([0.5, 1.0, 8.0])
    x = (np.abs(rng.standard_t(3, (40_000, 3))) * sizes).astype(np.float32)
    found = calibrated(x, axis=1, method=method, percentile=99)
    for channel, scale in enumerate(np.asarray(found.scale)):
        alone = calibrated(x[:, channel], method=method, percentile=99)
        # A channel has fewer bins than a tensor.
        assert scale == pytest.approx(float(alone.scale), rel=0.06)


# Integers ---------------------------------------------------------------------------------------


def test_rounding() -> None:
    """Halves go to even, what is beyond the integers to their ends."""
    found = Quantization(0.5, 3, "int8")
    x = np.arange(-300, 300, dtype=np.float32) / 4
    x = np.concatenate([x, np.array([np.inf, -np.inf, 3e38, -3e38], np.float32)])
    steps = found.quantize(x)
    assert steps.dtype == np.int8
    np.testing.assert_array_equal(
        steps, np.clip(np.rint(x.astype(np.float64) / 0.5) + 3, -128, 127)
    )
    every = np.arange(-128, 128).astype(np.int8)
    np.testing.assert_array_equal(found.dequantize(every), (every.astype(np.float64) - 3) * 0.5)


def test_an_array_alone(rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 6)).astype(np.float32)
    steps, found = maxconv.quantize(x, "minmax", dtype="int8")
    assert (str(steps.dtype), steps.shape) == ("int8", x.shape)
    assert found.scale == calibrated(x, dtype="int8").scale
    np.testing.assert_array_equal(steps, found.quantize(x))
    assert steps.min() == -128 and steps.max() == 127


# Filters ----------------------------------------------------------------------------------------


def test_a_filter(rng: np.random.Generator) -> None:
    filter = rng.standard_normal((5, 3, 3, 4)).astype(np.float32)
    filter[2] = 0
    filter[3] *= 1e-30
    filter[4] *= 1e30
    steps, scales = maxconv.quantize_filter(filter)
    assert (str(steps.dtype), str(scales.dtype)) == ("int8", "float32")
    largest = np.abs(filter.astype(np.float64)).reshape(5, -1).max(axis=1)
    np.testing.assert_allclose(scales, np.where(largest > 0, largest / 127, 1), rtol=1e-7)
    assert scales[2] == 1 and not steps[2].any()
    exact = np.rint(filter / scales.astype(np.float64).reshape(-1, 1, 1, 1))
    np.testing.assert_array_equal(steps, exact)
    for row in steps[[0, 1, 3, 4]]:
        assert np.abs(row.astype(int)).max() == 127
    last, same = maxconv.quantize_filter(np.moveaxis(filter, 0, -1), axis=-1)
    assert last.flags.c_contiguous
    np.testing.assert_array_equal(np.moveaxis(last, -1, 0), steps)
    np.testing.assert_array_equal(same, scales)


def test_a_filter_of_the_least_floats() -> None:
    """Whose scale could not be a float32 with a reciprocal."""
    steps, scales = maxconv.quantize_filter(np.full((2, 3), 1e-44, np.float32))
    assert np.isfinite(1 / scales).all()
    assert not steps.any()


# What is not allowed ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"method": "entropy"},
            "method: 'entropy' is unknown; mse, minmax, percentile are allowed",
        ),
        ({"method": 3}, "method: 3 is a int; one of mse, minmax, percentile is allowed"),
        ({"dtype": "int4"}, "dtype: int4 is not supported; int8, uint8 are allowed"),
        ({"symmetric": 1}, "symmetric: 1 is a int; a bool is allowed"),
        ({"axis": 0.5}, "axis: 0.5 holds a float; integers are allowed"),
        ({"percentile": 50}, "percentile: 50.0 is not allowed; above 50, up to 100 is"),
        ({"percentile": 100.1}, "percentile: 100.1 is not allowed"),
        ({"percentile": float("nan")}, "percentile: nan is not allowed"),
        ({"percentile": "99"}, "percentile: '99' is a str; a number is allowed"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        Calibration(**options)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1, np.nan], np.float32), "x: it holds NaN or what is infinite in float32"),
        (np.array([1, np.inf], np.float32), "x: it holds NaN or what is infinite in float32"),
        (np.array([1e39]), "x: it holds NaN or what is infinite in float32"),
        (np.arange(3), "x: dtype int64 is not allowed; floats are"),
    ],
)
def test_values(array: npt.NDArray[Any], message: str) -> None:
    calibration = Calibration()
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        calibration.observe(array)
    assert calibration.is_empty


def test_nothing_and_other_channels() -> None:
    calibration = Calibration(axis=1)
    calibration.observe(np.zeros((0, 3), np.float32))
    assert calibration.is_empty
    with pytest.raises(ValueError, match=r"^x: nothing was observed; at least one array"):
        calibration.quantization()
    calibration.observe(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"^x: 4 channels, but 3 were observed before"):
        calibration.observe(np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match=r"^axis: 1 is no dimension of shape \(2,\)"):
        calibration.observe(np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0.0,), "scale: 0.0 is not allowed; positive numbers are"),
        ((-1.0,), "scale: -1.0 is not allowed"),
        ((float("inf"),), "scale: inf is not allowed"),
        ((float("nan"),), "scale: nan is not allowed"),
        ((1e-45,), "scale: 1e-45 is not allowed"),
        (("1",), "scale: '1' is a str; a number is allowed"),
        ((np.ones(3),), "scale: float64 of rank 1 is not allowed; a number or float32 of rank 1"),
        ((1.0, 128), "zero_point: 128 is no int8; -128 to 127 are allowed"),
        ((1.0, -1, "uint8"), "zero_point: -1 is no uint8; 0 to 255 are allowed"),
        ((1.0, 0.5), "zero_point: 0.5 holds a float; integers are allowed"),
        ((1.0, True), "zero_point: True holds a bool; integers are allowed"),
        ((1.0, 0, "float8"), "dtype: float8 is not supported"),
        ((1.0, 0, "int8", 1), "axis: 1 beside a scale of all; None is allowed"),
        ((np.ones(3, np.float32),), "axis: None beside a scale of several channels"),
    ],
)
def test_fields(fields: tuple[Any, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        Quantization(*fields)


@pytest.mark.parametrize(
    ("filter", "axis", "message"),
    [
        (np.ones((2, 3), np.int8), 0, "filter: dtype int8 is not allowed; floats are"),
        (np.array([[1, np.nan]]), 0, "filter: it holds NaN or what is infinite in float32"),
        (np.array([[1, -np.inf]]), 0, "filter: it holds NaN or what is infinite in float32"),
        (np.ones((2, 3)), 2, "axis: 2 is no dimension of a filter of shape (2, 3)"),
        (np.ones((2, 3)), None, "axis: None holds a NoneType; integers are allowed"),
    ],
)
def test_filters(filter: npt.NDArray[Any], axis: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        maxconv.quantize_filter(filter, axis=axis)


def test_neither_max_nor_torch_is_imported() -> None:
    program = (
        "import sys, numpy, maxconv; maxconv.quantize(numpy.ones(3)); maxconv.quantize_filter("
        "numpy.ones((1, 2))); assert not {'max', 'torch'} & set(sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
