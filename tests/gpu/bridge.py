"""The op and a graph with it through MAX's own bridge to PyTorch, on a GPU.

The tests on a GPU run both. Without a GPU ``compile.py`` compiles the graphs that the bridge makes
of a call with CUDA tensors: those of the same names and inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import torch
from max.dtype import DType
from max.experimental.torch import CustomOpLibrary, graph_op
from max.experimental.torch.torch import MaxOp, max_tensor_type
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import maxconv
import maxconv.torch as mt

BATCH, HEIGHT, WIDTH, CHANNELS, FILTERS = 2, 13, 11, 16, 24

#: Of the convolution, beside what it has: a bias and a residual.
ARGUMENTS: dict[str, Any] = {"stride": 1, "padding": 1, "activation": "relu", "beta": -1.0}

INPUT = (BATCH, CHANNELS, HEIGHT, WIDTH)
WEIGHT = (FILTERS, CHANNELS, 3, 3)


def operands() -> mt.ConvOperands:
    """Returns the operands of the convolution."""
    return mt.conv_operands(INPUT, WEIGHT, bias=True, residual=True, device="cuda", **ARGUMENTS)


def custom_op() -> Any:
    """Returns the op as an operator of PyTorch's."""
    library = CustomOpLibrary(maxconv.library_path())
    return library.maxconv_conv_gpu[operands().parameters]


def block() -> Any:
    """Returns an operator made of a graph: a convolution, and work that is fused behind it.

    Every size of the image is symbolic. It takes output, activation, filter, bias and residual.
    """
    gpu, kind = DeviceRef.GPU(), DType.bfloat16
    images = [TensorType(kind, ("n", "h", "w", size), gpu) for size in (CHANNELS, FILTERS)]

    def bridged_block(
        x: TensorValue, filter: TensorValue, bias: TensorValue, residual: TensorValue
    ) -> TensorValue:
        y = maxconv.conv2d(
            x, filter, padding=1, bias=bias, activation="relu", residual=residual,
            filter_layout="FCRS",
        )  # fmt: skip
        result: TensorValue = ops.relu(y - 1.0)
        return result

    return graph_op(
        bridged_block,
        kernel_library=maxconv.kernel_library(),
        input_types=[
            images[0],
            TensorType(kind, WEIGHT, gpu),
            TensorType(kind, [FILTERS], gpu),
            images[1],
        ],
        output_types=[images[1]],
    )


def _made(make: Callable[[], Any]) -> MaxOp:
    """Returns what the bridge makes of an op before PyTorch hears of it."""
    define = MaxOp.custom_op_def
    with mock.patch.object(MaxOp, "custom_op_def", autospec=True, side_effect=define) as defined:
        make()
    return cast(MaxOp, defined.call_args.args[0])


def custom_op_graph() -> Graph:
    """Returns the graph of a call of ``custom_op``."""
    conv, kind = operands(), torch.bfloat16

    def cuda(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=kind, device="cuda")

    with FakeTensorMode(allow_non_fake_inputs=True):
        output, *inputs = conv.arguments(
            cuda(*conv.output_shape),
            cuda(*conv.input_shape),
            cuda(*conv.filter_shape(kind)),
            cuda(FILTERS),
            cuda(*conv.output_shape),
        )
        types = [max_tensor_type(tensor) for tensor in inputs]
        return _made(custom_op).graph(types, [max_tensor_type(output)])


def block_graph() -> Graph:
    """Returns the graph of ``block``."""
    made = _made(block)
    assert made.input_types is not None and made.output_types is not None
    return made.graph(made.input_types, made.output_types)
