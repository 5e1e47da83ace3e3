"""Types of 8 bits: maxconv's convolutions in them, and as a measure its own in bfloat16.

Nobody else convolves in them on a GPU: torch has no convolution of int8 or float8 there.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxconv._dtypes import INT8
from maxconv._fields import INTERLEAVED, INTERLEAVED_LAYOUT
from maxconv._problems import NamedProblem

from ..device import launches, out_type
from ..entrant import BARE, BFLOAT16, FUSED, MAXCONV, Entrant, Key, Run
from .clock import Clock
from .operands import set_count
from .program import Field, started
from .samples import sampled

__all__ = ["IN_BLOCKS", "PROGRAM_BFLOAT16", "narrow_field"]

#: The program in bfloat16, in a folder that ``--build`` wrote.
PROGRAM_BFLOAT16 = "kernels-bfloat16"

#: The variant of maxconv that takes int8 in the interleaved layout, with dp4a.
IN_BLOCKS = INTERLEAVED_LAYOUT

_INTERLEAVED = {BARE: "interleaved", FUSED: "interleaved-fused"}


@dataclass(frozen=True)
class _Against:
    """A run that is compared with what its own operands make."""

    run: Run
    expected: Any

    @property
    def convolutions(self) -> int:
        """See ``Run``."""
        return self.run.convolutions

    def burst(self, calls: int) -> Any:
        """See ``Run``."""
        return self.run.burst(calls)

    def error(self, expected: Any, tolerance: float) -> float:
        """See ``Run``; ``expected`` is not looked at."""
        return self.run.error(self.expected, tolerance)


@contextmanager
def narrow_field(
    dtype: str,
    contenders: Collection[str],
    works: Collection[str],
    *,
    folder: Path,
    clock: Clock,
    many: bool,
) -> Iterator[Field]:
    """Starts the programs of a type of 8 bits; yields what measures a problem with them.

    Args:
        dtype: The type of activation and filter.
        contenders: The names of those that take part.
        works: The kinds of work.
        folder: What ``--build`` wrote.
        clock: The device.
        many: Whether there are hundreds of problems.
    """
    blocks = {Key(MAXCONV, work, IN_BLOCKS): _INTERLEAVED[work] for work in works}
    asked: dict[str, tuple[str, Mapping[Key, str]]] = {
        "": (dtype, {Key(MAXCONV, work): work for work in works}),
        PROGRAM_BFLOAT16: (BFLOAT16, {Key(BFLOAT16, work): work for work in works}),
    }
    with ExitStack() as stack:
        programs = []
        for name, (kind, words) in asked.items():
            if (BFLOAT16 if name else MAXCONV) in contenders:
                given = {**words, **blocks} if kind == INT8 else words
                program = stack.enter_context(started(folder, *filter(None, [name])))
                programs.append((program, kind, given))

        def of(named: NamedProblem) -> tuple[dict[Key, Entrant], dict[Key, str], dict[str, Any]]:
            entrants: dict[Key, Entrant] = {}
            missing: dict[Key, str] = {}
            for (program, reason), kind, words in programs:
                if program is None:
                    missing |= dict.fromkeys(words, str(reason))
                    continue
                number = functools.partial(_launches, named, kind, many)
                made, lost = program.entrants(named, kind, words, number)
                missing |= lost
                for block in (0, INTERLEAVED):
                    mine = {
                        key: entrant
                        for key, entrant in made.items()
                        if (key.variant == IN_BLOCKS) == bool(block)
                    }
                    if mine:
                        expected = sampled(
                            named, kind, works, device=clock.device, interleaved=block
                        )
                        entrants |= {
                            key: _compared(entrant, expected[key.work])
                            for key, entrant in mine.items()
                        }
            return entrants, missing, dict.fromkeys(works)

        yield of


def _launches(named: NamedProblem, dtype: str, many: bool, key: Key) -> int:
    """See ``launches``; dp4a multiplies at some eighth of the tensor cores' speed."""
    problem = named.problem
    flops = problem.flops * (8 if key.variant else 1)
    nbytes = problem.nbytes(dtype, out_type(dtype))
    return launches(flops, nbytes, set_count(named, dtype), many=many)


def _compared(entrant: Entrant, expected: Any) -> Entrant:
    kernel, call = (
        None if run is None else _Against(run, expected) for run in (entrant.kernel, entrant.call)
    )
    return Entrant(kernel, call, entrant.note)
