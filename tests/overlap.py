"""Whether kernels that are launched while others run wait for them, read from their PTX.

Every kernel of `operations/nvidia/stream.mojo` is launched so (programmatic dependent launch). On
each path a thread must have waited (`griddepcontrol.wait`) before it touches global memory, and
before it ends: what comes next waits for this kernel, not for those before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ptxemu._text.flow import END, FlowBlock, flow_blocks
from ptxemu._text.parser import parse
from ptxemu._text.syntax import Function, Instruction

WAIT = "griddepcontrol.wait"
START = "griddepcontrol.launch_dependents"

#: Instructions that name a state space, and touch global memory unless it is one of ``_OWN``.
_ACCESSES = ("ld", "ldu", "st", "atom", "red")
_OWN = ("shared", "local", "param", "const")
#: Those that touch global memory, or may.
_ALWAYS = (
    "multimem",
    "discard",
    "applypriority",
    "tensormap",
    "tex",
    "tld4",
    "suld",
    "sust",
    "call",
)


def touches_global(opcode: str) -> bool:
    """Whether an instruction reads or writes global memory, or what its line in a cache holds.

    A prefetch of a descriptor does not: the launch's parameters hold it.
    """
    base, *modifiers = opcode.split(".")
    if base in _ACCESSES:
        return not any(modifier.split("::")[0] in _OWN for modifier in modifiers)
    if base == "prefetch":
        return "tensormap" not in modifiers
    if base == "cp":
        return any(modifier.startswith("global") for modifier in modifiers)
    return base in _ALWAYS


def _waits(instruction: Instruction) -> bool:
    return instruction.opcode == WAIT and instruction.guard is None


def _waited(blocks: list[FlowBlock]) -> list[bool]:
    """Whether every path to a block has waited."""
    waited = [index > 0 for index in range(len(blocks))]
    changed = True
    while changed:
        changed = False
        for index, block in enumerate(blocks):
            if waited[index] or any(map(_waits, block.body)):
                continue
            for following in block.successors:
                if following != END and waited[following]:
                    waited[following], changed = False, True
    return waited


def _mistakes(function: Function) -> Iterable[str]:
    blocks = flow_blocks(function)
    for block, has_waited in zip(blocks, _waited(blocks), strict=True):
        for instruction in block.body:
            if not has_waited and touches_global(instruction.opcode):
                yield f"line {instruction.line}: {instruction.opcode} before {WAIT}"
            has_waited = has_waited or _waits(instruction)
        ends = END in block.successors and (block.branch is None or block.branch.base != "trap")
        if ends and not has_waited:
            line = block.branch.line if block.branch else function.line
            yield f"line {line}: {function.name} ends without {WAIT}"


def mistakes(text: str) -> list[str]:
    """What a text's kernels do before they have waited, a sentence each."""
    found: list[str] = []
    for function in parse(text).functions.values():
        if function.is_entry:
            found.extend(_mistakes(function))
            if not any(instruction.opcode == START for instruction in function.code):
                found.append(f"{function.name} has no {START}")
    return found


def check(files: Iterable[Path]) -> None:
    """Fails unless the kernels of all files, one or more, wait as they must."""
    found = {file.stem: mistakes(file.read_text(encoding="utf-8")) for file in files}
    assert found
    assert not {name: wrong for name, wrong in found.items() if wrong}
