"""The device of the GPU tests, which are skipped where there is none.

With ``MAXCONV_GPU_GRAPHS`` in the environment the graphs come from that folder, where
``tests/gpu/compile.py`` wrote them, and a graph that is not there is an error.
"""

from __future__ import annotations

import os
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
    if folder := os.environ.get("MAXCONV_GPU_GRAPHS"):
        from max.engine import InferenceSession
        from max.engine._precompiled_mefs import MefStore

        # The sessions of maxconv.torch are out of reach otherwise.
        InferenceSession.default_mef_store = MefStore.for_import(folder)
    return Accelerator()


@pytest.fixture(scope="session")
def gpu_session(gpu: Device) -> InferenceSession:
    """One MAX session on the GPU."""
    from max.engine import InferenceSession

    return InferenceSession(devices=[gpu])
