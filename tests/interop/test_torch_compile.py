"""``maxconv.torch`` under torch.compile, and beside autograd."""

from __future__ import annotations

import dataclasses
import math
from enum import Enum
from typing import Any, cast

import pytest
import torch
from tests.interop.torch_tensors import check, draw, last
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import maxconv.torch as mt
from maxconv._arguments import ConvArguments
from maxconv.activations import leaky_relu
from maxconv.torch._rewrite import encode

pytestmark = pytest.mark.torch


def test_arguments_have_defaults_that_old_versions_of_dynamo_trace() -> None:
    # PyTorch up to 2.11 raises Unsupported where a traced constructor has another default.
    for field in dataclasses.fields(ConvArguments):
        if field.init and field.default is not dataclasses.MISSING:
            assert isinstance(field.default, int | float | str | Enum | None), field.name


def test_opcheck() -> None:
    x, w, b = draw(2, 6, 9, 8), draw(8, 3, 3, 3), draw(8)
    scalars = (1.0, 0.0, 0.0, 0.0, 0.0)
    arguments: tuple[Any, ...] = (
        (2, 1),
        (1, 1, 0, 0),
        (1, 2),
        2,
        (1, 0),
        scalars,
        1,
        None,
        (),
        (0, 0, 0),
        None,
    )
    for input, channels_last in ((x, False), (last(x), True), (x[:0], True)):
        torch.library.opcheck(
            torch.ops.maxconv.conv.default,
            (input, w, b, None, None, *arguments, channels_last, False),
        )
    # One pixel, one filter: strides that sizes of one leave open must not differ either.
    arguments = ((1, 1), (0, 0, 0, 0), (1, 1), 1, (0, 0), scalars, None, None, (), (0, 0, 0), None)
    for filters in (1, 3):
        for channels_last in (False, True):
            torch.library.opcheck(
                torch.ops.maxconv.conv.default,
                (x[:, :3, :3, :3], w[:filters], None, None, None, *arguments, channels_last, False),
            )


def test_encoded_arguments() -> None:
    x, w, b = last(draw(2, 6, 9, 8)), draw(8, 3, 3, 3), draw(8)

    def network(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = mt.conv2d(x, w, b, (2, 1), (1, 0), (1, 2), 2, activation=leaky_relu(0.1))
        z = mt.conv2d(x, w, None, 2, 1, 1, 2, precision="float32",
                      activation=("clamp", -math.inf, 1 / 3))  # fmt: skip
        v = mt.conv2d(x, w, b, groups=2, residual=x[:, :1, 2:, 2:].expand(-1, 8, -1, -1),
                      beta=0.1, final_activation="relu", scale=b)  # fmt: skip
        return y, z, v

    with torch.no_grad():
        traced = make_fx(network)(x, w, b)
        expected = traced(x, w, b)
        encode(traced.graph)
        traced.recompile()
        targets = [node.target for node in traced.graph.nodes if "maxconv" in str(node.target)]
        assert targets == [torch.ops.maxconv.conv_encoded.default] * 3
        for one, other in zip(traced(x, w, b), expected, strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride()
    for node in traced.graph.find_nodes(op="call_function", target=targets[0]):
        torch.library.opcheck(targets[0], (x, w, b, None, None, node.args[-1]))
        with pytest.raises(ValueError, match="input: 5 channels"):
            targets[0](x[:, :5], w, b, None, None, node.args[-1])


def test_arguments_that_a_graph_computes_are_not_encoded() -> None:
    graph = torch.fx.Graph()
    x, w, stride = (graph.placeholder(name) for name in ("x", "w", "stride"))
    scalars = (1.0, 0.0, 0.0, 0.0, 0.0)
    others = (
        (stride, 1),
        (0, 0),
        (1, 1),
        1,
        (0, 0),
        scalars,
        None,
        None,
        (),
        (0, 0, 0),
        None,
        False,
        False,
    )
    operator = torch.ops.maxconv.conv.default
    node = graph.call_function(operator, (x, w, None, None, None, *others))
    encode(graph)
    assert node.target is operator and node.args[5] == (stride, 1)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_compile_with_fullgraph(context: Any) -> None:
    torch.compiler.reset()
    x, w, b = last(draw(1, 6, 12, 10)), draw(8, 3, 3, 3), draw(8)
    residual = draw(1, 8, 6, 5)
    module = mt.Conv2d(8, 5, 1, activation=leaky_relu(0.2))

    def network(x: Tensor, residual: Tensor) -> Tensor:
        y = mt.conv2d(
            x, w, b, 2, padding=(1, 1), groups=2, activation=("clamp", -1.0, 1.0),
            residual=residual, beta=0.5, final_activation="relu",
        )  # fmt: skip
        return cast(Tensor, module(y)).movedim(1, -1)

    network_compiled = torch.compile(network, fullgraph=True)
    with context():
        expected = network(x, residual)
        actual = network_compiled(x, residual)
    assert torch.equal(actual, expected)
    assert actual.stride() == expected.stride()


def test_compile_with_dynamic_shapes(compiled: list[str]) -> None:
    torch.compiler.reset()
    mt.prepare()
    compiled.clear()
    module = mt.Conv2d(4, 6, 3, 2, padding=1)
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    network = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for n, h, w in ((2, 9, 8), (3, 12, 11), (5, 31, 7)):
            x = draw(n, 4, h, w)
            assert torch.equal(network(x), module(x))
    assert graphs == 1
    assert not compiled


def test_compiled_module_sees_new_weights() -> None:
    torch.compiler.reset()
    module = mt.Conv2d(3, 4, 3)
    network = torch.compile(module, fullgraph=True)
    x = draw(1, 3, 6, 6)
    with torch.no_grad():
        for seed in (1, 2):
            module.weight.copy_(draw(4, 3, 3, 3, seed=seed))
            check(2, network(x), x, module.weight, module.bias)


@pytest.mark.parametrize("name", ["input", "weight", "bias", "residual"])
def test_a_gradient_is_refused(name: str) -> None:
    tensors = {
        "input": draw(1, 4, 6, 6),
        "weight": draw(4, 4, 3, 3),
        "bias": draw(4),
        "residual": draw(1, 4, 4, 4),
    }
    expected = mt.conv2d(**cast(Any, tensors))
    tensors[name].requires_grad_()
    message = (
        rf"^{name}: requires grad, but maxconv computes no gradients .*no_grad.*inference_mode"
    )
    with pytest.raises(RuntimeError, match=message):
        mt.conv2d(**cast(Any, tensors))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(mt.conv2d(**cast(Any, tensors)), expected)
    detached = {key: tensor.detach() for key, tensor in tensors.items()}
    assert torch.equal(mt.conv2d(**cast(Any, detached)), expected)


def test_a_gradient_is_refused_under_compile() -> None:
    torch.compiler.reset()
    w = draw(4, 4, 3, 3).requires_grad_()
    network = torch.compile(mt.conv2d, fullgraph=True)
    with pytest.raises(Exception, match="weight: requires grad, but maxconv computes no gradients"):
        network(draw(1, 4, 6, 6), w)


def test_a_head_trains_on_a_frozen_backbone() -> None:
    backbone, head = mt.Conv2d(3, 4, 3), nn.Linear(4, 2)
    head(backbone(draw(2, 3, 6, 6)).mean((2, 3))).sum().backward()
    assert head.weight.grad is not None and head.weight.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match=r"^weight: requires grad"):
        backbone.requires_grad_()(draw(2, 3, 6, 6))
