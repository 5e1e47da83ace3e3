"""Some elements of a convolution, summed exactly: what the Mojo program is compared with.

No operand is made: an element's products are of values that are computed where they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maxconv._problems import NamedProblem

from ..device import is_narrow, out_type
from ..entrant import BARE, FUSED
from .clock import distance
from .operands import exponents, geometry, valued

__all__ = ["COUNT", "Samples", "sampled"]

#: Elements of an output that are compared.
COUNT = 4096


@dataclass(frozen=True)
class Samples:
    """Each ``step``-th element of an output, in the order of memory, in float32."""

    step: int
    values: Tensor

    @classmethod
    def of(cls, output: Tensor, step: int) -> Samples:
        """Returns those of an output with its channels second, which lie innermost in memory."""
        flat = output.movedim(1, -1).reshape(-1)
        return cls(step, flat[torch.arange(0, flat.numel(), step, device=flat.device)][:COUNT])

    def error(self, found: Samples, tolerance: float) -> float:
        """See ``distance``.

        Raises:
            Mismatch: As there, or others were found.
        """
        assert found.step == self.step
        return distance(found.values, self.values, tolerance)


def sampled(
    named: NamedProblem,
    dtype: str,
    works: Collection[str],
    *,
    device: str,
    interleaved: int = 0,
) -> dict[str, Samples]:
    """Returns elements of the first set's output, by work.

    The sum is one of float64: of int8 it is exact, and the bare output is what one rounding of it
    makes.

    Args:
        named: The problem.
        dtype: Of activation and filter.
        works: The kinds of work.
        device: torch's name of where to compute.
        interleaved: Channels of a block in memory, or 0: channels last.
    """
    sizes = geometry(named.problem)
    batch, channels, filters, groups = sizes[:4]
    inputs, taps, strides, dilations, pads = (sizes[i : i + 3] for i in range(4, 19, 3))
    outputs = [1] * (3 - named.problem.spatial_rank)
    outputs += [int(str(size)) for size in named.problem.output_shape[1:-1]]
    count = math.prod((batch, *outputs, filters))
    step = max(1, count // COUNT)
    index = torch.arange(0, count, step, device=device)[:COUNT]
    image, k, at = _place(index, outputs, filters, interleaved)
    depth = channels // groups
    c = torch.arange(depth, device=device)
    channel = (k // (filters // groups) * depth)[:, None] + c
    made = exponents(named, dtype)
    total = torch.zeros(len(index), dtype=torch.float64, device=device)
    for tap in range(math.prod(taps)):
        position, inside = image, torch.ones_like(image, dtype=torch.bool)
        for axis, where in enumerate(_unravelled(tap, taps)):
            place = at[axis] * strides[axis] - pads[axis] + where * dilations[axis]
            inside = inside & (place >= 0) & (place < inputs[axis])
            position = position * inputs[axis] + place.clamp(0, inputs[axis] - 1)
        x = valued(
            _offset(position[:, None], channel, math.prod(inputs), channels, interleaved),
            0,
            exponent=made.activation,
            dtype=dtype,
        )
        row = (k * math.prod(taps) + tap)[:, None]
        where = row * depth + c
        if interleaved:
            block, lane = c // interleaved, c % interleaved
            tile = (block * math.prod(taps) + tap) * filters
            where = (tile + k[:, None]) * interleaved + lane
        w = valued(where, 1, exponent=made.filter, dtype=dtype)
        total += torch.where(inside, (x.double() * w.double()).sum(1), 0)
    if is_narrow(dtype):
        total = (total.float() * 2.0**made.scale / (1 << k % 3)).double()
    return {work: Samples(step, _finished(work, total, index, k, dtype)) for work in works}


def _finished(work: str, total: Tensor, index: Tensor, k: Tensor, dtype: str) -> Tensor:
    """Returns what is stored of sums."""
    kind = out_type(dtype)
    if work == FUSED:
        total = total + valued(k, 2, dtype=kind).double()
        total = torch.nn.functional.silu(total) + valued(index, 3, dtype=kind).double()
    if work == BARE and is_narrow(dtype):
        return total.float().to(getattr(torch, kind)).float()
    return total.float()


def _unravelled(index: Any, sizes: list[int]) -> list[Any]:
    """Returns the place of an index, or of indices, in an array of three dimensions."""
    _, middle, last = sizes
    return [index // (middle * last), index // last % middle, index % last]


def _place(
    index: Tensor, outputs: list[int], filters: int, interleaved: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns image, filter and place in the image of an output's elements."""
    pixels = math.prod(outputs)
    if not interleaved:
        pixel = index // filters
        return pixel // pixels, index % filters, _unravelled(pixel % pixels, outputs)
    block, lane = index // interleaved, index % interleaved
    pixel, rest = block % pixels, block // pixels
    blocks = filters // interleaved
    k = rest % blocks * interleaved + lane
    return rest // blocks, k, _unravelled(pixel, outputs)


def _offset(pixel: Tensor, channel: Tensor, pixels: int, channels: int, interleaved: int) -> Tensor:
    """Returns where elements of an activation lie; pixels are counted over all images."""
    if not interleaved:
        return pixel * channels + channel
    image, pixel = pixel // pixels, pixel % pixels
    block = image * (channels // interleaved) + channel // interleaved
    return (block * pixels + pixel) * interleaved + channel % interleaved
