"""Loads, stores, atomics, and accesses that are wrong."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ptxemu.warps import entry, lanes

from ptxemu import DeadlockError, Machine, MemoryFaultError, RaceError

LANE = np.arange(32, dtype=np.int32)


def test_vectors_and_narrow_elements() -> None:
    data = np.arange(512, dtype=np.uint8)
    out = np.zeros(32 * 4, np.int32)
    body = """
    .reg .b64 %in, %out, %l; .reg .b32 %i, %r<4>; .reg .b16 %h;
    ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; mov.u32 %i, %tid.x;
    mad.wide.u32 %in, %i, 8, %in; mad.wide.u32 %out, %i, 16, %out;
    ld.global.v2.b32 {%r0, %r1}, [%in]; ld.global.s8 %r2, [%in+3]; ld.global.nc.u8 %h, [%in+5];
    cvt.u32.u16 %r3, %h; st.global.v4.b32 [%out], {%r0, %r1, %r2, %r3}; ret;"""
    machine = Machine()
    result = machine.alloc(out)
    text = entry(body, ["u64 in", "u64 out"])
    machine.load(text).launch(block=32, args=[machine.alloc(data), result])
    found = result.read().reshape(32, 4)
    words = data[:256].view(np.int32).reshape(32, 2)
    assert np.array_equal(found[:, :2], words)
    assert np.array_equal(found[:, 2], data[:256].view(np.int8).reshape(32, 8)[:, 3])
    assert np.array_equal(found[:, 3], data[:256].reshape(32, 8)[:, 5])


def test_parameters_of_every_kind() -> None:
    body = """
    .reg .b64 %out; .reg .b32 %r<4>; .reg .f32 %f; .reg .b16 %h;
    ld.param.u64 %out, [out]; ld.param.b32 %r0, [number]; ld.param.f32 %f, [fraction];
    ld.param.u8 %h, [flag]; cvt.u32.u16 %r1, %h; ld.param.b32 %r2, [struct+8];
    cvt.rzi.s32.f32 %r3, %f; st.global.v4.b32 [%out], {%r0, %r1, %r2, %r3}; ret;"""
    parameters = ["u64 out", "u32 number", "f32 fraction", "u8 flag", "align 8 .b8 struct[16]"]
    machine = Machine()
    out = machine.alloc(np.zeros(4, np.int32))
    struct = np.array([1, 2, 3, 4], np.int32).tobytes()
    module = machine.load(entry(body, parameters))
    module.launch(args=[out, -7, 2.5, True, struct])
    assert out.read().tolist() == [-7, 1, 3, 2]
    with pytest.raises(ValueError, match="args: 12 bytes for struct of 16 bytes"):
        module.launch(args=[out, -7, 2.5, True, struct[:12]])
    with pytest.raises(TypeError, match="args: str for number of 4 bytes"):
        module.launch(args=[out, "7", 2.5, True, struct])


def test_shared_local_and_constant_memory() -> None:
    body = """.shared .align 4 .b32 room[32]; .local .align 8 .b8 depot[16];
    .reg .b32 at, x, l; .reg .b64 generic, stack; mov.u32 l, %laneid; shl.b32 at, l, 2;
    mov.b32 x, room; add.s32 at, at, x; st.shared.b32 [at], %a; bar.sync 0;
    cvt.u64.u32 generic, at; cvta.shared.u64 generic, generic; ld.b32 x, [generic];
    mov.b64 stack, depot; cvta.local.u64 stack, stack; st.b32 [stack+4], x;
    ld.local.b32 x, [depot+4]; add.s32 %o, x, 1;"""
    assert np.array_equal(lanes(body, np.int32, LANE * 3), LANE * 3 + 1)
    text = entry(
        """.reg .b64 %p; .reg .b32 %x; ld.const.b32 %x, [table+4]; ld.param.u64 %p, [out];
        st.global.b32 [%p], %x; mov.b64 %p, table; cvta.const.u64 %p, %p; ld.b32 %x, [%p+8];
        st.global.b32 [table2], %x; ret;""",
        ["u64 out"],
    ).replace(".visible", ".const .b32 table[3] = {5, 6, 7};\n.global .b32 table2;\n.visible")
    machine = Machine()
    out = machine.alloc(np.zeros(1, np.int32))
    machine.load(text).launch(args=[out])
    assert out.read()[0] == 6


@pytest.mark.parametrize("seed", range(3))
def test_atomics(seed: int) -> None:
    body = """
    .reg .b64 %p; .reg .b32 %i, %x, %y; .reg .f32 %f; .shared .b32 count;
    ld.param.u64 %p, [out]; mov.u32 %i, %tid.x;
    red.global.add.u32 [%p], %i; atom.global.max.s32 %x, [%p+4], %i;
    atom.global.inc.u32 %x, [%p+8], 9; cvt.rn.f32.u32 %f, %i;
    red.global.add.f32 [%p+12], %f; atom.global.cas.b32 %y, [%p+16], 0, 77;
    atom.relaxed.gpu.global.exch.b32 %x, [%p+20], 5;
    ret;"""
    machine = Machine(sms=2, seed=seed)
    out = machine.alloc(np.zeros(6, np.int32))
    machine.load(entry(body, ["u64 out"])).launch(grid=3, block=64, args=[out])
    found = out.read()
    assert found[:3].tolist() == [3 * 63 * 32, 63, 192 % 10]
    assert found[3:4].view(np.float32)[0] == 3 * 63 * 32
    assert found[4:].tolist() == [77, 5]


def test_atomics_return_what_was_there() -> None:
    body = """.shared .align 4 .b32 count; .reg .pred p; .reg .b32 l; mov.u32 l, %laneid;
    setp.ne.s32 p, l, 0; @!p st.shared.b32 [count], 100; bar.warp.sync -1;
    atom.shared.add.u32 %o, [count], 1;"""
    found = lanes(body, np.uint32, seed=3)
    assert sorted(found.tolist()) == list(range(100, 132))
    assert found.tolist() != sorted(found.tolist())


def fault(body: str, match: str, error: type[Exception] = MemoryFaultError) -> None:
    """Runs instructions that have a pointer ``%p`` to 64 words and expects a report."""
    text = entry(
        ".reg .b64 %p, %q; .reg .b32 %r<4>; .reg .pred %c;\nld.param.u64 %p, [out];\n" + body,
        ["u64 out"],
    )
    machine = Machine()
    module = machine.load(text)
    with pytest.raises(error, match=match):
        module.launch(block=32, args=[machine.alloc(np.zeros(64, np.int32))])


ROOM = ".shared .align 16 .b8 room[64]; "


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("ld.global.b32 %r0, [%p+256]; ret;", r"^line 10 `ld.global.* a read at global"),
        ("st.global.b32 [%p+-4], 0; ret;", "belongs to no variable or allocation|out of bounds"),
        ("ld.global.b32 %r0, [%p+2]; ret;", "no multiple of 4"),
        ("ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%p+8]; ret;", "no multiple of 16"),
        ("mov.b64 %q, 0; ld.global.b32 %r0, [%q]; ret;", "out of bounds"),
        (ROOM + "st.shared.b32 [room+64], 0; ret;", "out of bounds"),
        (ROOM + "mov.b32 %r0, 0; st.shared.b32 [%r0], 0; ret;", "belongs to no variable"),
        ("st.param.b32 [out], 0; ret;", "a write to parameter memory"),
        ("cvta.to.shared.u64 %q, %p; ret;", "a generic address outside of .shared"),
    ],
)
def test_accesses_outside(body: str, match: str) -> None:
    fault(body, match)


def test_reading_what_nobody_wrote() -> None:
    fault(ROOM + "ld.shared.b32 %r0, [room+8]; ret;", "nothing has written it", RaceError)


def test_reports_name_lanes_and_warps() -> None:
    body = """mov.u32 %r0, %tid.x; setp.eq.s32 %c, %r0, 5;
    @%c ld.global.b32 %r0, [%p+1]; ret;"""
    fault(body, r"line 11 `@%c ld.global.*`, warp 0 of block \(0, 0, 0\), lanes 5: a read")


def test_blocks_are_independent() -> None:
    """One multiprocessor runs the blocks one after the other: waiting for a later one ends."""
    body = """.reg .b64 %p; .reg .b32 %r; .reg .pred %c; ld.param.u64 %p, [out];
    mov.u32 %r, %ctaid.x; setp.ne.s32 %c, %r, 0; @%c bra LAST;
    WAIT: ld.relaxed.gpu.global.b32 %r, [%p]; setp.eq.s32 %c, %r, 0; @%c bra WAIT; ret;
    LAST: st.global.b32 [%p], 1; ret;"""
    text = entry(body, ["u64 out"])
    machine = Machine(sms=2)
    machine.load(text).launch(grid=2, args=[machine.alloc(np.zeros(1, np.int32))])
    alone = Machine(sms=1)
    with pytest.raises(Exception, match="has not ended after 5000 instructions") as error:
        alone.load(text).launch(grid=2, args=[alone.alloc(np.zeros(1, np.int32))], budget=5000)
    assert not isinstance(error.value, DeadlockError)
    assert "warp 0 of block (0, 0, 0), lanes 0" in str(error.value)
