"""MAX's own Hopper matmul: its kernels as PTX, and how its library launches them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tests.emulated.convolution import bfloat16
from tests.ptxemu.isa.case import Case, Map, Struct

from ptxemu.tma import DataType, Swizzle, TiledDescriptor

if TYPE_CHECKING:
    import pytest

#: The sizes of ``tests/mojo/matmul_sm90_max.mojo``.
M, WHOLE_M, N, K = 200, 256, 256, 192

_ROWS, _DEPTH, _CONSUMERS = 128, 64, 2
_STAGES = {64: 3, 128: 4}


@dataclass(frozen=True)
class Kernel:
    """A configuration, as its text tells it: blocks of a cluster, columns of a tile, the store."""

    ptx: str
    cluster: tuple[int, int]
    columns: int
    stores_tiles: bool

    @classmethod
    def of(cls, ptx: str) -> Kernel:
        """Reads what a text says of itself."""
        sizes = re.search(r"\.reqnctapercluster (\d+), (\d+)", ptx)
        shape = re.search(r"m64n(\d+)k16", ptx)
        assert sizes is not None and shape is not None
        stores = "cp.async.bulk.tensor.2d.global.shared" in ptx
        return cls(ptx, (int(sizes[1]), int(sizes[2])), int(shape[1]), stores)

    @property
    def rows(self) -> int:
        """Of the product that it is compiled for: without tiled stores it has whole tiles."""
        return M if self.stores_tiles else WHOLE_M

    @property
    def title(self) -> str:
        """What tells it from the others."""
        return f"{self.cluster[0]}x{self.cluster[1]} n{self.columns}"


def compiled(factory: pytest.TempPathFactory) -> list[Kernel]:
    """The kernels, as the program that calls them holds them."""
    # Not where a GPU machine runs the cases: it has no compiler.
    from tests import ptx

    def emit(folder: Path) -> list[str]:
        program = folder / "matmul"
        ptx.build("matmul_sm90_max", program)
        texts = dict(enumerate(ptx.held(program)))
        for number, text in texts.items():
            (folder / f"{number}.ptx").write_text(text)
        return [f"{number}.ptx" for number in texts]

    folder, names = ptx.once("matmul_sm90_max", factory, emit)
    return [Kernel.of((folder / name).read_text()) for name in names]


def case(kernel: Kernel, seed: int, rows: int = 0) -> Case:
    """A product of small integers, exact in any order, rounded to bfloat16.

    ``rows`` are the kernel's by default.
    """
    m = rows or kernel.rows
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-3, 4, (size, K)).astype(np.float32) for size in (m, N))
    total = a.astype(np.float64) @ b.T.astype(np.float64)
    name = re.search(r"\.entry (\w+)", kernel.ptx)
    assert name is not None
    # Stages of both operands, the output's tile, two barriers a stage.
    stages, columns = _STAGES[kernel.columns], kernel.columns
    shared = stages * 2 * _DEPTH * (_ROWS + columns) + 2 * _ROWS * columns + 16 * stages
    wide = columns // _CONSUMERS
    return Case(
        name[1],
        kernel.ptx,
        (bfloat16(a), bfloat16(b)),
        bfloat16(total.astype(np.float32)),
        block=128 * (1 + _CONSUMERS),
        grid=(N // columns, -(-m // _ROWS)),
        cluster=kernel.cluster,
        shared=shared,
        passed=(
            _map(0, (K, m), (_DEPTH, _ROWS), Swizzle.B128),
            _map(1, (K, N), (_DEPTH, columns), Swizzle.B128),
            _map(-1, (N, m), (wide, _ROWS), Swizzle.B128 if wide == 64 else Swizzle.B64),
            *(Struct(bytes(8), ((0, array),)) for array in (0, 1, -1)),
            Struct(bytes(8)),
        ),
    )


def _map(array: int, dims: tuple[int, int], box: tuple[int, int], swizzle: Swizzle) -> Map:
    strides = (2 * dims[0],)
    descriptor = TiledDescriptor(DataType.BFLOAT16, 0, dims, strides, box, (1, 1), swizzle=swizzle)
    return Map(array, descriptor)
