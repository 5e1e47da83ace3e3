"""The ways in which a model is run: PyTorch's own, and those with maxconv."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..device import GPU
from ..entrant import MAXCONV, TORCH, TORCH_COMPILE

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["VARIANTS", "Forward", "Prepared", "Variant", "check_backend", "usable", "usual"]

#: A forward pass on inputs that were given before; returns what the model returns.
Forward = Callable[[], Any]

#: Returns the forward pass of a model that nobody else has, and the report of a conversion.
Prepare = Callable[["nn.Module", "Sequence[Tensor]"], "Prepared"]

#: The name of maxconv's backend of ``torch.compile``.
BACKEND = "maxconv"

#: Calls of a model before it is captured.
_WARM_UP = 3


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to be called."""

    forward: Forward
    report: Any = None
    """The ``ConversionReport`` of ``maxconv.torch.convert``."""


@dataclass(frozen=True)
class Variant:
    """A way of running a model."""

    contender: str
    what: str
    prepare: Prepare
    gpu_only: bool = False
    """Whether it replays a CUDA graph, of which a CPU has none."""
    integers: bool = False
    """Whether it convolves 8-bit integers, on a CPU: it is timed where it is asked for by name."""

    @property
    def ours(self) -> bool:
        """Whether it convolves with maxconv."""
        return self.contender == MAXCONV


def _eager(model: nn.Module, inputs: Sequence[Tensor]) -> Prepared:
    return Prepared(lambda: model(*inputs))


def _compiled(**options: Any) -> Prepare:
    def prepare(model: nn.Module, inputs: Sequence[Tensor]) -> Prepared:
        import torch

        # As in a process that meets one shape: another variant's strides, met before, would make
        # this one's sizes symbolic.
        fast = torch.compile(model, dynamic=False, **options)
        return Prepared(lambda: fast(*inputs))

    return prepare


def _converted(model: nn.Module, inputs: Sequence[Tensor]) -> Prepared:
    import maxconv.torch as mt

    fast, report = mt.convert(model)
    return Prepared(lambda: fast(*inputs), report)


def _captured(model: nn.Module, inputs: Sequence[Tensor]) -> Prepared:
    """Captures a converted model, as PyTorch's notes on CUDA graphs say."""
    import torch

    import maxconv.torch as mt

    fast, report = mt.convert(model)
    held = [tensor.clone() for tensor in inputs]
    # torch does not annotate its streams.
    cuda: Any = torch.cuda
    stream = cuda.Stream()
    with torch.inference_mode():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                fast(*held)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = fast(*held)

    # The graph reads the model's weights, and does not hold them.
    def replay(model: nn.Module = fast) -> Any:
        for own, given in zip(held, inputs, strict=True):
            own.copy_(given)
        graph.replay()
        return output

    return Prepared(replay, report)


def _quantized(model: nn.Module, inputs: Sequence[Tensor]) -> Prepared:
    import maxconv.torch as mt

    small, _ = mt.quantize(model, [tuple(inputs)])
    return Prepared(lambda: small(*inputs))


def _torch_integers(model: nn.Module, inputs: Sequence[Tensor]) -> Prepared:
    """Quantizes as PyTorch's FX graph mode does, for its operators with oneDNN."""
    import warnings

    import torch
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

    backends: Any = torch.backends
    backends.quantized.engine = "onednn"
    make: Any = quantize_fx
    mapping: Any = get_default_qconfig_mapping
    # That it is deprecated.
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        prepared = make.prepare_fx(model, mapping("onednn"), tuple(inputs))
        prepared(*inputs)
        small = make.convert_fx(prepared)
    return Prepared(lambda: small(*inputs))


#: By the name that ``--variants`` takes, in the order of tables.
VARIANTS = {
    "eager": Variant(TORCH, "the model as it is", _eager),
    "compile": Variant(TORCH_COMPILE, "torch.compile(model)", _compiled()),
    "reduce-overhead": Variant(
        TORCH_COMPILE,
        'torch.compile(model, mode="reduce-overhead")',
        _compiled(mode="reduce-overhead"),
        gpu_only=True,
    ),
    "converted": Variant(MAXCONV, "maxconv.torch.convert(model)", _converted),
    "captured": Variant(
        MAXCONV, "the converted model, captured by torch.cuda.graph", _captured, gpu_only=True
    ),
    "backend": Variant(
        MAXCONV, f'torch.compile(model, backend="{BACKEND}")', _compiled(backend=BACKEND)
    ),
    "backend-reduce": Variant(
        MAXCONV,
        f'torch.compile(model, backend="{BACKEND}", mode="reduce-overhead")',
        _compiled(backend=BACKEND, mode="reduce-overhead"),
        gpu_only=True,
    ),
    "fx-int8": Variant(
        TORCH, "torch.ao.quantization.quantize_fx, with oneDNN", _torch_integers, integers=True
    ),
    "quantized": Variant(
        MAXCONV, "maxconv.torch.quantize(model, batches)", _quantized, integers=True
    ),
}


def usable(device: str) -> list[str]:
    """Returns the variants that a device has."""
    on_gpu = device == GPU.name
    return [
        name for name, way in VARIANTS.items() if not (way.integers if on_gpu else way.gpu_only)
    ]


def usual(device: str) -> list[str]:
    """Returns those that are timed unless others are named."""
    return [name for name in usable(device) if not VARIANTS[name].integers]


def check_backend(variants: Iterable[str]) -> None:
    """Checks that torch knows maxconv's backend, if a variant needs it.

    Raises:
        ValueError: It does not.
    """
    asked = next((name for name in variants if name.startswith("backend")), None)
    if asked is None:
        return
    import torch

    import maxconv.torch  # noqa: F401  # Where no entry point says so, it registers the backend.

    if BACKEND not in torch.compiler.list_backends(exclude_tags=()):
        raise ValueError(
            f"variants: {asked!r} is torch.compile(backend={BACKEND!r}), which torch does not know "
            "here; install maxconv again, or name the other variants"
        )
