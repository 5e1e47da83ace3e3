"""MAX's convolutions, and what stands beside them, by maxconv's ops, in graphs of others.

``max.graph.ops.conv2d`` and its siblings are function objects that other modules hold under other
names: ``max.nn``, ``max.experimental.functional``, whoever imported one. So it is their code that
is exchanged, while somebody overrides them, and not the objects: whoever calls one reaches
``route``, which asks whether the calling thread wants it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast

from max.dtype import DType
from max.graph import Graph, Shape, TensorValue, ops
from max.graph.type import ConvInputLayout, FilterLayout

from . import _operands, _ops, _pooling
from ._attention import ATTENTION_OP, is_wide, take_attention
from ._checks import check_filter_layout, check_size, filter_shape_parts, show
from ._dtypes import DTYPE_BYTES
from ._graph import as_max_promotes, enlarged, import_kernels, is_graph_value
from ._library import library_path
from ._override_norm import NORMALIZERS, is_of_images
from ._subpixel import saves_products

__all__ = ["LeftToMax", "Override", "OverrideReport", "TakenOver", "override_max", "route"]


@dataclass(frozen=True)
class TakenOver:
    """A call of MAX's that maxconv computes."""

    function: str
    """Of ``max.graph.ops``, or the operator's name."""
    where: str
    """The file and line that called it."""
    input: str
    """The shape and type of the input, of an attention the queries."""
    filter: str
    """The filter's shape and type, a pooling's window, those of a normalization's weight, or of an
    attention's keys."""

    def __str__(self) -> str:
        """The call and its place."""
        return f"{self.function}({self.input}, {self.filter})  {self.where}"


@dataclass(frozen=True)
class LeftToMax(TakenOver):
    """A call that MAX computes as before."""

    reason: str

    def __str__(self) -> str:
        """The call, its place and the reason."""
        return f"{super().__str__()}: {self.reason}"


@dataclass
class OverrideReport:
    """What was taken over and what was left, in the order of the calls. ``str`` is a table."""

    taken: list[TakenOver] = field(default_factory=list)
    left: list[LeftToMax] = field(default_factory=list)

    def __str__(self) -> str:
        """The calls, those that are alike in a line."""
        lines = [f"{len(self.taken)} calls taken over, {len(self.left)} left to MAX"]
        for word, entries in (("taken", self.taken), ("left ", self.left)):
            lines += [f"  {word} {count:>3}x  {entry}" for entry, count in Counter(entries).items()]
        return "\n".join(lines)


class Override:
    """maxconv in place of MAX's convolutions; ``override_max`` makes it.

    In a ``with`` block it holds for the thread, or the asynchronous task, that entered it. Between
    ``start`` and ``stop`` it holds for the process. Of several the one entered last counts.
    """

    def __init__(self) -> None:
        self.report = OverrideReport()
        """What was done so far."""

    def __enter__(self) -> OverrideReport:
        """Begins in the calling thread."""
        _exchange.begin()
        _of_thread.set((*_of_thread.get(), self))
        return self.report

    def __exit__(self, *_: object) -> None:
        """Ends in the calling thread."""
        _of_thread.set(_of_thread.get()[:-1])
        _exchange.end()

    def start(self) -> OverrideReport:
        """Begins in every thread."""
        _exchange.begin()
        _of_process.append(self)
        return self.report

    def stop(self) -> None:
        """Ends what ``start`` began.

        Raises:
            RuntimeError: Nothing was begun.
        """
        if self not in _of_process:
            raise RuntimeError("stop: this override was not started, or has been stopped")
        _of_process.remove(self)
        _exchange.end()

    def _compute(self, function: str, arguments: dict[str, Any]) -> Any:
        """Computes a call, or leaves it to MAX."""
        facts = _facts(function, arguments)
        name = arguments["name"] if function == "custom" else function
        take = _TAKERS.get(name) or partial(_taken, name)
        # Whatever maxconv's own functions call of MAX is MAX's.
        token = _of_thread.set((*_of_thread.get(), None))
        try:
            result: Any = take(arguments)
        except (TypeError, ValueError) as refusal:
            try:
                result = _exchange.original(function)(**arguments)
            except Exception:
                # MAX refuses it too: our sentence says more.
                raise refusal from None
            self.report.left.append(LeftToMax(*facts, reason=str(refusal)))
            return result
        finally:
            _of_thread.reset(token)
        self.report.taken.append(TakenOver(*facts))
        return result


def override_max() -> Override:
    """Returns what has maxconv compute the convolutions of graphs that others build.

    It takes over ``ops.conv2d``, ``conv3d``, ``conv2d_transpose``, ``max_pool2d`` and
    ``avg_pool2d`` of ``max.graph``, the operator ``conv2d_residual_add``, and with them all that
    MAX builds on these: ``max.nn.Conv1D``, ``Conv2d``, ``Conv3D``, ``max.experimental.functional``
    and ``max.experimental.nn``, eager tensors included. On a GPU it also takes over the
    normalizations of images beside them, ``ops.group_norm`` and ``rms_norm``, and the attention
    of image decoders, ``flash_attention_gpu`` over heads wider than 256::

        with maxconv.override_max() as report:
            graph = build(...)          # in which somebody else's model convolves
        print(report)

    or, for every thread of the process, ``maxconv.override_max().start()``. It matters when a graph
    is built; compiling and running it may come after. Graphs get maxconv's kernels without being
    asked to. Results have the shapes and types of MAX's. A call that maxconv cannot take stays
    MAX's, and the report says why.

    Returns:
        A context manager, which enters with an ``OverrideReport``.
    """
    return Override()


#: An operator of MAX's for GPUs, which its image decoders call: a convolution, a bias, a residual.
#: Of the operators that have no function in ``ops`` this and ``ATTENTION_OP`` are taken over.
RESIDUAL_OP: Final = "conv2d_residual_add"


# Which override counts ----------------------------------------------------------------------------

#: The overrides that a thread is in, the outermost first; ``None`` for none, also where one was
#: started for the process.
_of_thread: ContextVar[tuple[Override | None, ...]] = ContextVar("maxconv.override_max", default=())
_of_process: list[Override] = []


def _current() -> Override | None:
    # Another thread may stop the last one at any time.
    found = _of_thread.get()[-1:] or tuple(_of_process[-1:])
    return found[0] if found else None


def route(function: str, arguments: dict[str, Any]) -> Any:
    """Computes a call of one of MAX's functions.

    Args:
        function: Its name in ``max.graph.ops``.
        arguments: All of its arguments, by name.
    """
    current = _current()
    if current is None or not _concerns(function, arguments):
        return _exchange.original(function)(**arguments)
    return current._compute(function, arguments)


def _concerns(function: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a call is of the kind that maxconv takes over; others are not reported.

    Args:
        function: Its name in ``max.graph.ops``.
        arguments: All of its arguments, by name.
    """
    if function == "custom":
        return arguments["name"] == RESIDUAL_OP or is_wide(arguments)
    return function not in NORMALIZERS or is_of_images(arguments["input"])


# The exchange -------------------------------------------------------------------------------------


#: The code that stands in for a function's. It runs as that function, in its module, where it
#: finds no global name of this one. Defaults stay the function's own.
_STUB: Final = """
def {name}({parameters}):
    arguments = locals()
    from maxconv._override import route

    return route({name!r}, arguments)
"""

#: Where the stubs' code says that it is from.
_STUB_FILE: Final = "<maxconv.override_max>"


def _stub(name: str, function: Any) -> types.CodeType:
    """Returns code with the parameters of one of MAX's functions, which calls ``route``."""
    parameters = ", ".join(inspect.signature(function).parameters)
    names: dict[str, Any] = {}
    source = _STUB.format(name=name, parameters=parameters)
    exec(compile(source, _STUB_FILE, "exec"), names)
    code: types.CodeType = names[name].__code__
    return code


#: MAX's functions, by name, and the code that stands in for theirs.
EXCHANGED: Final[Mapping[str, tuple[Any, types.CodeType]]] = {
    function.__name__: (function, _stub(function.__name__, function))
    for function in (
        ops.conv2d,
        ops.conv3d,
        ops.conv2d_transpose,
        ops.max_pool2d,
        ops.avg_pool2d,
        ops.group_norm,
        ops.rms_norm,
        ops.custom,
    )
}


class _Exchange:
    """MAX's functions with other code, as long as somebody wants it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._undo = contextlib.ExitStack()
        self._originals: dict[str, Callable[..., Any]] = {
            name: _copy(function) for name, (function, _) in EXCHANGED.items()
        }

    def original(self, name: str) -> Callable[..., Any]:
        """Returns a function that does what MAX's did."""
        return self._originals[name]

    def begin(self) -> None:
        """Exchanges the code, unless it is exchanged.

        Raises:
            LibraryError: maxconv's kernels cannot be compiled.
        """
        library = library_path()
        with self._lock:
            if self._wanted == 0:
                self._begin(library)
            self._wanted += 1

    def _begin(self, library: Any) -> None:
        from max.graph.graph import default_custom_extensions_scope

        with contextlib.ExitStack() as undo:
            # Every graph made from now on has the kernels, subgraphs too.
            undo.enter_context(default_custom_extensions_scope(library))
            for function, stub in EXCHANGED.values():
                undo.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = stub
            self._undo = undo.pop_all()

    def end(self) -> None:
        """Gives MAX's functions their code back, if nobody wants another any more."""
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0:
                self._undo.close()


def _copy(function: Any) -> Callable[..., Any]:
    """Returns a function of the same code, which stays when that of ``function`` is exchanged."""
    made = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_exchange: Final = _Exchange()


# A call -------------------------------------------------------------------------------------------


def _taken(function: str, arguments: Mapping[str, Any]) -> TensorValue:
    """Computes a call of MAX's with maxconv.

    Args:
        function: Its name in ``max.graph.ops``.
        arguments: All of its arguments, by name.

    Raises:
        TypeError: maxconv does not take it, and perhaps nobody does.
        ValueError: The same.
    """
    given = dict(arguments)
    _check_sequences(given)
    forward = function != "conv2d_transpose"
    if not forward:
        _check_transposed(given)
    x, given["filter"] = as_max_promotes(given.pop("x"), given["filter"])
    bias = given.pop("bias")
    if bias is not None:
        x, bias = as_max_promotes(x, bias)
        if bias.rank != 1:
            raise ValueError(f"bias: rank {bias.rank} is not allowed; 1 is needed: one a filter")
    import_kernels(Graph.current)
    # MAX's convolutions, unlike its transposed ones, have results with their channels last always.
    if forward and given.pop("input_layout") is ConvInputLayout.NCHW and x.rank > 2:
        x = ops.permute(x, [0, *range(2, x.rank), 1])
    # MAX adds a bias to the rounded result, in the wider type.
    fused = bias is None or bias.dtype == x.dtype
    own: Callable[..., TensorValue] = getattr(_ops, function)
    image, factors = _enlarged(x, given) if forward else (x, None)
    more = {} if factors is None else {"upsample": factors}
    result = own(image, **given, **more, bias=bias if fused else None)
    if forward:
        result = _as_max_shapes(result, x, given)
    if bias is None or fused:
        return result
    first = given.get("input_layout") is ConvInputLayout.NCHW
    added: TensorValue = ops.add(result, ops.reshape(bias, (-1, 1, 1)) if first else bias)
    return added


def _enlarged(
    x: TensorValue, given: Mapping[str, Any]
) -> tuple[TensorValue, tuple[int, ...] | None]:
    """Returns what a convolution reads, and how often each of its pixels is repeated before.

    It is another image than ``x`` where that was enlarged, and convolving the small one saves
    products.

    Args:
        x: ``[N, *spatial, C]``.
        given: The other arguments, by name.
    """
    rank, stride, dilation = x.rank - 2, given["stride"], given["dilation"]
    found = enlarged(x)
    if found is None or x.dtype.name not in DTYPE_BYTES or any(step != 1 for step in stride):
        return x, None
    layout = check_filter_layout(given["filter_layout"], rank)
    filters, taps, channels = filter_shape_parts(given["filter"].shape, layout, rank)
    # Others are refused, or take a filter whose sizes are known.
    if not isinstance(filters, int) or not isinstance(channels, int) or len(dilation) != rank:
        return x, None
    return found if saves_products(found[1], taps, dilation, channels) else (x, None)


def _check_sequences(given: Mapping[str, Any]) -> None:
    """Refuses what maxconv's functions take besides what MAX's do: one number for all dimensions.

    Raises:
        TypeError: A value is no sequence.
    """
    for name in ("stride", "dilation", "padding", "output_paddings"):
        if isinstance(given.get(name), int | str):
            raise TypeError(f"{name}: {given[name]!r} is not allowed; integers in a tuple are")


def _check_transposed(given: dict[str, Any]) -> None:
    """Reads a transposed convolution as MAX does: its layouts, and what it may pad.

    Raises:
        ValueError: MAX has no such layout, or would not pad so much.
    """
    layout, stride = given["filter_layout"], tuple(given["stride"])
    # MAX names the channels of the result F here; they are those of the convolution's input.
    names = {FilterLayout.RSCF: FilterLayout.RSCF, FilterLayout.CFRS: FilterLayout.FCRS}
    if layout not in names:
        allowed = ", ".join(name.value for name in names)
        raise ValueError(f"filter_layout: {show(layout)} is not allowed; {allowed} are")
    given["filter_layout"] = names[layout]
    extra = tuple(given["output_paddings"])
    if any(more >= step for more, step in zip(extra, stride, strict=False)):
        raise ValueError(
            f"output_paddings: {show(extra)} has an entry that is not below the stride "
            f"{show(stride)}"
        )


def _taken_with_residual(arguments: Mapping[str, Any]) -> list[TensorValue]:
    """Computes ``RESIDUAL_OP`` with maxconv: bias and residual in the same kernel.

    Args:
        arguments: Those of ``ops.custom``.

    Returns:
        What ``ops.custom`` does: a list of results, here of one.

    Raises:
        TypeError: maxconv does not take it.
        ValueError: The same.
    """
    x, filter, residual, bias = arguments["values"]
    settings = arguments["parameters"]
    import_kernels(Graph.current)
    result = _ops.conv2d(
        x,
        filter,
        (settings["stride_h"], settings["stride_w"]),
        padding=tuple(settings[f"pad_{side}"] for side in ("top", "bottom", "left", "right")),
        bias=bias if settings["has_bias"] else None,
        filter_layout=FilterLayout.FCRS,
        residual=residual,
    )
    return [result]


def _pooled(function: str, arguments: Mapping[str, Any]) -> TensorValue:
    """Computes a pooling of MAX's with maxconv.

    Args:
        function: ``max_pool2d`` or ``avg_pool2d``.
        arguments: All of its arguments, by name.

    Raises:
        TypeError: maxconv does not take it, and perhaps nobody does.
        ValueError: The same.
    """
    x = TensorValue(arguments["input"])
    if x.rank != 4:
        raise ValueError(f"input: rank {x.rank} is not allowed; 4 is needed")
    for name in ("stride", "dilation", "padding"):
        if not isinstance(arguments[name], int | tuple):
            raise TypeError(f"{name}: {arguments[name]!r} is not allowed; an integer or a tuple is")
    import_kernels(Graph.current)
    x, _ = _operands.input_operand(x, ConvInputLayout.NHWC, 2)
    given = [arguments[name] for name in ("stride", "dilation", "padding", "ceil_mode")]
    window = tuple(check_size("kernel_size", size) for size in arguments["kernel_size"])
    problem = _pooling.PoolProblem.read(x, window, *given, as_max=True)
    average = function == "avg_pool2d"
    result = _pooling.pool(
        x, problem, average=average, count_boundary=arguments.get("count_boundary", True)
    )
    return ops.rebind(result, [x.shape[0], *problem.output_size, x.shape[-1]])


#: What computes a function or an operator of MAX's in another way than a convolution.
_TAKERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = {
    RESIDUAL_OP: _taken_with_residual,
    ATTENTION_OP: take_attention,
    "max_pool2d": partial(_pooled, "max_pool2d"),
    "avg_pool2d": partial(_pooled, "avg_pool2d"),
    **NORMALIZERS,
}


def _as_max_shapes(result: TensorValue, x: TensorValue, given: Mapping[str, Any]) -> TensorValue:
    """Returns a result with symbolic sizes as MAX has them.

    maxconv's may say what becomes of an input that is smaller than the filter.
    """
    layout = given["filter_layout"].value
    taps = [size for name, size in zip(layout, given["filter"].shape, strict=True) if name in "QRS"]
    shape = [x.shape[0]]
    for i, size in enumerate(x.shape[1:-1]):
        padded = size + given["padding"][2 * i] + given["padding"][2 * i + 1]
        span = given["dilation"][i] * (taps[i] - 1) + 1
        stride = given["stride"][i]
        shape.append((padded - span + stride) // stride)
    whole = Shape([*shape, result.shape[-1]])
    # Behind a rebind an op could not share what is compiled for others of its kind.
    return result if result.shape == whole else ops.rebind(result, whole)


def _facts(function: str, arguments: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Returns what a report says of a call: function, place, input, filter."""
    if function == "custom":
        function = arguments["name"]
        x, filter, *_ = arguments["values"]
    elif function.endswith("pool2d"):
        window = "x".join(map(str, arguments["kernel_size"]))
        return function, _caller(), _described(arguments["input"]), f"window {window}"
    elif function in NORMALIZERS:
        weight = arguments["gamma" if function == "group_norm" else "weight"]
        return function, _caller(), _described(arguments["input"]), _described(weight)
    else:
        x, filter = arguments["x"], arguments["filter"]
    return function, _caller(), _described(x), _described(filter)


def _described(value: object) -> str:
    """Returns the shape and the type of an argument."""
    if is_graph_value(value):
        value = TensorValue(cast(Any, value))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", "")
    if shape is None:
        return type(value).__name__
    kind = dtype.name if isinstance(dtype, DType) else dtype
    return f"{'x'.join(map(str, shape))} {kind}"


def _caller() -> str:
    """Returns the file and the line that called MAX's function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in (__file__, _STUB_FILE):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{frame.f_lineno}"
