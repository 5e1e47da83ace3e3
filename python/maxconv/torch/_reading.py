"""Reads the code of modules: what it calls, asks of tensors, and does with its parts."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from types import CodeType, FunctionType
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["STRIDED", "asks_order", "called_convolutions", "only_calls", "reads_weights"]

_CONVOLUTIONS: Final = frozenset(
    (
        *("conv1d", "conv2d", "conv3d", "convolution"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    )
)

_LOADS: Final = ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_NAME")

#: Methods that depend on a tensor's strides, and on more than the order of its dimensions.
STRIDED: Final = frozenset(
    (
        *("view", "view_as", "stride", "is_contiguous", "as_strided", "as_strided_", "data_ptr"),
        *("storage", "untyped_storage", "storage_offset", "set_", "resize_"),
        *("suggest_memory_format",),
    )
)

#: What reaches the parts of a module without their names.
_REACHING: Final = frozenset(
    (
        *("children", "named_children", "modules", "named_modules", "_modules", "getattr"),
        *("get_submodule", "apply", "__dict__", "vars"),
    )
)

_T = TypeVar("_T")


def _kept(read: Callable[[type], _T]) -> Callable[[type], _T]:
    """Has a function called once for a class; it does not keep the class, as that of a graph."""
    results: WeakKeyDictionary[type, _T] = WeakKeyDictionary()

    @wraps(read)
    def known(kind: type) -> _T:
        if kind not in results:
            results[kind] = read(kind)
        return results[kind]

    return known


def _methods(kind: type) -> dict[str, Any]:
    """Returns the methods of a class that are not PyTorch's and not for building it."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base is object or base.__module__.startswith("torch."):
            continue
        for name, value in vars(base).items():
            value = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
            if isinstance(value, FunctionType) and "init" not in name:
                found[name] = value
    return found


# Convolutions -----------------------------------------------------------------------------------


@_kept
def called_convolutions(kind: type) -> tuple[str, ...]:
    """Returns the names of PyTorch's convolutions that a class's own methods call.

    The functions that they call are read too.
    """
    methods = _methods(kind)
    return tuple(name for name in _loaded(methods, methods) if name in _CONVOLUTIONS)


@_kept
def asks_order(kind: type) -> bool:
    """Whether what a class's ``forward`` does may depend on how tensors lie in memory.

    The methods and functions that it calls are read too. What it gives to others, such as modules
    of other classes, is not.
    """
    methods = _methods(kind)
    return any(name in STRIDED for name in _loaded(methods, {"forward"} & methods.keys()))


def _loaded(methods: Mapping[str, FunctionType], begin: Iterable[str]) -> Iterator[str]:
    """Yields the names that methods load, but for those of ``self``.

    Args:
        methods: Those of a class. Where one calls another, that is read too, and so are functions,
            unless they are PyTorch's.
        begin: The names of those to begin with.
    """
    seen: set[CodeType] = set()

    def read(function: FunctionType) -> Iterator[str]:
        for code in _codes(function.__code__):
            if code in seen:
                continue
            seen.add(code)
            before: Any = None
            for line in dis.get_instructions(code):
                # A part of the module may have the name of a function.
                own = getattr(before, "argval", None) == "self"
                before = line
                if line.opname not in _LOADS:
                    continue
                if own:
                    called = methods.get(line.argval)
                else:
                    yield line.argval
                    called = function.__globals__.get(line.argval)
                    if line.opname != "LOAD_GLOBAL":
                        called = None
                if isinstance(called, FunctionType) and not called.__module__.startswith("torch."):
                    yield from read(called)
        # What a decorator has wrapped.
        for cell in function.__closure__ or ():
            if isinstance(cell.cell_contents, FunctionType):
                yield from read(cell.cell_contents)

    for name in begin:
        yield from read(methods[name])


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


# Parts ------------------------------------------------------------------------------------------


@_kept
def _class_tree(kind: type) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return None


@_kept
def _uses(kind: type) -> tuple[frozenset[str], frozenset[str]] | None:
    """Returns the attributes that a class's code calls, and those that it does other things with.

    ``None`` where the code is not known.
    """
    called: set[str] = set()
    other: set[str] = set()
    for base in kind.__mro__:
        if base is object or base.__module__.startswith("torch."):
            continue
        tree = _class_tree(base)
        if tree is None:
            return None
        methods = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and "init" not in node.name
        ]
        for method in methods:
            functions = {id(n.func) for n in ast.walk(method) if isinstance(n, ast.Call)}
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute):
                    (called if id(node) in functions else other).add(node.attr)
                elif isinstance(node, ast.Name):
                    other.add(node.id)
    return frozenset(called), frozenset(other)


def only_calls(kinds: set[type[nn.Module]], owner: type[nn.Module], name: str) -> bool:
    """Whether all that the modules of a model do with a part of that name is to call it.

    Args:
        kinds: The classes of the model's modules.
        owner: The class of the part's owner.
        name: The part's.
    """
    if owner.__module__.startswith("torch."):
        return False
    for kind in kinds:
        uses = _uses(kind)
        if uses is None or name in uses[1]:
            return False
        if kind is owner and (_REACHING & (uses[0] | uses[1]) or name not in uses[0]):
            return False
    return True


def reads_weights(kinds: set[type[nn.Module]]) -> bool:
    """Whether the code of modules may look at the weight of a convolution, or that is not known."""
    for kind in kinds:
        uses = _uses(kind)
        if uses is None or "weight" in uses[0] | uses[1] or "parameters" in uses[0]:
            return True
    return False
