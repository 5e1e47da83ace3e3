"""A call like an earlier one skips PyTorch's dispatcher, unless somebody watches operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tests.interop.torch_tensors import check, draw, last
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import maxconv.torch as mt
from maxconv.torch import _functional, _op

pytestmark = pytest.mark.torch

X, W, B = draw(2, 6, 9, 8), draw(8, 6, 3, 3), draw(8)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts calls of the operator, from an empty cache of plans on."""
    counted: list[int] = []
    call = _op.call

    def counting(*arguments: Any) -> Tensor:
        counted.append(1)
        return call(*arguments)

    monkeypatch.setattr(_op, "call", counting)
    monkeypatch.setattr(_functional, "_plans", {})
    return counted


def test_only_the_first_call_takes_the_operator(calls: list[int]) -> None:
    module = mt.Conv2d(6, 8, 3)
    for x in (X, last(X), X):
        for _ in range(3):
            check(2, mt.conv2d(x, W, B, 2, 1), x, W, B, 2, 1)
            check(2, module(x), x, module.weight, module.bias)
    assert len(calls) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda: (X[:1], W, B, 1, 1),
        lambda: (X, W.to(memory_format=torch.channels_last), B, 1, 1),
        lambda: (X, W, None, 1, 1),
        lambda: (X, W, draw(16)[::2], 1, 1),
        lambda: (X, W, B, 2, 1),
        lambda: (X, W, B, 1, 0),
    ],
)
def test_another_call_has_another_plan(
    change: Callable[[], tuple[Any, ...]], calls: list[int]
) -> None:
    for _ in range(2):
        check(2, mt.conv2d(X, W, B, 1, 1), X, W, B, 1, 1)
    for _ in range(2):
        arguments = change()
        check(2, mt.conv2d(*arguments), *arguments)
    assert len(calls) == 2


def test_bad_input_after_good_input(calls: list[int]) -> None:
    for _ in range(2):
        mt.conv2d(X, W, B)
    with pytest.raises(TypeError, match=r"^weight: dtype torch.float64"):
        mt.conv2d(X, W.double(), B)
    with pytest.raises(ValueError, match=r"^bias: "):
        mt.conv2d(X, W, B[:-1])
    with pytest.raises(RuntimeError, match=r"^weight: requires grad"):
        mt.conv2d(X, W.clone().requires_grad_(), B)
    with pytest.raises(ValueError, match=r"^input: layout torch.sparse_coo"):
        mt.conv2d(X.to_sparse(), W, B)
    with pytest.raises(TypeError, match=r"^stride: "):
        mt.conv2d(X, W, B, 1.0)  # type: ignore[arg-type] # the mistake
    assert len(calls) == 2


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call] # PyTorch declares none
    """Notes the operators that are called."""

    def __init__(self) -> None:
        cast(Any, super()).__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_whoever_watches_sees_the_operator() -> None:
    for _ in range(2):
        mt.conv2d(X, W, B)
    with Watching() as mode:
        mt.conv2d(X, W, B)
    assert mode.seen == ["maxconv.conv.default"]
    with torch.profiler.profile() as profile:
        mt.conv2d(X, W, B)
    assert "maxconv::conv" in {event.key for event in profile.key_averages()}
    traced = cast(Any, torch.jit).trace(lambda x: mt.conv2d(x, W, B), X)
    assert "maxconv::conv" in str(traced.graph)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: mt.conv2d(x, W, B))(X)
    assert "maxconv.conv.default" in graph.code


def test_wrapped_and_negated_tensors() -> None:
    for _ in range(2):
        expected = mt.conv2d(X, W, B)
    batched = torch.func.vmap(lambda x: mt.conv2d(x, W, B))(torch.stack([X, X]))
    assert torch.equal(batched, torch.stack([expected, expected]))
    # PyTorch keeps a sign beside such a tensor's memory.
    negative = torch.complex(X, X).conj().imag
    assert negative.is_neg()
    assert torch.equal(mt.conv2d(negative, W), mt.conv2d(-X, W))


def test_forward_mode_is_refused() -> None:
    for _ in range(2):
        mt.conv2d(X, W, B)
    words = r"^input: has a tangent, but maxconv computes no derivatives"
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=words):
        mt.conv2d(cast(Any, forward_ad).make_dual(X, X), W, B)
    with pytest.raises(RuntimeError, match=words):
        torch.func.jvp(lambda x: mt.conv2d(x, W, B), (X,), (X,))
    with forward_ad.dual_level():
        mt.conv2d(X, W, B)
