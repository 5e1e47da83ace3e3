"""``maxconv.torch.convert``: formats, checkpoints, subclasses, and what stays in PyTorch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tests.interop.conversion import X, conv, convert_and_compare, fused, left, network
from tests.interop.torch_tensors import draw, last
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import maxconv.torch as mt
from maxconv.bench.resnet import randomize

pytestmark = pytest.mark.torch


# Transposed convolutions, subclasses ------------------------------------------------------------


@pytest.mark.parametrize(("taps", "stride", "groups"), [(4, 2, 1), (2, 2, 2), (3, 1, 4)])
def test_transposed_convolutions(taps: int, stride: int, groups: int) -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        y = functional.leaky_relu(m.bn(m.up(x)), 0.2)
        return torch.tanh(functional.conv_transpose2d(y, m.last.weight, None, 2) + 1)

    up = nn.ConvTranspose2d(4, 8, taps, stride, 1, groups=groups)
    model = network(call, up=up, bn=nn.BatchNorm2d(8), last=nn.ConvTranspose2d(8, 3, 2))
    _, report = convert_and_compare(model, X)
    assert fused(report)["up"] == ("BatchNorm2d bn", "leaky_relu")
    assert [entry.kind for entry in report.replaced] == ["ConvTranspose2d", "conv_transpose2d"]


class Same(nn.Conv2d):
    """Pads by the input's size, which no trace can know."""

    def forward(self, input: Tensor) -> Tensor:
        height, width = input.shape[-2:]
        pads = [max(-size % 2 + 1, 0) for size in (width, height)]
        input = functional.pad(input, [0, pads[0], 0, pads[1]])
        return functional.conv2d(input, self.weight, self.bias, self.stride, groups=self.groups)


class Causal(nn.Conv3d):
    def forward(self, input: Tensor, before: Tensor | None = None) -> Tensor:
        ahead = self.dilation[0] * (self.kernel_size[0] - 1)
        if before is not None and ahead > 0:
            input, ahead = torch.cat([before, input], 2), ahead - before.shape[2]
        padded = functional.pad(input, (0, 0, 0, 0, ahead, 0))
        return super().forward(padded)


class Doubled(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        doubled: Tensor = super()._conv_forward(input, weight * 2, bias)
        return doubled


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = list[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Same, Causal, Doubled])
def test_subclasses_keep_their_forward(kind: Any) -> None:
    x = draw(1, 4, 5, 7, 6) if kind is Causal else X
    model = nn.Sequential(kind(4, 6, 3, stride=1)).eval()
    expected = model(x).detach()
    converted, report = mt.convert(model)
    assert len(report.replaced) == 1 and not report.left
    for other in (converted, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        with Calls() as calls:
            assert torch.allclose(other(x), expected, atol=1e-5)
        assert calls.names.count("maxconv.conv") == 1 and "aten.convolution" not in calls.names
    torch.compiler.reset()
    assert torch.allclose(torch.compile(converted)(x), expected, atol=1e-5)
    exported = torch.export.export(converted, (x,))
    targets = [str(node.target) for node in exported.graph.nodes]
    assert "maxconv.conv.default" in targets and "aten.conv2d.default" not in targets
    scripted: Any = torch.jit.trace(converted, x)  # type: ignore[no-untyped-call]
    assert torch.allclose(scripted(x), expected, atol=1e-5)


# Memory formats ---------------------------------------------------------------------------------


class Probe(nn.Module):
    """Looks at strides, where no trace can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[tuple[int, ...]]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.stride())
        return x if x.sum() > -1e9 else -x


class Separator(nn.Module):
    """Like ConvTasNet: masks in a module of their own, then a view."""

    def __init__(self, masks: nn.Module) -> None:
        super().__init__()
        self.masks = masks

    def forward(self, x: Tensor) -> Tensor:
        y = self.masks(x)
        return cast(Tensor, y.view(2, 2, -1) if y.sum() > -1e9 else y)


def test_formats_outside_of_traces_are_those_of_pytorch() -> None:
    block = network(
        lambda m, x: m.probe(torch.relu(m.conv(x)) + x).transpose(2, 3),
        conv=conv(), probe=Probe(),
    )  # fmt: skip
    turned = network(
        lambda m, x: m.probe(m.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        conv=conv(), probe=Probe(),
    )  # fmt: skip
    single = nn.ModuleList([conv(), Probe()])

    def call(m: Any, x: Tensor) -> Tensor:
        y = m.turned(m.block(x))
        for part in m.single if y.sum() > -1e9 else ():
            y = part(y)
        return cast(Tensor, y)

    model = network(call, block=block, turned=turned, single=single)
    for x in (X, last(X)):
        converted, report = mt.convert(model)
        assert len(report.replaced) == 3 and report.traced == ["block", "turned"]
        assert torch.allclose(converted(x), model(x), atol=1e-5)
        probes = ([p for p in m.modules() if isinstance(p, Probe)] for m in (converted, model))
        for actual, expected in zip(*probes, strict=True):
            assert actual.seen[-1] == expected.seen[-1]


@pytest.mark.parametrize("traced", [False, True])
def test_a_view_behind_a_converted_module(traced: bool) -> None:
    masks = network(lambda m, x: torch.sigmoid(m.conv(x)), conv=conv())
    model = Separator(masks if traced else masks.conv).eval()  # type: ignore[arg-type]
    converted, report = mt.convert(model)
    assert report.untraced and len(report.replaced) == 1
    assert report.traced == (["masks"] if traced else [])
    assert torch.allclose(converted(X), model(X), atol=1e-5)


def test_a_view_through_which_something_is_written() -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        z = y.view(2, -1)
        y.add_(1)
        return cast(Tensor, z * 2)

    model = network(call, conv=conv())
    converted, report = mt.convert(model)
    assert report.traced and torch.allclose(converted(X), model(X), atol=1e-5)


@pytest.mark.parametrize("norm", ["module", "function"])
def test_no_accuracy_is_lost_to_the_format(norm: str) -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x) + 30
        if norm == "module":
            return cast(Tensor, m.last(m.norm(y)))
        return cast(Tensor, m.last(functional.group_norm(y, 2)))

    model = network(call, conv=conv(8, 8), norm=nn.GroupNorm(2, 8), last=conv(8))
    x = draw(1, 8, 64, 64)
    converted, _ = mt.convert(model)
    exact = copy.deepcopy(model).double()(x.double())
    own, actual = ((m(x).double() - exact).abs().max() for m in (model, converted))
    assert actual <= 4 * own + 1e-6


def test_a_convolutional_network_stays_channels_last() -> None:
    model = network(
        lambda m, x: functional.interpolate(torch.cat([m.a(x), m.b(x)], 1), scale_factor=2.0),
        a=conv(), b=nn.Sequential(conv(), nn.MaxPool2d(3, 1, 1), conv()),
    )  # fmt: skip
    converted, report = convert_and_compare(model, X)
    assert len(report.replaced) == 3
    targets = [getattr(node.target, "__name__", "") for node in cast(Any, converted).graph.nodes]
    assert "as_without" not in targets
    weights = [m.weight for m in converted.modules() if isinstance(m, mt.Conv2d)]
    assert converted(X).is_contiguous(memory_format=torch.channels_last) and len(weights) == 3


def test_a_format_is_restored_once() -> None:
    model = network(
        lambda m, x: m.probe(functional.relu(torch.cat([m.a(x), m.b(x)], 1))),
        a=conv(), b=conv(), probe=Probe(),
    )  # fmt: skip
    converted, _ = convert_and_compare(model, X)
    targets = [getattr(node.target, "__name__", "") for node in cast(Any, converted).graph.nodes]
    assert targets.count("as_without") == 1


def test_weights_lie_channels_last() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.deep = conv(), nn.Conv3d(2, 3, 2)
            self.line = nn.Conv1d(3, 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)  # type: ignore[no-any-return]

    model = nn.ModuleList([nn.Sequential(Net().conv), Net().deep, Net().line])
    converted, _ = mt.convert(model)
    for module in converted.modules():
        if isinstance(module, mt.Conv1d | mt.Conv2d | mt.Conv3d):
            assert module.weight.movedim(1, -1).is_contiguous()
    assert cast(Any, converted)[0](X).is_contiguous()

    class Reader(Net):
        def forward(self, x: Tensor) -> Tensor:
            flat = self.conv.weight.view(4, -1)
            return cast(Tensor, self.conv(x) * flat.sum() if x.sum() > -1e9 else x)

    convert_and_compare(Reader().eval(), X)


# Checkpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_the_original_checkpoint_is_refused(strict: bool) -> None:
    model = network(lambda m, x: m.bn(m.conv(x)), conv=conv(), bn=nn.BatchNorm2d(4))
    state = randomize(copy.deepcopy(model), 3).state_dict()
    converted, _ = mt.convert(model)
    expected = converted(X)
    stream = io.BytesIO()
    torch.save(converted, stream)
    stream.seek(0)
    for other in (converted, copy.deepcopy(converted), torch.load(stream, weights_only=False)):
        with pytest.raises(RuntimeError, match=r"is of the model before maxconv\.torch"):
            other.load_state_dict(state, strict=strict)
        own = mt.convert(model)[0].state_dict()
        other.load_state_dict(own, strict=strict)
        assert torch.equal(other(X), expected)
        for name in ("bn", "conv"):
            part = {key: value for key, value in state.items() if key.startswith(name)}
            with pytest.raises(RuntimeError, match=rf"{name}.bias is of the model before"):
                other.load_state_dict(part, strict=False)


def test_a_checkpoint_that_fits_is_loaded() -> None:
    model = network(lambda m, x: torch.relu(m.conv(x)), conv=conv())
    other = network(lambda m, x: torch.relu(m.conv(x)), conv=conv())
    converted, _ = mt.convert(model)
    converted.load_state_dict(other.state_dict())
    assert torch.allclose(converted(X), other(X), atol=1e-5)


# Training ---------------------------------------------------------------------------------------


class Untraced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = conv()

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.part(x) if x.shape[0] < 9 else x)


TRAINED: dict[str, Callable[[], nn.Module]] = {
    "a graph": lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU()),
    "no graph": Untraced,
    "a convolution": conv,
    "a transposed one": lambda: nn.ConvTranspose2d(4, 4, 2),
    "a subclass": lambda: Same(4, 4, 3),
    "nothing to replace": lambda: nn.Sequential(nn.ReLU()),
}


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_refused(name: str) -> None:
    converted, _ = mt.convert(randomize(TRAINED[name]()).eval())
    others = (converted, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted)))
    for model in others:
        for part in (model, nn.Sequential(model), torch.compile(model, backend="eager")):
            for arguments in ((), (True,)):
                with pytest.raises(RuntimeError, match=r"mode: True is not supported .* eval\(\)"):
                    cast(Any, part).train(*arguments)
        model.eval()
        assert model.train(False) is model and not model.training
        assert torch.equal(model(X), converted(X))
        exported = torch.export.export(model, (X,))
        assert torch.allclose(exported.module()(X), converted(X), atol=1e-5)


def test_training_is_refused_before_anything_is_changed() -> None:
    model = nn.Sequential(nn.Dropout(0.5), conv(), nn.BatchNorm2d(4)).eval()
    converted, _ = mt.convert(model)
    with pytest.raises(RuntimeError, match="mode: True"):
        converted.train()
    assert not any(part.training for part in converted.modules())
    assert model.train().training and mt.Conv2d(4, 4, 3).train().training


def test_hooks_of_a_graph_survive_a_pickle() -> None:
    converted, _ = mt.convert(network(lambda m, x: m.conv(x), conv=conv()))
    converted.register_forward_hook(_doubled)
    assert torch.equal(pickle.loads(pickle.dumps(converted))(X), converted(X))


def _doubled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


# What stays in PyTorch --------------------------------------------------------------------------


def _helper(x: Tensor, weight: Tensor) -> Tensor:
    return functional.conv2d(x, weight, padding=1)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(draw(4, 4, 3, 3))
        self.conv1d = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1d(_helper(x, self.weight))
        return functional.conv_transpose2d(y, self.weight) if y.sum() > -1e9 else y


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_the_report_counts_functions_and_scripts() -> None:
    scripted = torch.jit.script(nn.Sequential(conv(), nn.ReLU(), conv()))
    model = nn.ModuleDict({"f": Functional(), "s": scripted, "bn": nn.BatchNorm2d(4)}).eval()
    _, report = mt.convert(model)
    why = "a Functional, which cannot be traced, calls it"
    assert [(e.name, e.kind, e.reason) for e in report.left] == [
        ("f", "conv2d", why),
        ("f", "conv_transpose2d", why),
        ("s", "conv2d", "it is scripted: PyTorch's interpreter runs it"),
        ("s", "conv2d", "it is scripted: PyTorch's interpreter runs it"),
        ("bn", "BatchNorm2d", "the module that calls it cannot be traced"),
    ]
    assert not report.replaced


def test_compiled_parts_stay() -> None:
    model = nn.ModuleList([torch.compile(conv(), backend="eager")])  # type: ignore[list-item]
    _, report = mt.convert(model)
    assert left(report) == {"0": "it is compiled; convert the model, and compile the result"}
