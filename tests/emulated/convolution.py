"""The Hopper convolution on the emulator: one image, a 3x3 filter, a padding of 1."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsInt

import numpy as np
import numpy.typing as npt
from tests.isa.case import Case, Map, Struct

from maxconv.emulator import DevicePointer, Machine, TensorMap, Trace
from maxconv.tma import DataType, L2Promotion, Swizzle, packed_strides

HEIGHT, WIDTH, CHANNELS, FILTERS = 8, 12, 64, 64
#: What stands for the pointers in the parameters (``tests/mojo/emit_emulated.mojo``).
OUTPUT, BIAS = 0x1111 << 48, 0x2222 << 48

Array = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Kernel:
    """A candidate, as the Mojo side describes it: sizes and what a launch passes."""

    index: int
    threads: int
    shared_bytes: int
    tiles: int
    cluster: int
    load_pixels: int
    store_pixels: int
    load_filters: int
    parameters: bytes
    geometry: bytes
    ptx: str

    @classmethod
    def of(cls, line: str, folder: Path) -> Kernel:
        """Reads a line of the Mojo side."""
        *numbers, parameters, geometry = line.split()
        text = (folder / f"{numbers[0]}.ptx").read_text()
        index, threads, shared, tiles, cluster, pixels, stored, filters = map(int, numbers)
        launch = bytes.fromhex(parameters), bytes.fromhex(geometry)
        return cls(index, threads, shared, tiles, cluster, pixels, stored, filters, *launch, text)


@dataclass(frozen=True)
class Operands:
    """Small integers, whose products and sums are exact in float32 in any order."""

    activation: Array
    filter: Array
    bias: Array

    @classmethod
    def random(cls, seed: int) -> Operands:
        """Draws them."""
        rng = np.random.default_rng(seed)
        shapes = (HEIGHT, WIDTH, CHANNELS), (FILTERS, 3, 3, CHANNELS), (FILTERS,)
        values = [rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes]
        return cls(*values)

    def expected(self) -> Array:
        """The convolution in float64, rounded to bfloat16."""
        padded = np.pad(self.activation.astype(np.float64), ((1, 1), (1, 1), (0, 0)))
        total = np.zeros((HEIGHT, WIDTH, FILTERS)) + self.bias
        for r in range(3):
            for s in range(3):
                window = padded[r : r + HEIGHT, s : s + WIDTH]
                total += np.einsum("hwc,kc->hwk", window, self.filter[:, r, s])
        return floats(bfloat16(total.astype(np.float32)))


def bfloat16(values: Array) -> Bits:
    """Bits of bfloat16, rounded to nearest even."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    high: Bits = (rounded >> np.uint32(16)).astype(np.uint16)
    return high


def floats(bits: Bits) -> Array:
    """bfloat16 as float32."""
    wide: Array = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def run(
    kernel: Kernel, operands: Operands, seed: int, ptx: str = "", trace: Trace | None = None
) -> Array:
    """Runs a candidate, or a changed text of it; returns ``[HEIGHT, WIDTH, FILTERS]``."""
    machine = Machine("sm_90a", sms=kernel.cluster, seed=seed)
    activation = machine.alloc(bfloat16(operands.activation))
    weights = machine.alloc(bfloat16(operands.filter))
    bias = machine.alloc(bfloat16(operands.bias))
    output = machine.alloc(np.full((HEIGHT, WIDTH, FILTERS), 0x7FC1, np.uint16))
    parameters = _with_pointer(kernel.parameters, OUTPUT, output)
    parameters = _with_pointer(parameters, BIAS, bias)
    maps = _maps(kernel, activation, weights, output)
    machine.load(ptx or kernel.ptx).launch(
        grid=kernel.cluster,
        block=kernel.threads,
        cluster=kernel.cluster,
        shared_bytes=kernel.shared_bytes,
        args=[*maps, maps[-1], parameters, kernel.geometry],
        budget=3_000_000,
        trace=trace,
    )
    return floats(output.read())


def _with_pointer(parameters: bytes, placeholder: int, pointer: DevicePointer) -> bytes:
    old = placeholder.to_bytes(8, "little")
    assert parameters.count(old) == 1
    return parameters.replace(old, int(pointer).to_bytes(8, "little"))


def _maps(
    kernel: Kernel, activation: SupportsInt, weights: SupportsInt, output: SupportsInt
) -> list[TensorMap]:
    """The maps that ``operations/sm90/launch.mojo`` encodes."""
    kind = DataType.BFLOAT16
    options: dict[str, Any] = {"swizzle": Swizzle.B128, "l2_promotion": L2Promotion.L2_256B}
    pixels = (CHANNELS, WIDTH, HEIGHT, 1)
    taps = (CHANNELS, 9, FILTERS)
    matrix = (FILTERS, HEIGHT * WIDTH, 1)
    return [
        TensorMap.im2col(
            kind,
            activation,
            pixels,
            packed_strides(pixels, kind),
            (-1, -1),
            (-1, -1),
            64,
            kernel.load_pixels,
            **options,
        ),
        TensorMap.tiled(
            kind,
            weights,
            taps,
            packed_strides(taps, kind),
            (64, 1, kernel.load_filters),
            **options,
        ),
        TensorMap.tiled(
            kind,
            output,
            matrix,
            packed_strides(matrix, kind),
            (64, kernel.store_pixels, 1),
            **options,
        ),
    ]


def case(kernel: Kernel, operands: Operands) -> Case:
    """The same launch as a case, which a GPU runs too."""
    data = [bfloat16(values) for values in (operands.activation, operands.filter, operands.bias)]
    offsets = [kernel.parameters.index(p.to_bytes(8, "little")) for p in (OUTPUT, BIAS)]
    parameters = Struct(kernel.parameters, ((offsets[0], -1), (offsets[1], 2)))
    maps = [
        Map(array, tensor.descriptor)
        for array, tensor in zip((0, 1, -1), _maps(kernel, 0, 0, 0), strict=True)
    ]
    name = re.search(r"\.entry (\w+)", kernel.ptx)
    assert name is not None
    return Case(
        name[1],
        kernel.ptx,
        tuple(data),
        bfloat16(operands.expected()),
        block=kernel.threads,
        grid=kernel.cluster,
        cluster=kernel.cluster,
        shared=kernel.shared_bytes,
        passed=(*maps, maps[-1], parameters, Struct(kernel.geometry)),
    )
