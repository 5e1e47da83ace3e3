"""The Mojo program that runs maxconv's kernels, as a contender in another process.

The program (``kernels.mojo``) waits for lines and answers each with one line of JSON, so that its
bursts take their turns among those of this process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from maxconv._problems import NamedProblem

from ..device import LAUNCHES
from ..entrant import MAXCONV, WORKS, Entrant, Key
from .operands import command
from .samples import COUNT, Samples

__all__ = ["LIBRARIES", "PROGRAM", "USUAL", "Field", "Program", "ProgramError", "started"]

#: The program's name in a folder that ``--build`` wrote, and that of the libraries it loads.
PROGRAM, LIBRARIES = "kernels", "lib"

#: The program's words for what it is usually asked for.
USUAL = {Key(MAXCONV, work): work for work in WORKS}

#: Returns what is timed of a problem, why the rest is not, and the references by work.
Field = Callable[[NamedProblem], tuple[dict[Key, Entrant], dict[Key, str], Mapping[str, Any]]]

_TIMEOUT_S = 120.0


class ProgramError(RuntimeError):
    """The program refused a line, or ended."""


class Program:
    """The running program; a context that ends it.

    Args:
        command: What starts it.
        libraries: A folder of shared libraries that it loads.
        timeout_s: Seconds for an answer, after which it is ended.

    Raises:
        OSError: It cannot be started.
        ProgramError: It ends at once: there is no GPU, say.
    """

    def __init__(
        self, command: Sequence[str], libraries: Path, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._command = command
        self._environment = _environment(libraries)
        self._timeout_s = timeout_s
        self.about = self._start()

    def _start(self) -> Mapping[str, Any]:
        """Starts it; returns what it says of itself."""
        self._lost = False
        # Closed with the program.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self._environment,
            text=True,
        )
        return self._answer()

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the program."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, *words: object) -> Mapping[str, Any]:
        """Sends a line and returns its answer.

        Raises:
            ProgramError: The program refused, or has ended; the message has its words.
        """
        assert self._process.stdin is not None
        try:
            print(*words, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def _answer(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        overdue = threading.Timer(self._timeout_s, self._process.kill)
        overdue.start()
        try:
            line = self._process.stdout.readline()
        finally:
            overdue.cancel()
        if not line:
            raise self._ended()
        answer: Mapping[str, Any] = json.loads(line)
        if "error" in answer:
            # After an error of CUDA's every further call fails.
            self._lost |= "CUDA" in answer["error"]
            raise ProgramError(answer["error"])
        return answer

    def _ended(self) -> ProgramError:
        self._lost = True
        status = self._process.wait()
        self._errors.seek(0)
        words = " ".join(self._errors.read().split())[-300:]
        return ProgramError(f"the program ended with {status}: {words or 'it said nothing'}")

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
            if self._lost:
                self.close()
                self._start()
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


def _environment(libraries: Path) -> dict[str, str]:
    """Returns the environment in which the program finds its libraries and an assembler."""
    environment = dict(os.environ)
    paths = [str(libraries), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    assembler = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    if assembler:
        environment.setdefault("MODULAR_NVPTX_COMPILER_PATH", assembler)
    return environment
