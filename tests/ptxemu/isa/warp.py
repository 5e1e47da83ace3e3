"""What lanes do together (PTX ISA 9.0, 9.7.9.6, 9.7.13.9 to 9.7.13.14), lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from .case import Family, lane_case, words

FAMILY = Family("warp")

_WARPS = 4
_RNG = np.random.default_rng(11)
_VALUES = [int(v) for v in _RNG.integers(0, 1 << 32, 32 * _WARPS, np.uint64)]
_FEW = [int(v) for v in _RNG.integers(0, 5, 32 * _WARPS)]
_DISTANCES = [int(v) for v in _RNG.integers(0, 32, 32 * _WARPS)]


def _by_warp(function: Callable[[list[int], int], int], values: list[int]) -> list[int]:
    """``function(the warp's values, lane)`` for every lane."""
    return [function(values[k & ~31 : (k & ~31) + 32], k & 31) for k in range(len(values))]


def _shuffled(mode: str, b: int, c: int, lane: int) -> tuple[int, bool]:
    """9.7.9.6's pseudocode: the lane that is read, and whether it is in range."""
    bval, cval = b & 31, c & 31
    mask = c >> 8 & 31
    highest = (lane & mask) | (cval & ~mask & 31)
    lowest = lane & mask
    if mode == "up":
        j = lane - bval
        inside = j >= highest
    elif mode == "down":
        j = lane + bval
        inside = j <= highest
    elif mode == "bfly":
        j = lane ^ bval
        inside = j <= highest
    else:
        j = lowest | (bval & ~mask & 31)
        inside = j <= highest
    return (j if inside else lane), inside


for _mode, _clamps in {
    "up": (0x0000, 0x1800, 0x1C00),
    "down": (0x001F, 0x181F, 0x0010),
    "bfly": (0x001F, 0x101F, 0x000F),
    "idx": (0x001F, 0x181F, 0x0007),
}.items():
    for _clamp in _clamps:
        for _name, _amounts in (("lanes", _DISTANCES), ("one", [5] * len(_VALUES))):
            _expected = []
            for _k, _amount in enumerate(_amounts):
                _lane, _inside = _shuffled(_mode, _amount, _clamp, _k & 31)
                _value = _VALUES[(_k & ~31) + _lane]
                _expected.append(_value ^ (0 if _inside else 0xFFFF))
            lane_case(
                FAMILY,
                f"shfl.sync.{_mode}.b32",
                f"shfl.sync.{_mode}.b32 %o|%p, %a, %b, {_clamp:#x}, 0xffffffff; "
                "@!%p xor.b32 %o, %o, 0xffff;",
                words(*_expected),
                words(*_VALUES),
                words(*_amounts),
                suffix=f"_{_clamp:x}_{_name}",
            )


def _mask(lanes: list[bool]) -> int:
    return sum(1 << k for k, chosen in enumerate(lanes) if chosen)


def _add(
    opcode: str, code: str, function: Callable[[list[int], int], int], few: bool = False
) -> None:
    values = _FEW if few else _VALUES
    lane_case(FAMILY, opcode, code, words(*_by_warp(function, values)), words(*values))


_ODD = "{ .reg .b32 %x; and.b32 %x, %a, 1; setp.eq.u32 %p, %x, 1; } "
_PICK = " selp.b32 %o, 7, 9, %q;"
_add(
    "vote.sync.ballot.b32",
    _ODD + "vote.sync.ballot.b32 %o, %p, 0xffffffff;",
    lambda v, lane: _mask([bool(x & 1) for x in v]),
)
_add(
    "vote.sync.any.pred",
    "setp.eq.u32 %p, %a, 4; vote.sync.any.pred %q, %p, 0xffffffff;" + _PICK,
    lambda v, lane: 7 if any(x == 4 for x in v) else 9,
    few=True,
)
_add(
    "vote.sync.all.pred",
    "setp.le.u32 %p, %a, 4; vote.sync.all.pred %q, !%p, 0xffffffff;" + _PICK,
    lambda v, lane: 7 if all(x > 4 for x in v) else 9,
    few=True,
)
_add(
    "vote.sync.uni.pred",
    "setp.le.u32 %p, %a, 9; vote.sync.uni.pred %q, %p, 0xffffffff;" + _PICK,
    lambda v, lane: 7,
    few=True,
)
_add(
    "match.any.sync.b32",
    "match.any.sync.b32 %o, %a, 0xffffffff;",
    lambda v, lane: _mask([x == v[lane] for x in v]),
    few=True,
)
_add(
    "match.all.sync.b32",
    "{ .reg .b32 %x; setp.lt.u32 %q, %a, 100; selp.b32 %x, 1, 0, %q; "
    "match.all.sync.b32 %o|%p, %x, 0xffffffff; @%p add.u32 %o, %o, 2; }",
    lambda v, lane: 1 if all(x < 100 for x in v) or all(x >= 100 for x in v) else 0,
)
_add(
    "match.all.sync.differ.b32",
    "match.all.sync.b32 %o|%p, %a, 0xffffffff; @!%p add.u32 %o, %o, 2;",
    lambda v, lane: 2,
)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


for _name, _function in {
    "add.u32": lambda v, lane: sum(v),
    "min.u32": lambda v, lane: min(v),
    "max.u32": lambda v, lane: max(v),
    "min.s32": lambda v, lane: min(map(_signed, v)),
    "max.s32": lambda v, lane: max(map(_signed, v)),
    "and.b32": lambda v, lane: reduce(lambda a, b: a & b, v),
    "or.b32": lambda v, lane: reduce(lambda a, b: a | b, v),
    "xor.b32": lambda v, lane: reduce(lambda a, b: a ^ b, v),
}.items():
    _add(f"redux.sync.{_name}", f"redux.sync.{_name} %o, %a, 0xffffffff;", _function)

# Two sides of a branch, each with its member mask.
_LOW = 0x00000FFF
_add(
    "redux.sync.add.parts",
    "{ .reg .b32 %l; mov.u32 %l, %laneid; setp.lt.u32 %p, %l, 12; } @%p bra LOW;"
    f"redux.sync.add.u32 %o, %a, {0xFFFFFFFF ^ _LOW:#x}; bra MET;"
    f"LOW: redux.sync.add.u32 %o, %a, {_LOW:#x}; MET:",
    lambda v, lane: sum(v[:12]) if lane < 12 else sum(v[12:]),
)
_add(
    "activemask.b32",
    "{ .reg .b32 %l; mov.u32 %l, %laneid; setp.lt.u32 %p, %l, 12; mov.b32 %o, 1; } @%p bra MET;"
    f"vote.sync.ballot.b32 %o, 1, {0xFFFFFFFF ^ _LOW:#x}; MET:",
    lambda v, lane: 1 if lane < 12 else 0xFFFFFFFF ^ _LOW,
)
# Which lane is elected is open: one is, and all hear of it.
_add(
    "elect.sync",
    "{ .reg .b32 %e, %l, %n; elect.sync %e|%p, 0xffffffff; vote.sync.ballot.b32 %n, %p, 0xffffffff; "
    "popc.b32 %o, %n; mov.b32 %l, 1; shl.b32 %l, %l, %e; setp.eq.u32 %q, %l, %n; "
    "@%q add.u32 %o, %o, 10; }",
    lambda v, lane: 11,
)
_add(
    "laneid",
    "{ .reg .b32 %x; mov.u32 %o, %laneid; mov.u32 %x, %lanemask_lt; add.u32 %o, %o, %x; "
    "mov.u32 %x, %lanemask_ge; xor.b32 %o, %o, %x; mov.u32 %x, %lanemask_eq; xor.b32 %o, %o, %x; }",
    lambda v, lane: (lane + (1 << lane) - 1) ^ (0xFFFFFFFF << lane & 0xFFFFFFFF) ^ 1 << lane,
)
