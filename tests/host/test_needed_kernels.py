"""Which kernels an op is compiled with."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests import ptx
from tests.host.kernel_checks import AVX512

from maxconv import _library as library
from maxconv._fields import SEVERAL, Kernel, Precision
from maxconv._problem import ConvProblem
from maxconv._signature import known_problem, known_to_cpu

ROOT = Path(__file__).resolve().parents[2]

STEM, DIAGONAL, DEPTHWISE = Kernel.STEM, Kernel.DIAGONAL, Kernel.DEPTHWISE
CPU, HOPPER, BLACKWELL = 0, 90, 100
SM80, SM90, SM100 = Kernel.SM80, {Kernel.SM90}, {Kernel.SM100}
UNALIGNED = {Kernel.UNALIGNED}
GROUPED, GEMM = Kernel.GROUPED, Kernel.IMPLICIT_GEMM
GEMV, WINDOW = Kernel.GEMV, Kernel.WINDOW
FEW, POINTWISE, WINOGRAD = Kernel.FEW_FILTERS, Kernel.POINTWISE, Kernel.WINOGRAD

#: What multiplies dot products of bfloat16, in an op that this machine compiles.
DOT_PRODUCTS = {Kernel.AMX} if platform.machine() == "x86_64" else set()
DOT_PRODUCTS |= {Kernel.AVX512_BF16} if AVX512 else set()

#: Storage types of input and output.
HALF, SINGLE = ("bfloat16", "bfloat16"), ("float32", "float32")
EIGHTH, WIDE = ("float8_e4m3fn", "bfloat16"), ("bfloat16", "float32")

#: And the channels of a block, of interleaved tensors.
INTEGERS, WIDE_EIGHTH = ("int8", "bfloat16"), ("float8_e5m2", "bfloat16")
BLOCKS, HALF_BLOCKS = ("int8", "float32", 4), ("bfloat16", "bfloat16", 4)

#: Of layouts that a call tells.
ANY_BLOCKS, SINGLE_BLOCKS = ("bfloat16", "bfloat16", -1), ("float32", "float32", -1)

EXACT = Precision.FLOAT32

#: What the parameters stand for that a graph leaves out: those of the registered op.
DEFAULTS = {"kernel": -1, "exact": 0, "groups": 0, "channels": 0, "filters": 0, "taps": 0}
ORDER = (*DEFAULTS, "stride")


def problem(
    channels: int, filters: int, groups: int = 1, taps: tuple[int, int] = (3, 3)
) -> ConvProblem:
    return ConvProblem.from_parts(
        (1, 9, 9, channels),
        filters=filters,
        filter_size=taps,
        group_channels=channels // groups,
        groups=groups,
    )


def symbolic() -> ConvProblem:
    from max.graph import Dim

    return ConvProblem.from_parts(
        (1, 9, 9, Dim("c")), filters=64, filter_size=(3, 3), group_channels=Dim("c")
    )


#: What is asked: types (and the layout), compute capability, what a graph knows; and the answer.
Case = tuple[tuple[str, str] | tuple[str, str, int], int, Mapping[str, "bool | int"], set[Kernel]]

CASES: Sequence[Case] = [
    (HALF, HOPPER, known_problem(problem(64, 64)), {WINDOW, SM80} | SM90),
    (HALF, BLACKWELL, known_problem(problem(64, 64)), {SM80} | SM100),
    (HALF, 80, known_problem(problem(64, 64)), {SM80}),
    (SINGLE, HOPPER, known_problem(problem(64, 64)), {SM80, GEMM} | SM90),
    (SINGLE, HOPPER, known_problem(problem(64, 64), precision=EXACT), {GEMM}),
    (HALF, HOPPER, known_problem(problem(64, 64), precision=EXACT), {WINDOW, SM80} | SM90),
    (EIGHTH, HOPPER, known_problem(problem(64, 64)), {GEMM} | SM90),
    (WIDE, HOPPER, known_problem(problem(64, 64)), {WINDOW, SM80} | SM90),
    # Many channels fill the implicit GEMM's tiles with more than 32 filters.
    (HALF, HOPPER, known_problem(problem(72, 33)), {SM80} | UNALIGNED),
    # Pixels of multiples of 16 bytes.
    (HALF, HOPPER, known_problem(problem(12, 64)), {SM80} | UNALIGNED),
    (SINGLE, HOPPER, known_problem(problem(12, 64)), {SM80, GEMM} | SM90),
    (EIGHTH, HOPPER, known_problem(problem(24, 64)), {GEMM} | UNALIGNED),
    # Threads store any number of filters, unless the graph compiler fused something behind.
    (HALF, HOPPER, known_problem(problem(64, 4)), {WINDOW, FEW, SM80} | UNALIGNED),
    (HALF, BLACKWELL, known_problem(problem(64, 4)), {SM80}),
    (SINGLE, HOPPER, known_problem(problem(64, 4)), {WINDOW, FEW, SM80, GEMM} | SM90),
    # Few filters of whole chunks, and of more than one.
    (HALF, 80, known_problem(problem(64, 16)), {FEW, SM80}),
    (HALF, HOPPER, known_problem(problem(16, 33)), {WINDOW, SM80} | UNALIGNED),
    (HALF, HOPPER, known_problem(problem(8, 16)), {STEM, SM80} | SM90),
    (HALF, HOPPER, known_problem(problem(12, 16)), {SM80} | UNALIGNED),
    (HALF, HOPPER, known_problem(problem(64, 65, 1, (1, 1))), {GEMV, SM80} | UNALIGNED),
    (HALF, HOPPER, known_problem(problem(8, 64)), {STEM, SM80} | SM90),
    (HALF, HOPPER, known_problem(problem(3, 64)), {STEM, SM80}),
    (HALF, BLACKWELL, known_problem(problem(3, 64)), {SM80}),
    (SINGLE, HOPPER, known_problem(problem(3, 64)), {SM80, GEMM}),
    (WIDE, HOPPER, known_problem(problem(3, 64)), {SM80}),
    (HALF, HOPPER, known_problem(problem(64, 64, 64)), {DIAGONAL, DEPTHWISE, GROUPED}),
    (HALF, 80, known_problem(problem(64, 64, 64)), {DEPTHWISE, GROUPED}),
    (EIGHTH, HOPPER, known_problem(problem(64, 64, 64)), {DEPTHWISE, GROUPED}),
    # Eight filters a group: no group is as wide as it has channels.
    (HALF, HOPPER, known_problem(problem(64, 512, 64)), {DEPTHWISE, SM80}),
    # Groups whose taps are matrices on Hopper.
    (HALF, HOPPER, known_problem(problem(64, 64, 4)), {DIAGONAL, SM80} | SM90),
    (HALF, HOPPER, known_problem(problem(64, 64, 16)), {DIAGONAL, GROUPED}),
    (WIDE, HOPPER, known_problem(problem(64, 64, 4)), {SM80} | SM90),
    (SINGLE, HOPPER, known_problem(problem(64, 64, 4)), {SM80, GEMM} | SM90),
    (HALF, HOPPER, known_problem(problem(64, 64, 4, (1, 1))), {SM80} | SM90),
    (HALF, HOPPER, known_problem(problem(128, 128, 2)), {SM80} | SM90),
    (HALF, HOPPER, known_problem(problem(64, 24, 4)), {GROUPED}),
    # One tap: there may be few pixels.
    (HALF, HOPPER, known_problem(problem(64, 64, 1, (1, 1))), {GEMV, SM80} | SM90),
    (HALF, HOPPER, known_problem(problem(64, 32, 1, (1, 1))), {GEMV, WINDOW, SM80} | SM90),
    (SINGLE, HOPPER, known_problem(problem(64, 32, 1, (1, 1))), {GEMV, SM80, GEMM} | SM90),
    (SINGLE, 80, known_problem(problem(10, 240, 1, (1, 1))), {GEMV, SM80, GEMM}),
    (EIGHTH, BLACKWELL, known_problem(problem(10, 240, 1, (1, 1))), {GEMV, GEMM}),
    (INTEGERS, BLACKWELL, known_problem(problem(64, 64, 1, (1, 1))), {GEMV, SM80} | SM100),
    # Types that the multiply of every GPU takes, and does not.
    (INTEGERS, BLACKWELL, known_problem(problem(64, 64)), {SM80} | SM100),
    (WIDE_EIGHTH, BLACKWELL, known_problem(problem(64, 64)), {GEMM} | SM100),
    (INTEGERS, HOPPER, known_problem(problem(64, 64)), {SM80} | SM90),
    (WIDE_EIGHTH, HOPPER, known_problem(problem(64, 64)), {GEMM} | SM90),
    (INTEGERS, 80, known_problem(problem(64, 64)), {SM80}),
    (INTEGERS, HOPPER, known_problem(problem(64, 64, 64)), {DEPTHWISE, GROUPED}),
    # Refused by `check_type` when it is called.
    (WIDE_EIGHTH, 80, known_problem(problem(64, 64)), {GEMM}),
    # No other kernel takes the interleaved layout, and the one that does takes none but this.
    (BLOCKS, 61, {}, {Kernel.DP4A}),
    (BLOCKS, 60, {}, set()),
    (BLOCKS, HOPPER, known_problem(problem(64, 64)), {Kernel.DP4A}),
    (BLOCKS, CPU, {}, set()),
    (HALF_BLOCKS, HOPPER, {}, set()),
    # A CPU's dot products take every layout.
    (ANY_BLOCKS, CPU, {"kernel": 0, "groups": 1}, DOT_PRODUCTS),
    (ANY_BLOCKS, CPU, {"kernel": int(Kernel.REFERENCE), "groups": 1}, {Kernel.REFERENCE}),
    (SINGLE_BLOCKS, CPU, {"kernel": 0, "groups": 1}, set()),
    (ANY_BLOCKS, HOPPER, {}, set()),
    # One by name, which nothing else could be chosen for.
    (HALF, HOPPER, known_problem(problem(64, 64), Kernel.REFERENCE), {Kernel.REFERENCE}),
    (HALF, HOPPER, known_problem(problem(64, 64), GROUPED), {GROUPED}),
    # What is not known until the call may need any.
    (
        HALF,
        HOPPER,
        known_problem(symbolic()),
        {STEM, DEPTHWISE, DIAGONAL, WINDOW, SM80} | SM90 | UNALIGNED,
    ),
    (
        HALF,
        HOPPER,
        {"kernel": int(Kernel.AUTO)},
        {GEMV, STEM, DEPTHWISE, DIAGONAL, WINDOW, FEW, GROUPED, SM80} | SM90 | UNALIGNED,
    ),
    (
        HALF,
        HOPPER,
        {},
        {GEMV, STEM, DEPTHWISE, DIAGONAL, WINDOW, FEW, GROUPED, SM80, GEMM, Kernel.REFERENCE}
        | SM90
        | UNALIGNED,
    ),
    # A CPU's op tells three classes of problems apart.
    (SINGLE, CPU, known_to_cpu(problem(64, 64)), {FEW, POINTWISE, WINOGRAD, GEMM}),
    (HALF, CPU, known_to_cpu(problem(64, 64)), {FEW, WINOGRAD, GEMM} | DOT_PRODUCTS),
    (HALF, CPU, known_to_cpu(problem(64, 64, 64)), {DEPTHWISE}),
    # Neither 2 x 2 nor 3 x 3 taps, or no stride of 1.
    (SINGLE, CPU, {"kernel": 0, "groups": 1, "taps": 5, "stride": 1}, {FEW, GEMM}),
    (SINGLE, CPU, {"kernel": 0, "groups": 1, "taps": 3, "stride": 2}, {FEW, GEMM}),
    (SINGLE, CPU, {"kernel": 0, "groups": 1, "taps": 3, "stride": 1}, {FEW, WINOGRAD, GEMM}),
    (SINGLE, CPU, {"kernel": 0, "groups": 1, "taps": 2, "stride": 1}, {FEW, WINOGRAD, GEMM}),
    (SINGLE, CPU, known_to_cpu(problem(64, 64, 64)), {DEPTHWISE}),
    (SINGLE, CPU, known_to_cpu(problem(1, 1)), {DEPTHWISE}),
    (SINGLE, CPU, known_to_cpu(problem(64, 64, 16)), {GROUPED, POINTWISE, WINOGRAD, GEMM}),
    (SINGLE, CPU, known_to_cpu(problem(64, 128, 64)), {GROUPED, POINTWISE, WINOGRAD, GEMM}),
    (SINGLE, CPU, known_to_cpu(problem(64, 64), Kernel.REFERENCE), {Kernel.REFERENCE}),
    (SINGLE, CPU, known_to_cpu(problem(64, 64, 64), GEMM), {GEMM}),
    (
        SINGLE,
        CPU,
        known_to_cpu(symbolic()),
        {DEPTHWISE, GROUPED, FEW, POINTWISE, WINOGRAD, GEMM},
    ),
    # On a GPU too, one fact less compiles no kernel less.
    (
        HALF,
        HOPPER,
        {"kernel": 0, "groups": SEVERAL, "channels": SEVERAL, "filters": SEVERAL},
        {DIAGONAL, GROUPED, SM80} | SM90,
    ),
    (
        HALF,
        HOPPER,
        {"kernel": 0, "groups": SEVERAL, "channels": 16, "filters": 16},
        {DIAGONAL, SM80} | SM90,
    ),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[set[str]]:
    """What the registry answers to ``CASES``."""
    folder = tmp_path_factory.mktemp("needed")
    program, questions = folder / "needed", folder / "questions"
    lines = []
    for (dtype, out_dtype, *interleaved), capability, known, _ in CASES:
        numbers = [int((DEFAULTS | {"stride": 0} | dict(known))[name]) for name in ORDER]
        lines.append(
            " ".join(map(str, (dtype, out_dtype, capability, *(interleaved or [0]), *numbers)))
        )
    questions.write_text("\n".join(lines))
    source = str(ROOT / "tests" / "mojo" / "needed_kernels.mojo")
    built = library.run_mojo("build", "-I", str(ptx.import_folder()), source, "-o", str(program))
    assert built.returncode == 0, built.stderr
    finished = subprocess.run(
        [str(program), str(questions)], capture_output=True, text=True, check=True
    )
    return [set(line.split()) for line in finished.stdout.splitlines()]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_what_is_compiled(answers: list[set[str]], index: int) -> None:
    assert len(answers) == len(CASES)
    assert answers[index] == {kernel.name.lower() for kernel in CASES[index][3]}


def test_a_graph_says_what_it_knows() -> None:
    known = known_problem(problem(64, 128, 4, (3, 5)), Kernel.SM90, Precision.FLOAT32)
    assert known == {
        "kernel": int(Kernel.SM90),
        "exact": True,
        "groups": 4,
        "channels": 16,
        "filters": 32,
        "taps": 5,
        "stride": 1,
    }
    assert "channels" not in known_problem(symbolic())


def test_a_cpus_ops_are_few() -> None:
    wide, narrow = known_to_cpu(problem(64, 64)), known_to_cpu(problem(3, 8, 1, (1, 1)))
    assert wide == narrow == {"kernel": 0, "groups": 1}
    assert known_to_cpu(problem(32, 32, 4)) == known_to_cpu(problem(64, 128, 2))
    assert known_to_cpu(problem(32, 32, 4))["channels"] == SEVERAL
    assert known_to_cpu(problem(32, 32, 32)) == known_to_cpu(problem(8, 8, 8))
    assert known_to_cpu(symbolic()) == {"kernel": 0}
