"""What ``quantize`` did to a model."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .._calibration import Quantization
from ._report import ConversionReport, _table

__all__ = ["Difference", "QuantizationReport", "QuantizedLayer", "shown_scale"]


@dataclass
class Difference:
    """How far tensors are from what they should be, over any number of them."""

    squares: float = 0.0
    """Sum of the squares of the differences."""
    wanted: float = 0.0
    """Sum of the squares of what they should be."""

    @property
    def relative(self) -> float:
        """The norm of the differences, relative to that of what they should be."""
        if self.wanted:
            return math.sqrt(self.squares / self.wanted)
        return math.inf if self.squares else 0.0

    @property
    def decibels(self) -> float:
        """The ratio of signal and noise, in dB."""
        error = self.relative
        return -20 * math.log10(error) if error else math.inf


#: A step, or one for each channel.
Scale = float | tuple[float, ...]


@dataclass(frozen=True)
class QuantizedLayer:
    """A convolution, and what became of it."""

    name: str
    """Its path in the model, or the name of a function's node in the graph."""
    kind: str
    """What it was, as ``Conv2d``."""
    became: str
    """The types of input and output, as ``uint8 -> uint8``; ``float`` if it stays as it is."""
    input_scale: Scale | None = None
    input_zero_point: int | None = None
    output_scale: Scale | None = None
    """``None`` where it returns floats."""
    output_zero_point: int | None = None
    error: float | None = None
    """The norm of the error that rounding makes in this layer alone, relative to that of its
    output; ``None`` if that was not measured."""
    sqnr: float | None = None
    """The same in dB."""
    total_error: float | None = None
    """The same of its output in the model, where the layers in front have errors too."""
    note: str = ""
    """Why it stays as it is, or why channels have no scales of their own."""

    @property
    def quantized(self) -> bool:
        """Whether it convolves integers."""
        return self.became != "float"


@dataclass
class QuantizationReport:
    """What became of each convolution of a model. ``str(report)`` is a table."""

    layers: list[QuantizedLayer] = field(default_factory=list)
    """In the order of the model."""
    error: float | None = None
    """The norm of the error of the model's outputs, relative to theirs."""
    sqnr: float | None = None
    """The same in dB."""
    conversion: ConversionReport | None = None
    """What ``convert`` did before; ``None`` for a graph that PyTorch quantized."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as dictionaries, lists and strings."""
        return asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """Returns the report as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        """The report as a table."""
        count = sum(layer.quantized for layer in self.layers)
        first = f"{count} of {len(self.layers)} layers quantized"
        if self.error is not None and self.sqnr is not None:
            first += f"; error of the outputs {self.error:.2g} ({self.sqnr:.1f} dB)"
        head = ("layer", "was", "became", "input", "output", "error", "dB", "total", "")
        return "\n".join([first, *_table(head, map(_row, self.layers))])


def _row(layer: QuantizedLayer) -> tuple[str, ...]:
    return (
        *(layer.name, layer.kind, layer.became),
        _step(layer.input_scale, layer.input_zero_point),
        _step(layer.output_scale, layer.output_zero_point),
        "" if layer.error is None else f"{layer.error:.2g}",
        "" if layer.sqnr is None else f"{layer.sqnr:.1f}",
        "" if layer.total_error is None else f"{layer.total_error:.2g}",
        layer.note,
    )


def _step(scale: Scale | None, zero_point: int | None) -> str:
    if scale is None or zero_point is None:
        return ""
    if isinstance(scale, tuple):
        return f"{min(scale):.3g} to {max(scale):.3g}, {zero_point}"
    return f"{scale:.3g}, {zero_point}"


def shown_scale(quantization: Quantization | None) -> Scale | None:
    """Returns the scale of integers in the form that a report has."""
    if quantization is None:
        return None
    scale = quantization.scale
    return tuple(map(float, scale)) if isinstance(scale, np.ndarray) else scale
