"""Matrices of a warp and of a warpgroup."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from tests.ptxemu.warps import entry, lanes

from ptxemu import EmulatorError, Machine
from ptxemu._numbers import eight_values
from ptxemu.tma import Swizzle, swizzle_address

Array = npt.NDArray[np.float64]
LANE = np.arange(32)

MOVE = """.shared .align 16 .b8 room[512]; .reg .b32 at, l, %r<4>; mov.u32 l, %laneid;
shl.b32 at, l, 4; mov.b32 %r0, room; add.s32 at, at, %r0;
"""


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_are_loaded(trans: str) -> None:
    """Lane t gets row t/4, columns 2(t%4) and the next; transposed, rows and columns change."""
    body = (
        MOVE
        + f"""st.shared.v4.b32 [at], {{%a, %b, %c, %d}}; bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r0, %r1, %r2, %r3}}, [at];
    mov.b32 %o, %rN;"""
    )
    rows = np.arange(256, dtype=np.uint16).reshape(32, 8)
    words = rows.view(np.uint32)
    for matrix in range(4):
        found = lanes(body.replace("%rN", f"%r{matrix}"), np.uint32, *words.T.copy())
        values = rows[8 * matrix : 8 * matrix + 8]
        values = values.T if trans else values
        expected = np.ascontiguousarray(values).view(np.uint32).reshape(32)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_are_stored(trans: str) -> None:
    body = (
        MOVE
        + f"""stmatrix.sync.aligned.m8n8.x2{trans}.shared.b16 [at], {{%a, %b}};
    bar.warp.sync -1; mov.b32 at, room; shl.b32 l, l, 2; add.s32 at, at, l;
    ld.shared.b32 %o, [at+128];"""
    )
    first, second = np.arange(32, dtype=np.uint32), np.arange(64, dtype=np.uint16).view(np.uint32)
    matrix = second.view(np.uint16).reshape(8, 8)
    matrix = matrix.T if trans else matrix
    expected = np.ascontiguousarray(matrix).view(np.uint32).reshape(32)
    assert np.array_equal(lanes(body, np.uint32, first, second), expected)


def random_words(rng: np.random.Generator, kind: str, count: int) -> npt.NDArray[np.uint32]:
    """Registers of small integers of a type, exact in it: ``[count, 32]``."""
    values = rng.integers(-4, 5, (count, 32, {"tf32": 1, "bf16": 2}.get(kind, 4))).astype(
        np.float32
    )
    if kind == "tf32":
        return values.view(np.uint32)[:, :, 0]
    if kind == "bf16":
        high = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return np.ascontiguousarray(high).view(np.uint32)[:, :, 0]
    table = eight_values("e4m3")
    codes = np.array([int(np.flatnonzero(table == v)[0]) for v in values.reshape(-1)], np.uint8)
    return codes.reshape(values.shape).view(np.uint32)[:, :, 0]


def values_of(words: npt.NDArray[np.uint32], kind: str) -> Array:
    """Elements of registers, ``[registers, 32, elements]``."""
    if kind == "tf32":
        return words[:, :, None].view(np.float32).astype(np.float64)
    if kind == "bf16":
        halves = np.ascontiguousarray(words[:, :, None]).view(np.uint16).astype(np.uint32)
        numbers: Array = (halves << np.uint32(16)).view(np.float32).astype(np.float64)
        return numbers
    codes = np.ascontiguousarray(words[:, :, None]).view(np.uint8)
    found: Array = eight_values("e4m3")[codes]
    return found


@pytest.mark.parametrize(
    ("shape", "kind"), [("m16n8k16", "bf16"), ("m16n8k8", "bf16"), ("m16n8k8", "tf32")]
)
def test_product_of_a_warp(shape: str, kind: str, rng: np.random.Generator) -> None:
    depth = int(shape.split("k")[1])
    width = {"tf32": 1, "bf16": 2}[kind]
    count = 16 * depth // 32 // width
    a_words, b_words = random_words(rng, kind, count), random_words(rng, kind, count // 2)
    a_values, b_values = values_of(a_words, kind), values_of(b_words, kind)
    a, b = np.zeros((16, depth)), np.zeros((depth, 8))
    for lane in range(32):
        for e in range(width):
            for r in range(count):
                column = width * (lane % 4) + e + 4 * width * (r // 2)
                a[lane // 4 + 8 * (r % 2), column] = a_values[r, lane, e]
            for r in range(count // 2):
                b[width * (lane % 4) + e + 4 * width * r, lane // 4] = b_values[r, lane, e]
    product = a @ b
    body = f""".reg .b32 %k<4>; .reg .f32 %s<4>; mov.f32 %s0, 0f3F800000; mov.f32 %s1, %s0;
    mov.f32 %s2, %s0; mov.f32 %s3, %s0; LOADS
    mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {{%s0, %s1, %s2, %s3}}, {{A}}, {{B}},
    {{%s0, %s1, %s2, %s3}}; mov.b32 %o, %sN;"""
    names = ["%a", "%b", "%c", "%d", "%e"][:count]
    inputs = [*a_words, *b_words]
    if len(inputs) > 5:
        # The last register of B is the first one, with its lanes' values.
        b_words[1] = b_words[0]
        inputs = [*a_words, b_words[0]]
        b[depth // 2 :] = b[: depth // 2]
        product = a @ b
    second = ["%a", "%b", "%c", "%d", "%e"][count : count + count // 2]
    second += second[:1] * (count // 2 - len(second))
    body = body.replace("LOADS", "").replace("{A}", "{" + ", ".join(names) + "}")
    body = body.replace("{B}", "{" + ", ".join(second) + "}")
    for r in range(4):
        found = lanes(body.replace("%sN", f"%s{r}"), np.float32, *inputs)
        expected = product[LANE // 4 + 8 * (r // 2), 2 * (LANE % 4) + r % 2] + 1
        assert np.array_equal(found, expected.astype(np.float32))


def test_integers_of_a_warp(rng: np.random.Generator) -> None:
    """m16n8k32 of s8: rows t/4 and the row 8 below, four columns a register, the next 16 further;
    sums wrap."""
    a = rng.integers(-128, 128, (16, 32)).astype(np.int8)
    b = rng.integers(-128, 128, (8, 32)).astype(np.int8)
    a_words, b_words = a.view(np.uint32), b.view(np.uint32)
    registers = [a_words[LANE // 4 + 8 * (r % 2), LANE % 4 + 4 * (r // 2)] for r in range(4)]
    # The second half of B is the first: there are five inputs.
    b_words = np.concatenate([b_words[:, :4], b_words[:, :4]], axis=1)
    registers.append(b_words[LANE // 4, LANE % 4])
    start = 2**31 - 1
    product = a.astype(np.int64) @ np.ascontiguousarray(b_words).view(np.int8).astype(np.int64).T
    expected = (product + start).astype(np.int32)
    assert (expected < 0).any() and (expected > 0).any()
    body = f""".reg .b32 %s<4>; mov.b32 %s0, {start}; mov.b32 %s1, %s0; mov.b32 %s2, %s0;
    mov.b32 %s3, %s0; mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {{%s0, %s1, %s2, %s3}},
    {{%a, %b, %c, %d}}, {{%e, %e}}, {{%s0, %s1, %s2, %s3}}; mov.b32 %o, %sN;"""
    for r in range(4):
        found = lanes(body.replace("%sN", f"%s{r}"), np.int32, *registers)
        assert np.array_equal(found, expected[LANE // 4 + 8 * (r // 2), 2 * (LANE % 4) + r % 2])


GROUP = """
.shared .align 1024 .b8 a[8192]; .shared .align 1024 .b8 b[2048];
.reg .b32 %t, %x, %at, %i; .reg .b64 %p, %in, %da, %db; .reg .pred %c, %q; .reg .f32 %d<8>;
ld.param.u64 %in, [in]; mov.u32 %t, %tid.x; mov.b32 %i, %t;
COPY: mad.wide.u32 %p, %i, 4, %in; ld.global.b32 %x, [%p]; shl.b32 %at, %i, 2;
add.s32 %at, %at, 1024; st.shared.b32 [%at], %x; add.s32 %i, %i, 128;
setp.lt.u32 %c, %i, 2560; @%c bra COPY;
fence.proxy.async.shared::cta; bar.sync 0;
mov.b32 %x, a; shr.u32 %x, %x, 4; cvt.u64.u32 %da, %x; or.b64 %da, %da, HIGH;
mov.b32 %x, b; shr.u32 %x, %x, 4; cvt.u64.u32 %db, %x; or.b64 %db, %db, HIGH;
ZERO
wgmma.fence.sync.aligned;
setp.ne.b32 %q, 0, 0;
MULTIPLY
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
ld.param.u64 %p, [out]; mad.wide.u32 %p, %t, 32, %p;
st.global.v4.f32 [%p], {%d0, %d1, %d2, %d3}; st.global.v4.f32 [%p+16], {%d4, %d5, %d6, %d7}; ret;
"""

#: Two steps along the products, the first of which overwrites.
STEPS = """
wgmma.mma_async.sync.aligned.m64n16kDEPTH.f32.KIND.KIND {REGISTERS}, %da, %db, %q, 1, 1TRANS;
add.s64 %da, %da, 2; add.s64 %db, %db, 2;
wgmma.mma_async.sync.aligned.m64n16kDEPTH.f32.KIND.KIND {REGISTERS}, %da, %db, 1, 1, 1TRANS;
"""
REGISTERS = ", ".join(f"%d{r}" for r in range(8))


def group_text(kind: str, swizzle: Swizzle = Swizzle.B128) -> str:
    """The kernel: A of 64 rows, B of 16, each of one swizzle's span."""
    depth = {"bf16": 16, "tf32": 8, "e4m3": 32}[kind]
    layout = {Swizzle.B128: 1, Swizzle.B64: 2, Swizzle.B32: 3}[swizzle]
    high = layout << 62 | (8 * swizzle.span >> 4) << 32
    steps = STEPS.replace("DEPTH", str(depth)).replace("KIND", kind)
    steps = steps.replace("REGISTERS", REGISTERS)
    steps = steps.replace("TRANS", ", 0, 0" if kind == "bf16" else "")
    zero = "".join(f"mov.f32 %d{r}, 0f40A00000; " for r in range(8))
    steps = steps.replace("%db, 1, 1, 1", "%db, %c, 1, 1").replace(
        "add.s64 %da", "setp.eq.b32 %c, 0, 0; add.s64 %da"
    )
    body = GROUP.replace("HIGH", str(high)).replace("MULTIPLY", steps).replace("ZERO", zero)
    return entry(body, ["u64 in", "u64 out"])


def multiply(text: str, image: npt.NDArray[np.uint8], seed: int) -> npt.NDArray[np.float32]:
    """Runs the kernel on an image of shared memory; returns ``[64, 16]``."""
    machine = Machine(seed=seed)
    out = machine.alloc(np.full((128, 8), np.nan, np.float32))
    machine.load(text).launch(block=128, args=[machine.alloc(image), out])
    values, result = out.read(), np.zeros((64, 16), np.float32)
    for t in range(128):
        for r in range(8):
            row = 16 * (t // 32) + t % 32 // 4 + 8 * (r // 2 % 2)
            result[row, 8 * (r // 4) + 2 * (t % 4) + r % 2] = values[t, r]
    return result


def operands(
    rng: np.random.Generator, kind: str, swizzle: Swizzle
) -> tuple[npt.NDArray[np.uint8], Array]:
    """An image of A and B in shared memory from byte 1024 on, and their product."""
    size = {"bf16": 2, "tf32": 4, "e4m3": 1}[kind]
    span = swizzle.span
    image = np.zeros(10240, np.uint8)
    parts = []
    for rows, start in ((64, 0), (16, 8192)):
        words = random_words(rng, kind, rows * span // 128)
        raw = words.reshape(-1).view(np.uint8).reshape(rows, span)
        parts.append(values_of(words, kind).reshape(rows, span // size)[:, : 64 // size])
        address = np.arange(rows)[:, None] * span + np.arange(span)
        image[swizzle_address(address + start, swizzle)] = raw
    return image, parts[0] @ parts[1].T


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["bf16", "tf32", "e4m3"])
@pytest.mark.parametrize("swizzle", [Swizzle.B128, Swizzle.B64])
def test_product_of_a_warpgroup(
    kind: str, swizzle: Swizzle, seed: int, rng: np.random.Generator
) -> None:
    """Integers: products and sums are exact, and the first multiply overwrites what was there."""
    image, product = operands(rng, kind, swizzle)
    found = multiply(group_text(kind, swizzle), image, seed)
    assert np.array_equal(found, product.astype(np.float32))


def integer_text(kind: str) -> str:
    """The same kernel for integers: registers of int32, no signs at the end."""
    text = group_text("e4m3").replace("f32.e4m3.e4m3", f"s32.{kind}.{kind}")
    text = text.replace(", 1, 1;", ";").replace(".reg .f32 %d<8>", ".reg .s32 %d<8>")
    text = text.replace("mov.f32 %d", "mov.b32 %d").replace("0f40A00000", "5")
    return text.replace("st.global.v4.f32", "st.global.v4.b32")


@pytest.mark.parametrize("kind", ["s8", "u8"])
@pytest.mark.parametrize("seed", range(2))
def test_product_of_integers(kind: str, seed: int, rng: np.random.Generator) -> None:
    """Every value of 8 bits."""
    image = np.zeros(10240, np.uint8)
    parts = []
    for rows, start in ((64, 0), (16, 8192)):
        raw = rng.integers(0, 256, (rows, 128)).astype(np.uint8)
        raw[:4, :64] = 127 if kind == "s8" else 255
        parts.append(raw.view(np.int8 if kind == "s8" else np.uint8)[:, :64].astype(np.int64))
        address = np.arange(rows)[:, None] * 128 + np.arange(128)
        image[swizzle_address(address + start, Swizzle.B128)] = raw
    found = multiply(integer_text(kind), image, seed).view(np.int32)
    assert np.array_equal(found, (parts[0] @ parts[1].T).astype(np.int32))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("s32.s8.s8", "f32.s8.s8", "these types are not supported"),
        ("s32.s8.s8", "s32.e4m3.e4m3", "these types are not supported"),
        ("m64n16k32", "m64n16k16", "no such shape"),
        ("m64n16k32", "m64n40k32", "no such shape"),
    ],
)
def test_integers_have_their_shapes(old: str, new: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        multiply(integer_text("s8").replace(old, new), np.zeros(10240, np.uint8), 0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fence.proxy.async.shared::cta;", "", "no fence.proxy.async followed"),
        ("wgmma.fence.sync.aligned;", "", "before any wgmma.fence"),
        (
            "setp.ne.b32 %q, 0, 0;",
            "setp.eq.b32 %q, 0, 0; mov.f32 %d3, 0f3F800000;",
            "written after",
        ),
        ("wgmma.wait_group.sync.aligned 0;", "", "is used before wgmma.wait_group"),
        ("wgmma.wait_group.sync.aligned 0;", "st.shared.b32 [a], 0;", "may still be reading it"),
        ("setp.lt.u32 %c, %i, 2560;", "setp.lt.u32 %c, %i, 2400;", "nothing has written it"),
    ],
)
def test_product_with_a_mistake(old: str, new: str, message: str, rng: np.random.Generator) -> None:
    text = group_text("bf16")
    assert text.count(old) == 1
    image, _ = operands(rng, "bf16", Swizzle.B128)
    with pytest.raises(EmulatorError, match=message):
        multiply(text.replace(old, new), image, 0)
