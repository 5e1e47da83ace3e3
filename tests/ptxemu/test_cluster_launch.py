"""Cluster launch control: clusters that run take over those that have not started."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest
from tests.ptxemu.warps import entry

from ptxemu import (
    BudgetError,
    DeadlockError,
    EmulatorError,
    IllegalInstructionError,
    Machine,
    RaceError,
)

#: A cluster works for its own blocks and for those that it takes: each adds 1 to its word, and the
#: instance's number is left in another one. Thread 0 of each block does all.
LOOP = """
.shared .align 16 .b8 answer[16]; .shared .align 8 .b64 bar;
.reg .b64 %out, %p, %s; .reg .b32 %x, %y, %z, %n, %rank, %rx, %phase, %own, %old;
.reg .b128 %r; .reg .pred %c, %got, %first;
ld.param.u64 %out, [out]; mov.u32 %x, %tid.x; setp.ne.u32 %c, %x, 0; @%c bra END;
mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;
barrier.cluster.arrive; barrier.cluster.wait;
mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mov.u32 %z, %ctaid.z; mov.u32 %n, %nctaid.x;
mov.u32 %rank, %cluster_ctarank; setp.eq.u32 %first, %rank, 0; mov.b32 %phase, 0;
mov.b32 %rx, %x; mad.lo.u32 %own, %y, %n, %x;
NEXT:
mad.lo.u32 %old, %y, %n, %x; mad.wide.u32 %p, %old, 8, %out;
atom.global.add.u32 %old, [%p], 1; st.global.b32 [%p+4], %own;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 16;
@%first TAKE.multicast::cluster::all.b128 [answer], [bar];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %c, [bar], %phase; @!%c bra WAIT;
ld.shared.b128 %r, [answer]; fence.proxy.async.shared::cta;
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %got, %r;
xor.b32 %phase, %phase, 1; barrier.cluster.arrive; barrier.cluster.wait;
@!%got bra END;
FIRST
add.s32 %x, %x, %rank; bra NEXT;
END: ret;
"""
LOOP = LOOP.replace(
    "TAKE", "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
)
VECTOR = "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%x, %y, %z, _}, %r;"
SINGLE = "".join(
    f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}.b32.b128 %{axis}, %r;"
    for axis in "xyz"
)


def run(
    seed: int, sms: int, cluster: int = 1, grid: tuple[int, int] = (6, 3), text: str = ""
) -> npt.NDArray[np.uint32]:
    """Runs the loop; returns ``[blocks, (visits, who)]``."""
    machine = Machine("sm_100a", sms=sms, seed=seed)
    out = machine.alloc(np.zeros((grid[0] * grid[1], 2), np.uint32))
    code = text or LOOP.replace("FIRST", VECTOR)
    module = machine.load(entry(code, ["u64 out"], target="sm_100a"))
    module.launch(grid=grid, cluster=cluster, block=1, args=[out], budget=20_000)
    found: npt.NDArray[np.uint32] = out.read()
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", [VECTOR, SINGLE])
@pytest.mark.parametrize(("sms", "cluster"), [(1, 1), (3, 1), (2, 2), (6, 2), (40, 1)])
def test_every_block_is_worked_for_once(sms: int, cluster: int, form: str, seed: int) -> None:
    found = run(seed, sms, cluster, text=LOOP.replace("FIRST", form))
    assert (found[:, 0] == 1).all()
    # No more clusters run at once than fit; if all fit, none is left to take.
    blocks = np.arange(len(found))
    if sms >= 40:
        assert np.array_equal(found[:, 1], blocks)
    elif seed == 0:
        assert len(set(found[:, 1].tolist())) < len(found)


def test_a_request_may_be_refused_while_clusters_wait() -> None:
    """Under some seed more clusters start than fit at once: one ended before all were taken."""
    instances = {len(set(run(seed, 1)[:, 1].tolist())) for seed in range(12)}
    assert 1 in instances
    assert max(instances) > 1


def reports(old: str, new: str, sms: int = 2, cluster: int = 2) -> list[EmulatorError]:
    """What some seeds report of a changed kernel."""
    text = LOOP.replace("FIRST", VECTOR)
    assert text.count(old) == 1
    found = []
    for seed in range(6):
        try:
            run(seed, sms, cluster, text=text.replace(old, new))
        except EmulatorError as error:
            found.append(error)
    return found


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("@!%c bra WAIT;", "", RaceError, "may still be writing it|nothing has written it"),
        (
            "arrive.expect_tx.shared::cta.b64 _, [bar], 16",
            "arrive.shared::cta.b64 _, [bar]",
            EmulatorError,
            "arrivals too many|-16 bytes|may still be writing|nothing has written",
        ),
        ("@!%got bra END;", "", IllegalInstructionError, "coordinates of a cluster that was refus"),
        (
            "@!%got bra END;",
            "@!%got bra NEXT;",
            IllegalInstructionError,
            "try_cancel after the block saw that an earlier one was refused",
        ),
        (
            "ld.shared.b128 %r, [answer];",
            "mov.b64 %s, 7; mov.b128 %r, {%s, %s};",
            IllegalInstructionError,
            "a register that holds no response of try_cancel",
        ),
        (
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 16;\n@%first",
            "@!%first bra END; mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 16;\n@%first",
            EmulatorError,
            "of which block .* has ended|which has ended",
        ),
        ("[answer], [bar];", "[answer+8], [bar];", EmulatorError, "no multiple of 16"),
    ],
)
def test_mistakes(old: str, new: str, error: type[EmulatorError], message: str) -> None:
    found = reports(old, new)
    assert found
    assert all(isinstance(entry, error) for entry in found), found
    assert all(re.search(message, str(entry), re.DOTALL) for entry in found), found


def test_a_lost_answer_is_a_deadlock() -> None:
    """Only one block hears of an answer that is not for all."""
    found = reports(".multicast::cluster::all", "")
    assert found
    assert all(isinstance(entry, DeadlockError | BudgetError) for entry in found), found
