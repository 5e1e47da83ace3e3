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
from maxconv._fields import SEVERAL, CpuFeature, Kernel, Precision
from maxconv._machine import kernel_features
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

TILES = DOT_PRODUCTS & {Kernel.AMX}
VECTORS = DOT_PRODUCTS & {Kernel.AVX512_BF16}

#: And of bytes, where those of 512 and 256 bits are known to be there.
BYTE_VECTORS = {Kernel.AVX512_VNNI} if AVX512 else {Kernel.AVX_VNNI}

#: Storage types of input and output.
HALF, SINGLE = ("bfloat16", "bfloat16"), ("float32", "float32")
EIGHTH, WIDE = ("float8_e4m3fn", "bfloat16"), ("bfloat16", "float32")
BYTES = ("int8", "float32")

#: And the channels of a block, of interleaved tensors.
INTEGERS, WIDE_EIGHTH = ("int8", "bfloat16"), ("float8_e5m2", "bfloat16")
BLOCKS, HALF_BLOCKS = ("int8", "float32", 4), ("bfloat16", "bfloat16", 4)

#: Of layouts that a call tells.
ANY_BLOCKS, SINGLE_BLOCKS = ("bfloat16", "bfloat16", -1), ("float32", "float32", -1)

EXACT = Precision.FLOAT32

#: What the parameters stand for that a graph leaves out: those of the registered op.
DEFAULTS = {"kernel": -1, "exact": 0, "groups": 0, "channels": 0, "filters": 0, "taps": 0}
DEFAULTS |= {"stride": 0, "features": -1}


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


def features(*there: CpuFeature) -> dict[str, bool | int]:
    return {"features": sum(1 << feature for feature in there)}


WHOLE = known_to_cpu(problem(64, 64))
EVERYTHING = features(*CpuFeature)


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
    # What the CPU is known to lack is left out, and so is what stands behind a kernel that it is
    # known to have the instructions of, unless somebody asks for it.
    (HALF, CPU, WHOLE | features(), {FEW, WINOGRAD, GEMM}),
    (HALF, CPU, WHOLE | features(CpuFeature.AVX512_BF16), {FEW} | (VECTORS or {WINOGRAD, GEMM})),
    (HALF, CPU, WHOLE | features(CpuFeature.AMX_BF16), {FEW, WINOGRAD, GEMM} | TILES),
    (HALF, CPU, known_to_cpu(problem(64, 64), GEMM) | EVERYTHING, {GEMM}),
    (HALF, CPU, {"groups": 1} | EVERYTHING, {FEW, WINOGRAD, GEMM, Kernel.REFERENCE} | DOT_PRODUCTS),
    (HALF, CPU, known_to_cpu(problem(64, 64, 64)) | EVERYTHING, {DEPTHWISE}),
    (SINGLE, CPU, WHOLE | EVERYTHING, {FEW, POINTWISE, WINOGRAD, GEMM}),
    # The reference takes the integers whose sums others cannot hold.
    (BYTES, CPU, WHOLE | features(), {WINOGRAD, Kernel.WIDENING, Kernel.REFERENCE}),
    (
        BYTES,
        CPU,
        WHOLE | features(CpuFeature.AVX512_VNNI, CpuFeature.AVX_VNNI),
        BYTE_VECTORS | {Kernel.REFERENCE},
    ),
    (BYTES, CPU, known_to_cpu(problem(64, 64, 64)), {DEPTHWISE, Kernel.REFERENCE}),
    (BYTES, CPU, known_to_cpu(problem(64, 64, 64), GEMM), set()),
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
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the registry answers to ``CASES``, and the features of this CPU."""
    folder = tmp_path_factory.mktemp("needed")
    program, questions = folder / "needed", folder / "questions"
    asked = []
    for (dtype, out_dtype, *interleaved), capability, known, _ in CASES:
        numbers = [int((DEFAULTS | dict(known))[name]) for name in DEFAULTS]
        asked.append(
            " ".join(map(str, (dtype, out_dtype, capability, *(interleaved or [0]), *numbers)))
        )
    questions.write_text("\n".join(asked))
    source = str(ROOT / "tests" / "mojo" / "needed_kernels.mojo")
    built = library.run_mojo("build", "-I", str(ptx.import_folder()), source, "-o", str(program))
    assert built.returncode == 0, built.stderr
    finished = subprocess.run(
        [str(program), str(questions)], capture_output=True, text=True, check=True
    )
    return finished.stdout.splitlines()


@pytest.mark.parametrize("index", range(len(CASES)))
def test_what_is_compiled(lines: list[str], index: int) -> None:
    assert len(lines) == len(CASES) + 1
    assert set(lines[index].split()) == {kernel.name.lower() for kernel in CASES[index][3]}


def test_python_finds_the_features_that_kernels_find(lines: list[str]) -> None:
    # What kernels of this build cannot name, or the operating system permits to nobody, is missing.
    found, refused = int(lines[-1]), {CpuFeature.AMX_BF16, CpuFeature.AMX_FP16, CpuFeature.AMX_INT8}
    if not AVX512:
        refused |= {CpuFeature.AVX512_BF16, CpuFeature.AVX512_VNNI}
    missing = kernel_features() ^ found
    assert not missing & ~sum(1 << feature for feature in refused)


def test_the_environment_leaves_features_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kernel_features()
    for left in ("", "avx512_vnni", "amx_int8, avx512_vnni"):
        monkeypatch.setenv("MAXCONV_CPU_FEATURES", left)
        names = left.replace(",", " ").split()
        kept = sum(1 << feature for feature in CpuFeature if feature.linux_name in names)
        assert kernel_features() == whole & kept


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
