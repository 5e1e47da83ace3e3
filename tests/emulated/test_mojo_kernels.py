"""Kernels as Mojo compiles them give on the emulator what they should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.emulated.convolution import Kernel, Operands, run

from maxconv.emulator import Machine

Emitted = tuple[Path, list[Kernel]]


def test_vectors_are_added(emitted: Emitted, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(1000).astype(np.float32) for _ in range(2))
    machine = Machine(sms=3)
    total = machine.alloc(np.full(1000, np.nan, np.float32))
    module = machine.load((emitted[0] / "add.ptx").read_text())
    arguments = [machine.alloc(a), machine.alloc(b), total, 1000]
    module.launch(grid=8, block=128, args=arguments)
    assert np.array_equal(total.read(), a + b)


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_summed(emitted: Emitted, rng: np.random.Generator, seed: int) -> None:
    values = rng.integers(-100, 100, (5, 333)).astype(np.float32)
    machine = Machine(sms=2, seed=seed)
    totals = machine.alloc(np.full(5, np.nan, np.float32))
    module = machine.load((emitted[0] / "sums.ptx").read_text())
    module.launch(grid=5, block=128, args=[machine.alloc(values), totals, 333])
    assert np.array_equal(totals.read(), values.sum(axis=1))


@pytest.mark.parametrize("seed", range(2))
def test_hopper_kernel_convolves(emitted: Emitted, seed: int) -> None:
    operands = Operands.random(seed)
    for kernel in emitted[1]:
        assert np.array_equal(run(kernel, operands, seed), operands.expected())


def test_candidates_differ(emitted: Emitted) -> None:
    alone, pair = emitted[1]
    assert (alone.cluster, pair.cluster) == (1, 2)
    assert "multicast::cluster" in pair.ptx
    assert "multicast::cluster" not in alone.ptx
