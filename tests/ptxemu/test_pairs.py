"""What the two blocks of a pair do together (PTX ISA 9.0, 9.7.16.5.1)."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest
from tests.ptxemu.tensor import Program
from tests.ptxemu.warps import entry

from ptxemu import (
    DeadlockError,
    EmulatorError,
    IllegalInstructionError,
    Machine,
    TensorMap,
    UnfinishedError,
)
from ptxemu.tma import DataType, packed_strides

#: A box of 32 words is loaded into each block of a cluster; thread t of block r stores word t to
#: ``out[r]``. The even blocks' barriers get the bytes of two boxes each.
LOADS = """
.shared .align 128 .b8 tile[128]; .shared .align 8 .b64 bar;
.reg .b32 %t, %x, %rank, %near, %even; .reg .b64 %out, %map, %p, %hint; .reg .pred %c, %d, %e;
.reg .b16 %mask;
ld.param.u64 %out, [out]; mov.b64 %map, map; cvta.param.u64 %map, %map; mov.b64 %hint, 0;
mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; setp.ne.u32 %c, %t, 0;
and.b32 %even, %rank, 1; setp.ne.u32 %d, %even, 0; mov.b32 %near, bar;
and.b32 %even, %near, 0xFEFFFFFF;
@%c bra READY; mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;
READY: barrier.cluster.arrive; barrier.cluster.wait;
@%c bra WAIT; @%d bra LOAD; mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
LOAD: setp.ne.u32 %e, %rank, ISSUER; shl.b32 %x, %rank, 5; mov.b16 %mask, 15;
ISSUE
WAIT: @%d bra DONE;
AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %e, [bar], 0; @!%e bra AGAIN;
DONE: bar.warp.sync -1; barrier.cluster.arrive; barrier.cluster.wait;
shl.b32 %x, %t, 2; mov.b32 %near, tile; add.s32 %near, %near, %x; ld.shared.b32 %near, [%near];
mad.lo.s32 %x, %rank, 32, %t; mad.wide.u32 %p, %x, 4, %out; st.global.b32 [%p], %near; ret;
"""
COPY = "cp.async.bulk.tensor.1d{}.shared::cluster.global.tile.mbarrier::complete_tx::bytes{}"
OWN = COPY.format(".cta_group::2", ".L2::cache_hint") + " [tile], [%map, {%x}], [%even], %hint;"
ALL = (
    "@!%e "
    + COPY.format(".cta_group::2", ".multicast::cluster")
    + " [tile], [%map, {%x}], [%even], %mask;"
)


def load(issue: str, issuer: int, seed: int, blocks: int = 4) -> npt.NDArray[np.uint32]:
    """Runs the loads; returns what each block's threads stored."""
    machine = Machine("sm_100a", sms=blocks, seed=seed)
    words = machine.alloc(np.arange(32 * blocks, dtype=np.uint32) + 1000)
    shape = (32 * blocks,)
    kind = DataType.UINT32
    tensor = TensorMap.tiled(kind, words, shape, packed_strides(shape, kind), (32,))
    out = machine.alloc(np.zeros((blocks, 32), np.uint32))
    text = LOADS.replace("ISSUER", str(issuer)).replace("ISSUE", issue)
    parameters = ["u64 out", "align 64 .b8 map[128]"]
    module = machine.load(entry(text, parameters, target="sm_100a"))
    module.launch(grid=blocks, cluster=blocks, block=32, args=[out, tensor], budget=50_000)
    found: npt.NDArray[np.uint32] = out.read()
    return found


@pytest.mark.parametrize("seed", range(6))
def test_loads_tell_the_even_block(seed: int) -> None:
    found = load(OWN, 0, seed)
    assert np.array_equal(found.reshape(-1), np.arange(128) + 1000)


@pytest.mark.parametrize("issuer", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_a_load_for_all_tells_the_even_block_of_each_pair(issuer: int, seed: int) -> None:
    found = load(ALL, issuer, seed)
    assert np.array_equal(found, np.tile(np.arange(32) + 1000 + 32 * issuer, (4, 1)))


@pytest.mark.parametrize(
    ("issue", "message"),
    [
        (OWN.replace(".cta_group::2", ""), "with an mbarrier of block .* and no .cta_group::2"),
        (OWN.replace("[%even]", "[%even+0x2000000]"), "which is not its peer"),
        (ALL.replace("%mask;", "0;"), "multicast to 0x0 in 4 blocks"),
        (ALL.replace("%mask;", "16;"), "multicast to 0x10 in 4 blocks"),
    ],
)
def test_loads_that_tell_the_wrong_block(issue: str, message: str) -> None:
    with pytest.raises(IllegalInstructionError, match=message):
        load(issue, 0, 0)


def test_a_pair_gets_the_same_columns() -> None:
    body = "mov.b32 %r0, %a;"
    columns = set()
    for seed in range(8):
        found = Program(body, 1, columns=32, blocks=2).run(seed=seed)
        assert len(np.unique(found)) == 1
        columns.add(int(found[0, 0, 0]))
    assert len(columns) > 2


ALLOC = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [where], 32;"
FREE = "tcgen05.dealloc.cta_group::2.sync.aligned.b32 %a, 32;"


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (
            ALLOC,
            f"setp.eq.u32 %e, %rank, 0; @%e {ALLOC}",
            DeadlockError,
            r"waits for tcgen05.alloc by the peer, block \(1, 0, 0\)",
        ),
        (
            ALLOC,
            "shl.b32 %x, 32, %rank; " + ALLOC.replace(" 32;", " %x;"),
            IllegalInstructionError,
            r"tcgen05.alloc of \(\d+,\) in block .* and \(\d+,\) in its peer",
        ),
        (
            FREE,
            f"setp.eq.u32 %e, %rank, 0; @%e {FREE}",
            EmulatorError,
            r"waits for tcgen05.dealloc by the peer|ended with 32 columns",
        ),
        (FREE, "", UnfinishedError, "ended with 32 columns of tensor memory"),
        (
            "mov.b32 %r0, %a;",
            "@%c tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
            ".multicast::cluster.b64 [bar], 4;",
            IllegalInstructionError,
            "tcgen05.commit to 0x4 in a cluster of 2",
        ),
    ],
)
def test_mistakes(old: str, new: str, error: type[EmulatorError], message: str) -> None:
    program = Program("mov.b32 %r0, %a;", 1, columns=32, blocks=2)
    assert program.text.count(old) == 1
    with pytest.raises(error) as caught:
        program.run(text=program.text.replace(old, new))
    assert re.search(message, str(caught.value), re.DOTALL), caught.value


def test_a_block_without_a_peer() -> None:
    program = Program("mov.b32 %r0, %a;", 1, columns=32)
    with pytest.raises(IllegalInstructionError, match="a cluster of 1 has no peer for it"):
        program.run(text=program.text.replace("cta_group::1", "cta_group::2"))


def test_a_launch_with_another_cluster_than_the_kernel_requires() -> None:
    program = Program("mov.b32 %r0, %a;", 1, columns=32)
    text = program.text.replace(")\n{", ")\n.explicitcluster\n.reqnctapercluster 2, 1, 1\n{")
    with pytest.raises(ValueError, match=r"cluster: \(1, 1, 1\); the kernel requires \(2, 1, 1\)"):
        program.run(text=text)


def test_a_struct_argument_is_its_members() -> None:
    """One after the other, with zeros behind them."""
    body = """.reg .b32 %a, %b, %c; .reg .b64 %p; ld.param.u64 %p, [out]; ld.param.u32 %a, [s];
    ld.param.u32 %b, [s+4]; ld.param.u32 %c, [s+12]; st.global.v2.b32 [%p], {%a, %b};
    st.global.b32 [%p+8], %c; ret;"""
    machine = Machine("sm_100a", sms=1)
    out = machine.alloc(np.full(3, 9, np.int32))
    module = machine.load(entry(body, ["u64 out", "align 8 .b8 s[16]"], target="sm_100a"))
    module.launch(args=[out, (np.int32(5), np.array([7], np.int32))])
    assert out.read().tolist() == [5, 7, 0]
    with pytest.raises(TypeError, match="args: int for s of 16 bytes"):
        module.launch(args=[out, (5,)])
    with pytest.raises(ValueError, match="args: 20 bytes for s of 16 bytes"):
        module.launch(args=[out, (np.arange(5, dtype=np.int32),)])


def test_a_commit_to_a_block_that_has_ended() -> None:
    """The odd block leaves while the even one's commit is under way."""
    body = """.shared .align 8 .b64 bar; .reg .b32 %t, %rank; .reg .pred %c; .reg .b16 %mask;
    mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; mov.b16 %mask, 3;
    mbarrier.init.shared::cta.b64 [bar], 1; barrier.cluster.arrive; barrier.cluster.wait;
    setp.ne.u32 %c, %rank, 0; @%c bra END;
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64
    [bar], %mask;
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %c, [bar], 0; @!%c bra WAIT; END: ret;"""
    module_text = entry(body, [], target="sm_100a")
    reports = set()
    for seed in range(8):
        try:
            machine = Machine("sm_100a", sms=2, seed=seed)
            machine.load(module_text).launch(grid=2, cluster=2, block=1, budget=10_000)
        except EmulatorError as error:
            reports.add(error.message)
    assert reports
    assert all("in block (1, 0, 0), which has ended (line " in text for text in reports)
