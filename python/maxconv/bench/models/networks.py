"""Networks of the list that no library builds: a detector, and a U-Net for segmentation."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Detector", "UNet"]


# A detector -------------------------------------------------------------------------------------


class _ConvNormSilu(nn.Sequential):
    def __init__(self, channels: int, filters: int, taps: int = 1, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels, filters, taps, stride, taps // 2, bias=False),
            nn.BatchNorm2d(filters, eps=1e-3),
            nn.SiLU(),
        )


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, shortcut: bool) -> None:
        super().__init__()
        self.first = _ConvNormSilu(channels, channels, 3)
        self.second = _ConvNormSilu(channels, channels, 3)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return x + y if self.shortcut else y


class _SplitStage(nn.Module):
    """Half of the channels goes through bottlenecks, and what each gives is joined (C2f)."""

    def __init__(self, channels: int, filters: int, depth: int, shortcut: bool) -> None:
        super().__init__()
        half = filters // 2
        self.enter = _ConvNormSilu(channels, 2 * half)
        self.blocks = nn.ModuleList(_Bottleneck(half, shortcut) for _ in range(depth))
        self.leave = _ConvNormSilu((2 + depth) * half, filters)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.enter(x).chunk(2, 1)
        parts = [first, second]
        for block in self.blocks:
            parts.append(block(parts[-1]))
        y: Tensor = self.leave(torch.cat(parts, 1))
        return y


class _PyramidPooling(nn.Module):
    """Poolings of three sizes, each made of the one before (SPPF)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enter = _ConvNormSilu(channels, channels // 2)
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.leave = _ConvNormSilu(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        once = self.pool(x)
        twice = self.pool(once)
        y: Tensor = self.leave(torch.cat([x, once, twice, self.pool(twice)], 1))
        return y


class _Head(nn.Sequential):
    def __init__(self, channels: int, width: int, outputs: int) -> None:
        super().__init__(
            _ConvNormSilu(channels, width, 3),
            _ConvNormSilu(width, width, 3),
            nn.Conv2d(width, outputs, 1),
        )


class Detector(nn.Module):
    """A detector in the form of YOLOv8's smallest: 3.15 million parameters with 80 classes.

    A backbone of split stages, a pyramid that goes down and up again, and for each of its three
    levels one head for boxes and one for classes.

    Args:
        classes: How many kinds of objects it tells apart.
        width: Channels of the first convolution; all others are multiples of it.
        bins: Of the distribution that stands for each side of a box.
    """

    def __init__(self, classes: int = 80, width: int = 16, bins: int = 16) -> None:
        super().__init__()
        a, b, c, d = (width * 2**power for power in (1, 2, 3, 4))
        self.stem = nn.Sequential(
            _ConvNormSilu(3, width, 3, 2),
            _ConvNormSilu(width, a, 3, 2),
            _SplitStage(a, a, 1, shortcut=True),
        )
        self.stage8 = nn.Sequential(_ConvNormSilu(a, b, 3, 2), _SplitStage(b, b, 2, shortcut=True))
        self.stage16 = nn.Sequential(_ConvNormSilu(b, c, 3, 2), _SplitStage(c, c, 2, shortcut=True))
        self.stage32 = nn.Sequential(
            _ConvNormSilu(c, d, 3, 2),
            _SplitStage(d, d, 1, shortcut=True),
            _PyramidPooling(d),
        )
        self.up = nn.Upsample(scale_factor=2)
        self.down16 = _SplitStage(d + c, c, 1, shortcut=False)
        self.down8 = _SplitStage(c + b, b, 1, shortcut=False)
        self.reduce8 = _ConvNormSilu(b, b, 3, 2)
        self.up16 = _SplitStage(b + c, c, 1, shortcut=False)
        self.reduce16 = _ConvNormSilu(c, c, 3, 2)
        self.up32 = _SplitStage(c + d, d, 1, shortcut=False)
        levels, box_width = (b, c, d), max(b // 4, 4 * bins)
        self.boxes = nn.ModuleList(_Head(level, box_width, 4 * bins) for level in levels)
        class_width = max(b, min(classes, 100))
        self.classes = nn.ModuleList(_Head(level, class_width, classes) for level in levels)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Returns what the heads say, before it is decoded.

        Args:
            x: ``[N, 3, H, W]``, with H and W multiples of 32.

        Returns:
            For steps of 8, 16 and 32 pixels ``[N, 4 * bins + classes, H / step, W / step]``: the
            distributions of four sides, and the logits of classes.
        """
        level8 = self.stage8(self.stem(x))
        level16 = self.stage16(level8)
        level32 = self.stage32(level16)
        middle = self.down16(torch.cat([self.up(level32), level16], 1))
        fine = self.down8(torch.cat([self.up(middle), level8], 1))
        middle = self.up16(torch.cat([self.reduce8(fine), middle], 1))
        coarse = self.up32(torch.cat([self.reduce16(middle), level32], 1))
        return [
            torch.cat([boxes(level), classes(level)], 1)
            for boxes, classes, level in zip(
                self.boxes, self.classes, (fine, middle, coarse), strict=True
            )
        ]


# Segmentation -----------------------------------------------------------------------------------


class _ConvPair(nn.Sequential):
    def __init__(self, channels: int, filters: int) -> None:
        super().__init__(
            nn.Conv2d(channels, filters, 3, padding=1, bias=False),
            nn.BatchNorm2d(filters),
            nn.ReLU(),
            nn.Conv2d(filters, filters, 3, padding=1, bias=False),
            nn.BatchNorm2d(filters),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """The U-Net of segmentation, with normalizations and borders: 7.8 million parameters.

    Args:
        classes: Channels of the output.
        width: Filters of the first convolution; each of the four levels below has twice as many.
    """

    def __init__(self, classes: int = 1, width: int = 32) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        pairs = list(itertools.pairwise(widths))
        self.enter = _ConvPair(3, width)
        self.encoder = nn.ModuleList(_ConvPair(fine, coarse) for fine, coarse in pairs)
        self.enlarge = nn.ModuleList(
            nn.ConvTranspose2d(coarse, fine, 2, 2) for fine, coarse in reversed(pairs)
        )
        self.decoder = nn.ModuleList(_ConvPair(coarse, fine) for fine, coarse in reversed(pairs))
        self.leave = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of each pixel.

        Args:
            x: ``[N, 3, H, W]``, with H and W multiples of 16.

        Returns:
            ``[N, classes, H, W]``.
        """
        levels = [self.enter(x)]
        for pair in self.encoder:
            levels.append(pair(functional.max_pool2d(levels[-1], 2)))
        y = levels.pop()
        for enlarge, pair in zip(self.enlarge, self.decoder, strict=True):
            y = pair(torch.cat([enlarge(y), levels.pop()], 1))
        return self.leave(y)  # type: ignore[no-any-return]
