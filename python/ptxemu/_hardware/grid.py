"""A launch as its blocks see it: its sizes, and what they share."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod

import numpy as np

from .._errors import BudgetError
from .barriers import BarrierKinds
from .device import Device
from .fences import Fences
from .memory import Memory
from .registers import LANES

__all__ = ["Grid", "Shape", "Three"]

Three = tuple[int, int, int]


@dataclass(frozen=True)
class Shape:
    """A launch's sizes, x first.

    Attributes:
        grid: Blocks.
        block: Threads of a block.
        cluster: Blocks of a cluster.
        dynamic_bytes: Shared memory that a block gets beside its variables.
    """

    grid: Three
    block: Three
    cluster: Three
    dynamic_bytes: int = 0


class Grid:
    """A kernel's launch: what all its blocks know and share.

    Attributes:
        device: Where it runs.
        shape: Its sizes.
        threads: Of a block.
        cluster_size: Blocks of a cluster.
        shared_bytes: Shared memory of a block: its variables, then the dynamic part.
        local_bytes: Local memory of a thread.
        parameters: The kernel's parameter memory.
        fences: When each thread last executed a proxy fence.
        barriers: What barriers are made of.
        tensor_blocks: Blocks that a tcgen05 instruction is for, one number in all of a kernel; 0
            at first.
        executed: Instructions of all warps so far.
    """

    def __init__(self, device: Device, shape: Shape, parameters: bytes, budget: int) -> None:
        self.device = device
        self.shape = shape
        self.threads = prod(shape.block)
        self.cluster_size = prod(shape.cluster)
        self.shared_bytes = 0
        self.local_bytes = 0
        self.parameters = Memory("parameter memory", 0, len(parameters))
        self.parameters.data[: len(parameters)] = np.frombuffer(parameters, np.uint8)
        self.fences = Fences()
        self.barriers = BarrierKinds()
        self.tensor_blocks = 0
        self.executed = 0
        self._budget = budget
        self._operations = 0
        self._warps = 0
        axes = [range(0, n, step) for n, step in zip(shape.grid, shape.cluster, strict=True)]
        self._clusters = itertools.product(*reversed(axes))

    def take_cluster(self) -> Three | None:
        """Takes the next cluster that has not started; returns its first block, None if none."""
        start = next(self._clusters, None)
        return None if start is None else (start[2], start[1], start[0])

    def new_operation(self) -> int:
        """A number for an asynchronous operation, not 0."""
        self._operations += 1
        return self._operations

    def new_warp(self) -> int:
        """The number of a warp that starts."""
        self._warps += 1
        self.fences.reach(self._warps * LANES)
        return self._warps - 1

    def count(self, instructions: int) -> None:
        """Counts instructions.

        Raises:
            BudgetError: The kernel is not allowed more.
        """
        self.executed += instructions
        if self.executed > self._budget:
            raise BudgetError(f"the kernel has not ended after {self._budget} instructions")
