"""Floating-point instructions: rounding, NaN, signed zeros, subnormals."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.ptxemu.warps import lanes

NAN = 0x7FFFFFFF
EDGES = np.array(
    [0.0, -0.0, 1.0, -1.0, 1.5, 3.4e38, -3.4e38, 1e-45, -1e-45, 1.2e-38, np.inf, -np.inf, np.nan],
    np.float32,
)


def spread(seed: int) -> npt.NDArray[np.float32]:
    """Numbers of every magnitude, and edges."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, 19, np.uint32)
    return np.concatenate([rng.permutation(EDGES), bits.view(np.float32)])


def next_to(value: Fraction, rounding: str) -> Any:
    """The float32 that an exact finite number is rounded to."""
    near = np.float32(float(value))
    candidates = [np.nextafter(near, np.float32(-np.inf)), near]
    candidates.append(np.nextafter(near, np.float32(np.inf)))
    finite = [c for c in candidates if np.isfinite(c)]
    below = [c for c in finite if Fraction(float(c)) <= value]
    above = [c for c in finite if Fraction(float(c)) >= value]
    low = max(below, key=float) if below else np.float32(-np.inf)
    high = min(above, key=float) if above else np.float32(np.inf)
    if rounding == "rz":
        return low if value > 0 else high
    if rounding in ("rm", "rp"):
        return low if rounding == "rm" else high
    down, up = value - Fraction(float(low)), Fraction(float(high)) - value
    if down != up:
        return low if down < up else high
    return low if low.view(np.uint32) % 2 == 0 else high


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_fused_multiply_add_rounds_once(rounding: str) -> None:
    rng = np.random.default_rng(7)
    a, b = (rng.uniform(-2, 2, 32).astype(np.float32) for _ in range(2))
    # Sums that cancel, that are ties, and whose smaller part only a sticky bit keeps.
    c = (-(a * b)).astype(np.float32)
    c[8:16] = rng.uniform(1e6, 1e7, 8)
    c[16:24] = 2.0**-60
    a[24:], b[24:], c[24:] = 1 + 2.0**-12, 1 + 2.0**-12, [2.0**-k for k in range(20, 36, 2)]
    found = lanes(f"fma.{rounding}.f32 %o, %a, %b, %c;", np.float32, a, b, c)
    for lane in range(32):
        exact = Fraction(float(a[lane])) * Fraction(float(b[lane])) + Fraction(float(c[lane]))
        assert found[lane] == next_to(exact, rounding), lane


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_arithmetic_rounds_as_asked(name: str, rounding: str) -> None:
    rng = np.random.default_rng(3)
    a = (rng.uniform(1, 2, 32) * 2.0 ** rng.integers(-30, 30, 32)).astype(np.float32)
    b = (rng.uniform(-2, 2, 32) * 2.0 ** rng.integers(-30, 30, 32)).astype(np.float32)
    found = lanes(f"{name}.{rounding}.f32 %o, %a, %b;", np.float32, a, b)
    for lane in range(32):
        x, y = Fraction(float(a[lane])), Fraction(float(b[lane]))
        exact = {"add": x + y, "sub": x - y, "mul": x * y}[name]
        assert found[lane] == next_to(exact, rounding), lane


def test_results_that_are_no_numbers_are_one_nan() -> None:
    a, b = np.array([np.inf, 0, np.nan], np.float32), np.array([-np.inf, np.inf, 1], np.float32)
    assert lanes("add.f32 %o, %a, %b;", np.uint32, a, b)[[0, 2]].tolist() == [NAN, NAN]
    assert lanes("mul.f32 %o, %a, %b;", np.uint32, a, b)[1:3].tolist() == [NAN, NAN]
    assert lanes("sqrt.rn.f32 %o, %a;", np.uint32, -np.ones(1, np.float32))[0] == NAN


@pytest.mark.parametrize("name", ["min", "max"])
def test_extremes(name: str) -> None:
    a = np.array([np.nan, 1, np.nan, -0.0, 0.0, 5], np.float32)
    b = np.array([2, np.nan, np.nan, 0.0, -0.0, -5], np.float32)
    found = lanes(f"{name}.f32 %o, %a, %b;", np.float32, a, b)[:6]
    assert found[:2].tolist() == [2, 1]
    assert np.isnan(found[2])
    assert np.signbit(found[3:5]).tolist() == [name == "min"] * 2
    assert found[5] == (-5 if name == "min" else 5)
    kept = lanes(f"{name}.NaN.f32 %o, %a, %b;", np.uint32, a, b)
    assert kept[:3].tolist() == [NAN] * 3


def test_flushing_of_subnormals() -> None:
    a = np.array([1e-40, -1e-40, 2e-38], np.float32)
    one = np.array([1], np.float32)
    found = lanes("mul.ftz.f32 %o, %a, %b;", np.float32, a, one)[:3]
    assert found.tolist() == [0, 0, a[2]]
    assert np.signbit(found).tolist() == [False, True, False]
    assert lanes("mul.f32 %o, %a, %b;", np.float32, a, one)[0] == a[0]


def test_saturation() -> None:
    a = np.array([-1, 0.25, 7, np.nan], np.float32)
    zero = np.zeros(1, np.float32)
    assert lanes("add.sat.f32 %o, %a, %b;", np.float32, a, zero)[:4].tolist() == [0, 0.25, 1, 0]


@pytest.mark.parametrize(
    ("comparison", "expected"),
    [
        ("lt", [1, 0, 0, 0]),
        ("ltu", [1, 0, 1, 1]),
        ("ne", [1, 0, 0, 0]),
        ("neu", [1, 0, 1, 1]),
        ("equ", [0, 1, 1, 1]),
        ("num", [1, 1, 0, 0]),
        ("nan", [0, 0, 1, 1]),
    ],
)
def test_unordered_comparisons(comparison: str, expected: list[int]) -> None:
    a, b = np.array([1, 2, np.nan, 1], np.float32), np.array([2, 2, 1, np.nan], np.float32)
    body = f".reg .pred p; setp.{comparison}.f32 p, %a, %b; selp.b32 %o, 1, 0, p;"
    assert lanes(body, np.int32, a, b)[:4].tolist() == expected


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("rcp.rn.f32", lambda x: 1 / x),
        ("sqrt.rn.f32", np.sqrt),
        ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x)),
        ("ex2.approx.ftz.f32", np.exp2),
        ("lg2.approx.f32", np.log2),
        ("sin.approx.f32", np.sin),
        ("tanh.approx.f32", np.tanh),
    ],
)
def test_functions(text: str, function: np.ufunc) -> None:
    values = np.linspace(0.1, 4, 32).astype(np.float32)
    expected = function(values.astype(np.float64)).astype(np.float32)
    assert np.array_equal(lanes(f"{text} %o, %a;", np.float32, values), expected)


def test_division_and_signs() -> None:
    a, b = spread(1), spread(2)
    with np.errstate(all="ignore"):
        expected = a / b
    found = lanes("div.rn.f32 %o, %a, %b;", np.float32, a, b)
    assert np.array_equal(found, expected, equal_nan=True)
    signed = lanes("copysign.f32 %o, %a, %b;", np.uint32, a, b)
    bits = a.view(np.uint32) & 0x80000000 | b.view(np.uint32) & 0x7FFFFFFF
    keep = ~np.isnan(b)
    assert np.array_equal(signed[keep], bits[keep])
    assert np.array_equal(lanes("neg.f32 %o, %a;", np.float32, a), -a, equal_nan=True)


def test_half_precision() -> None:
    rng = np.random.default_rng(5)
    a, b, c = (rng.uniform(-8, 8, 32).astype(np.float16) for _ in range(3))
    exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    found = lanes("fma.rn.f16 %o, %a, %b, %c;", np.float16, a, b, c)
    assert np.array_equal(found, exact.astype(np.float16))
    pair = np.stack([a, b], axis=1).copy().view(np.uint32).reshape(32)
    doubled = lanes("add.rn.f16x2 %o, %a, %a;", np.uint32, pair).view(np.float16).reshape(32, 2)
    assert np.array_equal(doubled, np.stack([a + a, b + b], axis=1))


def test_pairs_of_float32() -> None:
    """9.7.3: two elements in a register of 64 bits, each rounded once."""
    rng = np.random.default_rng(6)
    a, b, c = (rng.uniform(-8, 8, (32, 2)).astype(np.float32) for _ in range(3))
    pairs = [values.view(np.uint64).reshape(32) for values in (a, b, c)]
    exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    for text, expected in (
        ("mul.f32x2 %o, %a, %b;", a * b),
        ("add.rn.f32x2 %o, %a, %b;", a + b),
        ("sub.f32x2 %o, %a, %b;", a - b),
        ("fma.rn.f32x2 %o, %a, %b, %c;", exact.astype(np.float32)),
    ):
        found = lanes(text, np.uint64, *pairs).view(np.float32).reshape(32, 2)
        assert np.array_equal(found, expected)


def test_bfloat16_rounds_once() -> None:
    """1 + 2^-8 is a tie; 2^-16 more in the addend decides it."""
    one = 0x3F80
    a = np.array([one, one, one], np.uint16)
    tie = np.array([0x3B80, 0x3B80, 0x3B80], np.uint16)
    small = np.array([0x0000, 0x2F80, 0xAF80], np.uint16)
    body = ".reg .b16 x; fma.rn.bf16 x, %b, %a, %c; fma.rn.bf16 %o, %a, %a, x;"
    assert lanes(body, np.uint16, a, tie, small)[0] == one
    product = "fma.rn.bf16 %o, %a, %b, %c;"
    assert lanes(product, np.uint16, np.array([0x3F81], np.uint16), a, tie)[0] == 0x3F82
    assert lanes(product, np.uint16, a, a, tie)[0] == one


def test_double_precision() -> None:
    a, b = np.array([1 / 3, 1e300, -2.5]), np.array([3.0, 1e10, 0.5])
    with np.errstate(over="ignore"):
        expected = a * b
    assert np.array_equal(lanes("mul.rn.f64 %o, %a, %b;", np.float64, a, b)[:3], expected)
    literal = lanes("add.rn.f64 %o, %a, 0d3FF0000000000000;", np.float64, a)[:3]
    assert np.array_equal(literal, a + 1)
