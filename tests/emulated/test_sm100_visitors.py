"""Epilogues of visitors on Blackwell: exact on the emulator, in every tensor that they leave, and
refused with a sentence where they cannot run.

Operands are small integers, so results must be exact; sums are compared with float64.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests import blackwell, ptx
from tests.blackwell import Kernel, Program, pairs
from tests.emulated.sm100_convolution import (
    BIAS,
    OUTPUT,
    SCALE,
    Case,
    Values,
    activated,
    convolution,
    decoded,
    encoded,
    tensor_maps,
    with_pointer,
)

from maxconv._problem import ConvProblem
from ptxemu import DeadlockError, EmulatorError, Machine, RaceError

#: What stands for the visitors' pointers (``tests/mojo/emit_sm100_visitors.mojo``).
WORKSPACE, SUMS, SQUARES, AUXILIARY = (n << 48 for n in (0x4444, 0x5555, 0x6666, 0x7777))
LEAKY_RELU = 3
BETA = 2.0
#: Rows and columns that a block of the second kernel adds up at a time.
ROWS_BLOCK = 32

#: Partial tiles of 128 pixels and filters, in several waves, and four steps for four blocks to
#: share; few products, so that sums of squares are exact in float32.
PARTIAL = ConvProblem(
    batch=3,
    input_size=(9, 11),
    channels=8,
    filters=200,
    filter_size=(2, 2),
    stride=(1, 1),
    dilation=(1, 1),
    pad_before=(1, 1),
    pad_after=(1, 1),
    groups=1,
)
#: Groups that end within a sub-tile.
GROUPS = ConvProblem(
    batch=2,
    input_size=(9, 9),
    channels=24,
    filters=144,
    filter_size=(2, 2),
    stride=(1, 1),
    dilation=(1, 1),
    pad_before=(1, 1),
    pad_after=(1, 1),
    groups=3,
)

REFUSALS = [
    "nothing",
    "sums over whole pixels need sub-tiles of 32 filters, one a thread of a warp; here 64",
    "nothing",
    "an auxiliary output of float32 passes through rows of up to 128 bytes; here 64 filters",
    "the epilogue's visitors need 16384 bytes of shared memory, and the configuration leaves 2048",
    "an auxiliary output of bfloat16 is stored 16 bytes at a time; here 20 output channels in each "
    "group",
    "bias: its address 264 is no multiple of 16 bytes",
    "scale: its address 260 is no multiple of 16 bytes",
    "num_epi_load_stages: 0 stages, but there is a residual",
    "nothing",
]


@dataclass(frozen=True)
class Chain:
    """What a chain of visitors leaves, beside the output."""

    scaled: bool = False
    activation: int = 0
    rounds: bool = False
    """Whether sums are of the rounded values."""
    sums: bool = False
    output: bool = True
    auxiliary: str = ""
    """The auxiliary output's type: the values in front of the activation."""


CHAINS = {
    "all-0": Chain(True, LEAKY_RELU, rounds=True, sums=True, auxiliary="float32"),
    "before-1": Chain(activation=LEAKY_RELU, auxiliary="bfloat16"),
    "sums-7": Chain(sums=True, output=False),
    "stored-0": Chain(sums=True),
}


@dataclass(frozen=True)
class Left:
    """Every tensor that a launch may leave."""

    output: Values
    auxiliary: Values
    sums: Values
    squares: Values

    def check(self, other: Left) -> None:
        """Compares two, element by element."""
        for name in ("output", "auxiliary", "sums", "squares"):
            np.testing.assert_array_equal(getattr(self, name), getattr(other, name), name)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program that describes launches."""
    return blackwell.program(tmp_path_factory, name=blackwell.VISITORS)


@pytest.fixture(scope="module")
def kernels(program: Program) -> dict[str, Kernel]:
    """Every chain's kernel, compiled."""
    return program.kernels()


def expected(kernel: Kernel, case: Case) -> Left:
    """What a chain leaves, in float64; NaN where it writes nothing."""
    chain = CHAINS[kernel.name]
    data = case.operands()
    values = convolution(case.problem, data["activation"], data["filter"])
    if chain.scaled:
        values = values * data["scale"]
    values = values + data["bias"]
    untouched = np.full(values.shape, np.nan)
    auxiliary = untouched
    if chain.auxiliary:
        auxiliary = decoded(encoded(values, chain.auxiliary), chain.auxiliary)
    values = activated(values, chain.activation)
    if kernel.residual:
        values = values + BETA * data["residual"]
    rounded = decoded(encoded(values, kernel.out), kernel.out)
    summed = rounded if chain.rounds else values
    output = untouched
    if chain.output:
        output = rounded
        if kernel.stores:
            index = np.indices(rounded.shape)
            added = sum((axis % 4 for axis in index[:-1]), start=index[-1] % 2)
            stored = decoded(encoded(rounded + added, kernel.out), kernel.out)
            output = np.moveaxis(stored, -1, 0)
    nothing = np.full(summed.shape[-1], np.nan)
    pixels = tuple(range(summed.ndim - 1))
    return Left(
        output,
        auxiliary,
        summed.sum(pixels) if chain.sums else nothing,
        (summed**2).sum(pixels) if chain.sums else nothing,
    )


def run(program: Program, kernel: Kernel, case: Case, seed: int, text: str = "") -> Left:
    """Runs a chain's kernel, or a changed text of it, and the one that adds up its rows."""
    chain = CHAINS[kernel.name]
    lines = (pairs(line) for line in program.run("launch", *case.arguments()))
    launch = next(line for line in lines if line["name"] == kernel.name)
    assert launch["refusal"] == "", launch["refusal"]
    machine = Machine("sm_100a", sms=2 * kernel.cluster, seed=seed)
    data = case.operands()
    shape = convolution(case.problem, data["activation"], data["filter"]).shape
    stored = (shape[-1], *shape[:-1]) if kernel.stores else shape
    poison = np.full(stored, np.nan)
    output = machine.alloc(encoded(poison, kernel.out))
    auxiliary_type = chain.auxiliary or "float32"
    auxiliary = machine.alloc(encoded(np.full(shape, np.nan), auxiliary_type))
    sums, squares = (machine.alloc(np.full(shape[-1], np.nan, np.float32)) for _ in range(2))
    # Rows that nobody writes would spoil the sums.
    workspace = machine.alloc(np.full(max(1, int(launch["workspace"])), np.nan, np.float32))
    parameters = bytes.fromhex(launch["params"])
    placed = {OUTPUT: output, BIAS: machine.alloc(encoded(data["bias"], kernel.bias))}
    if chain.scaled:
        placed[SCALE] = machine.alloc(data["scale"].astype(np.float32))
    if chain.auxiliary:
        placed[AUXILIARY] = auxiliary
    if chain.sums:
        placed |= {SUMS: sums, SQUARES: squares, WORKSPACE: workspace}
    for placeholder, pointer in placed.items():
        parameters = with_pointer(parameters, placeholder, pointer)
    maps = tensor_maps(
        kernel,
        launch,
        machine.alloc(encoded(data["activation"], kernel.act)),
        machine.alloc(encoded(data["filter"], kernel.filter)),
        output,
        machine.alloc(encoded(data["residual"], kernel.out)),
    )
    machine.load(text or kernel.ptx).launch(
        grid=int(launch["blocks"]),
        block=kernel.threads,
        cluster=kernel.cluster,
        shared_bytes=kernel.shared,
        args=[*maps, parameters, bytes.fromhex(launch["geometry"])],
        budget=40_000_000,
    )
    if chain.sums:
        rows = int(launch["reducers"])
        assert int(launch["workspace"]) == rows * 2 * shape[-1]
        machine.load((program.folder / "add_rows.ptx").read_text()).launch(
            grid=-(-2 * shape[-1] // ROWS_BLOCK),
            block=ROWS_BLOCK**2,
            shared_bytes=4 * ROWS_BLOCK**2,
            args=[
                workspace,
                sums,
                squares,
                *(np.uint32(n) for n in (rows, shape[-1], 2)),
            ],
            budget=20_000_000,
        )
    return Left(
        decoded(output.read(), kernel.out),
        decoded(auxiliary.read(), auxiliary_type),
        sums.read().astype(np.float64),
        squares.read().astype(np.float64),
    )


def test_every_chain_is_emitted(kernels: dict[str, Kernel]) -> None:
    assert set(kernels) == set(CHAINS)
    assert {kernel.group for kernel in kernels.values()} == {1, 2}
    assert {kernel.split_k for kernel in kernels.values()} == {1, 4}
    assert {kernel.name for kernel in kernels.values() if kernel.residual} == {"all-0"}


@pytest.mark.parametrize("size", ["partial", "groups"])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_are_exact(
    program: Program, kernels: dict[str, Kernel], name: str, size: str
) -> None:
    """Output, auxiliary output, and each filter's sum and sum of squares."""
    problem = {"partial": PARTIAL, "groups": GROUPS}[size]
    case = Case(problem, seed=len(name))
    run(program, kernels[name], case, len(size)).check(expected(kernels[name], case))


def test_sums_agree_whichever_block_stores_a_tile(
    program: Program, kernels: dict[str, Kernel]
) -> None:
    """Another schedule gives the same bits, of sums that float32 does not hold."""
    kernel = kernels["sums-7"]
    case = Inexact(GROUPS, seed=1)
    first, second = (run(program, kernel, case, seed) for seed in (0, 5))
    first.check(second)
    # They are rounded: agreement is no accident.
    exact = expected(kernel, case)
    np.testing.assert_allclose(first.squares, exact.squares, rtol=1e-5)
    assert (first.squares != exact.squares).any()


@dataclass(frozen=True)
class Inexact(Case):
    """Biases that squares in float32 do not hold."""

    def operands(self) -> dict[str, Values]:
        """Biases with all the bits of bfloat16."""
        drawn = super().operands()
        rng = np.random.default_rng(self.seed)
        bias = rng.uniform(1, 2, drawn["bias"].shape)
        drawn["bias"] = decoded(encoded(bias, "bfloat16"), "bfloat16")
        return drawn


#: What is taken out of a kernel, and what the emulator calls it.
FAULTS: list[tuple[str, str, str, type[EmulatorError]]] = [
    ("sums added up too early", "sums-7", r"bar\.sync (%r\d+), 128;", RaceError),
    ("the residual not waited for", "all-0", "", RaceError),
    (
        "the residual not released",
        "all-0",
        r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];",
        DeadlockError,
    ),
]


@pytest.mark.parametrize(
    ("name", "pattern", "error"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_a_faulty_epilogue_is_found_out(
    program: Program,
    kernels: dict[str, Kernel],
    name: str,
    pattern: str,
    error: type[EmulatorError],
) -> None:
    """What the other tests rely on."""
    text = kernels[name].ptx
    if pattern:
        changed, count = re.subn(pattern, "", text)
    else:
        # Of the waits, the last one in front of the residual's first chunk.
        waits = list(re.finditer(r"mbarrier\.try_wait\.parity[^;]*;", text))
        first = text.index("ld.shared.v4.b32")
        wait = max((m for m in waits if m.start() < first), key=lambda m: m.start())
        passed = "setp.eq.u32 complete, 0, 0;"
        changed, count = text[: wait.start()] + passed + text[wait.end() :], 1
    assert count
    with pytest.raises(error):
        for seed in range(4):
            run(program, kernels[name], Case(PARTIAL, seed=2), seed, changed)


def test_visitors_say_why_not(program: Program) -> None:
    assert program.run("refuse") == REFUSALS


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_chains_assemble_without_spills(kernels: dict[str, Kernel], tmp_path: Path) -> None:
    for kernel in kernels.values():
        text = tmp_path / "kernel.ptx"
        text.write_text(kernel.ptx)
        report = ptx.assemble(text, tmp_path, kernel.arch)
        assert ptx.NO_SPILLS in report, kernel.name
        used = re.search(r"Used (\d+) registers", report)
        assert used and int(used[1]) * kernel.threads <= ptx.REGISTERS
