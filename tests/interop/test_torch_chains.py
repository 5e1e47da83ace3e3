"""Convolutions of a converted model that run without PyTorch between them."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from tests.interop.conversion import X, conv, network
from tests.interop.torch_tensors import draw
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import maxconv.torch as mt
from maxconv.bench.resnet import ResNet, randomize
from maxconv.torch import _chains
from maxconv.torch._plan import Direct

pytestmark = pytest.mark.torch


def small() -> nn.Module:
    """Convolutions with a branch, a residual, and an operator of PyTorch's in between."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = functional.relu(m.first(x))
        z = functional.relu(m.third(m.second(y)) + y)
        pooled = functional.max_pool2d(z, 2)
        return cast(Tensor, m.fifth(m.fourth(pooled)) + m.beside(pooled))

    parts = ("first", "second", "third", "fourth", "fifth", "beside")
    return network(forward, **{name: conv() for name in parts})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the classes of maxconv's modules that are called while a test runs."""
    names: list[str] = []
    # Where ``planned`` is, too.
    shared = cast(Any, mt.Conv2d.__mro__[1])
    forward = shared.forward

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(type(self).__name__)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(shared, "forward", called)
    return names


def settled(model: nn.Module, calls: list[str], *inputs: Tensor) -> Tensor:
    """Calls a model until chains run, and returns its output; no module was called for that."""
    model(*inputs)
    model(*inputs)
    calls.clear()
    output: Tensor = model(*inputs)
    assert not calls
    return output


def plain(model: nn.Module, *inputs: Tensor) -> Tensor:
    """What a model returns that was never called before."""
    output: Tensor = copy.deepcopy(model)(*inputs)
    return output


# What runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_chains_run_from_the_third_call_on(calls: list[str], last: bool) -> None:
    model, _ = mt.convert(small())
    x = X.to(memory_format=torch.channels_last) if last else X
    expected = plain(model, x)
    calls.clear()
    model(x)
    assert len(calls) == 6
    model(x)
    assert len(calls) == 12
    assert torch.equal(model(x), expected) and len(calls) == 12
    assert model(x).stride() == expected.stride()


def test_each_shape_has_its_program(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    inputs = [draw(n, 4, h, 8, seed=h) for n, h in ((1, 8), (2, 9), (1, 12))]
    expected = [plain(model, x) for x in inputs]
    for x in inputs:
        settled(model, calls, x)
    calls.clear()
    assert all(torch.equal(model(x), y) for x, y in zip(inputs, expected, strict=True))
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_network(calls: list[str], dtype: torch.dtype) -> None:
    model, _ = mt.convert(randomize(ResNet((2, 1, 1, 1), 10)).eval().to(dtype))
    x = draw(2, 3, 64, 48).to(dtype)
    expected = plain(model, x)
    assert torch.equal(settled(model, calls, x), expected)


@pytest.mark.parametrize(("kind", "size"), [(nn.Conv1d, 1), (nn.Conv3d, 3)])
def test_other_ranks(calls: list[str], kind: type[nn.Module], size: int) -> None:
    first, second = (cast(Any, kind)(4, 4, 3, padding=1) for _ in range(2))
    model, _ = mt.convert(nn.Sequential(first, nn.ReLU(), second).eval())
    x = draw(2, 4, *(7,) * size)
    assert torch.equal(settled(model, calls, x), plain(model, x))


def test_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = mt.quantize(small(), [X])
    expected = plain(model, X)
    model(X)
    model(X)
    kind = next(type(part) for part in model.modules() if type(part).__name__ == "QuantizedConv")
    with monkeypatch.context() as patch:
        patch.setattr(kind, "_convolve", None)
        assert torch.equal(model(X), expected)


def test_results_of_calls_are_apart(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    first = settled(model, calls, X)
    kept = first.clone()
    second = model(-X)
    assert torch.equal(first, kept) and not torch.equal(first, second)


def test_threads_share_a_model(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    inputs = [draw(2, 4, 9, 8, seed=seed) for seed in range(8)]
    expected = [plain(model, x) for x in inputs]
    settled(model, calls, X)

    def run(number: int) -> bool:
        with torch.no_grad():
            return all(torch.equal(model(inputs[number]), expected[number]) for _ in range(30))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(8)))


def test_inference_mode(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    with torch.inference_mode():
        y = settled(model, calls, X)
    assert y.is_inference() and torch.equal(y, plain(model, X))


# What changes -----------------------------------------------------------------------------------


def _set_stride(model: Any) -> None:
    for part in (model.fourth, model.beside):
        part.stride = (2, 2)


def _replace(model: Any) -> None:
    model.second = nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False)


def _assign(model: Any) -> None:
    model.second.weight = nn.Parameter(model.second.weight * 2, requires_grad=False)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute": _set_stride,
    "a module": _replace,
    "a parameter": _assign,
    "values of a weight": lambda model: model.second.weight.mul_(2),
    "data of a weight": lambda model: setattr(model.second.weight, "data", model.third.weight * 2),
    "order of a weight": lambda model: setattr(
        model.second.weight, "data", model.second.weight.data.transpose(2, 3)
    ),
    "values of a bias": lambda model: model.third.bias.add_(1),
    "data of a bias": lambda model: setattr(model.third.bias, "data", model.third.bias + 1),
    "a hook": lambda model: model.second.register_forward_hook(lambda m, x, y: y * 2),
    "a hook in front": lambda model: model.second.register_forward_pre_hook(
        lambda m, x: (x[0] * 2,)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(calls: list[str], change: str) -> None:
    model, _ = mt.convert(small())
    before = settled(model, calls, X)
    with torch.no_grad():
        CHANGES[change](model)
    after = model(X)
    assert not torch.equal(after, before)
    assert torch.equal(after, plain(model, X))
    assert torch.equal(after, model(X))


def test_modules_that_change_in_every_call_are_called(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    settled(model, calls, X)
    second: Any = cast(Any, model).second
    for _ in range(100):
        with torch.no_grad():
            second.weight.mul_(0.99)
        actual = model(X)
    assert torch.equal(actual, plain(model, X))
    counts = []
    for _ in range(100):
        calls.clear()
        model(X)
        counts.append(len(calls))
    # The chain in front of the pooling tries one in 64 calls; the one behind it has not changed.
    assert counts[0] == 3 and counts[-1] == 0 and sum(counts) < 300
    assert torch.equal(model(X), plain(model, X))


def test_a_global_hook_is_called(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    settled(model, calls, X)
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: seen.append(type(module).__name__)
    )
    try:
        model(X)
    finally:
        handle.remove()
    assert seen.count("Conv2d") == 6
    assert torch.equal(settled(model, calls, X), plain(model, X))


def test_eval_changes_nothing(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    settled(model, calls, X)
    model.eval()(X)
    assert not calls


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_have_chains_of_their_own(calls: list[str], how: Callable[[Any], Any]) -> None:
    model, _ = mt.convert(small())
    settled(model, calls, X)
    other = how(model)
    with torch.no_grad():
        other.second.weight.zero_()
    expected = plain(model, X)
    assert not torch.equal(settled(other, calls, X), expected)
    assert torch.equal(settled(model, calls, X), expected)


def test_another_dtype(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    settled(model, calls, X)
    model.bfloat16()
    x = X.bfloat16()
    assert torch.equal(settled(model, calls, x), plain(model, x))


def test_a_changed_graph_is_run(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    before = settled(model, calls, X)
    graph: Any = cast(Any, model).graph
    output = next(node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(output):
        output.args = (graph.call_function(torch.neg, output.args),)
    cast(Any, model).recompile()
    assert torch.equal(model(X), -before)
    assert torch.equal(settled(model, calls, X), -before)


# Who watches ------------------------------------------------------------------------------------


def test_a_mode_sees_operators(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    settled(model, calls, X)
    seen: list[str] = []

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call] # PyTorch declares none
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    mode: Any = Mode
    with mode():
        model(X)
    assert sum("maxconv" in name for name in seen) == 6
    with torch.profiler.profile() as profile:
        model(X)
    assert sum(e.count for e in profile.key_averages() if e.key == "maxconv::conv") == 6


def test_a_gradient_is_refused(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    settled(model, calls, X)
    with pytest.raises(RuntimeError, match="grad"):
        model(X.clone().requires_grad_())


def test_bad_input_is_an_error_of_the_module(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    settled(model, calls, X)
    with pytest.raises(ValueError, match="channels"):
        model(draw(2, 5, 9, 8))
    with pytest.raises(TypeError, match="float64"):
        model(X.double())


def test_torch_compile_sees_modules(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    expected = settled(model, calls, X)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), expected)


# Memory -----------------------------------------------------------------------------------------


def test_a_model_goes_with_its_chains(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    settled(model, calls, X)
    gone = weakref.ref(model), weakref.ref(cast(Any, model).second)
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_inputs_and_outputs_are_not_kept(calls: list[str]) -> None:
    model, _ = mt.convert(small())
    gone = []
    for _ in range(3):
        x = X.clone()
        gone += [weakref.ref(x), weakref.ref(model(x))]
    del x
    assert [ref() for ref in gone] == [None] * 6


def _step(count: int, *sources: int) -> Any:
    """A step that makes ``count`` bytes of what other steps made."""
    nothing: Any = None
    direct = Direct(nothing, nothing, (), (), {}, (count,), (1,), torch.uint8, nothing, -1)
    return _chains._Step(direct, tuple(("step", source) for source in sources))


def test_results_share_memory() -> None:
    # 0 is read by 1 and 3, so that 1 and 2 have blocks of their own; 4 is read outside.
    steps = [_step(64), _step(100, 0), _step(64, 1), _step(64, 2, 0), _step(1, 3)]
    sizes, shared = _chains._share(steps, {4: ("result", 0)})
    assert set(shared) == {0, 1, 2, 3}
    for first, second in ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3)):
        assert shared[first] != shared[second]
    assert shared[1] == shared[3] and len(sizes) == 3
    assert all(sizes[block] >= math.prod(steps[i].direct.shape) for i, block in shared.items())
    assert all(size % 64 == 0 for size in sizes)


def test_a_result_that_nobody_reads_has_memory() -> None:
    sizes, shared = _chains._share([_step(8), _step(8), _step(8, 1)], {2: ("result", 0)})
    assert set(shared) == {0, 1} and all(sizes)
