"""Warps, the paths that their lanes take, and where they meet again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .errors import EmulatorError, RaceError
from .flow import END
from .memory import UNWRITTEN, Memory
from .registers import LANES, Array, files_of

if TYPE_CHECKING:
    from .blocks import ThreadBlock
    from .launch import Launch

__all__ = ["Code", "CodeBlock", "Join", "Path", "Step", "Wait", "Warp", "collective"]


@dataclass(frozen=True)
class Wait:
    """Why a path cannot go on.

    Attributes:
        subject: What it waits for, which says how it is when it is asked.
        purpose: What for.
    """

    subject: object
    purpose: str = ""

    @property
    def reason(self) -> str:
        """The rest of the sentence that begins with "waits for"."""
        return f"{self.subject}{self.purpose}"


Step = Callable[["Path"], "Wait | None"]


@dataclass(frozen=True)
class CodeBlock:
    """A basic block, ready to run.

    Attributes:
        steps: One callable for each instruction but the branch at the end.
        lines: Of the instructions, the branch's last.
        registers: What each instruction reads or writes, as (array, row).
        leave: Takes the branch; returns whether the path goes on.
        meet: Where paths that part here meet again.
    """

    steps: tuple[Step, ...]
    lines: tuple[int, ...]
    registers: tuple[frozenset[tuple[int, int]], ...]
    leave: Callable[[Path], bool]
    meet: int


Code = list[CodeBlock]


class Filling(Protocol):
    """An asynchronous load of registers."""

    def complete(self) -> None:
        """Fills them now."""


class Warp:
    """32 threads of a block.

    Attributes:
        index: In its block.
        number: In the launch, of all warps.
        files: The rows of its registers, by view.
        live: Lanes that have not exited.
        local: Local memory, one lane's after the other's.
        pending: Registers, as (array, row), that an asynchronous multiply may still change, with
            how many may.
        loading: Registers, as (array, row), that a load from tensor memory has not filled.
        meetings: Paths that wait for other lanes at an instruction that all execute together.
        lane_state: What instructions keep for a lane: its groups of copies.
        state: What instructions keep for the warp.
    """

    def __init__(
        self, block: ThreadBlock, index: int, arrays: list[Array], local_bytes: int
    ) -> None:
        self.block: ThreadBlock = block
        self.index = index
        self.number = block.launch.new_warp()
        self.files = files_of(arrays)
        first = index * LANES
        self.live = np.arange(first, first + LANES) < block.threads
        self.pending: dict[tuple[int, int], int] = {}
        self.loading: dict[tuple[int, int], Filling] = {}
        self.meetings: dict[object, list[tuple[Path, Array]]] = {}
        self.lane_state: dict[str, dict[int, object]] = {}
        self.state: dict[str, object] = {}
        size = max(1, local_bytes * LANES)
        self.local = Memory(f"local memory of {self}", 0, size, UNWRITTEN)

    def __str__(self) -> str:
        return f"warp {self.index} of block {self.block}"


class Join:
    """Where lanes that took different sides of a branch meet again."""

    def __init__(self, block: int, parent: Join | None, expected: Array) -> None:
        self.block = block
        self.parent = parent
        self.expected = expected
        self.arrived = np.zeros(LANES, np.bool_)


class Path:
    """Lanes of a warp that execute together.

    Attributes:
        warp: Theirs.
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
        "index",
        "join",
        "launch",
        "mask",
        "position",
        "ticket",
        "wait",
        "warp",
        "where",
    )

    def __init__(self, warp: Warp, mask: Array, position: int, join: Join | None) -> None:
        self.warp = warp
        self.block: ThreadBlock = warp.block
        self.launch: Launch = warp.block.launch
        self.code: Code = self.launch.code
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

    def line(self) -> int:
        """The line of the instruction that is next."""
        return self.code[self.position].lines[self.index]

    def run(self, blocks: int) -> bool:
        """Runs a number of basic blocks, at most; returns whether the path can go on."""
        launch = self.launch
        for _ in range(blocks):
            block = self.code[self.position]
            steps, index = block.steps, self.index
            launch.count(len(steps) - index + 1)
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
                    error.place = launch.place(self, error.lanes)
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
            if self.launch.machine.tensor_load_waits:
                raise RaceError(
                    "a register that tcgen05.ld fills is used before tcgen05.wait::ld (PTX that "
                    "relies on ptxas to wait for it runs on a machine without tensor_load_waits)"
                )
            load.complete()

    def go(self, position: int) -> bool:
        """Enters a basic block, or waits where paths meet; returns whether the path goes on."""
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
        """Parts: each side's lanes go to another block. Returns whether this path goes on."""
        meet = self.code[self.position].meet
        join = self.join if meet == END else Join(meet, self.join, self.mask)
        self.join = join
        for mask, position in sides[1:]:
            other = Path(self.warp, mask, position, join)
            if other.go(position):
                self.launch.scheduler.add(other)
        self.mask = self.where = sides[0][0]
        return self.go(sides[0][1])

    def finish(self) -> None:
        """The lanes exit."""
        warp, gone = self.warp, self.mask
        self.launch.check_exit(self)
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
                        self.launch.scheduler.add(rest)
                break
            join = join.parent
        for waiting in list(warp.meetings.values()):
            for path, _ in waiting:
                self.launch.scheduler.wake(path)
        self.block.lanes_left(int(gone.sum()), not warp.live.any())


def collective(
    path: Path, key: object, members: Array, act: Callable[[Array], None]
) -> Wait | None:
    """Runs what lanes of a warp do together once all of them are there.

    Args:
        path: The path that has come.
        key: The same for all that meet.
        members: Lanes that the instruction names; those that have exited do not count.
        act: Does it, for the lanes that it is given.
    """
    warp = path.warp
    if path.ticket is _DONE:
        path.ticket = None
        return None
    needed = members & warp.live
    if not (needed & ~path.mask).any():
        _leave_meeting(path, key)
        act(path.mask)
        return None
    waiting = warp.meetings.setdefault(key, [])
    if not any(entry is path for entry, _ in waiting):
        waiting.append((path, path.mask))
    present = np.logical_or.reduce([mask for _, mask in waiting])
    if (needed & ~present).any():
        missing = [int(lane) for lane in np.flatnonzero(needed & ~present)]
        return Wait(f"lanes {missing} of its warp")
    del warp.meetings[key]
    act(present)
    for other, _ in waiting:
        if other is not path:
            other.ticket = _DONE
            path.launch.scheduler.wake(other)
    return None


def _leave_meeting(path: Path, key: object) -> None:
    waiting = path.warp.meetings.get(key)
    if waiting is not None:
        path.warp.meetings[key] = [entry for entry in waiting if entry[0] is not path]


_DONE = object()
