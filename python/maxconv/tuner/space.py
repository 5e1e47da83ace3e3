"""The space of configurations of a kernel for one problem on one target.

It is the constraint model that rules generate from what the kernel says, and the kernel as judge.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .._dtypes import CPU_BYTES, DTYPE_BYTES, GPU_BYTES, HALF_DTYPES
from .._fields import DOT_KERNELS, Kernel
from .._problem import ConvProblem
from .._targets import BLACKWELL, HOPPER, TARGETS
from .families import cpu_dot, cpu_gemm, cpu_rows, cpu_winograd, sm90, sm100
from .kernels import Judged, KernelSpace, rules
from .model import Assignment, Model
from .rules import Rule, Workload, generate

__all__ = [
    "TARGET_NAMES",
    "Space",
    "TunerTarget",
    "configuration",
    "named",
    "open_space",
    "open_spaces",
]


@dataclass(frozen=True)
class TunerTarget:
    """A target that has spaces."""

    rules: Mapping[Kernel, Sequence[Rule]]
    """Of the kernels with a space; where one is asked for, the first that takes the problem."""
    dtype: str
    """Of activation and filter, if none is asked for."""
    dtypes: tuple[str, ...]
    """Those that may be."""
    architecture: str | None = None
    """Of a GPU."""

    @property
    def units(self) -> int:
        """A GPU's multiprocessors, or the threads that a CPU may run."""
        if self.architecture is not None:
            return TARGETS[self.architecture].multiprocessors
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores()


def _cores() -> int:
    return os.cpu_count() or 1


#: The most general of each type first.
_CPU: Mapping[Kernel, Sequence[Rule]] = {
    Kernel.IMPLICIT_GEMM: cpu_gemm.RULES,
    **dict.fromkeys((*DOT_KERNELS, Kernel.WIDENING), cpu_dot.RULES),
    **dict.fromkeys((Kernel.DEPTHWISE, Kernel.GROUPED, Kernel.FEW_FILTERS), cpu_rows.RULES),
    Kernel.WINOGRAD: cpu_winograd.RULES,
}

_FLOATS, _NARROW = tuple(DTYPE_BYTES), tuple(GPU_BYTES)

_TARGETS = {
    "cpu": TunerTarget(_CPU, "float32", tuple(CPU_BYTES)),
    "sm90": TunerTarget(
        dict.fromkeys((Kernel.SM90, Kernel.UNALIGNED), sm90.RULES),
        *("bfloat16", (*_FLOATS, *_NARROW), HOPPER),
    ),
    "sm100": TunerTarget({Kernel.SM100: sm100.RULES}, "bfloat16", (*_FLOATS, *_NARROW), BLACKWELL),
}

#: Targets that have spaces.
TARGET_NAMES = tuple(_TARGETS)


@dataclass(frozen=True)
class Space:
    """A space."""

    problem: ConvProblem
    target: str
    dtype: str
    out_dtype: str
    residual: bool
    units: int
    kernel: Kernel
    model: Model
    applied: tuple[Rule, ...]
    """The schedule rules that apply."""
    judge: KernelSpace

    def judged(self, assignments: Sequence[Assignment]) -> list[Judged]:
        """Returns what the kernel says of configurations."""
        return self.judge.judge(assignments)

    def __str__(self) -> str:
        rows = [f"  {rule.kind.value}: {rule.name}" for rule in self.applied]
        return "\n".join(
            (
                f"{self.problem}",
                f"{self.kernel.name.lower()} on {self.target}, {self.dtype} to {self.out_dtype}, "
                f"{self.units} {'threads' if self.target == 'cpu' else 'multiprocessors'}",
                f"{len(self.applied)} schedule rules",
                *rows,
                str(self.model),
            )
        )


def configuration(space: Space, assignment: Assignment) -> dict[str, int]:
    """Returns the fields of the kernel's configuration, of an assignment of all variables."""
    return {name: assignment[name] for name in space.judge.fields}


def open_space(
    problem: ConvProblem,
    target: str,
    *,
    dtype: str | None = None,
    out_dtype: str | None = None,
    residual: bool = False,
    units: int | None = None,
    kernel: Kernel | None = None,
) -> Space:
    """Returns the space of a kernel, or of the first of a target's that takes a problem.

    Args:
        problem: The convolution; all sizes known.
        target: One of ``TARGET_NAMES``.
        dtype: Of activation and filter; by default float32 on a CPU, otherwise bfloat16.
        out_dtype: Of the output; by default ``dtype``, or bfloat16 where that has 8 bits on a GPU.
        residual: Whether one is added to the output.
        units: Multiprocessors or threads; by default those of a product that has the architecture,
            or of this process.
        kernel: Whose; by default the first that takes the problem.

    Raises:
        ValueError: An argument is not allowed, or none of the kernels takes the problem; the
            message says why of each.
        LibraryError: The library that is asked cannot be built.
    """
    asked = _Asked.of(problem, target, dtype, out_dtype, residual, units)
    return next(asked.opened(_TARGETS[target].rules if kernel is None else (kernel,)))


def open_spaces(
    problem: ConvProblem,
    target: str,
    *,
    dtype: str | None = None,
    out_dtype: str | None = None,
    residual: bool = False,
    units: int | None = None,
) -> list[Space]:
    """Returns the spaces of all of a target's kernels that take a problem.

    Args:
        problem: As ``open_space`` takes it, like the others.
        target: The same.
        dtype: The same.
        out_dtype: The same.
        residual: The same.
        units: The same.

    Raises:
        ValueError: See ``open_space``.
        LibraryError: The same.
    """
    asked = _Asked.of(problem, target, dtype, out_dtype, residual, units)
    return list(asked.opened(_TARGETS[target].rules))


@dataclass(frozen=True)
class _Asked:
    """What spaces are opened for: a problem, its types and a device, checked."""

    problem: ConvProblem
    target: str
    dtype: str
    out_dtype: str
    residual: bool
    units: int

    @classmethod
    def of(
        cls,
        problem: ConvProblem,
        target: str,
        dtype: str | None,
        out_dtype: str | None,
        residual: bool,
        units: int | None,
    ) -> _Asked:
        """Returns it with what is left out by default.

        Raises:
            ValueError: The target, or its type, is not allowed.
        """
        if target not in _TARGETS:
            raise ValueError(f"target: {target!r} is not one of {', '.join(_TARGETS)}")
        described = _TARGETS[target]
        dtype = described.dtype if dtype is None else dtype
        if dtype not in described.dtypes:
            raise ValueError(f"dtype: {dtype!r} is not one of {', '.join(described.dtypes)}")
        if out_dtype is None:
            keeps = described.architecture is None or dtype in DTYPE_BYTES
            out_dtype = dtype if keeps else HALF_DTYPES[0]
        units = described.units if units is None else units
        return cls(problem, target, dtype, out_dtype, residual, units)

    def opened(self, kernels: Iterable[Kernel]) -> Iterator[Space]:
        """Yields the spaces of those kernels that take the problem.

        Raises:
            ValueError: None does; the message says why of each.
        """
        none, reasons = True, []
        for kernel in kernels:
            try:
                space = self._open(kernel)
            except ValueError as error:
                reasons.append(str(error))
                continue
            none = False
            yield space
        if none:
            raise ValueError("; ".join(dict.fromkeys(reasons)))

    def _open(self, kernel: Kernel) -> Space:
        """Returns a kernel's space.

        Raises:
            ValueError: The kernel does not take the problem, or has no space here; the message says
                why.
        """
        known = _TARGETS[self.target].rules
        if kernel not in known:
            names = ", ".join(each.name.lower() for each in known)
            raise ValueError(f"kernel: {kernel.name.lower()} is not one of {names}")
        types = (self.dtype, self.out_dtype)
        judge = rules().open(kernel, self.problem, *types, residual=self.residual, units=self.units)
        workload = Workload(self.target, judge.facts, self.residual)
        model, applied = generate(known[kernel], workload)
        _check_fields(model, judge)
        return Space(
            *(self.problem, self.target, *types, self.residual, self.units),
            *(kernel, model, (*applied,), judge),
        )


def _check_fields(model: Model, judge: KernelSpace) -> None:
    """Holds rules and kernel together: each tunable is a field, and each field a tunable."""
    if odd := set(model.tunables) ^ set(judge.fields):
        raise RuntimeError(f"fields: {', '.join(sorted(odd))} are not both of rules and kernel")


def named(values: Mapping[str, int]) -> str:
    """Returns a configuration on one line."""
    return ", ".join(f"{name} {value}" for name, value in values.items())
