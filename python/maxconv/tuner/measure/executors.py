"""Where candidates are measured: on this machine, or where an address says."""

from __future__ import annotations

import contextlib
import importlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    InvalidStateError,
)
from typing import Any

__all__ = ["SCHEMES", "DaskExecutor", "executor_of"]

#: What an address may begin with.
SCHEMES = ("dask://",)

_POLL_S = 1.0
"""Between looks at whether a worker is still there."""

_RETURNS_S = 20.0
"""Until a worker that has ended must have been replaced."""


def executor_of(address: str | None) -> Callable[[], Executor] | None:
    """Returns what makes the executor of an address; ``None`` stands for this machine.

    Args:
        address: ``dask://HOST:PORT``, of a Dask scheduler whose workers have maxconv, or ``None``.

    Raises:
        ValueError: The address begins otherwise, nothing is behind that, or Dask's ``distributed``
            is not installed.
    """
    if address is None:
        return None
    scheme = next((scheme for scheme in SCHEMES if address.startswith(scheme)), None)
    if scheme is None or address == scheme:
        raise ValueError(
            f"executor: {address!r} is no address; dask://HOST:PORT of a scheduler is allowed"
        )
    return _Dask(_distributed(), address.removeprefix(scheme))


class _Dask:
    """Makes executors of the same worker, or of its machine, also after it has crashed."""

    def __init__(self, distributed: Any, address: str) -> None:
        self._distributed = distributed
        self._address = address
        self._worker: Any = None

    def __call__(self) -> Executor:
        made = DaskExecutor(self._distributed, self._address, self._worker)
        self._worker = made.worker
        return made


class DaskExecutor(Executor):
    """One worker of a Dask cluster: what is compared must run on one machine.

    What a worker that ends had to do ends with ``BrokenExecutor``, as in a pool of processes. Dask
    itself would keep it for a worker of the same address, which the next process has not.

    Args:
        distributed: The package of that name.
        address: ``HOST:PORT`` of the scheduler.
        before: The worker that had the work before, by name and address; by default the first.

    Raises:
        ValueError: No scheduler answers there, it has no workers, or none of that machine.
    """

    def __init__(
        self, distributed: Any, address: str, before: tuple[Any, str] | None = None
    ) -> None:
        self._killed: type[Exception] = distributed.KilledWorker
        self._closed = threading.Event()
        try:
            self._client = distributed.Client(f"tcp://{address}", timeout="20s")
        except OSError as error:
            raise ValueError(f"executor: no Dask scheduler answers at {address}") from error
        try:
            self.worker = self._found(address, before)
            """Its name and address."""
        except ValueError:
            self._client.close()
            raise
        # Dask would take two equal measurements for one.
        self._executor: Executor = self._client.get_executor(
            workers=[self.worker[1]], retries=0, pure=False
        )

    def _found(self, address: str, before: tuple[Any, str] | None) -> tuple[Any, str]:
        """Returns the name and the address of a worker.

        One that has ended may still be starting anew. If it does not come back, another one of the
        same machine takes its place.
        """
        known = self._workers()
        if before is None:
            if not known:
                raise ValueError(f"executor: the Dask scheduler at {address} has no workers")
            return min(known.items())
        name, place = before
        for _ in range(math.ceil(_RETURNS_S / _POLL_S)):
            if name in known:
                return name, known[name]
            time.sleep(_POLL_S)
            known = self._workers()
        host = place.rpartition(":")[0]
        if beside := {n: at for n, at in known.items() if at.rpartition(":")[0] == host}:
            return min(beside.items())
        raise ValueError(
            f"executor: the worker {name!r} of the Dask scheduler at {address} has ended, was not "
            f"replaced within {_RETURNS_S:.0f} s, and its machine has no other"
        )

    def _workers(self) -> dict[Any, str]:
        """Returns the workers' addresses by name; a name stays when a process is replaced."""
        known = self._client.scheduler_info(n_workers=-1)["workers"]
        return {about["name"]: place for place, about in known.items()}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See ``concurrent.futures.Executor``."""
        inner = self._executor.submit(fn, *args, **kwargs)
        outer: Future[Any] = Future()
        broken = f"the worker {self.worker[0]!r} ended"

        def ended(future: Future[Any]) -> None:
            # What is cancelled though nobody here did it has lost its scheduler.
            error = CancelledError() if future.cancelled() else future.exception()
            if isinstance(error, (self._killed, CancelledError)):
                error = BrokenExecutor(f"{broken}: {error}")
            # It may have been given up meanwhile.
            with contextlib.suppress(InvalidStateError):
                if error is not None:
                    outer.set_exception(error)
                else:
                    outer.set_result(future.result())

        def watch() -> None:
            while not self._closed.wait(_POLL_S) and not outer.done():
                # Without its scheduler, Dask cancels it; a client may be closed meanwhile.
                with contextlib.suppress(OSError, RuntimeError, InvalidStateError):
                    if self.worker[1] not in self._workers().values():
                        outer.set_exception(BrokenExecutor(broken))
                        inner.cancel()

        outer.add_done_callback(lambda future: future.cancelled() and inner.cancel())
        inner.add_done_callback(ended)
        threading.Thread(target=watch, daemon=True).start()
        return outer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See ``concurrent.futures.Executor``; Dask cancels what runs unless it is waited for."""
        self._closed.set()
        self._executor.shutdown(wait and not cancel_futures)
        self._client.close()


def _distributed() -> Any:
    try:
        return importlib.import_module("distributed")
    except ModuleNotFoundError as error:
        raise ValueError(
            "executor: dask:// needs the package distributed; pip install distributed installs it"
        ) from error
