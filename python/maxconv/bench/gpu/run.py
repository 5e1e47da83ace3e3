"""Measures problems on a GPU, with what a folder holds that ``--build`` wrote."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from maxconv._problems import NamedProblem
from maxconv._progress import progress

from ..device import is_narrow
from ..entrant import MAX, MAXCONV, Entrant, Key
from ..environment import Machine, driver_version, machine
from ..measure import measure_problem
from ..record import Result
from ..timing import Protocol
from .clock import Clock
from .graphs import FOLDER, GRAPHS, LoadedGraphs
from .narrow import narrow_field
from .operands import Operands
from .peers_torch import Maker, makers
from .program import USUAL, Field, Program, ProgramError, started

__all__ = ["check_gpu", "measure_problems", "this_machine"]

#: Bytes that torch may keep from problem to problem.
_RESERVED_NBYTES = 4 << 30


def check_gpu() -> None:
    """Checks that torch sees a GPU.

    Raises:
        ValueError: It does not.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "device: 'gpu' needs a GPU that torch sees, and there is none; --build needs none"
        )


def this_machine() -> Machine:
    """Returns this machine with its GPU."""
    here = machine()
    properties = torch.cuda.get_device_properties(0)
    return Machine(
        **{
            **vars(here),
            "gpu": properties.name,
            "driver": driver_version(),
            "multiprocessors": properties.multi_processor_count,
        }
    )


def measure_problems(
    problems: Sequence[NamedProblem],
    dtype: str,
    protocol: Protocol,
    contenders: Collection[str],
    works: Collection[str],
    *,
    folder: Path,
    clock: Clock,
    keep: Callable[[list[Result]], None],
    many: bool = False,
    seconds: float | None = None,
) -> list[Result]:
    """Measures problems one by one, all contenders of each in turns.

    Args:
        problems: What to measure.
        dtype: Storage type.
        protocol: How often and how long.
        contenders: The names of those that take part.
        works: The kinds of work.
        folder: What ``--build`` wrote.
        clock: The device and its time.
        keep: Is given the results so far after each problem.
        many: Whether there are hundreds: what has a kernel's time gets none of a call, there are no
            MAX graphs without MAX among the contenders, see ``makers`` for torch's, and a wrong
            output, or a program that fails, is recorded instead of ending the run.
        seconds: After these no further problem begins.

    Returns:
        The results of all problems, or of those that were begun in time.

    Raises:
        Mismatch: A contender's output differs from the reference.
        ValueError: torch's functions do not take a problem.
    """
    torch.backends.cudnn.benchmark = True
    results: list[Result] = []
    begin = time.monotonic()
    opened = narrow_field if is_narrow(dtype) else _field
    with (
        torch.inference_mode(),
        opened(dtype, contenders, works, folder=folder, clock=clock, many=many) as field,
    ):
        for number, named in enumerate(problems, start=1):
            if seconds is not None and time.monotonic() - begin > seconds:
                break
            with progress(f"timing {named.name} ({number} of {len(problems)})", announce=True):
                entrants, missing, references = field(named)
                if many:
                    entrants = {key: _kernel_alone(made) for key, made in entrants.items()}
                further = (references, dtype, protocol)
                try:
                    made = measure_problem(named, entrants, *further, missing, go_on=many)
                except ProgramError as error:
                    if not many:
                        raise
                    # It starts anew for the next problem.
                    missing |= dict.fromkeys(entrants, str(error))
                    made = measure_problem(named, {}, *further, missing, go_on=True)
                results.append(made)
            # Captured graphs hold memory until they go.
            del entrants, references
            _free(clock)
            keep(results)
    return results


@contextmanager
def _field(
    dtype: str,
    contenders: Collection[str],
    works: Collection[str],
    *,
    folder: Path,
    clock: Clock,
    many: bool,
) -> Iterator[Field]:
    """Starts what measures problems in types of 16 bits: see ``measure_problems``."""
    wanted = [name for name, kind in GRAPHS.items() if kind.key.contender in contenders]
    if many and MAX not in contenders:
        wanted = []
    words = {key: word for key, word in USUAL.items() if key.work in works}
    made_by = makers(contenders, works, many=many)
    with ExitStack() as stack:
        program: Program | None = None
        reason: str | None = None
        if MAXCONV in contenders:
            program, reason = stack.enter_context(started(folder))
        with progress("loading MAX's graphs"):
            graphs = LoadedGraphs(folder / FOLDER, wanted)

        def of(named: NamedProblem) -> tuple[dict[Key, Entrant], dict[Key, str], dict[str, Any]]:
            operands = Operands(named, dtype, clock, many)
            entrants, missing = _torch_entrants(operands, made_by)
            if program is not None:
                ours, lost = program.entrants(named, dtype, words, lambda _: operands.launches)
                entrants, missing = {**ours, **entrants}, {**lost, **missing}
            elif reason is not None:
                missing |= dict.fromkeys(words, reason)
            through, lost = graphs.entrants(operands)
            entrants |= {key: made for key, made in through.items() if key.work in works}
            missing |= {
                key: why for key, why in (graphs.missing | lost).items() if key.work in works
            }
            return entrants, missing, operands.references(works)

        yield of


def _free(clock: Clock) -> None:
    """Gives memory back that torch keeps and the program may need, where it is much.

    Memory that is given back has to be allocated anew, which takes longer than many a kernel.
    """
    if clock.device == "cuda" and torch.cuda.memory_reserved() > _RESERVED_NBYTES:
        torch.cuda.empty_cache()


def _kernel_alone(made: Entrant) -> Entrant:
    """Returns what a contender's kernel is timed with, or all it has, if that is a call."""
    return made if made.kernel is None else replace(made, call=None)


def _torch_entrants(
    operands: Operands, made_by: Mapping[Key, Maker]
) -> tuple[dict[Key, Entrant], dict[Key, str]]:
    entrants: dict[Key, Entrant] = {}
    missing: dict[Key, str] = {}
    for key, make in made_by.items():
        try:
            if (made := make(operands)) is not None:
                entrants[key] = made
        except ImportError as error:
            missing[key] = f"not here: {error}"
        # What a library does not take is no reason to lose the others.
        except Exception as error:
            missing[key] = " ".join(str(error).split())[:400] or type(error).__name__
    return entrants, missing
