"""Tensor memory: allocation, loads and stores, and what must be waited for."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.ptxemu.tensor import TABLE_49, THREADS, Program, fragment, gathered, registers

from ptxemu import (
    DeadlockError,
    EmulatorError,
    IllegalInstructionError,
    MemoryFaultError,
    RaceError,
    UnfinishedError,
)

SHAPES = [(shape, count) for shape in TABLE_49 for count in (1, 2, 4, 8, 16)]
SHAPES += [("32x32b", 128), ("16x64b", 64), ("16x128b", 32)]


def numbered(count: int, first: int = 0) -> str:
    """Every word of the warp's lanes gets lane << 16 | column."""
    code = ["shl.b32 %x, %t, 16;"]
    code += [f"add.s32 %r{r}, %x, {first + r};" for r in range(count)]
    code += [
        f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [%a], {registers(count)};",
        "tcgen05.wait::st.sync.aligned;",
    ]
    return "\n".join(code)


def move(direction: str, shape: str, count: int, lane: int = 0, half: int = 0) -> str:
    """A load or store with its operands."""
    regs = registers(TABLE_49[shape] * count)
    suffix = f", {half}" if shape == "16x32bx2" else ""
    name = f"tcgen05.{direction}.sync.aligned.{shape}.x{count}.b32"
    address = f"[%a+{lane << 16}]"
    if direction == "ld":
        return f"{name} {regs}, {address}{suffix};"
    return f"{name} {address}{suffix}, {regs};"


@pytest.mark.parametrize(("shape", "count"), SHAPES)
def test_loads(shape: str, count: int) -> None:
    """Each register has the word of the lane and column that the layout names."""
    lanes, columns = fragment(shape, count)
    width = 1 << int(columns.max()).bit_length()
    half = count if shape == "16x32bx2" else 0
    for first in (0,) if shape == "32x32b" else (0, 16):
        body = numbered(max(1, width)) + move("ld", shape, count, first, half)
        body += "tcgen05.wait::ld.sync.aligned;"
        results = max(width, TABLE_49[shape] * count)
        found = Program(body, results, columns=256).run(seed=count)[0]
        warp = np.arange(THREADS) // 32 * 32
        expected = (lanes[np.arange(THREADS) % 32] + warp[:, None] + first) << 16
        expected = expected + columns[np.arange(THREADS) % 32]
        assert np.array_equal(found[:, : expected.shape[1]], expected)


@pytest.mark.parametrize(("shape", "count"), SHAPES)
def test_stores(shape: str, count: int) -> None:
    """What each thread stores is where the layout says; the rest stays."""
    size = TABLE_49[shape] * count
    lanes, columns = fragment(shape, count)
    width = 1 << int(columns.max()).bit_length()
    code = [numbered(width), "shl.b32 %x, %t, 8;"]
    code += [f"or.b32 %r{r}, %x, {0x80000000 | r};" for r in range(size)]
    code += [move("st", shape, count, 0, count), "tcgen05.wait::st.sync.aligned;"]
    code += [move("ld", "32x32b", max(1, width)), "tcgen05.wait::ld.sync.aligned;"]
    results = max(width, size)
    found = Program("\n".join(code), results, columns=256).run(seed=count)[0]
    thread = np.arange(THREADS, dtype=np.uint32)
    expected = (thread[:, None] << 16) + np.arange(width, dtype=np.uint32)
    stored = 0x80000000 | thread[:, None] << 8 | np.arange(size, dtype=np.uint32)
    for warp in range(4):
        expected[32 * warp + lanes, columns] = stored[32 * warp : 32 * warp + 32]
    assert np.array_equal(found[:, :width], expected)


def test_packed_columns() -> None:
    """Two columns' low halves come to one register, and go back (9.7.16.8.2)."""
    body = numbered(8) + "tcgen05.ld.sync.aligned.32x32b.x4.pack::16b.b32 {%r0,%r1,%r2,%r3}, [%a];"
    body += "tcgen05.wait::ld.sync.aligned;"
    found = Program(body, 8).run()[0]
    assert np.array_equal(found[:, :4], np.tile([0x10000, 0x30002, 0x50004, 0x70006], (128, 1)))
    body += "tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%a], {%r1, %r3};"
    body += "tcgen05.wait::st.sync.aligned;" + move("ld", "32x32b", 8)
    body += "tcgen05.wait::ld.sync.aligned;"
    found = Program(body, 8).run()[0]
    assert np.array_equal(found[:, :4], np.tile([2, 3, 6, 7], (128, 1)))
    lanes = np.arange(128)[:, None] << 16
    assert np.array_equal(found[:, 4:], lanes + np.arange(4, 8))


def test_halves_apart() -> None:
    """The second half of .16x32bx2 is as many columns further as the literal says."""
    body = numbered(64) + move("ld", "16x32bx2", 2, 16, 40) + "tcgen05.wait::ld.sync.aligned;"
    found = Program(body, 64).run()[0]
    t = np.arange(128)
    first = ((t // 32 * 32 + 16 + t % 16) << 16) + t % 32 // 16 * 40
    assert np.array_equal(found[:, 0], first)
    assert np.array_equal(found[:, 1], first + 1)


def test_an_address_may_name_the_warps_lanes() -> None:
    body = numbered(4) + "shl.b32 %x, %w, 21; add.s32 %x, %a, %x;"
    body += "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r0, %r1, %r2, %r3}, [%x];"
    body += "tcgen05.wait::ld.sync.aligned;"
    found = Program(body, 4).run()[0]
    assert np.array_equal(gathered(found, "32x32b", 4), found)
    assert np.array_equal(found[:, 3], (np.arange(128) << 16) + 3)


def test_allocations_lie_apart() -> None:
    """Addresses depend on the seed; what two allocations hold does not mix."""
    body = (
        numbered(32)
        + """mov.b32 %i, %a; @!%d bra.uni SECOND;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [where], 64;
    SECOND: bar.sync 0; ld.shared.b32 %a, [where];"""
        + numbered(32, 1000)
        + """mov.b32 %m0, %a; mov.b32 %a, %i;"""
        + move("ld", "32x32b", 32)
        + """tcgen05.wait::ld.sync.aligned; bar.sync 0; @!%d bra.uni FREED;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %m0, 64; FREED: sub.s32 %r31, %m0, %a;"""
    )
    distances = set()
    for seed in range(8):
        found = Program(body, 32).run(seed=seed)[0]
        assert np.array_equal(found[:, 0], np.arange(128) << 16)
        distances.add(int(found[0, 31].astype(np.int32)))
    assert len(distances) > 2
    assert all(abs(distance) >= 64 for distance in distances)


def test_an_allocation_waits_for_columns() -> None:
    """Two warps want all columns: one gets them after the other."""
    body = """bar.sync 0; setp.ge.u32 %e, %w, 2; @%e bra REST;
    .shared .align 4 .b32 own[2]; mov.b32 %m1, own; mad.lo.s32 %m1, %w, 4, %m1;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%m1], 256;
    bar.warp.sync -1; ld.shared.b32 %m2, [%m1];
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %m2, 256;
    REST: bar.sync 0; mov.b32 %r0, 5;"""
    for seed in range(4):
        assert (Program(body, 1, columns=512 - 256).run(seed=seed) == 5).all()


GOOD = numbered(8) + move("ld", "32x32b", 4) + "tcgen05.wait::ld.sync.aligned;"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [where], 128;"
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %a, 128;"


def outcome(old: str, new: str, blocks: int = 1) -> set[str]:
    """What several seeds report of a program that is changed in one place."""
    program = Program(GOOD, 8, blocks=blocks)
    assert program.text.count(old) == 1
    found = set()
    for seed in range(6):
        try:
            program.run(seed=seed, text=program.text.replace(old, new))
            found.add("")
        except EmulatorError as error:
            found.add(f"{type(error).__name__}: {error.message}")
            assert error.place is None or error.place.line > 0
    return found


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("tcgen05.wait::ld.sync.aligned;", "", RaceError, "before tcgen05.wait::ld"),
        ("tcgen05.wait::st.sync.aligned;", "", RaceError, "may still be writing it"),
        (FREE, "", UnfinishedError, "ended with 128 columns of tensor memory at column"),
        (FREE, FREE + FREE, MemoryFaultError, "tcgen05.dealloc of 128 columns .*allocated: none"),
        (FREE, FREE.replace("128", "64"), MemoryFaultError, "dealloc of 64 columns"),
        (ALLOC, ALLOC.replace("128", "100"), IllegalInstructionError, "alloc of 100 columns; pow"),
        (
            ALLOC,
            ALLOC.replace("128", "16"),
            IllegalInstructionError,
            "powers of two from 32 to 512",
        ),
        (ALLOC, ALLOC.replace("128", "32") + ALLOC, IllegalInstructionError, "may not grow"),
        (ALLOC, ALLOC.replace("128", "512") + ALLOC, DeadlockError, "waits for 128 columns"),
        (
            ALLOC,
            "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" + ALLOC,
            IllegalInstructionError,
            "tcgen05.alloc after tcgen05.relinquish_alloc_permit",
        ),
        (
            "[%a+0]",
            "[%a+8]",
            RaceError,
            "nothing has written it",
        ),
        (
            "[%a+0]",
            "[%a+512]",
            MemoryFaultError,
            "which is not allocated|512 columns",
        ),
        (
            "[%a+0]",
            "[%a+2097152]",
            MemoryFaultError,
            "tcgen05.ld at lane 32; warp . reaches lanes",
        ),
        (
            "[%a+0]",
            "[%a+1048576]",
            MemoryFaultError,
            "a multiple of 32 is allowed for this shape",
        ),
        (
            "tcgen05.ld.sync",
            "setp.lt.u32 %e, %l, 9; @%e tcgen05.ld.sync",
            IllegalInstructionError,
            "all threads of a warp must execute it together",
        ),
        (
            "tcgen05.ld.sync",
            "setp.lt.u32 %e, %l, 9; selp.b32 %a, %a, 4, %e; tcgen05.ld.sync",
            IllegalInstructionError,
            "different addresses",
        ),
    ],
)
def test_mistakes(old: str, new: str, error: type[EmulatorError], message: str) -> None:
    reports = outcome(old, new)
    name = error.__name__
    found = [text for text in reports if text.startswith(name)]
    assert found, reports
    assert all(re.search(message, text, re.DOTALL) for text in found), found


@pytest.mark.parametrize("seed", range(6))
def test_the_program_without_a_mistake(seed: int) -> None:
    found = Program(GOOD, 8).run(seed=seed)
    assert np.array_equal(found[0, :, 3], (np.arange(128) << 16) + 3)
