"""Traces of small kernels; those of compiled ones are in tests/emulated."""

from __future__ import annotations

from tests.ptxemu.warps import entry

from ptxemu import Machine, Trace
from ptxemu.trace import WARP


def test_lanes_apart_have_tracks_of_their_own() -> None:
    """Two sides of a branch run at the same time, until they meet on the first track again."""
    body = """.reg .b32 %t, %x; .reg .pred %c; mov.u32 %t, %laneid; setp.lt.u32 %c, %t, 7;
    mov.b32 %x, 0; @%c bra A; B: add.s32 %x, %x, 1; setp.lt.u32 %c, %x, 40; @%c bra B; bra END;
    A: add.s32 %x, %x, 1; setp.lt.u32 %c, %x, 60; @%c bra A;
    END: bar.sync 0; bar.sync 0; ret;"""
    trace = Trace()
    machine = Machine(seed=1)
    machine.load(entry(body, ["u64 unused"])).launch(block=64, args=[0], trace=trace)
    tracks = {span.track.title for span in trace.spans if span.track.kind == WARP}
    assert tracks == {"warp 0", "warp 0 (2)", "warp 1", "warp 1 (2)"}
    waits = [span for span in trace.spans if span.name == "wait: barrier 0"]
    assert waits
    assert all(not span.track.slot for span in waits)
