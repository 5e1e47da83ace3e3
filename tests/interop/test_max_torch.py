"""The op through ``max.experimental.torch``, MAX's own bridge to PyTorch, against float64.

``CustomOpLibrary`` compiles a graph for every set of shapes and dtypes, so the tests change what
is a run-time value of the op, and keep the shapes.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from max.dtype import DType
from max.experimental.torch import CustomOpLibrary, graph_op
from max.graph import DeviceRef, TensorType, TensorValue, ops
from tests.interop.torch_tensors import check, close, draw, last
from torch import Tensor
from torch.nn import functional

import maxconv
import maxconv.torch as mt
from maxconv._fields import GEOMETRY_LENGTH, SCALARS_LENGTH, Layout, Op, encode_scalars
from maxconv._graph import op_name
from maxconv._library import kernel_library
from maxconv._problem import ConvProblem

pytestmark = pytest.mark.torch

CPU = DeviceRef.CPU()


@pytest.fixture(scope="module")
def library() -> CustomOpLibrary:
    return CustomOpLibrary(maxconv.library_path())


def channels_last(tensor: Tensor) -> Tensor:
    """``[N, *spatial, C]``, contiguous."""
    return tensor.movedim(1, -1).contiguous()


def test_every_op_is_an_operator_of_pytorch(library: CustomOpLibrary) -> None:
    for op in Op:
        # What could not be registered raises why.
        assert getattr(library, op.value).num_outputs == 1


# CustomOpLibrary --------------------------------------------------------------------------------

#: Convolutions of 2x8x9x9 with 16 filters whose tensors have the same shapes.
GEOMETRIES: list[dict[str, Any]] = [
    {"padding": 1},
    {"padding": "same", "dilation": (2, 1)},
    {"padding": (4, 2), "dilation": (4, 2)},
    {"padding": (5, 1), "stride": (2, 1)},
    {"padding": 1, "groups": 2},
    {"padding": 3, "dilation": 3, "groups": 2},
]

#: Activation, factor of the residual, final activation.
EPILOGUES: list[tuple[Any, float, Any]] = [
    (None, 1.0, None),
    ("relu", -0.5, "tanh"),
    ("silu", 1.0, ("leaky_relu", 0.25)),
    (("clamp", -0.5, 0.75), 2.0, "relu"),
]

FUNCTIONS: dict[Any, Any] = {
    None: lambda t: t,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "silu": functional.silu,
    ("leaky_relu", 0.25): lambda t: functional.leaky_relu(t, 0.25),
    ("clamp", -0.5, 0.75): lambda t: t.clamp(-0.5, 0.75),
}


def coordinates(*shape: int) -> Tensor:
    """Every element names its place: distinct integers, scaled to at most 1."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) - count // 2) / count


def test_a_graph_of_its_shapes_takes_every_geometry_and_epilogue(
    library: CustomOpLibrary, compiled: list[str]
) -> None:
    x_shape, y_shape = (2, 8, 9, 9), (2, 16, 9, 9)
    for number, geometry in enumerate(GEOMETRIES):
        groups = geometry.get("groups", 1)
        w_shape = (16, 8 // groups, 3, 3)
        for made in (functools.partial(draw, seed=number), coordinates):
            x, w, residual = last(made(*x_shape)), made(*w_shape), last(made(*y_shape))
            bias = made(16)
            exact = functional.conv2d(x.double(), w.double(), bias.double(), **geometry)
            size = functional.conv2d(
                x.double().abs(), w.double().abs(), bias.double().abs(), **geometry
            )
            for first, beta, final in EPILOGUES:
                conv = mt.conv_operands(
                    x.shape, w.shape, **geometry, bias=True, residual=True, activation=first,
                    beta=beta, final_activation=final,
                )  # fmt: skip
                y = torch.full(conv.output_shape, float("nan"))
                library.maxconv_conv_cpu(
                    *conv.arguments(
                        y,
                        x.permute(0, 2, 3, 1),
                        mt.pack_filter(w, groups),
                        bias,
                        residual.permute(0, 2, 3, 1),
                    )
                )
                expected = FUNCTIONS[final](FUNCTIONS[first](exact) + beta * residual.double())
                # The slopes of these activations are at most 1.1.
                magnitude = 1.1 * (size + abs(beta) * residual.abs())
                close(y.permute(0, 3, 1, 2), expected, magnitude, w[0].numel() + 2)
    assert compiled == ["maxconv_conv_cpu"]

    # Under torch.compile: the operator stands in its graph, and nothing new is compiled.
    conv = mt.conv_operands(x_shape, w_shape, **geometry, bias=True, residual=True)
    packed = mt.pack_filter(w, groups)

    def network(x: Tensor, residual: Tensor) -> Tensor:
        y = x.new_empty(conv.output_shape)
        library.maxconv_conv_cpu(*conv.arguments(y, x, packed, bias, residual))
        return y * 2

    torch.compiler.reset()
    fast = torch.compile(network, fullgraph=True, backend="aot_eager")
    operands = x.permute(0, 2, 3, 1), residual.permute(0, 2, 3, 1)
    assert torch.equal(fast(*operands), network(*operands))
    assert compiled == ["maxconv_conv_cpu"]


@pytest.mark.extended
def test_what_is_not_there_and_what_the_op_is_compiled_for(library: CustomOpLibrary) -> None:
    kind = torch.bfloat16
    x, w, scale = draw(2, 8, 21, dtype=kind), draw(12, 4, 5, dtype=kind), draw(12)
    conv = mt.conv_operands(x.shape, w.shape, stride=2, padding=2, groups=2, scale=True)
    assert conv.parameters == {
        "kernel": 0, "exact": False, "groups": 2, "taps": 5, "stride": 2, "channels": 4,
        "filters": 6, "scaled": True,
    }  # fmt: skip
    y = torch.full(conv.output_shape, float("nan"), dtype=kind)
    op = library.maxconv_conv_cpu[conv.parameters]
    op(*conv.arguments(y, channels_last(x), mt.pack_filter(w, 2), scale=scale))
    exact = functional.conv1d(
        x.double(), w.double() * scale.double()[:, None, None], None, 2, 2, 1, 2
    )
    size = functional.conv1d(
        x.double().abs(), w.double().abs() * scale.double().abs()[:, None, None], None, 2, 2, 1, 2
    )
    close(y.movedim(-1, 1), exact, size, w[0].numel() + 1)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_shapes_are_those_of_torch(rank: int) -> None:
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    x, w = draw(2, 6, *(11, 9, 8)[:rank]), draw(10, 3, *(3, 5, 3)[:rank])
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        for arguments in ({}, {"stride": 2, "padding": 1}, {"padding": "same"}, {"dilation": 2}):
            conv = mt.conv_operands(x.shape, w.shape, groups=2, **arguments)
            expected = convolve(x, w, None, groups=2, **arguments)
            assert conv.output_shape == channels_last(expected).shape
            assert conv.input_shape == channels_last(x).shape
            packed = mt.pack_filter(w.to(kind), 2)
            assert (packed.dtype, packed.shape) == (kind, conv.filter_shape(kind))
            on_gpu = mt.conv_operands(x.shape, w.shape, groups=2, device="cuda")
            assert on_gpu.filter_shape(kind) == (w.numel(),)


# graph_op ---------------------------------------------------------------------------------------


@pytest.mark.extended
def test_graph_op_takes_the_graph_functions(compiled: list[str]) -> None:
    w = draw(16, 8, 3, 3)
    filter = maxconv.pack_filter(w, "FCRS")

    def block(x: TensorValue, bias: TensorValue, residual: TensorValue) -> TensorValue:
        y = maxconv.conv2d(x, filter, padding=1, bias=bias, activation="relu", residual=residual)
        result: TensorValue = ops.tanh(y * 0.5)
        return result

    size = ("n", "h", "w")
    images = [TensorType(DType.float32, (*size, channels), CPU) for channels in (8, 16)]
    op = graph_op(
        block,
        kernel_library=maxconv.kernel_library(),
        input_types=[images[0], TensorType(DType.float32, [16], CPU), images[1]],
        output_types=[images[1]],
    )
    for seed, (n, h, width) in enumerate(((1, 6, 9), (3, 11, 4))):
        x, b, residual = draw(n, 8, h, width, seed=seed), draw(16, seed=seed), draw(n, 16, h, width)
        y = torch.full((n, h, width, 16), float("nan"))
        op(y, channels_last(x), b, channels_last(residual))
        exact = functional.conv2d(x.double(), w.double(), b.double(), padding=1)
        size_of = functional.conv2d(x.double().abs(), w.double().abs(), b.double().abs(), padding=1)
        expected = ((exact.relu() + residual.double()) / 2).tanh()
        close(y.permute(0, 3, 1, 2), expected, size_of + residual.abs(), w[0].numel() + 2)
    assert compiled == ["block"]


@pytest.mark.extended
def test_the_op_works_through_graph_op() -> None:
    output = TensorType(DType.float32, ("n", "p", "q", "k"), CPU)

    def convolve(
        x: TensorValue,
        filter: TensorValue,
        scale: TensorValue,
        geometry: TensorValue,
        scalars: TensorValue,
    ) -> TensorValue:
        none = ops.constant([], DType.float32, CPU)
        residual = ops.reshape(none, (0, 0, 0, 0))
        operands = [x, filter, none, residual, scale, geometry, scalars]
        return ops.custom(op_name(CPU), CPU, operands, [output])[0].tensor

    op = graph_op(
        convolve,
        kernel_library=kernel_library(),
        input_types=[
            TensorType(DType.float32, ("n", "h", "w", "c"), CPU),
            TensorType(DType.float32, ("f",), CPU),
            TensorType(DType.float32, ("s",), CPU),
            TensorType(DType.int64, (GEOMETRY_LENGTH,), CPU),
            TensorType(DType.float32, (SCALARS_LENGTH,), CPU),
        ],
        output_types=[output],
    )
    for n, h, c, k in ((1, 6, 3, 4), (2, 9, 5, 3)):
        x, w = last(draw(n, c, h, h)), draw(k, c, 3, 3)
        problem = ConvProblem.from_arguments((n, h, h, c), w.shape, filter_layout="FCRS", padding=1)
        y = torch.empty(n, h, h, k)
        fields = (problem.geometry(filter_layout=Layout.FCRS), encode_scalars())
        host = [torch.from_numpy(values) for values in fields]
        op(y, x.movedim(1, -1), w.flatten(), torch.empty(0), *host)
        check(2, y.movedim(-1, 1), x, w, None, 1, 1)
    # The op's parameter says that there is no scale.
    words = "scale: 3 elements, but the op is compiled without a scale; none are allowed"
    with pytest.raises(ValueError, match=words):
        op(y, x.movedim(1, -1), w.flatten(), torch.ones(3), *host)


# Errors -----------------------------------------------------------------------------------------

X, W = (2, 8, 9, 9), (16, 8, 3, 3)

#: Shapes of input and weight, other arguments, and how the message begins.
WRONG: list[tuple[tuple[Any, Any], dict[str, Any], str]] = [
    ((X, (16, 8)), {}, "weight: shape (16, 8) has rank 2; 3, 4 or 5 is allowed"),
    ((X[1:], W), {}, "input: shape (8, 9, 9) has rank 3; with a weight of rank 4 the same"),
    ((X, (16, 5, 3, 3)), {}, "weight: 5 channels a group do not match the input's 8 channels"),
    ((X, W), {"groups": 3}, "input: 8 channels are not divisible by groups=3"),
    ((X, W), {"stride": (1, 0)}, "stride: (1, 0) has a non-positive entry; every stride must"),
    ((X, W), {"padding": "full"}, "padding: 'full' is not a name of a padding; 'same', 'valid'"),
    ((X, W), {"dilation": 5}, "weight: h extent 3 with dilation 5 spans 11 but the padded input"),
    ((X, W), {"activation": "relu7"}, "activation: 'relu7' is not"),
    ((X, W), {"precision": "half"}, "precision: 'half' is not a precision of float32 products"),
    ((X, W), {"bias": torch.zeros(16)}, "bias: a Tensor is given; True or False is allowed"),
    ((X, W), {"device": "meta"}, "device: device meta is not supported; cpu, cuda are allowed"),
]


@pytest.mark.parametrize(("shapes", "arguments", "words"), WRONG)
def test_what_no_convolution_has(shapes: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        mt.conv_operands(*shapes, **arguments)
    assert str(raised.value).startswith(words)


Y = torch.zeros(2, 9, 9, 16)

#: Tensors that do not go with operands for ``X`` and ``W`` with a bias, and the message.
STRANGE: list[tuple[dict[str, Any], str]] = [
    (
        {"output": torch.zeros(2, 16, 9, 9)},
        "output: shape (2, 16, 9, 9) is not what the operands were made for; (2, 9, 9, 16) is "
        "needed: [N, *spatial, K]",
    ),
    ({"output": Y.int()}, "output: dtype torch.int32 is not supported; torch.float32, "),
    ({"output": Y.to("meta")}, "output: device meta is not the input's; cpu is needed"),
    ({"input": torch.zeros(X)}, "input: shape (2, 8, 9, 9) is not what the operands were made for"),
    (
        {"input": torch.zeros(X).permute(0, 2, 3, 1)},
        "input: strides (648, 9, 1, 81) of a tensor that is not contiguous; those of "
        "tensor.contiguous() are needed",
    ),
    ({"input": torch.zeros(2, 9, 9, 8).double()}, "input: dtype torch.float64 is not supported"),
    ({"weight": torch.zeros(W)}, "weight: shape (16, 8, 3, 3) is not what the operands were made"),
    ({"weight": torch.zeros(1152).half()}, "weight: dtype torch.float16 does not match"),
    ({"bias": None}, "bias: None, but conv_operands was told bias=True"),
    ({"bias": torch.zeros(15)}, "bias: shape (15,) is not what the operands were made for; (16,)"),
    ({"residual": Y}, "residual: a tensor, but conv_operands was told residual=False"),
    ({"scale": torch.zeros(16)}, "scale: a tensor, but conv_operands was told scale=False"),
    ({"bias": torch.zeros(16).requires_grad_()}, "bias: requires grad, but maxconv computes no"),
]


@pytest.mark.parametrize(("tensors", "words"), STRANGE, ids=[words[:24] for _, words in STRANGE])
def test_tensors_of_another_convolution(tensors: dict[str, Any], words: str) -> None:
    conv = mt.conv_operands(X, W, padding=1, bias=True)
    right = {
        "output": Y,
        "input": torch.zeros(2, 9, 9, 8),
        "weight": torch.zeros(1152),
        "bias": torch.zeros(16),
    }
    assert [tuple(t.shape) for t in conv.arguments(**right)[4:6]] == [(0, 0, 0, 0), (0,)]
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        conv.arguments(**(right | tensors))
    assert str(raised.value).startswith(words)


def test_a_residual_of_another_shape() -> None:
    conv = mt.conv_operands(X, W, padding=1, residual=True)
    operands = Y, torch.zeros(2, 9, 9, 8), torch.zeros(1152), None
    with pytest.raises(
        ValueError, match=r"^residual: shape \(2, 16, 9, 9\) is not what the operan"
    ):
        conv.arguments(*operands, torch.zeros(2, 16, 9, 9))


def test_operands_for_another_device() -> None:
    conv = mt.conv_operands(X, W, padding=1, device="cuda")
    with pytest.raises(ValueError, match=r"^input: device cpu is not the convolution's; cuda is"):
        conv.arguments(Y, torch.zeros(2, 9, 9, 8), torch.zeros(1152))


def test_a_weight_that_cannot_be_packed() -> None:
    with pytest.raises(TypeError, match=r"^weight: dtype torch.float64 is not supported; torch"):
        mt.pack_filter(torch.zeros(W).double())
    with pytest.raises(ValueError, match=r"^weight: shape \(16, 8\) has rank 2; 3, 4 or 5 is"):
        mt.pack_filter(torch.zeros(16, 8))
    with pytest.raises(ValueError, match=r"^weight: 16 filters are not divisible by groups=3"):
        mt.pack_filter(torch.zeros(W), 3)
