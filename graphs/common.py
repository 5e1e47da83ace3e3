"""What programs of this folder share: their options, timed runs, and the time by operation."""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from max.driver import CPU, Accelerator, Buffer, Device, accelerator_count
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph

DTYPES = ("float32", "bfloat16", "float16")

Floats = npt.NDArray[np.float32]

#: Milliseconds of each call, by the operation's name.
Profile = Mapping[str, list[float]]

#: Lines of MAX's log, each with the second in which it came.
Log = list[tuple[float, str]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how a graph runs."""
    parser.add_argument("--device", choices=("cpu", "gpu"), help="a GPU if there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--replay", action="store_true", help="capture on the GPU, and replay")
    parser.add_argument("--profile", action="store_true", help="print the time by operation")


def settle_options(args: argparse.Namespace) -> None:
    """Fills in what was not given.

    Raises:
        ValueError: This machine has no GPU, or a CPU is to replay.
    """
    args.device = args.device or ("gpu" if accelerator_count() else "cpu")
    if args.device == "gpu" and not accelerator_count():
        raise ValueError("device: gpu, but MAX finds none here; cpu is allowed")
    if args.replay and args.device == "cpu":
        raise ValueError("replay: the device is cpu; only what a GPU is given can be replayed")
    args.dtype = args.dtype or ("bfloat16" if args.device == "gpu" else "float32")


def device_ref(args: argparse.Namespace) -> DeviceRef:
    """Returns where a graph is to be built for."""
    return DeviceRef.GPU() if args.device == "gpu" else DeviceRef.CPU()


def run_graph(graph: Graph, x: Floats, args: argparse.Namespace) -> tuple[Floats, float]:
    """Compiles a graph of one input and one output, runs it, and prints its profile if asked to.

    Args:
        graph: The graph.
        x: Its input.
        args: The options, settled.

    Returns:
        The output, and the median time of a call in milliseconds.
    """
    device = Accelerator() if args.device == "gpu" else CPU()
    with telling(f"compiling for {args.device}, {args.dtype}"):
        model = InferenceSession(devices=[device]).load(graph)
    run = make_run(model, Buffer.from_numpy(x).to(device), device, args.replay)
    output = run().to(CPU()).to_numpy().copy()
    milliseconds = median_ms(run)
    if args.profile and args.device == "gpu":
        print_profile(by_kernel(run))
    elif args.profile:
        # Another model: this one does not log.
        log_each()
        with telling("compiling again, with a log"):
            model = InferenceSession(devices=[device]).load(graph)
        print_profile(by_operation(make_run(model, Buffer.from_numpy(x), device, False)))
    return output, milliseconds


@contextmanager
def telling(what: str, every_s: float = 5.0) -> Iterator[None]:
    """Prints every few seconds that the body still runs, and in the end how long it took."""
    start, over = time.perf_counter(), threading.Event()

    def tell() -> None:
        while not over.wait(every_s):
            print(f"{what}: {time.perf_counter() - start:.0f} s so far", flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    print(f"{what}: {time.perf_counter() - start:.1f} s", flush=True)


def make_run(model: Model, x: Buffer, device: Device, replay: bool) -> Callable[[], Buffer]:
    """Returns a function that runs a model of one input and one output, and waits for it.

    Args:
        model: The compiled model.
        x: Its input, on the device.
        device: Where it runs.
        replay: Whether what one execution launches on a GPU is captured, and replayed in each call.
    """
    captured = model.capture(0, x) if replay else []

    def run() -> Buffer:
        if replay:
            model.replay(0, x)
        (output,) = captured or model.execute(x)
        device.synchronize()
        assert isinstance(output, Buffer)
        return output

    return run


def median_ms(run: Callable[[], Buffer], calls: int = 10) -> float:
    """Returns the median time of a call, in milliseconds."""
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def by_kernel(run: Callable[[], Buffer]) -> Profile:
    """Returns the time of one call by GPU kernel: PyTorch's profiler sees MAX's kernels too."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or []:
        if event.device_time > 0:
            times[event.name].append(event.device_time / 1e3)
    return times


def by_operation(run: Callable[[], Buffer]) -> Profile:
    """Returns the time of one call by operation on a CPU, of a model compiled after ``log_each``.

    MAX then writes a line to stderr when an operation begins and one when it ends.
    """
    with _stderr():
        run()  # The first call starts threads and allocates.
    with _stderr() as log:
        run()
    times: dict[str, list[float]] = defaultdict(list)
    depth, begin = 0, 0.0
    for second, line in log:
        event, _, name = line.removeprefix("[OP] ").partition(" ")
        # An operation may be made of others, which are lines between its own.
        if event == "LAUNCH":
            begin = begin if depth else second
            depth += 1
        elif event == "COMPLETE":
            depth -= 1
            if not depth:
                times[name.partition(" [id=")[0]].append(1e3 * (second - begin))
    return times


def log_each() -> None:
    """Has models that are compiled from now on log each operation, on stderr."""
    InferenceSession.debug.op_log_level = "INFO"


@contextmanager
def _stderr() -> Iterator[Log]:
    """Collects what the process writes to stderr, also from beneath Python."""
    log: Log = []
    source, sink = os.pipe()
    kept = os.dup(2)

    def read() -> None:
        with os.fdopen(source) as lines:
            log.extend((time.perf_counter(), line.strip()) for line in lines)

    reader = threading.Thread(target=read)
    reader.start()
    os.dup2(sink, 2)
    os.close(sink)
    try:
        yield log
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        reader.join()


def print_profile(profile: Profile, rows: int = 20) -> None:
    """Prints a profile as a table, what takes longest first."""
    calls = sum(len(times) for times in profile.values())
    total = sum(sum(times) for times in profile.values())
    print(f"{total:.2f} ms in {calls} calls of {len(profile)} operations:")
    for name, times in sorted(profile.items(), key=lambda row: -sum(row[1]))[:rows]:
        print(f"{sum(times):9.3f} ms {sum(times) / total:6.1%} {len(times):5d} x {name[:90]}")
