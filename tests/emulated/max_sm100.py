"""MAX's own Blackwell convolution on the emulator, launched as its library launches it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.emulated.convolution import bfloat16, floats

from ptxemu import DevicePointer, Machine, TensorMap
from ptxemu.tma import DataType, Swizzle, packed_strides

Array = npt.NDArray[np.float32]

_SWIZZLES = {64: Swizzle.B64, 128: Swizzle.B128}
_POISON = 0x7FC1


@dataclass(frozen=True)
class Kernel:
    """A configuration's entry point, as ``tests/mojo/emit_sm100_max.mojo`` describes it.

    ``boxes`` are the rows of an activation's, a filter's and an output's box.
    """

    name: str
    threads: int
    shared_bytes: int
    block_rows: int
    block_columns: int
    block_depth: int
    rows: int
    columns: int
    cluster: tuple[int, int]
    boxes: tuple[int, int, int]
    swizzle: Swizzle
    store_swizzle: Swizzle
    stages: int
    residual: bool
    ptx: str

    @classmethod
    def of(cls, line: str, folder: Path) -> Kernel:
        """Reads a line of the Mojo side."""
        name, *rest = line.split()
        threads, shared, block_m, block_n, block_k, m, n, x, y, *further = map(int, rest)
        *boxes, inner, outer, stages, residual = further
        text = (folder / f"{name}.ptx").read_text()
        return cls(
            name=name,
            threads=threads,
            shared_bytes=shared,
            block_rows=block_m,
            block_columns=block_n,
            block_depth=block_k,
            rows=m,
            columns=n,
            cluster=(x, y),
            boxes=(boxes[0], boxes[1], boxes[2]),
            swizzle=_SWIZZLES[inner],
            store_swizzle=_SWIZZLES[outer],
            stages=stages,
            residual=bool(residual),
            ptx=text,
        )

    @property
    def is_half(self) -> bool:
        """Whether it is for f16 instead of bf16."""
        return "float16_float16_float16" in self.ptx and "bfloat16" not in self.ptx


@dataclass(frozen=True)
class Problem:
    """A convolution of stride 1: images, their size, channels, filters, their size, padding."""

    images: int
    size: tuple[int, int]
    channels: int
    filters: int
    filter_size: tuple[int, int] = (3, 3)
    padding: tuple[int, int] = (1, 1)

    @property
    def output_size(self) -> tuple[int, int]:
        """Height and width of the output."""
        sizes = zip(self.size, self.filter_size, self.padding, strict=True)
        height, width = (size + 2 * pad - taps + 1 for size, taps, pad in sizes)
        return height, width

    @property
    def pixels(self) -> int:
        """Of all outputs."""
        return self.images * self.output_size[0] * self.output_size[1]

    @property
    def depth(self) -> int:
        """Products of a sum."""
        return self.channels * self.filter_size[0] * self.filter_size[1]


@dataclass(frozen=True)
class Operands:
    """Activation ``[N, H, W, C]``, filter ``[K, R, S, C]``, residual ``[pixels, K]``."""

    activation: Array
    filter: Array
    residual: Array

    @classmethod
    def integers(cls, problem: Problem, seed: int) -> Operands:
        """Small integers: their products and sums are exact in float32 in any order."""
        rng = np.random.default_rng(seed)
        return cls(*(rng.integers(-3, 4, s).astype(np.float32) for s in _shapes(problem)))

    @classmethod
    def normal(cls, problem: Problem, seed: int) -> Operands:
        """Values that bfloat16 holds."""
        rng = np.random.default_rng(seed)
        values = [rng.standard_normal(s).astype(np.float32) for s in _shapes(problem)]
        return cls(*(floats(bfloat16(value)) for value in values))

    def convolution(self, problem: Problem) -> npt.NDArray[np.float64]:
        """The convolution in float64, ``[pixels, K]``."""
        pads = [(0, 0), *((pad, pad) for pad in problem.padding), (0, 0)]
        padded = np.pad(self.activation.astype(np.float64), pads)
        height, width = problem.output_size
        total = np.zeros((problem.images, height, width, problem.filters))
        for r in range(problem.filter_size[0]):
            for s in range(problem.filter_size[1]):
                window = padded[:, r : r + height, s : s + width]
                total += window @ self.filter[:, r, s].T.astype(np.float64)
        return total.reshape(problem.pixels, problem.filters)


def _shapes(problem: Problem) -> list[tuple[int, ...]]:
    activation = (problem.images, *problem.size, problem.channels)
    weights = (problem.filters, *problem.filter_size, problem.channels)
    return [activation, weights, (problem.pixels, problem.filters)]


def run(
    kernel: Kernel,
    problem: Problem,
    operands: Operands,
    seed: int,
    sms: int = 2,
    beta: float = 1.0,
    ptx: str = "",
    waits: bool = False,
) -> Array:
    """Runs a kernel, or a changed text of it; returns ``[pixels, K]``.

    Args:
        kernel: Which one.
        problem: Its sizes.
        operands: Its values.
        seed: Of the machine.
        sms: Multiprocessors, at least a cluster's blocks.
        beta: What the residual is multiplied with.
        ptx: A changed text.
        waits: ``tensor_load_waits`` of the machine; the kernels rely on the assembler.
    """
    machine = Machine("sm_100a", max(sms, int(np.prod(kernel.cluster))), seed, waits)
    encode = _half if kernel.is_half else bfloat16
    pointers = [machine.alloc(encode(operands.activation)), machine.alloc(encode(operands.filter))]
    output = machine.alloc(np.full((problem.pixels, problem.filters), _POISON, np.uint16))
    pointers += [output, machine.alloc(encode(operands.residual))]
    maps = _maps(kernel, problem, pointers)
    tiles = _tiles(kernel, problem)
    clusters = [tiles[0] // kernel.cluster[0], tiles[1] // kernel.cluster[1], 1]
    sizes = np.array([problem.pixels, problem.filters, problem.depth], np.uint32)
    activation = maps[0], _decomposition(problem)
    arguments: list[object] = [activation, *maps[1:], np.array(clusters, np.int32), sizes]
    if kernel.residual:
        arguments.append(np.float32(beta))
    machine.load(ptx or kernel.ptx).launch(
        grid=tiles,
        block=kernel.threads,
        cluster=kernel.cluster,
        shared_bytes=kernel.shared_bytes,
        args=arguments,
        budget=20_000_000,
    )
    found = output.read()
    return found.view(np.float16).astype(np.float32) if kernel.is_half else floats(found)


def expected(kernel: Kernel, problem: Problem, operands: Operands, beta: float = 1.0) -> Array:
    """What a kernel gives for integers: sums are exact, the output's type is rounded to.

    The kernels round the convolution before they add the residual.
    """
    rounded = _rounded(kernel, operands.convolution(problem))
    return _rounded(kernel, rounded + beta * operands.residual) if kernel.residual else rounded


def _rounded(kernel: Kernel, values: npt.NDArray[Any]) -> Array:
    if kernel.is_half:
        return values.astype(np.float16).astype(np.float32)
    return floats(bfloat16(values.astype(np.float32)))


def _half(values: Array) -> npt.NDArray[np.float16]:
    return values.astype(np.float16)


def _decomposition(problem: Problem) -> npt.NDArray[np.int32]:
    """What stands behind the activation's map: output and filter sizes, channels, lower corner."""
    numbers = [*problem.output_size, *problem.filter_size, problem.channels]
    return np.array([*numbers, *(-pad for pad in problem.padding)], np.int32)


def _tiles(kernel: Kernel, problem: Problem) -> tuple[int, int, int]:
    """The grid: tiles in rows and columns, as whole clusters."""
    counts = -(-problem.pixels // kernel.block_rows), -(-problem.filters // kernel.columns)
    x, y = (-(-n // c) * c for n, c in zip(counts, kernel.cluster, strict=True))
    return x, y, 1


def _maps(kernel: Kernel, problem: Problem, pointers: list[DevicePointer]) -> list[TensorMap]:
    """Of activation, filter, output and, if there is one, residual."""
    kind = DataType.FLOAT16 if kernel.is_half else DataType.BFLOAT16
    options: dict[str, Any] = {"swizzle": kernel.swizzle}
    channels = kernel.swizzle.span // 2
    pixels = (problem.channels, problem.size[1], problem.size[0], problem.images)
    (taps_h, taps_w), (pad_h, pad_w) = problem.filter_size, problem.padding
    activation = TensorMap.im2col(
        kind,
        pointers[0],
        pixels,
        packed_strides(pixels, kind),
        (-pad_w, -pad_h),
        (pad_w - taps_w + 1, pad_h - taps_h + 1),
        channels,
        kernel.boxes[0],
        **options,
    )
    shape = (problem.depth, problem.filters)
    strides = packed_strides(shape, kind)
    box = (channels, kernel.boxes[1])
    weights = TensorMap.tiled(kind, pointers[1], shape, strides, box, **options)
    matrix = (problem.filters, problem.pixels)
    outer = [
        TensorMap.tiled(
            kind,
            pointer,
            matrix,
            packed_strides(matrix, kind),
            (kernel.store_swizzle.span // 2, kernel.boxes[2]),
            swizzle=kernel.store_swizzle,
        )
        for pointer in pointers[2 : 3 + kernel.residual]
    ]
    return [activation, weights, *outer]
