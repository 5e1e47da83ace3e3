"""More seeds and operands than every run has time for: ``python -m pytest -m extended``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.emulated import max_sm90
from tests.emulated.convolution import Kernel, Operands, run
from tests.ptxemu.isa.case import emulate

pytestmark = pytest.mark.extended

Emitted = tuple[Path, list[Kernel]]


@pytest.mark.parametrize("seed", range(100, 130))
def test_hopper_kernel_convolves(emitted: Emitted, seed: int) -> None:
    operands = Operands.random(seed)
    for kernel in emitted[1]:
        assert np.array_equal(run(kernel, operands, seed), operands.expected())


@pytest.fixture(scope="module")
def matmuls(tmp_path_factory: pytest.TempPathFactory) -> list[max_sm90.Kernel]:
    return max_sm90.compiled(tmp_path_factory)


@pytest.mark.parametrize("seed", range(100, 120))
def test_max_multiplies(matmuls: list[max_sm90.Kernel], seed: int) -> None:
    for kernel in matmuls:
        problem = max_sm90.case(kernel, seed)
        found = emulate(kernel.ptx, problem, seed, barrier_fences=False, register_fences=False)
        assert not problem.difference(found)
