"""Multiplies and copies of tcgen05: layouts, types, order, and what must be waited for.

Expected values come from matrices; where their elements lie in shared and tensor memory is written
here from the canonical layouts (PTX ISA 9.0, 9.7.16.3.3) and the data path layouts (9.7.16.10.5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.ptxemu.tensor import WAIT, Image, Program, Words, gathered, registers

from ptxemu import (
    DeadlockError,
    EmulatorError,
    FenceError,
    IllegalInstructionError,
    MemoryFaultError,
    RaceError,
)
from ptxemu._numbers import nearest_bfloat16
from ptxemu.tma import Swizzle, swizzle_address

Array = npt.NDArray[Any]

#: Element bytes, the kind, and the codes of D, A and B (Table 42 of 9.7.16.4.2).
TYPES: dict[str, tuple[int, str, int, int]] = {
    "bf16": (2, "f16", 1, 1),
    "f16": (2, "f16", 1, 0),
    "f16-sums": (2, "f16", 0, 0),
    "tf32": (4, "tf32", 1, 2),
    "e4m3": (1, "f8f6f4", 1, 0),
    "e5m2": (1, "f8f6f4", 1, 1),
    "s8": (1, "i8", 2, 1),
    "u8": (1, "i8", 2, 0),
}

#: Codes of swizzling modes (Table 40 of 9.7.16.4.1).
MODES = {
    Swizzle.NONE: 0,
    Swizzle.B128_ATOM_32B: 1,
    Swizzle.B128: 2,
    Swizzle.B64: 4,
    Swizzle.B32: 6,
}

#: e4m3 and e5m2 of small integers: bias 7 and 15, 3 and 2 bits of fraction.
_E4M3 = {0: 0x00, 1: 0x38, 2: 0x40, 3: 0x44, 4: 0x48}
_E5M2 = {0: 0x00, 1: 0x3C, 2: 0x40, 3: 0x42, 4: 0x44}


def encode(values: Array, name: str) -> Array:
    """Small integers as elements' bytes ``[rows, products, bytes]``."""
    raw: Array
    if name in ("e4m3", "e5m2"):
        table = _E4M3 if name == "e4m3" else _E5M2
        codes = np.array([table[abs(int(v))] | (0x80 if v < 0 else 0) for v in values.flat])
        raw = np.array(codes, np.uint8)
    elif name == "bf16":
        raw = nearest_bfloat16(values.astype(np.float32).view(np.uint32)).astype(np.uint16)
    else:
        kind = {"tf32": "f4", "s8": "i1", "u8": "u1"}.get(name, "f2")
        raw = values.astype(kind)
    return np.ascontiguousarray(raw).view(np.uint8).reshape(*values.shape, TYPES[name][0])


@dataclass(frozen=True)
class Operand:
    """A matrix ``[rows, 32 bytes of products]`` in shared memory.

    Attributes:
        swizzle: Its pattern.
        transposed: Whether rows lie side by side ("MN-major").
    """

    swizzle: Swizzle
    transposed: bool = False

    def strides(self, rows: int) -> tuple[int, int]:
        """Leading and stride byte offset of a dense arrangement."""
        span = self.swizzle.span
        if not self.transposed:
            return (16 * rows, 128) if not span else (16, 8 * span)
        if not span:
            return 128 * rows, 128
        lines = 4 if self.swizzle is Swizzle.B128_ATOM_32B else 8
        # Groups of rows outside, groups of products inside.
        return lines * span * 8, lines * span

    def place(self, element: Array, first: int) -> Array:
        """Where each byte of ``[rows, products, bytes]`` lies from a first byte on."""
        rows, products, size = element.shape
        leading, stride = self.strides(rows * size // 16 if self.transposed else rows)
        row, product, byte = np.ogrid[:rows, :products, :size]
        span = self.swizzle.span
        if not self.transposed:
            along = product * size + byte
            chunk = along // 16 * (1 if span else leading // 16)
            where = row // 8 * stride + row % 8 * (span or 16) + chunk * 16 + along % 16
        else:
            along = row * size + byte
            lines = 4 if self.swizzle is Swizzle.B128_ATOM_32B else 8
            if span:
                where = along // span * leading + along % span
                where = where + product // lines * stride + product % lines * span
            else:
                where = along // 16 * stride + along % 16
                where = where + product // 8 * leading + product % 8 * 16
        where = np.broadcast_to(where, element.shape)
        return swizzle_address(first + where, self.swizzle)

    def descriptor(self, rows: int) -> int:
        """Everything but the address."""
        leading, stride = self.strides(rows)
        return MODES[self.swizzle] << 61 | 1 << 46 | stride >> 4 << 32 | leading >> 4 << 16


K128 = Operand(Swizzle.B128)


@dataclass(frozen=True)
class Multiply:
    """Two products of one accumulator: A*B, then twice A*B added.

    Attributes:
        name: The elements' type.
        rows: M.
        columns: N.
        blocks: 1, or 2 for a pair.
        a: How A lies.
        b: How B lies.
        further: Further bits of the instruction descriptor.
        tail: Operands behind the predicate.
        lanes: Words of lanes that are not written.
        first_lane: Of D, with 64 rows.
        tensor_a: Whether A is in tensor memory.
    """

    name: str = "bf16"
    rows: int = 128
    columns: int = 32
    blocks: int = 1
    a: Operand = K128
    b: Operand = K128
    further: int = 0
    tail: str = ""
    lanes: tuple[int, ...] = ()
    first_lane: int = 0
    tensor_a: bool = False

    @property
    def descriptor(self) -> int:
        """The instruction descriptor."""
        _, _, d, ab = TYPES[self.name]
        flags = self.a.transposed << 15 | self.b.transposed << 16
        size = self.columns >> 3 << 17 | self.rows >> 4 << 24
        return d << 4 | ab << 7 | ab << 10 | flags | size | self.further

    @property
    def own_rows(self) -> int:
        """Rows of A in a block."""
        return self.rows // self.blocks

    @property
    def halved(self) -> bool:
        """Whether D's halves of columns lie above each other (layout B)."""
        return self.rows == 128 and self.blocks == 2

    @property
    def read(self) -> tuple[str, int]:
        """Shape and repetitions of the load that reads D."""
        columns = self.columns // 2 if self.halved else self.columns
        if self.rows == 64:
            return "16x64b", columns // 2
        return "32x32b", columns

    def program(self) -> Program:
        """The kernel."""
        size, kind, _, _ = TYPES[self.name]
        second = self.room // 2
        own_columns = self.columns // self.blocks
        rows = self.own_rows * size // 16 if self.a.transposed else self.own_rows
        columns = own_columns * size // 16 if self.b.transposed else own_columns
        shape, count = self.read
        name = f"tcgen05.mma.cta_group::{self.blocks}.kind::{kind}"
        disabled = ""
        code = []
        if self.lanes:
            names = [f"%m{k % 4}" for k in range(len(self.lanes))]
            code += [f"mov.b32 %m{k}, {word};" for k, word in enumerate(self.lanes[:4])]
            disabled = "{" + ", ".join(names) + "}, "
        a = "%ad"
        if self.tensor_a:
            # Each thread brings its row's 32 bytes to eight columns behind D.
            code += ["shl.b32 %x, %t, 5; add.s32 %x, %x, %b;"]
            code += [f"ld.shared.b32 %r{k}, [%x+{4 * k}];" for k in range(8)]
            code += [f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%a+64], {registers(8)};"]
            code += ["tcgen05.wait::st.sync.aligned; bar.sync 0;"]
            code += ["barrier.cluster.arrive; barrier.cluster.wait;"]
            a = "[%a+64]"
        code += [
            f"shr.u32 %x, %b, 4; and.b32 %x, %x, 0x3FFF; cvt.u64.u32 %ad, %x;"
            f"add.s64 %bd, %ad, {second >> 4}; or.b64 %ad, %ad, {self.a.descriptor(rows)};"
            f"or.b64 %bd, %bd, {self.b.descriptor(columns)}; mov.b32 %x, {self.descriptor};"
            f"add.s32 %i, %a, {self.first_lane << 16};"
            "setp.ne.b32 %e, 0, 0; @!%f bra MULTIPLIED;",
            f"{name} [%i], {a}, %bd, %x, {disabled}%e{self.tail};",
            "setp.eq.b32 %e, 0, 0;",
            *[f"{name} [%i], {a}, %bd, %x, {disabled}%e{self.tail};"] * 2,
            self.commit(),
            "MULTIPLIED:",
            WAIT,
            f"tcgen05.ld.sync.aligned.{shape}.x{count}.b32 {registers(self.results)}, "
            f"[%a+{self.first_lane << 16}];",
            "tcgen05.wait::ld.sync.aligned;",
        ]
        return Program("\n".join(code), max(8, self.results), 128, self.blocks, self.room)

    @property
    def results(self) -> int:
        """Registers that the load fills."""
        return self.read[1]

    def commit(self) -> str:
        """Tells the block, or the pair."""
        name = f"tcgen05.commit.cta_group::{self.blocks}.mbarrier::arrive::one.shared::cluster"
        if self.blocks == 1:
            return f"{name}.b64 [bar];"
        return f"mov.b16 %h, 3; {name}.multicast::cluster.b64 [bar], %h;"

    @property
    def room(self) -> int:
        """Bytes of both operands in a block: half of them each."""
        return 32768

    def operands(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """A ``[M, K]`` and B ``[N, K]``, small integers."""
        depth = 32 // TYPES[self.name][0]
        low = 0 if self.name == "u8" else -3
        a, b = (rng.integers(low, 5, (n, depth)) for n in (self.rows, self.columns))
        return a, b

    def image(self, a: Array, b: Array) -> Image:
        """Both blocks' shared memory: each has its rows of A and of B."""
        found = np.full((self.blocks, self.room), 0xA5, np.uint8)
        for block in range(self.blocks):
            for matrix, how, start in ((a, self.a, 0), (b, self.b, self.room // 2)):
                own = len(matrix) // self.blocks
                element = encode(matrix[block * own : (block + 1) * own], self.name)
                if self.tensor_a and not start:
                    found[block, : element.size] = element.reshape(-1)
                    continue
                # The image begins at byte 1024 of shared memory.
                found[block, how.place(element, 1024 + start) - 1024] = element
        return found

    def result(self, words: Words) -> Array:
        """D ``[M, N]`` of all blocks' registers."""
        parts = []
        for found in words:
            tensor = gathered(found[:, : self.results], *self.read, self.first_lane)
            if self.rows == 64:
                lane = np.arange(64)
                tensor = tensor[32 * (lane // 16) + lane % 16 + self.first_lane]
            if self.halved:
                tensor = np.concatenate([tensor[:64], tensor[64:]], axis=1)
            parts.append(tensor)
        d = np.concatenate(parts)
        code = TYPES[self.name][2]
        if code == 0:
            return d.astype(np.uint16).view(np.float16).astype(np.float64)
        return d.view(np.float32 if code == 1 else np.int32).astype(np.float64)

    def check(self, seed: int = 0, factor: float = 3) -> None:
        """Runs it; D must be the product times a factor."""
        a, b = self.operands(np.random.default_rng(seed))
        found = self.result(self.program().run(self.image(a, b), seed))
        assert np.array_equal(found, factor * (a @ b.T))


@pytest.mark.parametrize("name", TYPES)
def test_types(name: str) -> None:
    Multiply(name).check()
    Multiply(name, a=Operand(Swizzle.NONE), b=Operand(Swizzle.B64)).check(1)


@pytest.mark.parametrize("swizzle", [Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128])
@pytest.mark.parametrize("name", ["bf16", "s8"])
def test_transposed_operands(swizzle: Swizzle, name: str) -> None:
    turned = Operand(swizzle, True)
    Multiply(name, a=turned, columns=128).check()
    Multiply(name, b=turned, columns=128).check(1)
    Multiply(name, rows=256, columns=128, blocks=2, a=turned, b=turned).check(2)


def test_transposed_words() -> None:
    """Elements of 32 bits lie transposed only in atoms of 32 bytes."""
    turned = Operand(Swizzle.B128_ATOM_32B, True)
    Multiply("tf32", a=turned, b=turned, columns=64).check()


@pytest.mark.parametrize(
    ("rows", "blocks", "columns"),
    [(64, 1, 8), (64, 1, 64), (128, 1, 8), (128, 1, 64), (128, 2, 64), (256, 2, 16), (256, 2, 64)],
)
@pytest.mark.parametrize("seed", range(2))
def test_data_path_layouts(rows: int, blocks: int, columns: int, seed: int) -> None:
    Multiply(rows=rows, blocks=blocks, columns=columns).check(seed)


def test_64_rows_in_the_upper_lanes() -> None:
    Multiply(rows=64, first_lane=16).check()


@pytest.mark.parametrize("multiply", [Multiply(), Multiply(rows=256, blocks=2), Multiply("s8")])
def test_a_in_tensor_memory(multiply: Multiply) -> None:
    replace(multiply, tensor_a=True).check()


def test_negated_operands() -> None:
    Multiply(further=1 << 13).check(factor=-3)
    Multiply(further=1 << 14).check(factor=-3)
    Multiply(further=3 << 13).check(factor=3)


def test_scaled_accumulator() -> None:
    """(1/4 + 1)/4 + 1 times the product."""
    Multiply(tail=", 2").check(factor=1.3125)


def test_saturated_sums() -> None:
    """Without saturation sums wrap; the products of 127 and 127 do neither here."""
    Multiply("s8", further=1 << 3).check()


def test_lanes_that_are_not_written() -> None:
    """The second multiply writes half of the lanes only; the others keep the first one's."""
    multiply = Multiply(lanes=(0xFFFF0000, 0, 0xFFFFFFFF, 1))
    a, b = multiply.operands(np.random.default_rng(0))
    text = multiply.program().text
    masked = re.findall(r"tcgen05\.mma[^;]*;", text)
    assert len(masked) == 3
    text = text.replace(masked[0], masked[0].replace("{%m0, %m1, %m2, %m3}, ", ""), 1)
    words = multiply.program().run(multiply.image(a, b), 0, text)
    lane = np.arange(128)
    skipped = np.select([lane < 32, lane < 64, lane < 96], [lane >= 16, False, True], lane == 96)
    factor = np.where(skipped, 1, 3)[:, None]
    assert np.array_equal(multiply.result(words), factor * (a @ b.T))


def test_sums_are_rounded_to_float32() -> None:
    """The accumulator keeps 24 bits: what is far below them is lost, exactly as float32 rounds."""
    multiply = Multiply("tf32", columns=8)
    a, b = np.zeros((128, 8)), np.zeros((8, 8))
    a[:, 0], a[:, 1] = 2.0**12, 1
    b[:, 0], b[:, 1] = 2.0**12, 1
    found = multiply.result(multiply.program().run(multiply.image(a, b), 0))
    step = np.float32(2.0**24 + 1)
    expected = np.float32(np.float32(2.0**24 + 1 + float(step)) + 2.0**24 + 1)
    assert (found == expected).all()


#: Name, what is replaced, error, message.
MISTAKES: list[tuple[str, str, str, type[EmulatorError], str]] = [
    (
        "a dropped commit",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];",
        "",
        DeadlockError,
        "1 of 1 arrivals",
    ),
    (
        "a dropped wait",
        "@!%e bra WAIT;",
        "",
        RaceError,
        "tcgen05.ld reads lane .*: a tcgen05 operation may still be writing it|nothing has written",
    ),
    (
        "shared memory that is overwritten",
        "MULTIPLIED:",
        "st.shared.b32 [tile], 0; MULTIPLIED:",
        RaceError,
        "an asynchronous operation may still be reading it",
    ),
    (
        "a dropped proxy fence",
        "fence.proxy.async.shared::cta;",
        "",
        FenceError,
        "tcgen05.mma's A reads byte .*no fence.proxy.async followed",
    ),
    (
        "sums of nothing",
        "setp.ne.b32 %e, 0, 0;",
        "setp.eq.b32 %e, 0, 0;",
        RaceError,
        "tcgen05.mma adds to lane 0, column .*nothing has written it",
    ),
    (
        "columns beyond the allocation",
        "add.s32 %i, %a, 0;",
        "add.s32 %i, %a, 112;",
        MemoryFaultError,
        "tcgen05.mma writes column .*not allocated|there are 512 columns",
    ),
    (
        "a lane that D cannot begin at",
        "add.s32 %i, %a, 0;",
        "add.s32 %i, %a, 0x100000;",
        MemoryFaultError,
        "tcgen05.mma with D at lane 16; 0 is allowed with 128 rows",
    ),
    (
        "a multiply that overwrites what nobody read",
        "setp.eq.b32 %e, 0, 0;",
        "",
        RaceError,
        "nobody has read any of what the last operation left",
    ),
    (
        "columns that are freed too early",
        "MULTIPLIED:",
        "MULTIPLIED: @%d tcgen05.dealloc.cta_group::1.sync.aligned.b32 %a, 128;",
        EmulatorError,
        "tcgen05.dealloc frees lane .*may still be|tcgen05.ld reads column .*is not allocated",
    ),
    (
        "an accumulator of another shape in between",
        "setp.eq.b32 %e, 0, 0;",
        "setp.ne.b32 %e, 0, 0; xor.b32 %x, %x, 0x60000;",
        RaceError,
        "tcgen05.mma writes lane .*may still be writing it",
    ),
    (
        "a descriptor without its constant",
        f"or.b64 %ad, %ad, {K128.descriptor(128)};",
        "",
        IllegalInstructionError,
        "matrix descriptor .*bits 46 to 48 are 0; 1 is allowed",
    ),
    (
        "an unknown swizzle",
        f"or.b64 %ad, %ad, {K128.descriptor(128)};",
        f"or.b64 %ad, %ad, {K128.descriptor(128) | 3 << 61};",
        IllegalInstructionError,
        "swizzling mode 3; 0, 1, 2, 4 and 6 are allowed",
    ),
    (
        "two columns too few",
        f"mov.b32 %x, {Multiply().descriptor};",
        f"mov.b32 %x, {Multiply().descriptor & ~(63 << 17)};",
        IllegalInstructionError,
        "N is 0; multiples of 8 up to 256",
    ),
    (
        "a peer that is not there",
        ".cta_group::1.kind",
        ".cta_group::2.kind",
        IllegalInstructionError,
        "cta_group::2 in a kernel that has used .cta_group::1",
    ),
]


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [entry[1:] for entry in MISTAKES],
    ids=[entry[0].replace(" ", "-") for entry in MISTAKES],
)
def test_mistakes(old: str, new: str, error: type[EmulatorError], message: str) -> None:
    multiply = Multiply()
    a, b = multiply.operands(np.random.default_rng(0))
    program, image = multiply.program(), multiply.image(a, b)
    assert old in program.text
    reports = []
    for seed in range(8):
        try:
            program.run(image, seed, program.text.replace(old, new))
        except EmulatorError as caught:
            reports.append(caught)
    assert reports
    assert all(isinstance(caught, error) for caught in reports), reports
    assert all(re.search(message, str(caught), re.DOTALL) for caught in reports), reports


#: Shape, multicast, rows, bytes of a row, and the lanes of each row (9.7.16.9.2).
COPIES: list[tuple[str, str, int, int, list[range]]] = [
    ("128x256b", "", 128, 32, [range(128)]),
    ("128x128b", "", 128, 16, [range(128)]),
    ("64x128b", ".warpx2::02_13", 64, 16, [range(64), range(64, 128)]),
    ("32x128b", ".warpx4", 32, 16, [range(32 * k, 32 * k + 32) for k in range(4)]),
]


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(("shape", "multicast", "rows", "width", "lanes"), COPIES)
def test_copies(
    shape: str, multicast: str, rows: int, width: int, lanes: list[range], blocks: int
) -> None:
    rng = np.random.default_rng(rows)
    data = rng.integers(0, 256, (blocks, rows, 1, width), dtype=np.uint8)
    how, room = Operand(Swizzle.NONE), 8192
    image = np.zeros((blocks, room), np.uint8)
    for block in range(blocks):
        image[block, how.place(data[block], 1024) - 1024] = data[block]
    commit = Multiply(blocks=blocks).commit()
    body = f"""shr.u32 %x, %b, 4; and.b32 %x, %x, 0x3FFF; cvt.u64.u32 %ad, %x;
    or.b64 %ad, %ad, {how.descriptor(rows)}; @!%f bra MOVED;
    tcgen05.cp.cta_group::{blocks}.{shape}{multicast} [%a], %ad; {commit} MOVED: {WAIT}
    tcgen05.ld.sync.aligned.32x32b.x{width // 4}.b32 {registers(width // 4)}, [%a];
    tcgen05.wait::ld.sync.aligned;"""
    program = Program(body, width // 4, blocks=blocks, room=room)
    for seed in range(3):
        found = program.run(image, seed)
        for block in range(blocks):
            words = np.ascontiguousarray(data[block].reshape(rows, width)).view(np.uint32)
            for each in lanes:
                assert np.array_equal(found[block, list(each)], words)


def test_copies_to_pairs_of_neighbours() -> None:
    """.warpx2::01_23: warps 0 and 1 get the first half of the rows, 2 and 3 the second."""
    data = np.arange(64 * 16, dtype=np.uint32).astype(np.uint8).reshape(64, 1, 16)
    how, image = Operand(Swizzle.NONE), np.zeros((1, 2048), np.uint8)
    image[0, how.place(data, 1024) - 1024] = data
    body = f"""shr.u32 %x, %b, 4; and.b32 %x, %x, 0x3FFF; cvt.u64.u32 %ad, %x;
    or.b64 %ad, %ad, {how.descriptor(64)}; @!%f bra MOVED;
    tcgen05.cp.cta_group::1.64x128b.warpx2::01_23 [%a], %ad; {Multiply().commit()} MOVED: {WAIT}
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {registers(4)}, [%a]; tcgen05.wait::ld.sync.aligned;"""
    found = Program(body, 4, room=2048).run(image)[0]
    words = np.ascontiguousarray(data.reshape(64, 16)).view(np.uint32)
    assert np.array_equal(found, np.concatenate([words[:32], words[:32], words[32:], words[32:]]))


def test_copies_of_four_lanes() -> None:
    """.4x256b refreshes one lane of each quarter, the last one here; the others stay."""
    data = np.arange(8 * 32, dtype=np.uint8).reshape(8, 1, 32)
    how, image = Operand(Swizzle.NONE), np.zeros((1, 1024), np.uint8)
    image[0, how.place(data, 1024) - 1024] = data
    code = [f"mov.b32 %r{k}, {k};" for k in range(8)]
    code += [f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%a], {registers(8)};"]
    body = f"""{"".join(code)} tcgen05.wait::st.sync.aligned; bar.sync 0;
    shr.u32 %x, %b, 4; and.b32 %x, %x, 0x3FFF; cvt.u64.u32 %ad, %x;
    or.b64 %ad, %ad, {how.descriptor(8)}; @!%f bra MOVED;
    tcgen05.cp.cta_group::1.4x256b [%a+{31 << 16}], %ad; {Multiply().commit()} MOVED: {WAIT}
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers(8)}, [%a]; tcgen05.wait::ld.sync.aligned;"""
    found = Program(body, 8).run(image)[0]
    expected = np.tile(np.arange(8, dtype=np.uint32), (128, 1))
    expected[31::32] = np.ascontiguousarray(data[:4].reshape(4, 32)).view(np.uint32)
    assert np.array_equal(found, expected)
