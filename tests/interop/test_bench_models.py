"""Whole models in the benchmark: small ones of our own, and faults that must be seen."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tests.bench_records import SCHEMA, record
from tests.interop.small_models import Config, Whole
from torch import Tensor, nn

import maxconv.torch as mt
from maxconv.bench import report
from maxconv.bench.device import CPU
from maxconv.bench.models import catalogue, memory, run, variants, weights
from maxconv.bench.models.catalogue import Source, build, load_catalogue
from maxconv.bench.models.networks import Detector, UNet
from maxconv.bench.models.run import Bench, distance, measure_models
from maxconv.bench.models.variants import Prepared
from maxconv.bench.record import ModelResult, Record
from maxconv.torch._quantized import Quantize

pytestmark = pytest.mark.torch

QUICK = dataclasses.replace(CPU.models, pause_s=0, rounds=2, calls=3, discarded=1)
HERE = "tests.interop.small_models"


def source(name: str = "plain", **changes: Any) -> Source:
    """A model of the small list."""
    batches = {"cpu": (1, 2), "gpu": (2,)}
    made = Source(name, f"{HERE}.{name}", ((3, 9, 7),), batches, arguments={})
    return dataclasses.replace(made, **changes)


def bench(*names: str, **changes: Any) -> Bench:
    """What models are measured with on a CPU."""
    return Bench("cpu", "float32", QUICK, names or ("eager", "converted"), **changes)


def measure(made: Source, with_: Bench, *batches: int) -> list[ModelResult]:
    return measure_models([made], with_, batches or (2,), lambda _: None)


# The list.


def test_the_list() -> None:
    listed = load_catalogue()
    assert len(listed.models) >= 40
    assert {made.library for made in listed.models.values()} == listed.libraries.keys()
    for made in listed.models.values():
        assert made.batches, made.name
        assert made.batches.keys() <= {"cpu", "gpu"}
        assert any(isinstance(value, tuple) for value in made.inputs)
    for device, names in listed.default.items():
        assert names
        assert all(device in listed.models[name].batches for name in names)


@pytest.mark.parametrize("library", load_catalogue().libraries)
def test_every_constructor_is_there_where_its_library_is(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    for made in load_catalogue().models.values():
        if made.library == library:
            for path in filter(None, (made.make, made.config)):
                assert callable(catalogue.resolve(path)), path


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{inputs: [[3]], batches: {}}", "small.yaml: a: misses make"),
        ("{make: m.a, inputs: [[3]], batches: {}, size: 1}", "small.yaml: a: size is no field"),
        ("{make: m.a, inputs: [[0]], batches: {}}", "a: inputs: [0] is no shape; positive whole"),
        ("{make: m.a, inputs: [big], batches: {}}", "a: inputs: 'big' is no shape"),
        (
            "{make: m.a, inputs: [[3]], batches: {}, reference: int8}",
            "a: reference: 'int8' is not one; float64, float32 are allowed",
        ),
        ("{make: n.a, inputs: [[3]], batches: {}}", "a: 'n' does not stand under libraries"),
        ("{make: m.a, inputs: [[3]], batches: {gpu: [1]}}", "default: 'a' has no batches for a cp"),
    ],
)
def test_a_wrong_list(entry: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(f"libraries: {{m: m}}\ndefault: {{cpu: [a]}}\nmodels:\n  a: {entry}\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        load_catalogue(path)


def test_a_model_is_built_as_the_list_says() -> None:
    whole = build(source("Whole", config=f"{HERE}.Config", arguments={"channels": 5}))
    assert isinstance(whole, Whole)
    assert not whole.training
    assert whole.body[0].out_channels == 5
    part = build(source("Whole", config=f"{HERE}.Config", arguments={"channels": 5}, part="body"))
    assert isinstance(part, nn.Sequential)
    # The same weights in every run.
    once, again = (build(source(arguments={"channels": 5})).state_dict() for _ in range(2))
    torch.testing.assert_close(once, again, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"tests.interop.small_models.lost is not to be had here:"):
        build(source("lost"))


# Networks of our own.


@pytest.mark.parametrize(("name", "size", "count"), [("yolov8n", 64, 3.15e6), ("unet", 32, 7.76e6)])
def test_networks_that_no_library_builds(name: str, size: int, count: float) -> None:
    """They have the parameters of the published ones, and all of them stays in integers."""
    made = load_catalogue().models[name]
    model = build(made)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(count, rel=0.003)
    weights.draw(model, lambda batch: [torch.randn(batch, 3, size, size)])
    x = torch.randn(2, 3, size, size)
    with torch.inference_mode():
        wanted = weights.tensors(model(x))
        fast, converted = mt.convert(model)
        assert distance(fast(x), wanted) < 1e-4
        small, quantized = mt.quantize(model, [x])
        assert distance(small(x), wanted) < 1
    assert converted.traced == ["(model)"] and not converted.left
    floats = [layer.name for layer in quantized.layers if not layer.became.endswith("uint8")]
    heads = [f"{kind}.{level}.2" for level in range(3) for kind in ("boxes", "classes")]
    assert floats == (heads if name == "yolov8n" else ["leave"])
    # Of the image.
    assert [type(part) for part in small.modules()].count(Quantize) == 1


def test_the_shapes_of_the_networks() -> None:
    x = torch.zeros(1, 3, 64, 96)
    with torch.inference_mode():
        levels = Detector(classes=5).eval()(x)
        assert [level.shape for level in levels] == [
            (1, 64 + 5, 64 // step, 96 // step) for step in (8, 16, 32)
        ]
        assert UNet(classes=4, width=8).eval()(x).shape == (1, 4, 64, 96)


# Weights.


def test_weights_hide_no_layer() -> None:
    model = Whole(Config(8)).eval()
    weights.draw(model, lambda batch: [torch.randn(batch, 3, 9, 7), torch.tensor(1)])
    norm = model.body[1]
    assert isinstance(norm, nn.BatchNorm2d)
    x = torch.randn(64, 3, 9, 7)
    with torch.no_grad():
        y = model.body[:2](x) - norm.bias.view(-1, 1, 1)
        y = y / norm.weight.view(-1, 1, 1)
    # Near a normalization's output, and not equal to it: folding it is no identity.
    means, deviations = y.mean((0, 2, 3)), y.std((0, 2, 3))
    assert float(means.abs().max()) < 0.5
    assert 0.6 < float(deviations.min()) < float(deviations.max()) < 1.7
    assert float(means.abs().max()) > 0.02
    assert float((deviations - 1).abs().max()) > 0.05
    # A layer scale of 1e-6 would hide what it scales.
    scale = model.scale.detach()
    assert float(scale.abs().max()) > 0.01
    assert float(scale.std()) > 0
    assert not norm._forward_pre_hooks


@pytest.mark.parametrize(
    ("name", "message"),
    [("deaf", "its outputs hardly depend on the input"), ("infinite", "are not finite")],
)
def test_a_model_that_would_hide_errors(name: str, message: str) -> None:
    (made,) = measure(source(name), bench())
    assert {one.variant for one in made.forwards} == {"eager", "converted"}
    for one in made.forwards:
        assert one.call is None
        assert message in (one.missing or "")


def test_a_normalization_of_what_hardly_varies_amplifies_little() -> None:
    norm = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4)).eval()
    weights.draw(norm, lambda batch: [torch.rand(batch, 3, 64, 64)])
    assert isinstance(norm[2], nn.BatchNorm2d)
    mean, variance = norm[2].running_mean, norm[2].running_var
    assert mean is not None
    assert variance is not None
    assert bool((variance > 0.02 * mean.square()).all())


# Outputs.


def test_the_tensors_of_an_output() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    assert weights.tensors({"x": a, "y": (b, [a], torch.tensor(1), None)}) == [a, b, a]


def test_the_distance_is_a_share_of_the_largest_output() -> None:
    expected = [torch.tensor([1.0, -8.0]).double(), torch.tensor([0.5]).double()]
    first, second = (tensor.float() for tensor in expected)
    assert distance([first, second], expected) == 0
    assert distance([torch.tensor([1.8, -8.0]), second], expected) == pytest.approx(0.1)
    # Each output has a largest element of its own.
    assert distance([first, torch.tensor([0.6])], expected) == pytest.approx(0.2)
    with pytest.raises(ValueError, match=r"wrong: outputs of \[\(2,\)\], not \[\(2,\), \(1,\)\]"):
        distance(first, expected)
    with pytest.raises(ValueError, match="wrong: outputs are not finite"):
        distance([torch.tensor([1.0, math.nan]), torch.tensor([0.5])], expected)


# Measuring.


@pytest.mark.slow
@pytest.mark.extended
def test_every_way_on_a_cpu() -> None:
    kept: list[int] = []
    whole = source(
        "Whole", config=f"{HERE}.Config", arguments={"channels": 5}, inputs=((3, 9, 7), 500)
    )
    with_ = bench("eager", "compile", "converted")
    results = measure_models([whole], with_, (), lambda so_far: kept.append(len(so_far)))
    assert kept == [1, 2]
    assert [result.batch for result in results] == [1, 2]
    for result in results:
        # torch is timed in both memory formats, maxconv in its own.
        assert [(one.variant, one.channels_last) for one in result.forwards] == [
            ("eager", False),
            ("eager", True),
            ("compile", False),
            ("compile", True),
            ("converted", True),
        ]
        for one in result.forwards:
            assert one.missing is None
            assert one.call is not None
            assert one.call.samples == 4
            assert one.error is not None
            assert one.error < 1e-5
            assert one.first_call_s is not None
            assert one.first_call_s > 0
        assert (result.replaced, result.left, result.reference) == (2, {}, "float64")
        assert result.inputs == f"{result.batch}x3x9x7"
        assert list(result.ratios()) == ["converted"]
    starts = run.measure_starts(with_)
    assert starts.keys() == {"eager", "compile", "converted"}
    made = dataclasses.replace(record(), results=[], models=results, starts=starts)
    jsonschema.validate(json.loads(made.to_json()), SCHEMA)
    assert Record.from_json(made.to_json()) == made


def test_integers() -> None:
    """Of a model of images, by PyTorch's quantization and ours; both are far from exact."""
    (made,) = measure(source(), bench("fx-int8", "quantized"))
    found = {one.variant: one for one in made.forwards if one.channels_last}
    assert found.keys() == {"fx-int8", "quantized"}
    for one in found.values():
        assert one.missing is None
        assert one.call is not None
        assert 1e-4 < (one.error or 0) < 0.2
    assert list(made.ratios()) == ["quantized"]


def test_integers_are_timed_where_they_are_asked_for() -> None:
    assert not {"fx-int8", "quantized"} & {*variants.usual("cpu"), *variants.usable("gpu")}
    assert {"fx-int8", "quantized"} <= {*variants.usable("cpu")}


@pytest.mark.parametrize("channels_last", [True, False])
def test_one_memory_format(channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def prepare(model: nn.Module, inputs: Sequence[Tensor]) -> Prepared:
        for tensor in (inputs[0], next(model.parameters())):
            seen.append(tensor.is_contiguous(memory_format=torch.channels_last))
        return Prepared(lambda: model(*inputs))

    replace_variant(monkeypatch, "converted", prepare)
    (made,) = measure(source(), bench(channels_last=channels_last))
    assert [one.channels_last for one in made.forwards] == [channels_last, channels_last]
    assert seen == [channels_last, channels_last]


def test_a_model_of_one_memory_format_is_timed_once() -> None:
    (made,) = measure(source("sequence", inputs=((2, 11),)), bench())
    assert [one.variant for one in made.forwards] == ["eager", "converted"]


def replace_variant(
    monkeypatch: pytest.MonkeyPatch, name: str, prepare: Callable[..., Prepared]
) -> None:
    changed = dataclasses.replace(variants.VARIANTS[name], prepare=prepare)
    monkeypatch.setitem(variants.VARIANTS, name, changed)


def test_a_wrong_variant_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], mt.ConversionReport]:
        return lambda x: model(x) * 1.001, mt.ConversionReport()

    monkeypatch.setattr(mt, "convert", convert)
    (made,) = measure(source(), bench())
    *torchs, ours = made.forwards
    assert all(one.call is not None for one in torchs)
    assert ours.call is None
    assert ours.error == pytest.approx(1e-3, rel=0.01)
    assert ours.missing == "wrong: off by 0.001 of the largest output; 0.0001 is allowed"


def test_the_first_call_begins_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(model: nn.Module, inputs: Sequence[Tensor]) -> Prepared:
        time.sleep(0.2)
        return Prepared(lambda: model(*inputs))

    replace_variant(monkeypatch, "converted", prepare)
    (made,) = measure(source(), bench("converted"))
    (ours,) = made.forwards
    assert ours.first_call_s is not None
    assert ours.first_call_s >= 0.2
    assert ours.call is not None
    assert ours.call.best_s is not None
    assert ours.call.best_s < 0.2


def test_a_variant_that_is_wrong_after_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(model: nn.Module, inputs: Sequence[Tensor]) -> Prepared:
        calls: list[int] = []

        def forward() -> Any:
            calls.append(1)
            return model(*inputs) * (1.0 if len(calls) == 1 else 2.0)

        return Prepared(forward)

    replace_variant(monkeypatch, "converted", prepare)
    (made,) = measure(source(), bench())
    assert "wrong: off by 1 of" in (made.forwards[-1].missing or "")


def test_what_a_model_amplifies_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The judge is eager PyTorch in float64; where eager in float32 is off, others may be.
    def reference(model: nn.Module, inputs: Sequence[Tensor], kind: torch.dtype) -> list[Tensor]:
        with torch.no_grad():
            return [copy.deepcopy(model).to(kind)(inputs[0].to(kind)) * 1.01]

    monkeypatch.setattr(run, "_reference", reference)
    (made,) = measure(source(), bench())
    assert made.forwards[-1].missing is None
    assert made.forwards[-1].error == pytest.approx(0.01 / 1.01, rel=0.01)


def test_a_variant_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(model: nn.Module) -> None:
        raise RuntimeError("no such\n layer")

    monkeypatch.setattr(mt, "convert", convert)
    (made,) = measure(source(), bench())
    assert made.forwards[-1].missing == "no such layer"
    assert made.forwards[0].call is not None
    text = report.render_text([record(results=[], models=[made])])
    assert "Without plain, batch 2, converted: no such layer." in text
    # What starts a variant fails with it.
    assert run.measure_starts(bench()).keys() == {"eager"}


def test_a_model_that_cannot_be_built_leaves_the_others() -> None:
    results = measure_models([source("lost"), source()], bench(), (1,), lambda _: None)
    assert [one.missing is None for one in results[1].forwards] == [True, True, True]
    assert all("lost is not to be had here" in (one.missing or "") for one in results[0].forwards)


def test_the_backend_is_compiled_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def compile(model: nn.Module, **options: Any) -> nn.Module:
        asked.append(options)
        return model

    monkeypatch.setattr(torch, "compile", compile)
    measure(source(), bench("compile", "reduce-overhead", "backend", channels_last=True))
    assert asked == [
        {"dynamic": False},
        {"dynamic": False, "mode": "reduce-overhead"},
        {"dynamic": False, "backend": "maxconv"},
    ]


def test_a_backend_that_torch_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "list_backends", lambda **_: ["inductor"])
    with pytest.raises(ValueError, match=r"variants: 'backend' is torch.compile\(backend='max"):
        variants.check_backend(["eager", "backend"])
    variants.check_backend(["eager"])
    monkeypatch.setattr(torch.compiler, "list_backends", lambda **_: ["maxconv"])
    variants.check_backend(["backend"])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
def test_memory_is_what_is_held_and_what_a_call_takes() -> None:
    meter = memory.gauge("cpu")
    before = meter.held()
    held = torch.ones(16 << 20)
    after = meter.held()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(64 << 20, rel=0.1)
    taken = meter.peak(lambda: torch.ones(8 << 20).sum())
    assert taken == pytest.approx(32 << 20, rel=0.1)
    del held
