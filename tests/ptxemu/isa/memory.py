"""Loads, stores, atomics and addresses (PTX ISA 9.0, 9.7.9, 9.7.13.5, 9.7.13.6)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .case import Family, lane_case, words

FAMILY = Family("memory")

_COUNT = 128
_RNG = np.random.default_rng(21)
_WORDS = _RNG.integers(0, 1 << 32, 4 * _COUNT, np.uint64).astype(np.uint32)

_AT = (
    ".reg .b64 %at, %to; .reg .b32 %s; mul.wide.u32 %at, %t, {size}; add.u64 %to, %out, %at; "
    "add.u64 %at, %in0, %at;"
)

# Vectors through shared memory: a thread reads what the mirrored thread wrote.
for _type, _registers, _size in (
    ("v4.b32", ".reg .b32 %v<4>;", 16),
    ("v2.b64", ".reg .b64 %v<2>;", 16),
    ("v2.b32", ".reg .b32 %v<2>;", 8),
    ("v4.b16", ".reg .b16 %v<4>;", 8),
    ("v4.u8", ".reg .b16 %v<4>;", 4),
    ("v2.b16", ".reg .b16 %v<2>;", 4),
    ("b64", ".reg .b64 %v<1>;", 8),
):
    _n = int(_type[1]) if _type[0] == "v" else 1
    _vector = "{" + ", ".join(f"%v{k}" for k in range(_n)) + "}" if _n > 1 else "%v0"
    _data = _WORDS[: _COUNT * _size // 4]
    _rows = _data.view(np.uint8).reshape(_COUNT, _size)
    FAMILY.kernel(
        f"vector_{_type.replace('.', '_')}",
        f"{_registers} .shared .align 16 .b8 room[{_COUNT * _size}]; "
        + _AT.format(size=_size)
        + f"ld.global.{_type} {_vector}, [%at]; mov.u32 %s, room; mad.lo.u32 %s, %t, {_size}, %s; "
        f"st.shared.{_type} [%s], {_vector}; bar.sync 0; mov.u32 %s, room; "
        f".reg .b32 %m; sub.u32 %m, {_COUNT - 1}, %t; mad.lo.u32 %s, %m, {_size}, %s; "
        f"ld.shared.{_type} {_vector}, [%s]; st.global.{_type} [%to], {_vector};",
        np.ascontiguousarray(_rows[::-1]).view(np.uint32).reshape(-1),
        [_data],
        block=_COUNT,
    )

_BYTES = [int(v) for v in _RNG.integers(0, 256, _COUNT)]
for _name, _expected in (
    ("u8", _BYTES),
    ("s8", [v - 256 if v > 127 else v for v in _BYTES]),
):
    FAMILY.kernel(
        f"load_{_name}",
        ".reg .b64 %at, %i; .reg .b32 %v; cvt.u64.u32 %i, %t; add.u64 %at, %in0, %i; "
        f"ld.global.{_name} %v, [%at]; mad.lo.u64 %at, %i, 4, %out; st.global.b32 [%at], %v;",
        words(*_expected),
        [np.array(_BYTES, np.uint8)],
        block=_COUNT,
    )

# A generic address reaches shared memory, global memory and the stack.
FAMILY.kernel(
    "generic",
    ".shared .align 4 .b32 cell[128]; .local .align 4 .b32 own[4]; .reg .b64 %g, %l, %i, %at; "
    ".reg .b32 %v, %x, %o; .reg .pred %p; cvt.u64.u32 %i, %t; mad.lo.u64 %at, %i, 4, %in0; "
    "ld.b32 %v, [%at]; mov.u64 %g, cell; cvta.shared.u64 %g, %g; mad.lo.u64 %g, %i, 4, %g; "
    "st.b32 [%g], %v; mov.u64 %l, own; cvta.local.u64 %l, %l; add.u32 %x, %v, 1; st.b32 [%l+8], %x; "
    "bar.sync 0; ld.b32 %x, [%l+8]; ld.b32 %o, [%g]; add.u32 %o, %o, %x; isspacep.shared %p, %g; "
    "@%p add.u32 %o, %o, 16; isspacep.global %p, %g; @%p add.u32 %o, %o, 32; isspacep.local %p, %l; "
    "@%p add.u32 %o, %o, 64; isspacep.global %p, %at; @%p add.u32 %o, %o, 128; "
    "cvta.to.shared.u64 %g, %g; ld.shared.b32 %x, [%g]; xor.b32 %o, %o, %x; "
    "mad.lo.u64 %at, %i, 4, %out; st.global.b32 [%at], %o;",
    words(*((2 * int(v) + 1 + 16 + 64 + 128) % (1 << 32) ^ int(v) for v in _WORDS[:_COUNT])),
    [_WORDS[:_COUNT]],
    block=_COUNT,
)

_SMALL = [int(v) for v in _RNG.integers(0, 1000, _COUNT)]


def _all(values: list[int]) -> dict[str, int]:
    conjunction = disjunction = parity = values[0]
    for value in values[1:]:
        conjunction, disjunction, parity = conjunction & value, disjunction | value, parity ^ value
    return {
        "add.u32": sum(values),
        "min.u32": min(values),
        "max.s32": max(values),
        "and.b32": conjunction,
        "or.b32": disjunction,
        "xor.b32": parity,
    }


# Every thread on one word: whatever the order, the result is the same.
for _name, _total in _all(_SMALL).items():
    for _space in ("shared", "global"):
        _start = 0xFFFFFFFF if _name in ("min.u32", "and.b32") else 0
        _cell = "[cell]" if _space == "shared" else "[%out]"
        FAMILY.kernel(
            f"red_{_space}_{_name.replace('.', '_')}",
            ".shared .align 4 .b32 cell; .reg .b64 %at; .reg .b32 %v; .reg .pred %p; "
            "mul.wide.u32 %at, %t, 4; add.u64 %at, %in0, %at; ld.global.b32 %v, [%at]; "
            f"setp.ne.u32 %p, %t, 0; @%p bra READY; st.{_space}.b32 {_cell}, {_start}; READY: bar.sync 0; "
            f"red.relaxed.cta.{_space}.{_name} {_cell}, %v; bar.sync 0; ld.{_space}.b32 %v, {_cell}; "
            "@!%p st.global.b32 [%out], %v;",
            words(_total),
            [words(*_SMALL)],
            block=_COUNT,
        )

# Each thread's own word: the value before, and the one after.


def _s(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


_ATOMIC: dict[str, Callable[[int, int], int]] = {
    "add.u32": lambda old, b: old + b,
    "exch.b32": lambda old, b: b,
    "inc.u32": lambda old, b: 0 if old >= b else old + 1,
    "dec.u32": lambda old, b: b if old == 0 or old > b else old - 1,
    "min.s32": lambda old, b: min(_s(old), _s(b)),
    "max.u32": lambda old, b: max(old, b),
}
for _name, _function in _ATOMIC.items():
    _old = [int(v) if k % 3 else k for k, v in enumerate(_WORDS[:_COUNT])]
    _new = [int(v) if k % 2 else k // 2 for k, v in enumerate(_WORDS[_COUNT : 2 * _COUNT])]
    _after = [_function(a, b) % (1 << 32) for a, b in zip(_old, _new, strict=True)]
    lane_case(
        FAMILY,
        f"atom.global.{_name}",
        "{ .reg .b64 %w; .reg .b32 %x; .reg .pred %y; mad.lo.u64 %w, %i, 4, %out; st.global.b32 [%w], %a; "
        f"atom.relaxed.gpu.global.{_name} %x, [%w], %b; ld.relaxed.gpu.global.b32 %o, [%w]; "
        "setp.ne.u32 %y, %x, %a; @%y mov.b32 %o, 0xdead; }",
        words(*_after),
        words(*_old),
        words(*_new),
    )
lane_case(
    FAMILY,
    "atom.shared.cas.b32",
    "{ .shared .align 4 .b32 room[128]; .reg .b32 %w, %x; mov.u32 %w, room; mad.lo.u32 %w, %t, 4, %w; "
    "st.shared.b32 [%w], %a; and.b32 %x, %a, -2; atom.shared.cas.b32 %x, [%w], %x, %b; "
    "ld.shared.b32 %o, [%w]; xor.b32 %o, %o, %x; }",
    words(
        *(
            (int(b) if a % 2 == 0 else int(a)) ^ int(a)
            for a, b in zip(_WORDS[:128], _WORDS[128:256], strict=True)
        )
    ),
    _WORDS[:128],
    _WORDS[128:256],
)
# Small integers: sums of floats are exact in any order.
FAMILY.kernel(
    "red_add_f32",
    ".reg .b64 %at; .reg .b32 %v; .reg .f32 %f; mul.wide.u32 %at, %t, 4; add.u64 %at, %in0, %at; "
    "ld.global.b32 %v, [%at]; cvt.rn.f32.u32 %f, %v; red.global.add.f32 [%out], %f;",
    np.array([sum(_SMALL) + 5], np.float32),
    [words(*_SMALL)],
    block=_COUNT,
    start=np.array([5], np.float32),
)
