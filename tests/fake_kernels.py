"""A stand-in for the benchmark's Mojo program: answers its lines, and computes what it must.

Makes the operands in a way of its own, so that it holds the benchmark's to account. The first
argument is a fault to have: ``wrong`` outputs, ``refuses`` problems, ``refuses-fused``, ``dies`` at
the first burst, ``hangs`` there, ``breaks`` there for good, ``no-gpu`` from the start. Or it is
``int8``, the type of activation and filter in the place of bfloat16.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MASK = np.uint64(0xFFFFFFFF)


def values(count: int, seed: int, exponent: int, quarter: bool = False) -> Floats:
    h = np.arange(count, dtype=np.uint64)
    h ^= np.uint64(seed * 0x9E3779B9 % 2**32)
    h ^= h >> np.uint64(16)
    h = h * np.uint64(0x85EBCA6B) & MASK
    h ^= h >> np.uint64(13)
    h = h * np.uint64(0xC2B2AE35) & MASK
    h ^= h >> np.uint64(16)
    total = h.astype(np.uint32).view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.int64) - 510
    if quarter:
        quarters: Floats = np.floor(total / 4)
        return quarters
    # bfloat16 has eight bits: of integers up to 510, those above 256 lose one.
    rounded = np.where(abs(total) > 256, 2 * np.rint(total / 2), total)
    made: Floats = np.ldexp(rounded, exponent)
    return made


def nearest(y: Floats) -> Floats:
    """Rounds to bfloat16."""
    mantissa, exponent = np.frexp(y)
    made: Floats = np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)
    return made


class Problem:
    def __init__(self, words: list[str], quarter: bool = False) -> None:
        self.quarter = quarter
        n = [int(word) for word in words]
        self.batch, self.channels, self.filters, self.groups = n[:4]
        axes = [n[i : i + 3] for i in range(4, 22, 3)]
        self.size, self.taps, self.stride, self.dilation, self.before, self.after = axes
        self.sets, self.exponent, self.filter_exponent, *scale = n[22:]
        assert len(scale) == quarter
        self.scale = 2.0 ** (scale[0] - np.arange(self.filters) % 3) if quarter else 1.0

    def output(self, work: str) -> Floats:
        """Returns the first set's output with channels innermost, flat."""
        groups, depth = self.groups, self.channels // self.groups
        blocks = work.startswith("interleaved")
        image = (self.batch, *self.size, self.channels)
        x = self.make(image, 0, quarter=self.quarter)
        shape = (self.filters, *self.taps, depth)
        taps = self.make(shape, 1, self.filter_exponent, quarter=self.quarter)
        if blocks:
            x = from_blocks(x, image)
            # A filter is an image of its taps by its filters.
            taps = from_blocks(taps, (1, *self.taps, self.filters, depth))[0]
            taps = np.moveaxis(taps, 3, 0)
        x = np.pad(x, [(0, 0), *zip(self.before, self.after, strict=True), (0, 0)])
        sizes = [
            (size - (tap - 1) * dilation - 1) // stride + 1
            for size, tap, dilation, stride in zip(
                x.shape[1:4], self.taps, self.dilation, self.stride, strict=True
            )
        ]
        y = np.zeros((self.batch, *sizes, self.filters))
        each = self.filters // groups
        for tap in np.ndindex(*self.taps):
            steps = zip(tap, self.dilation, sizes, self.stride, strict=True)
            at = tuple(slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in steps)
            part = x[slice(None), at[0], at[1], at[2]]
            for group in range(groups):
                filters = slice(group * each, (group + 1) * each)
                channels = slice(group * depth, (group + 1) * depth)
                y[..., filters] += part[..., channels] @ taps[filters, tap[0], tap[1], tap[2]].T
        y *= self.scale
        if work.endswith("fused"):
            y += self.make((self.filters,), 2)
            residual = self.make(y.shape, 3)
            y = y / (1 + np.exp(-y)) + (from_blocks(residual, y.shape) if blocks else residual)
        if blocks:
            wide = y.reshape(*y.shape[:-1], -1, 4)
            y = np.moveaxis(wide, -2, 1)
        return nearest(y.reshape(-1)) if self.quarter else y.reshape(-1)

    def make(
        self,
        shape: tuple[int, ...],
        seed: int,
        exponent: int | None = None,
        quarter: bool = False,
    ) -> Floats:
        count = int(np.prod(shape))
        exponent = self.exponent if exponent is None else exponent
        return values(count, seed, exponent, quarter).reshape(shape)


def from_blocks(x: Floats, shape: tuple[int, ...]) -> Floats:
    """Returns what lies in blocks of 4 channels with its channels last."""
    batch, *size, channels = shape
    wide = x.reshape(batch, channels // 4, *size, 4)
    made: Floats = np.moveaxis(wide, 1, -2).reshape(shape)
    return made


def main(fault: str) -> None:
    if fault == "no-gpu":
        say({"error": "no GPU"})
        return
    say({"device": "a fake"})
    problem: Problem | None = None
    broken = False
    for line in sys.stdin:
        kind, *words = line.split()
        if broken:
            say({"error": "CUDA is broken"})
            continue
        if kind == "problem":
            problem = None if fault == "refuses" else Problem(words, fault == "int8")
            say({"error": "no kernel takes it"} if problem is None else {})
            continue
        assert problem is not None
        work, number = words[0], int(words[1])
        if kind == "prepare":
            if work.startswith("interleaved") and (problem.channels | problem.filters) % 4:
                say({"error": "dp4a takes multiples of 4 channels"})
                continue
            refused = fault == "refuses-fused" and work == "fused"
            say({"error": "no residual"} if refused else {})
        elif kind == "sample":
            y = problem.output(work) + (0.5 if fault == "wrong" else 0)
            step = max(1, len(y) // number)
            taken = np.asarray(y[::step][:number], np.float32)
            say({"step": step, "values": taken.view(np.int32).tolist()})
        else:
            if fault == "dies":
                sys.exit("a bad address")
            if fault == "breaks":
                broken = True
                say({"error": "CUDA call failed"})
                continue
            if fault == "hangs":
                time.sleep(60)
            say({"ns": number * 32 * (1000 if kind == "replay" else 3000)})


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
