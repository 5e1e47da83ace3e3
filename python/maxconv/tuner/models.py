"""The convolutions of a model that the benchmark knows, to tune each once."""

from __future__ import annotations

import difflib
import importlib.util
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._problem import ConvProblem
from .heron import TransposedConvolution

if TYPE_CHECKING:
    from ..bench.models.catalogue import Source
    from ..bench.models.traced import Noted, Shape

__all__ = ["Layer", "layers_of", "layers_traced"]


@dataclass(frozen=True)
class Layer:
    """A distinct convolution of a model."""

    name: str
    problem: ConvProblem | None
    """None where it cannot be tuned."""
    count: int
    """How many of the model's layers are it."""
    reason: str = ""
    """Why it cannot."""


def layers_of(name: str, batch: int) -> list[Layer]:
    """Returns the convolutions of a model, those of most operations in the whole model first.

    Args:
        name: ``PACKAGE:MODEL``, as ``torchvision:resnet50``, one that ``maxconv bench --models``
            knows.
        batch: Of its inputs.

    Raises:
        ValueError: The model is not known, its package is not installed, or it does not run.
    """
    if batch < 1:
        raise ValueError(f"--batch: {batch} is not positive; at least 1 is needed")
    source = _source(name)
    try:
        noted = _noted(source, batch)
    # What a package raises where a model does not run is its own.
    except Exception as error:
        raise ValueError(f"--model: {name} does not run: {error}") from error
    return layers_traced(source.name, noted)


def _source(name: str) -> Source:
    """Finds a model, and checks that its package is there."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError(
            f"--model: {name} needs PyTorch, which is not installed; pip install 'maxconv[models]'"
        )
    from ..bench.models.catalogue import check_installed, load_catalogue

    known = {f"{source.library}:{key}": source for key, source in load_catalogue().models.items()}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or list(known)[:3]
        raise ValueError(
            f"--model: {name!r} is no model that is known; near it: {', '.join(near)}; "
            "`maxconv bench --models --list` shows all"
        )
    check_installed([known[name]])
    return known[name]


def _noted(source: Source, batch: int) -> Noted:
    """Runs a model without data where its code allows that, otherwise on zeros."""
    import torch

    from ..bench.models.catalogue import build
    from ..bench.models.traced import trace

    model = build(source)

    def run(device: str) -> Noted:
        with torch.device(device):
            inputs = [
                torch.zeros(batch, *size) if isinstance(size, tuple) else torch.tensor(size)
                for size in source.inputs
            ]
            return trace(model.to(device), inputs)

    try:
        return run("meta")
    except (NotImplementedError, RuntimeError):
        # A model that was moved there has no weights any more.
        model = build(source)
        return run("cpu")


def layers_traced(model: str, noted: Noted) -> list[Layer]:
    """Returns what was traced of a model; of modules with the same name the second has a number.

    Args:
        model: Its name, which the layers' names begin with.
        noted: What it convolves.
    """
    layers: list[Layer] = []
    taken: Counter[str] = Counter()
    for shape, count in noted.counts.items():
        name = f"{model}.{noted.names[shape]}".rstrip(".")
        taken[name] += 1
        name = f"{name}#{taken[name]}" if taken[name] > 1 else name
        if shape.transposed:
            layers += _transposed(name, shape, count)
        else:
            layers.append(Layer(name, _problem(shape), count))
    return sorted(layers, key=_operations, reverse=True)


def _operations(layer: Layer) -> int:
    """Returns the operations of all that a layer stands for."""
    return layer.count * (layer.problem.flops if layer.problem else 0)


def _problem(shape: Shape) -> ConvProblem:
    return ConvProblem.from_parts(
        (shape.batch, *shape.input),
        filters=shape.filters,
        filter_size=shape.filter,
        group_channels=shape.input[-1] // shape.groups,
        stride=shape.stride,
        dilation=shape.dilation,
        padding=_both_sides(shape.padding),
        groups=shape.groups,
    )


def _transposed(name: str, shape: Shape, count: int) -> list[Layer]:
    """Returns the convolutions that a transposed one is."""
    if shape.groups != 1:
        return [Layer(name, None, count, f"a transposed convolution of {shape.groups} groups")]
    operator = TransposedConvolution(
        (shape.batch, *shape.input),
        shape.filters,
        shape.filter,
        stride=shape.stride,
        padding=_both_sides(shape.padding),
        dilation=shape.dilation,
        output_padding=shape.output_padding,
    )
    parts = operator.convolutions
    return [
        Layer(f"{name}.{number}" if len(parts) > 1 else name, problem, count)
        for number, problem in enumerate(parts)
    ]


def _both_sides(padding: tuple[int, ...]) -> Any:
    return tuple(size for size in padding for _ in range(2))
