"""Kernels of one input and one output of the same type, on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.emulated.convolution import Array, bfloat16, floats

from ptxemu import Machine

__all__ = ["run_kernel"]


def run_kernel(
    ptx: str, dtype: str, input: Array, output: tuple[int, ...], geometry: bytes, *, seed: int,
    **launch: Any,
) -> Array:  # fmt: skip
    """Runs a kernel on an output that nobody has written; returns the output.

    Args:
        ptx: The kernel.
        dtype: Of input and output: float32 or bfloat16.
        input: The input.
        output: The output's shape.
        geometry: The kernel's last argument.
        seed: Of the machine.
        launch: What else the launch takes: grid, block and so on.
    """
    machine = Machine("sm_90a", sms=16, seed=seed)
    whole = dtype == "float32"
    empty = np.zeros(output, np.float32)
    written = machine.alloc(empty if whole else bfloat16(empty), written=False)
    machine.load(ptx).launch(
        args=[machine.alloc(input if whole else bfloat16(input)), written, geometry],
        budget=40_000_000,
        **launch,
    )
    found = written.read()
    return found if whole else floats(found)
