"""Hopper's implicit GEMM of uint8 with a zero point, and an output of uint8, is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests import ptx
from tests.emulated.convolution import (
    FILTERS,
    HEIGHT,
    WIDTH,
    Kernel,
    Operands,
    tensor_maps,
    with_pointer,
)
from tests.reference import conv_reference

from ptxemu import Machine
from ptxemu.tma import DataType

#: Channels that do not fill a row of a stage.
CHANNELS = 48

#: Zero points (``tests/mojo/emit_integers.mojo`` has the others).
ZERO, RESIDUAL_ZERO, OUT_ZERO = 131, 77, 93

#: What stands for pointers in what a launch passes.
OUTPUT, BIAS, RESIDUAL, SCALE, TABLE = (n * 0x1111 << 48 for n in range(1, 6))


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of the kernels, and the lines that say what their launches pass."""
    sizes = map(str, (HEIGHT, WIDTH, CHANNELS, FILTERS, ZERO))
    return ptx.emit_once("emit_integers", tmp_path_factory, *sizes)


def sums_of(x: npt.NDArray[Any], filter: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Exact, with a padding of 1."""
    one = (1, 1)
    sums: npt.NDArray[np.float64] = conv_reference(
        x[np.newaxis].astype(np.float64),
        filter.astype(np.float64),
        stride=one,
        dilation=one,
        pad_before=one,
        pad_after=one,
    )[0]
    return sums


def test_integers(emitted: tuple[Path, list[str]]) -> None:
    folder, (table_line, *lines) = emitted
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, (HEIGHT, WIDTH, CHANNELS)).astype(np.uint8)
    filter = rng.integers(-128, 128, (FILTERS, 3, 3, CHANNELS)).astype(np.int8)
    scale = (2.0 ** -rng.integers(9, 13, FILTERS)).astype(np.float32)
    bias = rng.integers(-20, 21, FILTERS).astype(np.float32)
    residual = rng.integers(0, 256, (HEIGHT, WIDTH, FILTERS)).astype(np.uint8)
    threads, shared, elements, problem, classes = table_line.split()
    values = np.maximum(sums_of(x.astype(np.int64) - ZERO, filter) * scale + bias, 0)
    values += 0.5 * (residual.astype(np.float64) - RESIDUAL_ZERO)
    wanted = np.clip(np.rint(values * 2) + OUT_ZERO, 0, 255)
    assert len(np.unique(wanted)) > 100
    for line in lines:
        kernel = Kernel.of(line, folder)
        machine = Machine("sm_90a", sms=kernel.blocks, seed=1)
        activation, weights = machine.alloc(x), machine.alloc(filter.view(np.uint8))
        table = machine.alloc(np.full(int(elements), -7, np.int32))
        machine.load((folder / "table.ptx").read_text()).launch(
            grid=FILTERS,
            block=int(threads),
            shared_bytes=int(shared),
            args=[weights, table, bytes.fromhex(problem), bytes.fromhex(classes), ZERO, 0],
            budget=3_000_000,
        )
        # Of corner, edge and middle along each axis.
        places = np.ix_((0, 1, HEIGHT - 1), (0, 1, WIDTH - 1))
        of_filter = sums_of(np.full(x.shape, ZERO), filter)[places]
        np.testing.assert_array_equal(table.read().reshape(3, 3, FILTERS), of_filter)
        output = machine.alloc(np.full(residual.shape, 85, np.uint8))
        parameters = kernel.parameters
        for placeholder, pointer in (
            (OUTPUT, output),
            (BIAS, machine.alloc(bias)),
            (RESIDUAL, machine.alloc(residual)),
            (SCALE, machine.alloc(scale)),
            (TABLE, table),
        ):
            parameters = with_pointer(parameters, placeholder, pointer)
        floats = (array.astype(np.float32) for array in (x, filter, bias))
        every = tensor_maps(
            kernel, Operands(*floats), (activation, weights, output), DataType.UINT8
        )
        machine.load(kernel.ptx).launch(
            grid=kernel.blocks,
            block=kernel.threads,
            cluster=kernel.cluster,
            shared_bytes=kernel.shared_bytes,
            args=[*every, every[-1], parameters, kernel.geometry],
            budget=6_000_000,
        )
        np.testing.assert_array_equal(output.read(), wanted)
