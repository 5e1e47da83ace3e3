"""Runs kernels of the CPU by configurations, in the process that calls."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..._fields import Kernel, Layout, encode_scalars
from ..._library_files import Family
from ..._native import Call, Prepared, host
from ..._openmp import installed_parallel
from ..._problem import ConvProblem
from ..._tuned import use_no_table
from .base import DISPATCHED, Configuration, Outcome, Protocol, summarize
from .clock import Clock
from .oracle import Operands, operands

__all__ = ["CutRequest", "PreparedCall", "call_of", "dispatched_kernel", "measure_cuts"]


@dataclass(frozen=True)
class CutRequest:
    """What is measured: it travels to other processes, and other machines."""

    problem: ConvProblem
    kernel: str
    """Whose configurations they are, by name."""
    dtype: str
    out_dtype: str
    threads: int
    fields: tuple[str, ...]
    """The names of a configuration's numbers, in their order."""
    protocol: Protocol
    seed: int = 0
    """Of the operands' values."""


class PreparedCall:
    """A call of PyTorch's library that runs by any configuration, or as dispatch chooses.

    Raises:
        LibraryError: The library cannot be built.
        ValueError: The kernels of this process use a tuned table already.
    """

    def __init__(self, request: CutRequest) -> None:
        self._request = request
        # Before the library is there, which would use one: dispatch's choice is without it.
        use_no_table()
        # A call without a bias asks for none of another type.
        family = Family(request.dtype, "float32", request.out_dtype, scaled=False)
        self._host = host(family, whole=True)
        self._parallel = installed_parallel() if request.threads > 1 else 0
        self.operands = operands(request.problem, request.dtype, request.out_dtype, request.seed)
        self._named = self._prepared(Kernel[request.kernel.upper()])
        self._cut: tuple[int, ...] = ()
        self._arguments = self.operands.addresses(request.threads, self._parallel)
        self._clocks = {which: Clock(request.threads) for which in (False, True)}

    @functools.cached_property
    def _dispatched(self) -> Prepared:
        """The call as PyTorch makes it, without anything tuned."""
        return self._prepared(Kernel.AUTO)

    def _prepared(self, kernel: Kernel) -> Prepared:
        return self._host.prepare(call_of(self._request.problem, self.operands, kernel))

    def dispatched(self) -> str:
        """Returns the name of the kernel that dispatch chooses."""
        return self._host.explain(self._dispatched, self._request.threads)[0]

    def run(self, configuration: Configuration, calls: int = 1) -> float:
        """Convolves some times; returns the seconds of a call.

        Raises:
            ValueError: The kernel cannot run so.
        """
        dispatched = configuration == DISPATCHED
        call = self._dispatched if dispatched else self._by_name(configuration)
        run = functools.partial(call.run, *self._arguments)
        return self._clocks[dispatched].seconds(run, calls)

    def _by_name(self, configuration: Configuration) -> Prepared:
        """Returns the call that runs by a configuration."""
        cut = tuple(configuration[name] for name in self._request.fields)
        if cut != self._cut:
            self._host.name(self._named, cut, self._request.threads)
            self._cut = cut
            self._clocks[False] = Clock(self._request.threads)
        return self._named


def call_of(problem: ConvProblem, made: Operands, kernel: Kernel) -> Call:
    """Returns a call that asks for a kernel, or for none.

    Args:
        problem: The convolution; all sizes known.
        made: Its operands.
        kernel: Which; ``AUTO`` leaves the choice to dispatch.
    """
    return Call.of(
        tuple(map(int, problem.input_shape)),
        tuple(map(int, problem.output_shape)),
        made.filter.size,
        problem.geometry(filter_layout=Layout.PACKED, kernel=kernel),
        encode_scalars(output_factor=made.output_factor),
    )


def dispatched_kernel(request: CutRequest) -> str:
    """Returns the name of the kernel that dispatch chooses; builds the library if it is missing."""
    return PreparedCall(request).dispatched()


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
    prepared = PreparedCall(request)
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


def _wrong(prepared: PreparedCall, configuration: Configuration) -> str | None:
    """Runs a configuration once; says what is wrong, or returns None."""
    prepared.operands.poison()
    try:
        prepared.run(configuration)
    except ValueError as error:
        return str(error)
    return prepared.operands.wrong()


def _calls(prepared: PreparedCall, configuration: Configuration, protocol: Protocol) -> int:
    """Returns how many calls a burst has."""
    return 1 + int(protocol.burst_s / max(prepared.run(configuration), 1e-7))
