"""A kernel's run: its clusters come and go, its warps get their registers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from .barriers import BarrierKinds
from .blocks import RANK_SHIFT, SHARED_START, Cluster, ThreadBlock, warps_of
from .errors import (
    BudgetError,
    DeadlockError,
    EmulatorError,
    Place,
    UnfinishedError,
    UnsupportedError,
)
from .fences import Fences
from .memory import Memory
from .paths import Path, Warp
from .registers import LANES, Array
from .scheduler import Scheduler

if TYPE_CHECKING:
    from .instructions.asynchronous import Group
    from .instructions.tensormemory import Transfers
    from .kernel import Kernel
    from .machine import Module
    from .trace import Trace

__all__ = ["Launch"]

#: Threads of a block, and blocks of a cluster, at most.
_THREADS = 1024
_CLUSTER = 16

Three = tuple[int, int, int]


class Launch:
    """A kernel that runs."""

    def __init__(
        self,
        module: Module,
        kernel: Kernel,
        grid: Three,
        block: Three,
        cluster: Three,
        shared_bytes: int,
        parameters: bytes,
        budget: int,
        trace: Trace | None = None,
    ) -> None:
        self.module = module
        self.machine = module.machine
        self.kernel = kernel
        self.code = kernel.code
        self.grid, self.block, self.cluster = grid, block, cluster
        self.threads = int(np.prod(block))
        self.cluster_size = int(np.prod(cluster))
        self.budget = budget
        self.executed = 0
        self.barriers = BarrierKinds() if trace is None else trace.barriers
        self.scheduler = Scheduler(self.machine.seed) if trace is None else trace.scheduler(self)
        self.fences = Fences()
        self.parameters = Memory("parameter memory", 0, len(parameters))
        self.parameters.data[: len(parameters)] = np.frombuffer(parameters, np.uint8)
        #: Blocks that a tcgen05 instruction is for, one number in all of a kernel; 0 at first.
        self.tensor_blocks = 0
        self._operations = 0
        self._warps = 0
        self._running: list[Cluster] = []
        self._place_variables(shared_bytes)
        self._check()
        starts = [range(0, size, step) for size, step in zip(grid, cluster, strict=True)]
        self._clusters = itertools.product(*reversed(starts))
        self._templates: dict[int, list[Array]] = {}

    def _place_variables(self, shared_bytes: int) -> None:
        """Lays out static shared memory, then the dynamic; and local memory."""
        shared, local = SHARED_START, 0
        self.offsets: dict[str, tuple[str, int]] = {}
        dynamic_align = 16
        for variable in self.kernel.variables.values():
            if variable.space == "local":
                local = -(-local // variable.align) * variable.align
                self.offsets[variable.name] = ("local", local)
                local += variable.size
            elif variable.extern:
                dynamic_align = max(dynamic_align, variable.align)
            else:
                shared = -(-shared // variable.align) * variable.align
                self.offsets[variable.name] = ("shared", shared)
                shared += variable.size
        shared = -(-shared // dynamic_align) * dynamic_align if shared_bytes else shared
        for variable in self.kernel.variables.values():
            if variable.space == "shared" and variable.extern:
                self.offsets[variable.name] = ("shared", shared)
        self.dynamic_bytes = shared_bytes
        self.shared_bytes = shared + shared_bytes - SHARED_START
        self.local_bytes = -(-local // 16) * 16

    def _check(self) -> None:
        if self.threads > _THREADS:
            raise ValueError(f"block: {self.threads} threads; up to {_THREADS} are allowed")
        maximum = self.kernel.directives.get("maxntid")
        if maximum is not None and self.threads > int(np.prod(maximum)):
            raise ValueError(f"block: {self.threads} threads; the kernel allows {maximum}")
        if self.cluster_size > _CLUSTER:
            raise ValueError(f"cluster: {self.cluster_size} blocks; up to {_CLUSTER} are allowed")
        required = self.kernel.directives.get("reqnctapercluster")
        if required is not None and (*required, 1, 1)[:3] != self.cluster:
            raise ValueError(f"cluster: {self.cluster}; the kernel requires {required}")
        if any(size % step for size, step in zip(self.grid, self.cluster, strict=True)):
            raise ValueError(f"cluster: {self.cluster} does not divide the grid {self.grid}")
        if self.cluster_size > self.machine.sms:
            raise ValueError(
                f"cluster: {self.cluster_size} blocks; the machine has {self.machine.sms}"
            )
        if self.shared_bytes > self.machine.shared_limit:
            raise ValueError(
                f"shared_bytes: {self.shared_bytes} with the kernel's own; up to "
                f"{self.machine.shared_limit} are allowed"
            )

    def run(self) -> None:
        """Runs all blocks.

        Raises:
            EmulatorError: What the kernel did wrong.
        """
        for _ in range(self.machine.sms // self.cluster_size):
            self._start_cluster()
        self.scheduler.run()
        if self._running:
            message = "no thread can go on, and nothing is under way:"
            raise self._unfinished(DeadlockError, message)

    def take_cluster(self) -> Three | None:
        """The first block of the next cluster that has not started, which will not start."""
        start = next(self._clusters, None)
        return None if start is None else (start[2], start[1], start[0])

    def _start_cluster(self) -> None:
        """Starts the next cluster, if there is one."""
        start = next(self._clusters, None)
        if start is None:
            return
        cluster = Cluster(self, self.cluster_size)
        self._running.append(cluster)
        inner = [
            range(first, first + n) for first, n in zip(start, self.cluster[::-1], strict=True)
        ]
        for z, y, x in itertools.product(*inner):
            cluster.blocks.append(ThreadBlock(self, cluster, (x, y, z), self.shared_bytes))
        for block in cluster.blocks:
            for index in range(warps_of(self.threads)):
                self._start_warp(block, index)

    def _start_warp(self, block: ThreadBlock, index: int) -> None:
        arrays = [array.copy() for array in self._template(block.rank)]
        for (group, name), row in self.kernel.layout.specials.items():
            arrays[group][row] = self._special(name, block, index)
        warp = Warp(block, index, arrays, self.local_bytes)
        block.warps.append(warp)
        self.scheduler.add(Path(warp, warp.live.copy(), 0, None))

    def _template(self, rank: int) -> list[Array]:
        if rank not in self._templates:
            self._templates[rank] = self.kernel.layout.template(
                lambda name: self._symbol(name, rank)
            )
        return self._templates[rank]

    def _symbol(self, name: str, rank: int) -> int:
        """The address of a variable or parameter, in its state space."""
        if name in self.offsets:
            space, offset = self.offsets[name]
            return offset + (rank << RANK_SHIFT if space == "shared" else 0)
        if name in self.module.addresses:
            return self.module.addresses[name]
        for parameter in self.kernel.parameters:
            if parameter.name == name:
                return parameter.offset
        raise UnsupportedError(f"the symbol {name} is neither a variable nor a parameter")

    def _special(self, name: str, block: ThreadBlock, warp: int) -> Array | int:
        """A special register's value (PTX ISA 9.0, 10), for a warp's lanes."""
        lane = np.arange(LANES)
        thread = warp * LANES + lane
        width, height, _ = self.block
        first = [b // c for b, c in zip(block.index, self.cluster, strict=True)]
        inside = [b % c for b, c in zip(block.index, self.cluster, strict=True)]
        vectors: dict[str, Sequence[Array | int]] = {
            "%tid": (thread % width, thread // width % height, thread // (width * height)),
            "%ntid": self.block,
            "%ctaid": block.index,
            "%nctaid": self.grid,
            "%clusterid": first,
            "%nclusterid": [g // c for g, c in zip(self.grid, self.cluster, strict=True)],
            "%cluster_ctaid": inside,
            "%cluster_nctaid": self.cluster,
        }
        base, _, axis = name.partition(".")
        if base in vectors and axis in ("x", "y", "z"):
            return vectors[base]["xyz".index(axis)]
        scalars: dict[str, Array | int] = {
            "%laneid": lane,
            "%warpid": warp,
            "%nwarpid": warps_of(self.threads),
            "%smid": block.rank % self.machine.sms,
            "%nsmid": self.machine.sms,
            "%gridid": 0,
            "%cluster_ctarank": block.rank,
            "%cluster_nctarank": self.cluster_size,
            "%is_explicit_cluster": int(self.cluster_size > 1),
            "%lanemask_eq": 1 << lane,
            "%lanemask_lt": (1 << lane) - 1,
            "%lanemask_le": (2 << lane) - 1,
            "%lanemask_gt": 0xFFFFFFFF & ~((2 << lane) - 1),
            "%lanemask_ge": 0xFFFFFFFF & ~((1 << lane) - 1),
            "%dynamic_smem_size": self.dynamic_bytes,
            "%total_smem_size": self.shared_bytes,
        }
        if name not in scalars:
            raise UnsupportedError(f"the special register {name} is not supported")
        return scalars[name]

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
        if self.executed > self.budget:
            message = f"the kernel has not ended after {self.budget} instructions"
            raise self._unfinished(BudgetError, message)

    def cluster_ended(self, cluster: Cluster) -> None:
        """A cluster's threads have exited; the next one starts."""
        self._running.remove(cluster)
        self._start_cluster()

    def check_exit(self, path: Path) -> None:
        """Raises if lanes that exit have something under way."""
        groups = path.warp.lane_state.get("bulk", {})
        for lane in path.lanes():
            open_groups = cast("list[Group]", groups.get(lane, []))
            if any(group.copies and not group.awaited for group in open_groups):
                raise UnfinishedError(
                    f"thread {path.warp.index * LANES + lane} exits while bulk copies that it "
                    "started may still read shared memory (no cp.async.bulk.wait_group)"
                )
        if (path.warp.live & ~path.mask).any():
            return
        if path.warp.pending:
            raise UnfinishedError("a warp exits while its wgmma operations are not waited for")
        for kind in ("tcgen05.ld", "tcgen05.st"):
            transfers = cast("Transfers | None", path.warp.state.get(kind))
            if transfers is not None and transfers.unfinished():
                raise UnfinishedError(f"a warp exits while its {kind} are not waited for")

    def place(self, path: Path, active: object = None) -> Place:
        """Where a path stands: its lanes are the path's, or those that a predicate left."""
        line = path.line()
        mask = active if isinstance(active, np.ndarray) else path.mask
        lanes = tuple(int(lane) for lane in np.flatnonzero(mask))
        text = self.module.lines[line - 1].strip()
        return Place(line, text, path.block.index, path.warp.index, lanes)

    def _unfinished(self, kind: type[EmulatorError], message: str) -> EmulatorError:
        """An error that says where every path stands."""
        waiting = sorted(
            self.scheduler.waiting.values(), key=lambda p: (p.warp.number, p.lanes()[0])
        )
        found = [(self.place(path), path.wait.reason if path.wait else "") for path in waiting]
        lines = [f"  {place} waits for {reason}" for place, reason in found]
        lines += [f"  {self.place(path)} runs" for path in self.scheduler.runnable]
        error = kind("\n".join([message, *lines]))
        error.waiting = tuple(found)
        return error
