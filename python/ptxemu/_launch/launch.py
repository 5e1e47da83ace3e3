"""A kernel's run: its clusters come and go, its warps get their registers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from math import prod

from .._errors import BudgetError, DeadlockError, EmulatorError, UnsupportedError
from .._hardware.blocks import RANK_SHIFT, Cluster, ThreadBlock, warps_of
from .._hardware.device import Device
from .._hardware.grid import Grid, Shape
from .._hardware.registers import Array
from .._hardware.scheduler import Scheduler
from .._warps.paths import Path, Warp
from ..trace import Trace
from .kernel import Kernel
from .recorder import Recorder
from .specials import special_register

__all__ = ["Launch"]

#: Threads of a block, and blocks of a cluster, at most.
_THREADS = 1024
_CLUSTER = 16


class Launch:
    """A kernel that runs.

    Args:
        device: Where.
        kernel: It.
        addresses: Of the module's global variables, by name.
        shape: The launch's sizes.
        parameters: The kernel's parameters, as bytes.
        budget: Instructions of all warps after which it is stopped.
        trace: Gets what happens when.

    Raises:
        ValueError: The sizes do not fit the kernel or the device, or the trace has a launch.
    """

    def __init__(
        self,
        device: Device,
        kernel: Kernel,
        addresses: Mapping[str, int],
        shape: Shape,
        parameters: bytes,
        budget: int,
        trace: Trace | None = None,
    ) -> None:
        self.grid = Grid(device, shape, parameters, budget)
        self._kernel = kernel
        self._addresses = addresses
        placement = kernel.place(shape.dynamic_bytes)
        self._offsets = placement.offsets
        self.grid.shared_bytes = placement.shared_bytes
        self.grid.local_bytes = placement.local_bytes
        self._check()
        self._scheduler: Scheduler[Path] = Scheduler(device.seed)
        if trace is not None:
            recorder = Recorder(trace, self.grid)
            self.grid.barriers, self._scheduler = recorder.barriers, recorder.scheduler
        self._running: list[Cluster] = []
        self._templates: dict[int, list[Array]] = {}

    def _check(self) -> None:
        grid, shape, directives = self.grid, self.grid.shape, self._kernel.directives
        if grid.threads > _THREADS:
            raise ValueError(f"block: {grid.threads} threads; up to {_THREADS} are allowed")
        maximum = directives.get("maxntid")
        if maximum is not None and grid.threads > prod(maximum):
            raise ValueError(f"block: {grid.threads} threads; the kernel allows {maximum}")
        if grid.cluster_size > _CLUSTER:
            raise ValueError(f"cluster: {grid.cluster_size} blocks; up to {_CLUSTER} are allowed")
        required = directives.get("reqnctapercluster")
        if required is not None and (*required, 1, 1)[:3] != shape.cluster:
            raise ValueError(f"cluster: {shape.cluster}; the kernel requires {required}")
        if any(size % step for size, step in zip(shape.grid, shape.cluster, strict=True)):
            raise ValueError(f"cluster: {shape.cluster} does not divide the grid {shape.grid}")
        if grid.cluster_size > grid.device.sms:
            raise ValueError(
                f"cluster: {grid.cluster_size} blocks; the machine has {grid.device.sms}"
            )
        if grid.shared_bytes > grid.device.shared_limit:
            raise ValueError(
                f"shared_bytes: {grid.shared_bytes} with the kernel's own; up to "
                f"{grid.device.shared_limit} are allowed"
            )

    def run(self) -> int:
        """Runs all blocks; returns the instructions that their warps ran.

        Raises:
            EmulatorError: What the kernel did wrong.
        """
        for _ in range(self.grid.device.sms // self.grid.cluster_size):
            self._start_cluster()
        try:
            self._scheduler.run()
        except BudgetError as error:
            raise self._unfinished(BudgetError, error.message) from None
        if self._running:
            message = "no thread can go on, and nothing is under way:"
            raise self._unfinished(DeadlockError, message)
        return self.grid.executed

    def _start_cluster(self) -> None:
        """Starts the next cluster, if there is one."""
        start = self.grid.take_cluster()
        if start is None:
            return
        cluster = Cluster(self.grid, self._cluster_ended)
        self._running.append(cluster)
        axes = [
            range(first, first + n) for first, n in zip(start, self.grid.shape.cluster, strict=True)
        ]
        for z, y, x in itertools.product(*reversed(axes)):
            cluster.blocks.append(ThreadBlock(self.grid, cluster, (x, y, z)))
        for block in cluster.blocks:
            for index in range(warps_of(self.grid.threads)):
                self._start_warp(block, index)

    def _cluster_ended(self, cluster: Cluster) -> None:
        self._running.remove(cluster)
        self._start_cluster()

    def _start_warp(self, block: ThreadBlock, index: int) -> None:
        arrays = [array.copy() for array in self._template(block.rank)]
        for (group, name), row in self._kernel.layout.specials.items():
            arrays[group][row] = special_register(name, block, index)
        warp = Warp(block, index, arrays, self._kernel.code, self._scheduler)
        self._scheduler.add(Path(warp, warp.live.copy(), 0, None))

    def _template(self, rank: int) -> list[Array]:
        """The registers that every warp of a block of a rank starts with."""
        if rank not in self._templates:
            self._templates[rank] = self._kernel.layout.template(
                lambda name: self._symbol(name, rank)
            )
        return self._templates[rank]

    def _symbol(self, name: str, rank: int) -> int:
        """The address of a variable or parameter, in its state space."""
        if name in self._offsets:
            space, offset = self._offsets[name]
            return offset + (rank << RANK_SHIFT if space == "shared" else 0)
        if name in self._addresses:
            return self._addresses[name]
        for parameter in self._kernel.parameters:
            if parameter.name == name:
                return parameter.offset
        raise UnsupportedError(f"the symbol {name} is neither a variable nor a parameter")

    def _unfinished(self, kind: type[EmulatorError], message: str) -> EmulatorError:
        """An error that says where every path stands."""
        scheduler = self._scheduler
        waiting = sorted(scheduler.waiting.values(), key=lambda p: (p.warp.number, p.lanes()[0]))
        found = [(path.place(), path.wait.reason if path.wait else "") for path in waiting]
        lines = [f"  {place} waits for {reason}" for place, reason in found]
        lines += [f"  {path.place()} runs" for path in scheduler.runnable]
        error = kind("\n".join([message, *lines]))
        error.waiting = tuple(found)
        return error
