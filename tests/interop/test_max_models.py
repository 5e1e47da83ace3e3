"""Models that MAX's wheel brings, their convolutions taken over."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.interop.graphs import Source, compile_together
from tests.interop.max_models import MODELS, RECORDED, build, inputs, weights

import maxconv

if TYPE_CHECKING:
    from max.engine import InferenceSession
    from max.graph import Graph, Module

#: Convolutions of each.
CALLS = {"qwen_image": 20, "flux2": 16, "whisper": 2, "wan": 19}


def taken_over(model: str, name: str, module: Module) -> Graph:
    with maxconv.override_max() as report:
        graph: Graph = build(model, name, module)
    assert len(report.taken) == CALLS[model], str(report)
    assert not report.left, str(report)
    return graph


SOURCES = {model: Source(partial(taken_over, model), partial(weights, model)) for model in MODELS}


@pytest.mark.extended
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_maxs_own(name: str, session: InferenceSession) -> None:
    """MAX's outputs were recorded: its convolutions take minutes to compile. Ours take a minute or
    two for each model."""
    model = compile_together(session, {f"max_{name}": SOURCES[name]})[f"max_{name}"]
    expected = np.load(RECORDED)[name]
    given: Any = inputs(name)
    actual = np.from_dlpack(model.execute(*given)[0])
    assert actual.shape == expected.shape
    # Some twenty layers, each of which rounds float32 in another order.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_graphs_of_all_are_taken_over_whole() -> None:
    from max.graph import Module

    for name in MODELS:
        taken_over(name, f"max_{name}", Module())
