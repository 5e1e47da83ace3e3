"""MAX's own Blackwell convolution, compiled here, gives the right convolution; broken, a report.

It is evidence for the emulator that does not depend on this project's kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests import blackwell, ptx
from tests.emulated.max_sm100 import Kernel, Operands, Problem, expected, run
from tests.multiply_loop import Compiled

from ptxemu import EmulatorError, IllegalInstructionError, RaceError

Kernels = dict[str, Kernel]

ROW_BYTES = 128
SHARED_BYTES = 227 * 1024


#: MAX's kernels change with its version only.
pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """By name."""
    folder = tmp_path_factory.mktemp("max_sm100")
    ptx.build("emit_sm100_max", folder / "emit", "sm_100a")
    lines = ptx.run(folder / "emit", folder)
    return {kernel.name: kernel for kernel in (Kernel.of(line, folder) for line in lines)}


#: 2x2 tiles of 128 rows and columns, 576 products a sum; the last tiles stick out.
SQUARE = Problem(1, (12, 16), 64, 160)
#: Sums of several loads, images that end inside of a tile, no padding.
DEEP = Problem(3, (7, 9), 256, 72, filter_size=(1, 1), padding=(0, 0))
#: Channels that only the narrow swizzle can load; a padding for each dimension.
NARROW = Problem(2, (9, 8), 96, 136, filter_size=(3, 1), padding=(1, 0))
#: One pair of blocks has nothing to do.
TALL = Problem(1, (20, 20), 64, 136, filter_size=(2, 3), padding=(0, 2))
#: One tile, one load.
SMALL = Problem(1, (8, 16), 128, 64, filter_size=(1, 1), padding=(0, 0))

CASES = [
    ("one", SQUARE),
    ("one", DEEP),
    ("one-residual", SQUARE),
    ("one-narrow", NARROW),
    ("one-narrow-residual", NARROW),
    ("one-clustered", SQUARE),
    ("one-grouped", SQUARE),
    ("two", SQUARE),
    ("two", DEEP),
    ("two-narrow", NARROW),
    ("two-half", TALL),
    ("two-clustered", TALL),
]


def check(kernel: Kernel, problem: Problem, seed: int, beta: float = 1.0) -> None:
    operands = Operands.integers(problem, seed)
    # On few multiprocessors clusters take the work of others, on many each has its own.
    sms = int(np.prod(kernel.cluster)) * (1 + seed % 3)
    found = run(kernel, problem, operands, seed, sms, beta)
    assert np.array_equal(found, expected(kernel, problem, operands, beta))


@pytest.mark.parametrize(("name", "problem"), CASES)
def test_integers_are_exact(kernels: Kernels, name: str, problem: Problem) -> None:
    check(kernels[name], problem, seed=len(name) + problem.filters)


@pytest.mark.parametrize("seed", range(4))
def test_every_seed(kernels: Kernels, seed: int) -> None:
    check(kernels["one"], SMALL, seed)
    check(kernels["two"], SMALL, seed)
    check(kernels["one-residual"], SMALL, seed, beta=-2.0)


#: Sixteen tiles, and sums of nine loads each.
LARGE = Problem(2, (16, 24), 128, 320)


@pytest.mark.parametrize("seed", range(3, 13))
@pytest.mark.parametrize(("name", "problem"), CASES)
def test_more_seeds(kernels: Kernels, name: str, problem: Problem, seed: int) -> None:
    check(kernels[name], problem, seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["one", "one-residual", "two", "two-clustered", "two-half"])
def test_more_tiles(kernels: Kernels, name: str, seed: int) -> None:
    check(kernels[name], LARGE, seed)


def test_kernels_differ(kernels: Kernels) -> None:
    """The configurations are what their names say."""
    for name, kernel in kernels.items():
        assert ("cta_group::2" in kernel.ptx) == name.startswith("two")
        assert kernel.residual == name.endswith("residual")
        assert kernel.swizzle.span == (64 if "narrow" in name else 128)
        multicast = "commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast"
        assert (multicast in kernel.ptx) == (name == "one-clustered")
    assert kernels["two-clustered"].cluster == (4, 1)
    assert kernels["two-half"].is_half


def test_fractions_are_close(kernels: Kernels) -> None:
    """The sum of n products, rounded once an instruction of 16 of them, then to bfloat16.

    Every partial sum is at most the sum of the products' magnitudes; each of the n/16 roundings
    adds at most 2**-24 of it, bfloat16 2**-8 of the result.
    """
    operands = Operands.normal(SQUARE, 3)
    found = run(kernels["two"], SQUARE, operands, 3)
    exact = operands.convolution(SQUARE)
    magnitudes = Operands(abs(operands.activation), abs(operands.filter), operands.residual)
    bound = magnitudes.convolution(SQUARE) * (SQUARE.depth / 16) * 2.0**-24
    assert (abs(found - exact) <= bound + (abs(exact) + bound) * 2.0**-8).all()
    assert (found != exact.astype(np.float32)).any()


def without(pattern: str, new: str = "", count: int = 0) -> Callable[[str], str]:
    """Returns what replaces the first few, or all, matches; there must be one."""

    def change(text: str) -> str:
        changed, found = re.subn(pattern, new, text, count=count)
        assert found
        return changed

    return change


#: Four tiles of one load each for one block: tensor memory's two halves are used twice.
AGAIN = Problem(1, (16, 16), 128, 256, filter_size=(1, 1), padding=(0, 0))

#: bf16 x bf16 -> f32, M = N = 128 (PTX ISA 9.0, 9.7.16.4.2).
DESCRIPTOR = 0x8200490

FREE = r"(tcgen05\.dealloc[^;]*;)"

#: Name, change, problem, and what the report says.
BROKEN: list[tuple[str, Callable[[str], str], Problem, str]] = [
    (
        "multiplies are not committed",
        without(r"tcgen05\.commit\.[^;]*;"),
        SMALL,
        r"DeadlockError: .*waits for the mbarrier at byte \d+ .*1 of 1 arrivals and 0 bytes",
    ),
    (
        "nobody waits for the loads of tensor memory",
        without(r"tcgen05\.wait::ld\.sync\.aligned;"),
        AGAIN,
        r"RaceError: .*tcgen05.mma writes lane \d+, column \d+ of tensor memory of block .*: a "
        r"tcgen05 operation may still be reading it",
    ),
    (
        "tensor memory leaks",
        without(FREE),
        SMALL,
        r"UnfinishedError: .*ended with 512 columns of tensor memory at column 0, which warp 6 "
        r"allocated, not freed",
    ),
    (
        "tensor memory is freed twice",
        without(FREE, r"\1 \1"),
        SMALL,
        r"MemoryFaultError: .*dealloc of 512 columns at column 0 of .*; allocated: none",
    ),
    (
        "the permit is given up first",
        without("tcgen05.alloc", "tcgen05.relinquish_alloc_permit.cta_group::1; tcgen05.alloc"),
        SMALL,
        "IllegalInstructionError: .*tcgen05.alloc after tcgen05.relinquish_alloc_permit in block",
    ),
    (
        "half of tensor memory is allocated",
        without(r"(mov\.b32 \t%r\d+, )512;(\s*// begin inline asm\s*tcgen05)", r"\g<1>256;\2"),
        AGAIN,
        "MemoryFaultError: .*tcgen05.mma writes column 256 of .*, which is not allocated",
    ),
    (
        "a reserved bit of the descriptor",
        without(str(DESCRIPTOR), str(DESCRIPTOR | 1 << 23)),
        SMALL,
        "IllegalInstructionError: .*instruction descriptor 0x8a00490 .*a bit that must be 0 is not",
    ),
    (
        "too many rows in the descriptor",
        without(str(DESCRIPTOR), str(DESCRIPTOR + (8 << 24))),
        SMALL,
        "IllegalInstructionError: .*M is 256; 64 and 128 are allowed with .cta_group::1",
    ),
    (
        "an unknown type in the descriptor",
        without(str(DESCRIPTOR), str(DESCRIPTOR | 3 << 7)),
        SMALL,
        r"IllegalInstructionError: .*the type of A is 3; supported: 0 \(f16\), 1 \(bf16\)",
    ),
    (
        "too many columns in the descriptor",
        without(str(DESCRIPTOR), str(DESCRIPTOR + (16 << 17))),
        SMALL,
        "RaceError: .*tcgen05.mma's B reads at shared memory .*nothing has written it",
    ),
    (
        "two kinds of block groups",
        without("relinquish_alloc_permit.cta_group::1", "relinquish_alloc_permit.cta_group::2"),
        SMALL,
        "IllegalInstructionError: .*.cta_group::2 in a kernel that has used .cta_group::1",
    ),
    (
        "lanes of another warp",
        without(", 1048576;", f", {48 << 16};"),
        SMALL,
        r"MemoryFaultError: .*tcgen05.ld at lane 48; warp \d reaches lanes",
    ),
    (
        "the bytes of the next cluster's answer are not announced",
        without(r"@p mbarrier\.arrive\.expect_tx[^;]*;"),
        SMALL,
        "DeadlockError: .*1 of 1 arrivals and -16 bytes outstanding",
    ),
    (
        "waits are left out",
        without(r"@P1 bra DONE;\s*bra LAB_WAIT;"),
        SMALL,
        "RaceError",
    ),
    (
        "the epilogue does not wait for the allocation",
        without(r"bar\.sync \t1, 160;"),
        SMALL,
        r"RaceError: .*ld.shared.b32 .*nothing has written it",
    ),
    (
        "barriers are not published",
        without(r"fence\.mbarrier_init\.release\.cluster;"),
        SMALL,
        "FenceError: .*no fence.mbarrier_init or fence.proxy.async",
    ),
]

#: Runs of a broken kernel until one must have been reported.
SEEDS = range(4)


@pytest.mark.parametrize(
    ("change", "problem", "message"),
    [entry[1:] for entry in BROKEN],
    ids=[entry[0].replace(" ", "-") for entry in BROKEN],
)
def test_a_broken_kernel_is_reported(
    kernels: Kernels, change: Callable[[str], str], problem: Problem, message: str
) -> None:
    kernel, operands = kernels["one"], Operands.integers(problem, 0)
    text, report = change(kernel.ptx), ""
    for seed in SEEDS:
        try:
            run(kernel, problem, operands, seed, sms=1, ptx=text)
        except EmulatorError as error:
            report = f"{type(error).__name__}: {error}"
            assert error.place is not None or error.waiting
            break
    assert re.match(message, report, re.DOTALL), report


def test_registers_that_ptxas_waits_for(kernels: Kernels) -> None:
    """As the ISA has it, MAX's epilogue uses registers too early; the assembler prevents it."""
    operands = Operands.integers(SMALL, 0)
    with pytest.raises(RaceError, match=r"cvt.rn.bf16x2.f32.*before tcgen05.wait::ld"):
        run(kernels["one"], SMALL, operands, 0, waits=True)


#: A residual's load, and the register of its barrier's address.
SOURCE = r"cp\.async\.bulk\.tensor\.2d\.shared::cluster\.global\.tile\.mbarrier[^;]*\[(%r\d+)\];"


def with_own_barriers(text: str) -> str:
    """Leaves the block's bit in the addresses of the residual loads' barriers."""
    registers = set(re.findall(SOURCE, text))
    assert registers
    for register in registers:
        mask = rf"(and\.b32 \t{register}, %r\d+, )-(\d+);"
        text, count = re.subn(mask, lambda m: f"{m[1]}{(1 << 24) - int(m[2])};", text)
        assert count == 1
    return text


def test_a_load_that_tells_another_block(kernels: Kernels) -> None:
    """With two blocks MAX's residual loads clear the block's bit of their barriers' addresses.

    The ISA allows that with ``.cta_group::2``, which they do not have. An H200 ignores the bit.
    """
    operands = Operands.integers(SMALL, 0)
    message = r"to block \(1, 0, 0\) with an mbarrier of block \(0, 0, 0\) and no .cta_group::2"
    with pytest.raises(IllegalInstructionError, match=message):
        run(kernels["two-residual"], SMALL, operands, 0)


@pytest.mark.parametrize("problem", [SMALL, SQUARE])
def test_residual_of_two_blocks(kernels: Kernels, problem: Problem) -> None:
    """With their own blocks' barriers the same kernel is right."""
    kernel, operands = kernels["two-residual"], Operands.integers(problem, 1)
    found = run(kernel, problem, operands, 1, beta=-2.0, ptx=with_own_barriers(kernel.ptx))
    assert np.array_equal(found, expected(kernel, problem, operands, -2.0))


@pytest.mark.parametrize(("ours", "theirs"), [("plain-0", "one"), ("plain-1", "two")])
def test_ours_beside_it(
    kernels: Kernels,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    ours: str,
    theirs: str,
) -> None:
    """The same tiles of one block and of two: our loop has at most a quarter more instructions for
    each multiply than theirs, and our ring no fewer bytes."""
    own, other = blackwell.program(tmp_path_factory).kernels()[ours], kernels[theirs]
    assert (own.tile_m, own.tile_n) == (other.rows, other.columns)
    blocks = other.rows // other.block_rows
    mine = Compiled.of(
        f"ours, {ours}",
        own.ptx,
        tmp_path,
        threads=own.threads,
        shared=own.shared,
        stages=own.stages // own.k_group,
        step=own.k_group * ROW_BYTES * (own.tile_m + own.tile_n) // own.group,
    )
    max_s = Compiled.of(
        f"MAX's, {theirs}",
        other.ptx,
        tmp_path,
        threads=other.threads,
        shared=other.shared_bytes,
        stages=other.stages,
        step=2 * other.block_depth * (other.rows + other.columns) // blocks,
    )
    print(mine, max_s, sep="\n")
    assert own.group == blocks
    assert mine.beside <= 1.25 * max_s.beside
    assert mine.ring >= max_s.ring
    for compiled in (mine, max_s):
        assert compiled.ring < compiled.shared <= SHARED_BYTES
        assert compiled.registers * compiled.threads <= ptx.REGISTERS
