"""Where candidates are measured: processes and Dask workers, which may end at any time."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from tests.fake_measurer import DEADLY, deadly_cuts

from maxconv._problems import parse_problem
from maxconv.tuner.measure import CpuMeasurer, Protocol, cpu, executor_of, executors
from maxconv.tuner.measure.cpu import Worker, WorkerError
from maxconv.tuner.search import RandomSearch
from maxconv.tuner.search.random import RandomSettings
from maxconv.tuner.session import tune
from maxconv.tuner.solver import Solver
from maxconv.tuner.space import Space, configuration, open_space

QUICK = Protocol(rounds=2, burst_s=1e-6, confirming=3)


@pytest.fixture(scope="module")
def space() -> Space:
    return open_space(parse_problem("1x12x13x24:40x3x3", padding=1), "cpu", units=1)


def cluster() -> Any:
    """Two workers of a local Dask cluster."""
    distributed = importlib.import_module("distributed")
    return distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)


def address_of(made: Any) -> str:
    return str(made.scheduler_address).replace("tcp://", "dask://")


@pytest.mark.extended
def test_a_dask_cluster_of_two_workers_measures(space: Space) -> None:
    drawn = [configuration(space, v) for v in Solver(space.model, 1).samples(8)]
    with cluster() as made:
        measurer = CpuMeasurer(space, QUICK, executor_of(address_of(made)))
        choice = measurer.choice()
        outcomes = measurer.measure(drawn, choice)
        assert [outcome.error for outcome in outcomes] == [None] * 8
        measurer.close()


@pytest.fixture
def fatal(space: Space, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """A configuration of the first round that ends the process that runs it: its key."""
    candidate = RandomSearch(space, 3, RandomSettings(4)).propose([])[2]
    monkeypatch.setenv(DEADLY, json.dumps(configuration(space, candidate.values)))
    monkeypatch.setattr(cpu, "measure_cuts", deadly_cuts)
    return candidate.key


def check_session(
    space: Space, make: Callable[[], Executor] | None, fatal: tuple[int, ...]
) -> None:
    """Searches; the configuration is a failed trial, and all others are measured."""
    measurer = CpuMeasurer(space, QUICK, make)
    try:
        search = RandomSearch(space, 3, RandomSettings(4))
        result = tune(space, search, measurer, budget=8)
    finally:
        measurer.close()
    assert len(result.trials) >= 8
    failed = [trial for trial in result.trials if trial.seconds is None]
    assert [trial.candidate.key for trial in failed] == [fatal]
    assert failed[0].error == "crashed: its process ended"
    assert result.confirmation is not None


def test_a_process_that_crashes_makes_a_failed_trial(space: Space, fatal: tuple[int, ...]) -> None:
    check_session(space, None, fatal)


@pytest.mark.extended
def test_a_dask_worker_that_crashes_makes_a_failed_trial(
    space: Space, fatal: tuple[int, ...]
) -> None:
    with cluster() as made:
        check_session(space, executor_of(address_of(made)), fatal)


class Killed(Exception):  # as Dask's
    """What Dask says where a worker ended."""


class FakeDask:
    """A cluster of two workers that run work at once.

    For ``len`` Dask tells that a worker ended, for ``sum`` it does not, and ``max`` it forgets.
    """

    KilledWorker = Killed

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.connections = 0
        self.looks = 0
        self._workers: list[str] = []

    def Client(self, address: str, timeout: str) -> FakeDask:  # as Dask's
        if self.connections == 3:
            raise OSError("it has gone")
        self.connections += 1
        self.looks = 0
        return self

    def scheduler_info(self, n_workers: int) -> dict[str, Any]:
        # After a worker has ended, the other one is there alone for a while.
        self.looks += 1
        names = ["a", "b"] if self.connections == 1 or self.looks > 2 else ["b"]
        return {"workers": {f"tcp://{name}:{self.connections}": {"name": name} for name in names}}

    def get_executor(self, workers: list[str], retries: int, pure: bool) -> FakeDask:
        assert (retries, pure) == (0, False)
        self._workers = workers
        return self

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.used.update(self._workers)
        if fn is len:
            future.set_exception(Killed("it died"))
        elif fn is max:
            future.cancel()
            future.set_running_or_notify_cancel()
        elif fn is sum:
            # The worker ends, and another process takes its name.
            self.connections += 10
        else:
            try:
                future.set_result(fn(*args))
            except TypeError as error:
                future.set_exception(error)
        return future

    def shutdown(self, wait: bool) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_dask_worker_that_ends_is_told_and_the_same_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeDask()
    monkeypatch.setattr(executors, "_distributed", lambda: fake)
    monkeypatch.setattr(executors, "_POLL_S", 0.01)
    worker = Worker(executor_of("dask://127.0.0.1:8786"))
    assert worker.run(60, abs, -3) == 3
    with pytest.raises(WorkerError, match="crashed: its process ended"):
        worker.run(60, len, "died")
    # An error of the work itself is none of the worker's.
    with pytest.raises(TypeError, match="bad operand type"):
        worker.run(60, abs, "x")
    # The scheduler cancels what it has when it ends.
    with pytest.raises(WorkerError, match="crashed: its process ended"):
        worker.run(60, max, 1, 2)
    assert worker.run(60, abs, -4) == 4
    assert fake.used == {f"tcp://a:{number}" for number in (1, 2, 3)}
    with pytest.raises(WorkerError, match="crashed: its process ended"):
        worker.run(60, sum, [1])
    fake.connections = 3
    with pytest.raises(ValueError, match="executor: no Dask scheduler answers at "):
        worker.run(60, os.getpid)


def test_a_dask_worker_that_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_POLL_S", 0.01)
    monkeypatch.setattr(executors, "_RETURNS_S", 0.05)
    # Another one of the same machine takes its place.
    made = executors.DaskExecutor(FakeDask(), "h:1", ("c", "tcp://a:7"))
    assert made.worker == ("a", "tcp://a:1")
    with pytest.raises(ValueError, match="executor: the worker 'c' of the Dask scheduler at h:1"):
        executors.DaskExecutor(FakeDask(), "h:1", ("c", "tcp://elsewhere:7"))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:8786", "dask://", "127.0.0.1"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match="is no address; dask://HOST:PORT of a scheduler"):
        executor_of(address)
