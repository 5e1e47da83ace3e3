"""The kernels that Mojo compiles for the emulator, once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import ptx
from tests.emulated.convolution import CHANNELS, FILTERS, HEIGHT, WIDTH, Kernel


@pytest.fixture(scope="session")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Kernel]]:
    """The folder of the PTX files, and the Hopper kernel's candidates."""
    folder = tmp_path_factory.mktemp("emulated")
    sizes = [str(size) for size in (HEIGHT, WIDTH, CHANNELS, FILTERS)]
    lines = ptx.emit("emit_emulated", folder, *sizes, "1")
    return folder, [Kernel.of(line, folder) for line in lines]
