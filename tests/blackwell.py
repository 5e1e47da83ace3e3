"""The Blackwell kernels of ``tests/mojo/emit_sm100.mojo``, compiled once for all tests."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from tests import ptx

PROGRAM = "emit_sm100"
VISITORS = "emit_sm100_visitors"


@dataclass(frozen=True)
class Kernel:
    """A kernel and its configuration, as the Mojo side describes them."""

    name: str
    act: str
    filter: str
    out: str
    bias: str
    scaled: int
    residual: int
    computes: int
    stores: int
    lambda_computes: int
    lambda_stores: int
    captures: int
    registers: int
    threads: int
    shared: int
    group: int
    cluster_m: int
    cluster_n: int
    split_k: int
    tile_m: int
    tile_n: int
    k_group: int
    stages: int
    accumulators: int
    answers: int
    outputs: int
    residuals: int
    subtile: int
    row: int
    act_box: int
    filter_box: int
    swizzle: int
    input_releases: int
    accum_releases: int
    clc_releases: int
    exchange_arrivals: int
    exchange_releases: int
    dealloc_arrivals: int
    barriers: int
    instruction: int
    refusal: str
    ptx: str

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.sharers * self.split_k

    @property
    def sharers(self) -> int:
        """Those of them that share loads."""
        return self.cluster_m * self.cluster_n

    @property
    def has_lambda(self) -> bool:
        """Whether functions stand behind its epilogue."""
        return bool(self.lambda_computes or self.lambda_stores)

    @property
    def arch(self) -> str:
        """What it is compiled for."""
        return "sm_103a" if self.name == "sm103" else "sm_100a"


def pairs(line: str) -> dict[str, str]:
    """Reads ``key=value`` pairs, of which the last value, ``refusal``, may have blanks."""
    head, _, refusal = line.partition(" refusal=")
    return {**dict(pair.split("=", 1) for pair in head.split()), "refusal": refusal}


@dataclass(frozen=True)
class Program:
    """The compiled program, and the folder with the kernels' PTX."""

    path: Path
    folder: Path
    described: list[str]
    """What it prints of the kernels that it writes, a line each."""

    def kernels(self) -> dict[str, Kernel]:
        """Every kernel."""
        entries = map(pairs, self.described)
        return {entry["name"]: self._kernel(entry) for entry in entries}

    def _kernel(self, entry: dict[str, str]) -> Kernel:
        text = (self.folder / f"{entry['name']}.ptx").read_text()
        values = {
            field.name: int(entry[field.name]) if field.type == "int" else entry[field.name]
            for field in fields(Kernel)
            if field.name != "ptx"
        }
        return Kernel(**values, ptx=text)  # type: ignore[arg-type]  # fields by name

    def run(self, mode: str, *further: str) -> list[str]:
        """What it prints in a mode."""
        return ptx.run(self.path, self.folder, mode, *further)


def program(factory: pytest.TempPathFactory, *defined: str, name: str = PROGRAM) -> Program:
    """Compiles a program, in one of the processes that run the tests.

    Args:
        factory: Gives the folder.
        defined: ``EVERY``: with every kind of work on every configuration, which takes minutes.
        name: Of the program: that of an op's own epilogues, or ``VISITORS``.
    """

    def compiled(folder: Path) -> list[str]:
        path = folder / name
        ptx.build(name, path, "sm_100a", *defined)
        return ptx.run(path, folder, "compile")

    folder, described = ptx.once("-".join((name, *defined)), factory, compiled)
    return Program(folder / name, folder, described)
