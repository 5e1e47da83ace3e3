"""Filters in the order in which the kernels read them.

A filter is packed once, when a model is built or loaded. For each group the filters stand in panels
of ``PANEL``, side by side for each tap and channel, so that a kernel loads one tap of a whole panel
at a time::

    packed[group][panel][k][lane] = filter[group * (K / groups) + panel * PANEL + lane][t][r][s][c]
    k = ((t * R + r) * S + s) * (C / groups) + c

Lanes beyond the group's last filter are zero. Types of 16 bits and int8 are for instructions that
add up neighbouring products, as many as 4 bytes hold: the ``S * C / groups`` products of a filter
row ``(t, r)`` are filled up with zeros to whole ``ROW_BYTES``, and ``i = 2`` or 4 of them stand
side by side for each lane::

    packed[group][panel][k // i][lane][k % i]
    k = (t * R + r) * row_depth + s * (C / groups) + c

Behind each panel of int8 follow the sums of its filters, ``PANEL`` little-endian int32.

Narrow groups, of 2, 4 or 8 channels and as many filters, share panels as if their filters were one
group's (``panel_groups``): nothing is filled up then, and int8 of 2 channels has ``i = 1`` and no
sums. A depthwise filter (one channel in, one out, in each group) is ``packed[t][r][s][channel]``
instead, without padding.

numpy has neither bfloat16 nor floats of 8 bits, so their data is carried as the ``uint16`` or the
``uint8`` of its bits. Importing this module does not import MAX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ._blocked_filter import blocks_of, without_blocks
from ._checks import (
    LAYOUTS,
    check_at_least,
    check_dtype,
    check_filter_layout,
    check_integer,
    filter_shape_parts,
)
from ._dtypes import BIT_CARRIED, CARRIERS, FILTER_BYTES, FLOAT8, FLOAT8_WIDE, INT8, INTEGERS
from ._fields import PANEL, ROW_BYTES

__all__ = [
    "Array",
    "PackedFilter",
    "bfloat16_to_float32",
    "cast_array",
    "float8_to_float32",
    "float8_wide_to_float32",
    "float32_to_bfloat16",
    "float32_to_float8",
    "float32_to_float8_wide",
    "pack_filter",
    "pack_values",
    "packed_elements",
    "packed_length",
    "panel_groups",
    "panel_layout",
    "read_array",
    "to_krsc",
]

Array: TypeAlias = npt.NDArray[Any]

#: Neighbouring products of a filter that lie side by side in a panel, where there are several.
_INTERLEAVED = {"bfloat16": 2, "float16": 2, INT8: 4}

#: The largest value of each type of 8 bits, and the largest that is rounded to it.
_LARGEST: dict[str, tuple[float, float]] = {
    FLOAT8: (448.0, 464.0),
    FLOAT8_WIDE: (57344.0, math.nextafter(61440.0, 0)),
    INT8: (127.0, math.nextafter(127.5, 0)),
}


def float32_to_bfloat16(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Rounds float32 values to bfloat16, to nearest and ties to even; returns their bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding must not carry a NaN's payload into an infinity: keep its top bits, quieted.
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.asarray(np.where(is_nan, quiet, rounded), dtype=np.uint16)


def bfloat16_to_float32(bits: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Widens bfloat16 bits to the float32 values that they stand for, exactly."""
    wide = np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << np.uint32(16)
    return np.asarray(wide.view(np.float32))


def float32_to_float8(values: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Rounds float32 values to float8_e4m3fn, to nearest and ties to even; returns their bits.

    What is beyond 464, halfway to the number that would follow the largest, becomes NaN.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Exponents are 120 apart; 20 bits of mantissa are rounded off.
    odd = (magnitude >> np.uint32(20)) & np.uint32(1)
    rounded = (magnitude + np.uint32(0x7FFFF) + odd) >> np.uint32(20)
    normal = np.minimum(rounded - np.uint32(120 << 3), np.uint32(0x7F))
    # Below 2**-6 numbers are 2**-9 apart; the last of these carries into the first normal one.
    small = magnitude < np.float32(2**-6).view(np.uint32)
    steps = np.rint(np.where(small, magnitude, 0).astype(np.uint32).view(np.float32) * 512)
    code = np.where(small, steps.astype(np.uint32), normal)
    return np.asarray(code | ((bits >> np.uint32(24)) & np.uint32(0x80)), dtype=np.uint8)


def float8_to_float32(bits: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Widens float8_e4m3fn bits to the float32 values that they stand for, exactly."""
    return _FLOAT8_VALUES[np.asarray(bits, dtype=np.uint8)]


def float32_to_float8_wide(values: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Rounds float32 values to float8_e5m2, to nearest and ties to even; returns their bits.

    What is 61440 or beyond, halfway to the number that would follow the largest, becomes infinite.
    """
    wide = np.asarray(values, np.float32).astype(np.float64)
    # Numbers have two bits behind the first; below 2**-14 they stay 2**-16 apart.
    _, exponent = np.frexp(wide)
    step = np.ldexp(1.0, np.maximum(exponent - 1, -14) - 2)
    with np.errstate(over="ignore", invalid="ignore"):
        # They are the float16 numbers whose last 8 bits are 0.
        bits = (np.rint(wide / step) * step).astype(np.float16).view(np.uint16)
    return np.asarray(bits >> np.uint16(8), dtype=np.uint8)


def float8_wide_to_float32(bits: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Widens float8_e5m2 bits to the float32 values that they stand for, exactly."""
    halves = np.asarray(bits, np.uint8).astype(np.uint16) << np.uint16(8)
    return np.asarray(halves.view(np.float16).astype(np.float32))


def _float8_values() -> npt.NDArray[np.float32]:
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    values[127] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


_FLOAT8_VALUES = _float8_values()


def read_array(name: str, array: object, *, integers: Sequence[str] = ()) -> tuple[Array, str]:
    """Reads an array-like operand as numpy; no copy where none is needed.

    Args:
        name: The argument's name, for messages.
        array: A numpy array or an object with ``__dlpack__`` (a torch tensor, a MAX buffer or
            tensor), on any device, of a floating-point type.
        integers: Types of integers that it may have too.

    Returns:
        The values, and the name of their type: ``float64``, ``float32``, ``float16``, ``bfloat16``
        (whose values are ``uint16`` bits), ``float8_e4m3fn`` or ``float8_e5m2`` (``uint8`` bits),
        or ``int8``.

    Raises:
        TypeError: ``array`` is neither.
        ValueError: The elements are of another type.
    """
    if isinstance(array, np.ndarray):
        values, kind = array, str(array.dtype.name)
    elif hasattr(array, "__dlpack__"):
        values, kind = _from_dlpack(array)
    else:
        raise TypeError(
            f"{name}: a {type(array).__name__} is not an array; a numpy array or an object with "
            "__dlpack__ is allowed"
        )
    if kind in BIT_CARRIED:
        return values.view(CARRIERS[kind]), kind
    if kind in integers:
        return values, kind
    if kind not in ("float64", "float32", "float16"):
        raise ValueError(
            f"{name}: dtype {kind} is not floating point; float64, float32, float16, bfloat16, "
            f"{FLOAT8} and {FLOAT8_WIDE} are allowed{''.join(f', and {i}' for i in integers)}"
        )
    return values.astype(values.dtype.newbyteorder("="), copy=False), kind


def _from_dlpack(array: Any) -> tuple[Array, str]:
    # torch does not export a tensor that requires grad (an nn.Parameter), and MAX does not import
    # one that is strided; torch has a method for each.
    for method in ("detach", "contiguous"):
        array = getattr(array, method, lambda array=array: array)()
    # Only what numpy lacks needs MAX's buffers, but they read every device too.
    from max.driver import Buffer
    from max.dtype import DType

    buffer = Buffer.from_dlpack(array)
    kind = buffer.dtype.name
    if kind in BIT_CARRIED:
        buffer = buffer.view(DType[np.dtype(CARRIERS[kind]).name])
    elif kind not in INTEGERS and (not buffer.dtype.is_float() or buffer.dtype.size_in_bits < 16):
        # numpy cannot represent every other type; the caller refuses them by name.
        return np.empty(0), kind
    return buffer.to_numpy(), kind


def cast_array(values: Array, kind: str, dtype: str) -> Array:
    """Converts what ``read_array`` returned to the storage of ``dtype``, rounding to nearest.

    Args:
        values: The values; those of a type that numpy lacks by their bits.
        kind: The name of their type.
        dtype: A key of ``FILTER_BYTES``.

    Raises:
        ValueError: A value of a filter is beyond a type of 8 bits.
    """
    if kind == dtype:
        return values
    if kind == "bfloat16":
        values = bfloat16_to_float32(values)
    if kind == FLOAT8:
        values = float8_to_float32(values)
    if kind == FLOAT8_WIDE:
        values = float8_wide_to_float32(values)
    if dtype == "bfloat16":
        return float32_to_bfloat16(values)
    if dtype in _LARGEST:
        return _narrowed(values, dtype)
    return values.astype(CARRIERS[dtype])


def _narrowed(values: Array, dtype: str) -> Array:
    """Rounds a filter to a type of 8 bits."""
    largest, limit = float(np.max(np.abs(values), initial=0.0)), _LARGEST[dtype]
    if largest > limit[1] or (dtype == INT8 and math.isnan(largest)):
        raise ValueError(
            f"filter: a value of magnitude {largest:g} is beyond {dtype}; values up to "
            f"{limit[0]:g} are allowed: divide the filter, and multiply the result, by a scale"
        )
    if dtype == FLOAT8:
        return float32_to_float8(values)
    if dtype == FLOAT8_WIDE:
        return float32_to_float8_wide(values)
    return np.asarray(np.rint(values), dtype=np.int8)


def panel_groups(*, filters: int, group_channels: int, groups: int) -> int:
    """Returns how many groups' filters share a panel; ``ConvProblem.panel_groups`` of the kernels.

    As many as fill a panel, where each group has as many channels as filters and their number
    divides ``PANEL``; otherwise 1.
    """
    width = filters // groups
    if width < 2 or width >= PANEL or PANEL % width or width != group_channels or filters % PANEL:
        return 1
    return PANEL // width


class PanelLayout(NamedTuple):
    """The order of a panel's elements; ``PanelLayout`` of the kernels.

    ``[rows][row_depth / interleaved][PANEL][interleaved]``.
    """

    rows: int
    """Filter rows, ``T * R``."""
    products: int
    """Products of a filter row, ``S * C / groups``."""
    row_depth: int
    """The same with the zeros that fill it up."""
    interleaved: int
    """Neighbouring products of a filter that lie side by side."""

    @property
    def sums_offset(self) -> int:
        """Elements in front of the sums of a panel's filters."""
        return self.rows * self.row_depth * PANEL

    @property
    def has_sums(self) -> bool:
        """Whether the sums of its filters, int32, lie behind a panel."""
        return self.interleaved == _INTERLEAVED[INT8]

    @property
    def elements(self) -> int:
        """Elements of a panel, with the sums of its filters if it has them."""
        return self.sums_offset + (4 * PANEL if self.has_sums else 0)


def panel_layout(
    filter_size: Sequence[int], *, filters: int, group_channels: int, groups: int, dtype: str
) -> PanelLayout:
    """Returns the order of the elements of a panel of a filter that is not depthwise."""
    rows, products = math.prod(filter_size[:-1]), filter_size[-1] * group_channels
    shared = panel_groups(filters=filters, group_channels=group_channels, groups=groups)
    interleaved = _INTERLEAVED.get(dtype, 1)
    if shared > 1:
        side = 1 if group_channels % interleaved else interleaved
        return PanelLayout(rows, products, products, side)
    if interleaved == 1:
        return PanelLayout(rows, products, products, 1)
    unit = ROW_BYTES * interleaved // 4
    return PanelLayout(rows, products, -(-products // unit) * unit, interleaved)


def packed_length(
    filter_size: Sequence[int], *, filters: int, group_channels: int, groups: int, dtype: str
) -> int:
    """Returns the number of elements of a packed filter."""
    group_filters = filters // groups
    if group_channels == 1 and group_filters == 1:
        return math.prod(filter_size) * filters
    shared = panel_groups(filters=filters, group_channels=group_channels, groups=groups)
    panels = -(-group_filters * shared // PANEL)
    layout = panel_layout(
        filter_size, filters=filters, group_channels=group_channels, groups=groups, dtype=dtype
    )
    return groups // shared * panels * layout.elements


@dataclass(frozen=True, eq=False)
class PackedFilter:
    """A filter in the kernels' own order; ``pack_filter`` makes one.

    ``conv1d``, ``conv2d`` and ``conv3d`` take it in place of a filter. It does not depend on the
    machine: it may be stored, and packed somewhere else than where it is used.

    Raises:
        TypeError: A field is of a wrong Python type.
        ValueError: The fields contradict each other.
    """

    filters: int
    """Output channels, K."""
    group_channels: int
    """Input channels that each filter reads, C / groups."""
    filter_size: tuple[int, ...]
    """Taps a spatial dimension, outermost first."""
    groups: int
    """Groups."""
    dtype: str
    """``float32``, ``bfloat16``, ``float16``, ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``."""
    data: Array = field(repr=False)
    """The elements, flat and read-only; bfloat16 as ``uint16``, floats of 8 bits as ``uint8`` bits.
    """

    def __post_init__(self) -> None:
        """Checks the fields."""
        for name in ("filters", "group_channels", "groups"):
            check_at_least(name, check_integer(name, getattr(self, name)), 1)
        dtype = check_dtype("dtype", self.dtype, FILTER_BYTES)
        if self.filters % self.groups:
            raise ValueError(
                f"filter: {self.filters} filters are not divisible by groups={self.groups}"
            )
        expected = packed_length(
            self.filter_size,
            filters=self.filters,
            group_channels=self.group_channels,
            groups=self.groups,
            dtype=dtype,
        )
        if self.data.shape != (expected,):
            raise ValueError(
                f"filter: {self.data.size} elements do not match {expected} = what {self.filters} "
                f"filters of {self.taps} taps and {self.group_channels} channels take in layout "
                "PACKED"
            )
        if self.data.dtype != CARRIERS[dtype]:
            raise ValueError(
                f"data: dtype {self.data.dtype} does not hold {dtype}; "
                f"{np.dtype(CARRIERS[dtype])} is needed"
            )
        self.data.flags.writeable = False

    @property
    def spatial_rank(self) -> int:
        """Spatial dimensions: 1, 2 or 3."""
        return len(self.filter_size)

    @property
    def taps(self) -> int:
        """Taps of the filter, ``T * R * S``."""
        return math.prod(self.filter_size)

    @property
    def channels(self) -> int:
        """Input channels, C."""
        return self.group_channels * self.groups

    @property
    def is_depthwise(self) -> bool:
        """Whether each group has one channel in and one out; such filters have no panels."""
        return self.group_channels == 1 and self.filters == self.groups

    @property
    def nbytes(self) -> int:
        """Size of the packed data in bytes, padding lanes included."""
        return self.data.size * FILTER_BYTES[self.dtype]

    def unpack(self) -> Array:
        """Returns the filter as ``[K, *taps, C / groups]`` in the storage type of ``data``."""
        shape = (self.filters, *self.filter_size, self.group_channels)
        if self.is_depthwise:
            return np.ascontiguousarray(self.data.reshape(self.taps, self.filters).T).reshape(shape)
        sets = self.groups // panel_groups(
            filters=self.filters, group_channels=self.group_channels, groups=self.groups
        )
        layout = panel_layout(
            self.filter_size,
            filters=self.filters,
            group_channels=self.group_channels,
            groups=self.groups,
            dtype=self.dtype,
        )
        whole = (layout.rows, layout.row_depth // layout.interleaved, PANEL, layout.interleaved)
        elements = self.data.reshape(-1, layout.elements)[:, : layout.sums_offset]
        panels = elements.reshape(sets, -1, *whole).transpose(0, 1, 4, 2, 3, 5)
        rows = panels.reshape(sets, -1, layout.rows, layout.row_depth)[..., : layout.products]
        lanes = rows.reshape(sets, rows.shape[1], -1)
        return np.ascontiguousarray(lanes[:, : self.filters // sets]).reshape(shape)


def _layout_of(filter_layout: object) -> tuple[str, int]:
    """Returns a layout's name and spatial rank; the names of the ranks have different lengths."""
    name = getattr(filter_layout, "value", filter_layout)
    rank = len(name) - 2 if isinstance(name, str) else 0
    if rank in LAYOUTS:
        return check_filter_layout(name, rank), rank
    every = ", ".join(layout for names in LAYOUTS.values() for layout in names)
    error = ValueError if isinstance(name, str) else TypeError
    raise error(f"filter_layout: {filter_layout!r} is not a filter layout; {every} are allowed")


def to_krsc(values: Array, layout: str) -> Array:
    """Returns a view of a filter with its dimensions in the order ``[K, *taps, C / groups]``.

    Args:
        values: The filter in ``layout``.
        layout: A name in ``LAYOUTS``.
    """
    own, default, _ = LAYOUTS[len(layout) - 2]
    if layout == own:
        return values
    return np.moveaxis(values, -1, 0) if layout == default else np.moveaxis(values, 1, -1)


def pack_filter(
    array: object, filter_layout: object, *, groups: int = 1, dtype: str | None = None
) -> PackedFilter:
    """Packs a filter into the kernels' own order, once, so that no call has to.

    Args:
        array: The filter: a numpy array or an object with ``__dlpack__`` (a torch tensor, a MAX
            buffer or tensor) of float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or
            int8.
        filter_layout: ``"KRSC"``, ``"RSCF"`` or ``"FCRS"`` (PyTorch's) in two dimensions;
            ``"KSC"``, ``"SCF"``, ``"FCS"`` in one; ``"KTRSC"``, ``"QRSCF"``, ``"FCQRS"`` in three;
            ``"C/4RSK4"``, ``"C/16RSK16"`` or ``"C/32RSK32"``; or a ``max.graph.FilterLayout``.
        groups: Groups of the convolution; ``array`` has ``C / groups`` channels.
        dtype: Storage type of the result: ``"float32"``, ``"bfloat16"``, ``"float16"``,
            ``"float8_e4m3fn"``, ``"float8_e5m2"`` or ``"int8"``, or the ``DType``. By
            default that of ``array``, and float32 for float64.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An unknown layout, a wrong rank, an empty filter, filters that are not divisible
            by ``groups``, an unsupported type, or a value beyond a type of 8 bits.
    """
    if blocks_of(filter_layout) is None:
        _layout_of(filter_layout)
    values, kind = read_array("filter", array, integers=(INT8,))
    return pack_values(values, kind, filter_layout, groups=groups, dtype=dtype)


def pack_values(
    values: Array, kind: str, filter_layout: object, *, groups: int, dtype: str | None = None
) -> PackedFilter:
    """Packs a filter that was read.

    Args:
        values: What ``read_array`` returns, like ``kind``.
        kind: The name of its type.
        filter_layout: As ``pack_filter`` takes it, like the next two.
        groups: Of the convolution.
        dtype: Storage type of the result.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: What ``pack_filter`` raises it for.
    """
    values, filter_layout = without_blocks(values, filter_layout)
    layout, rank = _layout_of(filter_layout)
    default = "float32" if kind == "float64" else kind
    target = check_dtype("dtype", dtype or default, FILTER_BYTES)
    count = check_integer("groups", groups)
    check_at_least("groups", count, 1)
    filters, taps, group_channels = filter_shape_parts(values.shape, layout, rank)
    filters, group_channels = cast(int, filters), cast(int, group_channels)
    if min(filters, group_channels) < 1:
        raise ValueError(
            f"filter: shape {values.shape} is empty; at least 1 filter and 1 channel are needed"
        )
    if filters % count:
        raise ValueError(f"filter: {filters} filters are not divisible by groups={count}")
    flat = packed_elements(to_krsc(values, layout), kind, groups=count, dtype=target)
    # Where no element moved, the filter would share its memory with the caller's array.
    data = flat.copy() if np.may_share_memory(flat, values) else flat
    return PackedFilter(filters, group_channels, taps, count, target, data)


def packed_elements(krsc: Array, kind: str, *, groups: int, dtype: str) -> Array:
    """Returns the elements of a filter in the kernels' own order, flat.

    Args:
        krsc: ``[K, *taps, C / groups]``, as ``read_array`` and ``to_krsc`` return it.
        kind: The name of its type.
        groups: A divisor of ``K``.
        dtype: The storage type of the result, a key of ``FILTER_BYTES``.

    Raises:
        ValueError: A value is beyond a type of 8 bits.
    """
    filters, group_channels = krsc.shape[0], krsc.shape[-1]
    if group_channels == 1 and filters == groups:
        packed: Array = np.moveaxis(krsc[..., 0], 0, -1)
    else:
        shared = panel_groups(filters=filters, group_channels=group_channels, groups=groups)
        packed = _panels(krsc, groups // shared)
        layout = panel_layout(
            krsc.shape[1:-1],
            filters=filters,
            group_channels=group_channels,
            groups=groups,
            dtype=dtype,
        )
        if layout.interleaved > 1:
            packed = _interleaved(packed, layout)
        if layout.has_sums:
            return _with_sums(cast_array(np.ascontiguousarray(packed), kind, dtype))
    return cast_array(np.ascontiguousarray(packed).reshape(-1), kind, dtype)


def _with_sums(panels: Array) -> Array:
    """Returns what ``_interleaved`` returns, flat, with the sums of its filters behind a panel."""
    sums = panels.sum(axis=(1, 2, 4), dtype=np.int32).astype("<i4")
    count = len(panels)
    parts = (panels.reshape(count, -1), sums.view(np.int8).reshape(count, -1))
    return np.concatenate(parts, axis=1).reshape(-1)


def _panels(krsc: Array, groups: int) -> Array:
    """Returns ``[groups, panels, *taps, channels, PANEL]`` from ``[K, *taps, channels]``."""
    group_filters = krsc.shape[0] // groups
    inner = krsc.shape[1:]
    grouped = krsc.reshape(groups, group_filters, *inner)
    packed = np.zeros((groups, -(-group_filters // PANEL), *inner, PANEL), krsc.dtype)
    full = group_filters // PANEL
    whole = grouped[:, : full * PANEL].reshape(groups, full, PANEL, *inner)
    packed[:, :full] = np.moveaxis(whole, 2, -1)
    if rest := group_filters - full * PANEL:
        packed[:, full, ..., :rest] = np.moveaxis(grouped[:, full * PANEL :], 1, -1)
    return packed


def _interleaved(panels: Array, layout: PanelLayout) -> Array:
    """Returns what ``_panels`` returns with neighbouring products of a filter side by side.

    ``[panels, rows, row_depth / interleaved, PANEL, interleaved]``.
    """
    plain = panels.reshape(-1, layout.rows, layout.products, PANEL)
    whole = np.zeros((*plain.shape[:2], layout.row_depth, PANEL), panels.dtype)
    whole[:, :, : layout.products] = plain
    sets = layout.row_depth // layout.interleaved
    return np.moveaxis(whole.reshape(*plain.shape[:2], sets, layout.interleaved, PANEL), 3, 4)
