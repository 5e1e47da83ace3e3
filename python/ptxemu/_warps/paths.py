"""Warps, the paths that their lanes take, and where they reconverge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .._errors import (
    EmulatorError,
    IllegalInstructionError,
    Place,
    RaceError,
    UnfinishedError,
)
from .._hardware.blocks import ThreadBlock
from .._hardware.memory import UNWRITTEN, Memory
from .._hardware.pending import CopyGroup, TensorOperation, Transfers
from .._hardware.registers import LANES, U32, Array, files_of
from .._hardware.scheduler import Scheduler, Wait
from .._text.flow import END

__all__ = ["Code", "CodeBlock", "Join", "Path", "Step", "Warp", "collective"]

Step = Callable[["Path"], "Wait | None"]


@dataclass(frozen=True)
class CodeBlock:
    """A basic block, ready to run.

    Attributes:
        steps: One callable for each instruction but the branch at the end.
        lines: Of the instructions, the branch's last.
        registers: What each instruction reads or writes, as (array, row).
        leave: Takes the branch; returns whether the path goes on.
        reconvergence: Where paths that part here reconverge.
    """

    steps: tuple[Step, ...]
    lines: tuple[int, ...]
    registers: tuple[frozenset[tuple[int, int]], ...]
    leave: Callable[[Path], bool]
    reconvergence: int


@dataclass(frozen=True)
class Code:
    """A kernel, ready to run.

    Attributes:
        blocks: Its basic blocks.
        text: The lines of the PTX text that it stands in.
    """

    blocks: list[CodeBlock]
    text: list[str]


class Filling(Protocol):
    """An asynchronous load of registers."""

    def complete(self) -> None:
        """Fills them now."""


class Warp:
    """32 threads of a block.

    Args:
        block: Theirs.
        index: In it.
        arrays: Its registers at first.
        code: What it runs.
        scheduler: That of its paths.

    Attributes:
        block: Its block.
        index: In its block.
        number: In the launch, of all warps.
        files: The rows of its registers, by view.
        live: Lanes that have not exited.
        local: Local memory, one lane's after the other's.
        pending: Registers, as (array, row), that an asynchronous multiply may still change, with
            how many may.
        loading: Registers, as (array, row), that a load from tensor memory has not filled.
        collectives: Paths that wait for other lanes at an instruction that all execute together.
        copy_groups: A lane's groups of copies, by kind and lane: those that it has not waited for,
            of which the last one is open.
        transfers: Loads and stores of tensor memory, by opcode.
        carry: The condition code register's carry flag, a lane.
        cluster_arrival: The generation of the cluster's barrier at which the warp arrived.
        issued: Operations of the tensor cores that a lane started, by lane.
    """

    def __init__(
        self,
        block: ThreadBlock,
        index: int,
        arrays: list[Array],
        code: Code,
        scheduler: Scheduler[Path],
    ) -> None:
        self.block = block
        self.index = index
        self.code = code
        self.scheduler = scheduler
        self.number = block.grid.new_warp()
        self.files = files_of(arrays)
        first = index * LANES
        self.live = np.arange(first, first + LANES) < block.grid.threads
        self.pending: dict[tuple[int, int], int] = {}
        self.loading: dict[tuple[int, int], Filling] = {}
        self.collectives: dict[object, list[tuple[Path, Array]]] = {}
        self.copy_groups: dict[tuple[str, int], list[CopyGroup]] = defaultdict(
            lambda: [CopyGroup()]
        )
        self.transfers: dict[str, Transfers] = defaultdict(Transfers)
        self.carry: Array = np.zeros(LANES, np.bool_)
        self.cluster_arrival: int | None = None
        self.issued: dict[int, list[TensorOperation]] = {}
        size = max(1, block.grid.local_bytes * LANES)
        self.local = Memory(f"local memory of {self}", 0, size, UNWRITTEN)

    def __str__(self) -> str:
        return f"warp {self.index} of block {self.block}"


class Join:
    """Where lanes that took different sides of a branch reconverge."""

    def __init__(self, block: int, parent: Join | None, expected: Array) -> None:
        self.block = block
        self.parent = parent
        self.expected = expected
        self.arrived = np.zeros(LANES, np.bool_)


class Path:
    """Lanes of a warp that execute together.

    Attributes:
        warp: Theirs.
        block: The warp's.
        grid: The block's.
        scheduler: What runs it.
        code: The kernel's basic blocks.
        files: The warp's registers.
        mask: Which lanes they are.
        where: ``True`` if they are all 32, otherwise the mask, as numpy's functions take it.
        ticket: What an instruction that waits notes for when it runs again.
        wait: Why it does not run.
    """

    __slots__ = (
        "block",
        "code",
        "files",
        "grid",
        "index",
        "join",
        "mask",
        "position",
        "scheduler",
        "ticket",
        "wait",
        "warp",
        "where",
    )

    def __init__(self, warp: Warp, mask: Array, position: int, join: Join | None) -> None:
        self.warp = warp
        self.block = warp.block
        self.grid = warp.block.grid
        self.scheduler = warp.scheduler
        self.code = warp.code.blocks
        self.files = warp.files
        self.mask = mask
        self.where: Array | bool = True if mask.all() else mask
        self.position = position
        self.index = 0
        self.join = join
        self.ticket: object = None
        self.wait: Wait | None = None

    def active(self, row: Array) -> Array:
        """A row's values in the lanes of the path."""
        if self.where is True:
            return row
        found: Array = row[self.mask]
        return found

    def lanes(self) -> list[int]:
        """The path's lanes."""
        return [int(lane) for lane in np.flatnonzero(self.mask)]

    def thread_numbers(self) -> Array:
        """The numbers of the path's threads in the launch."""
        numbers: Array = self.warp.number * LANES + np.flatnonzero(self.mask)
        return numbers

    def uniform(self, row: int, what: str) -> int:
        """A 32-bit operand that all lanes must agree on.

        Args:
            row: Its row.
            what: The operand, in messages; in the plural.

        Raises:
            IllegalInstructionError: They do not.
        """
        values = self.active(self.files[U32][row])
        if (values != values[0]).any():
            raise IllegalInstructionError(f"the lanes have different {what}")
        return int(values[0])

    def require_warp(self) -> None:
        """Raises unless all lanes of the warp that have not exited are on the path (``.aligned``).

        Raises:
            IllegalInstructionError: With the lanes that are not.
        """
        missing = self.warp.live & ~self.mask
        if missing.any():
            lanes = [int(lane) for lane in np.flatnonzero(missing)]
            raise IllegalInstructionError(
                f"all threads of a warp must execute it together; lanes {lanes} are elsewhere"
            )

    def line(self) -> int:
        """The line of the instruction that is next."""
        return self.code[self.position].lines[self.index]

    def place(self, active: object = None) -> Place:
        """Where the path stands: with its lanes, or those that a predicate left."""
        line = self.line()
        mask = active if isinstance(active, np.ndarray) else self.mask
        lanes = tuple(int(lane) for lane in np.flatnonzero(mask))
        text = self.warp.code.text[line - 1].strip()
        return Place(line, text, self.block.index, self.warp.index, lanes)

    def wake(self) -> None:
        """Lets the path look again whether it can go on."""
        self.scheduler.wake(self)

    def run(self, blocks: int) -> bool:
        """Runs a number of basic blocks, at most; returns whether the path can go on."""
        grid = self.grid
        for _ in range(blocks):
            block = self.code[self.position]
            steps, index = block.steps, self.index
            grid.count(len(steps) - index + 1)
            try:
                for step in steps[index:] if index else steps:
                    if self.warp.pending or self.warp.loading:
                        self._check_pending(block.registers[index])
                    wait = step(self)
                    if wait is not None:
                        self.index, self.wait = index, wait
                        return False
                    index += 1
                self.index = index
                if not block.leave(self):
                    return False
            except EmulatorError as error:
                self.index = index
                if error.place is None:
                    error.place = self.place(error.lanes)
                raise
        return True

    def _check_pending(self, registers: frozenset[tuple[int, int]]) -> None:
        for register in registers:
            if register in self.warp.pending:
                raise RaceError(
                    "a register of an asynchronous multiply's accumulator is used before "
                    "wgmma.wait_group"
                )
            load = self.warp.loading.get(register)
            if load is None:
                continue
            if self.grid.device.rules.tensor_load_waits:
                raise RaceError(
                    "a register that tcgen05.ld fills is used before tcgen05.wait::ld (PTX that "
                    "relies on ptxas to wait for it runs on a machine without tensor_load_waits)"
                )
            load.complete()

    def go(self, position: int) -> bool:
        """Enters a basic block, or waits where paths reconverge; returns whether it goes on."""
        self.position, self.index = position, 0
        while self.join is not None and self.join.block == position:
            join = self.join
            join.arrived |= self.mask
            if not np.array_equal(join.arrived, join.expected):
                return False
            self.mask = join.expected
            self.where = True if self.mask.all() else self.mask
            self.join = join.parent
        if position == END:
            self.finish()
            return False
        return True

    def split(self, sides: list[tuple[Array, int]]) -> bool:
        """Diverges: each side's lanes go to another block. Returns whether this path goes on."""
        reconvergence = self.code[self.position].reconvergence
        join = self.join
        if reconvergence != END:
            join = Join(reconvergence, self.join, self.mask)
        self.join = join
        for mask, position in sides[1:]:
            other = Path(self.warp, mask, position, join)
            if other.go(position):
                self.scheduler.add(other)
        self.mask = self.where = sides[0][0]
        return self.go(sides[0][1])

    def finish(self) -> None:
        """The lanes exit."""
        warp, gone = self.warp, self.mask
        self._require_finished()
        warp.live = warp.live & ~gone
        join = self.join
        while join is not None:
            join.expected = join.expected & ~gone
            join = join.parent
        join = self.join
        while join is not None:
            if join.expected.any():
                if np.array_equal(join.arrived, join.expected):
                    rest = Path(warp, join.expected, join.block, join.parent)
                    if rest.go(join.block):
                        self.scheduler.add(rest)
                break
            join = join.parent
        for waiting in list(warp.collectives.values()):
            for path, _ in waiting:
                path.wake()
        self.block.lanes_left(int(gone.sum()))

    def _require_finished(self) -> None:
        """Raises if lanes that exit have something under way."""
        warp = self.warp
        for lane in self.lanes():
            groups = warp.copy_groups.get(("bulk", lane), ())
            if any(group.copies and not group.awaited for group in groups):
                raise UnfinishedError(
                    f"thread {warp.index * LANES + lane} exits while bulk copies that it "
                    "started may still read shared memory (no cp.async.bulk.wait_group)"
                )
        if (warp.live & ~self.mask).any():
            return
        if warp.pending:
            raise UnfinishedError("a warp exits while its wgmma operations are not waited for")
        for opcode, transfers in sorted(warp.transfers.items()):
            if transfers.unfinished():
                raise UnfinishedError(f"a warp exits while its {opcode} are not waited for")


def collective(
    path: Path, key: object, members: Array, act: Callable[[Array], None]
) -> Wait | None:
    """Runs what lanes of a warp do together once all of them are there.

    Args:
        path: The path that has come.
        key: The same for all that execute it together.
        members: Lanes that the instruction names; those that have exited do not count.
        act: Does it, for the lanes that it is given.
    """
    warp = path.warp
    if path.ticket is _DONE:
        path.ticket = None
        return None
    needed = members & warp.live
    if not (needed & ~path.mask).any():
        _leave_collective(path, key)
        act(path.mask)
        return None
    waiting = warp.collectives.setdefault(key, [])
    if not any(entry is path for entry, _ in waiting):
        waiting.append((path, path.mask))
    present = np.logical_or.reduce([mask for _, mask in waiting])
    if (needed & ~present).any():
        missing = [int(lane) for lane in np.flatnonzero(needed & ~present)]
        return Wait(f"lanes {missing} of its warp")
    del warp.collectives[key]
    act(present)
    for other, _ in waiting:
        if other is not path:
            other.ticket = _DONE
            other.wake()
    return None


def _leave_collective(path: Path, key: object) -> None:
    waiting = path.warp.collectives.get(key)
    if waiting is not None:
        path.warp.collectives[key] = [entry for entry in waiting if entry[0] is not path]


_DONE = object()
