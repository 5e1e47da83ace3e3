"""What a small kernel is given and what the ISA says it gives: the same on the emulator and a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxemu import Machine, TensorMap
from ptxemu.tma import Descriptor, Im2colDescriptor, TiledDescriptor

__all__ = ["Argument", "Array", "Case", "Family", "Map", "Struct", "emulate", "lane_case", "words"]

Array = npt.NDArray[Any]

HEADER = ".version 8.5\n.target sm_90a\n.address_size 64\n"

#: What outputs hold before: a byte that no result is made of.
POISON = 0x5A


@dataclass(frozen=True)
class Map:
    """A tensor map over one of a case's inputs; its descriptor's address counts from there."""

    array: int
    descriptor: Descriptor

    def placed(self, address: int) -> Descriptor:
        """The descriptor with the address that the array has."""
        fields = dict(vars(self.descriptor))
        fields["global_address"] = address + self.descriptor.global_address
        kind = TiledDescriptor if isinstance(self.descriptor, TiledDescriptor) else Im2colDescriptor
        return kind(**fields)


@dataclass(frozen=True)
class Struct:
    """A struct's bytes; pointers to arrays, by their offsets, stand in it. -1 is the output."""

    data: bytes
    pointers: tuple[tuple[int, int], ...] = ()

    def placed(self, addresses: Sequence[int]) -> bytes:
        """The bytes, where arrays have addresses; the output's comes last."""
        data = bytearray(self.data)
        for offset, array in self.pointers:
            data[offset : offset + 8] = addresses[array].to_bytes(8, "little")
        return bytes(data)


#: The pointer to an array, a tensor map, or bytes.
Argument: TypeAlias = "int | Map | Struct"


@dataclass(frozen=True)
class Case:
    """A kernel's launch.

    Attributes:
        name: The kernel's.
        code: Its text, from ``.visible .entry`` on.
        inputs: Arrays.
        expected: What the ISA says of the output, byte for byte; None for what only a
            recording knows.
        relative: The error that the ISA allows, of the value.
        absolute: The same, as a number.
        maps: Tensor maps.
        start: What the output holds before; poison by default.
        block: Threads.
        grid: Blocks.
        cluster: Blocks of a cluster.
        shared: Bytes of dynamic shared memory.
        passed: The arguments; by default the output, the inputs, then the tensor maps.
    """

    name: str
    code: str
    inputs: tuple[Array, ...]
    expected: Array
    relative: float = 0.0
    absolute: float = 0.0
    maps: tuple[Map, ...] = ()
    start: Array | None = None
    block: int = 32
    grid: int | tuple[int, ...] = 1
    cluster: int | tuple[int, ...] = 1
    shared: int = 0
    passed: tuple[Argument, ...] = ()

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """What is passed; a number is an array's, -1 the output."""
        return self.passed or (-1, *range(len(self.inputs)), *self.maps)

    @property
    def is_exact(self) -> bool:
        """Whether the ISA leaves no bit open."""
        return not self.relative and not self.absolute

    def output(self) -> Array:
        """The output before the kernel runs."""
        found: Array = np.empty_like(self.expected)
        if self.start is not None:
            found[...] = self.start
            return found
        found.view(np.uint8)[...] = POISON
        return found

    def difference(self, found: Array, reference: Array | None = None) -> str:
        """What is wrong with an output; empty if nothing is.

        Args:
            found: The output.
            reference: What it is held against; by default what is expected.
        """
        wanted = self.expected if reference is None else reference
        if self.is_exact:
            bits: Any = f"u{wanted.dtype.itemsize}"
            wrong = found.view(bits) != wanted.view(bits)
        else:
            a, b = found.astype(np.float64), wanted.astype(np.float64)
            # A recording and the emulator may each be off by what the ISA allows.
            scale = 1 if reference is None else 2
            with np.errstate(all="ignore"):
                allowed = scale * (self.relative * np.abs(b) + self.absolute)
                wrong = ~((np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b)))
        if not wrong.any():
            return ""
        k = int(np.flatnonzero(wrong)[0])
        mine, theirs = found.reshape(-1)[k], wanted.reshape(-1)[k]
        operands = [entry.reshape(-1)[k] for entry in self.inputs if entry.size == found.size]
        return (
            f"{self.name}: {int(wrong.sum())} of {found.size} differ; at {k} {mine!r} "
            f"({_hex(mine)}) and not {theirs!r} ({_hex(theirs)}) of {operands}"
        )


def _hex(value: Any) -> str:
    return "0x" + np.asarray(value).tobytes()[::-1].hex()


@dataclass
class Family:
    """Kernels of one kind of instruction, in one PTX text."""

    name: str
    cases: list[Case] = field(default_factory=list)

    @property
    def ptx(self) -> str:
        """The text of all kernels."""
        return HEADER + "\n".join(case.code for case in self.cases)

    def add(self, case: Case) -> None:
        """Adds a case; a name stands once."""
        assert all(entry.name != case.name for entry in self.cases), case.name
        self.cases.append(case)

    def kernel(
        self,
        name: str,
        body: str,
        expected: Array,
        inputs: Sequence[Array] = (),
        **options: Any,
    ) -> None:
        """Adds a kernel whose body finds its parameters' values in ``%out``, ``%in0``, ...

        ``%t`` is the thread's number in the block. Parameters of tensor maps are ``map0``, ...
        """
        maps = options.get("maps", ())
        parameters = [".param .u64 out"] + [f".param .u64 in{k}" for k in range(len(inputs))]
        parameters += [f".param .align 64 .b8 map{k}[128]" for k in range(len(maps))]
        code = ["mov.u32 %t, %tid.x;", "ld.param.u64 %out, [out];"]
        registers = [".reg .b32 %t;", ".reg .b64 %out;"]
        for k in range(len(inputs)):
            registers.append(f".reg .b64 %in{k};")
            code.append(f"ld.param.u64 %in{k}, [in{k}];")
        # A statement a line: reports name lines.
        text = "\n".join([*registers, *code, body, "ret;"]).replace("; ", ";\n")
        entry = f".visible .entry {name}({', '.join(parameters)})\n{{\n{text}\n}}\n"
        self.add(Case(name, entry, tuple(inputs), expected, **options))


def lane_case(
    family: Family,
    opcode: str,
    code: str,
    expected: Array,
    *inputs: Array,
    suffix: str = "",
    **options: Any,
) -> None:
    """Adds a kernel that applies instructions to every element.

    Args:
        family: Gets it.
        opcode: Names it.
        code: The instructions, from ``%a``, ``%b``, ``%c``, ``%d`` to ``%o``; may use the
            predicates ``%p`` and ``%q``.
        expected: The results, a multiple of 32.
        inputs: Elements of 16, 32 or 64 bits, as many as results; 8-bit ones are widened.
        suffix: Tells kernels of one opcode apart.
    """
    count = len(expected)
    assert count % 32 == 0 and all(len(entry) == count for entry in inputs)
    body = [".reg .pred %p, %q; .reg .b64 %at, %i; .reg .b32 %g;"]
    body += ["mov.u32 %g, %ctaid.x; mad.lo.u32 %g, %g, 128, %t; cvt.u64.u32 %i, %g;"]
    for k, (letter, values) in enumerate(zip("abcd", inputs, strict=False)):
        size = values.dtype.itemsize
        body.append(f".reg .b{max(16, 8 * size)} %{letter};")
        body.append(f"mad.lo.u64 %at, %i, {size}, %in{k};")
        body.append(f"ld.global.{'u' if size == 1 else 'b'}{8 * size} %{letter}, [%at];")
    size = expected.dtype.itemsize
    body.append(f".reg .b{max(16, 8 * size)} %o;")
    body.append(f"{{ {code} }}")
    body.append(f"mad.lo.u64 %at, %i, {size}, %out; st.global.b{8 * size} [%at], %o;")
    block = min(count, 128)
    assert count % block == 0
    name = re.sub(r"\W+", "_", f"{opcode}{suffix}")
    text = "\n".join(body)
    family.kernel(name, text, expected, inputs, block=block, grid=count // block, **options)


def words(*values: int, dtype: Any = np.uint32) -> Array:
    """Numbers as elements, modulo the type's range."""
    bits = 8 * np.dtype(dtype).itemsize
    found = np.array([value % (1 << bits) for value in values], f"u{bits // 8}")
    return found.view(dtype)


def emulate(ptx: str, case: Case, seed: int, **options: bool) -> Array:
    """Runs a case of a text on the emulator; returns its output. ``options`` are the machine's."""
    machine = Machine("sm_90a", sms=4, seed=seed, **options)
    pointers = [machine.alloc(values) for values in case.inputs]
    output = machine.alloc(case.output())
    places = [int(pointer) for pointer in (*pointers, output)]
    arguments: list[object] = []
    for entry in case.arguments:
        if isinstance(entry, Map):
            arguments.append(TensorMap(entry.placed(places[entry.array])))
        else:
            arguments.append(places[entry] if isinstance(entry, int) else entry.placed(places))
    machine.load(ptx).launch(
        case.name,
        grid=case.grid,
        block=case.block,
        cluster=case.cluster,
        shared_bytes=case.shared,
        args=arguments,
        budget=5_000_000,
    )
    return output.read()
