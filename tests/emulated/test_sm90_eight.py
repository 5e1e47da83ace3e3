"""Hopper's implicit GEMM of 8-bit inputs, as Mojo compiles it, is exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest
from tests import ptx
from tests.emulated.convolution import (
    FILTERS,
    HEIGHT,
    WIDTH,
    Array,
    Kernel,
    Operands,
    run,
)

from ptxemu import EmulatorError

#: Channels that fill a row of a stage, and that do not (`tests/mojo/emit_sm90_eight.mojo`).
CHANNELS, NARROW = 128, 48

#: The bits of -3 to 3, of a bias's values too.
E4M3: Final = np.array([0xC4, 0xC0, 0xB8, 0x00, 0x38, 0x40, 0x44], np.uint8)
E5M2: Final = np.array([0xC2, 0xC0, 0xBC, 0x00, 0x3C, 0x40, 0x42], np.uint8)


def _looked_up(table: npt.NDArray[np.uint8]) -> Callable[[Array], npt.NDArray[np.generic]]:
    return lambda values: table[values.astype(int) + 3]


STORED: Final[dict[str, Callable[[Array], npt.NDArray[np.generic]]]] = {
    "int8": lambda values: values.astype(np.int8).view(np.uint8),
    "float8_e5m2": _looked_up(E5M2),
    "float8_e4m3fn": _looked_up(E4M3),
}

#: Candidates: a tile of its own, one that two blocks share, one whose threads store.
ALONE, SHARED, ROWS = 4, 8, 6


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], Kernel]:
    """By type, candidate and channels."""
    sizes = map(str, (HEIGHT, WIDTH, CHANNELS, FILTERS))
    folder, lines = ptx.emit_once("emit_sm90_eight", tmp_path_factory, *sizes)
    found = {}
    for number, line in enumerate(lines):
        dtype, index = line.split()[0].split("-")
        key = dtype, int(index), (CHANNELS, NARROW)[number % 2]
        found[key] = Kernel.of(line, folder)
    return found


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("index", [ALONE, SHARED, ROWS])
@pytest.mark.parametrize("channels", [CHANNELS, NARROW])
def test_sums_are_exact(
    kernels: dict[tuple[str, int, int], Kernel], dtype: str, index: int, channels: int
) -> None:
    kernel = kernels[dtype, index, channels]
    assert kernel.cluster == (2 if index == SHARED else 1)
    assert kernel.rows == (index == ROWS)
    operands = Operands.random(index, channels=channels)
    found = run(kernel, operands, index, stored=STORED[dtype])
    assert np.array_equal(found, operands.expected())


@pytest.mark.parametrize("index", [ALONE, SHARED])
def test_large_sums_of_both_signs(kernels: dict[tuple[str, int, int], Kernel], index: int) -> None:
    """Beyond float32's 24 bits."""
    kernel, drawn = kernels["int8", index, CHANNELS], Operands.random(0, channels=CHANNELS)
    rng = np.random.default_rng(index)
    signs = rng.choice([-1, 1], len(drawn.filter)).astype(np.float32)
    operands = replace(
        drawn,
        activation=127 - (rng.integers(0, 2, drawn.activation.shape)).astype(np.float32),
        filter=127 * np.ones_like(drawn.filter) * signs[:, None, None, None],
        bias=np.zeros_like(drawn.bias),
    )
    expected = operands.expected()
    assert expected.max() > 2**24
    assert expected.min() < -(2**24)
    assert np.array_equal(run(kernel, operands, 0, stored=STORED["int8"]), expected)


def test_what_is_not_summed_as_integers_is_seen(
    kernels: dict[tuple[str, int, int], Kernel],
) -> None:
    """A type that the multiply does not have is refused by name."""
    kernel = kernels["int8", ALONE, CHANNELS]
    text = kernel.ptx.replace(".s32.s8.s8", ".f32.s8.s8")
    assert text != kernel.ptx
    with pytest.raises(EmulatorError, match="these types are not supported"):
        run(kernel, Operands.random(0, channels=CHANNELS), 0, text, stored=STORED["int8"])
