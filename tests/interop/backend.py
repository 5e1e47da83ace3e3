"""Compiles with ``backend="maxconv"``, and compares with the model in float64."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

#: Leaves what is no convolution to PyTorch's own kernels: nothing is generated, and no compiler
#: runs.
PLAIN: Mapping[str, Any] = {"inductor": False}


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiles afresh; whatever is captured must be one graph."""
    torch.compiler.reset()
    options = {"options": dict(PLAIN), "fullgraph": True, **options}
    return torch.compile(function, backend="maxconv", **options)


def called(function: Callable[..., Any], *inputs: Any) -> tuple[Any, Counter[str]]:
    """Returns what a function returns, and how often it called each operator of PyTorch's."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = function(*inputs)
    return result, Counter({event.key: event.count for event in profiler.key_averages()})


def convolutions(calls: Counter[str]) -> tuple[int, int]:
    """Returns how many of maxconv's and of PyTorch's convolutions were called."""
    return calls["maxconv::conv_encoded"], calls["aten::convolution"]


def same_layout(left: Tensor, right: Tensor) -> bool:
    """Whether strides are equal where they matter: not where a size is one."""
    return left.shape == right.shape and all(
        a == b for a, b, size in zip(left.stride(), right.stride(), left.shape, strict=True)
        if size > 1
    )  # fmt: skip


def compare(
    model: nn.Module,
    *inputs: Tensor,
    count: int,
    transposed: int = 0,
    tolerance: float = 1e-6,
    **options: Any,
) -> Callable[..., Any]:
    """Compiles a model, and compares with it: values in float64, and dtypes, shapes and strides.

    PyTorch's own error, times 4, says what rounding in the depth of the network costs;
    ``tolerance`` is for networks in which PyTorch happens to round well.

    Args:
        model: In eval mode.
        inputs: What it is called with.
        count: How many of maxconv's convolutions must run.
        transposed: How many of its transposed ones must, beside those.
        tolerance: Of the largest output.
        options: Of ``torch.compile``.

    Returns:
        The compiled model.
    """
    exact_model = copy.deepcopy(model).double()
    network = compiled(model, **options)
    with torch.no_grad():
        exact = pytree.tree_leaves(exact_model(*(x.clone().double() for x in inputs)))
        own = pytree.tree_leaves(model(*(x.clone() for x in inputs)))
        network(*(x.clone() for x in inputs))
        result, calls = called(network, *(x.clone() for x in inputs))
    actual = pytree.tree_leaves(result)
    if transposed:
        assert calls["maxconv::conv_transpose"] == transposed
    else:
        assert calls["maxconv::conv_encoded"] == count
    assert not calls["aten::convolution"]
    assert len(actual) == len(own)
    for mine, theirs, right in zip(actual, own, exact, strict=True):
        assert mine.dtype == theirs.dtype and same_layout(mine, theirs)
        if right.numel() == 0:
            continue
        scale = right.abs().max()
        error = (mine.double() - right).abs().max() / scale
        assert error <= 4 * ((theirs.double() - right).abs().max() / scale) + tolerance
    return network


def reported(caplog: pytest.LogCaptureFixture, model: nn.Module, *inputs: Any) -> str:
    """Returns what the logger says of a compilation."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="maxconv.torch"), torch.no_grad():
        compiled(model)(*inputs)
    return "\n".join(caplog.messages)
