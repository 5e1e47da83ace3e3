"""``maxconv.torch.convert``: what it leaves, or cannot trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tests.interop.conversion import X, conv, convert_and_compare, fused, left, network
from tests.interop.torch_tensors import draw
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

import maxconv.torch as mt
from maxconv.bench.resnet import Bottleneck, randomize
from maxconv.torch._modules import _Conv

pytestmark = pytest.mark.torch


# What is not fused ------------------------------------------------------------------------------


def test_several_consumers() -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        z = m.second(torch.relu(y) + y)
        return cast(Tensor, m.bn(z) * z)

    _, report = convert_and_compare(
        network(call, first=conv(), second=conv(), bn=nn.BatchNorm2d(4)), X
    )
    assert fused(report) == {"first": (), "second": ()}
    assert [entry.note for entry in report.replaced] == ["2 nodes read its output"] * 2
    assert left(report) == {"bn": "second, in front of it, has other readers too"}


def test_normalizations_that_stay() -> None:
    model = network(
        lambda m, x: m.last(torch.relu(m.unused(torch.relu(m.conv(m.first(x)))))),
        first=nn.BatchNorm2d(4),
        conv=conv(),
        unused=nn.BatchNorm2d(4),
        last=nn.Sequential(conv(), nn.BatchNorm2d(4, track_running_stats=False)),
    )
    _, report = convert_and_compare(model, X)
    assert left(report) == {
        "first": "no convolution is in front of it",
        "unused": "it follows relu, not the convolution itself",
        "last.1": "it has no running statistics",
    }


def test_training_mode() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.0)).train()
    converted, report = mt.convert(model)
    assert left(report) == {"1": "it is in training mode; call eval() first"}
    assert converted.training and fused(report) == {"0": ()}
    assert torch.allclose(converted(X), model(X), atol=1e-5)


def test_normalization_without_scale_and_offset() -> None:
    model = network(lambda m, x: m.bn(m.conv(x)), conv=conv(), bn=nn.BatchNorm2d(4, affine=False))
    _, report = convert_and_compare(model, X)
    assert fused(report)["conv"] == ("BatchNorm2d bn",)


def test_shared_modules() -> None:
    # Each place gets a filter of its own where something is folded, and none where nothing is.
    model = network(
        lambda m, x: m.conv(torch.relu(m.bn(m.conv(x)))) + m.bn(m.other(m.bn(x))),
        conv=conv(), other=conv(), bn=nn.BatchNorm2d(4),
    )  # fmt: skip
    converted, report = convert_and_compare(model, X)
    assert [(entry.name, entry.fused) for entry in report.replaced] == [
        ("conv", ("BatchNorm2d bn", "relu")),
        ("conv", ()),
        ("other", ("BatchNorm2d bn", "residual")),
    ]
    assert left(report) == {"bn": "no convolution is in front of it"}
    model = network(lambda m, x: m.conv(m.conv(x)), conv=conv())
    converted, _ = convert_and_compare(model, X)
    weights = {m.weight.data_ptr() for m in converted.modules() if isinstance(m, mt.Conv2d)}
    assert len(weights) == 1


def test_modules_that_stay() -> None:
    class Own(nn.Conv2d):
        pass

    hooked = conv()
    hooked.register_forward_hook(lambda module, inputs, output: output * 2)
    model = nn.ModuleDict(
        {
            "transposed": nn.ConvTranspose2d(4, 4, 3, padding=1),
            "subclass": Own(4, 4, 3),
            "hooked": hooked,
            "parametrized": weight_norm(conv()),
            "wide": conv().double(),
            "lazy": nn.LazyConv2d(4, 1),
            "norm": nn.BatchNorm2d(4),
        }
    )
    converted, report = mt.convert(model)
    assert left(report) == {
        "hooked": "it has forward hooks",
        "wide": "dtype torch.float64 is not supported",
        "lazy": "it is not initialized; call the model once first",
        "norm": "it is in training mode; call eval() first",
    }
    assert fused(report) == {"transposed": (), "subclass": (), "parametrized": ()}
    own = {name for name, module in converted.named_modules() if isinstance(module, _Conv)}
    assert own == {"parametrized"}


def test_a_subclass_that_calls_the_function_is_traced() -> None:
    class Standardized(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return functional.conv2d(input, weight, self.bias, self.stride, self.padding)

    model = network(lambda m, x: torch.relu(m.conv(x)), conv=Standardized(4, 6, 3, padding=1))
    _, report = convert_and_compare(model, X)
    assert [(entry.kind, entry.fused) for entry in report.replaced] == [("conv2d", ("relu",))]


def test_writes_in_between() -> None:
    # The convolution reads x before it is overwritten, so it cannot wait for its residual.
    def call(m: Any, x: Tensor) -> Tensor:
        x = x * 1.0
        y = m.conv(x)
        return cast(Tensor, y + m.act(x))

    model = network(call, conv=conv(), act=nn.ReLU(inplace=True))
    _, report = convert_and_compare(model, X)
    assert fused(report) == {"conv": ()}
    assert report.replaced[0].note == "no residual: act, in between, may write to a tensor"

    def into_other(m: Any, x: Tensor) -> Tensor:
        z = x * 1.0
        z += m.conv(x)
        return z

    _, report = convert_and_compare(network(into_other, conv=conv()), X)
    assert report.replaced[0].note == "no residual: it is added in place to another tensor"

    def counting(m: Any, x: Tensor) -> Tensor:
        size = x.shape[0]
        before = size
        size += 1
        y = m.conv(x)
        z = y
        z *= before
        return cast(Tensor, y * size)

    convert_and_compare(network(counting, conv=conv()), X)

    def ignored(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        functional.relu_(y)
        return cast(Tensor, y)

    convert_and_compare(network(ignored, conv=conv()), X)


# What cannot be traced --------------------------------------------------------------------------


class Branching(nn.Module):
    """Decides by values what it does, around blocks that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(4, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.ModuleList([Bottleneck(16, 4, 1), Bottleneck(16, 4, 2)])
        self.head = nn.Conv2d(16, 3, 1)
        self.alias = self.head
        self.up = nn.ConvTranspose2d(3, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if x.sum() > -1e9 else -x
        return cast(Tensor, self.up(self.alias(x)))


def test_fallback_to_parts() -> None:
    model = randomize(Branching()).eval()
    converted, report = convert_and_compare(model, X)
    assert type(converted) is Branching
    assert [entry.name for entry in report.untraced] == ["(model)"]
    assert "control flow" in report.untraced[0].reason
    # The stem is a container, which this class does nothing with but call.
    assert report.traced == ["stem", "blocks.0", "blocks.1"]
    by_name = fused(report)
    assert by_name["stem.0"] == ("BatchNorm2d stem.1", "relu") and by_name["head"] == ()
    assert by_name["blocks.0.conv3"] == ("BatchNorm2d blocks.0.bn3", "residual", "relu")
    assert by_name["up"] == () and not report.left
    assert converted.alias is converted.head
    assert "not traced: single convolutions only" in str(report)
    assert 'torch.compile(model, backend="maxconv")' in str(report)


def test_containers_that_are_indexed_stay() -> None:
    class Indexing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU())
            self.other = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU())
            self.both = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            features = [self.both[1](self.both(x))]
            for layer in self.stem if x.sum() > -1e9 else ():
                features.append(layer(features[-1]))
            return self.other(features[1]) + features[3]  # type: ignore[no-any-return]

    model = randomize(Indexing()).eval()
    _, report = convert_and_compare(model, X)
    norm = "BatchNorm2d other.1"
    assert fused(report) == {"stem.0": (), "other.0": (norm, "relu"), "both.0": ()}
    why = "the module that calls it cannot be traced"
    assert left(report) == {"stem.1": why, "both.1": why}


def test_modules_with_methods_keep_them() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = conv(), nn.BatchNorm2d(4)

        def encode(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.bn(self.conv(x)))

        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x).relu()

    def call(m: Any, x: Tensor) -> Tensor:
        return cast(Tensor, m.encoder.encode(x) if x.sum() > -1e9 else m.encoder(x))

    _, report = convert_and_compare(network(call, encoder=Encoder()), X)
    assert fused(report) == {"encoder.conv": ()}


def test_attributes_are_kept() -> None:
    model = network(lambda m, x: m.conv(x), conv=conv())
    model.classes = ["a", "b"]  # type: ignore[assignment]
    converted, _ = convert_and_compare(model, X)
    assert cast(Any, converted).classes == ["a", "b"]
    assert not converted.training and type(converted).__name__ == "Net"


def test_optional_arguments_are_not_traced() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv()

        def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
            y = self.conv(x)
            return cast(Tensor, y if skip is None else y + skip)

    model = Skip().eval()
    convert_and_compare(model, X)
    converted, report = convert_and_compare(model, X, draw(*X.shape, seed=3))
    assert type(converted) is Skip
    assert report.untraced[0].reason == (
        "forward does something else without its optional argument 'skip'"
    )


@pytest.mark.parametrize("draw_one", [lambda: torch.rand(1).item(), random.random])
def test_random_branches_are_not_traced(draw_one: Callable[[], float]) -> None:
    model = network(lambda m, x: m.conv(x) * (draw_one() < 2), conv=conv())
    states = torch.get_rng_state(), random.getstate()
    _, report = mt.convert(model)
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert "draws random numbers" in report.untraced[0].reason
    assert fused(report) == {"conv": ()}


def test_hooks_are_not_lost() -> None:
    block = Bottleneck(16, 4, 1)
    model = randomize(nn.Sequential(block, conv(16, 4))).eval()
    block.register_forward_hook(lambda module, inputs, output: output * 3)
    _, report = convert_and_compare(model, draw(1, 16, 6, 6))
    assert report.untraced[0].reason == "0 has forward hooks"
    assert report.traced == []


def test_conversion_of_a_converted_model() -> None:
    model = randomize(nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU())).eval()
    converted, _ = mt.convert(model)
    again, report = mt.convert(converted)
    assert not report.replaced and not report.left
    assert torch.equal(again(X), converted(X))


def test_only_modules() -> None:
    with pytest.raises(TypeError, match=r"^module: a function is not a torch.nn.Module"):
        mt.convert(cast(Any, draw))
