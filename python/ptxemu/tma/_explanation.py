"""A descriptor, printed."""

from __future__ import annotations

from collections.abc import Sequence

from ._descriptor import DataType, Descriptor, Im2colDescriptor, OobFill, TiledDescriptor
from ._swizzle import swizzle_bits, swizzle_period
from ._validation import validate

__all__ = ["explain"]

_WIDTH = 22


def explain(descriptor: Descriptor, *, compute_capability: int = 90) -> str:
    """Describes a descriptor: its fields, what one load moves, whether the driver takes it.

    Args:
        descriptor: The descriptor.
        compute_capability: The GPU's, times ten: which rules ``validate`` holds it to.
    """
    violations = validate(descriptor, compute_capability=compute_capability)
    lines = _fields(descriptor)
    if not violations:
        lines += ["", "one load", *_load(descriptor)]
    lines += ["", *_verdict([str(violation) for violation in violations])]
    return "\n".join(lines)


def _line(name: str, text: object) -> str:
    return f"  {name:<{_WIDTH}} {text}"


def _named(names: Sequence[str], values: Sequence[int], unit: str = "") -> str:
    if len(names) != len(values):
        return ", ".join(map(str, values)) + unit
    return ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True)) + unit


def _axes(descriptor: Descriptor) -> tuple[str, ...]:
    if isinstance(descriptor, Im2colDescriptor):
        return descriptor.axes
    return tuple(f"[{i}]" for i in range(descriptor.tensor_rank))


def _fields(d: Descriptor) -> list[str]:
    axes = _axes(d)
    call = "Tiled" if isinstance(d, TiledDescriptor) else "Im2col"
    lines = [
        f"cuTensorMapEncode{call}",
        _line("tensorDataType", f"{d.data_type.driver_name} ({_size(d.data_type)})"),
        _line("tensorRank", d.tensor_rank),
        _line("globalAddress", f"{d.global_address:#x}"),
        _line("globalDim", _named(axes, d.global_dim)),
        _line("globalStrides", _named(axes[1:], d.global_strides, " bytes")),
    ]
    if isinstance(d, TiledDescriptor):
        lines.append(_line("boxDim", _named(axes, d.box_dim)))
    else:
        lines += [
            _line("pixelBoxLowerCorner", _named(axes[d.spatial_axes], d.pixel_box_lower_corner)),
            _line("pixelBoxUpperCorner", _named(axes[d.spatial_axes], d.pixel_box_upper_corner)),
            _line("channelsPerPixel", d.channels_per_pixel),
            _line("pixelsPerColumn", d.pixels_per_column),
        ]
    return [
        *lines,
        _line("elementStrides", _named(axes, d.element_strides)),
        _line("interleave", d.interleave.driver_name),
        _line("swizzle", d.swizzle.driver_name),
        _line("l2Promotion", d.l2_promotion.driver_name),
        _line("oobFill", d.oob_fill.driver_name),
    ]


def _size(data_type: DataType) -> str:
    return f"{data_type.bits} bits"


def _load(d: Descriptor) -> list[str]:
    lines = [_line("moves", f"{d.transaction_bytes} bytes, which its barrier has to expect")]
    unit = f"slices of {d.interleave.slice_bytes} bytes" if d.interleave else ""
    if isinstance(d, TiledDescriptor):
        lines.append(_line("box", f"{_named(_axes(d), d.box_elements)} {unit or 'elements'}"))
    else:
        row = f", {unit}" if unit else f" of {d.row_elements} channels"
        lines.append(_line("column", f"{d.rows} pixels{row}"))
        lines += [
            _line(f"traversal along {axis}", f"from {lower} in steps of {step} below {end}")
            for axis, lower, step, end in zip(
                d.axes[d.spatial_axes],
                d.pixel_box_lower_corner,
                d.element_strides[d.spatial_axes],
                d.traversal_end,
                strict=True,
            )
        ]
    rows = f"{d.rows} rows of {d.row_bytes} bytes"
    lines.append(
        _line("shared memory", f"{rows}, {d.row_pitch} apart: {d.shared_memory_bytes} bytes")
    )
    if d.swizzle:
        lines.append(
            _line(
                "address bits",
                f"{swizzle_bits(d.swizzle)}: aligned to {swizzle_period(d.swizzle)} bytes, the "
                "first row is in order",
            )
        )
    fill = "NaN" if d.oob_fill is OobFill.NAN_REQUEST_ZERO_FMA else "zero"
    return [*lines, _line("outside the tensor", fill)]


def _verdict(violations: Sequence[str]) -> list[str]:
    if not violations:
        return ["the driver takes it"]
    return ["the driver refuses it", *(f"  {violation}" for violation in violations)]
