"""Small models for the benchmark's tests, built by a dotted path as those of ``models.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def plain(channels: int = 8) -> nn.Sequential:
    """A convolution with a normalization, and a pointwise one, of images of 3 channels."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 4, 1),
    )


class Config:
    """A configuration, as transformers' models take one."""

    def __init__(self, channels: int) -> None:
        self.channels = channels


class Whole(nn.Module):
    """Returns a dictionary, takes a number besides, and has a part that can be timed alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.body = plain(config.channels)
        self.scale = nn.Parameter(torch.full((4, 1, 1), 1e-6))

    def forward(self, x: Tensor, step: Tensor) -> Mapping[str, Any]:
        """Returns the logits of ``[N, 3, H, W]``, and what the step is."""
        y = self.body(x)
        return {"logits": self.scale * y + y, "step": step}


def sequence() -> nn.Module:
    """A convolution of one dimension: it has one memory format."""
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU())


def deaf() -> nn.Module:
    """A model whose output does not depend on its input."""

    class Deaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x * 0)
            return y

    return Deaf()


def infinite() -> nn.Module:
    """A model whose output is not finite."""

    class Infinite(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(-self.conv(x).abs())

    return Infinite()
