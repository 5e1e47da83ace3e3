"""Attention over wide heads, which ``override_max`` computes as convolutions, on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.gpu.network import attention, rounded, to_device, to_float32
from tests.reference import attention_reference

if TYPE_CHECKING:
    from max.driver import Device
    from max.engine import InferenceSession

pytestmark = pytest.mark.gpu

DTYPE = "bfloat16"

#: Shapes of queries and keys: several images, one, and tokens that no tile divides.
SHAPES = [
    ((2, 40, 2, 264), (2, 136, 2, 264), (1, 256, 1, 512)),
    ((3, 8, 2, 264), (3, 72, 2, 264), (1, 77, 1, 512)),
    ((1, 300, 2, 264), (1, 1024, 2, 264), (1, 2048, 1, 512)),
]


def test_attention(gpu_session: InferenceSession, gpu: Device) -> None:
    """Executed twice, and replayed with other numbers than those that were captured."""
    model = gpu_session.load(attention(DTYPE))
    for key, (queries, keys, tokens) in enumerate(SHAPES):
        random = np.random.default_rng(key)
        given = [
            rounded(random.standard_normal(shape), DTYPE)
            for shape in (queries, keys, keys, tokens, tokens, tokens)
        ]
        inputs: list[Any] = [to_device(value, DTYPE, gpu) for value in given]
        for _ in range(2):
            compare(model.execute(*inputs), given)
        others = [to_device(np.zeros_like(value), DTYPE, gpu) for value in given]
        kept = model.capture(key, *others)
        for other, value in zip(others, inputs, strict=True):
            other.inplace_copy_from(value)
        model.replay(key, *others)
        gpu.synchronize()
        compare(kept, given)
        model.release_captured_graph(key)


def compare(results: Any, given: list[Any]) -> None:
    """Checks both results.

    A share is rounded to bfloat16, by up to 2^-9 of itself, before it is multiplied, and the mean
    is rounded once more. Values are of order one, and their shares' sum is one.
    """
    for number, result in enumerate(results):
        wanted = attention_reference(*given[3 * number : 3 * number + 3], scale=0.0625)
        np.testing.assert_allclose(to_float32(result), wanted, rtol=2.0**-7, atol=2.0**-7)
