"""Global average pooling in converted models, and what of it shows without a GPU."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from tests.interop.conversion import X, conv, convert_and_compare, network
from tests.interop.torch_tensors import draw, last
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

import maxconv.torch as mt
from maxconv.torch import _pooling


def test_a_cpu_gets_pytorchs_mean() -> None:
    for x in (draw(2, 6, 9), draw(2, 6, 9, 4), last(draw(2, 6, 3, 4, 5))):
        expected = x.mean(tuple(range(2, x.dim())), keepdim=True)
        assert torch.equal(mt.global_avg_pool(x), expected)
        assert torch.equal(torch.ops.maxconv.global_avg_pool(x), expected)
    x = draw(1, 2, 3, 3).requires_grad_()
    cast(Any, mt.global_avg_pool(x).sum()).backward()
    assert x.grad is not None and torch.allclose(x.grad, torch.full_like(x, 1 / 9))


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"^input: a list is not a torch.Tensor"):
        mt.global_avg_pool([1.0])  # type: ignore[arg-type] # the mistake
    for shape in ((3, 4), (1, 2, 3, 4, 5, 6)):
        with pytest.raises(ValueError, match=rf"^input: {len(shape)} dimensions; \[N, C, \*spa"):
            mt.global_avg_pool(torch.zeros(shape))


def test_the_fake_output_has_the_kernels_strides() -> None:
    with FakeTensorMode():
        made = torch.empty(2, 5, 7, 6, device="cuda").to(memory_format=torch.channels_last)
        fake = torch.ops.maxconv.global_avg_pool(made)
    assert fake.shape == (2, 5, 1, 1) and fake.stride() == (5, 1, 5, 5)
    assert fake.is_contiguous(memory_format=torch.channels_last)


def test_a_compiled_graph_has_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pooling, "_is_on_gpu", lambda input: True)

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return mt.global_avg_pool(x) + 1

    with torch.no_grad():
        program = torch.export.export(Net(), (last(X),), strict=True)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.maxconv.global_avg_pool.default in called


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (1, 2, 3, 4, 5)])
def test_other_ranks_are_what_they_are_to_pytorch(shape: tuple[int, ...]) -> None:
    def outcome(pool: Any) -> Any:
        try:
            return pool(torch.arange(float(math.prod(shape))).view(shape)).tolist()
        except (RuntimeError, IndexError) as error:
            return str(error)

    expected = outcome(nn.AdaptiveAvgPool2d(1))
    assert isinstance(expected, str) == (len(shape) == 1)
    assert outcome(_pooling.GlobalAvgPool2d(1)) == expected
    assert outcome(lambda x: _pooling.pooled(x, 2)) == expected


FORMS: dict[str, Any] = {
    "module": lambda m, x: m.pool(m.conv(x)),
    "function": lambda m, x: functional.adaptive_avg_pool2d(m.conv(x), 1),
    "function of a pair": lambda m, x: functional.adaptive_avg_pool2d(
        m.conv(x), output_size=(1, 1)
    ),
    "method": lambda m, x: m.conv(x).mean((2, 3), keepdim=True),
    "method, no dimensions kept": lambda m, x: m.conv(x).mean([-1, -2]),
    "torch.mean": lambda m, x: torch.mean(m.conv(x), dim=(-2, -1), keepdim=True),
}

OTHERS: dict[str, Any] = {
    "larger": lambda m, x: functional.adaptive_avg_pool2d(m.conv(x), (1, 2)),
    "one dimension": lambda m, x: m.conv(x).mean(2),
    "channels": lambda m, x: m.conv(x).mean((1, 2, 3)),
    "all": lambda m, x: m.conv(x).mean(),
    "another dtype": lambda m, x: m.conv(x).mean((2, 3), dtype=torch.float64).float(),
    "twice the same": lambda m, x: m.conv(x).flatten(2).mean((-1,), keepdim=True),
}


@pytest.mark.parametrize("name", FORMS)
def test_means_over_pixels_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    is_ours = _pooling._is_ours

    def noting(input: Tensor) -> bool:
        seen.append(input.shape)
        return is_ours(input)

    monkeypatch.setattr(_pooling, "_is_ours", noting)
    model = network(FORMS[name], conv=conv(), pool=nn.AdaptiveAvgPool2d((1, 1)))
    convert_and_compare(model, X)
    assert seen == [X.shape] * 2


@pytest.mark.parametrize("name", OTHERS)
def test_other_means_are_right(name: str) -> None:
    convert_and_compare(network(OTHERS[name], conv=conv()), X)


def test_modules_keep_their_class_and_mode() -> None:
    pool = nn.AdaptiveAvgPool2d(1)
    model = network(lambda m, x: m.pool(m.conv(x)) + m.pool(x), conv=conv(), pool=pool)
    converted, _ = convert_and_compare(model, X)
    assert isinstance(converted.pool, nn.AdaptiveAvgPool2d) and not converted.pool.training
    assert type(converted.pool) is not nn.AdaptiveAvgPool2d
    assert torch.equal(cast(Any, converted.pool)(X[0]), pool(X[0]))


def test_modules_with_hooks_stay() -> None:
    pool = nn.AdaptiveAvgPool2d(1)
    pool.register_forward_hook(lambda module, inputs, output: output + 1)
    model = nn.Sequential(conv(), pool).eval()
    converted, _ = mt.convert(model)
    with torch.no_grad():
        assert torch.allclose(converted(X), model(X), atol=1e-5)


def test_modules_that_cannot_be_traced_are_searched() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = conv(), nn.AdaptiveAvgPool2d(1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.pool(self.conv(x))
            return y if y.sum() > 0 else -y

    converted, report = convert_and_compare(Branches().eval(), X)
    assert report.untraced
    assert isinstance(converted.pool, _pooling.GlobalAvgPool2d)
