"""Problems for the Mojo programs that run every CPU kernel, and how they are fed."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tests import ptx

from maxconv import _library as library
from maxconv._fields import Activation, Layout
from maxconv._machine import cpu_features
from maxconv._problem import ConvProblem

#: Whether the CPU has it, which makes its register tile larger and its spaces of cuts smaller.
AVX512 = "avx512f" in cpu_features()

PROGRAMS = Path(__file__).parent.parent / "mojo"

MAX_PRODUCTS = 2_000_000
"""Multiply-adds of the largest problem that the exact sums are worth."""

EPILOGUES = (
    (False, False, Activation.NONE, Layout.KRSC),
    (True, True, Activation.RELU, Layout.RSCF),
    (True, False, Activation.CLAMP, Layout.FCRS),
    (True, True, Activation.CLAMP, Layout.RSCF),
    (False, True, Activation.RELU, Layout.KRSC),
)


FEATURES = {
    "amx": {"bfloat16": "amx_bf16", "float16": "amx_fp16", "int8": "amx_int8"},
    "mmla": {"bfloat16": "bf16", "int8": "i8mm"},
    "avx512_bf16": {"bfloat16": "avx512_bf16"},
    "avx512_vnni": {"int8": "avx512_vnni"},
    "avx_vnni": {"int8": "avx_vnni"},
}
"""Kernels of instructions that not every CPU has, in the registry's order, and the names of those
by the type that they multiply."""


def dot_kernels(*dtypes: str, features: set[str] | None = None) -> list[str]:
    """Returns which of them this CPU has, for any of the types, with these features left."""
    has = set(cpu_features())
    if features is not None:
        has &= features
    return [
        kernel
        for kernel, names in FEATURES.items()
        if any(name in has for dtype, name in names.items() if dtype in dtypes)
    ]


def build(source: str, folder: Path, *options: str) -> Path:
    """Compiles a program of ``tests/mojo`` against the package's own Mojo source."""
    program = folder / source
    include = str(ptx.import_folder())
    built = library.run_mojo(
        *("build", "-I", include, "-I", str(PROGRAMS), str(PROGRAMS / f"{source}.mojo")),
        *(*options, "-o", str(program)),
    )
    assert built.returncode == 0, built.stderr
    return program


class Checker:
    """The Mojo program, running, fed a problem at a time."""

    def __init__(self, program: Path, *, features: str | None = None, **options: Any) -> None:
        """Starts the program, with ``MAXCONV_CPU_FEATURES`` and more options of ``Popen``."""
        environment = dict(options.pop("env", os.environ))
        environment.pop("MAXCONV_CPU_FEATURES", None)
        if features is not None:
            environment["MAXCONV_CPU_FEATURES"] = features
        self.process = subprocess.Popen(
            [str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            **options,
        )

    def __enter__(self) -> Checker:
        """Returns the running program."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the program."""
        self.process.kill()
        self.process.wait()

    def check(self, name: str, line: str) -> set[str]:
        """Checks a problem; returns the kernels that ran, or fails with what was wrong."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{name} {line}\n")
        self.process.stdin.flush()
        said: list[str] = []
        while (answer := self.process.stdout.readline()) and not answer.startswith("DONE"):
            said.append(answer)
        assert answer == f"DONE {name} 0\n", f"{line}\n" + "".join(said) + answer
        return {answer.split()[2] for answer in said if answer.startswith("RAN")}


def products(problem: ConvProblem) -> int:
    """Multiply-adds."""
    return problem.flops // 2


def shrink(problem: ConvProblem) -> ConvProblem:
    """Returns the problem with its sizes halved until it is small, its geometry untouched."""
    while products(problem) > MAX_PRODUCTS:
        sizes = tuple(
            max((int(size) + 1) // 2, span + 1)
            for size, span in zip(problem.input_size, problem.span, strict=True)
        )
        if sizes != problem.input_size:
            problem = dataclasses.replace(problem, input_size=sizes)
            continue
        scale = 2 if problem.groups == 1 else 1
        groups = problem.groups if scale == 2 else problem.groups // 2
        channels, filters = (max(1, int(n) // 2) for n in (problem.channels, problem.filters))
        problem = dataclasses.replace(problem, channels=channels, filters=filters, groups=groups)
    return problem


def line_of(
    problem: ConvProblem, bias: bool, residual: bool, activation: Activation, layout: Layout
) -> str:
    """Returns the problem as the program reads it."""
    missing = 3 - problem.spatial_rank

    def three(values: tuple[object, ...], fill: int) -> tuple[object, ...]:
        return (*[fill] * missing, *values)

    numbers = itertools.chain(
        (problem.batch, problem.channels, problem.filters, problem.groups),
        three(problem.input_size, 1),
        three(problem.filter_size, 1),
        three(problem.stride, 1),
        three(problem.dilation, 1),
        three(problem.pad_before, 0),
        three(problem.pad_after, 0),
        (int(bias), int(residual), int(activation), int(layout)),
    )
    return " ".join(str(number) for number in numbers)


def check_everything(checker: Checker, name: str, problem: ConvProblem) -> set[str]:
    """Checks a problem with every epilogue; returns the kernels that ran."""
    ran = [checker.check(name, line_of(problem, *epilogue)) for epilogue in EPILOGUES]
    return set.intersection(*ran)


@st.composite
def small_problems(draw: st.DrawFn) -> ConvProblem:
    """Draws problems of every rank, mostly odd ones."""
    rank = draw(st.integers(1, 3))
    groups = draw(st.sampled_from((1, 1, 1, 2, 3, 4, 8, 16)))
    width = draw(st.sampled_from((1, 1, 2, 3, 4, 8, 16, 17)))
    group_filters = draw(st.sampled_from((width, width, 1, 5, 16, 33)))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    filter_size, dilation = each(1, 5 if rank < 3 else 3), each(1, 3)
    pad_before, pad_after = each(0, 4), each(0, 4)
    longest = {1: 80, 2: 24, 3: 7}[rank]
    sizes = tuple(
        max(draw(st.integers(1, longest)), (taps - 1) * step + 1 - before - after)
        for taps, step, before, after in zip(
            filter_size, dilation, pad_before, pad_after, strict=True
        )
    )
    return ConvProblem(
        batch=draw(st.integers(1, 3)),
        input_size=sizes,
        channels=groups * width,
        filters=groups * group_filters,
        filter_size=filter_size,
        stride=each(1, 3),
        dilation=dilation,
        pad_before=pad_before,
        pad_after=pad_after,
        groups=groups,
    )
