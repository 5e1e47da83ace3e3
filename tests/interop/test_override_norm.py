"""``override_max`` and normalizations: what is taken over is read from graphs; none is compiled.

What the ops compute is checked on a GPU (tests/gpu) and on the emulator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import maxconv
from maxconv._fields import Op


def on(device: str, *shape: int | str) -> Any:
    from max.dtype import DType
    from max.graph import DeviceRef, TensorType

    ref = DeviceRef.GPU() if device == "gpu" else DeviceRef.CPU()
    return TensorType(DType.bfloat16, shape, ref)


def ones(channels: int, like: Any) -> Any:
    from max.dtype import DType
    from max.graph import ops

    values = ops.constant(np.ones(channels, np.float32), DType.float32, like.device)
    return ops.cast(values, like.dtype)


def test_normalizations_of_images_on_a_gpu() -> None:
    """The channels of MAX's groups are the second dimension, and of its pixels the last."""
    from max.graph import Graph, ops

    image = on("gpu", "n", 32, "h", "w")
    with maxconv.override_max() as report, Graph("norms", input_types=[image]) as graph:
        x = graph.inputs[0].tensor
        weight = ones(32, x)
        y = ops.group_norm(x, weight, weight, 8, 1e-5)
        assert y.type == image
        z = ops.rms_norm(ops.permute(y, [0, 2, 3, 1]), weight, 1e-6, weight_offset=1.0)
        graph.output(z)
    text = str(graph)
    assert [call.function for call in report.taken] == ["group_norm", "rms_norm"]
    assert not report.left
    assert "nx32xhxw bfloat16" in str(report) and "32 bfloat16" in str(report)
    # A permutation is behind the first, and nothing behind the second.
    assert Op.GROUP_NORM_GPU.value in text and Op.RMS_NORM_UNFUSED_GPU.value in text
    assert "reduce.rms_norm" not in text and "reduce.group_norm" not in text


def test_others_stay_maxs_and_are_not_mentioned() -> None:
    """Those of tokens, and those on a CPU: their kernels are MAX's in any case."""
    from max.graph import Graph, ops

    types = [on("gpu", "tokens", 64), on("cpu", "n", 16, "h", "w")]
    with maxconv.override_max() as report, Graph("others", input_types=types) as graph:
        tokens, image = (value.tensor for value in graph.inputs)
        weight = ones(16, image)
        graph.output(
            ops.rms_norm(tokens, ones(64, tokens), 1e-6),
            ops.group_norm(image, weight, weight, 4, 1e-5),
        )
    assert not report.taken and not report.left
    text = str(graph)
    assert "maxconv_" not in text
    assert "reduce.rms_norm" in text and "reduce.group_norm" in text


def test_what_cannot_be_taken_is_reported() -> None:
    """A number of channels that is not known."""
    from max.graph import Graph, ops

    image = on("gpu", "n", "c", 8, 8)
    with maxconv.override_max() as report, Graph("unknown", input_types=[image]) as graph:
        x = graph.inputs[0].tensor
        weight = ones(16, x)
        y = ops.group_norm(x, weight, weight, 4, 1e-5)
        graph.output(y)
    (left,) = report.left
    assert left.reason == "input: c channels; a number that is known is allowed"
    assert y.type == image
