"""Which kernel a convolution runs on, and why, as the kernels' own dispatch says it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ._fields import GEOMETRY, Kernel
from .arguments import check_dtype

if TYPE_CHECKING:
    from .problem import ConvProblem

__all__ = ["explain_choice"]

_TEXT_BYTES = 512
_RANK = 5
"""Of the activation when it has all three spatial dimensions."""


def explain_choice(
    problem: ConvProblem, *, kernel: Kernel = Kernel.AUTO, dtype: object = "float32"
) -> tuple[str, str]:
    """Returns the kernel that runs a problem on this machine's CPU, and the reason.

    The answer comes from the dispatch in ``operations/conv/dispatch.mojo`` itself, through a graph
    that is compiled once a process.

    Args:
        problem: The convolution; all sizes known.
        kernel: A kernel to ask for, or ``AUTO``.
        dtype: Storage type of the activation, as ``pack_filter`` takes it.

    Raises:
        ValueError: A size is symbolic, ``dtype`` is not supported, or ``kernel`` cannot take the
            problem: the message says why.
    """
    storage = check_dtype("dtype", dtype)
    if not problem.is_static:
        raise ValueError(f"problem: {problem} has symbolic sizes; all must be known")
    results = _model().execute(
        *(
            _buffer(values)
            for values in (
                _full_rank(problem.input_shape),
                _full_rank(problem.output_shape),
                problem.geometry(kernel=kernel),
                [int(storage != "float32")],  # SOURCE_FLOAT32 or SOURCE_CONVERTED of config.mojo,
            )
        )
    )
    code, text = (np.asarray(result.to_numpy()) for result in results)
    name = Kernel(int(code[0])).name.lower()
    return name, text.tobytes().rstrip(b"\0").decode("utf-8", errors="replace")


def _full_rank(shape: tuple[Any, ...]) -> list[int]:
    missing = _RANK - len(shape)
    return [int(shape[0]), *([1] * missing), *(int(size) for size in shape[1:])]


def _buffer(values: npt.ArrayLike) -> Any:
    from max.driver import Buffer

    return Buffer.from_numpy(np.ascontiguousarray(values, np.int64))


@functools.cache
def _model() -> Any:
    from max.driver import CPU
    from max.dtype import DType
    from max.engine import InferenceSession
    from max.graph import DeviceRef, Graph, TensorType, ops

    from .library import kernel_library

    cpu = DeviceRef.CPU()
    lengths = (_RANK, _RANK, len(GEOMETRY), 1)
    with Graph(
        "maxconv_explain",
        input_types=[TensorType(DType.int64, [length], cpu) for length in lengths],
        kernel_library=kernel_library(),
    ) as graph:
        results = ops.custom(
            "maxconv.explain",
            cpu,
            list(graph.inputs),
            out_types=[
                TensorType(DType.int64, [1], cpu),
                TensorType(DType.uint8, [_TEXT_BYTES], cpu),
            ],
        )
        graph.output(*results)
    return InferenceSession(devices=[CPU()]).load(graph)
