"""``torch.compile(backend="maxconv")``: which group normalizations become maxconv's.

A CPU stands for the GPU: the operator computes there what PyTorch does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.interop.backend import called, compare, compiled
from tests.interop.conversion import X, conv, network
from tests.interop.torch_tensors import draw, last
from torch import Tensor, nn
from torch.nn import functional

from maxconv.torch import _aten

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the backend take every tensor for a GPU's."""
    monkeypatch.setattr(_aten, "_is_on_gpu", lambda tensor: True)


def norm(groups: int = 2, **options: Any) -> nn.GroupNorm:
    made = nn.GroupNorm(groups, 4, **options)
    if made.affine:
        with torch.no_grad():
            made.weight.copy_(draw(4, seed=3))
            made.bias.copy_(draw(4, seed=4))
    return made


def operators(model: Callable[..., Any], *inputs: Any) -> tuple[int, int]:
    """How many of maxconv's and of PyTorch's normalizations a compiled model calls."""
    with torch.no_grad():
        _, calls = called(model, *inputs)
    # What PyTorch computes one from, where the operator's own code does not.
    return calls["maxconv::group_norm"], calls["aten::var_mean"]


FORMS: dict[str, tuple[Any, int]] = {
    "between": (lambda m, x: m.second(m.act(m.norm(m.conv(x)))), 1),
    "another activation": (lambda m, x: m.second(functional.elu(m.norm(m.conv(x)))), 1),
    "parameters of the activation": (
        lambda m, x: m.second(functional.leaky_relu(m.norm(m.conv(x)), 0.3)),
        1,
    ),
    "two readers": (lambda m, x: (lambda y: m.second(m.act(y)) + y)(m.norm(m.conv(x))), 1),
    "without weights": (lambda m, x: m.second(m.act(functional.group_norm(m.conv(x), 4))), 1),
    "an output": (lambda m, x: m.act(m.norm(m.second(m.conv(x)))), 1),
    "two": (lambda m, x: m.norm(m.second(m.act(m.norm(m.conv(x))))), 2),
    "behind what is added": (
        lambda m, x: m.second(m.norm(m.conv(x) * x.mean((2, 3), keepdim=True))),
        1,
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_channels_last_ones_become_maxconvs(name: str) -> None:
    """Values, and the strides of outputs, are those of the model."""
    form, count = FORMS[name]
    parts = {"conv": conv(), "second": conv(4, 4), "norm": norm(), "act": nn.SiLU()}
    model = network(form, **parts)
    for x in (X, last(X)):
        fast = compare(model, x, count=2, tolerance=1e-5)
        assert operators(fast, x) == (count, 0)


def test_ranks() -> None:
    kinds: dict[int, Any] = {1: nn.Conv1d, 3: nn.Conv3d}
    for rank, kind in kinds.items():
        parts = {"conv": kind(4, 4, 3), "norm": norm(), "second": kind(4, 4, 1)}
        model = network(lambda m, x: m.second(m.norm(m.conv(x)).relu()), **parts)
        x = draw(2, 4, *(9, 8, 7)[:rank])
        assert operators(compare(model, x, count=2, tolerance=1e-5), x) == (1, 0)


LEFT: dict[str, Any] = {
    "a contiguous input": lambda m, x: m.conv(m.norm(x)),
    "no spatial dimension": lambda m, x: m.norm(m.conv(x).mean((2, 3))),
    "statistics are read": lambda m, x: torch.native_group_norm(
        m.conv(x), None, None, x.shape[0], 4, x.shape[2] * x.shape[3], 2, 1e-5
    )[:2],
    "a weight alone": lambda m, x: functional.group_norm(m.conv(x), 2, m.norm.weight),
}


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left_to_pytorch(name: str) -> None:
    model = network(LEFT[name], conv=conv(4, 4), norm=norm())
    x = draw(2, 4, 6, 5)
    maxconvs, pytorchs = operators(compare(model, x, count=1, tolerance=1e-5), x)
    assert maxconvs == 0 and pytorchs == 1


def test_on_a_cpu_pytorchs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = network(lambda m, x: m.norm(m.conv(x)), conv=conv(), norm=norm())
    assert operators(compare(model, X, count=1, tolerance=1e-5), X) == (0, 1)


def test_sizes_may_be_symbols() -> None:
    parts = {"conv": conv(), "norm": norm(), "second": conv(4, 4)}
    model = network(lambda m, x: m.second(m.norm(m.conv(x)).relu()), **parts)
    fast = compiled(model, dynamic=True)
    for sizes in ((2, 4, 8, 6), (3, 4, 5, 9)):
        x: Tensor = draw(*sizes)
        with torch.no_grad():
            assert torch.allclose(fast(x), model(x), atol=1e-5)
        assert operators(fast, x) == (1, 0)
