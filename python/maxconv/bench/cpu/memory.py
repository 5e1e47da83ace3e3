"""The memory that a convolution takes, measured in a process that does nothing else."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from maxconv._dtypes import DTYPE_BYTES
from maxconv._packing import packed_length
from maxconv._problem import ConvProblem
from maxconv._problems import NamedProblem, find_problem

from ..environment import child_environment

__all__ = [
    "ALLOWANCE",
    "Memory",
    "largest",
    "measure",
    "measure_here",
    "smallest",
    "status",
    "trim",
]

#: What a convolution may take beyond its input, its output and its packed filter, in bytes.
ALLOWANCE = 8 << 20

_CALLS = 3


@dataclass(frozen=True)
class Memory:
    """Resident memory of a process that convolves, in bytes."""

    name: str
    input: int
    output: int
    filter: int
    """The packed filter."""
    extra: int
    """The most that was resident during a call, less input, output and packed filter."""

    @property
    def fits(self) -> bool:
        """Whether it keeps within the allowance."""
        return self.extra <= ALLOWANCE


def largest(problems: Sequence[NamedProblem], count: int) -> list[NamedProblem]:
    """Returns the problems of which activation, filter and output are the largest."""
    return sorted(problems, key=lambda named: named.problem.nbytes(), reverse=True)[:count]


def measure(named: NamedProblem, dtype: str) -> Memory:
    """Measures a problem in a child process.

    Raises:
        OSError: The system does not say how much memory a process has had (only Linux does).
        RuntimeError: The child failed; the message ends with what it wrote.
    """
    if not Path("/proc/self/clear_refs").exists():
        raise OSError("only Linux tells the most memory that a process had since a moment")
    finished = subprocess.run(
        [sys.executable, "-m", "maxconv.bench.child", "memory", named.name, dtype],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(f"{named.name}: memory was not measured: {finished.stderr[-2000:]}")
    return Memory(**json.loads(finished.stdout.splitlines()[-1]))


def measure_here(name: str, dtype: str) -> Memory:
    """Measures a problem in this process, which must have done nothing else.

    A call on the smallest image starts threads and loads code. Then the operands are made and the
    kernel is asked to forget the most that was resident; what becomes resident after that is the
    output and the op's own buffers. MAX may free a call's output only after the next one began, so
    calls are watched one by one, and the one that had least counts: what the op takes, all have.
    """
    from .ours import OwnGraphs
    from .workload import Workload

    named = find_problem(name)
    graphs = OwnGraphs(dtype)
    small = NamedProblem(name, smallest(named.problem))
    graphs.single(Workload.make(small, dtype))()
    work = Workload.make(named, dtype)
    call = graphs.single(work)
    input, output = work.x.size, work.residual.size
    # The call keeps its operands; the rest was needed to make them.
    del work
    gc.collect()
    trim()
    before = status("VmRSS")
    peaks = []
    for _ in range(_CALLS):
        Path("/proc/self/clear_refs").write_text("5")
        call()
        peaks.append(status("VmHWM"))
    problem = named.problem
    element = DTYPE_BYTES[dtype]
    filter = packed_length(
        problem.filter_size,
        filters=cast(int, problem.filters),
        group_channels=cast(int, problem.group_channels),
        groups=problem.groups,
        dtype=dtype,
    )
    return Memory(
        name=name,
        input=input * element,
        output=output * element,
        filter=filter * element,
        extra=min(peaks) - before - output * element,
    )


def smallest(problem: ConvProblem) -> ConvProblem:
    """Returns the problem on an image of one output pixel."""
    sizes = [
        max(1, span - before - after)
        for span, before, after in zip(
            problem.span, problem.pad_before, problem.pad_after, strict=True
        )
    ]
    return ConvProblem.from_parts(
        (1, *sizes, problem.channels),
        filters=problem.filters,
        filter_size=problem.filter_size,
        group_channels=problem.group_channels,
        stride=problem.stride,
        dilation=problem.dilation,
        padding=tuple(
            size
            for pair in zip(problem.pad_before, problem.pad_after, strict=True)
            for size in pair
        ),
        groups=problem.groups,
    )


def status(field: str) -> int:
    """Returns a field of this process's status, in bytes.

    Raises:
        OSError: The system has no such file (only Linux has), or the file no such field.
    """
    text = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(match[1]) << 10


def trim() -> None:
    """Gives freed memory back to the system, which would otherwise serve the calls unseen."""
    import ctypes
    import ctypes.util

    libc = ctypes.CDLL(ctypes.util.find_library("c"))
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
