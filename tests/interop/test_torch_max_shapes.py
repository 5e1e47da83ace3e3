"""The convolutions of MAX's own tests, computed by this machine's CPU: one library takes all."""

from __future__ import annotations

import numpy as np
import pytest
from tests.interop.max_shapes import CASES, Case

torch = pytest.importorskip("torch", reason="needs PyTorch")

from maxconv._arguments import ConvArguments  # noqa: E402
from maxconv.torch import _op  # noqa: E402

pytestmark = pytest.mark.torch


LARGE = 300_000_000
"""Products, of which the float64 reference takes many seconds."""
CONVOLUTIONS = [
    pytest.param(case, marks=pytest.mark.extended) if case.products > LARGE else case
    for case in CASES
    if case.kind == "convolutions"
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: case.name)
def test_convolutions(case: Case) -> None:
    x, filter, bias = case.arrays["x"], case.arrays["filter"], case.arrays.get("bias")
    first = "channels_first" in case.entry
    if not first:
        x = np.moveaxis(x, -1, 1)
        if "filters_first" not in case.entry:
            filter = np.moveaxis(filter, (-1, -2), (0, 1))
    arguments = ConvArguments.read(
        case.rank,
        stride=case.per_axis("stride"),
        dilation=case.per_axis("dilation"),
        padding=case.padding,
        groups=case.entry.get("groups", 1),
    )
    result = _op.call(
        torch.from_numpy(x),
        torch.from_numpy(np.ascontiguousarray(filter)),
        None if bias is None else torch.from_numpy(bias),
        None,
        None,
        arguments,
        True,
        False,
    )
    found = result.numpy()
    case.check(found if first else np.moveaxis(found, 1, -1))
