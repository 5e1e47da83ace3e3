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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from maxconv._problems import NamedProblem

from ..device import LAUNCHES
from ..entrant import MAXCONV, WORKS, Entrant, Key
from .clock import distance
from .operands import command

__all__ = ["LIBRARIES", "PROGRAM", "Program", "ProgramError"]

#: The program's name in a folder that ``--build`` wrote, and that of the libraries it loads.
PROGRAM, LIBRARIES = "kernels", "lib"

#: Elements of an output that the program is asked for.
_SAMPLES = 4096

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
        self._timeout_s = timeout_s
        # Closed with the program.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(libraries),
            text=True,
        )
        self.about = self._answer()

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
            raise ProgramError(answer["error"])
        return answer

    def _ended(self) -> ProgramError:
        status = self._process.wait()
        self._errors.seek(0)
        words = " ".join(self._errors.read().split())[-300:]
        return ProgramError(f"the program ended with {status}: {words or 'it said nothing'}")

    def entrants(
        self,
        named: NamedProblem,
        dtype: str,
        works: Collection[str] = WORKS,
        launches: int = LAUNCHES,
    ) -> tuple[dict[Key, Entrant], dict[Key, str]]:
        """Makes a problem's operands there.

        Args:
            named: The problem.
            dtype: Storage type.
            works: The kinds of work.
            launches: Of a graph, or of a call without one.

        Returns:
            What is timed, and why what is not there is not.
        """
        entrants: dict[Key, Entrant] = {}
        missing: dict[Key, str] = {}
        try:
            self.ask(command(named, dtype))
        except ProgramError as error:
            return {}, {Key(MAXCONV, work): str(error) for work in works}
        for work in works:
            try:
                self.ask("prepare", work, launches)
            except ProgramError as error:
                missing[Key(MAXCONV, work)] = str(error)
            else:
                replay, launch = (
                    _ProgramRun(self, kind, work, launches) for kind in ("replay", "launch")
                )
                entrants[Key(MAXCONV, work)] = Entrant(replay, launch)
        return entrants, missing


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

    def error(self, expected: Tensor, tolerance: float) -> float:
        """See ``Run.error``; compares some thousand elements of the first set's output."""
        answer = self.program.ask("sample", self.work, _SAMPLES)
        # The program counts elements as they lie in memory, channels innermost.
        flat = expected.movedim(1, -1).reshape(-1)
        index = torch.arange(0, flat.numel(), answer["step"], device=flat.device)
        values = torch.tensor(answer["values"], dtype=torch.float32, device=flat.device)
        return distance(values, flat[index][:_SAMPLES], tolerance)


def _environment(libraries: Path) -> dict[str, str]:
    """Returns the environment in which the program finds its libraries and an assembler."""
    environment = dict(os.environ)
    paths = [str(libraries), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    assembler = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    if assembler:
        environment.setdefault("MODULAR_NVPTX_COMPILER_PATH", assembler)
    return environment
