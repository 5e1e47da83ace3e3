"""Fixtures that several test modules share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from max.engine import InferenceSession


@pytest.fixture(scope="session")
def session() -> InferenceSession:
    """One MAX session on the CPU; starting one takes a while."""
    from max.driver import CPU
    from max.engine import InferenceSession

    return InferenceSession(devices=[CPU()])


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with the same numbers in every run."""
    return np.random.default_rng(20260727)
