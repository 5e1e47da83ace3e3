"""Measures a configuration as PyTorch's calls would run it, beside what dispatch chooses.

Both run through the same library and the same function: a call that leaves the choice to dispatch,
with a table of one row, and one that asks for the kernel that dispatch chose without a table. A
process reads its table once, so that each confirmation is a process of its own.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from ..._fields import Kernel, Layout, encode_scalars
from ..._library_files import Family
from ..._native import Call, host
from ..._openmp import installed_parallel
from ..._tuned import FILE_VARIABLE, Line, text_of, use_file
from ..._tuned_table import CUT_FIELDS
from .base import Configuration, Outcome, summarize
from .cuts import CutRequest
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
    problem = request.problem
    cut = tuple(configuration[name] for name in CUT_FIELDS)
    line = Line(request.dtype, request.out_dtype, request.threads, tuple(problem.numbers()), cut)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tuned.txt"
        file.write_text(text_of([line]), encoding="utf-8")
        use_file(file)
        library = host(Family(request.dtype, "float32", request.out_dtype, scaled=False))
        made = operands(problem, request.dtype, request.out_dtype, request.seed)
        old, new = (
            library.prepare(
                Call.of(
                    tuple(map(int, problem.input_shape)),
                    tuple(map(int, problem.output_shape)),
                    made.filter.size,
                    problem.geometry(filter_layout=Layout.PACKED, kernel=chosen),
                    encode_scalars(),
                )
            )
            for chosen in (Kernel[kernel.upper()], Kernel.AUTO)
        )
        reason = library.explain(new, request.threads)[1]
    if not reason.startswith("tuned: "):
        return Outcome(None, error=f"{FILE_VARIABLE}: the kernels did not take it: {reason}")
    addresses = (made.activation.ctypes.data, made.filter.ctypes.data, 0, 0, 0)
    parallel = installed_parallel() if request.threads > 1 else 0
    arguments = (*addresses, made.output.ctypes.data, request.threads, parallel)
    made.poison()
    new.run(*arguments)
    if wrong := made.wrong():
        return Outcome(None, error=wrong)
    bursts: dict[bool, list[float]] = {False: [], True: []}
    old.run(*arguments)
    calls = {}
    for tuned, call in ((False, old), (True, new)):
        start = time.perf_counter()
        call.run(*arguments)
        calls[tuned] = 1 + int(request.protocol.burst_s / (time.perf_counter() - start))
    for turn in range(request.protocol.rounds):
        # Each is first in every other turn.
        for tuned in (bool(turn % 2), not turn % 2):
            call = new if tuned else old
            start = time.perf_counter()
            for _ in range(calls[tuned]):
                call.run(*arguments)
            bursts[tuned].append((time.perf_counter() - start) / calls[tuned])
    return summarize(bursts[True], bursts[False])


def answer() -> None:
    """Measures what stdin asks, and writes the outcome to stdout: the process of its own."""
    sys.stdout.buffer.write(pickle.dumps(_confirmed(*pickle.loads(sys.stdin.buffer.read()))))
