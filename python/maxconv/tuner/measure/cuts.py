"""Runs the CPU's implicit GEMM by configurations, in the process that calls."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..._fields import Layout, encode_scalars
from ..._library_files import Family, cuts_file
from ..._native import Call, Host, Library, Prepared, host
from ..._openmp import installed_parallel
from ..._problem import ConvProblem
from ..._tuned import use_no_table
from .base import DISPATCHED, Configuration, Outcome, Protocol, summarize
from .oracle import operands

__all__ = ["CutRequest", "choose_cut", "dispatched_kernel", "measure_cuts"]


@dataclass(frozen=True)
class CutRequest:
    """What is measured: it travels to other processes, and other machines."""

    problem: ConvProblem
    dtype: str
    out_dtype: str
    threads: int
    fields: tuple[str, ...]
    """The names of a configuration's numbers, in their order."""
    protocol: Protocol
    seed: int = 0
    """Of the operands' values."""


class _Cuts(Library):
    """The library that runs cuts."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.prepare = self.function("prepare", 5)
        self.release = self.function("release", 1, None)
        self.choice = self.function("choice", 3, None)
        self.run = self.function("run", 7)


@functools.cache
def _library(dtype: str, out_dtype: str) -> _Cuts:
    return _Cuts(cuts_file(dtype, out_dtype))


class _Prepared:
    """A call that runs by any configuration."""

    def __init__(self, request: CutRequest) -> None:
        self._library = _library(request.dtype, request.out_dtype)
        self._request = request
        self._parallel = installed_parallel() if request.threads > 1 else 0
        self.operands = operands(request.problem, request.dtype, request.out_dtype, request.seed)
        self._call = Call.of(
            tuple(map(int, request.problem.input_shape)),
            tuple(map(int, request.problem.output_shape)),
            self.operands.filter.size,
            request.problem.geometry(filter_layout=Layout.PACKED),
            encode_scalars(),
        )
        self._handle = self._library.made(self._library.prepare, *self._call.pointers())

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._library.release(self._handle)

    @functools.cached_property
    def _dispatched(self) -> Prepared:
        """The call as PyTorch makes it, without anything tuned."""
        use_no_table()
        return self._host.prepare(self._call)

    @property
    def _host(self) -> Host:
        """All kernels; a call without a bias asks for none of another type."""
        return host(Family(self._request.dtype, "float32", self._request.out_dtype, scaled=False))

    def dispatched(self) -> str:
        """Returns the name of the kernel that dispatch chooses."""
        call = self._dispatched
        return self._host.explain(call, self._request.threads)[0]

    def choice(self) -> dict[str, int]:
        """Returns what the kernel's own search chooses."""
        values = np.zeros(len(self._request.fields), np.int64)
        self._library.choice(self._handle, self._request.threads, values.ctypes.data)
        return dict(zip(self._request.fields, map(int, values), strict=True))

    def run(self, configuration: Configuration, calls: int = 1) -> float:
        """Convolves some times; returns the seconds of a call.

        Raises:
            ValueError: The kernel cannot run so.
        """
        made = self.operands
        if configuration == DISPATCHED:
            addresses = (made.activation.ctypes.data, made.filter.ctypes.data, 0, 0, 0)
            threads = (self._request.threads, self._parallel)
            call, output = self._dispatched, made.output.ctypes.data
            start = time.perf_counter()
            for _ in range(calls):
                call.run(*addresses, output, *threads)
            return (time.perf_counter() - start) / calls
        values = np.array([configuration[name] for name in self._request.fields], np.int64)
        arguments = (
            *(self._handle, values.ctypes.data, made.activation.ctypes.data),
            *(made.filter.ctypes.data, made.output.ctypes.data),
            *(self._request.threads, self._parallel),
        )
        run = self._library.run
        start = time.perf_counter()
        for _ in range(calls):
            if failed := run(*arguments):
                raise self._library.error(failed)
        return (time.perf_counter() - start) / calls


def choose_cut(request: CutRequest) -> dict[str, int]:
    """Returns the configuration that the kernel's own search chooses."""
    return _Prepared(request).choice()


def dispatched_kernel(request: CutRequest) -> str:
    """Returns the name of the kernel that dispatch chooses."""
    return _Prepared(request).dispatched()


def measure_cuts(
    request: CutRequest,
    configurations: Sequence[Configuration],
    incumbent: Configuration | None = None,
) -> list[Outcome]:
    """Measures configurations in this process: see ``Measurer.measure``.

    Raises:
        ValueError: The incumbent is wrong, or there are no threads as asked for.
        LibraryError: The library cannot be built.
    """
    prepared = _Prepared(request)
    # Kernels that dispatch may choose transform the operands, so that their sums are rounded.
    if incumbent and (error := _wrong(prepared, incumbent)):
        raise ValueError(f"incumbent: {error}")
    errors = [_wrong(prepared, configuration) for configuration in configurations]
    right = [place for place, error in enumerate(errors) if error is None]
    bursts: dict[int, list[float]] = {place: [] for place in right}
    beside: dict[int, list[float]] = {place: [] for place in right}
    protocol = request.protocol
    calls = {place: _calls(prepared, configurations[place], protocol) for place in right}
    own = 0 if incumbent is None else _calls(prepared, incumbent, protocol)
    running = right
    for _ in range(protocol.rounds):
        for place in running:
            if incumbent is not None:
                beside[place].append(prepared.run(incumbent, own))
            bursts[place].append(prepared.run(configurations[place], calls[place]))
        running = [
            place
            for place in running
            if incumbent is None
            or len(bursts[place]) < 2
            or min(bursts[place]) < protocol.hopeless * min(beside[place])
        ]
    return [
        summarize(bursts[place], beside[place]) if error is None else Outcome(None, error=error)
        for place, error in enumerate(errors)
    ]


def _wrong(prepared: _Prepared, configuration: Configuration) -> str | None:
    """Runs a configuration once; says what is wrong, or returns None."""
    prepared.operands.poison()
    try:
        prepared.run(configuration)
    except ValueError as error:
        return str(error)
    return prepared.operands.wrong()


def _calls(prepared: _Prepared, configuration: Configuration, protocol: Protocol) -> int:
    """Returns how many calls a burst has."""
    return 1 + int(protocol.burst_s / max(prepared.run(configuration), 1e-7))
