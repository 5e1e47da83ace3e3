"""``torch.compile(backend="maxconv")``: what becomes maxconv's, and that the numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tests.interop.backend import called, compare, compiled, reported
from tests.interop.conversion import X, conv, network
from tests.interop.torch_tensors import draw, last
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from maxconv.bench.resnet import ResNet, randomize

pytestmark = pytest.mark.torch


# Single convolutions ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_ranks_strides_groups_and_dilations(rank: int) -> None:
    kind: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = kind(4, 6, 3, stride=2, padding=1, bias=False)
            self.second = kind(6, 6, 3, padding=2, dilation=2, groups=3)
            self.third = kind(6, 5, 2, padding="same")
            self.fourth = kind(5, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.fourth(self.third(self.second(self.first(x)))))

    model = Net().eval()
    x = draw(2, 4, *(9, 8, 7)[:rank])
    # Without a batch too, which the graph adds.
    for input in (x, x[0], last(x)):
        compare(model, input, count=4)


def test_integers_are_exact() -> None:
    # Sums of products of small integers have no rounding: a swapped index shows.
    w = torch.arange(4 * 3 * 3 * 3, dtype=torch.float32).reshape(4, 3, 3, 3) % 17 - 8
    x = torch.arange(2 * 3 * 9 * 8, dtype=torch.float32).reshape(2, 3, 9, 8) % 13 - 6
    b = torch.arange(4.0)
    residual = torch.arange(2 * 4 * 5 * 8, dtype=torch.float32).reshape(2, 4, 5, 8) % 11

    def step(x: Tensor) -> Tensor:
        y = functional.conv2d(functional.pad(x, (0, 2)), w, b, stride=(2, 1), padding=(1, 0))
        return functional.relu(y + residual)

    network = compiled(step)
    with torch.no_grad():
        assert torch.equal(network(x), step(x))
        assert torch.equal(network(last(x)), step(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types(dtype: torch.dtype) -> None:
    model = network(
        lambda m, x: torch.relu(m.second(m.bn(m.first(x))) + x),
        first=conv(), bn=nn.BatchNorm2d(4), second=conv(),
    ).to(dtype)  # fmt: skip
    # The sum is rounded once where PyTorch rounds three times, but the filter is rounded once more:
    # a unit roundoff of bfloat16 is 4e-3.
    compare(model, X.to(dtype), count=2, tolerance=1e-2)


# Activations ------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "relu": [functional.relu, lambda x: x.relu_()],
    "clamp": [
        functional.relu6,
        functional.hardtanh,
        lambda x: functional.hardtanh_(x, -0.5, 0.25),
        lambda x: x.clamp(max=0.5),
        lambda x: torch.clamp(x, -0.1, 0.1),
        lambda x: torch.clamp_min(x, 0.1),
    ],
    "leaky_relu": [lambda x: functional.leaky_relu(x, 0.2)],
    "sigmoid": [torch.sigmoid],
    "silu": [functional.silu, lambda x: functional.silu(x, inplace=True)],
    "hard_swish": [functional.hardswish],
    "hard_sigmoid": [functional.hardsigmoid],
    "gelu": [functional.gelu],
    "gelu_tanh": [lambda x: functional.gelu(x, approximate="tanh")],
    "tanh": [torch.tanh, lambda x: x.tanh_()],
}


def test_activations(caplog: pytest.LogCaptureFixture) -> None:
    steps = [(name, step) for name, made in ACTIVATIONS.items() for step in made]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.ModuleList(conv() for _ in steps)

        def forward(self, x: Tensor) -> list[Tensor]:
            pairs = zip(self.convolutions, steps, strict=True)
            return [step(convolution(x)) for convolution, (_, step) in pairs]

    model = Net().eval()
    # exp, erf and tanh are right to 1e-6 of their values.
    compare(model, X, count=len(steps), tolerance=2e-6)
    lines = [line for line in reported(caplog, model, X).splitlines() if "convolutions." in line]
    assert [line.split()[-1] for line in lines] == [name for name, _ in steps]


def test_what_kernels_do_not_have_stays(caplog: pytest.LogCaptureFixture) -> None:
    model = network(
        lambda m, x: (
            functional.softplus(m.a(x)) + functional.silu(m.b(x)) * m.c(x).clamp(1.0, 0.5)
            + m.d(x).clamp(min=float("nan"))
        ),
        a=conv(), b=conv(), c=conv(), d=conv(),
    )  # fmt: skip
    text = reported(caplog, model, X)
    assert [line.split() for line in text.splitlines()[-4:]] == [
        ["a", "conv2d"],
        ["b", "conv2d", "silu"],
        ["c", "conv2d"],
        ["d", "conv2d"],
    ]


# Normalizations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_batch_norm_is_folded(rank: int) -> None:
    kind: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank]
    norm: Any = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[rank]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList()
            for bias in (True, False):
                for affine in (True, False):
                    part = kind(4, 6, 3, groups=2, bias=bias), norm(6, affine=affine, eps=0.1)
                    self.parts.append(nn.Sequential(*part))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [torch.relu(part(x)) for part in self.parts]

    model = randomize(Net()).eval()
    compiled = compare(model, draw(2, 4, *(6, 5, 4)[:rank]), count=4)
    with torch.no_grad():
        _, calls = called(compiled, draw(2, 4, *(6, 5, 4)[:rank]))
    assert not [name for name in calls if "norm" in name]


def test_batch_norm_that_is_not_folded(caplog: pytest.LogCaptureFixture) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.c(x)
        return [m.n1(m.a(x)), m.n2(m.b(x)), y, m.n3(y), m.n4(torch.relu(m.d(x)))]

    model: Any = network(
        forward, a=conv(), b=conv(), c=conv(), d=conv(), n1=nn.BatchNorm2d(4),
        n2=nn.BatchNorm2d(4, track_running_stats=False), n3=nn.BatchNorm2d(4),
        n4=nn.BatchNorm2d(4),
    )  # fmt: skip
    model.n1.train()
    text = reported(caplog, model, X)
    assert "batch_norm" not in text
    assert "c         conv2d         2 nodes read its output" in text
    compare(model, X, count=4)


# Residuals --------------------------------------------------------------------------------------


def test_residuals(caplog: pytest.LogCaptureFixture) -> None:
    def in_place(y: Tensor, x: Tensor) -> Tensor:
        y += x
        return y.relu_()

    forms: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda y, x: y + x,
        lambda y, x: x + y,
        lambda y, x: torch.add(y, x, alpha=0.5),
        lambda y, x: y - x,
        lambda y, x: y.sub(x, alpha=2),
        lambda y, x: functional.silu(functional.gelu(y) + x),
        in_place,
    ]
    fused = [
        "residual", "residual", "residual", "residual", "residual", "gelu + residual + silu",
        "residual + relu",
    ]  # fmt: skip

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.ModuleList(conv() for _ in forms)

        def forward(self, x: Tensor) -> list[Tensor]:
            pairs = zip(self.convolutions, forms, strict=True)
            return [form(convolution(x), x) for convolution, form in pairs]

    model = Net().eval()
    text = reported(caplog, model, X)
    lines = [line for line in text.splitlines() if line.startswith("convolutions.")]
    assert [line.split(maxsplit=2)[2] for line in lines] == fused
    compare(model, X, count=len(forms))
    compare(model, last(X), count=len(forms))


def test_additions_that_are_no_residuals(caplog: pytest.LogCaptureFixture) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return [
            m.scaled(x) + x[:, :1],
            torch.add(x, m.other(x), alpha=0.5),
            m.number(x) + 1.0,
            m.wider(x) + x.double(),
            (y := m.itself(x)) + y,
        ]

    model = network(
        forward, scaled=conv(), other=conv(), number=conv(), wider=conv(), itself=conv()
    )
    text = reported(caplog, model, X)
    for name, note in {
        "scaled": "what is added is of another shape",
        "other": "it is scaled in the addition",
        "number": "no other tensor is added",
        "wider": "what is added is of another dtype",
        "itself": "no other tensor is added",
    }.items():
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        assert line.endswith(note), text
    compare(model, X, count=5)


def test_two_convolutions_are_added_by_the_later_one(caplog: pytest.LogCaptureFixture) -> None:
    model = network(
        lambda m, x: torch.relu(m.first(x) + m.second(torch.relu(m.middle(x)))),
        first=conv(), middle=conv(), second=conv(),
    )  # fmt: skip
    text = reported(caplog, model, X)
    assert text.splitlines()[-1].split() == ["second", "conv2d", "residual", "+", "relu"]
    compare(model, X, count=3)


def test_several_readers() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        z = torch.relu(y)
        z2 = m.b(z) + y
        return [y, z, z2, m.c(z2), y[:, 1:3, ::2], z2.flatten(2), y.expand(2, 2, 4, 9, 8)]

    model = network(forward, a=conv(), b=conv(), c=conv())
    for x in (X, last(X)):
        compare(model, x, count=3)


# What module replacement cannot see -------------------------------------------------------------


class Conv2dSame(nn.Conv2d):
    """Pads as TensorFlow does."""

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        sizes: Any = zip(x.shape[2:], self.kernel_size, self.stride, strict=True)
        for size, taps, stride in sizes:
            total = max((-(-size // stride) - 1) * stride + taps - size, 0)
            pads = [total // 2, total - total // 2, *pads]
        return functional.conv2d(
            functional.pad(x, pads), self.weight, self.bias, self.stride, 0, 1, self.groups
        )


class CausalConv3d(nn.Conv3d):
    """Looks at earlier frames only, and at those of the last call."""

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
        frames, *others = map(int, self.padding)
        pads = [*(zeros for zeros in reversed(others) for _ in range(2)), 2 * frames, 0]
        if cache is not None:
            x = torch.cat([cache, x], dim=2)
            pads[4] -= cache.shape[2]
        return functional.conv3d(functional.pad(x, pads), self.weight, self.bias, self.stride)


class Standardized(nn.Conv2d):
    """Normalizes its weight in every call."""

    def forward(self, x: Tensor) -> Tensor:
        weight = functional.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True
        ).reshape_as(self.weight)
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding)


def test_subclasses() -> None:
    compare(Conv2dSame(4, 6, 3, stride=2).eval(), draw(2, 4, 9, 8), count=1)
    causal = CausalConv3d(4, 6, 3, padding=1).eval()
    compare(causal, draw(1, 4, 3, 5, 6), count=1)
    compare(causal, draw(1, 4, 3, 5, 6), draw(1, 4, 2, 5, 6, seed=1), count=1)
    compare(Standardized(4, 6, 3).eval(), X, count=1)


def test_zeros_in_front_are_padding() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return [
            m.a(functional.pad(x, (1, 2, 0, 3))),
            m.b(functional.pad(x, (1, 2))),
            # These are no zeros, or not around the image.
            m.c(functional.pad(x, (1, 2), value=1.0)),
            m.d(functional.pad(x, (1, -2))),
            m.e(functional.pad(x[:, 1:], (0, 0, 0, 0, 1, 0))),
            m.f(functional.pad(x, (1, 1, 1, 1), mode="reflect")),
        ]

    parts: dict[str, nn.Module] = {name: conv() for name in "abcdef"}
    compiled = compare(network(forward, **parts), X, count=6)
    with torch.no_grad():
        assert called(compiled, X)[1]["aten::constant_pad_nd"] == 3


def test_weights_that_are_computed() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        old = nn.utils.weight_norm(conv())
    with torch.no_grad():
        # Its first weight has a history, and cannot be copied.
        old(X)
    new = parametrizations.weight_norm(conv())
    spectral = parametrizations.spectral_norm(conv())

    def forward(m: Any, x: Tensor) -> Tensor:
        y = torch.relu(m.bn(m.spectral(m.new(m.old(x)))))
        weight = m.last.weight * y.mean()
        return torch.relu(m.behind(functional.conv2d(y, weight, m.last.bias)))

    model = network(
        forward, old=old, new=new, spectral=spectral, bn=nn.BatchNorm2d(4), last=conv(),
        behind=nn.BatchNorm2d(4),
    )  # fmt: skip
    compiled = compare(model, X, count=4)
    with torch.no_grad():
        calls = called(compiled, X)[1]
    # The weights that parameters say are computed once; that of ``last`` is in every call.
    assert not calls["aten::_weight_norm_interface"] and not calls["aten::mv"]
    assert calls["aten::mean"] and calls["aten::rsqrt"] == 1


def test_functional_calls() -> None:
    weights = {1: draw(4, 2, 3), 2: draw(4, 2, 3, 3), 3: draw(4, 2, 3, 3, 3)}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for rank, weight in weights.items():
                self.register_buffer(f"weight{rank}", weight)

        def forward(self, x: Tensor) -> list[Tensor]:
            own: Any = self
            return [
                functional.conv1d(x[:, :, 0, 0], own.weight1, groups=2),
                torch.conv2d(x[:, :, 0], own.weight2, padding=1, groups=2).relu(),
                torch.convolution(
                    x, own.weight3, None, [2], [1], [1], False, [0], 2
                ),
            ]  # fmt: skip

    compare(Net().eval(), draw(2, 4, 5, 6, 7), count=3)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed_convolutions(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    kind: Any = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[rank]
    norm: Any = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[rank]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.folded = nn.Sequential(kind(4, 6, 3, 2, 1, 1, groups=2), norm(6), nn.SiLU())
            self.plain = kind(6, 4, 2, 2, bias=False)
            self.added = kind(4, 4, 3, padding=1, dilation=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.plain(self.folded(x))
            return torch.relu(self.added(y) + y)

    model = randomize(Net()).eval()
    x = draw(2, 4, *(6, 5, 4)[:rank])
    for input in (x, last(x)):
        compare(model, input, transposed=3, count=0)
    text = reported(caplog, model, x)
    assert [line.split(maxsplit=2) for line in text.splitlines()[4:]] == [
        ["folded.0", f"conv_transpose{rank}d", "batch_norm + silu"],
        ["plain", f"conv_transpose{rank}d"],
        ["added", f"conv_transpose{rank}d"],
    ]


# Whole networks ---------------------------------------------------------------------------------


def test_residual_network(caplog: pytest.LogCaptureFixture) -> None:
    model = randomize(ResNet((2, 1, 1, 1), 10)).eval()
    x = draw(2, 3, 64, 48)
    count = sum(isinstance(m, nn.Conv2d) for m in model.modules())
    compare(model, x, count=count)
    lines = reported(caplog, model, x).splitlines()
    assert lines[0] == f"{count} convolutions replaced, 0 modules left"
    fused = {line.split()[0]: line.split(maxsplit=2)[2] for line in lines[4:]}
    assert fused["conv1"] == "batch_norm + relu"
    assert fused["layer1.1.conv3"] == "batch_norm + residual + relu"
    assert fused["layer1.0.downsample.0"] in ("batch_norm", "batch_norm + residual + relu")
