"""Enlargements, poolings, few filters, and filters that are weights, in a graph on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.gpu.network import LAYERS, Floats, layer_weights, layers, rounded, to_device, to_float32
from tests.reference import conv_reference, pool_reference

if TYPE_CHECKING:
    from max.driver import Device
    from max.engine import InferenceSession

pytestmark = pytest.mark.gpu

DTYPE = "bfloat16"
Exact = npt.NDArray[np.float64]

X = np.random.default_rng(1).integers(-2, 3, (2, 9, 7, 32)).astype(np.float32)
RESIDUAL = np.random.default_rng(2).integers(-8, 9, (2, 18, 14, 64)).astype(np.float32)
POOLED = np.random.default_rng(3).integers(-8, 9, (2, 10, 12, 20)).astype(np.float32)
BIAS = np.arange(48) - 24.0


def conv(
    name: str, *, padding: tuple[int, ...] = (0, 0, 0, 0), upsample: tuple[int, ...] = (1, 1)
) -> Exact:
    """The convolution of the image with a filter of ``LAYERS``; the enlarged image is written."""
    x = X.repeat(upsample[0], 1).repeat(upsample[1], 2)
    return conv_reference(
        x, np.moveaxis(LAYERS[name], 1, -1), stride=(1, 1), dilation=(1, 1),
        pad_before=padding[0::2], pad_after=padding[1::2],
    )  # fmt: skip


def pool(window: int, stride: int, padding: int, *, average: bool) -> Exact:
    """The pooling; a mean counts no padding."""
    output = [(size + 2 * padding - window) // stride + 1 for size in POOLED.shape[1:3]]
    return pool_reference(
        POOLED, (window, window), stride=(stride, stride), dilation=(1, 1),
        pad_before=(padding, padding), pad_after=(padding, padding), output=output,
        average=average, count_boundary=False,
    )  # fmt: skip


def group_norm(x: Floats, groups: int, epsilon: float = 1e-5) -> Exact:
    """The normalization without weights."""
    grouped = x.astype(np.float64).reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    mean, variance = grouped.mean((1, 3), keepdims=True), grouped.var((1, 3), keepdims=True)
    normal: Exact = (grouped - mean) / np.sqrt(variance + epsilon)
    return normal.reshape(x.shape)


def rms_norm(x: Floats, epsilon: float = 1e-6) -> Exact:
    """The normalization without a weight."""
    wide = x.astype(np.float64)
    normal: Exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + epsilon)
    return normal


def expected() -> list[tuple[Exact, str]]:
    """Results, each with the type that it is stored in."""
    same, wide = (1, 1, 1, 1), "float32"

    def relu(values: Exact) -> Exact:
        return np.maximum(values, 0)

    few = conv("few", padding=same)
    # The mean of what was stored.
    stored = rounded(conv("w_many", padding=same), DTYPE).astype(np.float64)
    normal = group_norm(X, 8) * BIAS[:32] / 8 + BIAS[16:]
    by_pixel = rms_norm(X) * BIAS[:32] / 8
    return [
        (conv("u2", upsample=(2, 2), padding=same) + BIAS, DTYPE),
        (relu(conv("u2", upsample=(2, 2), padding=(2, 1, 0, 1))), wide),
        (conv("u2", upsample=(1, 3), padding=same), DTYPE),
        (2 * relu(conv("u4", upsample=(2, 2), padding=same) + RESIDUAL), DTYPE),
        (conv("few", upsample=(2, 2), padding=same) + BIAS[:3], DTYPE),
        (few + BIAS[:3], wide),
        (few, DTYPE),
        (conv("w_many", padding=same), DTYPE),
        (conv("w_few"), DTYPE),
        (pool(3, 2, 1, average=False), DTYPE),
        (relu(pool(2, 2, 0, average=True) - 1), DTYPE),
        # A cast behind is one of what the op would have stored.
        (pool(3, 1, 1, average=True), DTYPE),
        (POOLED.astype(np.float64).mean((1, 2), keepdims=True), DTYPE),
        (stored.mean((1, 2), keepdims=True), DTYPE),
        (normal / (1 + np.exp(-normal)), DTYPE),
        (group_norm(POOLED, 5, epsilon=0.5), DTYPE),
        (relu(group_norm(POOLED, 20) * BIAS[:20] + BIAS[:20]), DTYPE),
        (by_pixel / (1 + np.exp(-by_pixel)), DTYPE),
        (np.moveaxis(2 * rms_norm(POOLED, 0.5) * BIAS[:20], -1, 1), DTYPE),
    ]


def compare(number: int, result: Floats, wanted: Exact, dtype: str) -> None:
    """Sums of integers are exact, so that they are rounded once; a mean is divided as well."""
    nearest = rounded(wanted, dtype)
    assert result.shape == nearest.shape, number
    # What is computed in float32 may round to the other neighbour: one unit of the type. A
    # normalization's shift, and SiLU for 16 bits, have absolute errors: of 2^-20 of 24, 1.1e-5.
    relative, absolute = (2.0**-7, 4e-5) if number >= MEANS else (0.0, 0.0)
    wrong = np.abs(result - nearest) > relative * np.abs(nearest) + absolute
    assert not wrong.any(), f"output {number}: {wrong.sum()} of {wrong.size} are wrong"


#: The first output that is a mean.
MEANS = 10


def test_layers(gpu_session: InferenceSession, gpu: Device) -> None:
    model = gpu_session.load(layers(DTYPE), weights_registry=layer_weights(DTYPE))
    inputs: list[Any] = [to_device(value, DTYPE, gpu) for value in (X, RESIDUAL, POOLED)]
    for _ in range(2):
        results = [to_float32(result) for result in model.execute(*inputs)]
        for number, (result, (wanted, dtype)) in enumerate(zip(results, expected(), strict=True)):
            compare(number, result, wanted, dtype)
