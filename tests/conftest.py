"""Fixtures that several test modules share."""

from __future__ import annotations

import gc
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from max.engine import InferenceSession
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

#: Files whose tests run in one process: they share the GPU, or what is compiled for them.
TOGETHER = (
    ("tests/gpu/",),
    ("tests/emulated/test_compiled",),
    ("tests/host/test_inspect", "tests/host/test_sm90.", "tests/host/test_gpu_direct"),
    (
        "tests/interop/test_torch",
        "tests/interop/test_fusion",
        "tests/interop/test_graph_ops",
        "tests/interop/test_graph_arguments",
        "tests/interop/test_integers",
        "tests/interop/test_interleave",
        "tests/interop/test_norm",
        "tests/interop/test_pooling",
        "tests/interop/test_quantize",
        "tests/interop/test_transpose",
        "tests/interop/test_upsample",
    ),
    ("tests/interop/test_override", "tests/interop/test_max_models"),
)

#: Files that compile for longer than half a minute, the longest first: two processes end together
#: if what is left at the end is short.
LONGEST = (
    "tests/host/test_gpu_programs",
    "tests/host/test_bench_gpu",
    "tests/interop/test_torch",
    "tests/interop/test_override",
    "tests/interop/test_max_models",
    "tests/interop/test_graphs",
    "tests/interop/test_max_torch",
    "tests/interop/test_bench_run",
    "tests/emulated/test_sm100",
    "tests/emulated/test_compiled",
    "tests/host/test_docs",
    "tests/host/test_gpu_graphs",
    "tests/host/test_inspect",
    "tests/host/test_sm",
    "tests/emulated/test_diagonal",
    "tests/host/test_explain",
    "tests/interop/test_nn",
    "tests/host/test_kernels",
)


# What somebody tuned on this machine is no part of what is tested.
os.environ["MAXCONV_TUNED"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Runs the tests in two processes, unless the command line says how many.

    ``-n 0`` runs them in this one. So does a machine without pytest-xdist: one that has a GPU and
    what its tests need.
    """
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput"):
        return
    option = config.option
    if option.dist == "no" and option.numprocesses != 0 and not option.usepdb:
        option.numprocesses = option.numprocesses or 2
        option.dist = "loadfile"
    option.loadscopereorder = False
    if option.numprocesses:
        _allocate_by_jemalloc()


def _allocate_by_jemalloc() -> None:
    """Has processes from here on use the allocator that comes with MAX, with huge pages.

    Compiling a graph allocates so much that it takes a fifth less time with it, and with huge pages
    an eighth less again.
    """
    modular = importlib.util.find_spec("modular")
    for folder in (modular.submodule_search_locations or []) if modular else []:
        library = Path(folder, "lib", "libjemalloc_preload.so")
        if library.is_file():
            os.environ.setdefault("LD_PRELOAD", str(library))
            os.environ.setdefault("MALLOC_CONF", "thp:always,metadata_thp:always")


#: The cores that the tests were given, before a process kept to one of them.
CORES = pytest.StashKey[frozenset[int]]()


def pytest_configure(config: pytest.Config) -> None:
    """Gives each of several processes a core of its own."""
    pins = hasattr(os, "sched_setaffinity")
    config.stash[CORES] = frozenset(os.sched_getaffinity(0) if pins else ())
    if pins and hasattr(config, "workerinput"):
        _keep_to_one_core(int(config.workerinput["workerid"].removeprefix("gw")))


def _keep_to_one_core(worker: int) -> None:
    """Keeps this process and its children to a core, before MAX starts any thread.

    With two threads MAX takes half as much processor time again to compile a large graph: they
    wait for each other's locks. What several threads compute, ``test_threads`` tests.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[worker % len(cores)]})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Deals out files, those that belong together as if they were one."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadFilesTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            together = (files[0] for files in TOGETHER if nodeid.startswith(files))
            return next(together, "") or super()._split_scope(nodeid)

    return LoadFilesTogether(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves extended tests out, and begins with what takes longest where two processes share."""
    if "extended" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("extended")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("extended")]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _place(item.nodeid))


def _place(nodeid: str) -> int:
    places = (place for place, file in enumerate(LONGEST) if nodeid.startswith(file))
    return next(places, len(LONGEST))


@pytest.fixture(scope="module", autouse=True)
def _younger_objects_are_collected() -> None:
    """Spares the garbage collector what was there before a file's tests began.

    Thousands of tests, libraries and compiled graphs live until the end; to look through all of
    them takes seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def session() -> InferenceSession:
    """One MAX session on the CPU; starting one takes a while."""
    from max.driver import CPU
    from max.engine import InferenceSession

    return InferenceSession(devices=[CPU()])


@pytest.fixture
def cores(pytestconfig: pytest.Config) -> frozenset[int]:
    """The cores that the tests were given; none where a process cannot keep to some."""
    return pytestconfig.stash[CORES]


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with the same numbers in every run."""
    return np.random.default_rng(20260727)
