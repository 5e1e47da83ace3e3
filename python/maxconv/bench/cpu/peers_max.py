"""MAX's own convolutions, in graphs of one problem, with static sizes and a constant filter.

MAX does not compile or run every problem: some it refuses, some end the process. So a child process
tries them first (``try_all``), each call once; what it came through is then loaded here, from MAX's
cache. A problem that fails with a constant filter is tried with the filter as an input.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxconv._problem import ConvProblem
from maxconv._problems import NamedProblem, find_problem

from ..device import MAX_TOLERANCE
from ..entrant import BARE, MAX, Entrant, Key, Mismatch
from ..environment import child_environment
from .workload import Workload, to_buffer

if TYPE_CHECKING:
    from max.graph import Module

__all__ = ["KEYS", "Attempt", "Tried", "Unit", "load", "run_child", "serve", "try_all"]

#: MAX's contender, by whether its filter is a constant of the graph.
KEYS = {True: Key(MAX), False: Key(MAX, variant="filter as an input")}

_TIMEOUT_S = 1800.0
_REASON_LENGTH = 160


@dataclass(frozen=True)
class Unit:
    """Problems whose graphs are compiled together, which takes less time than one by one."""

    names: tuple[str, ...]
    constant: bool = True
    """Whether the filters are constants, not inputs."""


@dataclass
class Attempt:
    """What became of a unit: an error of the compiler, or the problems that ran."""

    unit: Unit
    error: str | None = None
    ran: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    """Errors that calls raised, by problem."""
    died: str | None = None
    """How the process ended, if it did, ..."""
    during: str | None = None
    """... and the problem that was running, or ``None`` if the unit was being compiled."""


#: Tries units, in order and without the calls of some problems, until the process ends.
Try = Callable[[Sequence[Unit], Set[str]], list[Attempt]]


@dataclass
class Tried:
    """What can be timed, and why the rest cannot."""

    units: list[Unit] = field(default_factory=list)
    """Units that compile."""
    runs: dict[bool, set[str]] = field(default_factory=lambda: {True: set(), False: set()})
    """Problems that run with a constant filter (``True``), and with the filter as an input."""
    failures: dict[str, dict[bool, str]] = field(default_factory=dict)
    """Reasons by problem and kind of filter."""


def try_all(problems: Sequence[NamedProblem], attempt: Try) -> Tried:
    """Finds out which problems MAX compiles and runs.

    Args:
        problems: Problems of one family.
        attempt: Tries units in a process of their own: ``run_child``.
    """
    tried = Tried()
    # MAX compiles no filter of one tap that is a constant: alone, they spoil no other's unit.
    single = [named.name for named in problems if named.problem.taps == 1]
    together = tuple(named.name for named in problems if named.name not in single)
    queue = [Unit(names) for names in (together, *((name,) for name in single)) if names]
    for constant in (True, False):
        crashed: set[str] = set()
        while queue:
            for result in attempt(queue, crashed):
                if result.died is not None and result.during is not None:
                    # The same unit again, without the call that ended the process.
                    crashed.add(result.during)
                    _fail(tried, (result.during,), constant, result.died)
                    if crashed.issuperset(result.unit.names):
                        queue.remove(result.unit)
                    break
                queue.remove(result.unit)
                error = result.died or result.error
                if error is None:
                    tried.units.append(result.unit)
                    tried.runs[constant] |= result.ran
                    for name, reason in result.failed.items():
                        _fail(tried, (name,), constant, reason)
                elif len(result.unit.names) > 1:
                    queue += [Unit((name,), constant) for name in result.unit.names]
                else:
                    _fail(tried, result.unit.names, constant, error)
        left = tuple(named.name for named in problems if named.name not in tried.runs[True])
        queue = [Unit(left, False)] if left else []
    return tried


def _fail(tried: Tried, names: Sequence[str], constant: bool, reason: str) -> None:
    for name in names:
        tried.failures.setdefault(name, {})[constant] = reason[:_REASON_LENGTH]


def run_child(units: Sequence[Unit], skip: Set[str], *, dtype: str) -> list[Attempt]:
    """Tries units in a child process, until it has tried all or has ended otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder, "request"), Path(folder, "answer")
        request.write_text(
            json.dumps(
                {
                    "dtype": dtype,
                    "units": [[unit.names, unit.constant] for unit in units],
                    "skip": sorted(skip),
                }
            )
        )
        answer.touch()
        command = [sys.executable, "-m", "maxconv.bench.child", "max", str(request), str(answer)]
        try:
            status = subprocess.run(
                command,
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
                timeout=_TIMEOUT_S,
            ).returncode
            ending = _ending(status)
        except subprocess.TimeoutExpired:
            ending = f"not done after {_TIMEOUT_S:.0f} s"
        return read_answer(units, answer.read_text().splitlines(), ending)


def _ending(status: int) -> str | None:
    if status == 0:
        return None
    if status > 0:
        return f"the process exits with {status}"
    with suppress(ValueError):
        return f"the process dies of {signal.Signals(-status).name}"
    return f"the process dies of signal {-status}"


def read_answer(units: Sequence[Unit], lines: Sequence[str], ending: str | None) -> list[Attempt]:
    """Reads what ``serve`` wrote; ``ending`` is how the process ended, if not well."""
    attempts: list[Attempt] = []
    during: str | None = None
    done = False
    for line in lines:
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "unit":
            attempts.append(Attempt(units[len(attempts)]))
            during, done = None, False
        elif event["event"] == "error":
            attempts[-1].error = event["reason"]
        elif event["event"] == "run":
            during = event["name"]
        elif event["event"] == "ran":
            attempts[-1].ran.add(event["name"])
            during = None
        elif event["event"] == "failed":
            attempts[-1].failed[event["name"]] = event["reason"]
            during = None
        elif event["event"] == "done":
            done = True
    if ending is not None and not done:
        if not attempts:
            attempts.append(Attempt(units[0]))
        attempts[-1].died, attempts[-1].during = ending, during
    return attempts


def serve(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Tries units in this process; yields an event before and after everything that may end it.

    Results are checked here too: one that is wrong because MAX read beyond an operand may end the
    next process that asks for it.
    """
    from .peers_torch import reference

    for names, constant in request["units"]:
        yield {"event": "unit"}
        works = [Workload.make(find_problem(name), request["dtype"]) for name in names]
        try:
            entrants = load(works, constant=constant)
        except Exception as error:
            yield {"event": "error", "reason": _first_line(error)}
            yield {"event": "done"}
            continue
        for work in works:
            name = work.named.name
            if name in request["skip"]:
                continue
            yield {"event": "run", "name": name}
            try:
                expected = reference(work)[BARE]
                for _, run in entrants[name].runs():
                    run.error(expected, MAX_TOLERANCE[work.dtype])
            except Mismatch as error:
                yield {"event": "failed", "name": name, "reason": f"wrong result: {error}"}
            except Exception as error:
                yield {"event": "failed", "name": name, "reason": _first_line(error)}
            else:
                yield {"event": "ran", "name": name}
        yield {"event": "done"}


def _first_line(error: Exception) -> str:
    # The first sentence says what happened; the next ask for a report.
    line = (str(error) or type(error).__name__).splitlines()[0].strip()
    return line.split(". ")[0].rstrip(".")


def load(works: Sequence[Workload], *, constant: bool) -> dict[str, Entrant]:
    """Compiles MAX's own convolution for each problem; returns what is timed by name.

    Args:
        works: The problems, of one dtype.
        constant: Whether the filters are constants; otherwise each call is given its filter.

    Raises:
        RuntimeError: MAX does not compile one of them; it does not say which.
    """
    from max.driver import CPU
    from max.engine import InferenceSession
    from max.graph import Module

    from .ours import Call

    module = Module()
    for work in works:
        for count in {work.convolutions, 1}:
            _add_graph(module, work, count, constant=constant)
    models = InferenceSession(devices=[CPU()]).load_all(module)
    entrants = {}
    for work in works:
        name = work.named.name
        shape, filter_shape, _ = max_arguments(work.named.problem)
        x = to_buffer(work.x.reshape(shape), work.dtype)
        filters = [] if constant else [to_buffer(work.max_filter.reshape(filter_shape), work.dtype)]
        several, single = (
            Call(models[_symbol(name, count)], (*[x] * count, *filters), count)
            for count in (work.convolutions, 1)
        )
        entrants[name] = Entrant(several, single if work.convolutions > 1 else None)
    return entrants


def _add_graph(module: Module, work: Workload, count: int, *, constant: bool) -> None:
    """Adds a graph of ``count`` convolutions of a problem, each on an input of its own."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, ops

    device, storage = DeviceRef.CPU(), DType[work.dtype]
    shape, filter_shape, arguments = max_arguments(work.named.problem)
    types = [TensorType(storage, shape, device)] * count
    if not constant:
        types.append(TensorType(storage, filter_shape, device))
    with Graph(_symbol(work.named.name, count), input_types=types, module=module) as graph:
        values = [value.tensor for value in graph.inputs]
        if constant:
            filter = to_buffer(work.max_filter.reshape(filter_shape), work.dtype)
            taps = ops.constant(filter, storage, device)
        else:
            taps = values.pop()
        convolve = ops.conv3d if len(shape) == 5 else ops.conv2d
        graph.output(*(convolve(x, taps, **arguments) for x in values))


def _symbol(name: str, count: int) -> str:
    return f"{name.replace('.', '_')}_{count}"


def max_arguments(
    problem: ConvProblem,
) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Returns activation and filter shape, and the other arguments of MAX's ``conv2d`` or ``3d``.

    MAX has no convolution of one dimension: such a problem becomes one of two, with one row.
    """
    shape, taps = list(problem.input_shape), list(problem.filter_size)
    stride, dilation = problem.stride, problem.dilation
    before, after = problem.pad_before, problem.pad_after
    if problem.spatial_rank == 1:
        shape.insert(1, 1)
        taps.insert(0, 1)
        stride, dilation = (1, *stride), (1, *dilation)
        before, after = (0, *before), (0, *after)
    padding = tuple(size for pair in zip(before, after, strict=True) for size in pair)
    arguments = {
        "stride": stride,
        "dilation": dilation,
        "padding": padding,
        "groups": problem.groups,
    }
    sizes = tuple(int(size) for size in shape)
    filters = (*taps, int(problem.group_channels), int(problem.filters))
    return sizes, filters, arguments
