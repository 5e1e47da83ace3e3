"""``maxconv.torch.convert``: what it fuses, that the numbers stay, and what its result can do."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.interop.conversion import X, conv, convert_and_compare, fused, network
from tests.interop.torch_tensors import draw
from torch import Tensor, fx, nn
from torch.nn import functional

import maxconv.torch as mt
from maxconv.bench.resnet import ResNet, randomize, resnet50
from maxconv.torch._pooling import GlobalAvgPool2d

pytestmark = pytest.mark.torch


# What is fused ----------------------------------------------------------------------------------


def test_residual_network() -> None:
    model = randomize(ResNet((2, 1, 1, 1), 10)).eval()
    converted, report = convert_and_compare(model, draw(2, 3, 64, 48))
    assert report.traced == ["(model)"] and not report.left and not report.untraced
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(report.replaced) == len(convolutions)
    by_name = fused(report)
    assert by_name["conv1"] == ("BatchNorm2d bn1", "relu")
    assert by_name["layer1.1.conv3"] == ("BatchNorm2d layer1.1.bn3", "residual", "relu")
    # The sum is written to the former, which therefore adds the latter.
    assert by_name["layer1.0.conv3"] == ("BatchNorm2d layer1.0.bn3", "residual", "relu")
    assert by_name["layer1.0.downsample.0"] == ("BatchNorm2d layer1.0.downsample.1",)
    assert not any(entry.note for entry in report.replaced)
    # Nothing but the kernels is left of the blocks.
    kinds = {type(module) for module in converted.modules() if not list(module.children())}
    assert kinds == {mt.Conv2d, nn.MaxPool2d, GlobalAvgPool2d, nn.Linear}
    assert list(report.to_dict()) == ["replaced", "left", "traced", "untraced"]


def test_resnet50() -> None:
    _, report = convert_and_compare(resnet50(), draw(1, 3, 96, 96))
    assert len(report.replaced) == 53 and not report.left
    assert sum("residual" in entry.fused for entry in report.replaced) == 16
    assert sum("relu" in entry.fused for entry in report.replaced) == 49


def test_report_is_a_table_and_json() -> None:
    up = nn.ConvTranspose2d(4, 2, 2)
    up.register_forward_hook(lambda module, inputs, output: output * 2)
    model = network(
        lambda m, x: m.up(m.act(m.bn(m.conv(x)))),
        conv=conv(), bn=nn.BatchNorm2d(4), act=nn.ReLU(), up=up,
    )  # fmt: skip
    _, report = convert_and_compare(model, X)
    assert str(report) == (
        "1 convolutions replaced, 1 modules left\n"
        "\n"
        "replaced  was     fused\n"
        "--------  ------  ---------------------\n"
        "conv      Conv2d  BatchNorm2d bn + relu\n"
        "\n"
        "left  is               because\n"
        "----  ---------------  --------------------\n"
        "up    ConvTranspose2d  it has forward hooks"
    )
    read = json.loads(report.to_json())
    assert read["replaced"] == [
        {"name": "conv", "kind": "Conv2d", "fused": ["BatchNorm2d bn", "relu"], "note": ""}
    ]
    assert read["left"][0]["name"] == "up"


ACTIVATIONS: dict[str, tuple[nn.Module, list[Callable[[Tensor], Tensor]]]] = {
    "relu": (nn.ReLU(), [functional.relu, torch.relu, lambda x: x.relu()]),
    "relu in place": (
        nn.ReLU(inplace=True),
        [
            lambda x: functional.relu(x, True),
            lambda x: functional.relu(x, inplace=True),
            torch.relu_,
        ],
    ),
    "relu6": (nn.ReLU6(), [functional.relu6, lambda x: x.clamp_(0, 6)]),
    "hardtanh": (
        nn.Hardtanh(-0.5, 0.75),
        [lambda x: functional.hardtanh(x, -0.5, 0.75), lambda x: torch.clip(x, max=0.75, min=-0.5)],
    ),
    "one-sided": (nn.Hardtanh(0.25, float("inf")), [lambda x: torch.clamp(x, 0.25)]),
    "leaky": (nn.LeakyReLU(0.2), [lambda x: functional.leaky_relu(x, 0.2, True)]),
    "sigmoid": (nn.Sigmoid(), [functional.sigmoid, torch.sigmoid, lambda x: x.sigmoid_()]),
    "silu": (nn.SiLU(), [functional.silu]),
    "hardswish": (nn.Hardswish(), [functional.hardswish]),
    "hardsigmoid": (nn.Hardsigmoid(), [functional.hardsigmoid]),
    "gelu": (nn.GELU(), [functional.gelu, lambda x: functional.gelu(x, approximate="none")]),
    "gelu tanh": (nn.GELU("tanh"), [lambda x: functional.gelu(x, approximate="tanh")]),
    "tanh": (nn.Tanh(), [functional.tanh, torch.tanh, lambda x: x.tanh()]),
}


def after(function: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: function(m.conv(x))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    module, functions = ACTIVATIONS[name]
    forms: list[nn.Module] = [network(lambda m, x: m.act(m.conv(x)), conv=conv(), act=module)]
    for function in functions:
        forms.append(network(after(function), conv=conv()))
    for form in forms:
        # Beyond all bounds.
        converted, report = convert_and_compare(form, 9 * X)
        assert len(report.replaced[0].fused) == 1
        assert isinstance(converted, fx.GraphModule)
        assert [node.op for node in converted.graph.nodes] == [
            "placeholder",
            "call_module",
            "output",
        ]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(functional.elu, id="elu"),
        pytest.param(functional.softplus, id="softplus"),
        pytest.param(lambda x: x.clamp(1.0, -1.0), id="empty clamp"),
        pytest.param(lambda x: functional.relu(x.mean()) + x, id="not elementwise"),
    ],
)
def test_other_functions_stay(function: Callable[[Tensor], Tensor]) -> None:
    _, report = convert_and_compare(network(after(function), conv=conv()), X)
    assert fused(report) == {"conv": ()}


def test_a_computed_bound_stays() -> None:
    model = network(lambda m, x: torch.clamp(m.conv(x), max=x.amax() / 9), conv=conv())
    _, report = convert_and_compare(model, X)
    assert fused(report) == {"conv": ()}


ADDITIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plus": lambda m, x: m.conv(x) + x,
    "plus from the left": lambda m, x: x + m.conv(x),
    "in place": lambda m, x: m.conv(x).add_(x),
    "torch.add": lambda m, x: torch.add(x, m.conv(x)),
    "alpha": lambda m, x: torch.add(m.conv(x), x, alpha=0.5),
    "method": lambda m, x: m.conv(x).add(x, alpha=-2),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_residuals(name: str) -> None:
    add = ADDITIONS[name]
    model = network(
        lambda m, x: torch.sigmoid(add(m, x)), conv=nn.Sequential(conv(), nn.BatchNorm2d(4))
    )
    _, report = convert_and_compare(model, X)
    assert fused(report) == {"conv.0": ("BatchNorm2d conv.1", "residual", "sigmoid")}


def test_activation_on_both_sides_of_a_residual() -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        y = functional.gelu(m.bn(m.conv(x)))
        y += x
        return functional.leaky_relu(y, 0.1)

    _, report = convert_and_compare(network(call, conv=conv(), bn=nn.BatchNorm2d(4)), X)
    assert fused(report)["conv"] == ("BatchNorm2d bn", "gelu", "residual", "leaky_relu")


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda x: x.mean((2, 3), keepdim=True), id="a pixel"),
        pytest.param(lambda x: x[:1], id="an image"),
        pytest.param(lambda x: x.double(), id="another dtype"),
        pytest.param(lambda x: x.shape[0], id="a number"),
        pytest.param(lambda x: torch.stack([x, x]), id="more dimensions"),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_additions_of_other_shapes(other: Callable[[Tensor], Any], in_place: bool) -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        if in_place:
            y += other(x)
        else:
            y = y + other(x)
        return torch.relu(y)

    model = network(call, conv=conv())
    if in_place and isinstance(other(X), Tensor) and other(X).dim() > 4:
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            mt.convert(model)[0](X)
    else:
        convert_and_compare(model, X)


def test_depthwise_separable_network() -> None:
    def block(c: int, k: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(c, c, 3, stride, 1, groups=c, bias=False),
            nn.BatchNorm2d(c),
            nn.ReLU6(inplace=True),
            nn.Conv2d(c, k, 1, bias=False),
            nn.BatchNorm2d(k),
            nn.Hardswish(inplace=True),
        )

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        block(8, 16, 1),
        nn.Dropout(0.5),
        block(16, 24, 2),
        nn.Identity(),
        nn.Flatten(),
        nn.LazyLinear(5),
    )
    x = draw(2, 3, 33, 30)
    model(x)
    _, report = convert_and_compare(randomize(model).eval(), x)
    assert len(report.replaced) == 5 and not report.left
    assert all(len(entry.fused) == 2 for entry in report.replaced)


def test_functional_network() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(draw(8, 4, 3, 3))
            self.offset = nn.Parameter(draw(8))
            self.second = nn.Buffer(draw(8, 2, 3, 3, seed=1))
            self.inner = nn.ParameterDict({"third": nn.Parameter(draw(8, 8, 1, 1, seed=2))})
            self.gain = nn.Parameter(draw(8, 1, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = functional.relu(functional.conv2d(x, self.first, self.offset, padding="same"))
            y = torch.conv2d(x, self.second, None, 1, 1, groups=4)
            y = functional.silu(y + x)
            standard = self.inner["third"] / self.inner["third"].std()
            y = functional.hardtanh(functional.conv2d(y, standard, bias=self.offset), -0.4, 0.5)
            return functional.conv2d(y, self.gain * self.first.transpose(0, 1)[:1, :1], groups=8)

    model = Functional()
    with torch.no_grad():
        model.gain.abs_()
    converted, report = convert_and_compare(model, X)
    assert [(entry.kind, entry.fused) for entry in report.replaced] == [
        ("conv2d", ("relu",)),
        ("conv2d", ("residual", "silu")),
        ("conv2d", ("clamp",)),
        ("conv2d", ()),
    ]
    assert sum(isinstance(module, mt.Conv2d) for module in converted.modules()) == 3


def test_ranks() -> None:
    audio = nn.Sequential(nn.Conv1d(3, 8, 5, 2, 2), nn.BatchNorm1d(8), nn.GELU())
    _, report = convert_and_compare(randomize(audio).eval(), draw(2, 3, 41))
    assert fused(report) == {"0": ("BatchNorm1d 1", "gelu")}
    video = nn.Sequential(nn.Conv3d(2, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ReLU())
    _, report = convert_and_compare(randomize(video).eval(), draw(1, 2, 5, 6, 7))
    assert fused(report) == {"0": ("BatchNorm3d 1", "relu")}


def test_half_precision() -> None:
    model = randomize(nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU())).eval()
    exact = copy.deepcopy(model).double()(X.double()).detach()
    for dtype in (torch.bfloat16, torch.float16):
        converted, report = mt.convert(copy.deepcopy(model).to(dtype))
        actual = converted(X.to(dtype))
        assert actual.dtype == dtype and report.replaced[0].fused == ("BatchNorm2d 1", "relu")
        assert ((actual.double() - exact).abs() / exact.abs().max()).max() < 0.02


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes(mode: str) -> None:
    model = network(
        lambda m, x: torch.relu(m.bn(m.conv(x))) + x,
        conv=conv(padding_mode=mode),
        bn=nn.BatchNorm2d(4),
    )
    _, report = convert_and_compare(model, X)
    assert fused(report) == {"conv": ("BatchNorm2d bn", "relu", "residual")}


def test_a_single_convolution() -> None:
    converted, report = convert_and_compare(conv(), X)
    assert type(converted) is mt.Conv2d
    assert fused(report) == {"(model)": ()}


# What the result can do -------------------------------------------------------------------------


def test_the_result_is_an_ordinary_model() -> None:
    model = randomize(nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv())).eval()
    converted, _ = mt.convert(model)
    assert not any(parameter.requires_grad for parameter in converted.parameters())
    expected = converted(X)
    assert torch.equal(copy.deepcopy(converted)(X), expected)
    stream = io.BytesIO()
    torch.save(converted, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False)(X), expected)
    torch.compiler.reset()
    compiled = torch.compile(converted, fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(compiled(X), expected)
    exported = torch.export.export(converted, (X,))
    assert torch.equal(exported.module()(X), expected)
    other, _ = mt.convert(randomize(copy.deepcopy(model), 1))
    assert not torch.equal(other(X), expected)
    other.load_state_dict(converted.state_dict())
    assert torch.equal(other(X), expected)


def test_a_pickled_graph_is_the_same_graph() -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        images, channels, _, _ = x.shape
        y = m.conv(x) * (images + channels)
        y += functional.conv2d(x, m.conv.weight * 2, padding=1)
        return torch.tanh(y)

    converted: Any = mt.convert(network(call, conv=conv()))[0]
    loaded = pickle.loads(pickle.dumps(converted))
    targets = [[node.target for node in m.graph.nodes] for m in (converted, loaded)]
    assert targets[0] == targets[1] and torch.equal(loaded(X), converted(X))


def test_conversion_under_inference_mode() -> None:
    model = randomize(nn.Sequential(conv(), nn.BatchNorm2d(4), conv())).eval()
    with torch.inference_mode():
        inner = copy.deepcopy(model)
        converted, _ = mt.convert(inner)
    assert not any(parameter.is_inference() for parameter in converted.parameters())
    assert torch.allclose(converted(X), model(X), atol=1e-5)


def test_memory_format_of_the_result() -> None:
    model = network(lambda m, x: m.conv(x).view(2, -1), conv=conv())
    convert_and_compare(model, X)
    image = network(lambda m, x: m.conv(x), conv=conv())
    for channels_last, expected in ((True, True), (False, False)):
        converted, _ = mt.convert(image, channels_last=channels_last)
        output = converted(X)
        assert output.is_contiguous(memory_format=torch.channels_last) is expected
    # A view that something is written through must stay one.
    model = network(lambda m, x: m.conv(x).view(torch.int32).view(2, 4, 72), conv=conv())
    converted, _ = mt.convert(model)
    assert isinstance(converted, fx.GraphModule)
    names = [node.target for node in converted.graph.nodes if node.op == "call_method"]
    assert names == ["view", "reshape"]
