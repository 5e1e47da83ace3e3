"""Measures configurations on a CPU, in processes that may crash or hang.

Work is handed out through the interface of ``concurrent.futures``. One process measures at a time:
two would take each other's cores.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeoutError
from dataclasses import replace
from typing import Any

from ..space import Space
from .base import Configuration, Measurer, Outcome, Protocol
from .confirm import confirm_cut
from .cuts import CutRequest, dispatched_kernel, measure_cuts

__all__ = ["CpuMeasurer", "Worker", "WorkerError"]


_BUILD_S = 900.0
"""Seconds that building the library may take."""


class Worker:
    """A process that is started when it is needed, and killed when it hangs.

    Args:
        make: Returns an executor; by default one of a single process of its own.
    """

    def __init__(self, make: Callable[[], Executor] | None = None) -> None:
        self._make = make or _one_process
        self._executor: Executor | None = None
        self._process = 0

    def run(self, seconds: float, work: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function there.

        Args:
            seconds: How long it may take.
            work: The function, which a process can import.
            arguments: Its arguments, which can be pickled.

        Raises:
            WorkerError: The process crashed or hung; the next call starts another one.
        """
        if self._executor is None:
            self._executor = self._make()
            self._process = self._executor.submit(os.getpid).result()
        future = self._executor.submit(work, *arguments)
        try:
            return future.result(seconds)
        except BrokenExecutor as error:
            # What it still has is lost, and not waited for.
            executor, self._executor = self._executor, None
            executor.shutdown(wait=False)
            raise WorkerError("crashed: its process ended") from error
        except FuturesTimeoutError as error:
            future.cancel()
            self.kill()
            raise WorkerError(f"hung: its process took more than {seconds:.0f} s") from error

    def kill(self) -> None:
        """Kills the process."""
        executor, self._executor = self._executor, None
        if executor is None:
            return
        # One of another machine is not ours to kill.
        if isinstance(executor, ProcessPoolExecutor):
            os.kill(self._process, signal.SIGKILL)
        executor.shutdown(wait=False)

    def close(self) -> None:
        """Lets the process end."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)


class WorkerError(RuntimeError):
    """A process crashed or hung."""


class CpuMeasurer(Measurer):
    """Measures configurations of a space of a CPU's kernel.

    Args:
        space: The space.
        protocol: How candidates are timed.
        make: As ``Worker`` takes it.

    Raises:
        ValueError: The space is not one of a CPU, or has a residual, which is not measured.
    """

    def __init__(
        self,
        space: Space,
        protocol: Protocol | None = None,
        make: Callable[[], Executor] | None = None,
    ) -> None:
        if space.target != "cpu":
            raise ValueError(f"target: {space.target!r} is not measured here; 'cpu' is")
        if space.residual:
            raise ValueError("residual: spaces without one are measured on a CPU")
        self._protocol = protocol or Protocol()
        self._space = space
        self._request = CutRequest(
            space.problem,
            space.kernel.name.lower(),
            space.dtype,
            space.out_dtype,
            space.units,
            space.judge.fields,
            self._protocol,
        )
        self._worker = Worker(make)

    def measure(
        self, configurations: Sequence[Configuration], incumbent: Configuration | None = None
    ) -> list[Outcome]:
        """See ``Measurer``.

        Where the process crashes or hangs, halves are measured apart, until the culprit is alone.
        """
        if not configurations:
            return []
        plain = [dict(configuration) for configuration in configurations]
        beside = None if incumbent is None else dict(incumbent)
        seconds = self._protocol.timeout_s * len(plain)
        try:
            found: list[Outcome] = self._worker.run(
                seconds, measure_cuts, self._request, plain, beside
            )
        except WorkerError as error:
            if len(plain) == 1:
                return [Outcome(None, error=str(error))]
            half = len(plain) // 2
            return [*self.measure(plain[:half], beside), *self.measure(plain[half:], beside)]
        return found

    def choice(self) -> Configuration:
        """See ``Measurer``."""
        # What measures later is built first, which takes longer than measuring may.
        self.dispatched()
        return self._space.judge.choice()

    def dispatched(self) -> str:
        """See ``Measurer``."""
        found: str = self._worker.run(_BUILD_S, dispatched_kernel, self._request)
        return found

    def confirm(self, configuration: Configuration) -> Outcome:
        """See ``Measurer``."""
        protocol = replace(self._protocol, rounds=self._protocol.confirming)
        request = replace(self._request, protocol=protocol)
        try:
            found: Outcome = self._worker.run(
                *(_BUILD_S, confirm_cut, request, dict(configuration)),
                *(self.dispatched(), self._protocol.timeout_s * 4),
            )
        except WorkerError as error:
            return Outcome(None, error=str(error))
        return found

    def close(self) -> None:
        """See ``Measurer``."""
        self._worker.close()


def _one_process() -> ProcessPoolExecutor:
    """Returns an executor of one process, which shares nothing with this one."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
