"""The kernels that Mojo compiles for the emulator, once a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import ptx
from tests.emulated.convolution import (
    CHANNELS,
    DIRECT,
    FILTERS,
    GATHERED,
    HEIGHT,
    ODD,
    POINTWISE,
    SPLITS,
    WIDTH,
    Gathered,
    Kernel,
)

SIZES = [str(size) for size in (HEIGHT, WIDTH, CHANNELS, FILTERS)]

#: What is fused behind a candidate whose threads store: nothing, a residual, SiLU and a residual.
WAYS = 3


def launches(factory: pytest.TempPathFactory, kind: str) -> list[Kernel]:
    """The launches that ``tests/mojo/emit_emulated.mojo`` calls so."""
    folder, lines = ptx.emit_once("emit_emulated", factory, *SIZES, "1")
    split = [line.split(" ", 1) for line in lines]
    return [Kernel.of(line, folder) for name, line in split if name == kind]


@pytest.fixture(scope="session")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Kernel]]:
    """The folder of the PTX files, and the Hopper kernel's candidates."""
    folder, _ = ptx.emit_once("emit_emulated", tmp_path_factory, *SIZES, "1")
    return folder, launches(tmp_path_factory, "same")


@pytest.fixture(scope="session")
def pointwise(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """The same candidates' launches for a filter of one tap, with several tiles a block."""
    return launches(tmp_path_factory, "pointwise")


@pytest.fixture(scope="session")
def relayed(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Launches for a filter of one tap, whose blocks run in relays."""
    return launches(tmp_path_factory, "relayed")


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """The same candidates' launches for channels that do not fill a row of a stage."""
    return launches(tmp_path_factory, "narrow")


@pytest.fixture(scope="session")
def odd(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kernel, int]]:
    """Candidates whose threads store rows, each with a number of filters of ``ODD``."""
    return of_odd(launches(tmp_path_factory, "odd"), 0)


def of_odd(kernels: list[Kernel], way: int) -> list[tuple[Kernel, int]]:
    """Those with one of ``WAYS`` fused, each with its number of filters."""
    chosen = kernels[way::WAYS]
    return list(zip(chosen, len(chosen) // len(ODD) * ODD, strict=True))


@pytest.fixture(scope="session")
def odd_residual(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[bool, list[tuple[Kernel, int]]]:
    """The same candidates' launches with a residual, by whether it is added behind SiLU."""
    kernels = launches(tmp_path_factory, "odd")
    return {silu: of_odd(kernels, way) for silu, way in ((False, 1), (True, 2))}


@pytest.fixture(scope="session")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kernel, Gathered]]:
    """Candidates whose threads load, each with what it convolves."""
    kernels = launches(tmp_path_factory, "gathered")
    return list(zip(kernels, len(kernels) // len(GATHERED) * GATHERED, strict=True))


@pytest.fixture(scope="session")
def gathered_split(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """One of them whose blocks share a tile's sum, for each number of ``SPLITS``."""
    return launches(tmp_path_factory, "gathered-split")


@pytest.fixture(scope="session")
def direct(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kernel, Gathered]]:
    """A candidate whose threads load straight into the rings, with what it convolves."""
    return list(zip(launches(tmp_path_factory, "direct"), DIRECT, strict=True))


@pytest.fixture(scope="session")
def direct_split(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """The same where blocks share a tile's sum, for each number of ``SPLITS``."""
    return launches(tmp_path_factory, "direct-split")


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kernel, bool]]:
    """Candidates whose tiles end within a sub-tile, bare, and with SiLU and a residual."""
    return list(zip(launches(tmp_path_factory, "ended"), [False, True] * 2, strict=True))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kernel, bool]]:
    """Candidates with sub-tiles of 16 pixels, bare, and with SiLU and a residual."""
    return list(zip(launches(tmp_path_factory, "small"), [False, True] * 2, strict=True))


@pytest.fixture(scope="session")
def paired(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kernel, int]]:
    """Ping-pong pairs that share filters and whose threads store, each with its filters."""
    kernels = launches(tmp_path_factory, "paired")
    return list(zip(kernels, (POINTWISE * FILTERS, FILTERS), strict=True))


@pytest.fixture(scope="session")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kernel, int, bool]]:
    """Candidates whose blocks share a tile's sum, each for each number of ``SPLITS``.

    Each is launched bare, and with SiLU and a residual.
    """
    kernels = launches(tmp_path_factory, "split")
    ways = [(count, fused) for count in SPLITS for fused in (False, True)]
    ways *= len(kernels) // len(ways)
    return [(kernel, *way) for kernel, way in zip(kernels, ways, strict=True)]


@pytest.fixture(scope="session")
def upsampled(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """A candidate that stores an image twice as large as the one that it convolves."""
    (kernel,) = launches(tmp_path_factory, "upsampled")
    return kernel
