"""Scales and zero points of 8-bit integers, from the values that they stand for.

``Calibration`` observes a stream of arrays in bounded memory. Filters need none: all of their
values are known, and ``quantize_filter`` takes the largest of each. Only numpy is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ._checks import check_integer, check_number, check_scale, check_zero_point, show
from ._dtypes import INTEGERS

__all__ = [
    "METHODS",
    "Calibration",
    "Quantization",
    "check_method",
    "check_percentile",
    "quantize",
    "quantize_filter",
]

#: How a range of values is chosen.
METHODS: Final = ("mse", "minmax", "percentile")

#: The largest magnitude of a quantized filter: symmetric, so that no zero point is needed.
_FILTER_LIMIT: Final = 127

#: Bins of a histogram on each side of 0: of all values together, and of each channel.
_BINS: Final = 4096
_CHANNEL_BINS: Final = 1024

#: How many values are counted at once.
_AT_ONCE: Final = 2**20

#: The parts of an observed range that the search for the least error tries.
_FRACTIONS: Final = np.linspace(0.1, 1.0, 46)

#: Below, a reciprocal is no float32.
_LEAST_SCALE: Final = float(np.finfo(np.float32).tiny)

#: A channel's scale, relative to the largest: with that of all its values would be 0. What has been
#: 0 so far may be something later, and a filter that takes up the scale is not to lose by it.
_LEAST_PART: Final = 1 / 256

_Floats: TypeAlias = npt.NDArray[np.float64]
_Integers: TypeAlias = npt.NDArray[np.int8] | npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Quantization:
    """What 8-bit integers stand for: ``scale * (integer - zero_point)``.

    The integer ``zero_point`` stands for 0 exactly, so a border of zeros is one of ``zero_point``.

    Raises:
        TypeError: A field is of a wrong Python type.
        ValueError: A field has a value that is not allowed.
    """

    scale: float | npt.NDArray[np.float32]
    """What a step stands for: a positive number whose reciprocal is a float32, or float32 with one
    for each channel."""
    zero_point: int = 0
    """An integer of ``dtype``."""
    dtype: str = "int8"
    """``int8`` or ``uint8``."""
    axis: int | None = None
    """The dimension of the channels where each has a scale."""

    def __post_init__(self) -> None:
        """Checks the fields."""
        _check_dtype(self.dtype)
        check_zero_point("zero_point", self.zero_point, self.dtype)
        several = isinstance(self.scale, np.ndarray)
        check_scale("scale", self.scale)
        if several != (self.axis is not None):
            allowed = "the channels' dimension" if several else "None"
            raise ValueError(
                f"axis: {self.axis} beside a scale of {'several channels' if several else 'all'}; "
                f"{allowed} is allowed"
            )

    @property
    def per_channel(self) -> bool:
        """Whether each channel has a scale."""
        return self.axis is not None

    def quantize(self, x: npt.ArrayLike) -> _Integers:
        """Returns ``clamp(round(x * (1 / scale)) + zero_point)``, in float32, halves to even."""
        values = np.asarray(x, np.float32)
        factors = (1 / np.asarray(self.scale, np.float64)).astype(np.float32)
        lowest, highest = INTEGERS[self.dtype]
        # What overflows is clamped.
        with np.errstate(over="ignore"):
            steps = np.rint(values * self._along(factors, values.ndim)) + np.float32(
                self.zero_point
            )
        return cast(_Integers, np.clip(steps, lowest, highest).astype(self.dtype))

    def dequantize(self, integers: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Returns what integers stand for."""
        steps = np.asarray(integers).astype(np.float32) - np.float32(self.zero_point)
        values: npt.NDArray[np.float32] = steps * self._along(
            np.asarray(self.scale, np.float32), steps.ndim
        )
        return values

    def _along(self, factors: npt.NDArray[np.float32], rank: int) -> npt.NDArray[np.float32]:
        """Returns one factor a channel in the place of the channels' dimension."""
        if self.axis is None:
            return factors
        shape = [1] * rank
        shape[self.axis] = -1
        return factors.reshape(shape)


def check_method(method: object) -> str:
    """Returns the name of a method; raises ``TypeError`` or ``ValueError`` if it is none."""
    if not isinstance(method, str):
        raise TypeError(
            f"method: {method!r} is a {type(method).__name__}; one of {', '.join(METHODS)} is "
            "allowed"
        )
    if method not in METHODS:
        raise ValueError(f"method: {method!r} is unknown; {', '.join(METHODS)} are allowed")
    return method


def check_percentile(percentile: object) -> float:
    """Returns a percentile; raises ``TypeError`` or ``ValueError`` unless it is in (50, 100]."""
    value = check_number("percentile", percentile)
    if not 50 < value <= 100:
        raise ValueError(f"percentile: {value} is not allowed; above 50, up to 100 is")
    return value


def _check_dtype(dtype: object) -> None:
    if not isinstance(dtype, str) or dtype not in INTEGERS:
        raise ValueError(f"dtype: {dtype} is not supported; {', '.join(INTEGERS)} are allowed")


class Calibration:
    """Chooses scale and zero point from the values of any number of arrays.

    Ranges hold 0, so that it is an integer exactly. What is outside of a range is clamped.

    Args:
        method: ``"minmax"`` takes the range of all values. ``"percentile"`` leaves out what is
            beyond a percentile at either end. ``"mse"`` takes the range with the least mean squared
            error of rounding and clamping, by a histogram.
        dtype: ``"uint8"`` or ``"int8"``.
        symmetric: Whether the range is the same on both sides of 0: the zero point is then 0 of
            int8, and 128 of uint8, and no more than 127 steps are taken on each side.
        axis: The channels' dimension, to give each a scale. They share the zero point.
        percentile: Of the method of that name.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed.
    """

    def __init__(
        self,
        method: str = "mse",
        *,
        dtype: str = "uint8",
        symmetric: bool = False,
        axis: int | None = None,
        percentile: float = 99.99,
    ) -> None:
        self.method = check_method(method)
        _check_dtype(dtype)
        if not isinstance(symmetric, bool):
            raise TypeError(
                f"symmetric: {symmetric!r} is a {type(symmetric).__name__}; a bool is allowed"
            )
        self.dtype = dtype
        self.symmetric = symmetric
        self.axis = None if axis is None else check_integer("axis", axis)
        self.percentile = check_percentile(percentile)
        self._low: _Floats | None = None
        self._high: _Floats = np.zeros(0)
        self._histogram: _Histogram | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no value was observed."""
        return self._low is None

    def observe(self, x: npt.ArrayLike) -> None:
        """Takes the values of an array into account.

        Args:
            x: Floats of any shape, with the channels in dimension ``axis`` if that is given.

        Raises:
            ValueError: One is NaN or infinite, the channels' dimension is not there, or there are
                other channels than before.
        """
        values = np.asarray(x)
        if values.dtype.kind != "f":
            raise TypeError(f"x: dtype {values.dtype} is not allowed; floats are")
        with np.errstate(over="ignore"):
            values = values.astype(np.float32, copy=False)
        if self.axis is None:
            rows = values.reshape(1, -1)
        elif not -values.ndim <= self.axis < values.ndim:
            raise ValueError(f"axis: {self.axis} is no dimension of shape {show(values.shape)}")
        else:
            moved = np.moveaxis(values, self.axis, 0)
            rows = moved.reshape(len(moved), -1)
        if rows.size == 0:
            return
        low, high = rows.min(axis=1).astype(np.float64), rows.max(axis=1).astype(np.float64)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError("x: it holds NaN or what is infinite in float32; finite numbers are")
        if self._low is None:
            self._low, self._high = np.minimum(low, 0), np.maximum(high, 0)
        elif len(low) != len(self._low):
            raise ValueError(f"x: {len(low)} channels, but {len(self._low)} were observed before")
        else:
            self._low, self._high = np.minimum(self._low, low), np.maximum(self._high, high)
        if self.method != "minmax":
            if self._histogram is None:
                bins = _BINS if self.axis is None else _CHANNEL_BINS
                self._histogram = _Histogram(len(rows), bins)
            self._histogram.add(rows)

    def quantization(self) -> Quantization:
        """Returns what integers are to stand for.

        Raises:
            ValueError: Nothing was observed.
        """
        if self._low is None:
            raise ValueError("x: nothing was observed; at least one array with values is needed")
        low, high = self._range(self._low)
        lowest, highest = INTEGERS[self.dtype]
        if self.symmetric:
            scale = np.maximum(-low, high) / 127
            zero_point = 0 if self.dtype == "int8" else 128
        else:
            zero_point = lowest + _place_of_zero(low, high, highest - lowest)
            if self.axis is None:
                scale = (high - low) / (highest - lowest)
            else:
                above, below = max(highest - zero_point, 1), max(zero_point - lowest, 1)
                scale = np.maximum(high / above, -low / below)
        if not scale.any():
            scale = np.ones_like(scale)
        scales = np.maximum(scale, max(scale.max() * _LEAST_PART, _LEAST_SCALE)).astype(np.float32)
        if self.axis is None:
            return Quantization(float(scales[0]), zero_point, self.dtype)
        return Quantization(scales, zero_point, self.dtype, self.axis)

    def _range(self, low: _Floats) -> tuple[_Floats, _Floats]:
        """Returns the range of each channel; it holds 0."""
        high, histogram = self._high, self._histogram
        if histogram is None:
            return low, high
        if self.method == "percentile":
            least = histogram.quantiles(1 - self.percentile / 100)
            most = histogram.quantiles(self.percentile / 100)
            return np.clip(least, low, 0), np.clip(most, 0, high)
        if self.symmetric:
            ends = _FRACTIONS[:, None] * np.maximum(-low, high)
            errors = histogram.errors(-ends, ends, 2 * 127)
            chosen = np.take_along_axis(ends, errors.argmin(axis=0)[None], 0)[0]
            return -chosen, chosen
        lows, highs = (
            (_FRACTIONS if end.any() else np.ones(1))[:, None] * end for end in (low, high)
        )
        # All pairs of ends.
        starts = np.repeat(lows, len(highs), axis=0)
        ends = np.tile(highs, (len(lows), 1))
        best = histogram.errors(starts, ends, 255).argmin(axis=0)[None]
        return np.take_along_axis(starts, best, 0)[0], np.take_along_axis(ends, best, 0)[0]


def _place_of_zero(low: _Floats, high: _Floats, steps: int) -> int:
    """Returns how many steps below 0 the channels of some ranges share.

    The range of a channel grows where its part below 0 is another than that of the steps; this is
    the number for which the one that grows most grows least.
    """
    ranges = high > low
    if not ranges.any():
        return 0
    parts = -low[ranges] / (high - low)[ranges]
    least, most = float(parts.min()), float(parts.max())
    return round(steps * most / (1 - least + most))


class _Histogram:
    """How often values are in bins of one width, of each channel.

    Widths are powers of two and bins begin at 0. So when a larger value comes, widths double and
    pairs of bins become one, and nothing is known less exactly than if all had come at once.
    Zeros, which are an integer exactly, are counted apart.
    """

    def __init__(self, channels: int, bins: int) -> None:
        self.bins = bins
        self.counts = np.zeros((channels, 2 * bins), np.int64)
        self.zeros = np.zeros(channels, np.int64)
        #: Of a bin's width, a power of two; far below any until a channel has a value.
        self.exponents = np.full(channels, -10_000)

    def add(self, rows: npt.NDArray[np.float32]) -> None:
        """Counts finite values, a row a channel."""
        largest = np.maximum(-rows.min(axis=1), rows.max(axis=1)).astype(np.float64)
        # Largest is below 2 ** needed.
        _, needed = np.frexp(largest)
        exponents = np.where(largest > 0, needed - (self.bins.bit_length() - 1), -10_000)
        self._widen(np.maximum(exponents, self.exponents))
        # All exponents of float32 are among those of float64, where scaling is exact.
        factors = np.ldexp(1.0, -np.where(largest > 0, self.exponents, 0))[:, None]
        starts = self.bins + 2 * self.bins * np.arange(len(rows))[:, None]
        columns = max(_AT_ONCE // len(rows), 1)
        for first in range(0, rows.shape[1], columns):
            part = rows[:, first : first + columns]
            zero = part == 0
            self.zeros += zero.sum(axis=1)
            places = np.floor(part * factors).astype(np.int64) + starts
            counted = np.bincount(places[~zero], minlength=self.counts.size)
            self.counts += counted.reshape(self.counts.shape)

    def _widen(self, exponents: npt.NDArray[np.int64]) -> None:
        """Makes bins as wide as needed."""
        # From then on all values of a sign are in one bin.
        most = (2 * self.bins).bit_length()
        doublings = np.minimum(exponents - self.exponents, most)
        half = self.bins // 2
        for step in range(int(doublings.max())):
            wider = doublings > step
            pairs = self.counts[wider]
            merged = np.zeros_like(pairs)
            merged[:, half : half + self.bins] = pairs[:, 0::2] + pairs[:, 1::2]
            self.counts[wider] = merged
        self.exponents = exponents

    def quantiles(self, part: float) -> _Floats:
        """Returns the value that a part of each channel's values is not above."""
        bins = self.bins
        counts = np.concatenate(
            [self.counts[:, :bins], self.zeros[:, None], self.counts[:, bins:]], axis=1
        )
        found = np.zeros(len(counts))
        for channel, (row, width) in enumerate(zip(counts, self._widths(), strict=True)):
            sums = np.cumsum(row)
            wanted = part * float(sums[-1])
            place = int(np.searchsorted(sums, wanted))
            place = min(place, len(row) - 1)
            if place == bins:
                continue
            before = float(sums[place] - row[place])
            start = place - bins - (place > bins)
            found[channel] = width * (start + (wanted - before) / max(int(row[place]), 1))
        return found

    def errors(self, low: _Floats, high: _Floats, steps: int) -> _Floats:
        """Returns the sums of squared errors of rounding and clamping.

        Values below half a step are rounded to 0; the error of others inside of a range is taken
        for uniformly distributed.

        Args:
            low: Lower ends, ``[candidates, channels]``, not above 0.
            high: Upper ends.
            steps: Of the integers in a range.
        """
        widths = self._widths()
        step = (high - low) / steps
        total: _Floats = np.zeros(low.shape)
        for counts, end in ((self.counts[:, self.bins :], high), (self._negative(), -low)):
            middles = (np.arange(self.bins) + 0.5) * widths[:, None]
            # How many values, their sum and their squares' sum, up to each bin.
            number, first, second = (
                np.pad(np.cumsum(counts * middles**power, axis=1), ((0, 0), (1, 0)))
                for power in (0, 1, 2)
            )

            def until(sums: _Floats, where: _Floats) -> _Floats:
                # A width of 0 belongs to a channel that has no values.
                safe = np.where(widths > 0, widths, 1)
                places = np.minimum(np.rint(where / safe), self.bins).astype(np.int64)
                found: _Floats = sums[np.arange(len(sums)), places]
                return found

            inside, small = until(number, end), until(number, np.minimum(step / 2, end))
            total += until(second, np.minimum(step / 2, end)) + (inside - small) * step**2 / 12
            beyond = number[:, -1] - inside
            total += (second[:, -1] - until(second, end)) + end**2 * beyond
            total -= 2 * end * (first[:, -1] - until(first, end))
        return total

    def _negative(self) -> npt.NDArray[np.int64]:
        """Counts of negative values, by their magnitude."""
        return self.counts[:, : self.bins][:, ::-1]

    def _widths(self) -> _Floats:
        widths: _Floats = np.ldexp(1.0, self.exponents)
        return widths


def quantize(
    x: npt.ArrayLike,
    method: str = "mse",
    *,
    dtype: str = "uint8",
    symmetric: bool = False,
    axis: int | None = None,
    percentile: float = 99.99,
) -> tuple[_Integers, Quantization]:
    """Makes 8-bit integers of an array's values, with the scale that suits them.

    For a filter take ``quantize_filter``; where several arrays share a scale, ``Calibration``,
    which has the same arguments.

    Args:
        x: Floats of any shape.
        method: ``"mse"``, ``"minmax"`` or ``"percentile"``.
        dtype: ``"uint8"`` or ``"int8"``.
        symmetric: Whether the range is the same on both sides of 0.
        axis: The channels' dimension, to give each a scale.
        percentile: Of the method of that name.

    Returns:
        The integers, and what they stand for.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or ``x`` one that is not finite, or
            none.
    """
    calibration = Calibration(
        method, dtype=dtype, symmetric=symmetric, axis=axis, percentile=percentile
    )
    calibration.observe(x)
    found = calibration.quantization()
    return found.quantize(x), found


def quantize_filter(
    filter: npt.ArrayLike, *, axis: int = 0
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Makes int8 of a filter, with a scale for each of its output channels.

    Each one's largest magnitude becomes 127; 0 stays 0.

    Args:
        filter: Finite floats, ``[K, ...]``: the layouts KRSC and FCRS. Of RSCF, MAX's default, the
            output channels are dimension -1.
        axis: The dimension of the output channels.

    Returns:
        The integers, -127 to 127, in the filter's layout, and the scales ``[K]``: the filter is
        about ``scales * integers``.

    Raises:
        TypeError: The filter does not consist of floats, or ``axis`` is no integer.
        ValueError: A value is not finite, or there is no dimension ``axis``.
    """
    values = np.asarray(filter)
    if values.dtype.kind != "f":
        raise TypeError(f"filter: dtype {values.dtype} is not allowed; floats are")
    if not -values.ndim <= check_integer("axis", axis) < values.ndim:
        raise ValueError(f"axis: {axis} is no dimension of a filter of shape {show(values.shape)}")
    rows = np.moveaxis(values.astype(np.float64), axis, 0)
    magnitudes = np.abs(rows.reshape(len(rows), -1)).max(axis=1, initial=0)
    limit = float(np.finfo(np.float32).max)
    if not np.all(magnitudes <= limit):
        raise ValueError("filter: it holds NaN or what is infinite in float32; finite numbers are")
    scales = np.where(magnitudes > 0, np.maximum(magnitudes / _FILTER_LIMIT, _LEAST_SCALE), 1.0)
    scales = scales.astype(np.float32)
    factors = scales.astype(np.float64).reshape(-1, *(1,) * (rows.ndim - 1))
    steps = np.clip(np.rint(rows / factors), -_FILTER_LIMIT, _FILTER_LIMIT)
    return np.ascontiguousarray(np.moveaxis(steps, 0, axis)).astype(np.int8), scales
