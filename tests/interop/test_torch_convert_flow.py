"""``maxconv.torch.convert`` and Python's control flow: a trace ends where it would be a guess."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.interop.conversion import X, conv, fused, network
from tests.interop.torch_tensors import draw
from torch import Tensor, nn
from torch.nn import functional

import maxconv.torch as mt
from maxconv.bench.resnet import randomize

pytestmark = pytest.mark.torch

Y = draw(*X.shape, seed=5)


class Pair(nn.Module):
    """Convolves, normalizes, and decides what to do with a second argument."""

    def __init__(self, decide: Callable[..., Any]) -> None:
        super().__init__()
        self.conv, self.bn = conv(), nn.BatchNorm2d(4)
        self.calls, self.kept = 0, dict[str, Any]()
        self.decide = [decide]

    def forward(self, x: Any, other: Any) -> Any:
        return self.decide[0](self, x, other)

    def plain(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))  # type: ignore[no-any-return]


def is_none(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) if other is None else m.plain(x) + other


def is_not_none(m: Pair, x: Tensor, other: Any) -> Tensor:
    y = m.plain(x)
    if other is not None:
        y = y * 2
    return y


def attribute_is_none(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) if other.grad is None else -m.plain(x)


def computed_is_none(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) if (lambda: other)() is None else -m.plain(x)


def assigned_is_none(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) if (y := other) is None else m.plain(x) + y


def identity(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) if other is x else -m.plain(x)


def is_true(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) if other is True else -m.plain(x)


def is_list(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(torch.cat(other, 0)) if isinstance(other, list) else m.plain(x)


def is_a_tensor(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) if isinstance(other, Tensor) else -m.plain(x)


def torch_is_tensor(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) if torch.is_tensor(other) else -m.plain(x)


def its_type(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) if type(other) is Tensor else -m.plain(x)


def has_attribute(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) if hasattr(other, "shape") else -m.plain(x)


def attribute_or_default(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) * getattr(other, "ndim", 3)


def is_callable(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(other(x) if callable(other) else x)


def truth(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) if other else -m.plain(x)


def caught(m: Pair, x: Tensor, other: Any) -> Tensor:
    try:
        many = len(other) > 2
    except Exception:
        many = True
    return m.plain(x) if many else -m.plain(x)


def caught_by_all(m: Pair, x: Tensor, other: Any) -> Tensor:
    try:
        count = int(other)
    except:  # noqa: E722
        count = 7
    return m.plain(x) * count


def text(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) if "3" in f"{other}" else -m.plain(x)


def pattern(m: Pair, x: Tensor, other: Any) -> Tensor:
    match other:
        case None:
            return m.plain(x)
        case list():
            return -m.plain(x)
    return m.plain(x) * 3


@functools.singledispatch
def _by_type(other: Any) -> int:
    return 1


@_by_type.register
def _(other: list) -> int:  # type: ignore[type-arg]
    return 2


def dispatched(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) * _by_type(other)


def looked_up(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) * {None: 2, 3: 5}.get(other if not isinstance(other, Tensor | list) else 3, 1)


CASES = [
    *(is_none, is_not_none, computed_is_none, assigned_is_none, is_true, is_list, is_a_tensor),
    *(torch_is_tensor, its_type, has_attribute, attribute_or_default, is_callable, caught),
    *(caught_by_all, text, pattern, dispatched, looked_up),
]


def same(converted: nn.Module, model: nn.Module, *arguments: Any) -> None:
    expected, actual = model(*arguments), converted(*arguments)
    assert torch.allclose(actual, expected, atol=1e-5), "another branch was taken"


@pytest.mark.parametrize("decide", CASES)
def test_no_branch_is_traced_away(decide: Callable[..., Any]) -> None:
    model = randomize(Pair(decide)).eval()
    converted, report = mt.convert(model)
    assert type(converted) is Pair and report.untraced[0].name == "(model)"
    assert [entry.name for entry in report.replaced] == ["conv"]
    for other in (None, Y, [X, Y], 3, nn.ReLU()):
        try:
            same(converted, model, X, other)
        except (AttributeError, TypeError):
            with pytest.raises((AttributeError, TypeError)):
                converted(X, other)


@pytest.mark.parametrize("decide", [identity, attribute_is_none, truth])
def test_no_branch_on_tensors_is_traced_away(decide: Callable[..., Any]) -> None:
    model = randomize(Pair(decide)).eval()
    converted, _ = mt.convert(model)
    one = torch.tensor(1.0, requires_grad=True)
    torch.autograd.backward(one * 2)
    others = {"identity": (X, Y), "attribute_is_none": (one, X), "truth": (one, one * 0)}
    for other in others[decide.__name__]:
        same(converted, model, X, other)


def test_what_calls_such_a_module_is_traced() -> None:
    # The caller is a graph, and calls as a whole what is none.
    for decide in CASES:
        model = network(
            lambda m, x: torch.relu(m.last(m.pair(torch.relu(m.first(x)), None))),
            first=conv(), pair=Pair(decide), last=nn.Sequential(conv(), nn.BatchNorm2d(4)),
        )  # fmt: skip
        if decide in (has_attribute, attribute_or_default, caught, caught_by_all, text):
            model.pair.decide = [is_none]  # type: ignore[union-attr]
        converted, report = mt.convert(model)
        same(converted, model, X)
        assert report.traced[0] == "(model)"
        assert fused(report)["last.0"] == ("BatchNorm2d last.1", "relu")


def counting(m: Pair, x: Tensor, other: Any) -> Tensor:
    m.calls += 1
    return m.plain(x) * m.calls


def keeping(m: Pair, x: Tensor, other: Any) -> Tensor:
    before: Tensor = m.kept.get("x", other)
    m.kept["x"] = x
    return m.plain(x) + before


STORE: list[Any] = []


def storing(m: Pair, x: Tensor, other: Any) -> Tensor:
    STORE.append(x)
    return m.plain(x) + len(STORE)


def setting(m: Pair, x: Tensor, other: Any) -> Tensor:
    y = m.plain(x)
    y.label = 3  # type: ignore[attr-defined]
    return y


@pytest.mark.parametrize("decide", [counting, keeping, storing, setting])
def test_what_lasts_longer_than_a_call_is_not_traced(decide: Callable[..., Any]) -> None:
    model = randomize(Pair(decide)).eval()
    converted, report = mt.convert(model)
    assert type(converted) is Pair and fused(report) == {"conv": ()}
    STORE.clear()
    expected = [model(X, Y) for _ in range(3)]
    STORE.clear()
    for value in expected:
        assert torch.allclose(converted(X, Y), value, atol=1e-5)


def without_autocast(m: Pair, x: Tensor, other: Any) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.matmul(m.plain(x), other.transpose(2, 3))


def asks_autocast(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) * (2 if torch.is_autocast_enabled("cpu") else 1)


def asks_grad(m: Pair, x: Tensor, other: Any) -> Tensor:
    return m.plain(x) * (2 if torch.is_grad_enabled() else 1)


@pytest.mark.parametrize("decide", [without_autocast, asks_autocast, asks_grad])
def test_what_surrounds_a_call_is_not_traced_away(decide: Callable[..., Any]) -> None:
    model = randomize(Pair(decide)).eval().requires_grad_(False)
    converted, _ = mt.convert(model)
    same(converted, model, X, Y)
    with torch.no_grad():
        same(converted, model, X, Y)
    if decide is without_autocast:
        with torch.autocast("cpu"):
            assert converted(X, Y).dtype == model(X, Y).dtype == torch.float32
            same(converted, model, X, Y)


# What is traced all the same --------------------------------------------------------------------


class Block(nn.Module):
    """Asks only what is known when it is traced."""

    def __init__(self, down: bool) -> None:
        super().__init__()
        self.conv, self.bn = conv(), nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 4, 1) if down else None
        self.scale: float | None = None

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        check: Any = torch._assert
        check(x.ndim == 4, f"to assert: 4 dimensions, got {x.ndim}")
        batch, channels, _, _ = x.shape
        y = self.bn(self.conv(x))
        if skip is not None:
            y = y + skip
        if self.down is not None and self.scale is None and self.bn.running_mean is not None:
            x = self.down(x)
        return torch.relu(y + x).reshape(batch, channels, x.shape[2], -1)


def split(m: Any, x: Tensor) -> Tensor:
    _, channels, _, _ = x.shape
    return m.conv(x) * channels  # type: ignore[no-any-return]


def test_what_is_known_is_asked() -> None:
    model = network(
        lambda m, x: m.second(m.first(x), torch.sigmoid(x)),
        first=Block(True), second=Block(False),
    )  # fmt: skip
    converted, report = mt.convert(model)
    same(converted, model, X)
    assert report.traced == ["(model)"] and not report.untraced
    assert (
        fused(report)
        == {
            "first.conv": ("BatchNorm2d first.bn", "residual", "relu"),
            "first.down": (),
            "second.conv": ("BatchNorm2d second.bn", "residual"),
        }
        or fused(report)["second.conv"][0] == "BatchNorm2d second.bn"
    )
    for either in (model, converted):
        with pytest.raises(AssertionError, match="to assert: 4 dimensions"):
            either(X[0])
    shapes = network(split, conv=conv())
    converted, report = mt.convert(shapes)
    assert report.traced
    with pytest.raises(ValueError, match=r"^3 values to unpack \(expected 4\)$"):
        converted(X[0])


@pytest.mark.parametrize(
    ("divide", "known"),
    [
        (lambda x: list(x.chunk(2, 1)), True),
        # Two of two channels each.
        (lambda x: list(torch.chunk(x, 3, dim=1)), True),
        (lambda x: [part * 2 for part in x.split((3, 1), 1)], True),
        # How many pixels there are is not known, nor channels behind a sum.
        (lambda x: list(x.chunk(2, 3)), False),
        (lambda x: list((x + 1).chunk(2, 1)), False),
        (lambda x: list(x.split(2, 1)), False),
    ],
)
def test_parts_that_are_looped_over(divide: Callable[[Tensor], list[Tensor]], known: bool) -> None:
    """A loop over what a tensor is divided into is traced where the model tells how often."""
    model = network(
        lambda m, x: torch.cat([part + 1 for part in divide(m.relu(m.bn(m.conv(x))))], 1),
        conv=conv(),
        bn=nn.BatchNorm2d(4),
        relu=nn.ReLU(),
    )
    converted, report = mt.convert(model)
    same(converted, model, X)
    assert bool(report.traced) == known


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(8), nn.BatchNorm2d(4)

    def forward(self, inputs: Any) -> Tensor:
        many = [inputs] if isinstance(inputs, Tensor) else inputs
        return torch.relu(self.bn(self.conv(torch.cat(many, 1))))


def test_lists_of_tensors_are_known() -> None:
    model = network(lambda m, x: m.dense([x, x]), dense=Dense())
    converted, report = mt.convert(model)
    same(converted, model, X)
    assert fused(report) == {"dense.conv": ("BatchNorm2d dense.bn", "relu")}


def test_outputs_keep_their_types() -> None:
    def call(m: Any, x: Tensor) -> Any:
        y = m.conv(x)
        return OrderedDict(out=y, parts=[y, (x, 2)])

    model = network(call, conv=conv())
    converted, report = mt.convert(model)
    actual: Any = converted(X)
    expected: Any = model(X)
    assert report.traced and type(actual) is OrderedDict and list(actual) == list(expected)
    assert type(actual["parts"]) is list and type(actual["parts"][1]) is tuple


def test_functional_normalization_is_folded() -> None:
    class Norm(nn.BatchNorm2d):
        """As a library writes it, with an activation."""

        def forward(self, input: Tensor) -> Tensor:
            assert_: Any = torch._assert
            assert_(input.ndim == 4, f"got {input.ndim}")
            training = self.training or (self.running_mean is None and self.running_var is None)
            return functional.silu(
                functional.batch_norm(
                    input, self.running_mean, self.running_var, self.weight, self.bias,
                    training, 0.1, self.eps,
                )
            )  # fmt: skip

    model = network(lambda m, x: m.bn(m.conv(x)) + x, conv=conv(), bn=Norm(4))
    converted, report = mt.convert(model)
    same(converted, model, X)
    (entry,) = report.replaced
    assert entry.fused[0].startswith("batch_norm") and entry.fused[1] == "silu"


def test_a_forward_of_the_instance_counts() -> None:
    model = network(lambda m, x: m.block(x), block=Block(False), act=nn.ReLU())
    plain: Any = model.block.forward  # type: ignore[union-attr]
    model.block.forward = lambda x: plain(x) * 2  # type: ignore[union-attr]
    converted, _ = mt.convert(model)
    same(converted, model, X)
    single = conv().eval()
    single.forward = lambda input: -input  # type: ignore[method-assign]
    converted, report = mt.convert(nn.Sequential(single))
    assert torch.equal(converted(X), -X)
    assert report.left[0].reason == "it has a forward of its own"
