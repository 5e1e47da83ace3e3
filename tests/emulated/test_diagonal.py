"""The depthwise kernel on tensor cores, as Mojo compiles it, computes what it should."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import ptx
from tests.emulated.convolution import BIAS, Array, bfloat16, floats

from maxconv.emulator import DevicePointer, EmulatorError, Machine, TensorMap
from maxconv.tma import DataType, L2Promotion, Swizzle, packed_strides

#: Taps, stride, batch, height, width, channels, padding, multiprocessors: one image whose last set
#: is half a set; slabs side by side, and one after the other; pairs of narrow images, of which
#: some are not there; several images; stride 2; several steps along the columns.
PROBLEMS = (
    (3, 1, 1, 7, 56, 64, 1, 1),
    (3, 1, 2, 4, 20, 192, 1, 1),
    (3, 1, 1, 2, 9, 192, 1, 1),
    (3, 1, 5, 5, 7, 64, 1, 1),
    (3, 1, 5, 5, 14, 64, 1, 2),
    (3, 2, 2, 9, 30, 64, 1, 2),
    (3, 1, 1, 3, 120, 64, 1, 1),
)

#: What a sum that is no number is compared as.
NOT_A_NUMBER = np.float32(12288)


@dataclass(frozen=True)
class Launch:
    """A problem, and what the Mojo side passes for it."""

    problem: tuple[int, ...]
    blocks: int
    threads: int
    shared_bytes: int
    staged_columns: int
    columns: int
    images: int
    height: int
    width: int
    epilogues: tuple[bytes, bytes]
    geometry: bytes
    ptx: str

    @classmethod
    def of(cls, problem: tuple[int, ...], line: str, folder: Path) -> Launch:
        """Reads a line of the Mojo side."""
        words = line.split()
        index, blocks, threads, shared, staged, columns, images, height, width = map(int, words[:9])
        bare, fused, geometry = map(bytes.fromhex, words[9:])
        cut = blocks, threads, shared, staged, columns, images
        text = (folder / f"{index}.ptx").read_text()
        return cls(problem, *cut, height, width, (bare, fused), geometry, text)


@dataclass(frozen=True)
class Operands:
    """Small integers."""

    activation: Array
    filter: Array
    bias: Array
    residual: Array

    @classmethod
    def random(cls, launch: Launch, seed: int) -> Operands:
        """Draws them."""
        taps, _, batch, height, width, channels, _, _ = launch.problem
        rng = np.random.default_rng(seed)
        shapes: tuple[tuple[int, ...], ...] = (
            (batch, height, width, channels),
            (channels, taps, taps),
            (channels,),
            (batch, launch.height, launch.width, channels),
        )
        return cls(*(rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes))

    def expected(self, launch: Launch, fused: bool) -> Array:
        """The convolution, rounded to bfloat16."""
        taps, stride, _, _, _, _, padding, _ = launch.problem
        around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
        padded = np.pad(self.activation, around)
        total = np.zeros_like(self.residual)
        with np.errstate(invalid="ignore"):
            for r in range(taps):
                for s in range(taps):
                    rows = slice(r, r + (launch.height - 1) * stride + 1, stride)
                    columns = slice(s, s + (launch.width - 1) * stride + 1, stride)
                    total += padded[:, rows, columns] * self.filter[:, r, s]
        if fused:
            total = np.maximum(total + self.bias, 0) + self.residual
        return floats(bfloat16(numbers(total)))


def numbers(values: Array) -> Array:
    """The values, a number where one is none."""
    return np.where(np.isnan(values), NOT_A_NUMBER, values)


def run(launch: Launch, operands: Operands, fused: bool, seed: int, ptx: str = "") -> Array:
    """Runs the kernel, or a changed text of it; returns its outputs."""
    _, _, batch, height, width, channels, _, _ = launch.problem
    machine = Machine("sm_90a", sms=launch.blocks, seed=seed)
    activation, residual = (
        machine.alloc(bfloat16(values)) for values in (operands.activation, operands.residual)
    )
    bias = machine.alloc(operands.bias)
    output = machine.alloc(np.full(operands.residual.shape, 0x4442, np.uint16))
    image = (channels, width, height, 1, batch)
    result = (channels, launch.width, launch.height, 1, batch)
    outputs = (64, launch.columns, 2, 1, launch.images)
    epilogue = launch.epilogues[fused].replace(
        BIAS.to_bytes(8, "little"), int(bias).to_bytes(8, "little")
    )
    machine.load(ptx or launch.ptx).launch(
        grid=launch.blocks,
        block=launch.threads,
        shared_bytes=launch.shared_bytes,
        args=[
            _map(activation, image, (64, launch.staged_columns, 2, 1, 1)),
            _map(output, result, outputs),
            _map(residual, result, outputs),
            machine.alloc(bfloat16(operands.filter)),
            epilogue,
            int(output).to_bytes(8, "little"),
            launch.geometry,
        ],
        budget=20_000_000,
    )
    return floats(output.read())


def _map(tensor: DevicePointer, sizes: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
    kind = DataType.BFLOAT16
    options: dict[str, Any] = {"swizzle": Swizzle.B128, "l2_promotion": L2Promotion.L2_256B}
    return TensorMap.tiled(kind, tensor, sizes, packed_strides(sizes, kind), box, **options)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[Launch]:
    """The problems, with the kernel's PTX."""
    folder = tmp_path_factory.mktemp("diagonal")
    words = ["x".join(map(str, problem)) for problem in PROBLEMS]
    lines = ptx.emit("emit_diagonal", folder, *words)
    return [Launch.of(*pair, folder) for pair in zip(PROBLEMS, lines, strict=True)]


@pytest.mark.parametrize("index", range(len(PROBLEMS)))
@pytest.mark.parametrize("fused", [False, True], ids=["bare", "fused"])
def test_depthwise_is_exact(launches: list[Launch], index: int, fused: bool) -> None:
    launch = launches[index]
    operands = Operands.random(launch, index)
    found = run(launch, operands, fused, seed=index)
    assert np.array_equal(found, operands.expected(launch, fused))


def test_the_cuts_reach_their_edges(launches: list[Launch]) -> None:
    assert {launch.images for launch in launches} >= {1, 2, 4}
    assert {launch.columns % 16 for launch in launches} == {0, 8}


def test_what_is_not_finite_stays_in_its_channel(launches: list[Launch]) -> None:
    launch = launches[3]
    operands = Operands.random(launch, 3)
    operands.activation[0, 2, 3, 5] = np.inf
    operands.activation[4, 4, 6, 63] = np.nan
    found = run(launch, operands, fused=False, seed=3)
    expected = operands.expected(launch, fused=False)
    assert np.isinf(expected[0, :, :, 5]).any()
    assert np.array_equal(numbers(found), expected)


def test_a_block_that_does_not_meet_is_reported(launches: list[Launch]) -> None:
    launch = launches[0]
    text = launch.ptx
    at = text.rindex("bar.sync")
    broken = text[:at] + "//" + text[at:]
    with pytest.raises(EmulatorError):
        for seed in range(4):
            run(launch, Operands.random(launch, 0), fused=False, seed=seed, ptx=broken)
