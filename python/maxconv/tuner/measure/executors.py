"""Where candidates are measured: on this machine, or where an address says."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

__all__ = ["SCHEMES", "DaskExecutor", "executor_of"]

#: What an address may begin with.
SCHEMES = ("dask://",)


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
    distributed = _distributed()
    at = address.removeprefix(scheme)
    return lambda: DaskExecutor(distributed, at)


class DaskExecutor(Executor):
    """One worker of a Dask cluster: what is compared must run on one machine.

    Args:
        distributed: The package of that name.
        address: ``HOST:PORT`` of the scheduler.

    Raises:
        ValueError: No scheduler answers there, or it has no workers.
    """

    def __init__(self, distributed: Any, address: str) -> None:
        try:
            self._client = distributed.Client(f"tcp://{address}", timeout="20s")
        except OSError as error:
            raise ValueError(f"executor: no Dask scheduler answers at {address}") from error
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        # A worker keeps its name when its process is replaced, but not its address.
        names = sorted(worker["name"] for worker in workers)
        if not names:
            self._client.close()
            raise ValueError(f"executor: the Dask scheduler at {address} has no workers")
        self._executor: Executor = self._client.get_executor(workers=names[:1], retries=0)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See ``concurrent.futures.Executor``."""
        return self._executor.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See ``concurrent.futures.Executor``; Dask cancels what runs unless it is waited for."""
        self._executor.shutdown(wait and not cancel_futures)
        self._client.close()


def _distributed() -> Any:
    try:
        return importlib.import_module("distributed")
    except ModuleNotFoundError as error:
        raise ValueError(
            "executor: dask:// needs the package distributed; pip install distributed installs it"
        ) from error
