"""The kernel that ``torch.compile`` puts behind a convolution, for hundreds of problems.

Of a convolution with bias, SiLU and a residual ``torch.compile`` makes two kernels: cuDNN's, and
one in Triton that does the rest in float32 and overwrites what the convolution stored. To compile
that takes seconds for each problem. This is the second kernel written by hand: an element a lane in
the order of memory, the number of channels a constant, and the two configurations between which
Inductor chooses by time. It is compiled once for each number of channels and configuration, in a
fraction of a second.

Raises ``ImportError`` where Triton is not installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .clock import Clock

__all__ = ["Fuse", "configurations", "fastest"]

# A distribution that is not wherever this package is, and ships no types.
triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

#: Overwrites a convolution with ``silu(convolution + bias) + residual``; channels lie innermost.
Fuse = Callable[[Tensor, Tensor, Tensor], None]

#: Launches by which the faster configuration is found, and replays of them.
_LAUNCHES, _REPLAYS = 8, 3


# Triton's pointers and block values have no types of Python's.
def _body(y, bias, residual, count, channels: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * block + tl.arange(0, block)
    inside = index < count
    value = tl.load(y + index, inside).to(tl.float32)
    value += tl.load(bias + index % channels, inside, eviction_policy="evict_last").to(tl.float32)
    value = value * tl.sigmoid(value) + tl.load(residual + index, inside).to(tl.float32)
    tl.store(y + index, value, inside)


_kernel: Any = triton.jit(_body)


def configurations(count: int) -> list[tuple[int, int]]:
    """Returns Inductor's two configurations for so many elements: those of a block, and warps."""
    ceiling = 1 << (count - 1).bit_length()
    most = max(256, min(ceiling // 128, 1024))
    blocks = ((min(most, ceiling), 256), (min(most // 2, ceiling), 64))
    made = ((block, min(8, max(1, block // per_warp))) for block, per_warp in blocks)
    return [*dict.fromkeys(made)]


def _launcher(block: int, warps: int) -> Fuse:
    def run(y: Tensor, bias: Tensor, residual: Tensor) -> None:
        count = y.numel()
        grid = (-(-count // block),)
        _kernel[grid](y, bias, residual, count, bias.numel(), block, num_warps=warps)

    return run


def fastest(clock: Clock, y: Tensor, bias: Tensor, residual: Tensor) -> Fuse:
    """Returns the kernel in the faster of its configurations.

    Args:
        clock: The device and its time.
        y: A convolution's output, with channels innermost in memory, which is overwritten.
        bias: ``[K]``.
        residual: As ``y``.

    Raises:
        ValueError: There are 2^31 elements or more, which the kernel does not count.
    """
    if y.numel() >= 1 << 31:
        raise ValueError(f"{y.numel()} elements; fewer than 2^31 are allowed")
    best: tuple[float, Fuse] | None = None
    for block, warps in configurations(y.numel()):
        run = _launcher(block, warps)
        run(y, bias, residual)

        def enqueue(run: Fuse = run) -> None:
            for _ in range(_LAUNCHES):
                run(y, bias, residual)

        replay = clock.capture(enqueue)
        clock.elapsed(replay, 1)
        seconds = clock.elapsed(replay, _REPLAYS)
        if best is None or seconds < best[0]:
            best = (seconds, run)
    assert best is not None
    return best[1]
