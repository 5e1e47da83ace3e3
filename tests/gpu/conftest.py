"""The device of the GPU tests, which are skipped where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from max.driver import Device
    from max.engine import InferenceSession


@pytest.fixture(scope="session")
def gpu() -> Device:
    """The first GPU that MAX finds."""
    from max.driver import Accelerator, accelerator_count

    if accelerator_count() == 0:
        pytest.skip("MAX finds no GPU on this machine")
    return Accelerator()


@pytest.fixture(scope="session")
def gpu_session(gpu: Device) -> InferenceSession:
    """One MAX session on the GPU."""
    from max.engine import InferenceSession

    return InferenceSession(devices=[gpu])
