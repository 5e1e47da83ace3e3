"""Chains: convolutions of a converted model that run one after the other, without PyTorch between.

To call the module of a small convolution takes longer than to compute it. In the graph of a
converted model a chain stands for all modules that follow each other. Its first call with inputs
of some shapes calls them, and notes the plans that they ran. Later ones hand addresses over to
these plans, if nothing has changed that a module would have read: its attributes, its tensors, its
hooks. Otherwise, and where somebody watches operators, the modules are called.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.graph_module import _forward_from_src
from torch.nn.modules import module as torch_module

from ._filters import state_of
from ._functional import call_key
from ._means import MeanPlan
from ._plan import Direct, Plan, aligned, runners

__all__ = ["Chained", "Planned", "chained"]

#: What a module's ``planned`` returns: the plan of a call, and its operands.
Planned = tuple["Plan | MeanPlan", "tuple[Tensor | None, ...]"]

#: How many programs of one chain are kept.
_KEPT: Final = 16

#: Calls in a row with changed modules behind which one in as many makes programs: to make one costs
#: more than it saves if there is another change before the next call.
_CHANGED_CALLS: Final = 64

#: Where a tensor in a block of memory may begin: at cache lines, in bytes.
_LINE: Final = 64

#: How often an attribute of a module that may be in a chain was set.
_changes = 0


class Chained:
    """A base class of modules that may be in a chain.

    Beside ``forward`` a subclass has ``planned``, which takes the same. It returns the plan that
    ``forward`` has just run, and its operands, or ``None`` if more was computed than the plan does.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        _note_change(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        _note_change(name)
        super().__delattr__(name)


def _note_change(name: str) -> None:
    global _changes
    # Some models call eval() in front of every call.
    if name != "training":
        _changes += 1


def _may_be_chained(module: nn.Module) -> bool:
    """Whether a module's ``planned`` is that of its ``forward``."""
    if not isinstance(module, Chained) or "forward" in vars(module):
        return False
    # A subclass with a forward of its own computes something else.
    forward, planned = (
        next((base for base in type(module).__mro__ if name in vars(base)), None)
        for name in ("forward", "planned")
    )
    return forward is planned


# Programs ---------------------------------------------------------------------------------------

#: Where an operand or a result is: what kind of memory, and the number among its kind.
_Place = tuple[str, int]


@dataclass(frozen=True)
class _Step:
    """A call in a program."""

    direct: Direct
    sources: tuple[_Place | None, ...]
    """Where operands are: ``("input", i)`` or ``("step", i)``; ``None`` for the module's own."""


class _Program:
    """What a chain computes of inputs of certain shapes.

    Args:
        steps: The calls.
        outputs: Numbers of those whose results are read outside.
    """

    def __init__(self, steps: Sequence[_Step], inputs: int, outputs: Sequence[int]) -> None:
        self._conversions: list[tuple[int, Callable[[Tensor], Tensor]]] = []
        self._fixed = [0]
        self._results = [steps[number].direct for number in outputs]
        own = {number: ("result", place) for place, number in enumerate(outputs)}
        self._blocks, shared = _share(steps, own)
        written = own | {number: ("block", block) for number, block in shared.items()}
        places = [
            [self._place(step, i, written) for i in range(len(step.sources))] for step in steps
        ]
        counts = {
            "input": inputs,
            "converted": len(self._conversions),
            "fixed": len(self._fixed),
            "result": len(outputs),
            "block": len(self._blocks),
        }
        first = dict(zip(counts, itertools.accumulate(counts.values(), initial=0), strict=False))
        self._index = steps[0].direct.device
        self._streams: set[int] = set()
        self._steps = []
        for number, (step, operands) in enumerate(zip(steps, places, strict=True)):
            addresses = [first[kind] + at for kind, at in [*operands, written[number]]]
            direct = step.direct
            self._steps.append((direct, operator.itemgetter(*addresses)))

    def _place(self, step: _Step, operand: int, written: dict[int, _Place]) -> _Place:
        """Returns where an operand is, in a numbering by kinds."""
        source, tensor = step.sources[operand], step.direct.operands[operand]
        if source is None:
            if tensor is None:
                return "fixed", 0
            self._fixed.append(tensor.data_ptr())
            return "fixed", len(self._fixed) - 1
        kind, number = source
        if kind == "step":
            return written[number]
        convert = step.direct.conversions.get(operand)
        if convert is None:
            return source
        self._conversions.append((number, convert))
        return "converted", len(self._conversions) - 1

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Returns what is read outside.

        Returns:
            ``None`` if an address is one that the calls were not prepared for.

        Raises:
            ValueError: A kernel refused; the message says why.
        """
        held = [*inputs, *(convert(inputs[place]) for place, convert in self._conversions)]
        given = [*map(Tensor.data_ptr, held)]
        if self._index >= 0 and not aligned(*given):
            return None
        like = inputs[0]
        results = [
            like.new_empty_strided(result.shape, result.strides, dtype=result.dtype)
            for result in self._results
        ]
        blocks = [like.new_empty(count, dtype=torch.uint8) for count in self._blocks]
        addresses = [
            *given,
            *self._fixed,
            *map(Tensor.data_ptr, results),
            *map(Tensor.data_ptr, blocks),
        ]
        after = runners(self._index)
        if self._index >= 0 and after[0] not in self._streams:
            self._note_stream(after[0])
        for direct, operands in self._steps:
            if failed := direct.run(*direct.constants, *operands(addresses), *after):
                raise direct.library.error(failed)
        return results

    def _note_stream(self, stream: int) -> None:
        """Has PyTorch's allocator keep filters until the current stream has read them."""
        for direct, _ in self._steps:
            for tensor in direct.operands:
                if tensor is not None:
                    tensor.record_stream(torch.cuda.current_stream(self._index))
        self._streams.add(stream)


def _share(steps: Sequence[_Step], own: dict[int, _Place]) -> tuple[list[int], dict[int, int]]:
    """Has results that are read inside only share blocks of memory.

    Two are in one block if the first one is not read any more when the second is written.

    Args:
        steps: The calls.
        own: The steps whose results are read outside.

    Returns:
        The bytes of each block, and the block of each step.
    """
    read = {number: number for number in range(len(steps))}
    for number, step in enumerate(steps):
        read |= {source[1]: number for source in step.sources if source and source[0] == "step"}
    sizes: list[int] = []
    last: list[int] = []
    shared: dict[int, int] = {}
    for number, step in enumerate(steps):
        if number in own:
            continue
        direct = step.direct
        nbytes = math.prod(direct.shape) * direct.dtype.itemsize
        free = [block for block, reader in enumerate(last) if reader < number]
        block = min(free, key=lambda block: abs(sizes[block] - nbytes), default=len(sizes))
        if block == len(sizes):
            sizes.append(0)
            last.append(0)
        sizes[block] = max(sizes[block], -(-nbytes // _LINE) * _LINE)
        last[block] = read[number]
        shared[number] = block
    return sizes, shared


# Chains -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Member:
    """A module of a chain, and how it is called."""

    model: dict[str, Any]
    """The model's own modules."""
    name: str
    """The module's in the model."""
    args: tuple[_Place, ...]
    """Its tensors: ``("input", i)`` or ``("step", i)``."""
    names: tuple[str, ...]
    """The names of the last ones, which are given by name."""
    others: dict[str, Any]
    """What is given by name and is no tensor."""

    def path(self) -> list[tuple[dict[str, Any], str, nn.Module]]:
        """Returns the modules on the way to it, each with where it is found."""
        path, held = [], self.model
        for name in self.name.split("."):
            module: nn.Module = held[name]
            path.append((held, name, module))
            held = cast("dict[str, Any]", module._modules)
        return path

    @property
    def module(self) -> Any:
        """The module that has the name now."""
        return self.path()[-1][2]

    def arguments(self, values: Callable[[_Place], Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns what it is called with."""
        given = [values(place) for place in self.args]
        count = len(given) - len(self.names)
        return given[:count], dict(zip(self.names, given[count:], strict=True)) | self.others


class _Guard:
    """What modules were like when programs were made of them."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self._changes = _changes
        paths = [member.path() for member in members]
        places: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {
            (id(held), name): (held, name, part) for path in paths for held, name, part in path
        }
        modules = {id(part): part for _, _, part in places.values()}.values()
        for part in {id(path[-1][2]): path[-1][2] for path in paths}.values():
            for held in (part._parameters, part._buffers):
                places |= {(id(held), name): (held, name, t) for name, t in held.items()}
        self._held = [held for held, _, _ in places.values()]
        self._names = [name for _, name, _ in places.values()]
        self._values = [value for _, _, value in places.values()]
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._state = self._now()
        self._hooks = [
            hooks for part in modules for hooks in (part._forward_hooks, part._forward_pre_hooks)
        ]
        self._usable = self._state is not None and not any(self._hooks)

    def _now(self) -> Any:
        """Returns what changes with the tensors; ``None`` if one does not say."""
        state = state_of(self._tensors)
        return None if state is None else (state, [*map(Tensor.stride, self._tensors)])

    def holds(self) -> bool:
        """Whether nothing has changed, and the modules do nothing but convolve."""
        return (
            self._usable
            and self._changes == _changes
            and all(map(operator.is_, map(dict.get, self._held, self._names), self._values))
            and not any(self._hooks)
            and not torch_module._global_forward_hooks
            and not torch_module._global_forward_pre_hooks
            and self._state == self._now()
        )


class _Values:
    """Where the tensors of a call of a chain are."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.inputs = inputs
        self.steps: dict[int, Any] = {}

    @property
    def on_gpu(self) -> bool:
        """Whether the inputs are."""
        return bool(self.inputs[0].is_cuda)

    def __call__(self, place: _Place) -> Any:
        """Returns the tensor at a place."""
        kind, number = place
        return self.inputs[number] if kind == "input" else self.steps[number]


@dataclass(frozen=True)
class _Part:
    """Members that follow each other, of which a program computes all, or a module one."""

    members: Sequence[_Member]
    first: int
    """The first one's number in the chain."""
    program: _Program | None
    inputs: tuple[_Place, ...]
    """What the program takes."""
    outputs: tuple[int, ...]
    """The numbers, in the chain, of what it gives."""
    dropped: tuple[int, ...]
    """Those that nobody reads behind it."""

    def run(self, values: _Values) -> None:
        """Computes the part."""
        results = None
        if self.program is not None:
            results = self.program.run([values(place) for place in self.inputs])
        if results is not None:
            values.steps.update(zip(self.outputs, results, strict=True))
        else:
            for number, member in enumerate(self.members, self.first):
                args, kwargs = member.arguments(values)
                values.steps[number] = member.module(*args, **kwargs)
        for number in self.dropped:
            values.steps.pop(number, None)


class _Chain:
    """Stands for modules that follow each other in a graph.

    Args:
        members: The modules.
        outputs: Numbers of those whose results are read outside.
    """

    def __init__(self, members: Sequence[_Member], outputs: Sequence[int]) -> None:
        self._members, self._outputs = members, outputs
        self._guard: _Guard | None = None
        self._changed = 0
        self._parts: dict[Any, list[_Part]] = {}
        # Who reads a result last; behind the last member those that are read outside.
        self._last = {number: number for number in range(len(members))}
        for number, member in enumerate(members):
            self._last |= {at: number for kind, at in member.args if kind == "step"}
        self._last |= {number: len(members) for number in outputs}
        self._modules = [self._part(i, i + 1, None) for i in range(len(members))]

    @property
    def __name__(self) -> str:
        """For a graph's code."""
        return "chain"

    def __call__(self, *inputs: Any) -> Any:
        """Returns the results that are read outside: one, or a list."""
        values = _Values(inputs)
        for part in self._parts_for(values, call_key(inputs)):
            part.run(values)
        results = [values.steps[number] for number in self._outputs]
        return results[0] if len(results) == 1 else results

    def _parts_for(self, values: _Values, key: Any) -> Iterable[_Part]:
        """Returns what computes a call; it is chosen before the first part runs."""
        if key is None or _captures(values):
            return self._modules
        if self._guard is None or not self._guard.holds():
            self._changed += 1
            if self._changed > _CHANGED_CALLS and self._changed % _CHANGED_CALLS:
                return self._modules
            self._parts.clear()
            self._guard = _Guard(self._members)
        parts = self._parts.get(key)
        if parts is not None:
            self._changed = 0
            return parts
        return self._noting(values, key) if self._guard.holds() else self._modules

    def _noting(self, values: _Values, key: Any) -> Iterator[_Part]:
        """Yields the modules, and keeps what they did as parts with programs."""
        held, steps = _Values(values.inputs), []
        for number, (member, part) in enumerate(zip(self._members, self._modules, strict=True)):
            yield part
            held.steps[number] = values.steps.get(number)
            steps.append(_step(member, held))
        if len(self._parts) >= _KEPT:
            self._parts.clear()
        self._parts[key] = list(self._cut(steps))

    def _cut(self, steps: Sequence[_Step | None]) -> Iterator[_Part]:
        """Yields parts with programs, as long as can be."""
        begin = 0
        for number, step in enumerate(steps):
            if step is not None and not _converts(step, begin):
                continue
            if begin < number:
                yield self._part(begin, number, steps)
            begin = number
            if step is None:
                yield self._modules[number]
                begin = number + 1
        if begin < len(steps):
            yield self._part(begin, len(steps), steps)

    def _part(self, begin: int, end: int, steps: Sequence[_Step | None] | None) -> _Part:
        """Returns members as a part; with steps, one with a program."""
        members = self._members[begin:end]
        inner = [("step", number) for number in range(begin, end)]
        inputs = list(dict.fromkeys(p for m in members for p in m.args if p not in inner))
        outputs = [n for n in range(begin, end) if steps is None or self._last[n] >= end]
        program: _Program | None = None
        if steps is not None:
            places: dict[_Place, _Place] = {place: ("input", i) for i, place in enumerate(inputs)}
            places |= {("step", n): ("step", n - begin) for n in range(begin, end)}
            moved = [
                _Step(step.direct, tuple(p and places[p] for p in step.sources))
                for step in steps[begin:end]
                if step is not None
            ]
            program = _Program(moved, len(inputs), [n - begin for n in outputs])
        dropped = tuple(n for n, reader in self._last.items() if begin <= reader < end)
        return _Part(members, begin, program, tuple(inputs), tuple(outputs), dropped)


def _captures(values: _Values) -> bool:
    """Whether a CUDA graph is captured, which would not keep a program's filters."""
    return values.on_gpu and torch.cuda.is_current_stream_capturing()


def _converts(step: _Step, begin: int) -> bool:
    """Whether what a step converts is made in its part, which begins at a member."""
    return any(
        source is not None and source[0] == "step" and source[1] >= begin
        for source in (step.sources[operand] for operand in step.direct.conversions)
    )


def _step(member: _Member, values: _Values) -> _Step | None:
    """Returns a call that was just made as a step; ``None`` if it is more than a kernel's."""
    module = member.module
    if not _may_be_chained(module):
        return None
    args, kwargs = member.arguments(values)
    planned: Planned | None = module.planned(*args, **kwargs)
    direct = None if planned is None else cast(Any, planned[0]).direct(*planned[1])
    if planned is None or direct is None:
        return None
    given = {values(place).data_ptr(): place for place in member.args}
    own = {t.data_ptr() for t in [*module.parameters(), *module.buffers()]}
    sources: list[_Place | None] = []
    for tensor in planned[1]:
        address = 0 if tensor is None else tensor.data_ptr()
        source = given.get(address)
        # Such as a scale that was computed for this call.
        if source is None and address and address not in own:
            return None
        sources.append(source)
    # What comes from outside goes when the call has ended.
    fixed = tuple(
        None if source else tensor for source, tensor in zip(sources, direct.operands, strict=True)
    )
    return _Step(direct._replace(operands=fixed), tuple(sources))


# Graphs -----------------------------------------------------------------------------------------


def chained(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the ``forward`` of a graph with chains, from the second call on.

    Args:
        forward: What the graph's code is; ``torch.compile`` gets it as it is.
    """
    calls = 0
    own: Callable[..., Any] | None = None

    @functools.wraps(forward)
    def call(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls, own
        if is_dynamo_compiling():
            return forward(self, *args, **kwargs)
        if own is None:
            calls += 1
            # Who calls a model once gains nothing.
            if calls == 1:
                return forward(self, *args, **kwargs)
            own = _with_chains(self) or forward
        return own(self, *args, **kwargs)

    return call


def _with_chains(model: GraphModule) -> Callable[..., Any] | None:
    """Returns the code of a model with chains; ``None`` if there is nothing to chain."""
    if type(model.graph._codegen) is not CodeGen or not _is_current(model):
        return None
    graph = Graph()
    graph.output(graph.graph_copy(model.graph, {}))
    groups = list(_groups(model, graph))
    for group in groups:
        _write_chain(model, graph, group)
    if not groups:
        return None
    code = graph.python_code("self")
    forward: Callable[..., Any] = _forward_from_src(code.src, code.globals, {})
    return forward


def _is_current(model: GraphModule) -> bool:
    """Whether a model's code is that of its graph: somebody may be about to change it."""
    return bool(model.graph.python_code("self").src == model.code)


def _groups(model: GraphModule, graph: Graph) -> Iterator[list[Node]]:
    """Yields nodes whose modules may be called one after the other."""
    group: list[Node] = []
    for node in graph.nodes:
        if _is_member(model, node):
            group.append(node)
        elif node.op not in ("get_attr", "placeholder") and group:
            yield group
            group = []


def _is_member(model: GraphModule, node: Node) -> bool:
    """Whether a node may be in a chain."""
    if node.op != "call_module" or not all(isinstance(value, Node) for value in node.args):
        return False
    plain = all(isinstance(v, Node | int | float | bool | None) for v in node.kwargs.values())
    return plain and _may_be_chained(model.get_submodule(str(node.target)))


def _write_chain(model: GraphModule, graph: Graph, group: list[Node]) -> None:
    """Puts a chain in the place of nodes."""
    inputs: dict[Node, int] = {}
    steps = {node: number for number, node in enumerate(group)}
    members = []
    for node in group:
        names = tuple(name for name, value in node.kwargs.items() if isinstance(value, Node))
        given = [*node.args, *(node.kwargs[name] for name in names)]
        args: list[_Place] = []
        for value in cast("list[Node]", given):
            if value in steps:
                args.append(("step", steps[value]))
            else:
                args.append(("input", inputs.setdefault(value, len(inputs))))
        others = {name: value for name, value in node.kwargs.items() if name not in names}
        own = cast("dict[str, Any]", model._modules)
        members.append(_Member(own, str(node.target), tuple(args), names, others))
    outputs = [i for i, node in enumerate(group) if any(user not in steps for user in node.users)]
    chain = _Chain(members, outputs)
    with graph.inserting_after(group[-1]):
        call = graph.call_function(chain, tuple(inputs))
    last = call
    for place, number in enumerate(outputs):
        result = call
        if len(outputs) > 1:
            with graph.inserting_after(last):
                result = last = graph.call_function(operator.getitem, (call, place))
        group[number].replace_all_uses_with(result, lambda user: user not in steps)
    for node in reversed(group):
        graph.erase_node(node)
