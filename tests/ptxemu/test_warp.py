"""Lanes together: shuffles, votes, divergence and reconvergence."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ptxemu.warps import lanes

from ptxemu import DeadlockError, IllegalInstructionError

LANE = np.arange(32, dtype=np.int32)


@pytest.mark.parametrize(
    ("mode", "distance", "clamp", "source"),
    [
        ("bfly", 5, 0x1F, LANE ^ 5),
        ("down", 4, 0x1F, np.where(LANE + 4 < 32, LANE + 4, LANE)),
        ("up", 3, 0, np.where(LANE >= 3, LANE - 3, LANE)),
        ("idx", 9, 0x1F, np.full(32, 9)),
        # Segments of eight lanes: bits 8-12 name what stays of the lane.
        ("idx", 2, 0x181F, LANE // 8 * 8 + 2),
        ("up", 1, 0x1800, np.where(LANE % 8 >= 1, LANE - 1, LANE)),
        ("down", 1, 0x181F, np.where(LANE % 8 < 7, LANE + 1, LANE)),
    ],
)
def test_shuffles(mode: str, distance: int, clamp: int, source: np.ndarray) -> None:
    values = LANE * 10
    found = lanes(f"shfl.sync.{mode}.b32 %o, %a, {distance}, {clamp}, -1;", np.int32, values)
    assert np.array_equal(found, values[source])
    body = f""".reg .pred p; .reg .b32 x;
    shfl.sync.{mode}.b32 x|p, %a, {distance}, {clamp}, -1; selp.b32 %o, 1, 0, p;"""
    inside = lanes(body, np.int32, values)
    if mode != "bfly" and mode != "idx":
        assert np.array_equal(inside == 1, source != LANE)


def test_votes() -> None:
    body = """.reg .pred p, q; setp.lt.s32 p, %a, 3; vote.sync.KIND q, p, -1;
    selp.b32 %o, 1, 0, q;"""
    for kind, expected in [("any.pred", 1), ("all.pred", 0), ("uni.pred", 0)]:
        assert lanes(body.replace("KIND", kind), np.int32, LANE).tolist() == [expected] * 32
    ballot = ".reg .pred p; setp.lt.s32 p, %a, 3; vote.sync.ballot.b32 %o, p, -1;"
    assert lanes(ballot, np.uint32, LANE).tolist() == [7] * 32


def test_matches_and_reductions() -> None:
    values = LANE % 3
    found = lanes("match.any.sync.b32 %o, %a, -1;", np.uint32, values)
    expected = [sum(1 << k for k in range(32) if k % 3 == lane % 3) for lane in range(32)]
    assert found.tolist() == expected
    assert lanes("redux.sync.add.s32 %o, %a, -1;", np.int32, LANE - 20)[0] == int((LANE - 20).sum())
    assert lanes("redux.sync.max.u32 %o, %a, -1;", np.uint32, LANE)[7] == 31


def test_one_lane_is_elected() -> None:
    body = ".reg .pred p; .reg .b32 x; elect.sync x|p, -1; selp.b32 %o, 1, 0, p;"
    assert lanes(body, np.int32).sum() == 1


@pytest.mark.parametrize("seed", range(4))
def test_lanes_that_part_meet_again(seed: int) -> None:
    """Every lane loops as often as its number says; the vote after the loop has them all."""
    body = """.reg .pred p; .reg .b32 n, x; mov.b32 n, %a; mov.b32 x, 0;
    LOOP: setp.eq.s32 p, n, 0; @p bra DONE; add.s32 x, x, n; sub.s32 n, n, 1; bra LOOP;
    DONE: activemask.b32 n; add.s32 x, x, n; mov.b32 %o, x;"""
    found = lanes(body, np.int32, LANE, seed=seed)
    assert np.array_equal(found, LANE * (LANE + 1) // 2 - 1)


def test_branch_by_index() -> None:
    body = """.reg .b32 i; and.b32 i, %a, 3; mov.b32 %o, 0;
    TABLE: .branchtargets A, B, C, D;
    brx.idx i, TABLE;
    A: add.s32 %o, %o, 1; bra END;
    B: add.s32 %o, %o, 2; bra END;
    C: add.s32 %o, %o, 3; bra END;
    D: add.s32 %o, %o, 4;
    END: add.s32 %o, %o, 10;"""
    assert np.array_equal(lanes(body, np.int32, LANE), LANE % 4 + 11)


@pytest.mark.parametrize("seed", range(4))
def test_lanes_on_different_paths_synchronize(seed: int) -> None:
    """One side passes a value through shared memory to the other."""
    body = """.shared .align 4 .b8 room[128]; .reg .pred p; .reg .b32 at, v;
    setp.lt.s32 p, %a, 16; mov.b32 at, room; mov.b32 v, %a; shl.b32 v, v, 2;
    add.s32 at, at, v; @p bra LEFT;
    st.shared.b32 [at+-64], %a; bar.warp.sync -1; mov.b32 %o, 0; bra END;
    LEFT: bar.warp.sync -1; ld.shared.b32 %o, [at];
    END: add.s32 %o, %o, 0;"""
    found = lanes(body, np.int32, LANE, seed=seed)
    assert np.array_equal(found, np.where(LANE < 16, LANE + 16, 0))


def test_lanes_that_never_come() -> None:
    body = """.reg .pred p; setp.eq.s32 p, %a, 3; @p bra ALONE; bra END;
    ALONE: bar.warp.sync -1; END: mov.b32 %o, 0;"""
    with pytest.raises(DeadlockError, match=r"lanes 3 waits for lanes .* of its warp"):
        lanes(body, np.int32, LANE)


def test_member_mask_without_the_lane() -> None:
    with pytest.raises(IllegalInstructionError, match="not in its member mask"):
        lanes("shfl.sync.idx.b32 %o, %a, 0, 31, 1;", np.int32, LANE)


def test_shuffle_from_a_lane_that_is_elsewhere() -> None:
    body = """.reg .pred p; mov.b32 %o, 0; setp.lt.s32 p, %a, 16;
    @p shfl.sync.idx.b32 %o, %a, 20, 31, 0xFFFF;"""
    with pytest.raises(IllegalInstructionError, match="reads lane 20, which does not execute it"):
        lanes(body, np.int32, LANE)
