"""The compiled graphs behind the PyTorch ops, and the operands that they take.

``max.experimental.torch.graph_op`` makes a PyTorch op of a MAX graph, at 110 to 140 us a call: it
builds a key, crosses into ``torch.library.custom_op`` and converts each of seven operands, every
time. Here a graph is compiled once for a spatial rank and the dtypes, every size in it symbolic;
what does not change between calls (geometry, packed filters) is converted once; the output is MAX's
own buffer, which PyTorch wraps without a copy.

On a GPU, MAX runs on a queue of its own. The operands are handed over by DLPack, which makes that
queue wait for PyTorch's current stream, and PyTorch's stream for the queue: nothing waits on the
host.
"""

from __future__ import annotations

import os
import threading
from typing import Final, NamedTuple

import torch
from max.driver import CPU, Accelerator, Buffer, Device, accelerator_count
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.experimental.torch import torch_dtype_to_max
from max.graph import DeviceRef, Graph, Module
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from .. import _emit
from .._checks import check_device
from .._emit import Operands
from .._fields import Kernel
from .._library import kernel_library
from .._progress import progress
from ._dtypes import BYTES, DTYPES, NAMES, listed

__all__ = ["HOST", "Signature", "absent", "as_buffer", "prepare", "run", "shape_operand"]

#: Stands for the CPU among the indices of GPUs.
HOST: Final = -1


class Signature(NamedTuple):
    """What a compiled graph is specific to."""

    rank: int
    """Spatial dimensions: 1, 2 or 3."""
    dtype: torch.dtype
    """Of input and filter."""
    bias_dtype: torch.dtype
    """Of the bias."""
    device: int = HOST
    """The GPU's index, or ``HOST``."""
    out_dtype: torch.dtype | None = None
    """Of residual and output; ``None`` stands for ``dtype``."""
    scaled: bool = False
    """Whether each filter has a factor."""


def _graph(signature: Signature, name: str = "", module: Module | None = None) -> Graph:
    """Returns the graph of a signature; in a module, with a name, beside others."""
    on_host = signature.device == HOST
    device = DeviceRef.CPU() if on_host else DeviceRef.GPU(signature.device)
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
    # Nobody asks for a kernel by name here.
    known = None if on_host else {"kernel": int(Kernel.AUTO)}
    with Graph(
        name or f"maxconv_conv{signature.rank}d",
        input_types=[*types, _emit.shape_carrier(output)],
        kernel_library=kernel_library(),
        module=module,
    ) as graph:
        *values, _ = (value.tensor for value in graph.inputs)
        operands = types.with_values(values)
        graph.output(_emit.emit(operands, output, known=known))
    return graph


_lock = threading.Lock()
_models: dict[Signature, Model] = {}
_sessions: dict[int, InferenceSession] = {}


def max_device(index: int) -> Device:
    """Returns MAX's device: the CPU, or the GPU that PyTorch gives this index.

    Raises:
        ValueError: MAX finds no such GPU.
    """
    if index == HOST:
        return CPU()
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
            place = "" if index == HOST else f", GPU {index}"
            what = f"maxconv's conv{signature.rank}d for PyTorch, {signature.dtype}{place}"
            announce = bool(os.environ.get("MAXCONV_PROGRESS"))
            with progress(f"compiling {what}", announce=announce):
                if index not in _sessions:
                    _sessions[index] = InferenceSession(devices=[max_device(index)])
                _models[signature] = _sessions[index].load(_graph(signature))
        return _models[signature]


def prepare(
    rank: int = 2, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> None:
    """Compiles now what the first call would compile: half a minute once, seconds from MAX's cache.

    Args:
        rank: Spatial dimensions: 1, 2 or 3. Every convolution of one rank and dtype shares a graph.
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
    _model(Signature(rank, dtype, dtype, HOST if place.type == "cpu" else place.index or 0))


def as_buffer(tensor: Tensor) -> Buffer:
    """Returns MAX's view of a contiguous tensor's memory.

    On the CPU by way of numpy, which is 10 us a call faster than ``Buffer.from_dlpack`` of a torch
    tensor: 3 in the conversion, the rest in the execution that reads the buffer.
    """
    if tensor.dtype in BYTES:
        return Buffer.from_dlpack(tensor.view(torch.uint8)).view(DType[NAMES[tensor.dtype]])
    if tensor.is_cuda:
        return Buffer.from_dlpack(tensor)
    if tensor.dtype == torch.bfloat16:
        return Buffer.from_numpy(tensor.view(torch.int16).numpy()).view(DType.bfloat16)
    return Buffer.from_numpy(tensor.numpy())


_absent: dict[tuple[int, torch.dtype, int], Buffer] = {}


def absent(rank: int, dtype: torch.dtype, device: int = HOST) -> Buffer:
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
    if signature.device != HOST:
        # The object: PyTorch asks it for the capsule with its current stream, which then waits.
        return from_dlpack(output)
    # The capsule itself: from_dlpack asks an object for its device first.
    return from_dlpack(output.__dlpack__())
