"""Modules of ``maxconv.nn``: layouts, checkpoints, and compiled models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.reference import conv_reference, conv_transpose_reference

import maxconv

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from max.engine import InferenceSession

Array = npt.NDArray[Any]


def shapes(module: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(int(d) for d in value.shape) for name, value in module.parameters}


def test_parameters_are_laid_out_as_maxs_and_as_torchs() -> None:
    from max.driver import CPU
    from max.dtype import DType
    from max.experimental import functional as F
    from max.experimental import nn as theirs

    from maxconv import nn as ours

    common: dict[str, Any] = {"dtype": DType.float32, "device": CPU(), "has_bias": True}
    for permute in (False, True):
        a = ours.Conv2d((3, 2), 8, 12, num_groups=4, permute=permute, **common)
        # MAX would compile a graph to draw each parameter.
        with F.lazy():
            b = theirs.Conv2d((3, 2), 8, 12, num_groups=4, permute=permute, **common)
        assert shapes(a) == shapes(b)
        for name in ("kernel_size", "stride", "dilation", "in_channels", "out_channels"):
            assert getattr(a, name) == getattr(b, name)
    torch = pytest.importorskip("torch")
    for module, equivalent in (
        (ours.Conv1d(5, 6, 9, permute=True, **common), torch.nn.Conv1d(6, 9, 5)),
        (ours.Conv3d((1, 2, 3), 6, 9, permute=True, **common), torch.nn.Conv3d(6, 9, (1, 2, 3))),
        (
            ours.ConvTranspose2d(3, 8, 6, num_groups=2, permute=True, **common),
            torch.nn.ConvTranspose2d(8, 6, 3, groups=2),
        ),
        (ours.Conv2d(3, 6, 9, filter_layout="FCRS", **common), torch.nn.Conv2d(6, 9, 3)),
    ):
        state = {name: value.detach() for name, value in equivalent.state_dict().items()}
        assert shapes(module) == {name: tuple(value.shape) for name, value in state.items()}
        module.load_state_dict(state)
    assert shapes(ours.Conv1d(5, 6, 9, **common))["weight"] == (5, 6, 9)
    assert shapes(ours.Conv3d((1, 2, 3), 6, 9, **common))["weight"] == (1, 2, 3, 6, 9)
    assert shapes(ours.ConvTranspose2d(3, 8, 6, **common))["weight"] == (3, 3, 6, 8)


def test_new_parameters_are_drawn() -> None:
    from max.dtype import DType

    from maxconv.nn import Conv2d

    for dtype in (DType.float32, DType.bfloat16, DType.float16):
        module = Conv2d(3, 16, 32, dtype=dtype, has_bias=True)
        assert {value.dtype for _, value in module.parameters} == {dtype}
    weight = Conv2d(3, 16, 32, dtype=DType.float32).weight.to_numpy()
    assert 0.9 / 12 < np.abs(weight).max() <= 1 / 12
    with pytest.raises(ValueError, match=r"^dtype: dtype int8 is not supported; float32, bfloat16"):
        Conv2d(3, 16, 32, dtype=DType.int8)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"kernel_size": 0}, ValueError, r"kernel_size: \(0, 0\) has a non-positive entry"),
        ({"kernel_size": (3, 3, 3)}, ValueError, r"kernel_size: \(3, 3, 3\) has 3 entries; 2 are"),
        ({"in_channels": 0}, ValueError, "in_channels: 0 is not positive; it must be at least 1"),
        ({"out_channels": 1.0}, TypeError, r"out_channels: 1\.0 holds a float; integers are allow"),
        ({"num_groups": 4}, ValueError, "in_channels: 6 is not divisible by num_groups=4"),
        ({"num_groups": 3}, ValueError, "out_channels: 8 is not divisible by num_groups=3"),
        ({"num_groups": 0}, ValueError, "num_groups: 0 is not positive; it must be at least 1"),
        ({"stride": -1}, ValueError, r"stride: \(-1, -1\) has a non-positive entry"),
        ({"padding": (1, 2, 3)}, ValueError, r"padding: \(1, 2, 3\) has 3 entries; 4 are allowed"),
        ({"padding": (-1, 0)}, ValueError, r"padding: \(-1, -1, 0, 0\) has a negative entry"),
        ({"padding": "same", "stride": 2}, ValueError, r"padding: 'same' with stride \(2, 2\)"),
        ({"filter_layout": "QRSCF"}, ValueError, "filter_layout: 'QRSCF' .* KRSC, RSCF, FCRS are"),
        ({"activation": "swish"}, ValueError, "activation: 'swish' is not an activation; relu"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    from maxconv.nn import Conv2d

    arguments = {"kernel_size": 3, "in_channels": 6, "out_channels": 8} | changes
    with pytest.raises(error, match=f"^{words}"):
        Conv2d(**arguments)


def test_compiled_models(session: InferenceSession) -> None:
    from max.driver import CPU
    from max.dtype import DType
    from max.experimental.nn import Module
    from max.experimental.tensor import Tensor
    from max.graph import TensorType

    from maxconv.nn import Conv1d, Conv2d, Conv3d, ConvTranspose2d

    common: dict[str, Any] = {"dtype": DType.float32, "device": CPU()}

    class Network(Module[..., tuple[Tensor, ...]]):
        """PyTorch's layouts outside, a residual, and a branch of every other kind."""

        def __init__(self) -> None:
            self.first = Conv2d(
                3, 4, 6, padding=1, has_bias=True, permute=True, activation="relu", **common
            )
            self.up = ConvTranspose2d(2, 6, 3, stride=2, permute=True, has_bias=True, **common)
            self.skip = Conv2d(
                1, 4, 4, filter_layout="FCRS", final_activation="relu", beta=0.5, **common
            )
            self.signal = Conv1d(3, 4, 5, padding=(2, 0), **common)
            self.volume = Conv3d((1, 2, 2), 4, 2, stride=(1, 2, 1), num_groups=2, **common)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            last = x.permute([0, 2, 3, 1])
            return (
                self.up(self.first(x)),
                self.skip(last, residual=last),
                self.signal(last.reshape((last.shape[0], -1, 4))),
                self.volume(last.unsqueeze(1)),
            )

    rng = np.random.default_rng(9)
    network = Network()
    state = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes(network).items()
    }
    network.load_state_dict(state)
    # No custom_extensions: the modules bring their kernels along.
    run = network.compile(
        TensorType(DType.float32, ["n", 4, "h", "w"], network.device), session=session
    )
    for size in ((2, 4, 5, 6), (1, 4, 7, 3)):
        x = rng.standard_normal(size).astype(np.float32)
        outputs = [output.to_numpy() for output in run(Tensor.from_dlpack(x))]
        last = np.moveaxis(x, 1, -1)
        one: dict[str, Any] = {"stride": (1, 1), "dilation": (1, 1)}
        none: dict[str, Any] = {"pad_before": (0, 0), "pad_after": (0, 0)}
        first = conv_reference(
            last, np.moveaxis(state["first.weight"], 1, -1), **one, pad_before=(1, 1),
            pad_after=(1, 1), bias=state["first.bias"], activation=lambda v: np.maximum(v, 0),
        )  # fmt: skip
        up = conv_transpose_reference(
            first, np.moveaxis(state["up.weight"], 1, -1), stride=(2, 2), dilation=(1, 1), **none,
            output_padding=(0, 0), bias=state["up.bias"],
        )  # fmt: skip
        skip = conv_reference(
            last, np.moveaxis(state["skip.weight"], 1, -1), **one, **none, residual=last, beta=0.5,
            final_activation=lambda v: np.maximum(v, 0),
        )  # fmt: skip
        signal = conv_reference(
            last.reshape(size[0], -1, 4), np.moveaxis(state["signal.weight"], -1, 0), stride=(1,),
            dilation=(1,), pad_before=(2,), pad_after=(0,),
        )  # fmt: skip
        volume = conv_reference(
            last[:, None], np.moveaxis(state["volume.weight"], -1, 0), stride=(1, 2, 1),
            dilation=(1, 1, 1), pad_before=(0, 0, 0), pad_after=(0, 0, 0), groups=2,
        )  # fmt: skip
        # At most 36 products a sum, and 24 of such sums.
        bound = 60 * 16 * math.sqrt(60) * 2.0**-24
        for actual, expected in zip(
            outputs, (np.moveaxis(up, -1, 1), skip, signal, volume), strict=True
        ):
            assert actual.shape == expected.shape
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=bound)


@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(maxconv.library_path, id="precompiled"),
        # MAX takes ten seconds to compile them.
        pytest.param(lambda: maxconv.OPERATIONS, id="source", marks=pytest.mark.extended),
    ],
)
def test_subgraphs_ask_for_the_kernels(kernels: Callable[[], Path]) -> None:
    from max.driver import CPU
    from max.dtype import DType
    from max.experimental.nn import Module, as_subgraph
    from max.experimental.tensor import Tensor
    from max.graph import TensorType

    from maxconv.nn import Conv2d

    class Network(Module[[Tensor], Tensor]):
        def __init__(self) -> None:
            self.inner = Conv2d(3, 4, 4, dtype=DType.float32, device=CPU())

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = as_subgraph(self.inner)(x)
            return result

    x = TensorType(DType.float32, ["n", "h", "w", 4], CPU())
    with pytest.raises(ValueError, match=r"custom_extensions=\[maxconv\.library_path\(\)\]"):
        Network().trace(x)
    assert "maxconv_conv_unfused_cpu" in str(Network().trace(x, custom_extensions=[kernels()]))
