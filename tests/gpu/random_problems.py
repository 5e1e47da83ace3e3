"""Prints random problems for tests/gpu/sm90.mojo, the same ones for the same seed.

python tests/gpu/random_problems.py SEED COUNT
"""

from __future__ import annotations

import random
import sys


def problem(draw: random.Random, name: str) -> str | None:
    """A line of a problem file, or None if the draw is no convolution."""
    rank = draw.choice([1, 2, 2, 3])
    groups = draw.choice([1, 1, 1, 2, 3, 4])
    most = {1: 400, 2: 40, 3: 14}[rank]
    axes = []
    for _ in range(rank):
        size, taps = draw.randint(1, most), draw.randint(1, {1: 7, 2: 7, 3: 4}[rank])
        stride, dilation = draw.choice([1, 1, 2, 3]), draw.choice([1, 1, 2, 3])
        before, after = draw.randint(0, 5), draw.randint(0, 5)
        if (taps - 1) * dilation + 1 > size + before + after:
            return None
        axes.append((size, taps, stride, dilation, before, after))
    size_of, *others = ("x".join(map(str, numbers)) for numbers in zip(*axes, strict=True))
    channels, filters = (8 * draw.randint(1, 60 // groups) * groups for _ in range(2))
    batch = draw.randint(1, 4)
    return f"{name} {batch} {size_of} {channels} {filters} {' '.join(others)} {groups}"


def main() -> None:
    """Prints as many problems as asked for."""
    seed, count = map(int, sys.argv[1:])
    draw = random.Random(seed)
    printed = 0
    while printed < count:
        line = problem(draw, f"random_{seed}_{printed}")
        if line:
            print(line)
            printed += 1


if __name__ == "__main__":
    main()
