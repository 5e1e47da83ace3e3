"""Our Hopper kernel whose blocks share loads; broken in one place, the emulator says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.emulated.convolution import Kernel, Operands, run
from tests.emulated.test_compiled import replaced

from ptxemu import EmulatorError, MemoryFaultError

Emitted = tuple[Path, list[Kernel]]

#: Runs of a broken kernel until one must have been reported.
SEEDS = range(4)


def _without_last_releases(text: str) -> str:
    """Without the producer's wait behind its last load, and without the order that the last barrier
    keeps where filters are kept.

    One more wait announces no bytes: the residuals' loader's for the first tile, whose parity is
    a constant.
    """
    text = text.replace("barrier.cluster.arrive.release;", "barrier.cluster.arrive.relaxed;")
    producers = text.index("mbarrier.arrive.expect_tx")
    start = text.rindex("mbarrier.try_wait", 0, producers)
    waits = re.split(r"(?=mbarrier\.try_wait)", text[start:])
    silent = [wait for wait in waits if wait and "mbarrier.arrive.expect_tx" not in wait]
    parities = [re.match(r"[^;]*, (%r\d+);", wait) for wait in silent]
    (last,) = (
        wait
        for wait, parity in zip(silent, parities, strict=True)
        if parity is not None and not re.search(rf"mov\.b32\s+{parity[1]}, 0;", text)
    )
    passed = re.sub(r"mbarrier\.try_wait[^;]*;", "setp.eq.u32 complete, 0, 0;", last)
    return text.replace(last, passed)


def _without_first_pair(text: str) -> str:
    """Without the cluster's barrier behind the initialization."""
    for pattern in (r"barrier\.cluster\.arrive[\w.]*;", r"barrier\.cluster\.wait[\w.]*;"):
        found = re.search(pattern, text)
        assert found is not None
        text = text[: found.start()] + text[found.end() :]
    return text


#: Name, change, and what the report says.
BROKEN: list[tuple[str, Callable[[str], str], str]] = [
    (
        "a peer's stages are not released",
        replaced(r"mbarrier\.arrive\.shared::cluster\.b64 _, \[remote\];", ""),
        r"DeadlockError: .*mbarrier\.try_wait.*waits for the mbarrier",
    ),
    (
        "blocks do not wait for each other's barriers",
        _without_first_pair,
        "BarrierError: .*no mbarrier is initialized at byte",
    ),
    (
        "more bytes are announced than come",
        replaced(
            r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[(%r\d+)\], ",
            r"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [\1], 16; \g<0>",
        ),
        "DeadlockError: .*16 bytes outstanding",
    ),
    (
        "a load goes to an address between its patterns",
        replaced(r"(cp\.async\.bulk\.tensor\.4d[\w.:]*) \[(%r\d+)\]", r"\1 [\2+64]"),
        r"IllegalInstructionError: line \d+ `cp\.async\.bulk\.tensor\.4d.*offset: \d+",
    ),
    (
        "a store leaves its shared memory",
        replaced(r"(cp\.async\.bulk\.tensor\.3d\.global[^]]*\], \[%r\d+)\]", r"\1+229376]"),
        "MemoryFaultError: .*out of bounds",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [entry[1:] for entry in BROKEN],
    ids=[entry[0].replace(" ", "-") for entry in BROKEN],
)
def test_a_broken_pair_is_reported(
    emitted: Emitted, change: Callable[[str], str], message: str
) -> None:
    kernel, operands = emitted[1][1], Operands.random(0)
    report = ""
    for seed in SEEDS:
        try:
            run(kernel, operands, seed, change(kernel.ptx))
        except EmulatorError as error:
            report = f"{type(error).__name__}: {error}"
            break
    assert re.match(message, report, re.DOTALL), report


def test_no_release_comes_to_a_block_that_has_ended(paired: list[tuple[Kernel, int]]) -> None:
    """Consumers with 2 and 3 tiles, with 1 and none; filters that are loaded anew, and kept."""
    assert [kernel.keeps_filters for kernel, _ in paired] == [False, True]
    for kernel, filters in paired:
        assert (kernel.cluster, kernel.rows) == (2, True)
        operands = Operands.random(0, taps=1, odd=filters)
        assert np.array_equal(run(kernel, operands, 0), operands.expected())


def test_releases_of_kept_filters_that_nothing_orders_are_reported(
    paired: list[tuple[Kernel, int]],
) -> None:
    """With a last barrier as where producers have waited."""
    kernel, filters = paired[1]
    relaxed = replaced(r"barrier\.cluster\.arrive\.release;", "barrier.cluster.arrive.relaxed;")
    with pytest.raises(MemoryFaultError, match=r"mbarrier.arrive comes to block .*has ended"):
        for seed in range(16):
            operands = Operands.random(0, taps=1, odd=filters)
            run(kernel, operands, seed, relaxed(kernel.ptx))


@pytest.mark.parametrize("shared", ["activations", "filters"])
def test_a_block_that_does_not_wait_for_the_last_releases_is_reported(
    pointwise: list[Kernel], paired: list[tuple[Kernel, int]], shared: str
) -> None:
    """The release must be the last thing that happens, which few seeds draw where TMA stores."""
    kernel = paired[0][0] if shared == "filters" else pointwise[1]
    operands = Operands.random(0, taps=1)
    with pytest.raises(MemoryFaultError, match=r"mbarrier.arrive comes to block .*has ended"):
        for seed in range(16):
            run(kernel, operands, seed, _without_last_releases(kernel.ptx))
