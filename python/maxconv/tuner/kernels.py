"""What the kernels say of their configurations.

The names of fields, limits, refusals, the model's time and derived counts come from a small shared
library without any kernel in it, ``library/tune.mojo``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .._fields import Kernel
from .._library_files import rules_file
from .._native import Library
from .._problem import ConvProblem
from .rules import Facts

__all__ = ["Judged", "KernelSpace", "Rules", "rules"]


@dataclass(frozen=True)
class Judged:
    """What a kernel says of a configuration."""

    refusal: str | None
    """Why it does not run the problem so, or None."""
    counts: Mapping[str, float]
    """What follows from it, by name; empty if it is refused. The first is the model's time."""


class Rules(Library):
    """The library."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._open = self.function("open", 7)
        self._describe = self.function("describe", 1)
        self.choice = self.function("choice", 1)
        self.judge = self.function("judge", 5, None)
        self.close = self.function("close", 1, None)
        self.dtypes = tuple(self.text(self.function("dtypes", 0)()).split())

    def open(
        self,
        kernel: Kernel,
        problem: ConvProblem,
        dtype: str,
        out_dtype: str,
        *,
        residual: bool,
        units: int,
        l2_bytes: int = 0,
    ) -> KernelSpace:
        """Opens the space of a kernel and a problem.

        Args:
            kernel: One that has a space.
            problem: The convolution; all sizes known.
            dtype: Of activation and filter.
            out_dtype: Of the output.
            residual: Whether one is added.
            units: The GPU's multiprocessors, or the CPU's threads.
            l2_bytes: Of the GPU's L2 cache; 0 where it is not known.

        Raises:
            ValueError: A type is not known, or the kernel takes no such problem, whatever its
                configuration; the message says why.
        """
        for name, given in (("dtype", dtype), ("out_dtype", out_dtype)):
            if given not in self.dtypes:
                raise ValueError(f"{name}: {given!r} is not one of {', '.join(self.dtypes)}")
        if units < 1:
            raise ValueError(f"units: {units} is not positive; at least 1 is needed")
        numbers = np.array(problem.numbers(), np.int64)
        types = np.array([self.dtypes.index(dtype), self.dtypes.index(out_dtype)], np.int64)
        addresses = (numbers.ctypes.data, types.ctypes.data)
        handle = self.made(self._open, int(kernel), *addresses, int(residual), units, l2_bytes)
        return KernelSpace(self, handle, self.text(self._describe(handle)))


class KernelSpace:
    """A kernel's space for one problem, as the kernel has it."""

    def __init__(self, library: Rules, handle: int, description: str) -> None:
        self._library = library
        self._handle = handle
        fields, counts, *facts = description.splitlines()
        self.fields = tuple(fields.split())
        """The names of a configuration's numbers."""
        self.counts = tuple(counts.split())
        """The names of what follows from one."""
        rows: dict[str, tuple[tuple[int, ...], ...]] = {}
        for line in facts:
            name, *values = line.split()
            rows[name] = (*rows.get(name, ()), tuple(map(int, values)))
        self.facts = Facts(rows)

    def __del__(self) -> None:
        """Gives the memory back."""
        self._library.close(self._handle)

    def choice(self) -> dict[str, int]:
        """Returns the configuration that the kernel's own search chooses.

        Where nothing else fits its caches it may be one that ``judge`` refuses.

        Raises:
            ValueError: The kernel's search is not asked here: it is a GPU's.
        """
        numbers = self._library.text(self._library.choice(self._handle)).split()
        if not numbers:
            raise ValueError("choice: only kernels of a CPU are asked for theirs")
        return dict(zip(self.fields, map(int, numbers), strict=True))

    def judge(self, configurations: Sequence[Mapping[str, int]]) -> list[Judged]:
        """Asks about configurations.

        Args:
            configurations: A number for each field; others are not read.

        Raises:
            ValueError: A field is missing.
        """
        if missing := {f for c in configurations for f in self.fields if f not in c}:
            raise ValueError(f"configuration: {', '.join(sorted(missing))} are missing")
        rows = [[c[field] for field in self.fields] for c in configurations]
        values = np.array(rows, np.int64).reshape(len(rows), len(self.fields))
        texts = np.zeros(len(rows), np.int64)
        counts: npt.NDArray[np.float64] = np.zeros((len(rows), len(self.counts)))
        pointers = (texts.ctypes.data, counts.ctypes.data)
        self._library.judge(self._handle, values.ctypes.data, len(rows), *pointers)
        return [
            Judged(self._library.text(int(text)), {})
            if text
            else Judged(None, dict(zip(self.counts, map(float, row), strict=True)))
            for text, row in zip(texts, counts, strict=True)
        ]


@functools.cache
def rules() -> Rules:
    """Returns the library, built now if it is missing.

    Raises:
        LibraryError: It cannot be built; see ``maxconv.library_path``.
    """
    return Rules(rules_file())
