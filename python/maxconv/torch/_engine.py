"""The compiled graphs behind the PyTorch ops on a GPU, and the operands that they take.

``max.experimental.torch.graph_op`` makes a PyTorch op of a MAX graph, at 110 to 140 us a call: it
builds a key, crosses into ``torch.library.custom_op`` and converts each of seven operands, every
time. Here a graph is compiled once for a spatial rank and the dtypes, every size in it symbolic;
what does not change between calls (geometry, packed filters) is converted once; the output is MAX's
own buffer, which PyTorch wraps without a copy.

MAX runs on a queue of its own. The operands are handed over by DLPack, which makes that queue wait
for PyTorch's current stream, and PyTorch's stream for the queue: nothing waits on the host. On the
CPU there is no graph: see ``_native``.
"""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

import torch
from max.driver import CPU, Accelerator, Buffer, Device, accelerator_count
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.experimental.torch import torch_dtype_to_max
from max.graph import DeviceRef, Graph
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from .. import _emit
from .._checks import check_device
from .._emit import Operands
from .._fields import Kernel
from .._library import kernel_library
from .._native import Family, library
from .._progress import progress
from ._dtypes import BYTES, DTYPES, NAMES, listed

__all__ = ["Signature", "absent", "as_buffer", "prepare", "run", "shape_operand"]


class Signature(NamedTuple):
    """What a compiled graph is specific to."""

    rank: int
    """Spatial dimensions: 1, 2 or 3."""
    dtype: torch.dtype
    """Of input and filter."""
    bias_dtype: torch.dtype
    """Of the bias."""
    device: int
    """The GPU's index."""
    out_dtype: torch.dtype | None = None
    """Of residual and output; ``None`` stands for ``dtype``."""
    scaled: bool = False
    """Whether each filter has a factor."""


def _graph(signature: Signature) -> Graph:
    """Returns the graph of a signature."""
    device = DeviceRef.GPU(signature.device)
    out_dtype = NAMES[signature.out_dtype or signature.dtype]
    types = _emit.operand_types(
        signature.rank,
        NAMES[signature.dtype],
        device,
        bias_dtype=NAMES[signature.bias_dtype],
        out_dtype=out_dtype,
        scaled=signature.scaled,
    )
    output = _emit.symbolic_output(signature.rank, out_dtype, device)
    with Graph(
        f"maxconv_conv{signature.rank}d",
        input_types=[*types, _emit.shape_carrier(output)],
        kernel_library=kernel_library(),
    ) as graph:
        *values, _ = (value.tensor for value in graph.inputs)
        operands = types.with_values(values)
        # Nobody asks for a kernel by name here.
        graph.output(_emit.emit(operands, output, known={"kernel": int(Kernel.AUTO)}))
    return graph


_lock = threading.Lock()
_models: dict[Signature, Model] = {}
_sessions: dict[int, InferenceSession] = {}


def max_device(index: int) -> Device:
    """Returns MAX's device: the GPU that PyTorch gives this index.

    Raises:
        ValueError: MAX finds no such GPU.
    """
    count = accelerator_count()
    if index >= count:
        raise ValueError(
            f"input: device cuda:{index}, but MAX finds {count} accelerators on this machine; the "
            "CPU and a GPU that MAX supports are allowed"
        )
    return Accelerator(index)


def _model(signature: Signature) -> Model:
    """Returns the graph's compiled form; of threads that ask at once, one compiles it."""
    with _lock:
        if signature not in _models:
            index = signature.device
            what = f"maxconv's conv{signature.rank}d for PyTorch, {signature.dtype}, GPU {index}"
            announce = bool(os.environ.get("MAXCONV_PROGRESS"))
            with progress(f"compiling {what}", announce=announce):
                if index not in _sessions:
                    _sessions[index] = InferenceSession(devices=[max_device(index)])
                _models[signature] = _sessions[index].load(_graph(signature))
        return _models[signature]


def prepare(
    rank: int = 2, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> None:
    """Compiles now what the first call would compile: half a minute once, then a second at most.

    Args:
        rank: Spatial dimensions: 1, 2 or 3. On a CPU all ranks share what is compiled.
        dtype: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

    Raises:
        ValueError: Another ``rank`` or ``device``, or MAX finds no such GPU.
        TypeError: Another ``dtype``.
        maxconv.LibraryError: The kernels cannot be compiled.
    """
    if rank not in (1, 2, 3):
        raise ValueError(f"rank: {rank} is not a spatial rank; 1, 2 or 3 is allowed")
    if dtype not in DTYPES:
        raise TypeError(f"dtype: {dtype} is not supported; {listed()} are allowed")
    place = torch.device(device)
    check_device("device", place, ("cpu", "cuda"))
    if place.type == "cpu":
        name = NAMES[dtype]
        library(Family(name, name, name, scaled=False))
    else:
        _model(Signature(rank, dtype, dtype, place.index or 0))


def as_buffer(tensor: Tensor) -> Buffer:
    """Returns MAX's view of a contiguous tensor's memory."""
    if tensor.dtype in BYTES:
        return Buffer.from_dlpack(tensor.view(torch.uint8)).view(DType[NAMES[tensor.dtype]])
    return Buffer.from_dlpack(tensor)


_absent: dict[tuple[int, torch.dtype, int], Buffer] = {}


def absent(rank: int, dtype: torch.dtype, device: int) -> Buffer:
    """Returns the operand that stands for a bias (``rank`` 1) or a residual that is not there."""
    buffer = _absent.get((rank, dtype, device))
    if buffer is None:
        buffer = Buffer(torch_dtype_to_max(dtype), (0,) * rank, max_device(device))
        _absent[rank, dtype, device] = buffer
    return buffer


def shape_operand(shape: tuple[int, ...]) -> Buffer:
    """Returns the operand that has the output's shape (channels last) and no elements."""
    return Buffer(DType.uint8, (*shape, 0), CPU())


def run(signature: Signature, operands: Operands[Buffer], shape: Buffer) -> Tensor:
    """Returns the convolution, ``[N, *spatial, K]``, in memory that no other tensor shares.

    Args:
        signature: Of the operands.
        operands: Channels last; the scale is one only if the signature has one.
        shape: What ``shape_operand`` returned.

    Raises:
        ValueError: The op refused the operands; the message says why.
    """
    model = _models.get(signature) or _model(signature)
    output = model.execute(*operands, shape)[0]
    # The object: PyTorch asks it for the capsule with its current stream, which then waits.
    return from_dlpack(output)
