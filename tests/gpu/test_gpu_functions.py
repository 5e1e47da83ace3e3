"""The graph functions on a GPU: ranks, layouts of known and unknown filters, fused inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.gpu.network import FILTERS, functions, to_device, to_float32
from tests.reference import conv_reference, conv_transpose_reference

if TYPE_CHECKING:
    from max.driver import Device
    from max.engine import InferenceSession

pytestmark = pytest.mark.gpu

Floats = npt.NDArray[np.float32]

DTYPE = "float32"


def integers(*shape: int) -> Floats:
    generator = np.random.default_rng(sum(shape))
    return generator.integers(-2, 3, shape).astype(np.float32)


def krsc(values: Floats) -> Floats:
    return np.moveaxis(values, -1, 0)


X1, X2, X3 = integers(3, 17, 8), integers(2, 9, 7, 8), integers(1, 4, 5, 6, 8)
RESIDUAL = integers(2, 9, 7, 24)
RSCF = FILTERS["w2"] + 1
FCRS = np.moveaxis(krsc(RSCF), -1, 1)


def conv(x: Floats, w: Floats, padding: int, **epilogue: Any) -> npt.NDArray[np.float64]:
    """The convolution with a filter ``[*taps, C, K]``."""
    rank = w.ndim - 2
    return conv_reference(
        x,
        krsc(w),
        stride=(1,) * rank,
        dilation=(1,) * rank,
        pad_before=(padding,) * rank,
        pad_after=(padding,) * rank,
        **epilogue,
    )


def expected() -> list[npt.NDArray[np.float64]]:
    epilogue: dict[str, Any] = {
        "bias": np.arange(24) - 12,
        "activation": lambda v: np.maximum(v, 0),
        "residual": RESIDUAL,
        "beta": 0.5,
    }
    whole = conv(X2, FILTERS["w2"], 1, **epilogue)
    given = conv(X2, RSCF, 1, **epilogue)
    turned = np.moveaxis(FILTERS["w2"], 2, 3)
    return [
        conv(X1, FILTERS["w1"], 2),
        whole,
        whole,
        given,
        given,
        conv(np.maximum(X2, 0) * 2, FILTERS["p2"], 0),
        conv(X3, FILTERS["w3"], 1),
        conv_transpose_reference(
            X2,
            krsc(turned),
            stride=(2, 2),
            dilation=(1, 1),
            pad_before=(1, 1),
            pad_after=(1, 1),
            output_padding=(0, 0),
        ),
    ]


def test_functions(gpu_session: InferenceSession, gpu: Device) -> None:
    model = gpu_session.load(functions(DTYPE))
    inputs = [to_device(value, DTYPE, gpu) for value in (X1, X2, X3, RESIDUAL, RSCF, FCRS)]
    results = [to_float32(result) for result in model.execute(*inputs)]
    for index, (result, wanted) in enumerate(zip(results, expected(), strict=True)):
        np.testing.assert_array_equal(result, wanted.astype(np.float32), err_msg=str(index))
