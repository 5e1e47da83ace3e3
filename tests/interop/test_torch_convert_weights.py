"""``maxconv.torch.convert``: weights that a model computes in every call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tests.interop.conversion import X, conv, convert_and_compare, fused, left, network
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import maxconv.torch as mt
from maxconv.bench.resnet import randomize
from maxconv.torch import _filters

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_packed_weights_begin_at_a_cache_line(dtype: torch.dtype) -> None:
    # All are kept: memory that is freed would be given out again.
    kept = [
        _filters.pack_on_host(torch.zeros(filters, 16, 3, 3, dtype=dtype), 1)
        for filters in range(16, 400, 16)
    ]
    assert [packed.data_ptr() % 64 for packed in kept] == [0] * len(kept)


# Parametrizations -------------------------------------------------------------------------------

NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "old weight norm": weight_norm,
    "weight norm": parametrizations.weight_norm,
    "old spectral norm": spectral_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "pruning": lambda m: cast(Any, prune).l1_unstructured(m, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_computed_weights_are_computed_once(name: str, kind: Any) -> None:
    normed = NORMS[name](kind(4, 4, 3, padding=1))
    model = nn.Sequential(normed, nn.BatchNorm2d(4), nn.ReLU())
    model(X)  # Some keep the weight of the last call, which deepcopy would not copy.
    randomize(model).eval()
    expected = model(X).detach()
    converted, report = mt.convert(model)
    assert fused(report) == {"0": ("BatchNorm2d 1", "relu")} and not report.left
    assert torch.allclose(converted(X), expected, atol=1e-4)
    assert torch.equal(model(X), expected)
    assert torch.equal(copy.deepcopy(converted)(X), converted(X))
    with pytest.raises(RuntimeError, match=r"0\.\S+ is of the model before maxconv.torch.convert"):
        converted.load_state_dict(model.state_dict(), strict=False)
    part = converted.get_submodule("0")
    with pytest.raises(RuntimeError, match="is of the model before"):
        part.load_state_dict(model[0].state_dict(), strict=False)


@pytest.mark.parametrize("norm", [spectral_norm, parametrizations.spectral_norm])
def test_weights_that_change_stay(norm: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(norm(conv())).train()
    before = copy.deepcopy(model.state_dict())
    converted, report = mt.convert(model)
    (reason,) = left(report).values()
    assert "training mode" in reason or "another weight in every call" in reason
    assert all(torch.equal(before[k], v) for k, v in converted.state_dict().items())


class Counting(nn.Module):
    """Gives the same each time, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros(()))

    def forward(self, weight: Tensor) -> Tensor:
        cast(Tensor, self.count).add_(1)
        return weight * 2


def test_parametrizations_that_keep_something_stay() -> None:
    model = nn.Sequential(conv())
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", Counting())
    before = copy.deepcopy(model.state_dict())
    converted, report = mt.convert(model.eval())
    assert left(report) == {"0": "its parametrization gives another weight in every call"}
    assert all(torch.equal(before[k], v) for k, v in converted.state_dict().items())


# Computed in forward ----------------------------------------------------------------------------


class Standardized(nn.Conv2d):
    """Standardizes its weight, as networks without batch statistics do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def standardized(self) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        gains = (self.gain * 0.5).view(-1)
        rows = functional.batch_norm(rows, None, None, weight=gains, training=True, momentum=0.0)
        return rows.reshape_as(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.standardized()
        return functional.conv2d(input, weight, self.bias, self.stride, self.padding)


class Written(Standardized):
    """Writes to what it has computed."""

    def standardized(self) -> Tensor:
        return super().standardized().mul_(2)


def _by_size(self: Standardized, input: Tensor) -> Tensor:
    """Pads by the input's size, which no trace can know."""
    height, width = input.shape[-2:]
    pads = [max(-size % 2 + 1, 0) for size in (width, height)]
    input = functional.pad(input, [0, pads[0], 0, pads[1]])
    return functional.conv2d(input, self.standardized(), self.bias, self.stride)


class SizedStandardized(Standardized):
    forward = _by_size


class SizedWritten(Written):
    forward = _by_size


@pytest.mark.parametrize("kind", [Standardized, Written])
def test_a_computed_weight_becomes_a_parameter(kind: Any) -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        return functional.relu(m.bn(m.conv(x)))

    model = network(call, conv=kind(4, 6, 3, padding=1), bn=nn.BatchNorm2d(6))
    converted, report = convert_and_compare(model, X)
    (entry,) = report.replaced
    if kind is Written:
        # What writes to a tensor is done in every call.
        assert entry.fused == ()
        return
    assert entry.fused == ("BatchNorm2d bn", "relu")
    assert sorted(converted.state_dict()) == ["conv2d.bias", "conv2d.normalized", "conv2d.weight"]
    expected = converted(X)
    with pytest.raises(RuntimeError, match="is of the model before"):
        converted.load_state_dict(model.state_dict(), strict=False)
    for other in (converted, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert torch.equal(other(X), expected)


def test_transposed_and_bias_too() -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        weight = m.conv.weight / m.conv.weight.square().sum((0, 2, 3), keepdim=True).sqrt()
        return functional.conv_transpose2d(x, weight, m.conv.bias - m.shift.bias, stride=2)

    model = network(call, conv=nn.ConvTranspose2d(4, 6, 3), shift=nn.Linear(1, 6))
    converted, _ = convert_and_compare(model, X)
    assert [part for part, _ in converted.named_children()] == ["conv_transpose2d"]


def _noisy(m: Any, x: Tensor) -> Tensor:
    return functional.conv2d(x, m.conv.weight + torch.rand_like(m.conv.weight))


def _returned(m: Any, x: Tensor) -> Any:
    weight = m.conv.weight * 2
    return functional.conv2d(x, weight) + m.conv.weight.sum()


def _written(m: Any, x: Tensor) -> Tensor:
    weight = m.conv.weight * 2
    m.conv.weight.mul_(0.5)
    return functional.conv2d(x, weight)


def _called_too(m: Any, x: Tensor) -> Tensor:
    return functional.conv2d(m.conv(x), m.conv.weight * 2)


@pytest.mark.parametrize("call", [_noisy, _returned, _written, _called_too])
def test_other_weights_are_computed_in_every_call(call: Callable[[Any, Tensor], Tensor]) -> None:
    model = network(call, conv=nn.Conv2d(4, 4, 3, bias=False))
    model.requires_grad_(False)
    converted, _ = mt.convert(model)
    assert "conv.weight" in converted.state_dict()
    for _ in range(2):
        torch.manual_seed(0)
        expected = model(X)
        torch.manual_seed(0)
        assert torch.allclose(converted(X), expected, atol=1e-5)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights that are packed, to be read again."""
    weights = list[Tensor]()
    pack = _filters.pack_on_host

    def counting(weight: Tensor, groups: int) -> Tensor:
        weights.append(weight)
        return pack(weight, groups)

    monkeypatch.setattr(_filters, "pack_on_host", counting)
    return weights


def test_an_untraced_forward_computes_its_weight_once(packed: list[Tensor]) -> None:
    model = nn.Sequential(SizedStandardized(4, 6, 3)).requires_grad_(False).eval()
    converted, report = mt.convert(model)
    assert [entry.note for entry in report.replaced] == ["in its own forward"]
    part: Any = converted.get_submodule("0")
    for modes in (torch.no_grad, torch.inference_mode):
        for _ in range(3):
            with modes():
                assert torch.allclose(converted(X), model(X), atol=1e-5)
    assert len(packed) == 1
    for tensor in (part.weight, part.gain):
        tensor.mul_(torch.rand_like(tensor) + 0.5)
        own = dict(model[0].named_parameters())
        own["weight"].copy_(part.weight)
        own["gain"].copy_(part.gain)
        for _ in range(2):
            assert torch.allclose(converted(X), model(X), atol=1e-5)
    assert len(packed) == 3
    # PyTorch counts no write through .data.
    part.gain.data.mul_(2)
    own["gain"].mul_(2)
    mt.repack(converted)
    assert torch.allclose(converted(X), model(X), atol=1e-5)
    part.gain = nn.Parameter(part.gain * 2, requires_grad=False)
    own["gain"].mul_(2)
    assert torch.allclose(converted(X), model(X), atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(converted(X), copy.deepcopy(converted)(X))
    for other in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert torch.equal(other(X), converted(X))


def test_what_an_untraced_forward_writes_to_is_not_kept() -> None:
    model = nn.Sequential(SizedWritten(4, 6, 3)).requires_grad_(False).eval()
    converted, _ = mt.convert(model)
    for _ in range(3):
        assert torch.allclose(converted(X), model(X), atol=1e-5)
