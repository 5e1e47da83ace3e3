"""Cluster launch control (PTX ISA 9.0, 9.7.13.17 and 9.7.13.18).

A cluster that runs takes the work of one that has not started. The response is opaque: here it
holds the first block's coordinates and a mark, and nobody but ``query_cancel`` may rely on that.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from .._errors import IllegalInstructionError
from .._hardware.barriers import MBarrier
from .._hardware.blocks import ThreadBlock
from .._hardware.registers import PRED, Array, view_of
from .._hardware.scheduler import Operation
from .._warps.addresses import addresses, find_mbarrier, locate
from .._warps.paths import Path, Step
from .._warps.table import Form, instruction

#: Bytes of a response.
_RESPONSE = 16

#: The fourth word of a response that got a cluster, and of a refusal.
_TAKEN, _REFUSED = 0x434C4301, 0x434C4300

#: Of 100 requests, how many are refused although clusters wait: the hardware may want to run
#: another kernel. They start when one that runs has ended.
_REFUSES = 5


@instruction("clusterlaunchcontrol.try_cancel")
def _take(form: Form) -> Step:
    """9.7.13.17: the answer comes some time, to one block of the cluster or to all."""
    form.flag("async")
    form.take("shared::cta")
    form.flag("mbarrier::complete_tx::bytes") or form.refuse("no completion mechanism")
    everywhere = form.flag("multicast::cluster::all")
    form.type()
    form.arity(2)
    target, barrier = form.address_row(0), form.address_row(1)
    operation = Operation("cluster launch control", "try_cancel", form.instruction.line)

    def step(t: Path) -> None:
        for where, signal in zip(addresses(t, *target), addresses(t, *barrier), strict=True):
            _check(t, everywhere)
            block, offset = locate(t, int(where), _RESPONSE, "a response")
            own = find_mbarrier(t, int(signal))
            if block is not t.block or own.block is not t.block:
                raise IllegalInstructionError(
                    "try_cancel with an address in another block's shared memory"
                )
            blocks = t.block.cluster.blocks if everywhere else [t.block]
            answers = [(entry, entry.mbarrier(own.offset)) for entry in blocks]
            index = offset + np.arange(_RESPONSE)
            for entry in blocks:
                entry.shared.begin_write(index, "try_cancel writes")
            t.scheduler.later(partial(_answer, t, answers, index, operation.line), operation)

    return step


def _check(t: Path, everywhere: bool) -> None:
    if t.block.refused:
        raise IllegalInstructionError(
            "try_cancel after the block saw that an earlier one was refused"
        )
    if everywhere:
        for block in t.block.cluster.blocks:
            if not block.live_threads:
                raise IllegalInstructionError(
                    f"try_cancel to all blocks of a cluster of which block {block} has ended"
                )


def _answer(t: Path, answers: list[tuple[ThreadBlock, MBarrier]], index: Array, line: int) -> None:
    """Takes the next cluster that has not started, if there is one, and tells each block."""
    refuses = t.scheduler.random.randrange(100) < _REFUSES
    start = None if refuses else t.grid.take_cluster()
    words = [*(start or (0, 0, 0)), _REFUSED if start is None else _TAKEN]
    values = np.array(words, np.uint32).view(np.uint8)
    for block, barrier in answers:
        block.require_running("try_cancel answers", line)
        block.shared.end_write(index, values)
        block.writes.forget(index)
        barrier.expect(-_RESPONSE)


def _responses(t: Path, row: int) -> Array:
    """The responses that the active lanes hold, as words ``[lanes, 4]``."""
    found = np.ascontiguousarray(t.active(t.files[view_of("b128")][row])).view(np.uint32)
    marks = found[:, 3]
    if ((marks != _TAKEN) & (marks != _REFUSED)).any():
        raise IllegalInstructionError("a register that holds no response of try_cancel")
    return found


@instruction("clusterlaunchcontrol.query_cancel.is_canceled")
def _is_taken(form: Form) -> Step:
    """9.7.13.18: whether a cluster was got."""
    form.flag("pred")
    form.type()
    form.arity(2)
    p, response = form.target(0, "pred"), form.source(1, "b128")

    def step(t: Path) -> None:
        taken = _responses(t, response)[:, 3] == _TAKEN
        t.files[PRED][p][t.mask] = taken
        if not taken.all():
            t.block.refused = True

    return step


@instruction(
    "clusterlaunchcontrol.query_cancel.get_first_ctaid",
    *(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}" for axis in "xyz"),
)
def _first_block(form: Form) -> Step:
    """9.7.13.18: coordinates of the first block of the cluster that was got."""
    axis = form.instruction.opcode.partition("get_first_ctaid::")[2][:1]
    form.flag("v4")
    form.flag("b32")
    form.flag("b128")
    form.arity(2)
    entries = form.vector(0)
    if len(entries) != (1 if axis else 4):
        form.refuse(f"{len(entries)} registers")
    axes = ["xyz".index(axis)] if axis else [0, 1, 2]
    targets = [form.target(entry, "u32") for entry in entries[: len(axes)]]
    response = form.source(1, "b128")

    def step(t: Path) -> None:
        found = _responses(t, response)
        if (found[:, 3] != _TAKEN).any():
            raise IllegalInstructionError("the coordinates of a cluster that was refused")
        for target, k in zip(targets, axes, strict=True):
            t.files[view_of("u32")][target][t.mask] = found[:, k]

    return step
