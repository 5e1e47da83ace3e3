"""Which kernel a convolution runs on, and why, as the kernels' own dispatch says it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ._checks import check_dtype
from ._dtypes import CPU_BYTES, DTYPE_BYTES, FILTER_BYTES
from ._fields import BLOCKED_IMAGES, GEOMETRY_LENGTH, Kernel, Layout, Op
from ._signature import filters_missing
from ._targets import TARGETS
from ._tuned import use_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from max.driver import Device
    from max.graph import DeviceRef, Graph, TensorType, TensorValue

    from ._problem import ConvProblem

__all__ = [
    "DEVICES",
    "EXPLAINED_LAYOUTS",
    "explain_choice",
    "explain_graph",
    "explain_op",
    "operand_types",
]

#: What can be asked: this machine's CPU, its first GPU, and GPUs that need not be here.
DEVICES = ("cpu", "gpu", *TARGETS)

#: Layouts of an activation that can be asked about.
EXPLAINED_LAYOUTS = ("NHWC", *BLOCKED_IMAGES)

_TEXT_BYTES = 512
_RANK = 5
"""Of the activation when it has all three spatial dimensions."""


def explain_choice(
    problem: ConvProblem,
    *,
    kernel: Kernel = Kernel.AUTO,
    dtype: object = "float32",
    device: str = "cpu",
    multiprocessors: int | None = None,
    fused_output: bool = True,
    layout: str = "NHWC",
) -> tuple[str, str]:
    """Returns the kernel that runs a problem, and the reason.

    The answer comes from the registry itself (``operations/conv/registry.mojo``), through a graph
    that is compiled once a process for each storage type, and once more for ``"gpu"``.

    Args:
        problem: The convolution; all sizes known.
        kernel: A kernel to ask for, or ``AUTO``.
        dtype: Storage type of the activation. The output has it too, but beside 8 bits it is
            bfloat16.
        device: One of ``DEVICES``: this machine's CPU, its first GPU, or the architecture of a GPU
            that need not be here.
        multiprocessors: Of the GPU that ``device`` gives the architecture of; ``None`` stands for
            those of the product in ``TARGETS``.
        fused_output: Whether something stands behind the convolution that the graph compiler fuses
            with it: elementwise work, or the graph's end. ``False`` where another operation reads
            its output as it is; some tiles are compiled for that case alone.
        layout: Of activation and output: ``"NHWC"``, ``"NC/4HW4"`` of int8 on a GPU, or any of
            ``EXPLAINED_LAYOUTS`` on a CPU.

    Raises:
        ValueError: A size is symbolic, ``dtype``, ``device`` or ``layout`` is not supported, MAX
            finds no GPU here, or ``kernel`` cannot take the problem: the message says why.
    """
    storage = check_dtype("dtype", dtype, CPU_BYTES if device == "cpu" else FILTER_BYTES)
    if not problem.is_static:
        raise ValueError(f"problem: {problem} has symbolic sizes; all must be known")
    if layout not in EXPLAINED_LAYOUTS:
        raise ValueError(f"layout: {layout!r} is not one of {', '.join(EXPLAINED_LAYOUTS)}")
    interleaved = layout in BLOCKED_IMAGES
    if interleaved:
        _check_blocks(problem, storage, layout, on_gpu=device != "cpu")
    if fused_output and device != "cpu" and not interleaved:
        out_dtype = storage if storage in DTYPE_BYTES else "bfloat16"
        missing = filters_missing(problem, storage, out_dtype, kernel)
        problem = replace(problem, filters=problem.filters + missing)
    operands = (
        _full_rank(problem.input_shape),
        _full_rank(problem.output_shape),
        problem.geometry(
            kernel=kernel, filter_layout=Layout.INTERLEAVED if interleaved else Layout.KRSC
        ),
        [*_described(device, multiprocessors), int(fused_output)],
    )
    model = _model(storage, "gpu" if device == "gpu" else "cpu")
    results = model.execute(*(_buffer(values) for values in operands))
    code, text = (np.asarray(result.to_numpy()) for result in results)
    name = Kernel(int(code[0])).name.lower()
    return name, text.tobytes().rstrip(b"\0").decode("utf-8", errors="replace")


def _check_blocks(problem: ConvProblem, dtype: str, layout: str, *, on_gpu: bool) -> None:
    """Raises ``ValueError`` where no kernel takes a layout, and where it cannot hold a problem."""
    from ._interleave import CPU_DTYPES, pairing_refusal

    if refusal := pairing_refusal(layout, layout, on_gpu=on_gpu):
        raise ValueError(f"layout: {refusal}")
    if on_gpu:
        return
    if dtype not in CPU_DTYPES:
        raise ValueError(f"layout: {layout} takes {', '.join(CPU_DTYPES)} on a CPU; here {dtype}")
    block, _ = BLOCKED_IMAGES[layout]
    channels, filters = int(problem.channels), int(problem.filters)
    if channels % block or filters % block:
        raise ValueError(
            f"layout: {layout} holds multiples of {block} channels and filters; here {channels} "
            f"and {filters}"
        )


def explain_graph(dtype: str, device: DeviceRef) -> Graph:
    """Returns the graph that asks: the op ``maxconv_explain`` alone.

    Args:
        dtype: The storage type.
        device: Where the op runs.
    """
    from max.graph import Graph

    from ._library import kernel_library

    types = operand_types()
    with Graph(f"explain_{dtype}", input_types=types, kernel_library=kernel_library()) as graph:
        graph.output(*explain_op([value.tensor for value in graph.inputs], dtype, device))
    return graph


def operand_types() -> list[TensorType]:
    """Returns the types of the op's operands, which are all in host memory.

    The activation's shape and the output's, of rank 5; the geometry; a GPU's compute capability
    times ten and its multiprocessors, or zeros for the device that the op runs on, and whether
    something is fused behind the output.
    """
    from max.dtype import DType
    from max.graph import DeviceRef, TensorType

    lengths = (_RANK, _RANK, GEOMETRY_LENGTH, 3)
    return [TensorType(DType.int64, [length], DeviceRef.CPU()) for length in lengths]


def explain_op(
    operands: Sequence[TensorValue], dtype: str, device: DeviceRef
) -> tuple[TensorValue, TensorValue]:
    """Adds the op ``maxconv_explain`` to the current graph.

    Args:
        operands: As ``operand_types`` says.
        dtype: The storage type.
        device: Where the op runs.

    Returns:
        In host memory: the kernel's code, and the reason as UTF-8 that zeros end.
    """
    from max.dtype import DType
    from max.graph import DeviceRef, TensorType, ops

    use_table()
    host = DeviceRef.CPU()
    types = [TensorType(DType.int64, [1], host), TensorType(DType.uint8, [_TEXT_BYTES], host)]
    kernel, reason = ops.custom(
        Op.EXPLAIN.value, device, operands, types, parameters={"dtype": DType[dtype]}
    )
    return kernel.tensor, reason.tensor


def _described(device: str, multiprocessors: int | None) -> list[int]:
    """Returns what the op is told of a device that need not be here, or zeros."""
    if device not in DEVICES:
        raise ValueError(f"device: {device!r} is not one of {', '.join(DEVICES)}")
    target = TARGETS.get(device)
    if multiprocessors is None:
        return [0, 0] if target is None else [target.capability, target.multiprocessors]
    if target is None:
        raise ValueError(
            f"multiprocessors: {multiprocessors} given, but device {device} has its own; only one "
            f"of {', '.join(TARGETS)} takes them"
        )
    return [target.capability, multiprocessors]


def _full_rank(shape: tuple[Any, ...]) -> list[int]:
    missing = _RANK - len(shape)
    return [int(shape[0]), *([1] * missing), *(int(size) for size in shape[1:])]


def _buffer(values: npt.ArrayLike) -> Any:
    from max.driver import Buffer

    return Buffer.from_numpy(np.ascontiguousarray(values, np.int64))


def _device(name: str) -> Device:
    from max.driver import CPU, Accelerator, accelerator_count

    if name == "cpu":
        return CPU()
    if accelerator_count() == 0:
        raise ValueError(
            "device: MAX finds no GPU on this machine; name the architecture of one that need not "
            f"be here ({', '.join(TARGETS)})"
        )
    return Accelerator()


@functools.cache
def _model(dtype: str, device: str) -> Any:
    from max.engine import InferenceSession
    from max.graph import DeviceRef

    where = _device(device)
    graph = explain_graph(dtype, DeviceRef.from_device(where))
    return InferenceSession(devices=[where]).load(graph)
