"""Whole networks: a PyTorch model as it is, compiled by torch, and converted by maxconv.

A network is a name in ``NETWORKS`` with what makes its model and its input; every other step is the
same for all of them, and their figures stand under ``networks`` in the record.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import maxconv.torch as mt
from maxconv._progress import progress

from .cpu.peers_torch import session
from .device import DEVICES
from .entrant import BARE, MAXCONV, Entrant, Float32, HostRun, Key
from .environment import child_environment, usable_threads
from .gpu.clock import Cuda, LaunchRun
from .measure import measure_entrants
from .record import Network
from .resnet import resnet50
from .timing import Protocol

__all__ = ["NETWORKS", "first_call_here", "measure_networks"]

#: As ``device.TOLERANCE``; the roundings of some fifty layers add up.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2.0**-3, "float16": 2.0**-6}


@dataclass(frozen=True)
class _Source:
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of the input, ``[N, C, *spatial]``."""


#: The networks by name.
NETWORKS: Mapping[str, _Source] = {"resnet50": _Source(resnet50, (1, 3, 224, 224))}


@dataclass(frozen=True)
class _Forward(HostRun):
    """A forward pass on the CPU."""

    function: Callable[[], Tensor]

    def __call__(self) -> list[Tensor]:
        return [self.function()]

    def outputs(self) -> list[Float32]:
        return [self.function().float().numpy()]


def measure_networks(
    names: Sequence[str],
    device: str,
    dtype: str,
    protocol: Protocol,
    contenders: Collection[str],
) -> list[Network]:
    """Measures networks, all contenders of each in turns.

    Args:
        names: Of ``NETWORKS``.
        device: ``cpu`` or ``gpu``.
        dtype: Of weights and activations.
        protocol: How often and how long.
        contenders: The names of those that take part: maxconv, torch and torch.compile can.

    Raises:
        Mismatch: maxconv's or torch's output differs from that of torch in float32.
    """
    with session(usable_threads()):
        return [_measure(name, device, dtype, protocol, contenders) for name in names]


def _measure(
    name: str, device: str, dtype: str, protocol: Protocol, contenders: Collection[str]
) -> Network:
    source = NETWORKS[name]
    model: Any = source.model()
    x = torch.randn(source.shape, generator=torch.Generator().manual_seed(0))
    expected: Any = model(x)
    place = "cuda" if device == DEVICES["gpu"].name else "cpu"
    kind = getattr(torch, dtype)
    model = model.to(place, kind, memory_format=torch.channels_last)
    x = x.to(place, kind).to(memory_format=torch.channels_last)
    expected = expected.to(place) if place == "cuda" else expected.numpy()

    def compiled() -> Callable[[Tensor], Tensor]:
        from torch._inductor import config

        torch._dynamo.reset()
        with config.patch(freezing=True):
            fast: Callable[[Tensor], Tensor] = torch.compile(model)
            fast(x)
        return fast

    makers: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        MAXCONV: lambda: mt.convert(model)[0],
        "torch": lambda: model,
        "torch.compile": compiled,
    }
    entrants: dict[Key, Entrant] = {}
    missing: dict[Key, str] = {}
    for contender, make in makers.items():
        if contender not in contenders:
            continue
        with progress(f"preparing {name}: {contender}"):
            try:
                function = make()
                entrants[Key(contender)] = Entrant(call=_run(function, x, place))
            # A compiler raises what it likes; the others are still worth timing.
            except Exception as error:
                missing[Key(contender)] = " ".join(str(error).split())[:400]
    with progress(f"timing {name}"):
        measurements = measure_entrants(
            name, entrants, {BARE: expected}, lambda _: TOLERANCE[dtype], protocol, missing
        )
    first: dict[str, float] = {}
    if MAXCONV in contenders and place == "cpu":
        with progress(f"timing the first call of {name}, in new processes"):
            first = _first_calls(name)
    return Network(name, source.shape[0], measurements, first)


def _run(function: Callable[[Tensor], Tensor], x: Tensor, place: str) -> Any:
    function(x)
    if place == "cuda":
        return LaunchRun(Cuda(), lambda _: function(x), 1, convolutions=1)
    return _Forward(lambda: function(x))


def _first_calls(name: str) -> dict[str, float]:
    """Returns the seconds of the first call with nothing compiled, and with all of it.

    Raises:
        RuntimeError: A child process failed; the message ends with what it wrote.
    """
    seconds = {}
    with tempfile.TemporaryDirectory() as home:
        environment = child_environment() | {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache"}
        environment.pop("MAXCONV_CACHE_DIR", None)
        for state in ("cold", "warm"):
            finished = subprocess.run(
                [sys.executable, "-m", "maxconv.bench.child", "first-call", name],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            if finished.returncode:
                raise RuntimeError(f"{name}: the first call failed: {finished.stderr[-2000:]}")
            seconds[state] = float(finished.stdout.split()[-1])
    return seconds


def first_call_here(name: str) -> float:
    """Returns the seconds of a converted network's first call in this process, on the CPU."""
    source = NETWORKS[name]
    with torch.inference_mode():
        converted, _ = mt.convert(source.model())
        x = torch.randn(source.shape)
        start = time.perf_counter()
        converted(x)
        return time.perf_counter() - start
