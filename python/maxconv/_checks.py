"""Argument checks: every argument error of the package is raised from here or from ``problem``.

A message names the argument, its value and what is allowed::

    stride: (0, 1) has a non-positive entry; every stride must be at least 1

A value that is wrong raises ``ValueError``, an object of the wrong Python type ``TypeError``.
Spatial dimensions are named ``w``; ``h, w``; or ``d, h, w``; tuples are outermost first.
MAX is not imported by importing this module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ._dtypes import DTYPE_BYTES, INTEGERS
from ._fields import Precision

if TYPE_CHECKING:
    from max.graph.dim import Dim

__all__ = [
    "AXES",
    "LAYOUTS",
    "Padding",
    "Size",
    "check_at_least",
    "check_beside_upsample",
    "check_bias",
    "check_device",
    "check_dtype",
    "check_filter_layout",
    "check_integer",
    "check_number",
    "check_precision",
    "check_residual",
    "check_same_device",
    "check_same_dtype",
    "check_size",
    "check_upsample",
    "filter_shape_parts",
    "read_padding",
    "renamed",
    "show",
    "spatial_tuple",
]

#: A size that is known when the graph is built, or a MAX dimension that is not.
Size: TypeAlias = "int | Dim"

#: ``(before, after)`` a spatial dimension and outermost first, one number for all of them,
#: ``"same"`` or ``"valid"``.
Padding: TypeAlias = str | int | Sequence[int]

#: Names of filter layouts by spatial rank. In each row: the kernels' own, MAX's default, PyTorch's.
LAYOUTS: Mapping[int, tuple[str, str, str]] = {
    1: ("KSC", "SCF", "FCS"),
    2: ("KRSC", "RSCF", "FCRS"),
    3: ("KTRSC", "QRSCF", "FCQRS"),
}

#: Names of the spatial dimensions by spatial rank.
AXES: Mapping[int, tuple[str, ...]] = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Has messages name arguments as the caller knows them: ``renamed(filter="weight")``."""
    try:
        yield
    except (TypeError, ValueError) as error:
        name, _, rest = str(error).partition(":")
        if name not in names:
            raise
        raise type(error)(f"{names[name]}:{rest}") from None


def show(value: object) -> str:
    """Writes a value as it stands in a message: sizes without MAX's ``Dim(...)`` around each."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        inside = ", ".join(show(entry) for entry in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value) if isinstance(value, str) else str(value)


def check_integer(name: str, value: object, whole: object = None) -> int:
    """Returns ``value`` as an ``int``; the message shows ``whole``, which it is an entry of."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        shown = value if whole is None else whole
        raise TypeError(
            f"{name}: {show(shown)} holds a {type(value).__name__}; integers are allowed"
        )
    return int(value)


def check_size(name: str, value: object) -> Size:
    """Returns ``value`` as an ``int`` where it is known now, else as the ``Dim`` that it is."""
    graph = sys.modules.get("max.graph")
    if graph is not None and isinstance(value, graph.Dim):
        return int(value) if isinstance(value, graph.StaticDim) else cast("Dim", value)
    return check_integer(name, value)


def spatial_tuple(name: str, value: object, rank: int) -> tuple[int, ...]:
    """Returns a per-dimension argument as ``rank`` integers; one integer stands for all.

    Raises:
        TypeError: ``value`` is neither an integer nor a sequence of integers (a ``bool`` is no
            integer here).
        ValueError: The sequence has another length than ``rank``.
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return (int(value),) * rank
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(
            f"{name}: {value!r} is a {type(value).__name__}; an integer or a tuple of {rank} "
            "integers is allowed"
        )
    if len(value) != rank:
        raise ValueError(
            f"{name}: {show(tuple(value))} has {len(value)} entries; "
            f"{rank} are allowed, one a spatial dimension ({', '.join(AXES[rank])})"
        )
    return tuple(check_integer(name, entry, tuple(value)) for entry in value)


def check_at_least(name: str, values: int | tuple[int, ...], least: int) -> None:
    """Raises ``ValueError`` where an integer, or an entry of a tuple, is less than 0 or 1."""
    if isinstance(values, int):
        if values < least:
            kind = "not positive" if least == 1 else "negative"
            raise ValueError(f"{name}: {values} is {kind}; it must be at least {least}")
        return
    if any(value < least for value in values):
        kind = "non-positive" if least == 1 else "negative"
        raise ValueError(
            f"{name}: {show(values)} has a {kind} entry; every {name} must be at least {least}"
        )


def check_upsample(factors: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Raises ``ValueError`` where a factor of an enlargement is below 1, or a stride is not 1."""
    check_at_least("upsample", factors, 1)
    if any(step != 1 for step in stride):
        raise ValueError(
            f"upsample: {show(factors)} with stride {show(stride)} is not supported; stride 1 is "
            "allowed"
        )


def check_beside_upsample(factors: tuple[int, ...], dtype: str, *, residual: bool) -> None:
    """Checks what else a convolution of an enlarged input has.

    Args:
        factors: Of the enlargement.
        dtype: Of input and filter.
        residual: Whether there is one.

    Raises:
        ValueError: It has a residual, or sums of taps would have 8 bits.
    """
    if residual:
        raise ValueError(
            f"residual: given beside upsample={show(factors)}, where no kernel reads one; None is "
            "allowed: add it to the result"
        )
    if dtype not in DTYPE_BYTES:
        raise ValueError(
            f"upsample: {show(factors)} with a filter of {dtype} is not supported, whose taps "
            f"would be summed in 8 bits; {', '.join(DTYPE_BYTES)} are allowed"
        )


def read_padding(padding: Padding, rank: int) -> tuple[int, ...] | None:
    """Returns the zeros ``(before, after)`` of each spatial dimension; ``None`` is ``"same"``.

    Args:
        padding: ``(d_before, d_after, h_before, h_after, w_before, w_after)`` or the last two or
            four of these (the order of MAX); one integer for every side; ``"valid"`` for none;
            ``"same"`` for an output of the input's size.
        rank: Spatial dimensions.

    Raises:
        TypeError: ``padding`` is none of these types.
        ValueError: An unknown name, or a wrong length.
    """
    if isinstance(padding, str):
        if padding == "valid":
            return (0,) * (2 * rank)
        if padding != "same":
            raise ValueError(
                f"padding: {padding!r} is not a name of a padding; 'same', 'valid', an integer or "
                f"{2 * rank} integers are allowed"
            )
        return None
    if isinstance(padding, int | np.integer) and not isinstance(padding, bool):
        return (int(padding),) * (2 * rank)
    if not isinstance(padding, Sequence):
        raise TypeError(
            f"padding: {padding!r} is a {type(padding).__name__}; 'same', 'valid', an integer or a "
            f"tuple of {2 * rank} integers is allowed"
        )
    if len(padding) != 2 * rank:
        names = ", ".join(f"{axis}_{side}" for axis in AXES[rank] for side in ("before", "after"))
        raise ValueError(
            f"padding: {show(tuple(padding))} has {len(padding)} entries; {2 * rank} are allowed: "
            f"({names})"
        )
    return tuple(check_integer("padding", entry, tuple(padding)) for entry in padding)


def check_filter_layout(layout: object, rank: int, others: Sequence[str] = ()) -> str:
    """Returns the name of a filter layout, from its name or from a ``max.graph.FilterLayout``.

    Args:
        layout: The argument.
        rank: Spatial dimensions.
        others: Layouts that are read elsewhere, for messages.

    Raises:
        TypeError: ``layout`` is neither.
        ValueError: The name is not one of ``LAYOUTS[rank]``.
    """
    names = ", ".join((*LAYOUTS[rank], *others))
    name = getattr(layout, "value", layout)
    if not isinstance(name, str):
        raise TypeError(
            f"filter_layout: {layout!r} is a {type(layout).__name__}; a FilterLayout or one of "
            f"{names} is allowed"
        )
    if name not in LAYOUTS[rank]:
        raise ValueError(
            f"filter_layout: {name!r} is not a layout of a filter with {rank} spatial "
            f"dimension{'s' * (rank > 1)}; {names} are allowed"
        )
    return name


def filter_shape_parts(
    shape: Sequence[Any], layout: str, rank: int
) -> tuple[Size, tuple[int, ...], Size]:
    """Splits a filter's shape into ``(filters, taps a spatial dimension, channels a group)``.

    Args:
        shape: The filter's shape in ``layout``.
        layout: One of ``LAYOUTS[rank]``.
        rank: Spatial dimensions.

    Raises:
        ValueError: The shape has not ``rank + 2`` dimensions, or a number of taps is symbolic or
            zero.
    """
    if len(shape) != rank + 2:
        raise ValueError(
            f"filter: shape {show(tuple(shape))} has rank {len(shape)}; a filter in layout "
            f"{layout} has rank {rank + 2}"
        )
    sizes = [check_size("filter", entry) for entry in shape]
    own, default, _ = LAYOUTS[rank]
    if layout == own:
        filters, taps, channels = sizes[0], sizes[1:-1], sizes[-1]
    elif layout == default:
        filters, taps, channels = sizes[-1], sizes[:-2], sizes[-2]
    else:
        filters, taps, channels = sizes[0], sizes[2:], sizes[1]
    if not all(isinstance(tap, int) for tap in taps):
        raise ValueError(
            f"filter: shape {show(tuple(shape))} has a symbolic spatial extent; extents known "
            "when the graph is built "
            "are allowed"
        )
    if any(cast(int, tap) < 1 for tap in taps):
        raise ValueError(
            f"filter: shape {show(tuple(shape))} has an empty spatial dimension; every extent "
            "must be at least 1"
        )
    return filters, tuple(cast(int, tap) for tap in taps), channels


def check_dtype(name: str, dtype: object, allowed: Mapping[str, int] = DTYPE_BYTES) -> str:
    """Returns the name of a storage type, from its name or from a ``max.dtype.DType``.

    Raises:
        ValueError: It is not one of ``allowed``.
    """
    text = dtype if isinstance(dtype, str) else str(getattr(dtype, "name", dtype))
    if text not in allowed:
        raise ValueError(f"{name}: dtype {text} is not supported; {', '.join(allowed)} are allowed")
    return text


def check_number(name: str, value: object) -> float:
    """Returns ``value`` as a ``float``; raises ``TypeError`` where it is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: {value!r} is a {type(value).__name__}; a number is allowed")
    return float(value)


def check_scale(name: str, scale: object) -> None:
    """Checks what a step stands for: a number, or float32 with one a channel.

    Raises:
        TypeError: It is neither.
        ValueError: One is not positive, or its reciprocal is no float32.
    """
    if isinstance(scale, np.ndarray):
        if scale.dtype != np.float32 or scale.ndim != 1:
            raise TypeError(
                f"{name}: {scale.dtype} of rank {scale.ndim} is not allowed; a number or float32 "
                "of rank 1 is"
            )
        scales = scale.astype(np.float64)
    else:
        scales = np.asarray(check_number(name, scale))
    reciprocals(name, scales)


def reciprocals(name: str, scales: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Returns the float32 nearest to ``1 / scale``, of each.

    Raises:
        ValueError: One is not positive, or its reciprocal is no float32.
    """
    with np.errstate(all="ignore"):
        factors = np.asarray(1 / scales, dtype=np.float32)
    if not (np.all(scales > 0) and np.all(np.isfinite(factors)) and np.all(factors > 0)):
        raise ValueError(
            f"{name}: {show(scales.tolist())} is not allowed; positive numbers are, whose "
            "reciprocal is a float32"
        )
    return factors


def check_zero_point(name: str, zero_point: object, dtype: str) -> int:
    """Returns an integer that stands for 0.

    Raises:
        TypeError: It is no integer.
        ValueError: It is beyond ``dtype``.
    """
    value = check_integer(name, zero_point)
    lowest, highest = INTEGERS[dtype]
    if not lowest <= value <= highest:
        raise ValueError(f"{name}: {value} is no {dtype}; {lowest} to {highest} are allowed")
    return value


def check_precision(precision: object) -> Precision:
    """Reads the ``precision`` argument.

    Raises:
        TypeError: It is no string.
        ValueError: It is not the name of a ``Precision``.
    """
    names = {member.name.lower(): member for member in Precision}
    if not isinstance(precision, str):
        raise TypeError(
            f"precision: {precision!r} is a {type(precision).__name__}; one of "
            f"{', '.join(names)} is allowed"
        )
    if precision not in names:
        raise ValueError(
            f"precision: {precision!r} is not a precision of float32 products; "
            f"{', '.join(names)} are allowed"
        )
    return names[precision]


def check_same_dtype(name: str, dtype: str, allowed: Sequence[str], why: str) -> None:
    """Raises ``ValueError`` unless ``dtype`` is in ``allowed``; ``why`` ends the message."""
    if dtype not in allowed:
        raise ValueError(
            f"{name}: dtype {dtype} does not match; {' or '.join(dict.fromkeys(allowed))} {why}"
        )


def check_bias(shape: Sequence[Any], filters: Size, name: str = "bias") -> None:
    """Checks a bias, or what else has one element a filter: its rank is 1.

    Raises:
        ValueError: It is not; a symbolic length is left to the kernel.
    """
    if len(shape) != 1:
        raise ValueError(
            f"{name}: shape {show(tuple(shape))} has rank {len(shape)}; rank 1 is allowed, one "
            "element a filter"
        )
    size = check_size(name, shape[0])
    if isinstance(size, int) and isinstance(filters, int) and size != filters:
        raise ValueError(f"{name}: {size} elements, but there are {filters} filters")


def check_residual(shape: Sequence[Any], output_shape: Sequence[Any]) -> None:
    """Checks a residual against the output's shape.

    Raises:
        ValueError: The ranks differ, or two static sizes do; what a symbolic size turns out to be,
            the kernel checks.
    """
    sizes = [check_size("residual", entry) for entry in shape]
    outputs = [check_size("residual", entry) for entry in output_shape]
    differ = len(sizes) != len(outputs) or any(
        isinstance(a, int) and isinstance(b, int) and a != b
        for a, b in zip(sizes, outputs, strict=False)
    )
    if differ:
        raise ValueError(
            f"residual: shape {show(tuple(sizes))} must equal the output's shape "
            f"{show(tuple(outputs))}"
        )


def check_same_device(name: str, device: object, needed: object, whose: str = "input") -> None:
    """Raises ``ValueError`` unless ``device`` is the one that the input (or ``whose``) is on."""
    if device != needed:
        raise ValueError(f"{name}: device {device} is not the {whose}'s; {needed} is needed")


def check_device(name: str, device: object, supported: Sequence[str] = ("cpu", "gpu")) -> None:
    """Raises ``ValueError`` unless a device (``cpu:0`` in MAX's words) is of a supported kind."""
    if str(device).split(":", maxsplit=1)[0] not in supported:
        raise ValueError(
            f"{name}: device {device} is not supported; {', '.join(supported)} are allowed"
        )
