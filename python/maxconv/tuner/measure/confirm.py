"""Measures a configuration as PyTorch's calls would run it, beside what dispatch chooses.

Both run through the same library and the same function: a call that leaves the choice to dispatch,
with a table of one row, and one that asks for the kernel that dispatch chose without a table. A
process reads its table once, so that each confirmation is a process of its own.
"""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ..._fields import Kernel
from ..._library_files import Family
from ..._native import host
from ..._openmp import installed_parallel
from ..._tuned import FILE_VARIABLE, Line, text_of, use_file
from ..._tuned_table import CUT_FIELDS
from .base import Configuration, Outcome, summarize
from .clock import Clock
from .cuts import CutRequest, call_of
from .oracle import operands

__all__ = ["answer", "confirm_cut"]


#: glibc gives scratch of a call back to the system, or keeps it, by what the process did before; a
#: kernel with much of it takes up to twice as long where each call's pages are new. Elsewhere than
#: with glibc, the two are the same.
_ALLOCATORS = (
    {"MALLOC_MMAP_THRESHOLD_": "65536"},
    {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "1073741824"},
)


def confirm_cut(
    request: CutRequest, configuration: Configuration, kernel: str, seconds: float
) -> Outcome:
    """Measures a configuration in two processes: whose calls' scratch is new memory, and not.

    Args:
        request: What is measured; its protocol says how many bursts there are.
        configuration: What a search found.
        kernel: What dispatch chooses without a table, by name.
        seconds: How long a process may take.

    Returns:
        The outcome with the smaller gain, or the first that failed.
    """
    given = pickle.dumps((request, dict(configuration), kernel))
    outcomes = []
    for allocator in _ALLOCATORS:
        outcome = _asked(given, allocator, seconds)
        if outcome.gain is None:
            return outcome
        outcomes.append((outcome.gain[1], outcome))
    return min(outcomes, key=lambda pair: pair[0])[1]


def _asked(given: bytes, allocator: Mapping[str, str], seconds: float) -> Outcome:
    """Returns what a process of its own measures."""
    command = [sys.executable, "-c", f"from {__name__} import answer; answer()"]
    try:
        ended = subprocess.run(
            command,
            input=given,
            capture_output=True,
            check=False,
            timeout=seconds,
            env={**os.environ, **allocator},
        )
    except subprocess.TimeoutExpired:
        return Outcome(None, error=f"hung: its process took more than {seconds:.0f} s")
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        return Outcome(None, error=f"crashed: {lines[-1] if lines else ended.returncode}")
    outcome: Outcome = pickle.loads(ended.stdout)
    return outcome


def _confirmed(request: CutRequest, configuration: Configuration, kernel: str) -> Outcome:
    """Measures in this process, which has used no table yet."""
    problem, types = request.problem, (request.dtype, request.out_dtype)
    cut = tuple(configuration[name] for name in CUT_FIELDS[request.kernel])
    line = Line(*types, request.threads, tuple(problem.numbers()), request.kernel, cut)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tuned.txt"
        file.write_text(text_of([line]), encoding="utf-8")
        use_file(file)
        family = Family(request.dtype, "float32", request.out_dtype, scaled=False)
        library = host(family, whole=True)
        made = operands(problem, *types, request.seed)
        old, new = (
            library.prepare(call_of(problem, made, chosen))
            for chosen in (Kernel[kernel.upper()], Kernel.AUTO)
        )
        reason = library.explain(new, request.threads)[1]
    if not reason.startswith("tuned: "):
        return Outcome(None, error=f"{FILE_VARIABLE}: the kernels did not take it: {reason}")
    parallel = installed_parallel() if request.threads > 1 else 0
    arguments = made.addresses(request.threads, parallel)
    made.poison()
    new.run(*arguments)
    if wrong := made.wrong():
        return Outcome(None, error=wrong)
    before, after = (functools.partial(call.run, *arguments) for call in (old, new))
    return _in_turns(before, after, request)


def _in_turns(old: Callable[[], None], new: Callable[[], None], request: CutRequest) -> Outcome:
    """Measures two calls in turns."""
    protocol, runs = request.protocol, (old, new)
    bursts: tuple[list[float], list[float]] = ([], [])
    clocks = [Clock(request.threads) for _ in runs]
    old()
    calls = [
        1 + int(protocol.burst_s / max(clock.seconds(run, 1), 1e-7))
        for run, clock in zip(runs, clocks, strict=True)
    ]
    for turn in range(protocol.rounds):
        # Each is first in every other turn.
        for which in (turn % 2, 1 - turn % 2):
            bursts[which].append(clocks[which].seconds(runs[which], calls[which]))
    return summarize(bursts[1], bursts[0])


def answer() -> None:
    """Measures what stdin asks, and writes the outcome to stdout: the process of its own."""
    sys.stdout.buffer.write(pickle.dumps(_confirmed(*pickle.loads(sys.stdin.buffer.read()))))
