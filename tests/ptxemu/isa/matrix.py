"""A warp's matrices (PTX ISA 9.0, 9.7.14): fragments as the ISA's figures draw them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .case import Array, Family

FAMILY = Family("matrix")

_RNG = np.random.default_rng(31)
_LANE = np.arange(32)

#: Bits of small integers in the types of matrices.
_ENCODE: dict[str, Any] = {
    "f16": lambda v: v.astype(np.float16).view(np.uint16),
    "bf16": lambda v: (v.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
    "tf32": lambda v: v.astype(np.float32).view(np.uint32),
    "e4m3": lambda v: _eights(v, 3, 7),
    "e5m2": lambda v: _eights(v, 2, 15),
}
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}


def _eights(values: Array, mantissa: int, bias: int) -> Array:
    """Integers up to 3 as 8-bit floats: 1 is 2^0, 2 is 2^1, 3 is 1.5 * 2^1."""
    magnitude = np.abs(values)
    power = np.where(magnitude >= 2, 1, 0)
    fraction = np.where(magnitude == 3, 1 << (mantissa - 1), 0)
    code = np.where(magnitude == 0, 0, (power + bias) << mantissa | fraction)
    return np.where(values < 0, code | 0x80, code).astype(np.uint8)


def encode(values: Array, kind: str) -> Array:
    """Integers from -3 to 3 as elements."""
    found: Array = _ENCODE[kind](values)
    return found


def integers(*shape: int) -> Array:
    """Small integers, whose products and sums are exact."""
    return _RNG.integers(-3, 4, shape).astype(np.float64)


def _load(count: int, transposed: bool) -> None:
    """Lane t gets row t/4, elements 2*(t%4) and the next, of each matrix."""
    matrices = _RNG.integers(0, 65536, (count, 8, 8)).astype(np.uint16)
    seen = matrices.transpose(0, 2, 1) if transposed else matrices
    low = seen[:, _LANE // 4, 2 * (_LANE % 4)].astype(np.uint32)
    high = seen[:, _LANE // 4, 2 * (_LANE % 4) + 1].astype(np.uint32)
    expected = (high << 16 | low).T.reshape(-1)
    # Rows lie in shared memory 48 bytes apart; row i's address is in lane i.
    vector = ", ".join(f"%v{k}" for k in range(count))
    trans = ".trans" if transposed else ""
    stores = " ".join(f"st.global.b32 [%to+{4 * k}], %v{k};" for k in range(count))
    FAMILY.kernel(
        f"ldmatrix_x{count}{trans.replace('.', '_')}",
        ".shared .align 16 .b8 room[1536]; .reg .b32 %s, %v<4>; .reg .b64 %at, %to; .reg .b32 %w<4>; "
        f".reg .pred %p; setp.ge.u32 %p, %t, {8 * count}; mov.u32 %s, room; mad.lo.u32 %s, %t, 48, %s; "
        "mul.wide.u32 %at, %t, 16; add.u64 %at, %in0, %at; @%p bra LOADED; "
        "ld.global.v4.b32 {%w0, %w1, %w2, %w3}, [%at]; st.shared.v4.b32 [%s], {%w0, %w1, %w2, %w3}; "
        "LOADED: bar.warp.sync 0xffffffff; "
        f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{vector}}}, [%s]; "
        f"mul.wide.u32 %to, %t, {4 * count}; add.u64 %to, %out, %to; {stores}",
        expected,
        [matrices.view(np.uint32).reshape(-1)],
    )


def _store(count: int, transposed: bool) -> None:
    fragments = _RNG.integers(0, 1 << 32, (32, count), np.uint64).astype(np.uint32)
    matrices = np.zeros((count, 8, 8), np.uint16)
    matrices[:, _LANE // 4, 2 * (_LANE % 4)] = (fragments & 0xFFFF).T
    matrices[:, _LANE // 4, 2 * (_LANE % 4) + 1] = (fragments >> 16).T
    written = matrices.transpose(0, 2, 1) if transposed else matrices
    vector = ", ".join(f"%v{k}" for k in range(count))
    trans = ".trans" if transposed else ""
    loads = " ".join(f"ld.global.b32 %v{k}, [%at+{4 * k}];" for k in range(count))
    FAMILY.kernel(
        f"stmatrix_x{count}{trans.replace('.', '_')}",
        ".shared .align 16 .b8 room[1536]; .reg .b32 %s, %v<4>; .reg .b64 %at, %to; .reg .b32 %w<4>; "
        f".reg .pred %p; setp.ge.u32 %p, %t, {8 * count}; mov.u32 %s, room; mad.lo.u32 %s, %t, 48, %s; "
        f"mul.wide.u32 %at, %t, {4 * count}; add.u64 %at, %in0, %at; {loads} "
        f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%s], {{{vector}}}; "
        "bar.warp.sync 0xffffffff; @%p bra END; ld.shared.v4.b32 {%w0, %w1, %w2, %w3}, [%s]; "
        "mul.wide.u32 %to, %t, 16; add.u64 %to, %out, %to; "
        "st.global.v4.b32 [%to], {%w0, %w1, %w2, %w3}; END:",
        np.ascontiguousarray(written).view(np.uint32).reshape(-1),
        [fragments.reshape(-1)],
    )


for _count in (1, 2, 4):
    for _transposed in (False, True):
        _load(_count, _transposed)
        _store(_count, _transposed)


def a_fragment(a: Array, kind: str) -> Array:
    """A 16-row matrix as the words of 32 lanes: ``[32, registers]``.

    Rows t/4 and t/4+8 alternately; a word holds 4 bytes of columns, from word t%4 on, the second
    pair of registers four words further.
    """
    raw = encode(a, kind)
    rows = np.ascontiguousarray(raw).view(np.uint32).reshape(16, -1)
    registers = [
        rows[_LANE // 4 + 8 * (r % 2), _LANE % 4 + 4 * (r // 2)] for r in range(rows.shape[1] // 2)
    ]
    return np.stack(registers, axis=1)


def _multiply(kind: str, shape: str) -> None:
    depth = int(shape.split("k")[1])
    a, b, c = integers(16, depth), integers(8, depth), integers(16, 8)
    total = a @ b.T + c
    b_rows = np.ascontiguousarray(encode(b, kind)).view(np.uint32).reshape(8, -1)
    b_words = np.stack(
        [b_rows[_LANE // 4, _LANE % 4 + 4 * r] for r in range(b_rows.shape[1] // 4)], axis=1
    )
    a_words = a_fragment(a, kind)

    def sums(matrix: Array) -> Array:
        parts = [matrix[_LANE // 4 + 8 * (r // 2), 2 * (_LANE % 4) + r % 2] for r in range(4)]
        return np.stack(parts, axis=1).astype(np.float32)

    words = np.concatenate([a_words, b_words, sums(c).view(np.uint32)], axis=1)
    na, nb = a_words.shape[1], b_words.shape[1]
    names = [f"%w{k}" for k in range(na + nb + 4)]
    loads = " ".join(f"ld.global.b32 {name}, [%at+{4 * k}];" for k, name in enumerate(names))

    def vector(start: int, count: int) -> str:
        return "{" + ", ".join(names[start : start + count]) + "}"

    b_vector = vector(na, nb)
    stores = " ".join(f"st.global.b32 [%to+{4 * k}], %d{k};" for k in range(4))
    FAMILY.kernel(
        f"mma_{shape}_{kind}",
        f".reg .b32 %w<{len(names)}>; .reg .f32 %d<4>; .reg .b64 %at, %to; "
        f"mul.wide.u32 %at, %t, {4 * len(names)}; add.u64 %at, %in0, %at; {loads} "
        f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {{%d0, %d1, %d2, %d3}}, "
        f"{vector(0, na)}, {b_vector}, {vector(na + nb, 4)}; "
        f"mul.wide.u32 %to, %t, 16; add.u64 %to, %out, %to; {stores}",
        sums(total).reshape(-1),
        [np.ascontiguousarray(words).reshape(-1)],
    )


for _kind, _shape in (
    *(("bf16", "m16n8k8"), ("bf16", "m16n8k16"), ("f16", "m16n8k8"), ("f16", "m16n8k16")),
    *(("tf32", "m16n8k4"), ("tf32", "m16n8k8")),
):
    _multiply(_kind, _shape)
