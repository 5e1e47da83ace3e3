"""Measures models: every way of running one is checked, then all are timed in turns."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from maxconv._progress import progress

from ..device import GPU, TOLERANCE
from ..entrant import Mismatch, time_calls
from ..gpu.clock import Cuda, LaunchRun
from ..record import Forward, ModelResult
from ..timing import Burst, Protocol, interleave
from .catalogue import Source, build
from .memory import gauge
from .variants import VARIANTS, Prepared
from .weights import draw, tensors

__all__ = ["YARDSTICK", "Bench", "distance", "measure_models", "measure_starts"]

#: A model amplifies rounding errors, and what eager PyTorch is off by shows how much. Who rounds in
#: other places may be off by this many times as much.
YARDSTICK = 2

#: The same of what rounds to integers, of the largest output: the untrained models of the list lose
#: more of it than trained ones, the 63 convolutions of yolov8n most. What is wrong is off by more
#: than the output is large.
INTEGER_TOLERANCE = 0.8

#: Calls before the last check and before memory is read: ``reduce-overhead`` captures in its
#: second.
_SETTLING = 3

#: Keeps the results so far.
Keep = Callable[[list[ModelResult]], None]


@dataclass(frozen=True)
class Bench:
    """What all models are measured with."""

    device: str
    """``cpu`` or ``gpu``."""
    dtype: str
    protocol: Protocol
    variants: Sequence[str]
    channels_last: bool | None = None
    """The memory format; ``None`` for what users choose. On a GPU and for maxconv that is channels
    last. On a CPU either may be faster for PyTorch, which is timed in both."""

    @property
    def place(self) -> str:
        """The device as torch calls it."""
        return "cuda" if self.device == GPU.name else "cpu"

    def ways(self, model: nn.Module) -> Iterator[tuple[str, bool]]:
        """Yields variants and whether they run channels last, or in a model's only format."""
        two = any(tensor.dim() in _FORMATS for tensor in model.parameters())
        for name in self.variants:
            both = two and self.channels_last is None and self.place == "cpu"
            if both and not VARIANTS[name].ours:
                yield name, False
            yield name, not two or self.channels_last is not False

    def synchronize(self) -> None:
        """Waits until the device has done everything."""
        if self.place == "cuda":
            torch.cuda.synchronize()


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def measure_models(
    sources: Iterable[Source], bench: Bench, batches: Sequence[int], keep: Keep
) -> list[ModelResult]:
    """Measures models one by one.

    Args:
        sources: The models.
        bench: What all are measured with.
        batches: Those that take the place of the list's; empty for the list's.
        keep: Is given the results so far after each one.
    """
    results: list[ModelResult] = []
    for source in sources:
        sizes = batches or source.batches[bench.device]
        try:
            with progress(f"building {source.name}"):
                model = _build(source, bench)
        # Libraries raise what they like; the other models are still worth timing.
        except Exception as error:
            results += [_nothing(source, batch, bench, error) for batch in sizes]
            continue
        for batch in sizes:
            results.append(_measure(source, model, batch, bench))
            keep(results)
    return results


def measure_starts(bench: Bench) -> dict[str, float]:
    """Returns each variant's first call, in seconds, of a model of one convolution.

    This is what a process pays once: imports, libraries that are loaded or compiled. The first
    calls of models that follow are free of it.
    """
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval().to(bench.place, _kind(bench))
    x = torch.ones((1, 3, 8, 8), dtype=_kind(bench), device=bench.place)
    starts = {}
    for name in bench.variants:
        with progress(f"starting {name}"):
            try:
                first, *_ = _first_call(name, copy.deepcopy(model), [x], bench)
            # The models' own measurements say what is wrong.
            except Exception:
                continue
        starts[name] = first
    return starts


def _kind(bench: Bench) -> torch.dtype:
    kind: torch.dtype = getattr(torch, bench.dtype)
    return kind


def _build(source: Source, bench: Bench) -> nn.Module:
    model = build(source)
    draw(model, lambda batch: _inputs(source, batch, bench.place, torch.float32), bench.place)
    return model.to(_kind(bench))


def _inputs(source: Source, batch: int, place: str, kind: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn((batch, *shape), generator=generator).to(kind)
        if isinstance(shape, tuple)
        else torch.tensor(shape)
        for shape in source.inputs
    ]
    return [tensor.to(place) for tensor in drawn]


def _result(source: Source, batch: int, forwards: list[Forward], **found: Any) -> ModelResult:
    shapes = [shape for shape in source.inputs if isinstance(shape, tuple)]
    return ModelResult(
        name=source.name,
        library=source.library,
        batch=batch,
        inputs=", ".join("x".join(map(str, (batch, *shape))) for shape in shapes),
        reference=source.reference,
        forwards=forwards,
        **found,
    )


def _nothing(source: Source, batch: int, bench: Bench, error: Exception) -> ModelResult:
    """Returns the result of a model of which nothing runs."""
    why = _reason(error)
    return _result(source, batch, [Forward(name, True, missing=why) for name in bench.variants])


def _measure(source: Source, model: nn.Module, batch: int, bench: Bench) -> ModelResult:
    # What was compiled for another batch would make this one's sizes symbolic.
    torch._dynamo.reset()
    title = f"{source.name}, batch {batch}"
    inputs = _inputs(source, batch, bench.place, _kind(bench))
    with progress(f"{title}: the reference"):
        try:
            expected = _reference(model, inputs, getattr(torch, source.reference))
            with torch.no_grad():
                own = distance(model(*inputs), expected)
        except Exception as error:
            return _nothing(source, batch, bench, error)
    tolerance = max(TOLERANCE[bench.dtype], YARDSTICK * own)
    attempts: dict[tuple[str, bool], _Attempt] = {}
    ways = list(bench.ways(model))
    config: Any = torch._dynamo.config
    # Each way may compile a function as often as it could alone.
    with config.patch(recompile_limit=config.recompile_limit * len(ways)):
        for name, last in ways:
            with progress(f"{title}: {name}{'' if last else ', contiguous'}"):
                attempts[name, last] = _attempt(
                    Forward(name, last), model, inputs, expected, tolerance, bench
                )
        bursts = {way: made.burst for way, made in attempts.items() if made.burst}
        with progress(f"{title}: timing"), torch.inference_mode():
            timings = interleave(bursts, bench.protocol)
    forwards = [replace(made.forward, call=timings.get(way)) for way, made in attempts.items()]
    report = next((made.report for made in attempts.values() if made.report is not None), None)
    left = [entry.reason for entry in report.left] if report else []
    return _result(
        source,
        batch,
        forwards,
        parameters=sum(tensor.numel() for tensor in model.parameters()),
        replaced=len(report.replaced) if report else None,
        left={reason: left.count(reason) for reason in dict.fromkeys(left)},
    )


@dataclass(frozen=True)
class _Attempt:
    forward: Forward
    burst: Burst | None = None
    """Absent where there is nothing to time."""
    report: Any = None


def _attempt(
    forward: Forward,
    model: nn.Module,
    inputs: Sequence[Tensor],
    expected: Sequence[Tensor],
    tolerance: float,
    bench: Bench,
) -> _Attempt:
    """Prepares and checks a variant, on a copy of the model of its own."""
    meter = gauge(bench.place)
    given = [_arranged(tensor, forward.channels_last) for tensor in inputs]
    try:
        before = meter.held()
        seconds, ready, output = _first_call(
            forward.variant, _copy(model, forward.channels_last), given, bench
        )
        errors = [distance(output, expected)]
        with torch.inference_mode():
            for _ in range(_SETTLING):
                output = ready.forward()
            errors.append(distance(output, expected))
            del output
            forward = replace(forward, first_call_s=seconds, error=max(errors))
            if VARIANTS[forward.variant].integers:
                tolerance = INTEGER_TOLERANCE
            if max(errors) > tolerance:
                raise Mismatch(
                    f"wrong: off by {max(errors):.2g} of the largest output; {tolerance:.2g} is "
                    "allowed"
                )
            after = meter.held()
            kept = None if before is None or after is None else max(0, after - before)
            forward = replace(forward, kept=kept, peak=meter.peak(ready.forward))
    # Compilers and models raise what they like; the other variants are still worth timing.
    except Exception as error:
        return _Attempt(replace(forward, missing=_reason(error)))
    return _Attempt(forward, _burst(ready.forward, bench), ready.report)


def _first_call(
    name: str, model: nn.Module, inputs: Sequence[Tensor], bench: Bench
) -> tuple[float, Prepared, Any]:
    """Returns the seconds from a model to its first output, what to call next, and that output."""
    bench.synchronize()
    start = time.perf_counter()
    ready = VARIANTS[name].prepare(model, inputs)
    with torch.inference_mode():
        output = ready.forward()
    bench.synchronize()
    return time.perf_counter() - start, ready, output


def _burst(forward: Callable[[], Any], bench: Bench) -> Burst:
    """Returns what times forward passes: of each on a CPU, their mean on a GPU."""
    if bench.place == "cuda":
        return LaunchRun(Cuda(), lambda _: forward(), 1, convolutions=1).burst
    return partial(time_calls, forward)


def _arranged(tensor: Tensor, channels_last: bool) -> Tensor:
    """Returns a copy of a tensor in a memory format, where it has one."""
    kind = _FORMATS.get(tensor.dim(), torch.contiguous_format)
    return tensor.clone(memory_format=kind if channels_last else torch.contiguous_format)


def _copy(model: nn.Module, channels_last: bool) -> nn.Module:
    """Returns a copy of a model in a memory format, of two dimensions and of three."""
    made = copy.deepcopy(model)
    for parameter in made.parameters():
        parameter.data = _arranged(parameter.data, channels_last)
    return made


def _reference(model: nn.Module, inputs: Sequence[Tensor], kind: torch.dtype) -> list[Tensor]:
    """Returns the outputs of eager PyTorch in a wider type, of the same weights and inputs.

    Raises:
        ValueError: It returns no tensors, or some that are not finite.
    """
    wide = copy.deepcopy(model).to(kind)
    given = [tensor.to(kind) if tensor.is_floating_point() else tensor for tensor in inputs]
    # tf32 would make float32 less exact than what it judges.
    exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    with torch.inference_mode(), exact:
        expected = tensors(wide(*given))
    if not expected or not all(bool(tensor.isfinite().all()) for tensor in expected):
        raise ValueError(f"eager PyTorch's outputs in {kind} are not finite")
    return expected


def distance(output: Any, expected: Sequence[Tensor]) -> float:
    """Returns how far outputs lie from the reference, as a share of its largest element.

    Args:
        output: What a model returned.
        expected: The reference, tensor by tensor; each has a largest element of its own.

    Raises:
        Mismatch: The shapes are others, or outputs are not finite.
    """
    got = tensors(output)
    shapes, wanted = ([tuple(tensor.shape) for tensor in group] for group in (got, expected))
    if shapes != wanted:
        raise Mismatch(f"wrong: outputs of {shapes}, not {wanted}")
    shares = [
        (own.double() - other.double()).abs().max() / other.double().abs().max().clamp_min(1e-30)
        for own, other in zip(got, expected, strict=True)
    ]
    worst = float(torch.stack(shares).max())
    if not math.isfinite(worst):
        raise Mismatch("wrong: outputs are not finite")
    return worst


def _reason(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:400]
