"""What ``maxconv.torch``'s functions refuse, and what they say; what their op is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.interop.torch_tensors import draw
from torch._subclasses import FakeTensorMode

import maxconv.torch as mt
from maxconv import _native
from maxconv._fields import Precision
from maxconv.torch._arguments import read
from maxconv.torch._plan import rounding, torch_precision

pytestmark = pytest.mark.torch

X, W, B = draw(2, 6, 9, 8), draw(8, 3, 3, 3), draw(8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input": 3}, TypeError, r"input: a int is not a tensor"),
        ({"weight": None}, TypeError, r"weight: a NoneType is not a tensor"),
        (
            {"bias": [1.0] * 8},
            TypeError,
            r"bias: a list is not a tensor; a torch.Tensor or None is",
        ),
        (
            {"input": X[0, 0]},
            ValueError,
            r"input: shape \(9, 8\) has rank 2; conv2d takes rank 4: \[",
        ),
        (
            {"weight": W[0]},
            ValueError,
            r"weight: shape \(3, 3, 3\) has rank 3; conv2d takes rank 4",
        ),
        ({"input": X[:, :5]}, ValueError, r"input: 5 channels are not divisible by groups=2"),
        ({"weight": W[:7]}, ValueError, r"weight: 7 filters are not divisible by groups=2"),
        (
            {"input": draw(2, 9, 9, 8), "groups": 3},
            ValueError,
            r"weight: 8 filters are not divisible by groups=3",
        ),
        ({"groups": 1}, ValueError, r"weight: 3 channels a group do not match the input's 6"),
        ({"groups": 0}, ValueError, r"groups: 0 is not positive; it must be at least 1"),
        ({"groups": 2.0}, TypeError, r"groups: 2.0 holds a float; integers are allowed"),
        (
            {"stride": 0},
            ValueError,
            r"stride: \(0, 0\) has a non-positive entry; every stride must",
        ),
        ({"stride": (1, -1)}, ValueError, r"stride: \(1, -1\) has a non-positive entry"),
        ({"stride": (1, 1, 1)}, ValueError, r"stride: \(1, 1, 1\) has 3 entries; 2 are allowed"),
        ({"stride": 1.5}, TypeError, r"stride: 1.5 is a float; an integer or a tuple of 2"),
        (
            {"out_dtype": torch.int32},
            TypeError,
            r"out_dtype: torch.int32 is not supported; torch.flo",
        ),
        (
            {"out_dtype": torch.int8},
            ValueError,
            r"out_scale: None beside out_dtype=int8; a positive number is needed",
        ),
        (
            {"out_dtype": torch.uint8, "out_scale": float("nan")},
            ValueError,
            r"out_scale: nan is not allowed; positive numbers are",
        ),
        (
            {"zero_point": -3},
            ValueError,
            r"zero_point: -3 is not allowed beside float32; 0 to 0 are",
        ),
        (
            {"input": X.to(torch.uint8), "out_dtype": torch.float32},
            TypeError,
            r"weight: dtype torch.float32 does not match; the input's torch.int8 is allowed",
        ),
        (
            {"out_dtype": torch.float16, "residual": torch.zeros(2, 8, 7, 6)},
            TypeError,
            r"residual: dtype torch.float32 does not match; the output's torch.float16 is allowed",
        ),
        ({"scale": draw(7)}, ValueError, r"scale: 7 elements, but there are 8 filters"),
        ({"scale": B.double()}, TypeError, r"scale: dtype torch.float64 does not match; torch.flo"),
        ({"scale": "2"}, TypeError, r"scale: a str is not a tensor; a torch.Tensor or None is"),
        (
            {"input": X.to(torch.float8_e4m3fn)},
            TypeError,
            r"input: dtype torch.float8_e4m3fn is not supported; torch.float32, torch.bfloat16, to",
        ),
        ({"precision": "ieee"}, ValueError, r"precision: 'ieee' is not a precision of float32"),
        ({"precision": 32}, TypeError, r"precision: 32 is a int; one of tf32, float32 is allowed"),
        ({"stride": True}, TypeError, r"stride: True is a bool; an integer or a tuple of 2"),
        ({"dilation": [0, 1]}, ValueError, r"dilation: \(0, 1\) has a non-positive entry"),
        ({"padding": -1}, ValueError, r"padding: \(-1, -1\) has a negative entry; every padding"),
        (
            {"padding": "full"},
            ValueError,
            r"padding: 'full' is not a name of a padding; 'same', 'v",
        ),
        ({"padding": "same", "stride": 2}, ValueError, r"padding: 'same' with stride \(2, 2\)"),
        ({"padding": {}}, TypeError, r"padding: \{\} is a dict; an integer or a tuple of 2"),
        (
            {"dilation": (1, 4)},
            ValueError,
            r"weight: w extent 3 with dilation 4 spans 9 but the padded input has only 8; enlarge",
        ),
        ({"bias": B[:3]}, ValueError, r"bias: 3 elements, but there are 8 filters"),
        ({"bias": draw(8, 1)}, ValueError, r"bias: shape \(8, 1\) has rank 2; rank 1 is allowed"),
        (
            {"residual": draw(2, 8, 7, 7)},
            ValueError,
            r"residual: shape \(2, 8, 7, 7\) must equal the output's shape \(2, 8, 7, 6\)",
        ),
        (
            {"residual": draw(8, 7, 6)},
            ValueError,
            r"residual: shape \(8, 7, 6\) has rank 3; the out",
        ),
        (
            {"input": X.double()},
            TypeError,
            r"input: dtype torch.float64 is not supported; torch.flo",
        ),
        (
            {"input": X.to(torch.complex64)},
            TypeError,
            r"input: dtype torch.complex64 is not supported",
        ),
        ({"input": X.int()}, TypeError, r"input: dtype torch.int32 is not supported"),
        (
            {"weight": W.bfloat16()},
            TypeError,
            r"weight: dtype torch.bfloat16 does not match; the input's torch.float32 is allowed",
        ),
        (
            {"bias": B.half()},
            TypeError,
            r"bias: dtype torch.float16 does not match; the input's torch.float32 is allowed",
        ),
        (
            {"residual": draw(2, 8, 7, 6).half()},
            TypeError,
            r"residual: dtype torch.float16 does not",
        ),
        ({"activation": "swish"}, ValueError, r"activation: 'swish' is not an activation; relu, "),
        ({"final_activation": 3}, TypeError, r"final_activation: 3 is a int; relu, "),
        ({"activation": ("clamp", 1, 0)}, ValueError, r"activation: clamp\(1.0, 0.0\) is empty"),
        ({"beta": "1"}, TypeError, r"beta: '1' is a str; a number is allowed"),
        ({"input": X.to_sparse()}, ValueError, r"input: layout torch.sparse_coo is not supported"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(
    change: dict[str, Any],
    error: type[Exception],
    message: str,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_native, "_libraries", {})
    arguments: dict[str, Any] = {"input": X, "weight": W, "bias": B, "groups": 2} | change
    with pytest.raises(error, match=f"^{message}"):
        mt.conv2d(**arguments)
    assert not compiled


def test_precision_follows_pytorchs_setting() -> None:
    cudnn: Any = torch.backends.cudnn
    allowed = cudnn.allow_tf32
    try:
        cudnn.allow_tf32 = True
        assert torch_precision() == Precision.TF32
        cudnn.allow_tf32 = False
        assert torch_precision() == Precision.FLOAT32
        if hasattr(cudnn, "conv"):
            # Beside another setting of cudnn.rnn, which makes allow_tf32 raise.
            for setting, wanted in (("tf32", Precision.TF32), ("ieee", Precision.FLOAT32)):
                cudnn.conv.fp32_precision = setting
                assert torch_precision() == wanted
    finally:
        cudnn.allow_tf32 = allowed


def test_modules_keep_their_precision() -> None:
    module = mt.Conv2d(6, 8, 3, precision="float32")
    assert "precision=float32" in module.extra_repr()
    assert module._arguments(0, 1.0, None, 1).precision == Precision.FLOAT32
    assert mt.Conv2d.from_torch(torch.nn.Conv2d(6, 8, 3)).precision is None
    with pytest.raises(ValueError, match="precision: 'half' is not a precision of float32 product"):
        mt.Conv2d(6, 8, 3, precision="half")


def test_devices() -> None:
    with FakeTensorMode():
        x, w = torch.empty(1, 3, 8, 8, device="cuda"), torch.empty(4, 3, 3, 3, device="cuda")
        y = mt.conv2d(x, w)
        assert y.shape == (1, 4, 6, 6) and y.is_cuda
        host = torch.empty(4, 3, 3, 3)
        with pytest.raises(ValueError, match=r"^weight: device cpu is not the input's; cuda:0 is"):
            mt.conv2d(x, host)
        with pytest.raises(ValueError, match=r"^bias: device cuda:0 is not the input's; cpu is ne"):
            mt.conv2d(x.cpu(), host, torch.empty(4, device="cuda"))
        other = torch.empty(1, 3, 8, 8, device="xpu")
        with pytest.raises(ValueError, match=r"^input: device xpu:0 is not supported; cpu, cuda a"):
            mt.conv2d(other, w)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_pytorch_does_not_find(compiled: list[str]) -> None:
    words = "^device: cuda:1, but PyTorch finds 0 GPUs on this machine; the CPU and an NVIDIA GPU"
    with pytest.raises(ValueError, match=words):
        mt.prepare(device="cuda:1")
    with pytest.raises(ValueError, match=r"^device: device mps is not supported; cpu, cuda are"):
        mt.prepare(device="mps")
    assert not compiled


def test_shapes_without_data(compiled: list[str]) -> None:
    x, w = torch.empty(2, 6, 9, 8, device="meta"), torch.empty(8, 3, 3, 3, device="meta")
    y = mt.conv2d(x, w, None, 2, 1, groups=2)
    assert y.shape == (2, 8, 5, 4) and y.is_meta
    with pytest.raises(ValueError, match=r"^weight: h extent 3 with dilation 9 spans 19"):
        mt.conv2d(x, w, None, 2, 1, 9, groups=2)
    # The library that registers the operators, where no test before loaded it.
    assert all("libmaxconv_host" in name for name in compiled)


@pytest.mark.parametrize("asked", [None, "tf32", "float32"])
def test_a_cpus_kernels_learn_of_a_precision_that_is_asked_for(asked: str | None) -> None:
    """A tuned row does not have Winograd's kernel run where products are asked to be exact."""
    arguments = read(2, 1, 0, 1, 1, None, 1.0, None, asked, None)
    expected = Precision.TF32 if asked is None else Precision[asked.upper()]
    assert rounding(X, arguments.flatten()) == expected
    assert rounding(X.to(torch.bfloat16), arguments.flatten()) == Precision.TF32
