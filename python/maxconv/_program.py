"""Mojo programs that are built on one machine and run on another, behind a pipe.

A folder holds the program and the libraries that it loads; the other machine needs neither Mojo nor
MAX. The program waits for lines and answers each with one line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LIBRARIES", "Pipe", "ProgramError", "build_program", "check_folder", "find_assembler"]

#: The folder of the libraries that a program loads, beside it.
LIBRARIES = "lib"

#: What a program that Mojo built loads of MAX's libraries.
_LIBRARIES = (
    "libKGENCompilerRTShared",
    "libAsyncRTMojoBindings",
    "libMSupportGlobals",
    "libAsyncRTRuntimeGlobals",
)

_TIMEOUT_S = 120.0


def check_folder(argument: str, folder: Path, manifest: str) -> None:
    """Checks that a folder can be built into.

    Args:
        argument: What names the folder, for messages.
        folder: The folder, which need not exist.
        manifest: The file that every build writes.

    Raises:
        ValueError: It holds something that no build wrote, or cannot be made.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / manifest).is_file():
        raise ValueError(
            f"{argument}: {folder} holds other files; a new or an empty folder is allowed"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{argument}: {folder} is no folder")
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"{argument}: the folder of {folder} does not exist")


def build_program(source: Path, file: Path, architecture: str, *options: str) -> None:
    """Compiles a program for a GPU, and puts the libraries that it loads beside it.

    Args:
        source: The program's module.
        file: The program.
        architecture: The GPU's, ``sm_90a`` say.
        options: Further ones of ``mojo build``.

    Raises:
        LibraryError: It does not compile; the message has Mojo's output.
    """
    from . import _library as library

    finished = library.run_mojo(
        "build",
        *("-I", str(library.OPERATIONS.parent)),
        *("--target-accelerator", architecture),
        *_portable_cpu(),
        *options,
        str(source),
        *("-o", str(file)),
    )
    if finished.returncode:
        raise library.LibraryError(f"Mojo could not compile {source}:\n{finished.stderr.rstrip()}")
    modular = importlib.util.find_spec("modular")
    folders = (modular.submodule_search_locations or []) if modular else []
    libraries = file.parent / LIBRARIES
    libraries.mkdir(exist_ok=True)
    for name in _LIBRARIES:
        found = [path for place in folders for path in Path(place, "lib").glob(f"{name}.*")]
        if not found:
            raise library.LibraryError(f"{name}, which the program loads, is not among MAX's files")
        shutil.copy(found[0], libraries)


def _portable_cpu() -> tuple[str, ...]:
    """Returns Mojo's options for a program that the CPU of any GPU machine runs.

    By default Mojo takes every instruction that the building CPU has: AMD's have some that Intel's
    lack.
    """
    return ("--target-cpu", "x86-64-v3") if platform.machine() == "x86_64" else ()


class ProgramError(RuntimeError):
    """The program refused a line, or ended."""


class Pipe:
    """The running program; a context that ends it.

    Args:
        command: What starts it.
        libraries: A folder of shared libraries that it loads.
        timeout_s: Seconds for an answer, after which it is ended.
        environment: Variables that it has beside this process's.

    Raises:
        OSError: It cannot be started.
        ProgramError: It ends at once: there is no GPU, say.
    """

    def __init__(
        self,
        command: Sequence[str],
        libraries: Path,
        timeout_s: float = _TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = command
        self._environment = {**_environment(libraries), **(environment or {})}
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

    def __enter__(self) -> Self:
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

    @property
    def lost(self) -> bool:
        """Whether it has ended, or lost its GPU."""
        return self._lost

    def revive(self) -> bool:
        """Starts a program anew that has ended, or lost its GPU; returns whether it had.

        Raises:
            OSError: It cannot be started.
            ProgramError: It ends at once.
        """
        if not self._lost:
            return False
        self.close()
        self._start()
        return True

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


def _environment(libraries: Path) -> dict[str, str]:
    """Returns the environment in which the program finds its libraries and an assembler."""
    environment = dict(os.environ)
    paths = [str(libraries), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    if assembler := find_assembler():
        environment.setdefault("MODULAR_NVPTX_COMPILER_PATH", assembler)
    return environment


def find_assembler() -> str | None:
    """Returns the path of ``ptxas``, or None where there is none."""
    return shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
