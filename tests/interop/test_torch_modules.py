"""``maxconv.torch``'s modules: drop-ins for PyTorch's, which keep a packed filter."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any, cast

import pytest
import torch
from tests.interop.torch_tensors import check, close, draw, last
from torch import nn
from torch.nn import functional

import maxconv.torch as mt
from maxconv.torch import _filters
from maxconv.torch._filters import OPERANDS

pytestmark = pytest.mark.torch

MODULES: dict[int, tuple[Any, Any]] = {
    1: (mt.Conv1d, nn.Conv1d),
    2: (mt.Conv2d, nn.Conv2d),
    3: (mt.Conv3d, nn.Conv3d),
}


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_module_is_a_drop_in(rank: int, mode: str) -> None:
    own, theirs = MODULES[rank]
    arguments = (4, 6, 3, 2, 1, 1, 2, True, mode)
    torch.manual_seed(0)
    expected = theirs(*arguments)
    torch.manual_seed(0)
    actual = own(*arguments)
    assert isinstance(actual, theirs)
    assert torch.equal(actual.weight, expected.weight) and torch.equal(actual.bias, expected.bias)
    x = draw(2, 4, *(7,) * rank)
    for input in (x, last(x), x[0]):
        with torch.no_grad():
            exact = copy.deepcopy(expected).double()(input.double())
        close(actual(input), exact, 8.0, 40)
        # PyTorch's own padding forgets the format of some inputs.
        channels_last = input.movedim(-rank - 1, -1).is_contiguous()
        assert actual(input).movedim(-rank - 1, -1).is_contiguous() is channels_last
        if mode == "zeros" and rank > 1:
            assert actual(input).stride() == expected(input).stride()


def test_state_dict_goes_both_ways() -> None:
    theirs = nn.Conv2d(4, 6, (3, 2), groups=2)
    own = mt.Conv2d(4, 6, (3, 2), groups=2, activation="relu")
    assert [(k, v.shape) for k, v in own.state_dict().items()] == [
        (k, v.shape) for k, v in theirs.state_dict().items()
    ]
    x = draw(1, 4, 8, 8)
    own(x)
    own.load_state_dict(theirs.state_dict())
    exact = functional.conv2d(x.double(), theirs.weight.double(), theirs.bias.double(), groups=2)  # type: ignore[union-attr]
    close(own(x), exact.detach().relu(), 4.0, 20)
    stream = io.BytesIO()
    torch.save(own.state_dict(), stream)
    stream.seek(0)
    theirs.load_state_dict(torch.load(stream, weights_only=True))
    assert mt.Conv2d(4, 6, 3, bias=False).state_dict().keys() == {"weight"}


def test_packed_weight_follows_the_weight() -> None:
    module, x = mt.Conv2d(3, 4, 3), draw(1, 3, 6, 6)

    def current() -> None:
        check(2, module(x), x, module.weight, module.bias)

    current()
    with torch.no_grad():
        module.weight.mul_(2.0)
        current()
        module.bias.add_(1.0)  # type: ignore[union-attr]
        current()
    with torch.inference_mode():
        module.weight.sub_(0.25)
        current()
    module.weight.data = draw(4, 3, 3, 3, seed=7)
    current()
    module.weight = nn.Parameter(draw(4, 3, 3, 3, seed=8), requires_grad=False)
    current()
    cast(Any, module).to(memory_format=torch.channels_last)
    current()
    module.half().float()
    current()
    # What PyTorch does not count, the module must be told.
    module.weight.data.mul_(3.0)
    module.repack()
    current()
    module.stride = (2, 2)
    check(2, module(x), x, module.weight, module.bias, 2)


def test_packed_weight_goes_with_the_module() -> None:
    gc.collect()
    before = len(OPERANDS)
    module = mt.Conv2d(3, 4, 3)
    for _ in range(3):
        with torch.no_grad():
            module.weight.add_(1.0)
        module(draw(1, 3, 6, 6))
    assert len(OPERANDS) == before + 1
    del module
    gc.collect()
    assert len(OPERANDS) == before


def test_weights_without_a_version_are_read_in_every_call() -> None:
    _filters._warn_of_inference.cache_clear()
    module, x = mt.Conv2d(3, 4, 3), draw(1, 3, 6, 6)
    with torch.inference_mode():
        module.weight = nn.Parameter(draw(4, 3, 3, 3), requires_grad=False)
        assert module.weight.is_inference()
        with pytest.warns(match=r"^weight: a parameter was made under torch\.inference") as said:
            for _ in range(2):
                check(2, module(x), x, module.weight, module.bias)
                module.weight.mul_(2.0)
        assert len(said) == 1
        # Made by the module itself, a weight has one.
        assert not mt.Conv2d(3, 4, 3).weight.is_inference()


def test_copies_of_a_module() -> None:
    module = mt.Conv2d(4, 6, 3, padding="same", activation="gelu", final_activation="relu")
    x, residual = draw(1, 4, 8, 8), draw(1, 6, 8, 8)
    expected = module(x, residual, beta=0.5)
    for other in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        mt.Conv2d.from_torch(module, activation="gelu", final_activation="relu"),
    ):
        assert torch.equal(other(x, residual, beta=0.5), expected)
        assert not other.weight.requires_grad
    other = copy.deepcopy(module).to(torch.bfloat16)
    actual = other(x.bfloat16(), residual.bfloat16(), beta=0.5)
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).abs().max() < 0.05
    with pytest.raises(TypeError, match=r"^conv: a Conv1d is not a Conv2d"):
        mt.Conv2d.from_torch(nn.Conv1d(1, 1, 1))


def test_repr_names_the_activations() -> None:
    module = mt.Conv2d(4, 6, 3, padding=1, activation="relu6", final_activation="silu")
    assert repr(module) == (
        "Conv2d(4, 6, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), activation=clamp, "
        "final_activation=silu)"
    )


def test_bad_module_arguments() -> None:
    with pytest.raises(ValueError, match=r"^activation: 'swish' is not an activation"):
        mt.Conv2d(3, 4, 3, activation="swish")
    module = mt.Conv2d(3, 4, 3)
    with pytest.raises(
        ValueError, match=r"^residual: shape \(1, 4, 5, 4\) must equal the output's"
    ):
        module(draw(1, 3, 6, 6), draw(1, 4, 5, 4))
    with pytest.raises(TypeError, match=r"^weight: dtype torch.float32 does not match"):
        module(draw(1, 3, 6, 6).half())
