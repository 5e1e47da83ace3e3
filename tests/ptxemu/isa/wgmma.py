"""Multiplies of a warpgroup (PTX ISA 9.0, 9.7.15): tiles and fragments as the ISA draws them.

Inputs are small integers: every sum is exact, so that the order and the width of the hardware's
adders do not matter, and results agree bit for bit.
"""

from __future__ import annotations

import numpy as np

from .case import Array, Family
from .matrix import BYTES, a_fragment, encode, integers

FAMILY = Family("wgmma")

_RNG = np.random.default_rng(71)

#: By bytes of the pattern: the descriptor's code (9.7.15.5.1).
_CODES = {0: 0, 128: 1, 64: 2, 32: 3}
_ROOM_A, _ROOM_B = 8192, 32768


def _truncated(values: Array) -> Array:
    """Numbers that bf16 holds."""
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    found: Array = bits.view(np.float32).astype(np.float64)
    return found


def _swizzled(offset: Array, span: int) -> Array:
    """Chunks of 16 bytes xored with the number of the row, within the pattern (9.7.15.5.1)."""
    bits = {0: 0, 32: 1, 64: 3, 128: 7}[span]
    found: Array = offset ^ ((offset >> 7 & bits) << 4)
    return found


def _k_major(rows: Array, span: int, room: int) -> tuple[Array, int, int, int]:
    """``[rows, bytes]`` as shared memory holds it; leading, stride, bytes to the next 32.

    With a pattern: groups of 8 rows of ``span`` bytes. Without: 8x16-byte cores, those along K
    behind each other, then those along the rows.
    """
    _count, width = rows.shape
    memory = np.zeros(room, np.uint8)
    row, column = np.indices(rows.shape)
    if span:
        assert width == span
        offset = _swizzled(row * span + column, span)
        leading, stride, step = 16, 8 * span, 32
    else:
        leading, stride, step = 128, 128 * (width // 16), 256
        offset = row // 8 * stride + column // 16 * leading + row % 8 * 16 + column % 16
    memory[offset] = rows
    return memory, leading, stride, step


def _mn_major(values: Array, room: int) -> tuple[Array, int, int, int]:
    """``[rows, K]`` of 16 bits with rows innermost, in patterns of 128 bytes: 64 rows by 8 of K."""
    _count, depth = values.shape
    memory = np.zeros(room // 2, np.uint16)
    row, k = np.indices(values.shape)
    leading, stride = 1024 * (depth // 8), 1024
    offset = row // 64 * leading + k // 8 * stride + k % 8 * 128 + row % 64 * 2
    memory[_swizzled(offset, 128) // 2] = values
    # An instruction takes 16 of K: two patterns.
    return memory.view(np.uint8), leading, stride, 2048


def _fragment(matrix: Array) -> Array:
    """D in registers: ``[128 threads, registers]``."""
    thread = np.arange(128)[:, None]
    r = np.arange(matrix.shape[1] // 2)[None, :]
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (r // 2 % 2)
    found: Array = matrix[row, 8 * (r // 4) + 2 * (thread % 4) + r % 2].astype(np.float32)
    return found


def _descriptor(name: str, room: str, step: int, leading: int, stride: int, span: int) -> str:
    fixed = (leading >> 4) << 16 | (stride >> 4) << 32 | _CODES[span] << 62
    return (
        f"mov.u32 %s, {room}; add.u32 %s, %s, {step}; shr.u32 %s, %s, 4; and.b32 %s, %s, 0x3fff; "
        f"cvt.u64.u32 {name}, %s; or.b64 {name}, {name}, {fixed:#x}; "
    )


def _fragments(a: Array, kind: str, depth: int) -> Array:
    """A as the warps' registers hold it: each warp's 16 rows, each step's products, words a thread."""
    warps = [
        np.concatenate(
            [a_fragment(rows[:, k : k + depth], kind) for k in range(0, rows.shape[1], depth)],
            axis=1,
        )
        for rows in np.split(a, 4)
    ]
    return np.ascontiguousarray(np.concatenate(warps)).reshape(-1)


#: Both operands from global to shared memory.
_COPIES = "".join(
    f"mov.u32 %i, %t; {label}: mul.wide.u32 %at, %i, 4; add.u64 %at, {source}, %at; "
    f"ld.global.b32 %v, [%at]; mov.u32 %s, {room}; mad.lo.u32 %s, %i, 4, %s; "
    f"st.shared.b32 [%s], %v; add.u32 %i, %i, 128; setp.lt.u32 %p, %i, {size // 4}; @%p bra {label}; "
    for label, source, room, size in (
        ("COPY_A", "%in0", "room_a", _ROOM_A),
        ("COPY_B", "%in1", "room_b", _ROOM_B),
    )
)


def _add(
    name: str,
    kind: str,
    columns: int,
    *,
    span: int = 128,
    from_registers: bool = False,
    b_rows_innermost: bool = False,
    negate: bool = False,
    real: bool = False,
) -> None:
    """A 64-row tile times a ``columns``-row one, over what a pattern holds of K."""
    element = BYTES[kind]
    depth = (span or 128) // element
    steps, k = depth * element // 32, 32 // element
    a, b = integers(64, depth), integers(columns, depth)
    error = 0.0
    if real:
        a, b = (_truncated(_RNG.standard_normal(matrix.shape)) for matrix in (a, b))
        # The hardware keeps 25 bits of what it adds; each product loses less than 2^-22 of the
        # largest, and so does each of the steps' sums.
        error = 2.0**-22 * (depth + steps) * float(np.abs(a).max() * np.abs(b).max())
    a_bytes = np.ascontiguousarray(encode(a, kind)).view(np.uint8).reshape(64, -1)
    a_memory, a_leading, a_stride, a_step = _k_major(a_bytes, span, _ROOM_A)
    if b_rows_innermost:
        b_memory, b_leading, b_stride, b_step = _mn_major(encode(b, kind), _ROOM_B)
    else:
        b_bytes = np.ascontiguousarray(encode(b, kind)).view(np.uint8).reshape(columns, -1)
        b_memory, b_leading, b_stride, b_step = _k_major(b_bytes, span, _ROOM_B)
    expected = _fragment((-1 if negate else 1) * (a @ b.T) + 0.0)
    registers = columns // 2
    inputs = [a_memory.view(np.uint32), b_memory.view(np.uint32)]
    fragments = ""
    if from_registers:
        inputs.append(_fragments(a, kind, k))
        loads = " ".join(f"ld.global.b32 %f{i}, [%at+{4 * i}];" for i in range(4 * steps))
        fragments = (
            f".reg .b32 %f<{4 * steps}>; mul.wide.u32 %at, %t, {16 * steps}; add.u64 %at, %in2, %at; "
            + loads
        )
    vector = ", ".join(f"%d{r}" for r in range(registers))
    scale = "-1" if negate else "1"
    transposes = ""
    if element == 2:
        b_flag = int(b_rows_innermost)
        transposes = f", {b_flag}" if from_registers else f", 0, {b_flag}"
    multiplies = []
    for s in range(steps):
        first = "{" + ", ".join(f"%f{4 * s + i}" for i in range(4)) + "}"
        if not from_registers:
            multiplies.append(_descriptor("%a", "room_a", s * a_step, a_leading, a_stride, span))
            first = "%a"
        b_span = 128 if b_rows_innermost else span
        multiplies.append(_descriptor("%b", "room_b", s * b_step, b_leading, b_stride, b_span))
        multiplies.append(
            f"setp.ne.b32 %p, {int(s > 0)}, 0; "
            f"wgmma.mma_async.sync.aligned.m64n{columns}k{k}.f32.{kind}.{kind} {{{vector}}}, {first}, "
            f"%b, %p, {scale}, 1{transposes};"
        )
    stores = " ".join(f"st.global.f32 [%to+{4 * r}], %d{r};" for r in range(registers))
    zeros = " ".join(f"mov.f32 %d{r}, 0f7FC00000;" for r in range(registers))
    FAMILY.kernel(
        name,
        f".shared .align 1024 .b8 room_a[{_ROOM_A}]; .shared .align 1024 .b8 room_b[{_ROOM_B}]; "
        f".reg .f32 %d<{registers}>; .reg .b64 %a, %b, %at, %to; .reg .b32 %s, %i, %v; .reg .pred %p; "
        f"{_COPIES} {fragments} {zeros} fence.proxy.async.shared::cta; bar.sync 0; "
        f"wgmma.fence.sync.aligned; {' '.join(multiplies)} wgmma.commit_group.sync.aligned; "
        "wgmma.wait_group.sync.aligned 0; "
        f"mul.wide.u32 %to, %t, {4 * registers}; add.u64 %to, %out, %to; {stores}",
        expected.reshape(-1),
        inputs,
        block=128,
        absolute=error,
    )


for _kind in BYTES:
    _add(f"n64_{_kind}", _kind, 64)
for _columns in (8, 24, 128, 256):
    _add(f"n{_columns}_bf16", "bf16", _columns)
for _span in (0, 32, 64):
    _add(f"span{_span}_bf16", "bf16", 64, span=_span)
    _add(f"span{_span}_e4m3", "e4m3", 32, span=_span)
_add("registers_bf16", "bf16", 64, from_registers=True)
_add("registers_tf32", "tf32", 32, from_registers=True)
_add("registers_e4m3", "e4m3", 32, from_registers=True)
_add("rows_innermost_64", "bf16", 64, b_rows_innermost=True)
_add("rows_innermost_128", "f16", 128, b_rows_innermost=True)
_add("negated", "f16", 16, negate=True)
_add("real_bf16", "bf16", 64, real=True)
