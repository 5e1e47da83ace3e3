"""The problems that configurations of the Hopper implicit GEMM are measured on.

All that the measuring program is told of a problem is decided where it is built, so that the GPU
machine needs nothing but Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ..._dtypes import DTYPE_BYTES
from ..._fields import Kernel, Layout, encode_scalars
from ..._library_files import Family
from ..._native import Call, GpuTarget, chooser
from ..._problem import ConvProblem
from ..._problems import load_networks, named_at, network_problems
from ..._targets import HOPPER, TARGETS
from ..asked import Asked

__all__ = ["DTYPE", "Measured", "hopper_problems", "those_of_hopper"]

#: Of activation, filter and output.
DTYPE = "bfloat16"

#: Bytes that all tensors of a problem may have together.
_MOST_NBYTES = 4 << 30


@dataclass(frozen=True)
class Measured:
    """A problem as the measuring program is told of it."""

    name: str
    problem: ConvProblem
    layers: int
    """How many layers of the networks have it."""
    line: str
    """By which the program makes its operands."""
    launches: int
    """Of a graph."""


def measured(name: str, problem: ConvProblem, layers: int = 1) -> Measured:
    """Returns a problem with what the program is told, as the benchmark has it."""
    # torch comes with the benchmark's modules.
    from ..._problems import NamedProblem
    from ...bench.device import launches
    from ...bench.gpu.operands import command, set_count

    named = NamedProblem(name, problem)
    sets = set_count(named, DTYPE)
    number = launches(problem.flops, problem.nbytes(DTYPE), sets, many=True)
    return Measured(name, problem, layers, command(named, DTYPE), number)


def hopper_problems(most: int, networks: Sequence[str] = ()) -> list[Measured]:
    """Returns the convolutions of networks that dispatch gives to the Hopper implicit GEMM.

    Args:
        most: How many at most: those of the most layers.
        networks: Their names; all, if empty.

    Raises:
        ValueError: A network is not listed, or ``most`` is not positive.
        LibraryError: The library that chooses kernels cannot be built.
    """
    if most < 1:
        raise ValueError(f"problems: {most} is not positive; at least 1 is needed")
    layers = _layers()
    found: dict[tuple[int, ...], tuple[str, ConvProblem, int]] = {}
    for named in network_problems(networks):
        problem, number = named.problem, layers[named.name]
        if _nbytes(problem) > _MOST_NBYTES or kernel_of(problem) is not Kernel.SM90:
            continue
        key = tuple(problem.numbers())
        name, _, others = found.get(key, (named.name, problem, 0))
        found[key] = (name, problem, others + number)
    chosen = sorted(found.values(), key=lambda entry: -entry[2])[:most]
    return [measured(*entry) for entry in chosen]


def those_of_hopper(asked: Sequence[Asked]) -> tuple[list[Measured], dict[str, str]]:
    """Returns convolutions that are asked for, and why others are left out, by name.

    What a person named is measured even where dispatch gives it to another kernel.

    Raises:
        ValueError: All are left out.
        LibraryError: The library that chooses kernels cannot be built.
    """
    found: list[Measured] = []
    left_out: dict[str, str] = {}
    for each in asked:
        if each.optional and _nbytes(each.problem) > _MOST_NBYTES:
            left_out[each.name] = f"its tensors have more than {_MOST_NBYTES >> 30} GiB"
        elif each.optional and (kernel := kernel_of(each.problem)) is not Kernel.SM90:
            left_out[each.name] = f"dispatch gives it to {kernel.name.lower()}"
        else:
            found.append(measured(each.name, each.problem, each.count))
    if not found:
        raise ValueError(f"all {len(left_out)} convolutions are left out: sm90 runs none of them")
    return found, left_out


def kernel_of(problem: ConvProblem) -> Kernel:
    """Returns the kernel that dispatch gives a problem to on Hopper."""
    target = TARGETS[HOPPER]
    place = GpuTarget(HOPPER, target.capability, target.multiprocessors)
    given = cast("tuple[int, ...]", problem.input_shape)
    made = cast("tuple[int, ...]", problem.output_shape)
    geometry = problem.geometry(filter_layout=Layout.KRSC)
    elements = int(problem.filters) * int(problem.group_channels) * int(problem.taps)
    call = Call.of(given, made, elements, geometry, encode_scalars())
    family = Family(DTYPE, DTYPE, DTYPE, scaled=False)
    return chooser(family).choose(call, place, aligned=True)


def _layers() -> Mapping[str, int]:
    """Returns how many layers have a problem, by its name with the batch."""
    layers: dict[str, int] = {}
    for network in load_networks().values():
        for batch in network.batches:
            for name, count in network.counts.items():
                key = named_at(name, batch)
                layers[key] = layers.get(key, 0) + count
    return layers


def _nbytes(problem: ConvProblem) -> int:
    """Returns the bytes of activation, filter, output and residual."""
    elements = math.prod(map(int, problem.input_shape))
    elements += 2 * math.prod(map(int, problem.output_shape))
    elements += int(problem.filters) * int(problem.group_channels) * int(problem.taps)
    return elements * DTYPE_BYTES[DTYPE]
