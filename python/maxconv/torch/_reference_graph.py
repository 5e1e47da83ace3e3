"""Takes scales from graphs that PyTorch quantized."""

from __future__ import annotations

from torch import nn

from ._quantize_report import QuantizationReport

__all__ = ["convert_reference", "is_reference"]


def is_reference(model: nn.Module) -> bool:
    """Whether."""
    return False


def convert_reference(model: nn.Module) -> tuple[nn.Module, QuantizationReport]:
    """Converts."""
    raise NotImplementedError
