"""What the parser reads, and what it refuses before anything runs."""

from __future__ import annotations

import pytest
from tests.ptxemu.warps import HEADER, entry

from ptxemu import Machine, PtxSyntaxError, UnsupportedError
from ptxemu._text.flow import END, flow_blocks
from ptxemu._text.parser import parse
from ptxemu._text.syntax import Address, Constant, Register, Vector


def test_names_belong_to_their_braces() -> None:
    body = """
    .reg .b32 %r<3>;
    { .reg .pred p; .reg .b32 x; L: setp.eq.b32 p, x, 0; @p bra L; }
    { .reg .pred p; .reg .b64 x; L: setp.eq.b64 p, x, 0; @!p bra L; }
    ret;"""
    function = parse(entry(body, [])).functions["kernel"]
    first, second = function.code[0], function.code[2]
    assert first.operands[0] != second.operands[0]
    assert [operand.bits for operand in first.operands[:2] if isinstance(operand, Register)] == [
        1,
        32,
    ]
    assert sorted(function.labels.values()) == [0, 2]
    assert (function.code[1].negated, function.code[3].negated) == (False, True)


def test_operands() -> None:
    body = """
    .reg .b32 %r<4>; .reg .b64 %rd<2>;
    mov.b32 %r0, 0x10; mov.b32 %r0, -3; mov.b32 %r0, 0b101; mov.b32 %r0, 0f3F800000;
    ld.global.v2.b32 {%r1, %r2}, [%rd1+-8]; ret;"""
    code = parse(entry(body, [])).functions["kernel"].code
    assert [i.operands[1] for i in code[:4]] == [
        Constant(16),
        Constant(-3),
        Constant(5),
        Constant(0x3F800000, 32),
    ]
    vector, address = code[4].operands
    assert isinstance(vector, Vector)
    assert isinstance(address, Address)
    assert (len(vector.elements), address.offset) == (2, -8)


def test_variables_and_parameters() -> None:
    text = (
        HEADER.format("sm_90a")
        + """
    .global .align 8 .b32 table[3] = {1, 2, 0x7};
    .extern .shared .align 128 .b8 room[];
    .visible .entry k(.param .b8 flag, .param .align 8 .b8 block[12], .param .u64 .ptr .align 1 p)
    .maxntid 64, 1, 1
    { ret; }"""
    )
    module = parse(text)
    table, room = module.variables
    assert (table.size, table.align) == (12, 8)
    assert table.initial == bytes([1, 0, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0])
    assert (room.extern, room.size, room.align) == (True, 0, 128)
    parameters = module.functions["k"].parameters
    assert [(p.offset, p.size) for p in parameters] == [(0, 1), (8, 12), (24, 8)]
    assert module.functions["k"].directives["maxntid"] == (64, 1, 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bra NOWHERE;", "line 9: the target is no label"),
        (".reg .b32 %a; add.s32 %a, %a 1;", "line 9: '1' where ',' or ';' is needed"),
        (".reg .b32 %a; add.s64 %a, %a, 1;", "line 9: %a has 32 bits, .s64 needs 64"),
        ("@%p bra L; L: ret;", "line 9: '%p' is no register"),
    ],
)
def test_mistakes_are_named(body: str, message: str) -> None:
    with pytest.raises(PtxSyntaxError) as error:
        Machine().load(entry("ret;\n" + body, ["u64 out"]))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tcgen05.shift.cta_group::1.down [0];", "line 8: tcgen05.shift.cta_group::1.down is not"),
        (".reg .f32 %f; add.wild.f32 %f, %f, %f;", "line 8: add.wild.f32: the modifier .wild is"),
        ("call.uni vprintf;", "line 8: call.uni is not supported"),
    ],
)
def test_unknown_instructions_stop_before_anything_runs(text: str, message: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        Machine().load(entry(text + " ret;", ["u64 out"]))
    assert str(error.value).startswith(message)


def test_paths_meet_at_the_immediate_post_dominator() -> None:
    body = """
    .reg .pred %p; .reg .b32 %r;
    setp.eq.b32 %p, %r, 0;
    @%p bra THEN;
    add.s32 %r, %r, 1;
    @%p bra OUT;
    bra JOIN;
    THEN: add.s32 %r, %r, 2;
    JOIN: add.s32 %r, %r, 3;
    @%p bra JOIN;
    OUT: ret;"""
    blocks = flow_blocks(parse(entry(body, [])).functions["kernel"])
    by_first = {block.first: index for index, block in enumerate(blocks)}
    out, join = by_first[8], by_first[6]
    assert blocks[0].reconvergence == out
    assert blocks[by_first[2]].reconvergence == out
    assert blocks[by_first[5]].reconvergence == join
    assert blocks[join].reconvergence == out
    assert blocks[out].reconvergence == END


def test_a_kernel_for_another_architecture_is_refused() -> None:
    text = entry("ret;", []).replace("sm_90a", "sm_100a")
    with pytest.raises(UnsupportedError, match="sm_100a; the machine is sm_90a"):
        Machine("sm_90a").load(text)


def test_a_kernel_for_the_family_runs() -> None:
    text = entry("ret;", [], target="sm_100f")
    Machine("sm_100a").load(text).launch()
    with pytest.raises(UnsupportedError, match="sm_100f; the machine is sm_90a"):
        Machine("sm_90a").load(text)
