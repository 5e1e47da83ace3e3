"""Kernels as Mojo compiles them give what they should; broken in one place, they are reported."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.emulated.convolution import (
    DIRECT,
    FILTERS,
    GATHERED,
    NARROW,
    SPLITS,
    Array,
    Gathered,
    Kernel,
    Operands,
    Upsampled,
    WithResidual,
    run,
)

from ptxemu import EmulatorError, Machine

Emitted = tuple[Path, list[Kernel]]


def test_vectors_are_added(emitted: Emitted, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(1000).astype(np.float32) for _ in range(2))
    machine = Machine(sms=3)
    total = machine.alloc(np.full(1000, np.nan, np.float32))
    module = machine.load((emitted[0] / "add.ptx").read_text())
    arguments = [machine.alloc(a), machine.alloc(b), total, 1000]
    module.launch(grid=8, block=128, args=arguments)
    assert np.array_equal(total.read(), a + b)


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_summed(emitted: Emitted, rng: np.random.Generator, seed: int) -> None:
    values = rng.integers(-100, 100, (5, 333)).astype(np.float32)
    machine = Machine(sms=2, seed=seed)
    totals = machine.alloc(np.full(5, np.nan, np.float32))
    module = machine.load((emitted[0] / "sums.ptx").read_text())
    module.launch(grid=5, block=128, args=[machine.alloc(values), totals, 333])
    assert np.array_equal(totals.read(), values.sum(axis=1))


@pytest.mark.parametrize("seed", range(2))
def test_hopper_kernel_convolves(emitted: Emitted, seed: int) -> None:
    operands = Operands.random(seed)
    for kernel in emitted[1]:
        assert np.array_equal(run(kernel, operands, seed), operands.expected())


@pytest.mark.parametrize("seed", range(2))
def test_hopper_kernel_keeps_filters(pointwise: list[Kernel], seed: int) -> None:
    operands = Operands.random(seed, taps=1)
    for kernel in pointwise:
        assert kernel.keeps_filters
        assert np.array_equal(run(kernel, operands, seed), operands.expected())


@pytest.mark.parametrize("seed", range(2))
def test_hopper_kernel_runs_in_relays(relayed: list[Kernel], seed: int) -> None:
    """A block with 7 of 9 tiles, and one with the others."""
    operands = Operands.random(seed, taps=1)
    for kernel in relayed:
        assert kernel.blocks == 1
        assert np.array_equal(run(kernel, operands, seed, relays=2), operands.expected())


@pytest.mark.parametrize("seed", range(2))
def test_hopper_kernel_reads_zeros_beside_narrow_channels(narrow: list[Kernel], seed: int) -> None:
    operands = Operands.random(seed, channels=NARROW)
    for kernel in narrow:
        assert np.array_equal(run(kernel, operands, seed), operands.expected())


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_hopper_kernel_stores_any_number_of_filters(
    odd: list[tuple[Kernel, int]], seed: int
) -> None:
    for kernel, filters in odd:
        assert kernel.rows
        operands = Operands.random(seed, odd=filters)
        assert np.array_equal(run(kernel, operands, seed), operands.expected())


def close(found: Array, operands: WithResidual) -> bool:
    """Whether outputs are exact, or behind SiLU within the rounding and tanh's error.

    A bfloat16 is within 2^-9 of a value, and SiLU of x is x/2 (1 + tanh(x/2)), with 2^-11 of tanh.
    """
    expected = operands.expected()
    if not operands.silu:
        return np.array_equal(found, expected)
    error = np.abs(operands.total()) / 2**12 + np.abs(expected) / 2**8
    return bool(np.all(np.abs(found - expected) <= error))


@pytest.mark.parametrize(
    "silu",
    [pytest.param(False, marks=pytest.mark.extended, id="alone"), pytest.param(True, id="silu")],
)
def test_hopper_kernel_adds_residuals_of_any_number_of_filters(
    odd_residual: dict[bool, list[tuple[Kernel, int]]], silu: bool
) -> None:
    seed = int(silu)
    for kernel, filters in odd_residual[silu]:
        operands = WithResidual.draw(seed, filters, silu)
        assert close(run(kernel, operands, seed), operands), (kernel.index, filters)


def gathers(kernel: Kernel, given: Gathered, seed: int) -> bool:
    """Whether a candidate whose threads load convolves rightly."""
    assert kernel.gathers
    operands = given.draw(seed)
    found = run(kernel, operands, seed)
    if isinstance(operands, WithResidual):
        return close(found, operands)
    return np.array_equal(found, operands.expected())


def test_hopper_kernel_gathers_any_number_of_channels(
    gathered: list[tuple[Kernel, Gathered]],
) -> None:
    """Each number of channels by another candidate."""
    count = len(GATHERED)
    usual = gathered[:: count + 1][:count]
    assert {given for _, given in usual} == set(GATHERED)
    for seed, (kernel, given) in enumerate(usual):
        assert gathers(kernel, given, seed), (kernel.index, given)


@pytest.mark.extended
def test_hopper_kernel_gathers_every_number_of_channels(
    gathered: list[tuple[Kernel, Gathered]],
) -> None:
    for seed, (kernel, given) in enumerate(gathered):
        assert gathers(kernel, given, seed), (kernel.index, given)


def test_hopper_kernel_shares_sums_of_gathered_rows(gathered_split: list[Kernel]) -> None:
    operands = Operands.random(0, channels=GATHERED[-1].channels)
    for kernel, count in zip(gathered_split, SPLITS, strict=True):
        assert kernel.cluster == count
        assert np.array_equal(run(kernel, operands, 0), operands.expected())


def test_hopper_kernel_copies_pieces_straight_into_its_rings(
    direct: list[tuple[Kernel, Gathered]],
) -> None:
    for seed, (kernel, given) in enumerate(direct):
        assert gathers(kernel, given, seed), (kernel.index, given)


def test_hopper_kernel_shares_sums_of_pieces(direct_split: list[Kernel]) -> None:
    operands = Operands.random(0, channels=DIRECT[-1].channels)
    for kernel, count in zip(direct_split, SPLITS, strict=True):
        assert kernel.cluster == count
        assert np.array_equal(run(kernel, operands, 0), operands.expected())


@pytest.mark.parametrize("ways", ["gathered", "direct"])
def test_what_lies_beside_a_gathered_row_is_not_read(
    ways: str, request: pytest.FixtureRequest
) -> None:
    """A pixel that is not finite spoils its own outputs and no others."""
    kernel, given = request.getfixturevalue(ways)[0]
    operands = given.draw(0)
    operands.activation[3, 4] = np.inf
    operands.filter[operands.filter == 0] = 1
    spoilt = np.zeros(operands.output_shape, bool)
    spoilt[2:5, 3:6] = True
    found = run(kernel, operands, 0)
    assert np.array_equal(np.isfinite(found), ~spoilt)
    with np.errstate(invalid="ignore"):
        expected = operands.expected()
    assert np.array_equal(found[~spoilt], expected[~spoilt])


def test_hopper_kernel_ends_tiles_within_a_subtile(ended: list[tuple[Kernel, bool]]) -> None:
    for seed, (kernel, fused) in enumerate(ended):
        convolves(kernel, 2 * kernel.end, seed, fused=fused)


def test_hopper_kernel_stores_small_subtiles(small: list[tuple[Kernel, bool]]) -> None:
    for seed, (kernel, fused) in enumerate(small):
        convolves(kernel, kernel.end, seed, fused=fused)


def convolves(kernel: Kernel, filters: int, seed: int, *, fused: bool) -> None:
    """Asserts the outputs of so many filters, with SiLU and a residual if anything is fused."""
    if fused:
        operands = WithResidual.draw(seed, filters, True)
        assert close(run(kernel, operands, seed), operands), kernel.index
    else:
        bare = Operands.random(seed, odd=filters)
        assert np.array_equal(run(kernel, bare, seed), bare.expected()), kernel.index


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_hopper_kernel_shares_sums(split: list[tuple[Kernel, int, bool]], seed: int) -> None:
    """Each block stores its own part, with what is fused behind it."""
    for kernel, count, fused in split:
        assert kernel.cluster == count
        convolves(kernel, FILTERS, seed, fused=fused)


@pytest.mark.parametrize(
    ("index", "wait", "counted"),
    [(20, 0, "the rings are free"), (20, 1, "shares"), (9, 1, "shares in memory of their own")],
)
def test_sums_that_are_not_waited_for_are_found_out(
    split: list[tuple[Kernel, int, bool]], index: int, wait: int, counted: str
) -> None:
    """One of the exchange's waits passes at once: another block's bytes may not have come."""
    kernel = next(k for k, _, fused in split if k.index == index and not fused)
    start = kernel.ptx.index("st.async")
    waits = list(re.finditer(r"mbarrier\.try_wait\.parity[^;]*;", kernel.ptx))
    before = [m for m in waits if m.start() < start]
    chosen = waits[len(before) - 1 + wait]
    passed = "setp.eq.u32 complete, 0, 0;"
    changed = kernel.ptx[: chosen.start()] + passed + kernel.ptx[chosen.end() :]
    operands = Operands.random(0, odd=FILTERS)
    with pytest.raises(EmulatorError):
        for seed in range(8):
            found = run(kernel, operands, seed, changed)
            assert np.array_equal(found, operands.expected()), counted


@pytest.mark.parametrize("seed", range(2))
def test_hopper_kernel_stores_an_enlarged_image(upsampled: Kernel, seed: int) -> None:
    operands = Upsampled.draw(seed)
    assert np.array_equal(run(upsampled, operands, seed), operands.expected())


def test_candidates_differ(emitted: Emitted) -> None:
    alone, pair = emitted[1]
    assert (alone.cluster, pair.cluster) == (1, 2)
    assert "multicast::cluster" in pair.ptx
    assert "multicast::cluster" not in alone.ptx


#: Runs of a broken kernel until one must have been reported.
SEEDS = range(8)


def replaced(pattern: str, new: str, count: int = 0) -> Callable[[str], str]:
    """Returns what replaces the first few, or all, matches; there must be one."""

    def change(text: str) -> str:
        changed, found = re.subn(pattern, new, text, count=count)
        assert found
        return changed

    return change


#: Name, change, and what the report says.
BROKEN: list[tuple[str, Callable[[str], str], str]] = [
    (
        "consumers do not release stages",
        replaced(r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", ""),
        "DeadlockError: .*mbarrier.try_wait.*waits for the mbarrier at byte .*2 of 2 arrivals",
    ),
    (
        "the bytes of activations are not announced",
        replaced(
            r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, (\[%r\d+\]), %r\d+;",
            r"mbarrier.arrive.shared::cta.b64 _, \1;",
        ),
        "RaceError: .*operand reads at shared memory .*copy may still be writing|"
        "RaceError: .*operand reads at shared memory .*nothing has written|"
        "BarrierError: .*arrivals too many",
    ),
    (
        "barriers are not published",
        replaced(r"fence\.mbarrier_init\.release\.cluster;", ""),
        "FenceError: .*no fence.mbarrier_init or fence.proxy.async",
    ),
    (
        "outputs are not fenced",
        replaced(r"fence\.proxy\.async\.shared::cta;", ""),
        "FenceError: .*a bulk copy reads byte",
    ),
    (
        "nobody waits for the multiply",
        replaced(r"wgmma\.wait_group\.sync\.aligned 0;", ""),
        "RaceError: .*before wgmma.wait_group|UnfinishedError",
    ),
    (
        "the multiply is not fenced",
        replaced(r"wgmma\.fence\.sync\.aligned;", ""),
        "FenceError: .*before any wgmma.fence",
    ),
    (
        "nobody waits for the stores",
        replaced(r"cp\.async\.bulk\.wait_group\.read \d;", ""),
        "RaceError: .*may still be reading|UnfinishedError: .*bulk copies",
    ),
    (
        "a barrier of the block is left out",
        replaced(r"bar\.sync %r\d+, 128;", ""),
        "RaceError: .*a bulk copy reads at|FenceError: .*a bulk copy reads byte",
    ),
    (
        "waits are left out",
        replaced(r"@complete bra DONE;\s*bra WAIT;", ""),
        "RaceError: .*operand reads at shared|RaceError: .*a copy writes|BarrierError: .*too many",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [entry[1:] for entry in BROKEN],
    ids=[entry[0].replace(" ", "-") for entry in BROKEN],
)
def test_a_broken_kernel_is_reported(
    emitted: Emitted, change: Callable[[str], str], message: str
) -> None:
    kernel, operands = emitted[1][0], Operands.random(0)
    reports = []
    for seed in SEEDS:
        try:
            run(kernel, operands, seed, change(kernel.ptx))
        except EmulatorError as error:
            reports.append(f"{type(error).__name__}: {error}")
            break
    assert reports
    assert re.match(message, reports[0], re.DOTALL), reports[0]
    assert re.search(r"line \d+ `", reports[0]) or "ended" in reports[0], reports[0]


def each_change(broken: list[tuple[str, Callable[[str], str]]]) -> pytest.MarkDecorator:
    """Runs a test for each change, by the name of what goes wrong."""
    names = [name.replace(" ", "-") for name, _ in broken]
    return pytest.mark.parametrize("change", [change for _, change in broken], ids=names)


#: What goes wrong in the stores of pixels that are no whole pieces of 16 bytes, and the change.
BROKEN_ROWS: list[tuple[str, Callable[[str], str]]] = [
    ("pieces are not shifted", replaced(r"prmt\.b32\.f4e\s+(\S+ \S+), \S+ \S+;", r"mov.b32 \1;")),
    ("ends are left out", replaced(r"@stored st\.global\.b16 [^;]*;", "")),
    ("ends are not limited", replaced(r"@stored (st\.global\.b16)", r"\1")),
    ("pieces are not limited", replaced(r"@stored (st\.global\.v4\.b32)", r"\1")),
    ("warps do not wait for others", replaced(r"bar\.sync %r\d+, 128;", "")),
]


@each_change(BROKEN_ROWS)
def test_broken_stores_of_rows_are_seen(
    odd: list[tuple[Kernel, int]], change: Callable[[str], str]
) -> None:
    for kernel, filters in of_71_filters(odd):
        assert_seen(kernel, Operands.random(0, odd=filters), change)


def of_71_filters(odd: list[tuple[Kernel, int]]) -> list[tuple[Kernel, int]]:
    """The launches of 71 filters: a tile and a part of another, no pixel like its neighbour."""
    return [launch for launch in odd if launch[1] == 71]


def assert_seen(kernel: Kernel, operands: Operands, change: Callable[[str], str]) -> None:
    """A broken kernel is reported, or stores something wrong, for one of ``SEEDS``."""
    changed, right = change(kernel.ptx), True
    for seed in SEEDS:
        try:
            right = np.array_equal(run(kernel, operands, seed, changed), operands.expected())
        except EmulatorError:
            right = False
        if not right:
            break
    assert not right, kernel.index


#: As ``BROKEN_ROWS``, in the loads of pixels and filters.
BROKEN_GATHER: list[tuple[str, Callable[[str], str]]] = [
    ("copies are not waited for", replaced(r"cp\.async\.wait_group 2;", "")),
    ("chunks beyond the row are read", replaced(r"(cp\.async\.cg[^;]*), 16, %r\d+;", r"\1, 16;")),
    ("chunks are not shifted", replaced(r"prmt\.b32\.f4e\s+(\S+ \S+), \S+ \S+;", r"mov.b32 \1;")),
    ("stages are not fenced", replaced(r"fence\.proxy\.async\.shared::cta;", "")),
]


@each_change(BROKEN_GATHER)
def test_broken_gathering_is_seen(
    gathered: list[tuple[Kernel, Gathered]], change: Callable[[str], str]
) -> None:
    kernel, given = gathered[0]
    assert_seen(kernel, given.draw(0), change)


#: As ``BROKEN_ROWS``, in the loads of residuals.
BROKEN_LOADS: list[tuple[str, Callable[[str], str]]] = [
    ("copies are not waited for", replaced(r"cp\.async\.wait_group 0;", "")),
    (
        "ends are left out",
        # The second copy of a step.
        replaced(r"(?s)(cp\.async\.cg[^;]*;.*?)cp\.async\.cg[^;]*;", r"\1", count=1),
    ),
    ("chunks beyond the pixel are read", replaced(r"(cp\.async\.cg[^;]*), 16, %r\d+;", r"\1, 16;")),
    (
        "filled buffers are not announced",
        replaced(r"(?s)(cp\.async\.wait_group 0;.*?)mbarrier\.arrive[^;]*;", r"\1", count=1),
    ),
]


@each_change(BROKEN_LOADS)
def test_broken_loads_of_residuals_are_seen(
    odd_residual: dict[bool, list[tuple[Kernel, int]]], change: Callable[[str], str]
) -> None:
    for kernel, filters in of_71_filters(odd_residual[False]):
        assert_seen(kernel, WithResidual.draw(0, filters, False), change)
