"""The Mojo program that runs maxconv's kernels, as a contender in another process.

The program (``kernels.mojo``) waits for lines and answers each with one line of JSON, so that its
bursts take their turns among those of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxconv._problems import NamedProblem
from maxconv._program import LIBRARIES, Pipe, ProgramError

from ..device import LAUNCHES
from ..entrant import MAXCONV, WORKS, Entrant, Key
from .operands import command
from .samples import COUNT, Samples

__all__ = ["LIBRARIES", "PROGRAM", "USUAL", "Field", "Program", "ProgramError", "started"]

#: The program's name in a folder that ``--build`` wrote.
PROGRAM = "kernels"

#: The program's words for what it is usually asked for.
USUAL = {Key(MAXCONV, work): work for work in WORKS}

#: Returns what is timed of a problem, why the rest is not, and the references by work.
Field = Callable[[NamedProblem], tuple[dict[Key, Entrant], dict[Key, str], Mapping[str, Any]]]


class Program(Pipe):
    """The running program, as a contender; see ``Pipe``."""

    def entrants(
        self,
        named: NamedProblem,
        dtype: str,
        words: Mapping[Key, str] = USUAL,
        launches: Callable[[Key], int] = lambda _: LAUNCHES,
    ) -> tuple[dict[Key, Entrant], dict[Key, str]]:
        """Makes a problem's operands there. A program that has ended, or lost its GPU, starts anew.

        Args:
            named: The problem.
            dtype: Storage type.
            words: The program's words for what is wanted.
            launches: Of a graph, or of a call without one.

        Returns:
            What is timed, and why what is not there is not.
        """
        entrants: dict[Key, Entrant] = {}
        missing: dict[Key, str] = {}
        try:
            self.revive()
            self.ask(command(named, dtype))
        except ProgramError as error:
            return {}, dict.fromkeys(words, str(error))
        for key, word in words.items():
            number = launches(key)
            try:
                self.ask("prepare", word, number)
            except ProgramError as error:
                missing[key] = str(error)
            else:
                replay, launch = (
                    _ProgramRun(self, kind, word, number) for kind in ("replay", "launch")
                )
                entrants[key] = Entrant(replay, launch)
        return entrants, missing


@contextmanager
def started(folder: Path, name: str = PROGRAM) -> Iterator[tuple[Program | None, str | None]]:
    """Starts a program of a folder that ``--build`` wrote; yields it, or why it is not there."""
    try:
        program = Program([str((folder / name).absolute())], folder / LIBRARIES)
    except (OSError, ProgramError) as error:
        yield None, f"not here: {error}"
        return
    with program:
        yield program, None


@dataclass(frozen=True)
class _ProgramRun:
    """Launches in the program: ``replay`` of its graph, or ``launch`` one by one."""

    program: Program
    kind: str
    work: str
    convolutions: int

    def burst(self, calls: int) -> list[float]:
        """Returns the mean seconds of ``calls`` calls."""
        answer = self.program.ask(self.kind, self.work, calls)
        return [float(answer["ns"]) / 1e9 / calls]

    def error(self, expected: Tensor | Samples, tolerance: float) -> float:
        """See ``Run.error``; compares some thousand elements of the first set's output."""
        answer = self.program.ask("sample", self.work, COUNT)
        if isinstance(expected, Tensor):
            expected = Samples.of(expected, answer["step"])
        bits = torch.tensor(answer["values"], dtype=torch.int32, device=expected.values.device)
        values = bits.view(torch.float32)
        return expected.error(Samples(answer["step"], values), tolerance)
