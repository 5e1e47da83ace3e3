"""``quantize``: has a model convolve 8-bit integers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from .._calibration import Calibration, check_method, check_percentile
from .._checks import check_device, check_number
from ._convert import convert
from ._dtypes import INTEGER_NAMES, listed
from ._excitation import mark_products
from ._modules import _Conv
from ._quantize_emit import make_convolution, make_quantizer, values_of, write
from ._quantize_graphs import Alone, compare, probes
from ._quantize_plan import Layer, Place, Plan
from ._quantize_report import Difference, QuantizationReport, QuantizedLayer, shown_scale
from ._reference_graph import convert_reference, is_reference
from ._report import ConversionReport

__all__ = ["quantize"]

_ACTIVATIONS: Final = ("per_tensor", "per_channel")


def quantize(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    method: str = "mse",
    percentile: float = 99.99,
    dtype: torch.dtype = torch.uint8,
    symmetric: bool = False,
    activations: str = "per_tensor",
    keep: Collection[str] = (),
    max_error: float | None = None,
    channels_last: bool = True,
) -> tuple[nn.Module, QuantizationReport]:
    """Returns a copy of a model that convolves 8-bit integers, and a report of what was done.

    The model is converted first, as ``maxconv.torch.convert`` does it. Then batches go through it,
    and the values that they have between convolutions decide what integers are to stand for.
    Filters have a scale for each output channel.

    A convolution gives integers where all that read its output are convolutions of integers, also
    behind a max pooling, a concatenation and whatever else moves elements; there no floats are in
    memory, and residuals are integers too. Elsewhere it gives floats. Linear layers, transposed
    convolutions that are one convolution, and squeeze and excitation are taken for convolutions.
    What is none stays as it is. Biases make up for what rounding a filter does on average.

    A graph that PyTorch has quantized (``convert_pt2e``; its nodes quantize and dequantize) keeps
    the scales that it has, and needs no batches.

    Args:
        model: The model; it is not changed. Call its ``eval()`` first.
        batches: What the model is called with: tensors, tuples of arguments, or dictionaries of
            arguments by name. They are gone through several times; an iterator is kept as a list.
        method: How ranges are chosen: ``"mse"``, ``"minmax"`` or ``"percentile"``; see
            ``maxconv.Calibration``.
        percentile: Of the method of that name.
        dtype: Of activations: ``torch.uint8`` or ``torch.int8``.
        symmetric: Whether ranges are the same on both sides of 0, so that zero points are 0 of
            int8.
        activations: ``"per_channel"`` gives each channel a scale where the filters around can take
            it; the report says why not elsewhere. ``"per_tensor"`` gives all the same.
        keep: Names of convolutions and linear layers, or of modules with some, that stay as they
            are.
        max_error: Layers stay as they are where rounding makes a larger error in them alone:
            the norm of the error, relative to that of the output.
        channels_last: As of ``maxconv.torch.convert``.

    Returns:
        The model and a ``QuantizationReport``, whose ``str`` is a table.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed; the model is in training mode, not
            on the CPU, or has values that are not finite; there are no batches.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: a {type(model).__name__} is not a torch.nn.Module")
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            check_device("model", tensor.device, ("cpu",))
    options = _Options(method, percentile, dtype, symmetric, activations, max_error)
    if is_reference(model):
        if batches is not None:
            raise ValueError(
                "batches: given beside a graph that has scales already; None is allowed"
            )
        with torch.no_grad():
            return convert_reference(model)
    if any(part.training for part in model.modules()):
        raise ValueError("model: it is in training mode; call its eval() first")
    listed = _listed(batches)
    with torch.inference_mode(False), torch.no_grad():
        converted, conversion = convert(model, channels_last=channels_last)
        mark_products(converted)
        quantizer = _Quantizer(converted, conversion, listed, options)
        quantizer.keep(keep)
        quantizer.run()
        floats, _ = convert(model, channels_last=channels_last)
        mark_products(floats)
        return quantizer.model, quantizer.report(floats)


@dataclass(frozen=True)
class _Options:
    method: str
    percentile: float
    dtype: torch.dtype
    symmetric: bool
    activations: str
    max_error: float | None

    def __post_init__(self) -> None:
        check_method(self.method)
        check_percentile(self.percentile)
        if self.dtype not in INTEGER_NAMES:
            raise ValueError(
                f"dtype: {self.dtype} is not supported; {listed(tuple(INTEGER_NAMES))} are allowed"
            )
        if self.activations not in _ACTIVATIONS:
            raise ValueError(
                f"activations: {self.activations!r} is unknown; {', '.join(_ACTIVATIONS)} are "
                "allowed"
            )
        if self.max_error is not None and not check_number("max_error", self.max_error) > 0:
            raise ValueError(
                f"max_error: {self.max_error} is not allowed; None or a positive number is"
            )
        # The arguments that calibrations check.
        self.calibration(None)

    def calibration(self, axis: int | None) -> Calibration:
        return Calibration(
            self.method,
            dtype=INTEGER_NAMES[self.dtype],
            symmetric=self.symmetric,
            axis=axis,
            percentile=self.percentile,
        )


def _listed(batches: Iterable[Any] | None) -> Sequence[Any]:
    """Returns the batches in a form that can be gone through again."""
    allowed = "an iterable of tensors, tuples or dictionaries is"
    if batches is None:
        raise ValueError(f"batches: None for a model without scales; {allowed} needed")
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise TypeError(f"batches: a {type(batches).__name__} is not allowed; {allowed}")
    listed = list(batches)
    for batch in listed:
        if not isinstance(batch, Tensor | tuple | list | Mapping):
            raise TypeError(f"batches: it holds a {type(batch).__name__}; {allowed} allowed")
    if not listed:
        raise ValueError("batches: it is empty; at least one is needed")
    return listed


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


# The work ---------------------------------------------------------------------------------------


class _Quantizer:
    def __init__(
        self,
        model: nn.Module,
        conversion: ConversionReport,
        batches: Sequence[Any],
        options: _Options,
    ) -> None:
        self.conversion = conversion
        self.batches = batches
        self.options = options
        self.alone = Alone(model)
        self.model = self.alone.model
        self.kept: dict[str, str] = {}
        self.errors: dict[str, Difference] = {}
        self.plans = self._planned()
        for layer in self._layers():
            if not layer.conv.weight.isfinite().all():
                self.kept[layer.name] = "its weight holds NaN or infinity"
        #: What is a convolution of integers alone, by name.
        self.others = {
            layer.name: layer.kind
            for layer in self._layers()
            if layer.form is not None or layer.product is not None
        }

    def keep(self, names: Collection[str]) -> None:
        """Leaves convolutions as they are, by their names or those of modules around them."""
        if isinstance(names, str) or not isinstance(names, Collection):
            raise TypeError(
                f"keep: {names!r} is a {type(names).__name__}; a list of names is allowed"
            )
        known = [layer.name for layer in self._layers()]
        for name in names:
            found = [k for k in known if k == name or k.startswith(f"{name}.")]
            if not found:
                raise ValueError(
                    f"keep: {name!r} is no convolution that can be quantized, nor a module with "
                    f"one; {', '.join(known)} are allowed"
                )
            self.kept.update(dict.fromkeys(found, "keep names it"))

    def run(self) -> None:
        """Plans until nothing more has to stay as it is, and writes the plan into the model."""
        while True:
            self.plans = self._planned()
            refused = self._calibrate() or self._measure()
            if not refused:
                break
            self.kept |= refused
        for plan in self.plans:
            if plan.layers:
                write(plan)
        self.model = self.alone.finish()

    def _planned(self) -> list[Plan]:
        found = []
        for path, graph in self.model.named_modules():
            if isinstance(graph, GraphModule):
                prefix = f"{path}." if path else ""
                found.append(Plan(graph, prefix, self.kept, self.alone.names.get(graph)))
        return found

    def _layers(self) -> Iterator[Layer]:
        for plan in self.plans:
            yield from plan.layers.values()

    def _run_batches(self) -> None:
        for plan in self.plans:
            plan.model.recompile()
        for batch in self.batches:
            _call(self.model, batch)

    def _calibrate(self) -> dict[str, str]:
        """Chooses the scales; returns what has to stay as it is, and why."""
        seen: dict[Place, Calibration] = {}
        unequal: dict[str, str] = {}
        for_all = self.options.activations == "per_tensor"
        with probes() as add:
            for plan in self.plans:
                for place in plan.places:
                    axis = None if for_all or place.per_tensor else -(place.rank + 1)
                    seen[place] = calibration = self.options.calibration(axis)
                    for node in place.observed:
                        for reader in plan.moments(place, node):
                            add(plan.model, reader, _observer(calibration, node), node)
                for layer in plan.layers.values():
                    if layer.product is None:
                        add(plan.model, layer.node, layer.observe, layer.input)
                    if layer.residual is not None:
                        check = _shape_check(unequal, layer.name)
                        add(plan.model, layer.node.next, check, layer.node, layer.residual)
            self._run_batches()
        for place, calibration in seen.items():
            if calibration.is_empty:
                concerned = (*place.readers, *place.adders, *place.makers)
                unequal |= {layer.name: "no batch reaches it" for layer in concerned}
            else:
                place.quantization = calibration.quantization()
        return unequal

    def _measure(self) -> dict[str, str]:
        """Measures the error of each convolution; returns what has to stay as it is, and why."""
        found: dict[str, Difference] = {}
        with probes() as add:
            for plan in self.plans:
                for layer in plan.layers.values():
                    found[layer.name] = difference = Difference()
                    tensors = [layer.node, layer.input]
                    tensors += [t for t in (layer.residual, layer.factor) if t is not None]
                    add(plan.model, layer.node.next, _comparison(difference, layer), *tensors)
            self._run_batches()
        self.errors |= found
        limit = self.options.max_error
        if limit is None:
            return {}
        return {
            name: f"its error is above {limit:g}"
            for name, difference in found.items()
            if not difference.relative <= limit
        }

    # The report ---------------------------------------------------------------------------------

    def report(self, floats: nn.Module) -> QuantizationReport:
        """Returns what became of each convolution, in the order of the model.

        Args:
            floats: The converted model.
        """
        layers = {layer.name: layer for layer in self._layers()}
        whole, totals = self._compare(floats)
        # A linear layer is nothing that ``convert`` replaces.
        kinds = {entry.name: entry.kind for entry in self.conversion.replaced}
        kinds |= self.others
        left = {e.name: e for e in self.conversion.left if "conv" in e.kind.lower()}
        rows = []
        for name in dict.fromkeys((*kinds, *left, *layers)):
            if name in layers:
                layer = layers[name]
                kind = kinds.get(name, layer.kind)
                row = _quantized_row(layer, kind, self.errors[name], self.options)
                rows.append(replace(row, total_error=totals[name].relative))
            elif name in left:
                rows.append(QuantizedLayer(name, left[name].kind, "float", note=left[name].reason))
            else:
                note = self.kept.get(name) or self._why_unknown(name)
                error = self.errors.get(name)
                rows.append(
                    QuantizedLayer(
                        name,
                        kinds[name],
                        "float",
                        error=None if error is None else error.relative,
                        sqnr=None if error is None else error.decibels,
                        note=note,
                    )
                )
        return QuantizationReport(rows, whole.relative, whole.decibels, self.conversion)

    def _compare(self, floats: nn.Module) -> tuple[Difference, dict[str, Difference]]:
        """Returns the differences of the outputs of two models, and of their convolutions'."""
        whole, totals = Difference(), {layer.name: Difference() for layer in self._layers()}
        outputs: dict[str, list[Tensor]] = {name: [] for name in totals}
        handles = []
        for plan in self.plans:
            for layer in plan.layers.values():
                convolution = plan.model.get_submodule(str(layer.node.target))
                own = "" if layer.name == "(model)" else layer.name
                both = (convolution, layer.after), (floats.get_submodule(own), None)
                for part, place in both:
                    note = _recorder(outputs[layer.name], place)
                    handles.append(part.register_forward_hook(note))
        for batch in self.batches:
            compare(whole, _call(self.model, batch), _call(floats, batch))
            for name, found in outputs.items():
                count = len(found) // 2
                compare(totals[name], found[:count], found[count:])
                found.clear()
        for handle in handles:
            handle.remove()
        return whole, totals

    def _why_unknown(self, name: str) -> str:
        """Returns why a convolution of maxconv's is in no plan."""
        found: Any = self.model
        for part in [] if name == "(model)" else name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, _Conv):
            return "code that cannot be traced may call it otherwise, or read its weight"
        return "no convolution of integers does what it does"


def _quantized_row(
    layer: Layer, kind: str, difference: Difference, options: _Options
) -> QuantizedLayer:
    before, after = layer.before, layer.after
    note = ""
    if options.activations == "per_channel":
        places = (("input", before), ("output", after))
        notes = [f"{what}: {p.per_tensor}" for what, p in places if p is not None and p.per_tensor]
        note = f"per tensor: {'; '.join(notes)}" if notes else "per channel"
    assert before.quantization is not None
    coming = None if after is None else after.quantization
    dtype = str(layer.conv.weight.dtype).removeprefix("torch.")
    return QuantizedLayer(
        layer.name,
        kind,
        f"{before.quantization.dtype} -> {dtype if coming is None else coming.dtype}",
        shown_scale(before.quantization),
        before.quantization.zero_point,
        shown_scale(coming),
        None if coming is None else coming.zero_point,
        difference.relative,
        difference.decibels,
        note=note,
    )


def _observer(calibration: Calibration, node: Node) -> Callable[..., None]:
    def observe(x: Tensor) -> None:
        values = x.detach().float()
        if not values.isfinite().all():
            raise ValueError(
                f"batches: with them {node.name} has values that are NaN or infinite; finite ones "
                "are allowed"
            )
        calibration.observe(values.cpu().numpy())

    return observe


def _recorder(outputs: list[Tensor], place: Place | None) -> Callable[..., None]:
    """Returns a hook that notes outputs, what integers of a place stand for."""

    def note(module: nn.Module, inputs: object, output: Tensor) -> None:
        outputs.append(output if place is None else values_of(place, output))

    return note


def _shape_check(unequal: dict[str, str], name: str) -> Callable[..., None]:
    def check(output: Tensor, residual: Tensor) -> None:
        if residual.shape != output.shape or residual.dtype != output.dtype:
            unequal[name] = "its residual is of another shape or dtype"

    return check


def _comparison(difference: Difference, layer: Layer) -> Callable[..., None]:
    """Returns what computes a convolution of integers beside that of floats."""
    device = layer.conv.weight.device
    conv = make_convolution(layer)
    quantizer = make_quantizer(layer.before, device)
    adder = None if layer.beside is None else make_quantizer(layer.beside, device)

    def compare_outputs(wanted: Tensor, input: Tensor, other: Tensor | None = None) -> None:
        if other is not None and layer.beside is not None and adder is not None:
            other = adder(other)
            if not layer.adds_integers:
                other = values_of(layer.beside, other).to(wanted.dtype)
        output = conv(quantizer(input), other)
        actual = output if layer.after is None else values_of(layer.after, output)
        compare(difference, actual, wanted)

    return compare_outputs
