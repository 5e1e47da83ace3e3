"""How the emulated tests share out problems and ways to run them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def bare_or_fused(problems: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrizes a test by ``index`` and ``fused``.

    Every run has each problem one way, the next problem the other way; extended runs have the rest.
    """
    cases = [
        pytest.param(
            index,
            fused,
            id=f"{'fused' if fused else 'bare'}-{problem}",
            marks=() if index % 2 == fused else pytest.mark.extended,
        )
        for fused in (False, True)
        for index, problem in enumerate(problems)
    ]
    return pytest.mark.parametrize(("index", "fused"), cases)
