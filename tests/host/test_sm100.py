"""The Blackwell kernel compiles without a GPU, to the instructions and barriers that its
configuration predicts, and refuses configurations that cannot be built with a sentence.

Where ``ptxas`` is on the path (CUDA's toolkit), it also assembles: no spills, nothing in local
memory, no more registers than a block has.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests import blackwell, overlap, ptx
from tests.blackwell import Kernel

from maxconv import _inspect as inspect
from maxconv import _library as library
from maxconv._targets import BLACKWELL

SHARED_BYTES = 227 * 1024
TMEM_COLUMNS = 512
ROW_BYTES = 128
EPILOGUE_WARPS = 4
BYTES = {"float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}
KINDS = {"float16": "f16", "bfloat16": "f16", "float32": "tf32", "int8": "i8"}
#: Instructions of 32 bytes in a step of the sum.
MMA_STEPS = 4
#: Ranks of the activation's descriptor.
RANKS = (3, 4, 5)

REFUSALS = [
    "cta_group: 3 is not 1 or 2",
    "mma_shape: M 64 is not 128, 128 rows of each of 1 blocks' tensor memory",
    "mma_shape: N 264 is no multiple of 16 from 16 to 256",
    "mma_shape: N 144 is no multiple of 32 from 32 to 256",
    "mma_shape: K 32 is not 16, 32 bytes of bfloat16",
    "block_tile_shape: N 256 of 2 blocks is not the instruction's 256",
    "block_tile_shape: K 128 is not 64, a row of 128 bytes of bfloat16; longer steps are "
    "k_group_size",
    "output_tile_shape: N 48 does not divide the tile's 128",
    "output_tile_shape: 128 filters of bfloat16 are 256 bytes, not a swizzle's 32, 64 or 128",
    "cluster_shape: 3 blocks along M are no multiple of cta_group 2",
    "cluster_shape: 16 blocks are more than 8",
    "output_tile_shape: N 32 does not divide the tile's 48",
    "cluster_shape: 4 blocks along K, but a tile has 2 sub-tiles to store",
    "num_pipeline_stages: 7 are 1 groups of 7, not 2 to 16; 263168 bytes of shared memory with "
    "them, of 232448",
    "shared memory: 263168 bytes, but a block has 232448",
    "tensor memory: 3 accumulators of 256 columns are 768, but a block has 512",
    "num_output_stages: 1, but one is written while another is stored: at least 2",
    "stages: 141 barriers and 30 answers do not fit 1024 bytes",
    "types: no instruction multiplies bfloat16 by float16; two of bfloat16, float16, float32, int8 "
    "or uint8, or two of float8_e4m3fn and float8_e5m2, are",
    "types: output int8 is not bfloat16, float16 or float32",
    "Output: Placed has work of the graph compiler's behind it, which leaves no place for "
    "elementwise_lambda_fn or elementwise_compute_lambda_fn; an output in memory does",
]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="some"),
        pytest.param(("EVERY",), id="every", marks=pytest.mark.extended),
    ],
)
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Kernel]:
    """Every configuration's kernel, compiled; the extended tests do it with every kind of work."""
    return list(blackwell.program(tmp_path_factory, *request.param).kernels().values())


def _opcodes(text: str) -> Counter[str]:
    """How often each instruction of interest stands in a text, without its operands."""
    found = re.findall(
        r"\b((?:tcgen05|cp\.async\.bulk|clusterlaunchcontrol|mbarrier)\.[\w.:]+)", text
    )
    return Counter(found)


def _arrivals(text: str) -> Counter[int]:
    """What the barriers are initialized with."""
    registers = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[%r\d+\], (%r\d+);", text)
    return Counter(
        int(re.findall(rf"mov\.b32 \t{register}, (\d+);", text)[0]) for register in registers
    )


def test_every_configuration_can_be_built(kernels: list[Kernel]) -> None:
    assert {kernel.act for kernel in kernels} == {*KINDS, "float8_e4m3fn", "float8_e5m2"}
    assert {kernel.group for kernel in kernels} == {1, 2}
    assert {kernel.cluster for kernel in kernels} == {1, 2, 4}
    assert {kernel.split_k for kernel in kernels} == {1, 2, 4}
    for kernel in kernels:
        assert kernel.refusal == ""
        assert kernel.accumulators * kernel.tile_n <= TMEM_COLUMNS


def test_kernels_wait_for_earlier_ones(kernels: list[Kernel]) -> None:
    assert not [wrong for kernel in kernels for wrong in overlap.mistakes(kernel.ptx)]


def test_stages_fill_shared_memory_exactly(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        rows = kernel.tile_m // kernel.group + kernel.tile_n // kernel.group
        group = kernel.k_group * rows * ROW_BYTES
        buffers = (kernel.outputs + kernel.residuals) * (kernel.tile_m // kernel.group)
        tiles = kernel.stages // kernel.k_group * group + buffers * kernel.row
        assert kernel.shared == 1024 + tiles + _exchanged(kernel)
        assert kernel.row == kernel.subtile * BYTES[kernel.out]
        assert kernel.shared <= SHARED_BYTES < kernel.shared + group


def _exchanged(kernel: Kernel) -> int:
    """Bytes of the sums, in float32, that a block gets from those that share its tile."""
    subtiles = kernel.tile_n // kernel.subtile
    own = -(-subtiles // kernel.split_k)
    return (kernel.split_k - 1) * own * kernel.tile_m // kernel.group * kernel.subtile * 4


def test_arrivals_are_the_roles(kernels: list[Kernel]) -> None:
    """Counts that are written down nowhere else: from the clusters and who arrives."""
    for kernel in kernels:
        pairs = kernel.cluster_m // kernel.group
        assert kernel.input_releases == pairs + kernel.cluster_n - 1
        assert kernel.accum_releases == kernel.group * EPILOGUE_WARPS
        assert kernel.dealloc_arrivals == kernel.group * EPILOGUE_WARPS
        roles = 2 + kernel.residual + EPILOGUE_WARPS
        assert kernel.clc_releases == 1 + kernel.cluster * roles
        others = (kernel.split_k - 1) * EPILOGUE_WARPS
        assert kernel.exchange_arrivals == kernel.exchange_releases == others
        # Of inputs, accumulators, answers and residuals one arrival fills a stage; of the throttle
        # one empties it too.
        expected = Counter([kernel.dealloc_arrivals])
        expected.update([1, kernel.input_releases] * (kernel.stages // kernel.k_group))
        expected.update([1, kernel.accum_releases] * kernel.accumulators)
        expected.update([1, kernel.clc_releases, 1, 1] * kernel.answers)
        expected.update([1, EPILOGUE_WARPS] * _residual_stages(kernel))
        expected.update([others] * 2 * (kernel.split_k > 1))
        assert _arrivals(kernel.ptx) == expected, kernel.name


def _residual_stages(kernel: Kernel) -> int:
    return kernel.residuals if kernel.residual else 0


def test_instruction_descriptors(kernels: list[Kernel]) -> None:
    """PTX ISA, "Instruction descriptor": its tables of types, and where the sizes stand."""
    sums = {"int8": 2}
    types = {"float16": 0, "bfloat16": 1, "float32": 2, "float8_e4m3fn": 0, "float8_e5m2": 1}
    types["int8"] = 1
    for kernel in kernels:
        value = kernel.instruction
        assert (value >> 4) & 3 == sums.get(kernel.act, 1)
        assert (value >> 7) & 7 == types[kernel.act]
        assert (value >> 10) & 7 == types[kernel.filter]
        assert (value >> 17) & 0x3F == kernel.tile_n // 8
        assert (value >> 24) & 0x1F == kernel.tile_m // 16
        # Dense, not saturated, nothing negated, nothing transposed, no shift.
        fields = (3 << 4) | (7 << 7) | (7 << 10) | (0x3F << 17) | (0x1F << 24)
        assert value & ~fields == 0
    # What a known kernel has for bfloat16 and a tile of 128 by 128.
    known = [k.instruction for k in kernels if k.act == "bfloat16" and k.tile_m == k.tile_n == 128]
    assert set(known) == {0x8200490}


def test_ptx_holds_the_predicted_instructions(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        assert _opcodes(kernel.ptx) == _predicted(kernel), kernel.name
        assert f".maxntid {kernel.threads}\n" in kernel.ptx
        assert f".target {kernel.arch}\n" in kernel.ptx
        assert "local" not in re.sub(r"//.*", "", kernel.ptx), "an array in local memory"


def _predicted(kernel: Kernel) -> Counter[str]:
    """How often each instruction must stand in a kernel."""
    steps, group, cluster = kernel.k_group, f"cta_group::{kernel.group}", kernel.cluster
    kind = KINDS.get(kernel.act, "f8f6f4")
    pair = ".cta_group::2" if kernel.group == 2 else ""
    bulk, done = "cp.async.bulk", "mbarrier::complete_tx::bytes"
    along_n = ".multicast::cluster" if kernel.cluster_n > 1 else ""
    along_m = ".multicast::cluster" if kernel.cluster_m > kernel.group else ""
    commit = f"tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster"
    control = "clusterlaunchcontrol"
    everywhere = ".multicast::cluster::all" if cluster > 1 else ""
    roles = 4 + kernel.residual
    stored = 0 if kernel.stores else 1
    # Whether blocks exchange parts of sums: read to be sent, or to be stored.
    shared = int(kernel.split_k > 1)
    predicted = Counter(
        {
            f"tcgen05.mma.{group}.kind::{kind}": MMA_STEPS * steps,
            f"tcgen05.ld.sync.aligned.32x32b.x{kernel.subtile}.b32": 1 + shared,
            "tcgen05.wait::ld.sync.aligned": 1 + shared,
            f"tcgen05.alloc.{group}.sync.aligned.shared::cta.b32": 1,
            f"tcgen05.dealloc.{group}.sync.aligned.b32": 1,
            f"tcgen05.relinquish_alloc_permit.{group}.sync.aligned": 1,
            "tcgen05.fence::after_thread_sync": 3,
            "tcgen05.fence::before_thread_sync": 2,
            f"{bulk}.tensor.3d.global.shared::cta.bulk_group": stored,
            f"{bulk}.commit_group": stored,
            f"{bulk}.wait_group.read": 1 + stored,
            f"{control}.try_cancel.async.shared::cta.{done}{everywhere}.b128": 1,
            f"{control}.query_cancel.is_canceled.pred.b128": roles,
            f"{control}.query_cancel.get_first_ctaid::x.b32.b128": roles,
            "mbarrier.init.shared::cta.b64": 1
            + 2 * (kernel.stages // steps + kernel.accumulators + 2 * kernel.answers)
            + 2 * (_residual_stages(kernel) + shared),
            # The load role's throttle, its stage and its end; inputs, accumulators (by the MMA
            # thread and the epilogue), the throttle and a free answer, the end of tensor memory,
            # each role's answers.
            "mbarrier.try_wait.parity.shared::cta.b64": 9 + roles + 2 * kernel.residual,
            # The scheduler's own answer, a stage, the residual.
            "mbarrier.arrive.expect_tx.shared::cta.b64": 2 + kernel.residual,
            "mbarrier.arrive.expect_tx.shared::cluster.b64": cluster - 1,
        }
    )
    for rank in RANKS:
        predicted[f"{bulk}.tensor.{rank}d.shared::cluster.global.im2col.{done}{along_n}{pair}"] = (
            steps
        )
    predicted[f"{bulk}.tensor.3d.shared::cluster.global.{done}{along_m}{pair}"] += steps
    predicted[f"{bulk}.tensor.3d.shared::cluster.global.{done}"] += kernel.residual
    everyone = ".multicast::cluster.b64" if kernel.sharers > 1 else ".b64"
    predicted[commit + everyone] += 1
    predicted[commit + (".multicast::cluster.b64" if kernel.group == 2 else ".b64")] += 1
    # Released: an accumulator, tensor memory (both blocks of a pair), each role's answers.
    remote = Counter({True: 0, False: 2 + kernel.residual})
    remote[kernel.group == 2] += 1
    remote[kernel.group == 2] += kernel.group
    remote[cluster > 1] += roles
    predicted["mbarrier.arrive.release.cluster.shared::cluster.b64"] = 2 * shared
    predicted["mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"] = 2 * shared
    predicted["mbarrier.arrive.shared::cta.b64"] = remote[False]
    predicted["mbarrier.arrive.shared::cluster.b64"] = remote[True]
    return +predicted


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_kernels_assemble_without_spills(kernels: list[Kernel], tmp_path: Path) -> None:
    for kernel in kernels:
        text = tmp_path / "kernel.ptx"
        text.write_text(kernel.ptx)
        report = ptx.assemble(text, tmp_path, kernel.arch)
        assert ptx.NO_SPILLS in report
        assert "Potential Performance Loss" not in report, report
        used = re.search(r"Used (\d+) registers", report)
        assert used and int(used[1]) * kernel.threads <= ptx.REGISTERS


@pytest.mark.parametrize(
    ("pixels", "filters", "groups"), [(1, 8, 1), (1500, 264, 1), (5000, 1040, 1), (700, 1200, 3)]
)
def test_every_tile_is_somebody_s(
    tmp_path_factory: pytest.TempPathFactory, pixels: int, filters: int, groups: int
) -> None:
    """Each part of the output belongs to one block, or to the two halves of a pair's tile, or
    to blocks that share the steps of its sum."""
    program = blackwell.program(tmp_path_factory)
    ones = [1] * 12 + [0] * 6
    ones[2] = pixels
    # Seven steps of each sum.
    ones[5], ones[14], ones[17] = 7, 3, 3
    lines = program.run("tiles", *map(str, (1, 24 * groups, filters, groups, *ones)))
    found = Counter(tuple(map(int, line.split())) for line in lines)
    width = filters // groups
    for kernel in program.kernels().values():
        if not kernel.name.startswith("plain-"):
            continue
        mine = {key[1:]: count for key, count in found.items() if key[0] == int(kernel.name[6:])}
        rows = kernel.tile_m // kernel.group
        across = kernel.cluster_m * rows
        starts = range(0, -(-pixels // across) * across, rows)
        step = kernel.cluster_n * kernel.tile_n
        columns = range(0, -(-width // step) * step, kernel.tile_n)
        shares = [len(share) for share in np.array_split(np.arange(7), kernel.split_k)]
        expected = {
            (pixel, group * width + column, group, sum(shares[:part]), steps): 1
            for pixel in starts
            for group in range(groups)
            for column in columns
            for part, steps in enumerate(shares)
        }
        assert mine == expected, kernel.name


def test_configurations_that_mean_nothing_are_refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    assert blackwell.program(tmp_path_factory).run("refuse") == REFUSALS


@pytest.mark.parametrize("stages", [pytest.param(6, marks=pytest.mark.extended), 7])
def test_a_refused_configuration_does_not_compile(stages: int, tmp_path: Path) -> None:
    source = ptx.SOURCES / "misuse_sm100.mojo"
    built = library.run_mojo(
        "build",
        *("-I", str(ptx.import_folder()), "--target-accelerator", "sm_100a"),
        *("-D", f"STAGES={stages}", str(source), "-o", str(tmp_path / "misuse")),
    )
    assert (built.returncode == 0) == (stages == 6), built.stderr
    sentence = "shared memory: 263168 bytes, but a block has 232448"
    assert (sentence in built.stderr) == (stages == 7)


@pytest.mark.extended
def test_functions_reach_the_kernel_through_its_launcher(tmp_path: Path) -> None:
    """What they capture are parameters behind the others."""
    program = tmp_path / "lambdas"
    ptx.build("lambdas_sm100", program, "sm_100a")
    entries = [text[text.index(".entry") : text.index(".maxntid")] for text in ptx.held(program)]
    # Descriptors, the epilogue's and the problem: with and without a residual.
    assert sorted(entry.count(".param ") for entry in entries) == [5 + 2, 6 + 2]
    with pytest.raises(AssertionError, match="Output: Placed has work of the graph compiler's"):
        ptx.build("lambdas_sm100", program, "sm_100a", "FUSED")


def test_types_of_tensor_cores_are_inspected_there_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="float8_e5m2 has kernels for sm_90a and sm_100a alone"):
        inspect.emit(tmp_path, "sm_80", "float8_e5m2")


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["int8", "float8_e5m2"])
def test_they_are_inspected(dtype: str, tmp_path: Path) -> None:
    files = inspect.emit(tmp_path, BLACKWELL, dtype)
    blackwell = [file for file in files if file.stem.startswith("sm100-")]
    assert blackwell
    # Beside them int8 has those of any GPU.
    others = {file.stem.split("-")[0] for file in files} - {"sm100"}
    assert others == ({"sm80"} if dtype == "int8" else set())
    for file in blackwell:
        assert f"kind::{KINDS.get(dtype, 'f8f6f4')}" in file.read_text()
