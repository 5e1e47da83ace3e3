"""``mt.group_norm``, and group normalizations in converted models, without a GPU.

In place of the kernels' library there is one that computes with PyTorch what it is given addresses
of.
"""

from __future__ import annotations

import copy
import ctypes
import pickle
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.interop.conversion import CALLS, X, conv, convert_and_compare, network
from tests.interop.torch_tensors import close, draw, last
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

import maxconv.torch as mt
from maxconv import _native
from maxconv.activations import ActivationSpec
from maxconv.torch import _fuse_norms, _norm, _untraced
from maxconv.torch._activations import apply


def memory(address: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """The tensor that lies at an address."""
    whole = torch.Size(shape).numel() * dtype.itemsize
    held = (ctypes.c_byte * whole).from_address(address)
    return torch.frombuffer(held, dtype=dtype).view(shape)


class Kernels:
    """What the library does, computed by PyTorch."""

    stream = 7

    def __init__(self) -> None:
        self.calls: list[str] = []
        """The activation of each call."""

    def library(self, kind: Any, dtype: str, architecture: str) -> SimpleNamespace:
        assert kind is _native.GroupNorm and architecture == "sm_90a"
        self.dtype: torch.dtype = getattr(torch, dtype)
        return SimpleNamespace(workspace=self.workspace, run=self.run)

    def workspace(self, index: int, input: int, output: int, *shape: int) -> int:
        self.shape = shape
        return 3

    def run(
        self,
        index: int,
        input: int,
        weight: int,
        bias: int,
        output: int,
        workspace: int,
        images: int,
        pixels: int,
        channels: int,
        groups: int,
        epsilon: float,
        activation: ActivationSpec,
        stream: int,
        *,
        wide: bool,
    ) -> None:
        assert stream == self.stream and self.shape == (images, pixels, channels, groups)
        memory(workspace, torch.float32, 3).zero_()
        shape = (images, pixels, channels)
        kind = torch.float32 if wide else self.dtype
        w, b = (memory(a, kind, channels).double() if a else None for a in (weight, bias))
        x = memory(input, self.dtype, *shape).movedim(2, 1).double()
        exact = apply(activation, functional.group_norm(x, groups, w, b, epsilon))
        memory(output, self.dtype, *shape).copy_(exact.movedim(1, 2))
        self.calls.append(activation.kind.name.lower())


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Has tensors and models pass for those of a GPU."""
    made = Kernels()
    monkeypatch.setattr(_native, "beside", made.library)
    monkeypatch.setattr(_norm, "gpu_target", lambda index: SimpleNamespace(architecture="sm_90a"))
    monkeypatch.setattr(_norm, "raw_stream", lambda index: made.stream)
    monkeypatch.setattr(_norm, "_is_on_gpu", lambda input: True)
    for module in (_fuse_norms, _untraced):
        monkeypatch.setattr(module, "is_on_gpu", lambda model: True)
    return made


# The function -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 9), (2, 6, 9, 4), (2, 6, 3, 4, 5)])
def test_a_cpu_gets_pytorchs_normalization(shape: tuple[int, ...]) -> None:
    x, w, b = draw(*shape), draw(6, seed=1), draw(6, seed=2)
    for given in (x, last(x)):
        exact = functional.group_norm(given, 3, w, b, 1e-3)
        assert torch.equal(mt.group_norm(given, 3, w, b, 1e-3), exact)
        actual = mt.group_norm(given, 3, w, b, 1e-3, activation="silu")
        assert torch.equal(actual, functional.silu(exact))
        called = torch.ops.maxconv.group_norm(given, 3, w, b, 1e-3, 0, 0.0, 0.0)
        assert torch.equal(called, exact)
        assert called.movedim(1, -1).is_contiguous()


def test_a_gradient() -> None:
    x, w = draw(2, 4, 3, 3).requires_grad_(), draw(4, seed=1).requires_grad_()
    mt.group_norm(x, 2, w, activation="relu").square().sum().backward()  # type: ignore[no-untyped-call] # PyTorch's
    assert x.grad is not None and w.grad is not None


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"input": [1.0]}, TypeError, r"input: a list is not a torch.Tensor"),
        ({"input": torch.zeros(3)}, ValueError, r"input: 1 dimensions; \[N, C, \*spatial\] is"),
        ({"num_groups": 4}, ValueError, "num_groups: 4 does not divide the 6 channels; a div"),
        ({"num_groups": 0}, ValueError, "num_groups: 0 does not divide the 6 channels; a div"),
        ({"num_groups": 2.0}, TypeError, r"num_groups: 2.0 holds a float; integers are allowed"),
        ({"weight": 1.0}, TypeError, "weight: a float is not a torch.Tensor; a tensor or None"),
        ({"weight": torch.ones(5)}, ValueError, r"weight: shape \(5,\); \(6,\) is allowed"),
        ({"bias": torch.ones(6, 1)}, ValueError, r"bias: shape \(6, 1\); \(6,\) is allowed"),
        ({"eps": -1}, ValueError, r"eps: -1.0 is not allowed; 0 and above are"),
        ({"eps": float("nan")}, ValueError, r"eps: nan is not allowed; 0 and above are"),
        ({"eps": "1"}, TypeError, r"eps: '1' is a str; a number is allowed"),
        ({"activation": "swish"}, ValueError, r"activation: 'swish' is not an activation; relu"),
    ],
)
def test_mistakes(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments = {"input": torch.zeros(2, 6, 3, 3), "num_groups": 2, **changes}
    with pytest.raises(kind, match=f"^{message}"):
        mt.group_norm(**arguments)


def test_the_fake_output_has_the_kernels_strides() -> None:
    with FakeTensorMode():
        made = torch.empty(2, 6, 7, 5, device="cuda").to(memory_format=torch.channels_last)
        fake = torch.ops.maxconv.group_norm(made, 3, None, None, 1e-5, 0, 0.0, 0.0)
        flat = torch.ops.maxconv.group_norm(made.flatten(2), 3, None, None, 1e-5, 0, 0.0, 0.0)
    assert fake.shape == made.shape and fake.stride() == made.stride()
    assert flat.shape == (2, 6, 35) and flat.stride() == (210, 1, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 6, 9), (3, 6, 9, 4), (2, 6, 3, 4, 5), (1, 6, 1, 1)])
def test_the_kernels_are_given_the_call(
    shape: tuple[int, ...], dtype: torch.dtype, kernels: Kernels
) -> None:
    x = last(draw(*shape, dtype=dtype))
    for kind in (None, dtype, torch.float32):
        w = b = None
        if kind is not None:
            w, b = draw(6, seed=1).to(kind), draw(6, seed=2).to(kind)
        actual = mt.group_norm(x, 2, w, b, 1e-3, activation=("leaky_relu", 0.25))
        w, b = (None if v is None else v.double() for v in (w, b))
        exact = functional.group_norm(x.double(), 2, w, b, 1e-3)
        close(actual, functional.leaky_relu(exact, 0.25), 0.0, 0)
        assert actual.dtype == dtype and actual.movedim(1, -1).is_contiguous()
    assert kernels.calls == ["leaky_relu"] * 3


def test_others_are_pytorchs(kernels: Kernels) -> None:
    x, w, b = last(draw(2, 4, 5, 6)), draw(4, seed=1), draw(4, seed=2)
    trained = w.clone().requires_grad_()
    half, twice = x.bfloat16(), torch.stack([w, w], 1)[:, 0]
    given: tuple[tuple[Tensor, Tensor | None, Tensor | None], ...] = (
        (x.contiguous(), w, b),
        (last(draw(2, 4, 5, 12))[..., ::2], w, b),
        (x.double(), w.double(), b.double()),
        (x[:, :, 0, 0], w, b),
        (x, w, None),
        (x, None, b),
        (x, twice, b),
        (x, trained, b),
        (x.clone().requires_grad_(), None, None),
        (half, w, b.bfloat16()),
    )
    for input, weight, bias in given:
        if input is half:
            with pytest.raises(RuntimeError, match=r"(?i)dtype|type"):
                mt.group_norm(input, 2, weight, bias)
            continue
        exact = functional.group_norm(input, 2, weight, bias)
        assert torch.equal(mt.group_norm(input, 2, weight, bias), exact)
    with pytest.raises(ValueError, match="more than 1 value"):
        mt.group_norm(torch.zeros(1, 4, 1, 1), 4)
    assert mt.group_norm(x[:0], 2).shape == (0, 4, 5, 6)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda x: mt.group_norm(x, 2))(torch.stack([x, x]))
    assert not kernels.calls
    with torch.no_grad():
        mt.group_norm(x, 2, trained, b)
    assert len(kernels.calls) == 1


def test_autocast_normalizes_in_float32(kernels: Kernels) -> None:
    x = last(draw(2, 4, 5, 6))
    with torch.autocast("cpu", torch.bfloat16):
        mt.group_norm(x.bfloat16(), 2)
        assert not kernels.calls
        mt.group_norm(x, 2)
        assert kernels.calls


class Activated(nn.Module):
    """A normalization with an activation that has parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        clamped = mt.group_norm(x, 2, self.norm.weight, self.norm.bias, activation="relu6")
        return mt.group_norm(clamped, 4, activation=("leaky_relu", 0.1)) + 1


def test_an_exported_graph_has_the_operator(kernels: Kernels) -> None:
    model, x = Activated(), last(X)
    with torch.no_grad():
        program = torch.export.export(model, (x,), strict=True)
        called = [node.target for node in program.graph.nodes if node.op == "call_function"]
        assert called.count(torch.ops.maxconv.group_norm.default) == 2
        expected = model(x)
        assert torch.equal(program.module()(x), expected)
    assert kernels.calls == ["clamp", "leaky_relu"] * 2


# Converted models ---------------------------------------------------------------------------------


def norm(**options: Any) -> nn.GroupNorm:
    made = nn.GroupNorm(2, 4, **options)
    if made.affine:
        with torch.no_grad():
            made.weight.copy_(draw(4, seed=3))
            made.bias.copy_(draw(4, seed=4))
    return made


FORMS: dict[str, tuple[Any, str]] = {
    "module and module": (lambda m, x: m.act(m.norm(m.conv(x))), "silu"),
    "module and function": (lambda m, x: functional.relu(m.norm(m.conv(x))), "relu"),
    "named input": (lambda m, x: torch.sigmoid(m.norm(input=m.conv(x))), "sigmoid"),
    "function": (lambda m, x: m.act(functional.group_norm(m.conv(x), 4, m.w, eps=1e-3)), "none"),
    "function of all": (
        lambda m, x: m.act(functional.group_norm(m.conv(x), 2, m.norm.weight, m.norm.bias, 1e-3)),
        "silu",
    ),
    "parameters": (lambda m, x: functional.leaky_relu(m.norm(m.conv(x)), 0.3), "leaky_relu"),
    "dropout between": (lambda m, x: m.act(m.drop(m.norm(m.conv(x)))), "silu"),
    "in place": (lambda m, x: m.norm(m.conv(x)).clamp_(-1, 2), "clamp"),
    "shape is read": (lambda m, x: shaped(m.norm(m.conv(x)), m.act), "silu"),
    "no activation": (lambda m, x: m.norm(m.conv(x)) * 2, "none"),
    "another activation": (lambda m, x: functional.elu(m.norm(m.conv(x))), "none"),
    "two readers": (lambda m, x: (lambda y: y + m.act(y))(m.norm(m.conv(x))), "none"),
}


def shaped(x: Tensor, act: Any) -> Tensor:
    y: Tensor = act(x).flatten(2) * x.size(1)
    return y.view(x.shape)


@pytest.mark.parametrize("name", FORMS)
def test_normalizations_take_activations(name: str, kernels: Kernels) -> None:
    form, taken = FORMS[name]
    parts = {"conv": conv(), "norm": norm(), "act": nn.SiLU(), "drop": nn.Dropout()}
    model = network(form, **parts)
    model.w = nn.Parameter(draw(4, seed=5))
    convert_and_compare(model, X)
    # A weight without a bias is PyTorch's to multiply with.
    assert kernels.calls == ([] if name == "function" else [taken] * CALLS)


def test_a_module_that_is_called_twice(kernels: Kernels) -> None:
    model = network(
        lambda m, x: m.norm(m.conv(functional.silu(m.norm(m.conv(x))))), conv=conv(), norm=norm()
    )
    converted, _ = convert_and_compare(model, X)
    assert kernels.calls == ["silu", "none"] * CALLS
    assert isinstance(converted.norm, _norm.GroupNorm)


def test_modules_keep_class_state_and_mode(kernels: Kernels) -> None:
    model = network(lambda m, x: m.act(m.norm(m.conv(x))), conv=conv(), norm=norm(), act=nn.SiLU())
    converted, _ = convert_and_compare(model, X)
    assert type(model.norm) is nn.GroupNorm
    own: Any = converted.norm
    assert isinstance(own, nn.GroupNorm) and not own.training
    assert set(converted.state_dict()) == set(model.state_dict())
    x = last(X)
    with torch.no_grad():
        close(own(x), copy.deepcopy(model.norm).double()(x.double()), 0.0, 0)
        expected = converted(x)
        for other in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
            assert torch.equal(other(x), expected)
        kernels.calls.clear()
        again, _ = mt.convert(converted)
        assert torch.equal(again(x), expected)
    assert kernels.calls == ["silu"]


def test_a_part_that_was_converted_before(kernels: Kernels) -> None:
    inner = network(lambda m, x: m.act(m.norm(m.conv(x))), conv=conv(), norm=norm(), act=nn.SiLU())
    part, _ = mt.convert(inner)
    model = network(lambda m, x: m.part(m.norm(m.conv(x))), conv=conv(), norm=norm(), part=part)
    converted, _ = mt.convert(model)
    with torch.no_grad():
        actual, calls = converted(X), tuple(kernels.calls)
        assert torch.allclose(actual, model(X), atol=1e-5)
    assert calls == ("none", "silu")


def test_a_subclass_is_what_its_forward_does(kernels: Kernels) -> None:
    class Shifted(nn.GroupNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    convert_and_compare(nn.Sequential(conv(), Shifted(2, 4), nn.SiLU()).eval(), X)
    # Traced, it is a function.
    assert kernels.calls == ["none"] * CALLS


def test_modules_with_hooks_stay(kernels: Kernels) -> None:
    hooked = norm()
    hooked.register_forward_hook(lambda module, inputs, output: output + 1)
    model = nn.Sequential(conv(), hooked, nn.SiLU()).eval()
    converted, _ = mt.convert(model)
    with torch.no_grad():
        assert torch.allclose(converted(X), model(X), atol=1e-5)
    assert not kernels.calls


def test_on_a_cpu_a_model_keeps_pytorchs() -> None:
    model = network(lambda m, x: m.act(m.norm(m.conv(x))), conv=conv(), norm=norm(), act=nn.SiLU())
    converted, _ = convert_and_compare(model, X)
    assert type(converted.norm) is nn.GroupNorm


class Branches(nn.Module):
    """A module that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv(), norm()

    def forward(self, x: Tensor) -> Tensor:
        y = self.normalized(x)
        return y if y.sum() > 0 else -y

    def normalized(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return y


class Viewing(Branches):
    """One that would fail of an output that is channels last."""

    def normalized(self, x: Tensor) -> Tensor:
        return _one_row(super().normalized(x))


def _one_row(x: Tensor) -> Tensor:
    return x.view(1, -1).reshape(x.shape)


class Around(nn.Module):
    """A module around one that is not traced, and cannot be traced itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.blocks = inner, nn.ModuleList([nn.Sequential(conv(), norm())])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return x if x.sum() > 0 else -x


class ViewingAround(Around):
    """The same, which makes a view of what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return _one_row(super().forward(x))


@pytest.mark.parametrize("model", [Branches(), Around(Branches()), Around(conv())])
def test_modules_that_cannot_be_traced(kernels: Kernels, model: nn.Module) -> None:
    """Their convolutions give channels-last tensors whatever they get, and so do the rest."""
    converted, _ = mt.convert(model.eval())
    norms = [part for part in model.modules() if type(part) is nn.GroupNorm]
    for x in (X, last(X)):
        kernels.calls.clear()
        with torch.no_grad():
            actual = converted(x)
            assert torch.allclose(actual, model(x), atol=1e-5)
        assert actual.is_contiguous(memory_format=torch.channels_last)
        assert kernels.calls == ["none"] * len(norms)


@pytest.mark.parametrize("model", [Viewing(), Around(Viewing()), ViewingAround(Branches())])
def test_code_that_makes_a_view_gets_pytorchs_formats(kernels: Kernels, model: Any) -> None:
    converted, report = mt.convert(model.eval())
    assert report.untraced
    inner = getattr(converted, "inner", converted)
    assert type(inner.norm) is nn.GroupNorm
    with torch.no_grad():
        assert torch.allclose(converted(X), model(X), atol=1e-5)


def test_memory_formats_may_stay_pytorchs(kernels: Kernels) -> None:
    converted, _ = mt.convert(Branches().eval(), channels_last=False)
    assert type(cast(Any, converted).norm) is nn.GroupNorm


def test_a_model_that_is_moved_to_a_cpu_normalizes_exactly(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(lambda m, x: m.norm(m.conv(x) + 30), conv=conv(), norm=norm(affine=False))
    converted, _ = mt.convert(model)
    monkeypatch.setattr(_norm, "_is_on_gpu", lambda input: False)
    x = X.repeat(1, 1, 12, 12)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        assert (converted(x).double() - exact).abs().max() < 1e-4
    assert not kernels.calls


class Sized(nn.Module):
    """A module that cannot be traced, and takes contiguous tensors alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.view(-1)
        return (y if y.abs().sum() > 0 else -y).view(x.shape)


@pytest.mark.parametrize("formats", [torch.contiguous_format, torch.channels_last])
def test_who_can_tell_gets_contiguous_tensors(formats: Any, kernels: Kernels) -> None:
    forms: tuple[Any, ...] = (
        lambda m, x: m.sized(m.act(m.norm(m.conv(x)))),
        lambda m, x: m.sized(m.norm(x.contiguous(memory_format=torch.channels_last)) * 2 + 1),
        lambda m, x: m.sized(functional.group_norm(m.conv(x), 2)),
    )
    x = X.contiguous(memory_format=formats)
    for form in forms:
        model = network(form, conv=conv(), norm=norm(), act=nn.SiLU(), sized=Sized())
        converted, _ = mt.convert(model)
        wide = copy.deepcopy(model).double()
        # PyTorch's own normalization is contiguous on a GPU, not on a CPU.
        cast(Any, wide).sized.forward = lambda y: Sized()(y.contiguous())
        with torch.no_grad():
            close(converted(x), wide(x.double()), 10.0, 36)
    assert kernels.calls == ["silu", "none", "none"]
