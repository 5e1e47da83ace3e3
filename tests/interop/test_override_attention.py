"""``override_max`` and attention over wide heads: what it computes, and what is taken over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.interop.graphs import Source
from tests.reference import attention_reference

import maxconv
from maxconv._fields import Op

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module

CHANNELS = 24


def build_attention(name: str, module: Module) -> Graph:
    """Returns a graph of any images and two heads, and of one image and one head."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType

    from maxconv._attention import attention

    cpu, kind = DeviceRef.CPU(), DType.float32
    types = [
        TensorType(kind, ["n", "queries", 2, CHANNELS], cpu),
        *[TensorType(kind, ["n", "keys", 2, CHANNELS], cpu)] * 2,
        *[TensorType(kind, [1, "tokens", 1, CHANNELS], cpu)] * 3,
    ]
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
        q, k, v, *one = (value.tensor for value in graph.inputs)
        graph.output(attention(q, k, v, 0.25), attention(one[0], one[1], one[2], 0.25))
    return graph


OVERRIDDEN = {"attention": Source(build_attention)}


@pytest.mark.parametrize("images", [1, 3])
def test_each_head_of_each_image(overridden: dict[str, Model], images: int) -> None:
    """Images, heads and keys differ, so that a wrong one is a wrong result."""
    random = np.random.default_rng(images)
    shapes = [(images, 7, 2), *[(images, 19, 2)] * 2, *[(1, 5 + images, 1)] * 3]
    given = [random.standard_normal((*shape, CHANNELS), np.float32) for shape in shapes]
    results = [result.to_numpy() for result in overridden["attention"].execute(*given)]
    for result, part in zip(results, (given[:3], given[3:]), strict=True):
        wanted = attention_reference(*part, scale=0.25)
        assert result.shape == wanted.shape
        # Means of values of order one, each a sum of at most 19 products in float32.
        np.testing.assert_allclose(result, wanted, rtol=0, atol=2e-6)


def gpu_graph(
    *, heads: int = 1, channels: int = 512, causal: bool = False, device: str = "gpu"
) -> tuple[Any, Any]:
    """The report and the graph of a call of ``flash_attention_gpu``."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType
    from max.nn.attention import MHAMaskVariant
    from max.nn.kernels import flash_attention_gpu

    ref = DeviceRef.GPU() if device == "gpu" else DeviceRef.CPU()
    tokens = TensorType(DType.bfloat16, ["n", "s", heads, channels], ref)
    mask = MHAMaskVariant.CAUSAL_MASK if causal else MHAMaskVariant.NULL_MASK
    with maxconv.override_max() as report, Graph("theirs", input_types=[tokens] * 3) as graph:
        q, k, v = (value.tensor for value in graph.inputs)
        result = flash_attention_gpu(q, k, v, mask_variant=mask, scale=0.5)
        assert result.type == tokens
        graph.output(result)
    return report, graph


def test_wide_heads_on_a_gpu_are_taken() -> None:
    report, graph = gpu_graph(heads=2)
    text = str(graph)
    assert [call.function for call in report.taken] == ["mo.mha.no_cache"]
    assert not report.left
    assert "nxsx2x512 bfloat16" in str(report)
    # Of each head the product that a softmax follows, and the one that is put beside the other's.
    assert text.count(f'symbol = "{Op.CONV_UNFUSED_GPU.value}"') == 2
    assert text.count(f'symbol = "{Op.CONV_GPU.value}"') == 2
    assert "mha" not in text


@pytest.mark.parametrize(
    "others", [{"channels": 256}, {"heads": 5}, {"device": "cpu"}], ids=lambda given: str(given)
)
def test_others_stay_maxs_and_are_not_mentioned(others: dict[str, Any]) -> None:
    report, graph = gpu_graph(**others)
    assert not report.taken and not report.left
    text = str(graph)
    assert "maxconv_" not in text and "mo.mha.no_cache" in text


def test_a_mask_is_left_and_reported() -> None:
    report, graph = gpu_graph(causal=True)
    (left,) = report.left
    assert left.reason.startswith("mask_str: 'causal' with a window of -1 is not allowed")
    assert not report.taken
    assert "maxconv_" not in str(graph)
