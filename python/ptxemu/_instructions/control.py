"""Branches and the end (PTX ISA 9.0, 9.7.12)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .._errors import IllegalInstructionError, UnsupportedError
from .._hardware.registers import PRED, Layout, view_of
from .._text.flow import FlowBlock
from .._text.syntax import Instruction
from .._warps.paths import Path, Step
from .._warps.table import Form, instruction

__all__ = ["build_leave"]

Leave = Callable[[Path], bool]


def build_leave(layout: Layout, flow: FlowBlock) -> Leave:
    """Builds what ends a basic block.

    Raises:
        UnsupportedError: The branch is not known.
    """
    branch, successors = flow.branch, flow.successors
    if branch is None:
        return _jump(successors[0])
    parts = branch.opcode.split(".")
    allowed = {"bra": {"uni"}, "brx": {"idx", "uni"}}.get(parts[0], {"uni"})
    if not set(parts[1:]) <= allowed:
        raise UnsupportedError(f"line {branch.line}: {branch.opcode} is not supported")
    if parts[0] == "brx":
        if branch.guard is not None:
            raise UnsupportedError(f"line {branch.line}: {branch.opcode} under a predicate")
        index = layout.source(branch.operands[0], "u32", branch)
        return _jump_by_index(index, successors)
    if parts[0] == "trap":
        return _trap
    if branch.guard is None:
        return _jump(successors[0])
    return _jump_if(layout, branch, successors[0], successors[1])


def _jump(target: int) -> Leave:
    return lambda t: t.go(target)


def _jump_if(layout: Layout, branch: Instruction, target: int, following: int) -> Leave:
    """9.7.12.2, 9.7.12.3."""
    assert branch.guard is not None
    row, negated = layout.register(branch.guard), branch.negated

    def leave(t: Path) -> bool:
        condition = t.files[PRED][row]
        taken = t.mask & ~condition if negated else t.mask & condition
        if not taken.any():
            return t.go(following)
        rest = t.mask & ~taken
        if not rest.any():
            return t.go(target)
        return t.split([(taken, target), (rest, following)])

    return leave


def _jump_by_index(row: int, successors: list[int]) -> Leave:
    """9.7.12.4."""
    view = view_of("u32")

    def leave(t: Path) -> bool:
        index = t.files[view][row]
        chosen = np.unique(t.active(index))
        if int(chosen[-1]) >= len(successors):
            raise IllegalInstructionError(
                f"brx.idx with index {int(chosen[-1])} and {len(successors)} targets"
            )
        if len(chosen) == 1:
            return t.go(successors[int(chosen[0])])
        return t.split([(t.mask & (index == k), successors[int(k)]) for k in chosen])

    return leave


def _trap(t: Path) -> bool:
    """9.7.19.4."""
    raise IllegalInstructionError("the kernel traps")


@instruction("nanosleep", "pmevent", "griddepcontrol", "discard", "applypriority")
def _nothing(form: Form) -> Step:
    """9.7.13.13 (griddepcontrol), 9.7.19: nothing that a kernel could see: no other grid runs."""
    form.take("launch_dependents", "wait")
    form.type() if form.instruction.base == "nanosleep" else None
    return lambda t: None
