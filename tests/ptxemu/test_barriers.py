"""Barriers of all kinds, and what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ptxemu.warps import entry

from ptxemu import (
    BarrierError,
    DeadlockError,
    EmulatorError,
    IllegalInstructionError,
    Machine,
    MemoryFaultError,
    UnfinishedError,
)

#: Names that every body has: the thread, its warp, a word of shared memory for each thread.
SETUP = """
.shared .align 8 .b8 room[1024]; .shared .align 8 .b64 bar;
.reg .b32 %t, %w, %at, %next, %x, %y; .reg .b64 %p, %s; .reg .pred %c, %d;
ld.param.u64 %p, [out]; mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; mov.b32 %at, room;
shl.b32 %x, %t, 2; add.s32 %at, %at, %x; mad.wide.u32 %p, %t, 4, %p;
"""


def run(body: str, threads: int = 128, seed: int = 0, cluster: int = 1) -> np.ndarray:
    """Runs threads that each store one number."""
    machine = Machine(sms=cluster, seed=seed)
    out = machine.alloc(np.zeros(threads, np.int32))
    module = machine.load(entry(SETUP + body + "\nret;", ["u64 out"]))
    module.launch(grid=cluster, cluster=cluster, block=threads, args=[out], budget=200_000)
    return out.read()


def fails(error: type[EmulatorError], match: str, body: str, threads: int = 128) -> None:
    with pytest.raises(error, match=match):
        run(body, threads)


@pytest.mark.parametrize("seed", range(4))
def test_block_barrier(seed: int) -> None:
    """Each thread reads what the thread opposite wrote."""
    body = """st.shared.b32 [%at], %t; bar.sync 0; xor.b32 %x, %t, 127; shl.b32 %x, %x, 2;
    mov.b32 %at, room; add.s32 %at, %at, %x; ld.shared.b32 %x, [%at]; st.global.b32 [%p], %x;"""
    assert np.array_equal(run(body, seed=seed), 127 - np.arange(128))


@pytest.mark.parametrize("seed", range(4))
def test_some_arrive_and_others_wait(seed: int) -> None:
    """Warp 0 produces for warp 1 and does not wait; warps 2 and 3 have their own barrier."""
    body = """setp.ge.u32 %c, %w, 2; @%c bra OTHERS; setp.eq.u32 %c, %w, 1; @%c bra READ;
    st.shared.b32 [%at], %t; bar.arrive 3, 64; mov.b32 %x, 1; bra END;
    READ: bar.sync 3, 64; ld.shared.b32 %x, [%at+-128]; bra END;
    OTHERS: barrier.sync 5, 64; mov.b32 %x, 2;
    END: st.global.b32 [%p], %x;"""
    t = np.arange(128)
    expected = np.select([t < 32, t < 64], [1, t - 32], 2)
    assert np.array_equal(run(body, seed=seed), expected)


def test_barrier_that_counts() -> None:
    body = """setp.lt.u32 %c, %t, 40; bar.red.popc.u32 %x, 1, %c; bar.red.or.pred %d, 2, %c;
    selp.b32 %y, 100, 0, %d; bar.red.and.pred %d, 2, %c; selp.b32 %y, 1, %y, %d;
    add.s32 %x, %x, %y; st.global.b32 [%p], %x;"""
    assert run(body).tolist() == [140] * 128


def test_block_barrier_of_a_part_of_a_warp() -> None:
    body = "setp.lt.u32 %c, %t, 5; @%c bar.sync 0;"
    fails(IllegalInstructionError, "lanes .* are elsewhere", body)


def test_barrier_that_not_all_reach() -> None:
    body = "setp.eq.u32 %c, %w, 3; @%c bra END; bar.sync 1, 128; END: mov.b32 %x, 0;"
    message = r"warp 0 of block \(0, 0, 0\) waits for barrier 1 \(96 of 128 threads have arrived"
    fails(DeadlockError, message, body)


def test_arrivals_that_nobody_waits_for() -> None:
    """A turn that is given once too often at the end of a kernel harms nobody."""
    assert run("bar.arrive 2, 256; st.global.b32 [%p], %t;").tolist() == list(range(128))


def test_barrier_with_two_thread_counts() -> None:
    body = "setp.eq.u32 %c, %w, 0; @%c bra A; bar.sync 1, 128; A: bar.sync 1, 64;"
    fails(BarrierError, "and others arrived for", body)
    fails(BarrierError, "for 40 threads; no multiple of 32", "bar.sync 1, 40;")
    fails(IllegalInstructionError, "barrier 16; 0 to 15 are allowed", "bar.sync 16;")


INIT = """setp.ne.u32 %c, %t, 0; @%c bra READY; mbarrier.init.shared::cta.b64 [bar], COUNT;
READY: bar.sync 0;
"""
WAIT = """WAIT: mbarrier.try_wait.parity.shared::cta.b64 %d, [bar], PARITY; @!%d bra WAIT;
"""


@pytest.mark.parametrize("seed", range(4))
def test_mbarrier_hands_over_two_phases(seed: int) -> None:
    body = (
        INIT.replace("COUNT", "128")
        + """setp.ge.u32 %c, %t, 64; @%c bra READ;
    st.shared.b32 [%at], %t; mbarrier.arrive.shared::cta.b64 _, [bar];
    W: mbarrier.try_wait.parity.shared::cta.b64 %d, [bar], 0; @!%d bra W;
    mbarrier.arrive.release.cta.shared::cta.b64 %s, [bar]; mov.b32 %x, 7; bra END;
    READ: mbarrier.arrive.shared::cta.b64 %s, [bar];
    W0: mbarrier.try_wait.shared::cta.b64 %d, [bar], %s; @!%d bra W0;
    ld.shared.b32 %x, [%at+-256]; mbarrier.arrive.shared::cta.b64 _, [bar];
    W1: mbarrier.test_wait.parity.shared::cta.b64 %d, [bar], 1; @!%d bra W1;
    END: st.global.b32 [%p], %x;"""
    )
    t = np.arange(128)
    assert np.array_equal(run(body, seed=seed), np.where(t < 64, 7, t - 64))


def test_fresh_mbarrier_passes_the_phase_before() -> None:
    body = INIT.replace("COUNT", "1") + WAIT.replace("PARITY", "1") + "st.global.b32 [%p], 1;"
    assert run(body).tolist() == [1] * 128


def test_mbarrier_that_nobody_completes() -> None:
    body = INIT.replace("COUNT", "2") + WAIT.replace("PARITY", "0")
    message = r"the mbarrier at byte 2048 of block .* 2 of 2 arrivals and 0 bytes outstanding"
    fails(DeadlockError, message, body)


def test_mbarrier_with_too_many_arrivals() -> None:
    body = INIT.replace("COUNT", "1") + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 16;"
    fails(BarrierError, "1 arrivals too many: the mbarrier", body)


def test_mbarrier_with_too_many_bytes() -> None:
    body = INIT.replace("COUNT", "1") + "mbarrier.expect_tx.shared::cta.b64 [bar], 0x100000;"
    fails(BarrierError, "a transaction count of 1048576, beyond 1048575", body)


def test_bytes_that_never_come() -> None:
    body = INIT.replace("COUNT", "128") + "mbarrier.expect_tx.shared::cta.b64 [bar], 4;"
    fails(UnfinishedError, "a transaction count of 512 bytes", body)


def test_mbarrier_where_there_is_none() -> None:
    fails(BarrierError, "no mbarrier is initialized at byte", "mbarrier.arrive.b64 _, [bar];")
    body = INIT.replace("COUNT", "1") + "ld.shared.b64 %s, [bar];"
    fails(EmulatorError, "it belongs to an mbarrier", body)


@pytest.mark.parametrize("seed", range(4))
def test_cluster_reads_its_peer(seed: int) -> None:
    body = """.reg .b32 %rank, %far; mov.u32 %rank, %cluster_ctarank;
    mad.lo.s32 %x, %rank, 1000, %t;
    st.shared.b32 [%at], %x; barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
    xor.b32 %rank, %rank, 1; mapa.shared::cluster.u32 %far, %at, %rank;
    ld.shared::cluster.b32 %x, [%far]; barrier.cluster.arrive; barrier.cluster.wait;
    xor.b32 %rank, %rank, 1; setp.eq.s32 %c, %rank, 0; @%c st.global.b32 [%p], %x;"""
    assert np.array_equal(run(body, seed=seed, cluster=2), 1000 + np.arange(128))


def test_cluster_without_the_last_barrier() -> None:
    """A block leaves while its peer still reads its memory: seen under some seed."""
    body = """.reg .b32 %rank, %far; mov.u32 %rank, %cluster_ctarank; st.shared.b32 [%at], %t;
    barrier.cluster.arrive; barrier.cluster.wait; setp.eq.s32 %c, %rank, 1; @%c bra END;
    mapa.shared::cluster.u32 %far, %at, 1; ld.shared::cluster.b32 %x, [%far];
    END: mov.b32 %x, 0;"""
    found = []
    for seed in range(10):
        try:
            run(body, seed=seed, cluster=2)
        except EmulatorError as error:
            found.append(str(error))
    assert found
    assert all("which has ended" in text for text in found)


#: Each block's first thread arrives at its peer's barrier; ORDER follows, then the blocks part.
REMOTE = """.reg .b32 %far, %rank; mov.u32 %rank, %cluster_ctarank; xor.b32 %rank, %rank, 1;
.shared .align 8 .b64 later; setp.ne.u32 %c, %t, 0; @%c bra READY;
mbarrier.init.shared::cta.b64 [bar], 1; mbarrier.init.shared::cta.b64 [later], 1;
READY: barrier.cluster.arrive; barrier.cluster.wait; @%c bra LEAVE;
mov.b32 %far, bar; mapa.shared::cluster.u32 %far, %far, %rank;
mbarrier.arrive.shared::cluster.b64 _, [%far];
LEAVE: ORDER barrier.cluster.arrive.relaxed; barrier.cluster.wait;"""

#: The owner's wait for it, or for a later one; releases that are as wide as the cluster.
ORDERED = [
    WAIT.replace("PARITY", "0"),
    "@%c bra NEXT; mov.b32 %far, later; mapa.shared::cluster.u32 %far, %far, %rank; "
    "mbarrier.arrive.shared::cluster.b64 _, [%far]; NEXT: "
    + WAIT.replace("PARITY", "0").replace("[bar]", "[later]"),
    "barrier.cluster.arrive; barrier.cluster.wait;",
    "fence.acq_rel.cluster;",
    "membar.gl;",
    "st.release.gpu.global.b32 [%p], 1;",
    "red.release.cluster.global.add.u32 [%p], 1;",
    "@%c bra END; mbarrier.arrive.release.cluster.shared::cta.b64 _, [bar]; END:",
]


@pytest.mark.parametrize("order", ORDERED, ids=range(len(ORDERED)))
def test_arrival_in_a_block_before_its_end(order: str) -> None:
    for seed in range(8):
        run(REMOTE.replace("ORDER", order), seed=seed, cluster=2)


@pytest.mark.parametrize("order", ["", "fence.acq_rel.cta;", "fence.acquire.cluster;"])
def test_arrival_that_nothing_orders_before_the_end(order: str) -> None:
    """It is under way when the cluster's relaxed barrier lets the block end: under some seed."""
    with pytest.raises(MemoryFaultError, match=r"mbarrier.arrive comes to block .* \(line \d+\)"):
        for seed in range(8):
            run(REMOTE.replace("ORDER", order), seed=seed, cluster=2)


def test_arrival_in_another_block_returns_no_state() -> None:
    body = REMOTE.replace("cluster.b64 _,", "cluster.b64 %s,").replace("ORDER", "")
    with pytest.raises(IllegalInstructionError, match="in another block returns no state"):
        run(body, cluster=2)


def test_cluster_barrier_out_of_order() -> None:
    fails(BarrierError, "wait without barrier.cluster.arrive", "barrier.cluster.wait;")
    twice = "barrier.cluster.arrive; barrier.cluster.arrive;"
    fails(BarrierError, "arrive twice without", twice)
    fails(IllegalInstructionError, "block 1 of 1", "mapa.shared::cluster.u32 %x, %at, 1;")
