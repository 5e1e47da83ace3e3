"""Tensor memory of a block (PTX ISA 9.0, 9.7.16.1): 128 lanes of 512 columns of 32 bits.

Its shadow says of every word whether anything wrote it, of every column who allocated it, and of
every column in 16 lanes, the least that an instruction accesses, what is under way there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .._errors import IllegalInstructionError, MemoryFaultError, RaceError, UnfinishedError
from .registers import Array
from .scheduler import Waiters

__all__ = ["COLUMNS", "GROUP", "TENSOR_LANES", "Region", "TensorMemory"]

TENSOR_LANES = 128
COLUMNS = 512

#: Lanes whose use is noted together.
GROUP = 16

#: Columns are allocated in powers of two from this number on (9.7.16.7.1).
_LEAST = 32


@dataclass(frozen=True)
class Region:
    """Words of tensor memory.

    Attributes:
        lanes: In ascending order.
        first: The first column.
        count: Columns.
    """

    lanes: tuple[int, ...]
    first: int
    count: int

    @property
    def columns(self) -> slice:
        """The columns."""
        return slice(self.first, self.first + self.count)

    @property
    def rows(self) -> slice | list[int]:
        """The lanes, as an index."""
        return _index(self.lanes)

    @property
    def groups(self) -> slice | list[int]:
        """Their groups of 16, as an index."""
        return _index(_groups(self.lanes))

    def __str__(self) -> str:
        last = self.first + self.count - 1
        return f"columns {self.first} to {last} of lanes {self.lanes[0]} to {self.lanes[-1]}"


@lru_cache(maxsize=256)
def _groups(lanes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({lane // GROUP for lane in lanes}))


@lru_cache(maxsize=256)
def _index(numbers: tuple[int, ...]) -> slice | list[int]:
    """Ascending numbers as an index: a slice if none is left out."""
    first, last = numbers[0], numbers[-1]
    return slice(first, last + 1) if last - first + 1 == len(numbers) else list(numbers)


@dataclass(frozen=True)
class Allocation:
    """Columns that a warp allocated."""

    first: int
    count: int
    warp: int


class TensorMemory:
    """A block's tensor memory.

    Args:
        block: The block's name in messages.

    Attributes:
        data: Words, ``[lanes, columns]``.
        allocations: By their first column.
        relinquished: Whether the block gave up the right to allocate.
        waiters: Tasks that wait for columns.
    """

    def __init__(self, block: str) -> None:
        self.block = block
        self.data: Array = np.zeros((TENSOR_LANES, COLUMNS), np.uint32)
        self.allocations: dict[int, Allocation] = {}
        self.relinquished = False
        self.waiters = Waiters()
        self._allocated: Array = np.zeros(COLUMNS, np.bool_)
        self._written: Array = np.zeros((TENSOR_LANES, COLUMNS), np.bool_)
        shape = TENSOR_LANES // GROUP, COLUMNS
        self._reading: Array = np.zeros(shape, np.int32)
        self._writing: Array = np.zeros(shape, np.int32)
        self._unread: Array = np.zeros(shape, np.bool_)
        self._writer: Array = np.zeros(shape, np.int64)
        self._last_count = COLUMNS

    def __str__(self) -> str:
        return f"tensor memory of block {self.block}"

    def check_request(self, count: int) -> None:
        """Raises unless so many columns may be asked for (9.7.16.7.1).

        Raises:
            IllegalInstructionError: With the reason.
        """
        if self.relinquished:
            raise IllegalInstructionError(
                f"tcgen05.alloc after tcgen05.relinquish_alloc_permit in block {self.block}"
            )
        if count & (count - 1) or not _LEAST <= count <= COLUMNS:
            raise IllegalInstructionError(
                f"tcgen05.alloc of {count} columns; powers of two from {_LEAST} to {COLUMNS} "
                "are allowed"
            )
        if count > self._last_count:
            raise IllegalInstructionError(
                f"tcgen05.alloc of {count} columns after one of {self._last_count}: allocations of "
                "a block may not grow"
            )

    def free_places(self, count: int) -> list[int]:
        """Where so many columns are free, at multiples of their number."""
        free = ~self._allocated.reshape(-1, count).any(axis=1)
        return [int(place) * count for place in np.flatnonzero(free)]

    def allocate(self, first: int, count: int, warp: int) -> None:
        """Allocates columns; what is in them counts as not written."""
        self.allocations[first] = Allocation(first, count, warp)
        self._last_count = count
        columns = slice(first, first + count)
        self._allocated[columns] = True
        self._written[:, columns] = False
        self._unread[:, columns] = False

    def free(self, first: int, count: int) -> None:
        """Frees what an allocation got.

        Raises:
            MemoryFaultError: There is no such allocation.
            RaceError: Something is still under way there.
        """
        found = self.allocations.get(first)
        if found is None or found.count != count:
            existing = ", ".join(f"{a.count} at {a.first}" for a in self.allocations.values())
            raise MemoryFaultError(
                f"tcgen05.dealloc of {count} columns at column {first} of {self}; allocated: "
                f"{existing or 'none'}"
            )
        region = Region(tuple(range(TENSOR_LANES)), first, count)
        self._refuse_use(region, "tcgen05.dealloc frees")
        del self.allocations[first]
        self._allocated[region.columns] = False
        self.waiters.wake()

    def _refuse_use(
        self, region: Region, what: str, writer: int = 0, after_copies: bool = False
    ) -> None:
        """Raises if something else is under way in a region."""
        use = region.groups, region.columns
        if self._reading[use].any():
            raise RaceError(
                f"{what} {self._where(region, self._reading[use] != 0)}: a tcgen05 operation may "
                "still be reading it"
            )
        self._refuse_writers(region, what, writer, after_copies)

    def _refuse_writers(self, region: Region, what: str, writer: int, after_copies: bool) -> None:
        use = region.groups, region.columns
        busy = self._writing[use] != 0
        if busy.any():
            others = busy & (self._writer[use] != writer)
            if after_copies:
                others &= self._writer[use] > 0
            if others.any():
                raise RaceError(
                    f"{what} {self._where(region, others)}: a tcgen05 operation may still be "
                    "writing it"
                )

    def _where(self, region: Region, marked: Array) -> str:
        """Names the first marked word of a region: of groups of lanes, or of lanes."""
        row, column = (int(part) for part in np.argwhere(marked)[0])
        whole = len(marked) == len(region.lanes)
        lane = region.lanes[row] if whole else _groups(region.lanes)[row] * GROUP
        return f"lane {lane}, column {region.first + column} of {self}"

    def check(self, region: Region, what: str) -> None:
        """Raises if a column is not allocated.

        Raises:
            MemoryFaultError: It is not.
        """
        if region.first + region.count > COLUMNS:
            raise MemoryFaultError(f"{what} {region} of {self}: there are {COLUMNS} columns")
        allocated = self._allocated[region.columns]
        if not allocated.all():
            column = region.first + int(np.flatnonzero(~allocated)[0])
            raise MemoryFaultError(f"{what} column {column} of {self}, which is not allocated")

    def begin_read(self, region: Region, what: str, after_copies: bool = False) -> None:
        """Notes that an operation will read a region.

        Args:
            region: Allocated words.
            what: The operation, in messages.
            after_copies: Whether copies from shared memory are done before.

        Raises:
            MemoryFaultError: A column is not allocated.
            RaceError: Nothing wrote a word, or something may be writing it.
        """
        self.check(region, what)
        self._refuse_writers(region, what, 0, after_copies)
        use = region.groups, region.columns
        self.require_written(region, what)
        self._reading[use] += 1
        self._unread[use] = False

    def require_written(self, region: Region, what: str) -> None:
        """Raises if nothing wrote a word, and nothing that is under way will."""
        written = self._written[region.rows, region.columns]
        if written.all():
            return
        coming = np.repeat(self._writing[:, region.columns] != 0, GROUP, axis=0)[region.rows]
        missing = ~(written | coming)
        if missing.any():
            raise RaceError(f"{what} {self._where(region, missing)}: nothing has written it")

    def end_read(self, region: Region) -> None:
        """The operation has read."""
        self._reading[region.groups, region.columns] -= 1

    def begin_write(
        self,
        region: Region,
        what: str,
        writer: int,
        fresh: bool = False,
        after_copies: bool = False,
    ) -> None:
        """Notes that an operation will write a region.

        Args:
            region: Allocated words.
            what: The operation, in messages.
            writer: Operations of this number are done one after the other, others are not. It is
                negative for copies from shared memory.
            fresh: Whether what is there is lost: somebody must have read of it.
            after_copies: Whether copies from shared memory are done before.

        Raises:
            MemoryFaultError: A column is not allocated.
            RaceError: Something may be reading or writing a word, or nobody has read any of what
                was there.
        """
        self.check(region, what)
        self._refuse_use(region, what, writer, after_copies)
        use = region.groups, region.columns
        if fresh and (self._unread[use] | (self._writing[use] != 0)).all():
            raise RaceError(
                f"{what} {region} of {self}: nobody has read any of what the last operation left "
                "there"
            )
        self._writing[use] += 1
        self._writer[use] = writer

    def end_write(
        self, region: Region, values: Array, lanes: Array | None = None, unread: bool = False
    ) -> None:
        """Writes what an operation brings: words ``[lanes, columns]``.

        Args:
            region: Where.
            values: Words.
            lanes: Which of the region's lanes are written; all by default.
            unread: Whether overwriting them unread is to be reported.
        """
        if lanes is None or lanes.all():
            self.data[region.rows, region.columns] = values
            self._written[region.rows, region.columns] = True
        else:
            chosen = np.array(region.lanes)[lanes]
            self.data[chosen, region.columns] = values[lanes]
            self._written[chosen, region.columns] = True
        self._writing[region.groups, region.columns] -= 1
        if unread:
            self._unread[region.groups, region.columns] = True

    def values(self, region: Region) -> Array:
        """Words of a region, ``[lanes, columns]``."""
        found: Array = self.data[region.rows, region.columns]
        return found

    def check_end(self) -> None:
        """Raises if the block ends with columns allocated.

        Raises:
            UnfinishedError: With the columns and the warp that allocated them.
        """
        for allocation in self.allocations.values():
            raise UnfinishedError(
                f"block {self.block} ended with {allocation.count} columns of tensor memory at "
                f"column {allocation.first}, which warp {allocation.warp} allocated, not freed"
            )
