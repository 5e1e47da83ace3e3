"""What the graph functions need of MAX's graphs, and the only place that reaches behind its API.

The names with an underscore are MAX's own and may move with a version; the package pins it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from max.driver import CPU, Buffer
from max.dtype import DType
from max.graph import AlgebraicDim, DeviceRef, Dim, Graph, Shape, TensorType, TensorValue, ops
from max.graph.value import HasTensorValue

from ._dtypes import BIT_CARRIED, CARRIERS
from ._fields import Op
from ._packing import Array

__all__ = [
    "as_max_promotes",
    "constant",
    "constant_array",
    "enlarged",
    "flatten",
    "host_constant",
    "import_kernels",
    "is_computed",
    "is_graph_value",
    "is_loaded_once",
    "loaded_from_host",
    "not_negative",
    "op_name",
    "repeat",
    "require_kernels",
    "smaller",
    "to_channels_first",
    "unfused_when_complete",
    "zeros_behind",
]

# A weight reaches its convolution through a few casts and permutations; a deeper value is no
# weight.
_MAX_DEPTH = 16

# Ways of ``ops.resize_nearest`` to find a pixel, and to round its place, that repeat pixels where a
# size is a multiple of another.
_REPEATING = (("asymmetric", 2), ("half_pixel", 0), ("half_pixel", 1))

# The largest factor that is looked for.
_LARGEST_FACTOR = 8

# Ops that take what MAX fuses behind them, and those that compute the same without.
_UNFUSED = {
    Op.CONV_CPU.value: Op.CONV_UNFUSED_CPU.value,
    Op.CONV_GPU.value: Op.CONV_UNFUSED_GPU.value,
    Op.CONV_INTERLEAVED_CPU.value: Op.CONV_INTERLEAVED_UNFUSED_CPU.value,
    Op.CONV_INTERLEAVED_GPU.value: Op.CONV_INTERLEAVED_UNFUSED_GPU.value,
    Op.GROUP_NORM_GPU.value: Op.GROUP_NORM_UNFUSED_GPU.value,
    Op.RMS_NORM_GPU.value: Op.RMS_NORM_UNFUSED_GPU.value,
}

# Types that numpy lacks, and those of their bits.
_BITS = {DType[name]: DType[np.dtype(CARRIERS[name]).name] for name in BIT_CARRIED}


def op_name(device: DeviceRef, *, fused_input: bool = False) -> str:
    """Returns the registered name of a device's op.

    Each target has its own: compiling a CPU's op loads nothing of a GPU's kernels.

    Args:
        device: Where the op runs.
        fused_input: Whether MAX may fuse into the op what computes the activation. The op then
            computes it anew for every tap.
    """
    if device.is_gpu():
        op = Op.CONV_FUSED_INPUT_GPU if fused_input else Op.CONV_GPU
    else:
        op = Op.CONV_FUSED_INPUT_CPU if fused_input else Op.CONV_CPU
    return str(op.value)


# A library that has one of maxconv's ops has all of them.
_ANY_OP = op_name(DeviceRef.CPU())

# Files that were found to have the ops. MAX would read them anew for each graph.
_KNOWN: set[frozenset[Path]] = set()


def _has_kernels(graph: Graph) -> bool:
    """Returns whether ``graph`` was given maxconv's kernels."""
    library = graph._kernel_library
    paths = frozenset(library.library_paths())
    if paths not in _KNOWN and _ANY_OP in library:
        _KNOWN.add(paths)
    return paths in _KNOWN


def require_kernels(graph: Graph) -> None:
    """Raises ``ValueError`` unless ``graph`` was given maxconv's kernels."""
    if not _has_kernels(graph):
        raise ValueError(
            f"graph: {graph.name!r} does not know maxconv's ops; build it with "
            "Graph(..., kernel_library=maxconv.kernel_library()) or "
            "Graph(..., custom_extensions=[maxconv.library_path()])"
        )


def import_kernels(graph: Graph) -> None:
    """Gives ``graph`` maxconv's kernels, unless it has them.

    Raises:
        ValueError: It is a subgraph, which has what the graph around it was given.
    """
    if _has_kernels(graph):
        return
    from max._core import Operation

    if getattr(Operation._from_cmlir(graph._mlir_op), "is_subgraph", None):
        raise ValueError(
            f"graph: the subgraph {graph.name!r} does not know maxconv's ops; compile the model "
            "around it with custom_extensions=[maxconv.library_path()]"
        )
    from ._library import library_path

    graph._import_kernels([library_path()])


def unfused_when_complete(graph: Graph) -> None:
    """Has ops behind which nothing can be fused share what is compiled.

    MAX compiles an op that takes fused work anew wherever it stands, also with nothing behind it.
    Whether there is something is known when the graph gets its outputs: then each op whose result
    goes to custom ops, subgraphs, softmaxes and outputs alone becomes the one that takes none. In a
    graph that never gets there every op stays what it is, and computes the same.
    """
    # Not 'output' itself: a caller may have taken hold of it before its arguments are computed.
    adder = "_add_op_generated"
    if adder in vars(graph):
        return
    from max._core.dialects import mo

    add = getattr(graph, adder)

    def add_and_complete(kind: Any, *given: Any, **named: Any) -> Any:
        results = add(kind, *given, **named)
        if kind is mo.OutputOp:
            _take_fusion_off(graph)
        return results

    vars(graph)[adder] = add_and_complete


def _take_fusion_off(graph: Graph) -> None:
    """Replaces ops behind which nothing can be fused."""
    from max._core import Operation
    from max._core.dialects import mo, rmo

    operations = list(_within(Operation._from_cmlir(graph._mlir_op)))
    users: dict[Any, list[Any]] = defaultdict(list)
    for operation in operations:
        for operand in operation.operands:
            # Some classes give values, others their uses.
            users[getattr(operand, "value", operand)].append(operation)

    views = rmo.ReshapeOp | rmo.RebindTensorShapeOp
    # MAX fuses nothing into a softmax.
    kept = mo.CustomOp | mo.CallOp | mo.OutputOp | mo.YieldOp | rmo.MoReduceSoftmaxOp

    def ends(result: Any) -> bool:
        """Whether a value reaches nothing that could be fused."""
        return all(
            isinstance(user, kept) or (isinstance(user, views) and all(map(ends, user.results)))
            for user in users[result]
        )

    for operation in operations:
        if not isinstance(operation, mo.CustomOp) or operation.symbol not in _UNFUSED:
            continue
        if all(map(ends, operation.results)):
            cast(Any, operation).symbol = _UNFUSED[operation.symbol]


def _within(operation: Any) -> Iterator[Any]:
    """Yields the operations of an operation's regions, those of branches and loops too."""
    for region in operation.regions:
        for inner in region.front:
            yield inner
            yield from _within(inner)


def as_max_promotes(x: Any, y: Any) -> tuple[TensorValue, TensorValue]:
    """Returns two arguments as values of the current graph, as MAX's ops of two operands do.

    An array takes the other's type and device.

    Raises:
        TypeError: Both are arrays.
        ValueError: An array has elements that the type cannot hold.
    """
    from max.graph import dtype_promotion

    return dtype_promotion._promote_weak_dtypes(x, y)


def is_graph_value(value: object) -> bool:
    """Whether ``value`` already has a type and a place in a graph (an array has not)."""
    return isinstance(value, TensorValue | HasTensorValue | Dim | Shape)


def _owner(value: TensorValue) -> Any:
    return value._mlir_value.owner


def constant_array(value: TensorValue) -> Array | None:
    """Returns the elements of a value made by ``ops.constant``, or ``None`` of any other value.

    Elements of a type that numpy lacks come by their bits.
    """
    from max._core import graph as core
    from max._core.dialects import mo

    owner = _owner(value)
    if not isinstance(owner, mo.ConstantOp):
        return None
    shape = [int(dim) for dim in value.shape]
    buffer = core._buffer_from_constant_attr(owner.value, value.dtype, shape, CPU())
    if value.dtype in _BITS:
        buffer = buffer.view(_BITS[value.dtype])
    array: Array = buffer.to_numpy()
    return array


def is_loaded_once(value: TensorValue) -> bool:
    """Whether a value depends on constants and weights alone.

    MAX computes what follows from these in host memory when it loads a model, not when it runs it.
    """
    from max._core import Operation
    from max._core.dialects import mo

    def known(owner: object, depth: int) -> bool:
        if isinstance(owner, mo.ConstantOp | mo.ConstantExternalOp):
            return True
        if not isinstance(owner, Operation) or depth == _MAX_DEPTH:
            return False
        operands = list(owner.operands)
        return bool(operands) and all(known(o.value.owner, depth + 1) for o in operands)

    return known(_owner(value), 0)


def loaded_from_host(value: TensorValue) -> TensorValue | None:
    """Returns the value in host memory of which a GPU's is a copy, made when the model is loaded.

    MAX computes what follows from weights once while it is in host memory: what a GPU computes of
    them it computes in every call.
    """
    from max._core import Operation
    from max._core.dialects import mo

    owner = _owner(value)
    if not isinstance(owner, Operation):
        return None
    # Only a transfer has a chain beside its tensor. MAX has no class for it.
    operands = [operand.value for operand in owner.operands]
    if [isinstance(operand.type, mo.ChainType) for operand in operands] != [False, True]:
        return None
    source = TensorValue(cast(Any, operands[0]))
    same = source.type == TensorType(value.dtype, value.shape, DeviceRef.CPU())
    return source if same and is_loaded_once(source) else None


def enlarged(value: TensorValue) -> tuple[TensorValue, tuple[int, ...]] | None:
    """Returns the image of which ``ops.resize_nearest`` repeated the pixels, and how often.

    Args:
        value: ``[N, *spatial, C]``: the result, or a permutation of one with the channels first.

    Returns:
        The image, ``[N, *spatial, C]``, and a factor for each spatial dimension; ``None`` if that
        is not where the value is from.
    """
    from max._core.dialects import rmo

    large, order, owner = value, list(range(value.rank)), _owner(value)
    if isinstance(owner, rmo.MoTransposeOp):
        source, permutation = (TensorValue(cast(Any, o.value)) for o in owner.operands)
        if (axes := constant_array(permutation)) is None:
            return None
        large, order, owner = source, axes.tolist(), _owner(source)
    if not isinstance(owner, rmo.MoResizeNearestOp):
        return None
    if (owner.coordinate_transform_mode.name, owner.round_mode) not in _REPEATING:
        return None
    small = TensorValue(cast(Any, next(iter(owner.operands)).value))
    batch, *factors, channels = (_factor(small.shape[i], large.shape[i]) for i in order)
    if (batch, channels) != (1, 1) or 0 in factors:
        return None
    image = small if large is value else ops.permute(small, order)
    return image, tuple(factors)


def _factor(before: Dim, after: Dim) -> int:
    """Returns how often one size is in another, 0 if that is no small integer or not known."""
    factors = range(1, _LARGEST_FACTOR + 1)
    return next((factor for factor in factors if before * factor == after), 0)


def is_computed(value: TensorValue) -> bool:
    """Whether an operation that MAX may fuse gives a value; no input, weight or custom op does."""
    from max._core import Operation
    from max._core.dialects import mo

    owner = _owner(value)
    kept = mo.ConstantOp | mo.ConstantExternalOp | mo.CustomOp
    return isinstance(owner, Operation) and not isinstance(owner, kept)


def constant(data: Array, dtype: str, device: DeviceRef) -> TensorValue:
    """Makes a constant; ``data`` of a type that numpy lacks is given by its bits."""
    buffer = Buffer.from_numpy(np.ascontiguousarray(data))
    kind = DType[dtype]
    return ops.constant(buffer.view(kind) if kind in _BITS else buffer, kind, device)


def repeat(value: TensorValue, times: int) -> TensorValue:
    """Repeats a vector; a constant at once, as MAX would compile a kernel that does it."""
    elements = constant_array(value)
    if elements is None:
        return ops.tile(value, (times,))
    return constant(np.tile(elements, times), value.dtype.name, value.device)


def zeros_behind(value: TensorValue, count: int, parts: int = 1) -> TensorValue:
    """Appends zeros to a vector: at once to a constant, to a weight when the model is loaded.

    Args:
        value: The vector.
        count: How many zeros.
        parts: Of the vector, equally long, each of which gets so many.
    """
    kind, device = value.dtype.name, value.device
    elements = constant_array(value)
    if elements is not None:
        padded = np.pad(elements.reshape(parts, -1), ((0, 0), (0, count)))
        return constant(padded.reshape(-1), kind, device)
    if (source := loaded_from_host(value)) is not None:
        return ops.transfer_to(zeros_behind(source, count, parts), device)
    zeros = constant(np.zeros((parts, count), CARRIERS[kind]), kind, device)
    return flatten(ops.concat([ops.reshape(value, (parts, -1)), zeros], axis=1))


def host_constant(data: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> TensorValue:
    """Makes a constant that stays in host memory wherever the op runs."""
    return ops.constant(data, device=DeviceRef.CPU())


def not_negative(size: Dim) -> Dim:
    """Returns a symbolic size, or 0 where it turns out negative."""
    from max._core.dialects import kgen

    clamped: Dim = AlgebraicDim.apply(kgen.POC.max, size, 0)
    return clamped


def smaller(first: Dim | int, second: Dim | int) -> Dim:
    """Returns the smaller one of two sizes, of which any may be symbolic."""
    if isinstance(first, int) and isinstance(second, int):
        return Dim(min(first, second))
    from max._core.dialects import kgen

    found: Dim = AlgebraicDim.apply(kgen.POC.min, first, second)
    return found


def flatten(value: TensorValue) -> TensorValue:
    """Returns a value as rank 1."""
    return value if value.rank == 1 else ops.reshape(value, (-1,))


def to_channels_first(value: TensorValue) -> TensorValue:
    """Permutes ``[N, *spatial, C]`` to ``[N, C, *spatial]``."""
    return ops.permute(value, [0, value.rank - 1, *range(1, value.rank - 1)])
