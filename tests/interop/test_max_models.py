"""Models that MAX's wheel brings, their convolutions taken over."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.interop.graphs import Source
from tests.interop.max_models import MODELS, RECORDED, build, inputs, weights

import maxconv

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module

#: Convolutions of each.
CALLS = {"qwen_image": 20, "flux2": 16, "whisper": 2, "wan": 19}


def taken_over(model: str, name: str, module: Module) -> Graph:
    with maxconv.override_max() as report:
        graph: Graph = build(model, name, module)
    assert len(report.taken) == CALLS[model], str(report)
    assert not report.left, str(report)
    return graph


GRAPHS = {
    f"max_{model}": Source(partial(taken_over, model), partial(weights, model)) for model in MODELS
}


@pytest.mark.parametrize("model", MODELS)
def test_outputs_are_those_of_maxs_own(model: str, models: dict[str, Model]) -> None:
    """MAX's were recorded: its convolutions take minutes to compile."""
    expected = np.load(RECORDED)[model]
    given: Any = inputs(model)
    actual = np.from_dlpack(models[f"max_{model}"].execute(*given)[0])
    assert actual.shape == expected.shape
    # Some twenty layers, each of which rounds float32 in another order.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
