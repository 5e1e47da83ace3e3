"""The kernel of normalization by the root mean square, as Mojo compiles it, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from tests import overlap, ptx
from tests.emulated.convolution import Array, bfloat16, floats

from ptxemu import Machine

EPSILON: Final = 2.0**-10


@dataclass(frozen=True)
class Launch:
    """A problem, and what the Mojo side passes for it."""

    dtype: str
    images: int
    pixels: int
    channels: int
    aligned: bool
    kernel: str
    blocks: int
    vectors: int
    geometry: bytes
    activation: bytes
    ptx: str

    @classmethod
    def of(cls, line: str, folder: Path) -> Launch:
        """Reads a line of the Mojo side."""
        dtype, images, pixels, channels, aligned, name, blocks, vectors, *texts = line.split()
        geometry, activation = map(bytes.fromhex, texts)
        return cls(
            dtype, int(images), int(pixels), int(channels), aligned == "1", name, int(blocks),
            int(vectors), geometry, activation, (folder / f"{name}.ptx").read_text(),
        )  # fmt: skip

    def run(self, x: Array, weight: Array) -> Array:
        """Runs the kernel; returns the output, which nobody has written before."""
        machine = Machine("sm_90a", sms=16, seed=self.channels)
        whole = self.dtype == "float32"
        empty = np.zeros(x.shape, np.float32)
        output = machine.alloc(empty if whole else bfloat16(empty), written=False)
        machine.load(self.ptx).launch(
            args=[
                machine.alloc(x if whole else bfloat16(x)), machine.alloc(weight), output,
                self.activation, self.geometry,
            ],
            grid=self.blocks, block=256, budget=40_000_000,
        )  # fmt: skip
        found = output.read()
        return found if whole else floats(found)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[Launch]:
    """Images of more pixels than the blocks have and of fewer; idle lanes; too many channels."""
    folder, lines = ptx.emit_once("emit_rms_norm", tmp_path_factory)
    return [Launch.of(line, folder) for line in lines]


def test_pixels(launches: list[Launch]) -> None:
    """Half a unit of the output's type, and a few roundings of float32 before it."""
    rng = np.random.default_rng(5)
    for launch in launches:
        shape = (launch.images, launch.pixels, launch.channels)
        # Every pixel has a size of its own.
        drawn = rng.standard_normal(shape) * rng.uniform(0.1, 10, (*shape[:2], 1))
        x = drawn.astype(np.float32)
        x = x if launch.dtype == "float32" else floats(bfloat16(x))
        weight = rng.standard_normal(launch.channels).astype(np.float32)
        wide = x.astype(np.float64)
        normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPSILON) * weight
        exact = normal / (1 + np.exp(-normal))
        # A reciprocal root of 2^-22; the activation for 16 bits, 1.1e-5 absolutely.
        unit = 2.0**-8 if launch.dtype == "bfloat16" else 2.0**-24
        bound = 1.01 * unit * np.abs(exact) + 2.0**-20 * np.abs(normal) + 2e-5
        found = launch.run(x, weight)
        assert (np.abs(found - exact) <= bound).all(), launch.kernel


def test_every_kind_of_kernel_runs(launches: list[Launch]) -> None:
    kinds = {(launch.aligned, min(launch.vectors, 1)) for launch in launches}
    assert kinds == {(False, 0), (True, 0), (True, 1)}
    assert {"bfloat16-8-4-3", "bfloat16-8-16-3", "bfloat16-8-32-4"} <= {
        launch.kernel for launch in launches
    }


def test_kernels_wait_for_earlier_ones(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, _ = ptx.emit_once("emit_rms_norm", tmp_path_factory)
    overlap.check(folder.glob("*.ptx"))
