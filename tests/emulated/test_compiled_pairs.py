"""Our Hopper kernel whose blocks share loads, broken in one place each: the emulator says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.emulated.convolution import Kernel, Operands, run
from tests.emulated.test_compiled import replaced

from ptxemu import EmulatorError

Emitted = tuple[Path, list[Kernel]]

#: Runs of a broken kernel until one must have been reported.
SEEDS = range(4)


def _without_last(text: str, pattern: str) -> str:
    *_, last = re.finditer(pattern, text)
    return text[: last.start()] + text[last.end() :]


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
        "blocks do not wait for each other at the end",
        lambda text: _without_last(text, r"barrier\.cluster\.wait[\w.]*;"),
        r"MemoryFaultError: line \d+ `mbarrier\.arrive.*which has ended",
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
