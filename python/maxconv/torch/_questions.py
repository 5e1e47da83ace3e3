"""Finds what a function asks of its values that ``torch.fx`` cannot see: ``is``, ``type(x)``.

A proxy that stands for a value while a function is traced sees calls and operators, but not that it
is compared by identity: ``skip is None`` is decided as if nothing could be ``None``. ``watched``
reads the bytecode of what is running and looks at the operand of each such question.
"""

from __future__ import annotations

import builtins
import dis
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import nn

__all__ = ["in_package", "watched"]

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_MODULES: Final = os.path.join(_TORCH, "nn", "modules") + os.sep
_OWN: Final = os.path.dirname(__file__) + os.sep

#: Functions whose answers depend on what a value is, and that cannot be replaced while tracing.
_ASKING: Final = frozenset(("type", "id", "callable", "vars", "dir"))


def in_package(code: CodeType, *parts: str) -> bool:
    """Whether code belongs to a package or a file of PyTorch."""
    return code.co_filename.startswith(os.path.join(_TORCH, *parts))


@dataclass(frozen=True)
class _Question:
    """What is asked at one instruction."""

    operands: tuple[tuple[str, ...], ...]
    """A variable and the attributes that lead from it, for each operand that is known to be so."""
    known: bool
    """Whether ``operands`` has all of them."""
    whether_none: bool
    """Whether it is asked if the operand is ``None``."""


@contextmanager
def watched(
    stands_in: Callable[[object, bool], bool], found: Callable[[str], None]
) -> Iterator[None]:
    """Calls ``found`` where a function asks something of a value that only stands for another.

    Args:
        stands_in: Whether an operand stands for a value, and the answer may depend on that; the
            second argument says that ``None`` is asked for.
        found: Gets what was asked; it should raise.
    """

    def on_call(frame: FrameType, event: str, argument: object) -> Any:
        if not _is_read(frame.f_code) or not _questions(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return on_instruction

    def on_instruction(frame: FrameType, event: str, argument: object) -> Any:
        question = _questions(frame.f_code).get(frame.f_lasti) if event == "opcode" else None
        if question is not None:
            if not question.known and _any_in(frame, stands_in):
                found("it asks what a computed value is")
            for path in question.operands:
                value = _value(frame, path)
                if value is _UNKNOWN or stands_in(value, question.whether_none):
                    found(f"it asks what {'.'.join(path)} is")
        return on_instruction

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def _is_read(code: CodeType) -> bool:
    name = code.co_filename
    if name.startswith(_TORCH):
        return name.startswith(_MODULES) and not name.endswith(("module.py", "container.py"))
    return not name.startswith(_OWN)


# Bytecode ---------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _questions(code: CodeType) -> dict[int, _Question]:
    """Returns what a function's instructions ask, by their offsets."""
    skipped = ("CACHE", "EXTENDED_ARG", "NOP", "RESUME", "PRECALL", "PUSH_NULL", "NOT_TAKEN")
    lines = [i for i in dis.get_instructions(code) if i.opname not in skipped]
    found: dict[int, _Question] = {}
    for i, line in enumerate(lines):
        if "IF_NONE" in line.opname or "IF_NOT_NONE" in line.opname:
            path, _ = _path_before(lines, i)
            found[line.offset] = _question([path], whether_none=True)
        elif line.opname == "IS_OP":
            right, start = _path_before(lines, i)
            left, _ = _path_before(lines, start)
            constant = lines[i - 1].opname == "LOAD_CONST"
            paths = [left] if constant else [left, right]
            found[line.offset] = _question(
                paths, whether_none=constant and lines[i - 1].argval is None
            )
        elif line.opname in ("LOAD_GLOBAL", "LOAD_NAME") and line.argval in _ASKING:
            path, end = _path_after(lines, i + 1)
            called = end < len(lines) and lines[end].opname.startswith("CALL")
            found[line.offset] = _question([path if called else None], whether_none=False)
    return found


def _question(paths: list[tuple[str, ...] | None], whether_none: bool) -> _Question:
    known = tuple(path for path in paths if path is not None)
    return _Question(known, len(known) == len(paths), whether_none)


def _path_before(lines: list[dis.Instruction], end: int) -> tuple[tuple[str, ...] | None, int]:
    """Returns the variable and attributes that are loaded in front of an instruction, and where."""
    names: list[str] = []
    i = end - 1
    while i >= 0 and lines[i].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        names.append(lines[i].argval)
        i -= 1
    if i < 0:
        return None, i
    name, value = lines[i].opname, lines[i].argval
    if name == "LOAD_CONST":
        return (), i
    if name.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")) or (
        # A variable that is assigned within the expression holds the operand.
        name.startswith("STORE_FAST") and not names and lines[i - 1].opname in ("COPY", "DUP_TOP")
    ):
        # One instruction may load two variables.
        value = value[-1] if isinstance(value, tuple) else value
        return (value, *reversed(names)), i
    return None, i


def _path_after(lines: list[dis.Instruction], start: int) -> tuple[tuple[str, ...] | None, int]:
    """Returns the variable and attributes that are loaded from an instruction on, and their end."""
    if start >= len(lines) or not lines[start].opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return None, start
    value = lines[start].argval
    if isinstance(value, tuple):
        return None, start
    names, i = [value], start + 1
    while i < len(lines) and lines[i].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        names.append(lines[i].argval)
        i += 1
    return tuple(names), i


def _any_in(frame: FrameType, stands_in: Callable[[object, bool], bool]) -> bool:
    """Whether a variable, or an entry of one, stands for a value."""
    for value in frame.f_locals.values():
        kind = type(value)
        entries = value.values() if kind is dict else value if kind in (tuple, list) else ()
        if any(stands_in(entry, False) for entry in (value, *entries)):
            return True
    return False


# Values -----------------------------------------------------------------------------------------

_UNKNOWN: Final = object()


def _value(frame: FrameType, path: tuple[str, ...]) -> object:
    """Returns what a variable and attributes that lead from it are now."""
    if not path:
        return None
    name, *attributes = path
    for scope in (frame.f_locals, frame.f_globals, vars(builtins)):
        if name in scope:
            value = scope[name]
            break
    else:
        return _UNKNOWN
    for attribute in attributes:
        if isinstance(value, nn.Module):
            # Not getattr, which torch.fx has replaced.
            held = (vars(value), value._parameters, value._buffers, value._modules)
            where = next((part for part in held if attribute in part), None)
            if where is not None:
                value = where[attribute]
                continue
        try:
            value = getattr(value, attribute)
        except AttributeError:
            return _UNKNOWN
    return value
