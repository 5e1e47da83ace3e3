"""Traces a module with ``torch.fx``, or says why that would not tell what the module does.

A trace holds for every call of the module if nothing was asked of the proxies that the graph does
not ask again. So each question that ``torch.fx`` answers by itself ends the trace: the truth, the
length, the type, the identity, the text of a proxy, and what surrounds a call, such as autocast.
"""

from __future__ import annotations

import builtins
import copy
import dis
import inspect
import linecache
import operator
import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast
from unittest import mock

import numpy as np
import torch
from torch import fx, nn
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import Attribute

from ._dividing import parts_of
from ._functional import conv1d, conv2d, conv3d
from ._graphs import ConvertedGraph
from ._modules import _Conv
from ._questions import in_package, watched
from ._subclasses import Redirected
from ._transposed import conv_transpose1d, conv_transpose2d, conv_transpose3d
from ._transposed_modules import _ConvTranspose

__all__ = [
    "Trace",
    "has_hooks",
    "in_place",
    "is_block",
    "is_plain",
    "opened_modules",
    "recorded",
    "trace",
]


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody watches or changes what goes in or out of a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_plain(module: nn.Module) -> bool:
    """Whether a module does what its class says: without hooks, nor methods of its own."""
    return not has_hooks(module) and not any(
        callable(value) and hasattr(type(module), name) for name, value in vars(module).items()
    )


def opened_modules(model: nn.Module) -> list[nn.Module]:
    """Returns a model and its parts, but for those that PyTorch has compiled."""
    found: dict[nn.Module, None] = {}
    waiting = [model]
    while waiting:
        part = waiting.pop()
        compiled = isinstance(part, torch.jit.ScriptModule | torch._dynamo.OptimizedModule)
        if part not in found and not compiled:
            found[part] = None
            waiting += part.children()
    return list(found)


#: Functions of maxconv's that are nodes of a graph where they are called, not what they do.
_RECORDED: list[Callable[..., Any]] = [
    *(conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d),
]
_F = TypeVar("_F", bound=Callable[..., Any])


def recorded(function: _F) -> _F:
    """Makes a call of a function one node of every graph: a graph is traced where it is loaded."""
    _RECORDED.append(function)
    return function


@recorded
def in_place(name: str, left: Any, right: Any) -> Any:
    """Returns ``left`` after ``left += right``, or what ``name`` of module ``operator`` does.

    A call in a traced model: what ``torch.fx`` makes of ``+=`` itself is ``+``, which has another
    dtype and does not change what other names stand for.
    """
    return getattr(operator, name)(left, right)


@recorded
def unpacked(value: Any, count: int) -> tuple[Any, ...]:
    """Returns the ``count`` values that ``value`` consists of; a call in a traced model."""
    values = tuple(value)
    if len(values) != count:
        raise ValueError(f"{len(values)} values to unpack (expected {count})")
    return values


# Proxies ----------------------------------------------------------------------------------------


class _AskedError(BaseException):
    """Ends a trace. No ``Exception``: the model's own code must not catch it."""


def _asks(frame: FrameType) -> bool:
    """Whether a question comes from the model, not from the tracer."""
    code = frame.f_code
    own = ("fx",), ("overrides.py",), ("utils", "_pytree.py"), ("_tensor.py",)
    return code.co_filename != __file__ and not any(in_package(code, *parts) for parts in own)


class _Proxy(Proxy):
    """A proxy that records assignments such as ``+=``, and refuses what it cannot record."""

    tracer: Any

    def __getattr__(self, k: str) -> Attribute:
        if k.startswith("__") and k.endswith("__") and _asks(sys._getframe(1)):
            self.tracer.refuse(f"it asks a value for {k}")
        return _Attribute(self, k)

    def __setattr__(self, name: str, value: object) -> None:
        if _asks(sys._getframe(1)):
            self.tracer.refuse(f"it sets {name} of a value")
        object.__setattr__(self, name, value)

    @property  # type: ignore[misc] # a property in the place of an attribute
    def __class__(self) -> type:
        # isinstance reads it, through the classes of classes.
        frame = sys._getframe(1)
        while frame.f_code.co_name == "__instancecheck__" and frame.f_back is not None:
            frame = frame.f_back
        if _asks(frame):
            self.tracer.refuse("it asks for the type of a value")
        return type(self)

    def __iter__(self) -> Iterator[Any]:
        frame = sys._getframe(1)
        count = _unpacks(frame)
        if count is None:
            count = parts_of(self.node, self.tracer.called)
        if count is None:
            return cast(Iterator[Any], self.tracer.iter(self))
        whole: Any = self.tracer.create_proxy("call_function", unpacked, (self, count), {})
        return iter([whole[i] for i in range(count)])

    def __len__(self) -> int:
        # Whoever makes a list asks for it too.
        count = parts_of(self.node, self.tracer.called)
        return self.tracer.refuse("it asks for the length of a value") if count is None else count

    def __hash__(self) -> int:
        if _asks(sys._getframe(1)):
            self.tracer.refuse("it looks a value up")
        return id(self)

    def _as_text(self, *_: object) -> str:
        frame = sys._getframe(1)
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        # The text of an assertion is read by nobody but people.
        if _asks(frame) and "assert" not in line and "raise " not in line:
            self.tracer.refuse("it makes text of a value")
        return "a value"

    __repr__ = __str__ = __format__ = _as_text


class _Attribute(_Proxy, Attribute):
    """What an attribute of a proxy is."""


def _unpacks(frame: FrameType) -> int | None:
    """Returns into how many names the running instruction of a frame unpacks a value."""
    for line in dis.get_instructions(frame.f_code):
        if line.offset == frame.f_lasti and line.opname == "UNPACK_SEQUENCE":
            return int(line.argval)
    return None


def _recorded(name: str) -> Callable[[Proxy, object], Proxy]:
    def record(self: Proxy, other: object) -> Proxy:
        return self.tracer.create_proxy("call_function", in_place, (name, self, other), {})

    return record


def _refused(why: str) -> Callable[..., Any]:
    def refuse(self: Any, *_: object) -> Any:
        self.tracer.refuse(why)

    return refuse


for _name in (
    *("iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow"),
    *("irshift", "isub", "itruediv", "ixor"),
):
    setattr(_Proxy, f"__{_name}__", _recorded(_name))
for _name, _why in {
    "int": "it makes a number of a value",
    "float": "it makes a number of a value",
    "complex": "it makes a number of a value",
    "index": "it counts by a value",
    "contains": "it searches a value",
    "setitem": "it writes into a value",
    "delitem": "it writes into a value",
    "reversed": "it loops over a value",
}.items():
    setattr(_Proxy, f"__{_name}__", _refused(_why))


# The tracer -------------------------------------------------------------------------------------


def _surroundings() -> tuple[Any, ...]:
    """What a graph does not set again before its calls."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")),
    )


class _Tracer(fx.Tracer):
    """Leaves PyTorch's modules, maxconv's and ``opaque`` ones whole; sees writes to buffers."""

    proxy_buffer_attributes = True

    def __init__(self, opaque: set[nn.Module] | frozenset[nn.Module] = frozenset()) -> None:
        super().__init__(autowrap_functions=tuple(_RECORDED))
        self.opaque = opaque
        self.calls: list[nn.Module] = []
        self.refusal = ""
        self.culprit: nn.Module | None = None
        self.surroundings = _surroundings()
        self.proxies: list[weakref.ref[Proxy]] = []

    def refuse(self, why: str) -> NoReturn:
        """Ends the trace."""
        if not self.refusal:
            self.refusal = why
            self.culprit = self.calls[-1] if self.calls else None
        raise _AskedError(why)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of a module is one node."""
        own = isinstance(m, _Conv | _ConvTranspose | Redirected) or m in self.opaque
        return own or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Calls a module, or makes a node of the call."""
        self.calls.append(m)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            # Of nested calls the innermost is the one that cannot be traced.
            if self.culprit is None:
                self.culprit = m
            raise
        finally:
            self.calls.pop()

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Makes a node, if calling it later means the same."""
        if _surroundings() != self.surroundings:
            self.refuse("it sets grad mode, autocast or the default dtype")
        # While tracing, some functions are replaced by what asks for their arguments.
        target = getattr(target, "asked", target)
        return super().create_node(kind, target, *args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        """Returns a value as an argument of a node."""
        if type(a) is OrderedDict:
            items = [(key, self.create_arg(value)) for key, value in a.items()]
            return self.create_node("call_function", OrderedDict, (items,), {})
        if isinstance(a, dict) and type(a).__module__.split(".")[0] not in ("builtins", "torch"):
            self.refuse(f"it makes a {type(a).__name__}")
        return super().create_arg(a)

    def called(self, node: Node) -> nn.Module | None:
        """Returns the module that a node calls, or ``None``."""
        return self.root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def proxy(self, node: Node) -> Proxy:
        """Returns the proxy of a node."""
        proxy = _Proxy(node, self)
        self.proxies.append(weakref.ref(proxy))
        return proxy

    def to_bool(self, obj: Proxy) -> bool:
        """Refuses a branch."""
        self.refuse("torch.fx: values would decide about control flow")

    def iter(self, obj: Proxy) -> Any:
        """Refuses a loop."""
        self.refuse("it loops over a value")

    def keys(self, obj: Proxy) -> Any:
        """Refuses what ``**`` asks for."""
        self.refuse("it takes a value for a dictionary")

    def stands_in(self, value: object, whether_none: bool) -> bool:
        """Whether a value is a proxy, of which the graph does not know what is asked."""
        if not issubclass(type(value), Proxy):
            return False
        return not whether_none or not self._is_something(cast(Proxy, value).node)

    def _is_something(self, node: Node) -> bool:
        """Whether a node is never ``None``: a parameter, or what PyTorch computes."""
        if node.op == "get_attr":
            return True
        if node.op == "call_module":
            called = type(self.root.get_submodule(str(node.target)))
            return called.__module__.startswith("torch.nn.")
        return _is_computed(node)


def _is_computed(node: Node) -> bool:
    if node.op != "call_function" or node.target in (getattr, operator.getitem):
        return False
    owner = str(getattr(node.target, "__module__", None) or "torch").split(".")[0]
    return owner in ("torch", "_operator")


@contextmanager
def _asked_builtins(tracer: _Tracer) -> Iterator[None]:
    """Has ``hasattr``, ``getattr`` with a default, and PyTorch's questions end the trace."""

    def checked(function: Callable[..., Any], least: int) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            if len(args) >= least and issubclass(type(args[0]), Proxy) and _asks(sys._getframe(1)):
                tracer.refuse(f"it asks {function.__name__} of a value")
            return function(*args)

        cast(Any, ask).asked = function
        return ask

    def surrounding(owner: Any, name: str) -> Any:
        function = getattr(owner, name)

        def ask(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_code.co_filename != __file__ and not in_package(frame.f_code):
                tracer.refuse(f"it asks {name}")
            return function(*args, **kwargs)

        return mock.patch.object(owner, name, ask)

    def enter(self: Any) -> NoReturn:
        tracer.refuse("it sets autocast")

    # The first call keeps the functions of torch that it finds; those below have the tracer.
    torch.overrides.get_ignored_functions()
    torch.overrides.get_overridable_functions()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.amp.autocast, "__enter__", enter))
        for name in ("is_grad_enabled", "is_autocast_enabled", "get_autocast_dtype"):
            stack.enter_context(surrounding(torch, name))
        stack.enter_context(mock.patch.object(builtins, "hasattr", checked(hasattr, 2)))
        stack.enter_context(mock.patch.object(builtins, "getattr", checked(getattr, 3)))
        yield


# Tracing ----------------------------------------------------------------------------------------


class Trace:
    """A module as a graph, or why it is none."""

    def __init__(
        self, graph: GraphModule | None, reason: str, opaque: dict[nn.Module, str]
    ) -> None:
        self.graph = graph
        self.reason = reason
        self.opaque = opaque
        """Modules that the graph calls as a whole because they cannot be traced, and why."""


def is_block(module: nn.Module) -> bool:
    """Whether callers can only call a module: it has no methods but ``forward``, nor hooks.

    Methods that set weights, such as ``init_weights``, are for building a model.
    PyTorch's containers are looped over and indexed by whoever has them, so they are no blocks.
    """
    if type(module).__module__.startswith("torch.") or not is_plain(module):
        return False
    methods = {
        name
        for base in type(module).__mro__
        if base is not object and not base.__module__.startswith("torch.")
        for name, value in vars(base).items()
        if not name.startswith("_") and (callable(value) or hasattr(value, "__get__"))
        if "init" not in name and "reset" not in name
    }
    return methods <= {"forward"} | set(vars(nn.Module))


def trace(module: nn.Module) -> Trace:
    """Returns a module as a graph that shares its parameters, or why it is none.

    Modules in it that cannot be traced are nodes of the graph, as PyTorch's are.
    """
    if type(module).__call__ is not nn.Module.__call__ or not _calls_its_class(module):
        return Trace(None, "it is not called by its class's forward", {})
    for name, parameter in inspect.signature(module.forward).parameters.items():
        # Whether it is None would be decided while tracing, where nothing is.
        if parameter.default is None:
            why = f"forward does something else without its optional argument {name!r}"
            return Trace(None, why, {})
    for name, part in module.named_modules():
        if has_hooks(part) and not type(part).__module__.startswith("torch."):
            return Trace(None, f"{name or 'the module itself'} has forward hooks", {})
    opaque: dict[nn.Module, str] = {}
    while True:
        made = _trace_once(module, opaque)
        if isinstance(made, GraphModule):
            return Trace(made, "", opaque)
        culprit, reason = made
        if culprit is None or culprit is module or culprit in opaque:
            return Trace(None, reason, {})
        kind, known = type(culprit), len(opaque)
        opaque.update((part, reason) for part in module.modules() if type(part) is kind)
        # The culprit may be no part of the module: a forward of an instance calls what it likes.
        if module in opaque or len(opaque) == known:
            return Trace(None, reason, {})


def _calls_its_class(module: nn.Module) -> bool:
    return not any(name in vars(module) for name in ("forward", "__call__", "_call_impl"))


def _trace_once(
    module: nn.Module, opaque: dict[nn.Module, str]
) -> GraphModule | tuple[nn.Module | None, str]:
    """Returns a graph, or which module in it cannot be traced, and why."""
    before, states = _State(module), _random_states()
    tracer = _Tracer(set(opaque))
    graph: fx.Graph | None = None
    reason = ""
    try:
        with _asked_builtins(tracer), watched(tracer.stands_in, tracer.refuse):
            graph = tracer.trace(module)
    except _AskedError:
        pass
    except Exception as error:  # Tracing runs the model's own code, which may raise anything.
        text = str(error).strip().splitlines()
        reason = f"torch.fx: {text[0] if text else type(error).__name__}"
    finally:
        drawn = _restore_random_states(states)
    for node in graph.nodes if graph is not None else ():
        # An annotation that is text would be pickled as a global.
        node.type = None if isinstance(node.type, str) else node.type
    # With what tracing itself left in the module.
    traced = None if graph is None else ConvertedGraph(tracer.root, graph, type(module).__name__)
    changed = before.restore()
    if tracer.refusal or reason or traced is None:
        return tracer.culprit, tracer.refusal or reason
    if drawn:
        return None, "forward draws random numbers, which a trace would hold as constants"
    # The tracer itself keeps proxies of parameters.
    kept = (proxy for proxy in (made() for made in tracer.proxies) if proxy is not None)
    if changed or any(proxy.node.op != "get_attr" for proxy in kept):
        return None, "forward keeps something for later calls"
    for name, part in traced.named_modules():
        # Tracing makes empty modules for what only holds others.
        part.training = module.get_submodule(name).training
    _copy_attributes(module, traced)
    return traced


def _random_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _restore_random_states(states: tuple[Any, ...]) -> bool:
    """Returns whether random numbers were drawn, and undoes it."""
    now = _random_states()
    drawn = (
        not torch.equal(states[0], now[0]) or states[1] != now[1] or str(states[2]) != str(now[2])
    )
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    return drawn


class _State:
    """What modules hold, so that a trace can be seen to change it, and it can be undone."""

    def __init__(self, module: nn.Module) -> None:
        self.held = [
            (part, {name: (value, _entries(value)) for name, value in vars(part).items()})
            for part in module.modules()
        ]

    def restore(self) -> bool:
        """Returns whether anything has changed, and undoes it."""
        changed = False
        for part, held in self.held:
            now = vars(part)
            for name in [name for name in now if name not in held]:
                # Where tracing itself puts tensors that it meets.
                changed |= not name.startswith("_tensor_constant")
                del now[name]
            for name, (value, entries) in held.items():
                if name not in now or now[name] is not value:
                    changed, now[name] = True, value
                if entries is not None and not _same(entries, _entries(value)):
                    changed = True
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(entries)
        return changed


def _entries(value: object) -> Any:
    return copy.copy(value) if isinstance(value, dict | list | set) else None


def _same(before: Any, after: Any) -> bool:
    first, second = (v.items() if isinstance(v, dict) else enumerate(v) for v in (before, after))
    known = [(key, id(value)) for key, value in first]
    return known == [(key, id(value)) for key, value in second]


def _copy_attributes(source: nn.Module, target: nn.Module) -> None:
    """Gives a traced module what others may read of the original, its class's constants too."""
    for owner in (*reversed(type(source).__mro__), source):
        for name, value in vars(owner).items():
            plain = not callable(value) and not hasattr(value, "__get__")
            if not name.startswith("_") and plain and name not in dir(nn.Module):
                setattr(target, name, value)
