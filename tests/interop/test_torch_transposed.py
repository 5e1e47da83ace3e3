"""``maxconv.torch``'s transposed convolutions: functions, modules and their op."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.interop.torch_tensors import close, draw, last
from torch import Tensor, nn
from torch.nn import functional

import maxconv.torch as mt
from maxconv.torch import _transposed

pytestmark = pytest.mark.torch

OWN: dict[int, Callable[..., Tensor]] = {
    1: mt.conv_transpose1d,
    2: mt.conv_transpose2d,
    3: mt.conv_transpose3d,
}
THEIRS: dict[int, Callable[..., Tensor]] = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}
MODULES: dict[int, tuple[Any, Any]] = {
    1: (mt.ConvTranspose1d, nn.ConvTranspose1d),
    2: (mt.ConvTranspose2d, nn.ConvTranspose2d),
    3: (mt.ConvTranspose3d, nn.ConvTranspose3d),
}


def check(rank: int, actual: Tensor, x: Tensor, w: Tensor, b: Tensor | None, *others: Any) -> None:
    """Compares with PyTorch's in float64; every channel of a group and every tap may be a term."""
    convolve = THEIRS[rank]
    exact = convolve(x.double(), w.double(), None if b is None else b.double(), *others)
    size = convolve(
        x.double().abs(), w.double().abs(), None if b is None else b.double().abs(), *others
    )
    close(actual, exact, size, w[:, 0].numel() + 1)


@st.composite
def calls(draws: Any) -> tuple[int, Any, Any, bool, tuple[Any, ...]]:
    rank = draws(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draws(st.integers(low, high)) for _ in range(rank))

    groups = draws(st.sampled_from([1, 1, 2, 3]))
    channels, filters = (groups * draws(st.integers(1, 5)) for _ in range(2))
    sizes, taps = each(1, 6), each(1, 4)
    stride, dilation, padding = each(1, 3), each(1, 3), each(0, 3)
    extra = tuple(
        draws(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
    )
    for i in range(rank):
        reach = dilation[i] * (taps[i] - 1) + 1 + extra[i]
        assume((sizes[i] - 1) * stride[i] - 2 * padding[i] + reach >= 1)
    input = (draws(st.integers(1, 2)), channels, *sizes)
    weight = (channels, filters // groups, *taps)
    return rank, input, weight, draws(st.booleans()), (stride, padding, extra, groups, dilation)


@settings(deadline=None, max_examples=150)
@given(calls(), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_against_pytorch(call: Any, input_last: bool, weight_last: bool, seed: int) -> None:
    rank, input_shape, weight_shape, has_bias, others = call
    x, w = draw(*input_shape, seed=seed), draw(*weight_shape, seed=seed + 1)
    filters = weight_shape[1] * others[3]
    b = draw(filters, seed=seed + 2) if has_bias else None
    given_x, given_w = last(x) if input_last else x, last(w) if weight_last else w
    y = OWN[rank](given_x, given_w, b, *others)
    check(rank, y, x, w, b, *others)
    # Where sizes of one leave several orders, no rule is held.
    if min(*x.shape[1:], *w.shape[1:], *y.shape[1:]) > 1:
        assert y.movedim(1, -1).is_contiguous() is (input_last or weight_last)
    stride, padding, extra, groups, dilation = others
    module = MODULES[rank][0](
        *(x.shape[1], filters, w.shape[2:], stride, padding, extra, groups, has_bias, dilation)
    )
    module.load_state_dict({"weight": w, "bias": b} if has_bias else {"weight": w})
    assert torch.equal(module(given_x), OWN[rank](given_x, module.weight, b, *others))


@pytest.mark.parametrize("geometry", [(2, 1, 1), (2, 0, 0), (1, 2, 0), (1, 0, 0), (3, 1, 2)])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_module_is_a_drop_in(rank: int, geometry: tuple[int, int, int]) -> None:
    own, theirs = MODULES[rank]
    stride, padding, extra = geometry
    arguments = (4, 6, 2, stride, padding, extra, 2)
    torch.manual_seed(0)
    expected = theirs(*arguments)
    torch.manual_seed(0)
    actual = own(*arguments)
    assert isinstance(actual, theirs) and not actual.weight.requires_grad
    assert torch.equal(actual.weight, expected.weight) and torch.equal(actual.bias, expected.bias)
    assert repr(actual) == repr(expected)
    x = draw(2, 4, *(7,) * rank)
    for input in (x, last(x), x[0], last(x)[0]):
        y = actual(input)
        check(rank, y, input, expected.weight, expected.bias, stride, padding, extra, 2)
        if rank > 1 and input.dim() == rank + 2:
            assert y.stride() == expected(input).stride()
        assert (
            y.movedim(-rank - 1, -1).is_contiguous() is input.movedim(-rank - 1, -1).is_contiguous()
        )
    copied = own.from_torch(expected)
    assert torch.equal(copied(x), actual(x))
    assert copied.weight.data_ptr() == expected.weight.data_ptr()


def test_output_size() -> None:
    own, theirs = mt.ConvTranspose2d(3, 4, 3, 2, 1), nn.ConvTranspose2d(3, 4, 3, 2, 1)
    theirs.load_state_dict(own.state_dict())
    x = draw(2, 3, 5, 6)
    for size in ((9, 11), (10, 12), (9, 12)):
        y = own(x, output_size=size)
        assert y.shape[2:] == size
        assert torch.allclose(y, theirs(x, output_size=size), atol=1e-5)
    with pytest.raises(ValueError, match="requested an output size"):
        own(x, output_size=(20, 20))


def test_filters_are_made_once_and_follow_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    parts = _transposed._parts

    def counted(*arguments: Any) -> Any:
        made.append(1)
        return parts(*arguments)

    monkeypatch.setattr(_transposed, "_parts", counted)
    for taps in (2, 3):
        module, x = mt.ConvTranspose2d(3, 4, taps, 2), draw(1, 3, 6, 6)

        def current(module: Any = module, x: Tensor = x, count: int = 1) -> None:
            made.clear()
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    check(2, module(x), x, module.weight, module.bias, 2)
            assert len(made) == count

        current()
        current(count=0)
        with torch.no_grad():
            module.weight.mul_(2.0)
            current()
            module.bias.add_(1.0)  # type: ignore[union-attr]
            current(count=0)
        module.load_state_dict(mt.ConvTranspose2d(3, 4, taps, 2).state_dict())
        current()
        for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(copied(x), module(x))
            with torch.no_grad():
                copied.weight.zero_()
            current(copied)
        module.weight.data.mul_(0.5)
        module.repack()
        current()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.extended)]
)
@pytest.mark.parametrize("taps", [2, 3])
def test_half_precision_with_a_wide_bias(dtype: torch.dtype, taps: int) -> None:
    x, w, b = draw(2, 8, 5, 4, dtype=dtype), draw(8, 6, taps, taps, dtype=dtype), draw(6)
    y = mt.conv_transpose2d(x, w, b, 2)
    assert y.dtype == dtype
    check(2, y, x, w, b, 2)


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
def test_activation(taps: int) -> None:
    x, w, b = draw(2, 4, 5, 4), draw(4, 3, taps, taps), draw(3)
    y = mt.conv_transpose2d(x, w, b, 2, activation="silu")
    exact = functional.silu(functional.conv_transpose2d(x.double(), w.double(), b.double(), 2))
    close(y, exact, 8.0, 80)
    module = mt.ConvTranspose2d(4, 3, taps, 2, activation="silu")
    module.load_state_dict({"weight": w, "bias": b})
    assert torch.equal(module(x), y) and "activation=silu" in repr(module)


def test_outputs_without_a_tap_do_not_see_the_input() -> None:
    x = torch.full((1, 2, 3, 3), torch.inf)
    y = mt.conv_transpose2d(x, torch.ones(2, 1, 1, 1), draw(1), 2)
    assert y[..., ::2, ::2].isinf().all()
    assert torch.equal(y[..., 1::2, :], draw(1).expand(1, 1, 2, 5))


def test_no_images() -> None:
    x = draw(0, 4, 5, 4)
    for taps in (2, 3):
        assert mt.conv_transpose2d(x, draw(4, 3, taps, taps), None, 2).shape[0] == 0


# What PyTorch's compiler sees -------------------------------------------------------------------


def test_opcheck() -> None:
    scalars = (1.0, 0.0, 0.0, 0.0, 0.0)
    operator = torch.ops.maxconv.conv_transpose.default
    for taps, stride, extra, channels_last in (
        *((2, 2, 0, True), (2, 2, 0, False), (2, 2, 1, True), (2, 2, 1, False)),
        *((3, 2, 0, True), (3, 2, 1, False), (3, 1, 0, True), (1, 2, 0, False)),
    ):
        x, w, b = draw(2, 6, 4, 5), draw(6, 3, taps, taps), draw(6)
        arguments: tuple[Any, ...] = (
            *((extra,) * 2, (stride,) * 2, (0, 0), (1, 1), 2, (1, 0), scalars, None, None, ()),
            *((0, 0, 0), None, channels_last, False),
        )
        for input in (x, last(x), x[:0]):
            torch.library.opcheck(operator, (input, w, b, *arguments))


class Decoder(nn.Module):
    def __init__(self, kinds: Any) -> None:
        super().__init__()
        self.up = kinds.ConvTranspose2d(4, 6, 4, 2, 1)
        self.again = kinds.ConvTranspose2d(6, 3, 2, 2, groups=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.relu(self.up(x))).sigmoid()  # type: ignore[no-any-return]


def test_compile_and_export() -> None:
    torch.compiler.reset()
    model, theirs = Decoder(mt), Decoder(nn)
    theirs.load_state_dict(model.state_dict())
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for size in (5, 6, 8):
        x = draw(2, 4, size, 7)
        with torch.no_grad():
            expected = theirs(x)
            assert torch.allclose(compiled(x), expected, atol=1e-5)
    batch, height = torch.export.Dim("batch"), torch.export.Dim("height", min=2)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch, 2: height},))
    assert exported.module()(x[:1, :, :3]).shape == (1, 3, 12, 28)
    assert torch.allclose(exported.module()(x), expected, atol=1e-5)
    with torch.no_grad():
        model.up.weight.mul_(2.0)
        theirs.up.weight.mul_(2.0)
        assert torch.allclose(compiled(x), theirs(x), atol=1e-5)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return mt.conv_transpose1d(x, w, None, 3, output_padding=(1,), activation="relu")

    x, w = draw(1, 4, 9), draw(4, 2, 5)
    assert torch.equal(torch.compile(call, fullgraph=True)(x, w), call(x, w))


# Errors -----------------------------------------------------------------------------------------

X, W = draw(2, 6, 5, 4), draw(6, 4, 3, 3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input": 3}, TypeError, r"input: a int is not a tensor"),
        ({"input": X[0, 0]}, ValueError, r"input: shape \(5, 4\) has rank 2; conv_transpose2d tak"),
        ({"input": X.double()}, TypeError, r"input: dtype torch.float64 is not supported; torch"),
        ({"weight": W[0]}, ValueError, r"weight: shape \(4, 3, 3\) has rank 3; conv_transpose2d t"),
        ({"weight": W.half()}, TypeError, r"weight: dtype torch.float16 does not match; the input"),
        ({"weight": W[:5]}, ValueError, r"weight: 5 channels are not divisible by groups=2"),
        ({"weight": W[:4]}, ValueError, r"weight: 4 channels do not match the input's 6; a transp"),
        ({"bias": draw(4)}, ValueError, r"bias: 4 elements, but there are 8 filters"),
        ({"padding": "same"}, TypeError, r"padding: 'same' is a str; an integer or a tuple of 2"),
        ({"padding": 9}, ValueError, r"padding: cuts the output's h extent down to -7; at least 1"),
        ({"padding": -1}, ValueError, r"padding: \(-1, -1\) has a negative entry; every padding"),
        ({"stride": 0}, ValueError, r"stride: \(0, 0\) has a non-positive entry"),
        ({"dilation": (1, 2, 1)}, ValueError, r"dilation: \(1, 2, 1\) has 3 entries; 2 are allow"),
        ({"groups": 2.0}, TypeError, r"groups: 2.0 holds a float; integers are allowed"),
        ({"output_padding": 2}, ValueError, r"output_padding: \(2, 2\) has an entry that is not b"),
        ({"output_padding": -1}, ValueError, r"output_padding: \(-1, -1\) has a negative entry"),
        ({"activation": "rlu"}, ValueError, r"activation: 'rlu'"),
        ({"input": X[:, :, :0]}, ValueError, r"input: h extent 0 is empty; at least 1 is needed"),
        ({"weight": W.clone().requires_grad_()}, RuntimeError, r"weight: requires grad, but"),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"input": X, "weight": W, "stride": 2, "groups": 2, **change}
    with pytest.raises(error, match=f"^{message}"):
        mt.conv_transpose2d(**arguments)


def test_errors_of_modules() -> None:
    with pytest.raises(ValueError, match=r"^activation: 'rlu'"):
        mt.ConvTranspose2d(4, 4, 2, activation="rlu")
    with pytest.raises(ValueError, match='Only "zeros" padding mode is supported'):
        mt.ConvTranspose2d(4, 4, 2, padding_mode="reflect")
    with pytest.raises(TypeError, match=r"^conv: a Conv2d is not a ConvTranspose2d"):
        mt.ConvTranspose2d.from_torch(nn.Conv2d(4, 4, 2))  # type: ignore[arg-type]
