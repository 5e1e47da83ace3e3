"""``torch.compile(backend="maxconv")``: how it is found, when it steps back, what may change."""

from __future__ import annotations

import gc
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import tomli
import torch
from tests.interop.backend import called, compare, compiled, convolutions, reported
from tests.interop.conversion import X, conv, network
from tests.interop.torch_tensors import draw, last
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import maxconv.torch as mt
from maxconv.bench.resnet import randomize
from maxconv.torch import _backend
from maxconv.torch._filters import OPERANDS

pytestmark = pytest.mark.torch

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="Inductor needs a C++ compiler"
)


def block() -> nn.Module:
    """A convolution whose normalization is folded, with an activation."""
    return randomize(nn.Sequential(conv(), nn.BatchNorm2d(4), nn.SiLU())).eval()


def counted_graphs(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Returns a list with an element for each graph whose convolutions become maxconv's."""
    graphs: list[None] = []
    without = _backend._without_gradients

    def counted(*args: Any, **kwargs: Any) -> Any:
        graphs.append(None)
        return without(*args, **kwargs)

    monkeypatch.setattr(_backend, "_without_gradients", counted)
    return graphs


# How it is found --------------------------------------------------------------------------------


def test_installations_declare_the_backend() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    found = tomli.loads(project.read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    assert found == {"maxconv": f"{_backend.__name__}:{_backend.backend.__name__}"}


@pytest.mark.parametrize("imported", [True, False])
def test_the_name_is_found(imported: bool, tmp_path: Path) -> None:
    if not imported:
        info = tmp_path / "maxconv-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: maxconv\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            f"[torch_dynamo_backends]\nmaxconv = {_backend.__name__}:backend\n"
        )
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import torch
{"import maxconv.torch" if imported else ""}
conv = torch.nn.Conv2d(3, 4, 3)
assert ("maxconv.torch" in sys.modules) == {imported}
network = torch.compile(conv, backend="maxconv", options={{"inductor": False}})
import logging
logging.basicConfig(level=logging.INFO)
with torch.no_grad():
    network(torch.ones(1, 3, 8, 8))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "INFO:maxconv.torch:1 convolutions replaced, 0 modules left" in done.stderr, done.stderr


# Modes and options ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes_are_inductors(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, config

    seen: dict[str, Any] = {}
    inner = compile_fx.compile_fx_inner

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.update(autotune=config.max_autotune, graphs=config.triton.cudagraphs)
        seen.update(epilogue=config.epilogue_fusion)
        return inner(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", spy)
    network = compiled(conv(), mode=mode, options=None)
    with torch.no_grad():
        network(X)
    graphs = mode in ("reduce-overhead", "max-autotune")
    assert seen == {"autotune": mode == "max-autotune", "graphs": graphs, "epilogue": True}
    options = {"max_autotune": True, "epilogue_fusion": False}
    network = compiled(conv(), options=options)
    with torch.no_grad():
        network(X)
    assert seen == {"autotune": True, "graphs": False, "epilogue": False}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"mode": "fastest"}, "Unrecognized mode=fastest, should be one of: default"),
        ({"options": {"fastest": True}}, "Unexpected optimization option fastest"),
        ({"options": {"max_autotune": 1}}, "Unexpected type of attr max_autotune"),
        (
            {"options": {"inductor": "no"}},
            "options: inductor='no' is a str; True and False are allowed",
        ),
        (
            {"options": {"freezing": True}},
            "options: freezing=True would take the convolutions away from maxconv, .* False is",
        ),
    ],
)
def test_bad_options(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message), torch.no_grad():
        compiled(conv(), **{"options": None, **keywords})(X)


@needs_compiler
def test_inductor_compiles_the_rest() -> None:
    model = network(
        lambda m, x: m.b(torch.softmax(m.a(x).exp(), 1)).mul(2).flatten(2),
        a=nn.Sequential(conv(), nn.BatchNorm2d(4)), b=nn.Sequential(conv(), nn.SiLU()),
    )  # fmt: skip
    for x in (X, last(X)):
        network_ = compare(model, x, count=2, options=None)
        with torch.no_grad():
            calls = called(network_, x)[1]
        assert not [name for name in calls if "softmax" in name or "exp" in name]


def test_pytorchs_cache_of_compilations_is_no_ones_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import config

    model = conv()
    for backend, expected in (("inductor", (0, 1)), ("maxconv", (1, 0)), ("inductor", (0, 1))):
        torch.compiler.reset()
        with torch.no_grad(), config.patch(enable_autograd_cache=True):
            network = torch.compile(model, backend=backend)
            network(X)
            assert convolutions(called(network, X)[1]) == expected


# Gradients --------------------------------------------------------------------------------------


def test_a_graph_that_needs_gradients_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backend, "_warned", False)
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv())
    for parameter in model[3].parameters():
        parameter.requires_grad_(False)
    network = compiled(model)
    with pytest.warns(UserWarning) as caught:
        network(X)
    (warning,) = (entry for entry in caught if "maxconv" in str(entry.message))
    out, calls = called(network, X)
    assert convolutions(calls) == (0, 2)
    assert re.fullmatch(
        r"backend='maxconv': gradients are needed for L\['\w+'\].*0.*weight.* and 3 more, and "
        r"maxconv computes none: PyTorch's own convolutions run this graph, and all others that "
        r"need gradients; call the model under torch.no_grad\(\) or torch.inference_mode\(\) for "
        r"maxconv's",
        str(warning.message),
    )
    out.square().mean().backward()
    own = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(X).square().mean().backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(own) == 4
    for mine, theirs in zip(own, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(conv())(X)
        # The same model, when it needs none.
        with torch.no_grad():
            network(X)
            assert convolutions(called(network, X)[1]) == (2, 0)


def test_a_graph_without_convolutions_may_need_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backend, "_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network = compiled(nn.Sequential(nn.Linear(4, 4), nn.SiLU()))
        network(draw(2, 4)).sum().backward()


def test_no_grad_within_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backend, "_warned", False)
    model = block()

    @torch.no_grad()
    def forward(x: Tensor) -> Tensor:
        return cast(Tensor, model(x))

    @torch.enable_grad()
    def trains(x: Tensor) -> Tensor:
        return cast(Tensor, model(x))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network = compiled(forward)
        network(X)
        assert convolutions(called(network, X)[1]) == (1, 0)
    network = compiled(trains)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="gradients are needed"):
            network(X)
        out, calls = called(network, X)
    assert convolutions(calls) == (0, 1) and out.requires_grad


# Weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_weights_may_change(context: Any) -> None:
    model: Any = network(
        lambda m, x: m.b(m.a(x)), a=block(),
        b=nn.utils.parametrizations.weight_norm(conv()),
    )  # fmt: skip
    compiled_model = compiled(model)
    other = {name: torch.rand_like(value) for name, value in model.state_dict().items()
             if value.is_floating_point()}  # fmt: skip
    packed = len(OPERANDS)
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: model.a[0].weight.mul_(2),
        lambda: model.a[1].running_var.add_(1),
        lambda: model.a[1].bias.copy_(draw(4)),
        lambda: model.b.parametrizations.weight.original1.neg_(),
        lambda: model.load_state_dict(other, strict=False),
        lambda: model.load_state_dict(other, strict=False, assign=True),
        lambda: setattr(model.a[0].weight, "data", draw(4, 4, 3, 3, seed=3)),
    ]
    with context():
        for change in changes:
            with torch.inference_mode(False), torch.no_grad():
                change()
            torch.testing.assert_close(compiled_model(X), model(X), rtol=1e-4, atol=1e-5)
            _, calls = called(compiled_model, X)
            # What parameters say is computed when they change only.
            assert not calls["aten::rsqrt"] and convolutions(calls) == (2, 0)
    changes.clear()
    del compiled_model
    model = None
    gc.collect()
    torch.compiler.reset()
    gc.collect()
    mt.Conv2d(4, 4, 3)(X)
    assert len(OPERANDS) <= packed + 1


def test_uncounted_writes_need_repack() -> None:
    model: Any = network(lambda m, x: m.b(m.a(x)), a=block(), b=conv())
    compiled_model = compiled(model)
    with torch.no_grad():
        compiled_model(X)
        model.a[0].weight.data.copy_(draw(4, 4, 3, 3, seed=5))
        model.b.weight.data.copy_(draw(4, 4, 3, 3, seed=6))
        mt.repack(model)
        torch.testing.assert_close(compiled_model(X), model(X), rtol=1e-4, atol=1e-5)


def test_weights_without_a_version() -> None:
    with torch.inference_mode():
        model: Any = block()
        compiled_model = compiled(model)
        for _ in range(2):
            torch.testing.assert_close(compiled_model(X), model(X), rtol=1e-4, atol=1e-5)
            model[0].weight.mul_(2)
            model[1].weight.mul_(0.5)


def test_a_captured_operator_keeps_nothing() -> None:
    """A CUDA graph reads what was there when it was made: weights must be written in place."""
    from maxconv.torch._constants import keep_weights
    from maxconv.torch._rewrite import replace_convolutions

    for device, captured in (("cuda", True), ("cuda", False), ("cpu", True)):
        with FakeTensorMode(), torch.no_grad():
            x, w = torch.empty(2, 4, 9, 8, device=device), torch.empty(6, 4, 3, 3, device=device)
            graph = make_fx(lambda x, w: (torch.conv2d(x, w),))(x, w).graph
            assert len(replace_convolutions(graph).replaced) == 1
            constants = keep_weights(graph, [1], captured)
            (node,) = graph.find_nodes(op="call_function", target=torch.ops.maxconv.conv.default)
        weight = cast(Any, node.args[1])
        if device == "cuda" and captured:
            assert constants is not None and node.args[-1] is False
            assert weight.name.startswith("maxconv_constant")
            assert weight.meta["val"].is_contiguous(memory_format=torch.channels_last)
        else:
            assert constants is None and node.args[-1] is True and weight.name.startswith("w")


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_nothing_reads_is_no_input(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the rest of a graph gets what it reads, and knows what stays where it is."""
    from torch._inductor import compile_fx

    seen: list[tuple[list[str], list[int]]] = []

    def spy(model: GraphModule, inputs: Any, **others: Any) -> Any:
        nodes = model.graph.find_nodes(op="placeholder")
        assert [type(value) for value in inputs] == [type(node.meta["val"]) for node in nodes]
        assert all(node.users or not isinstance(node.meta["val"], Tensor) for node in nodes)
        seen.append(([node.name for node in nodes], sorted(others["static_input_idxs"])))
        return partial(_backend._interpret, model)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", spy)
    model: Any = randomize(nn.Sequential(conv(), nn.BatchNorm2d(4), nn.PReLU(4))).eval()
    x = draw(2, 4, 12, 12)
    with torch.no_grad():
        network = compiled(model, options=None, dynamic=dynamic)
        for _ in range(2):
            torch.testing.assert_close(network(x), model(x), rtol=1e-4, atol=1e-5)
            model[0].weight.mul_(0.5)
    ((names, static),) = seen
    # The image, its sizes if they are symbols, PReLU's slopes, the folded filter and its bias.
    constants = [name for name in names if name.startswith("maxconv_constant")]
    assert len(constants) == 2 and names[-2:] == constants
    tensors = len(names) - (2 if dynamic else 0)
    assert tensors == 4 and len(static) == 3
    assert static[-2:] == [len(names) - 2, len(names) - 1]


def test_one_graph_for_several_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated blocks share what is compiled, not their weights."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = block()

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.parts(x))

    graphs = counted_graphs(monkeypatch)
    blocks = nn.Sequential(*(Block() for _ in range(3))).eval()
    torch.compiler.reset()
    for part in blocks:
        cast(Any, part).compile(backend="maxconv", options={"inductor": False})
    with torch.no_grad():
        for _ in range(2):
            expected = X
            for part in blocks:
                expected = cast(Any, part).forward(expected)
            torch.testing.assert_close(blocks(X), expected, rtol=1e-4, atol=1e-5)
        assert not called(blocks, X)[1]["aten::rsqrt"]
    assert len(graphs) == 1


def test_tied_and_shared_weights(caplog: pytest.LogCaptureFixture) -> None:
    shared = conv()
    tied = conv()
    tied.weight = shared.weight
    model: Any = network(
        lambda m, x: m.n2(m.tied(m.n1(m.shared(m.shared(x))))),
        shared=shared, tied=tied, n1=nn.BatchNorm2d(4), n2=nn.BatchNorm2d(4),
    )  # fmt: skip
    compare(model, X, count=3)


def test_threads() -> None:
    models = [network(lambda m, x: m.b(m.a(x)), a=block(), b=conv()) for _ in range(2)]
    torch.compiler.reset()
    options: Any = {"backend": "maxconv", "options": {"inductor": False}}
    compiled_models = [torch.compile(model, **options) for model in models]
    with torch.no_grad():
        # Compiling in several threads is PyTorch's affair.
        expected = [compiled_model(X) for compiled_model in compiled_models]
    equal: list[bool] = []

    def work(place: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                equal.append(torch.equal(compiled_models[place](X), expected[place]))
                with torch.inference_mode():
                    cast(Any, models[place]).a[0].weight.mul_(1)

    threads = [threading.Thread(target=work, args=(place % 2,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(equal) == 80 and all(equal)


# Shapes, memory formats, types ------------------------------------------------------------------


@pytest.mark.parametrize(("dynamic", "expected"), [(True, 1), (None, 2)])
def test_dynamic_shapes(
    dynamic: bool | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = network(
        lambda m, x: torch.relu(m.c(m.b(m.a(x)) + x[:, :, ::2, ::2])) + m.d(m.a(x)),
        a=block(), b=conv(stride=2), c=conv(), d=conv(stride=2),
    )  # fmt: skip
    graphs = counted_graphs(monkeypatch)
    compiled_model = compiled(model, dynamic=dynamic)
    with torch.no_grad():
        for n, h, w in ((2, 9, 8), (3, 12, 11), (5, 31, 7), (4, 16, 16)):
            x = draw(n, 4, h, w)
            compiled_model(x)
            actual, calls = called(compiled_model, x)
            torch.testing.assert_close(actual, model(x), rtol=1e-4, atol=1e-5)
            assert convolutions(calls) == (5, 0)
    assert len(graphs) == expected


def test_marked_dimension() -> None:
    model = block()
    compiled_model = compiled(model)
    x = draw(2, 4, 9, 8)
    mark: Any = torch._dynamo.mark_dynamic
    mark(x, 0)
    mark(x, 3)
    with torch.no_grad():
        compiled_model(x)
        with torch.compiler.set_stance("fail_on_recompile"):
            for n, w in ((3, 8), (7, 21)):
                x = draw(n, 4, 9, w)
                torch.testing.assert_close(compiled_model(x), model(x), rtol=1e-4, atol=1e-5)


def test_empty_batch() -> None:
    compare(block(), X[:0], count=1)


def test_one_pixel_and_one_channel() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 1)).eval()
    for x in (draw(2, 1, 3, 3), draw(1, 1, 3, 9), last(draw(2, 1, 5, 3))):
        compare(model, x, count=2)


def test_memory_formats_of_model_and_views() -> None:
    outputs: Any = lambda m, x: (  # noqa: E731
        m.a(x), m.b(x)[:, ::2], m.b(x).view(2, -1), m.a(x).permute(0, 2, 3, 1),
    )  # fmt: skip
    model: Any = network(outputs, a=block(), b=conv())
    model.to(memory_format=torch.channels_last)
    # A channels-last weight makes PyTorch's outputs channels last.
    forward: Any = lambda m, x: (m.a(x), m.a(x)[0, 1])  # noqa: E731
    compare(network(forward, a=model.a), X, count=2)
    model.to(memory_format=torch.contiguous_format)
    compare(model, X, count=4)
    compare(model, X.transpose(2, 3), count=4)


def test_strides_are_kept_for_who_reads_them() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        z = torch.sigmoid(y)
        return [
            z.as_strided((2, 8), (288, 1), 3), m.b(z),
            torch.view_as_complex(z.view(2, 4, 9, 4, 2)).abs(), z.view(torch.int32) >> 2,
        ]  # fmt: skip

    model = network(forward, a=conv(), b=conv())
    compiled_model = compiled(model)
    with torch.no_grad():
        for mine, theirs in zip(compiled_model(X), model(X), strict=True):
            # Integers are a sigmoid's bits: the last ones are rounding.
            limit = 64 if mine.dtype == torch.int32 else 1e-6
            assert (mine - theirs).abs().max() <= limit and mine.stride() == theirs.stride()


def test_inputs_that_are_written_to() -> None:
    model: Any = network(lambda m, x: m.a(x.mul_(2)) + m.a(x.add_(1)), a=block())
    compiled_model = compiled(model)
    mine, theirs = X.clone(), X.clone()
    with torch.no_grad():
        torch.testing.assert_close(compiled_model(mine), model(theirs), rtol=1e-4, atol=1e-5)
    assert torch.equal(mine, theirs)

    class Decays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv()

        def forward(self, x: Tensor) -> Tensor:
            before = self.conv(x)
            self.conv.weight.mul_(0.5)
            return cast(Tensor, before + self.conv(x))

    decays = Decays().eval()
    copy = Decays().eval()
    copy.load_state_dict(decays.state_dict())
    compiled_model = compiled(decays)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled_model(X), copy(X), rtol=1e-4, atol=1e-5)
    assert torch.equal(decays.conv.weight, copy.conv.weight)


def test_autocast() -> None:
    model: Any = network(
        lambda m, x: torch.relu(m.b(m.bn(m.a(x))) + m.a(x)),
        a=conv(), bn=nn.BatchNorm2d(4), b=conv(),
    )  # fmt: skip
    compiled_model = compiled(model)
    with torch.no_grad():
        exact = model(X)
        with torch.autocast("cpu", torch.bfloat16):
            compiled_model(X)
            actual, calls = called(compiled_model, X)
            expected = model(X)
    assert actual.dtype == expected.dtype == torch.bfloat16
    assert convolutions(calls) == (3, 0)
    # The casted weights are kept; only the input is cast.
    assert calls["aten::_to_copy"] <= 2
    # As in ``compare``: PyTorch's own roundings say what the depth costs. A unit roundoff of
    # bfloat16 is 2^-8.
    error = (actual - exact).abs().max()
    assert error <= 4 * (expected - exact).abs().max() + 2**-8 * exact.abs().max()


def test_other_types_are_pytorchs(caplog: pytest.LogCaptureFixture) -> None:
    model = conv().double()
    text = reported(caplog, model, X.double())
    assert text.startswith("0 convolutions replaced, 1 modules left")
    assert (
        "input: dtype torch.float64 is not supported; torch.float32, torch.bfloat16, "
        "torch.float16, torch.int8, torch.uint8 are allowed"
    ) in text
    compiled_model = compiled(model)
    with torch.no_grad():
        assert torch.equal(compiled_model(X.double()), model(X.double()))
        # PyTorch computes one of complex numbers by three of real ones, which the graph shows.
        model = conv(dtype=torch.complex64)
        x = X.to(torch.complex64)
        actual, expected = compiled(model)(x), model(x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_graph_breaks() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = block(), block()

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return cast(Tensor, self.b(y if y.sum() > 0 else self.a(-x)))

    model = Branches().eval()
    compiled_model = compiled(model, fullgraph=False)
    with torch.no_grad():
        for x, count in ((X + 3, {2, 3}), (X - 3, {2, 3})):
            compiled_model(x)
            actual, calls = called(compiled_model, x)
            torch.testing.assert_close(actual, model(x), rtol=1e-4, atol=1e-5)
            assert calls["maxconv::conv_encoded"] in count and not calls["aten::convolution"]


def test_control_flow_operators() -> None:
    cond: Any = torch.cond
    model: Any = network(
        lambda m, x: cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 2, (m.a(x),)),
        a=block(),
    )
    compiled_model = compiled(model)
    with torch.no_grad():
        for x in (X, X - 3):
            torch.testing.assert_close(compiled_model(x), model(x), rtol=1e-4, atol=1e-5)
