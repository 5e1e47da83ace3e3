"""Barriers of a block and mbarriers (PTX ISA 9.0, 9.7.13.1, 9.7.13.15)."""

from __future__ import annotations

import numpy as np

from .case import Family, words

FAMILY = Family("barriers")

_RNG = np.random.default_rng(41)
_THREADS = 128
_VALUES = [int(v) for v in _RNG.integers(0, 1 << 32, _THREADS, np.uint64)]

#: A value a thread in %v, its cell of shared memory in %s, its place in the output in %to.
_SETUP = (
    ".shared .align 16 .b8 room[1024]; .shared .align 8 .b64 bar[4]; .reg .b64 %at, %to, %state; "
    ".reg .b32 %s, %v, %w, %i, %x; .reg .pred %p, %q, %first; mul.wide.u32 %at, %t, 4; "
    "add.u64 %to, %out, %at; add.u64 %at, %in0, %at; ld.global.b32 %v, [%at]; mov.u32 %s, room; "
    "mad.lo.u32 %s, %t, 4, %s; shr.u32 %w, %t, 5; setp.eq.u32 %first, %t, 0; "
)


def _add(name: str, body: str, expected: list[int]) -> None:
    FAMILY.kernel(name, _SETUP + body, words(*expected), [words(*_VALUES)], block=_THREADS)


def _init(*counts: int) -> str:
    inits = " ".join(
        f"@%first mbarrier.init.shared::cta.b64 [bar+{8 * k}], {count};"
        for k, count in enumerate(counts)
    )
    return f"{inits} fence.mbarrier_init.release.cluster; bar.sync 0; "


def _wait(label: str, where: str, parity: str) -> str:
    return f"{label}: mbarrier.try_wait.parity.shared::cta.b64 %q, [{where}], {parity}; @!%q bra {label}; "


_add(
    "named",
    # Two halves turn their values round, each with its own barrier.
    "st.shared.b32 [%s], %v; setp.lt.u32 %p, %t, 64; @%p bra LOW; bar.sync 2, 64; bra MET; "
    "LOW: bar.sync 1, 64; MET: xor.b32 %x, %t, 63; mov.u32 %s, room; mad.lo.u32 %s, %x, 4, %s; "
    "ld.shared.b32 %v, [%s]; st.global.b32 [%to], %v;",
    [_VALUES[k ^ 63] for k in range(_THREADS)],
)
_add(
    "producer",
    # Warps 0 and 1 write and go on, 2 and 3 wait for all four.
    "setp.ge.u32 %p, %t, 64; @%p bra READ; st.shared.b32 [%s], %v; bar.arrive 3, 128; mov.b32 %v, 5; "
    "bra END; READ: bar.sync 3, 128; ld.shared.b32 %v, [%s+-256]; END: st.global.b32 [%to], %v;",
    [5 if k < 64 else _VALUES[k - 64] for k in range(_THREADS)],
)
_ODD = sum(v & 1 for v in _VALUES)
_add(
    "reductions",
    "and.b32 %x, %v, 1; setp.eq.u32 %p, %x, 1; bar.red.popc.u32 %i, 0, %p; bar.red.and.pred %q, 0, %p; "
    "selp.b32 %x, 1000, 0, %q; add.u32 %i, %i, %x; bar.red.or.pred %q, 0, %p; selp.b32 %x, 2000, 0, %q; "
    "add.u32 %i, %i, %x; st.global.b32 [%to], %i;",
    [_ODD + 2000] * _THREADS,
)
_add(
    "phases",
    # Every phase all values move on by one thread.
    _init(_THREADS, _THREADS) + "mov.b32 %i, 0; NEXT: st.shared.b32 [%s], %v; and.b32 %w, %i, 1; "
    "mbarrier.arrive.shared::cta.b64 _, [bar]; "
    + _wait("FIRST", "bar", "%w")
    + "add.u32 %x, %t, 1; and.b32 %x, %x, 127; mov.u32 %x, %x; .reg .b32 %y; mov.u32 %y, room; "
    "mad.lo.u32 %y, %x, 4, %y; ld.shared.b32 %v, [%y]; mbarrier.arrive.shared::cta.b64 %state, [bar+8]; "
    "SECOND: mbarrier.try_wait.shared::cta.b64 %q, [bar+8], %state; @!%q bra SECOND; "
    "add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 5; @%p bra NEXT; st.global.b32 [%to], %v;",
    [_VALUES[(k + 5) % _THREADS] for k in range(_THREADS)],
)
_add(
    "fresh",
    # A fresh barrier has completed parity 1 and not parity 0; a count arrives at once.
    _init(3) + "mbarrier.test_wait.parity.shared::cta.b64 %p, [bar], 1; selp.b32 %x, 1, 0, %p; "
    "mbarrier.test_wait.parity.shared::cta.b64 %p, [bar], 0; selp.b32 %i, 2, 0, %p; add.u32 %x, %x, %i; "
    "bar.sync 0; @%first mbarrier.arrive.shared::cta.b64 _, [bar], 3; bar.sync 0; "
    "mbarrier.test_wait.parity.shared::cta.b64 %p, [bar], 0; selp.b32 %i, 4, 0, %p; add.u32 %x, %x, %i; "
    "mbarrier.test_wait.parity.shared::cta.b64 %p, [bar], 1; selp.b32 %i, 8, 0, %p; add.u32 %x, %x, %i; "
    "st.global.b32 [%to], %x;",
    [5] * _THREADS,
)
_add(
    "transactions",
    # One arrival, and bytes that threads complete by hand.
    _init(1)
    + "@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024; st.shared.b32 [%s], %v; "
    "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 8; "
    + _wait("WAIT", "bar", "0")
    + "bar.sync 0; xor.b32 %x, %t, 127; mov.u32 %s, room; mad.lo.u32 %s, %x, 4, %s; "
    "ld.shared.b32 %v, [%s]; st.global.b32 [%to], %v;",
    _VALUES[::-1],
)
_add(
    "dropped",
    # 64 threads leave with their first arrival; the rest completes the second phase.
    _init(_THREADS) + "setp.lt.u32 %p, %t, 64; @%p mbarrier.arrive_drop.shared::cta.b64 _, [bar]; "
    "@%p bra END; mbarrier.arrive.shared::cta.b64 _, [bar]; "
    + _wait("FIRST", "bar", "0")
    + "mbarrier.arrive.shared::cta.b64 _, [bar]; "
    + _wait("SECOND", "bar", "1")
    + "add.u32 %v, %v, 1; END: st.global.b32 [%to], %v;",
    [v + (k >= 64) for k, v in enumerate(_VALUES)],
)
_add(
    "reused",
    _init(1) + "@%first mbarrier.inval.shared::cta.b64 [bar]; bar.sync 0; "
    "@%first mbarrier.init.shared::cta.b64 [bar], 128; bar.sync 0; mbarrier.arrive.shared::cta.b64 _, [bar]; "
    + _wait("WAIT", "bar", "0")
    + "st.global.b32 [%to], %v;",
    _VALUES,
)
