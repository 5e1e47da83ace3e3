"""The kernels that Mojo compiles for the emulator, once a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import ptx
from tests.emulated.convolution import CHANNELS, FILTERS, HEIGHT, ODD, SPLITS, WIDTH, Kernel

SIZES = [str(size) for size in (HEIGHT, WIDTH, CHANNELS, FILTERS)]

#: Lines at the end: candidates whose threads store, by numbers of filters and what is fused, two
#: whose tiles end within a sub-tile, bare and fused, one whose blocks share a tile, and one that
#: stores an enlarged image.
SPLIT = len(SPLITS) + 1
ENDED = 2 * 2 + SPLIT
WAYS = 3
ROW_STORES = 2 * len(ODD) * WAYS + ENDED


@pytest.fixture(scope="session")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Kernel]]:
    """The folder of the PTX files, and the Hopper kernel's candidates."""
    folder, lines = ptx.emit_once("emit_emulated", tmp_path_factory, *SIZES, "1")
    return folder, [Kernel.of(line, folder) for line in lines[:-ROW_STORES][::3]]


@pytest.fixture(scope="session")
def pointwise(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """The same candidates' launches for a filter of one tap, with several tiles a block."""
    folder, lines = ptx.emit_once("emit_emulated", tmp_path_factory, *SIZES, "1")
    return [Kernel.of(line, folder) for line in lines[:-ROW_STORES][1::3]]


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """The same candidates' launches for channels that do not fill a row of a stage."""
    folder, lines = ptx.emit_once("emit_emulated", tmp_path_factory, *SIZES, "1")
    return [Kernel.of(line, folder) for line in lines[:-ROW_STORES][2::3]]


@pytest.fixture(scope="session")
def odd(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kernel, int]]:
    """Candidates whose threads store rows, each with a number of filters of ``ODD``."""
    folder, lines = ptx.emit_once("emit_emulated", tmp_path_factory, *SIZES, "1")
    kernels = [Kernel.of(line, folder) for line in lines[-ROW_STORES:-ENDED:WAYS]]
    return list(zip(kernels, 2 * ODD, strict=True))


@pytest.fixture(scope="session")
def odd_residual(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[bool, list[tuple[Kernel, int]]]:
    """The same candidates' launches with a residual, by whether it is added behind SiLU."""
    folder, lines = ptx.emit_once("emit_emulated", tmp_path_factory, *SIZES, "1")
    launches = lines[-ROW_STORES:-ENDED]
    return {
        silu: list(
            zip([Kernel.of(line, folder) for line in launches[way::WAYS]], 2 * ODD, strict=True)
        )
        for silu, way in ((False, 1), (True, 2))
    }


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kernel, bool]]:
    """Candidates whose tiles end within a sub-tile, bare, and with SiLU and a residual."""
    folder, lines = ptx.emit_once("emit_emulated", tmp_path_factory, *SIZES, "1")
    kernels = [Kernel.of(line, folder) for line in lines[-ENDED:-SPLIT]]
    return list(zip(kernels, [False, True] * 2, strict=True))


@pytest.fixture(scope="session")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """A candidate whose blocks share a tile's sum, for each number of ``SPLITS``."""
    folder, lines = ptx.emit_once("emit_emulated", tmp_path_factory, *SIZES, "1")
    return [Kernel.of(line, folder) for line in lines[-SPLIT:-1]]


@pytest.fixture(scope="session")
def upsampled(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """A candidate that stores an image twice as large as the one that it convolves."""
    folder, lines = ptx.emit_once("emit_emulated", tmp_path_factory, *SIZES, "1")
    return Kernel.of(lines[-1], folder)
