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

import numpy as np
import torch
from max.driver import CPU, Accelerator, Buffer, Device, accelerator_count
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.experimental.torch import torch_dtype_to_max
from max.graph import DeviceRef, Graph, Module, TensorType, ops
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from .._fields import GEOMETRY_LENGTH, GPU_KERNELS, SCALARS_LENGTH, Kernel
from ..arguments import check_device
from ..library import kernel_library
from ..progress import progress

__all__ = [
    "BLACKWELL",
    "BLACKWELL_DTYPES",
    "DTYPES",
    "FLOAT8",
    "HOST",
    "Operands",
    "Signature",
    "absent",
    "as_buffer",
    "prepare",
    "run",
    "shape_operand",
]

#: Stands for the CPU among the indices of GPUs.
HOST: Final = -1

#: The dtypes of inputs, filters and outputs.
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

#: What inputs and filters on a GPU may also have.
FLOAT8: Final = torch.float8_e4m3fn

#: Compute capabilities of GPUs that take more.
BLACKWELL: Final = ((10, 0), (10, 3))

#: What inputs and filters may also have there.
BLACKWELL_DTYPES: Final = (torch.float8_e5m2, torch.int8)

#: Types that cross to MAX as bytes.
_BYTES: Final = {FLOAT8: DType.float8_e4m3fn, torch.float8_e5m2: DType.float8_e5m2}


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


class Operands(NamedTuple):
    """The operands of a call, in the graph's order; tensors are channels last."""

    input: Buffer
    filter: Buffer
    bias: Buffer
    residual: Buffer
    geometry: Buffer
    scalars: Buffer
    shape: Buffer
    """What ``shape_operand`` returned."""
    scale: Buffer | None = None
    """One float32 a filter, or ``None`` where the graph has none."""


def _graph(signature: Signature, name: str = "", module: Module | None = None) -> Graph:
    """Returns the graph of a signature; in a module, with a name, beside others."""
    rank, host = signature.rank, DeviceRef.CPU()
    device = host if signature.device == HOST else DeviceRef.GPU(signature.device)
    dtype = torch_dtype_to_max(signature.dtype)
    out_dtype = torch_dtype_to_max(signature.out_dtype or signature.dtype)
    axes = ("d", "h", "w")[3 - rank :]
    output = ("out_n", *(f"out_{axis}" for axis in axes), "out_c")
    types = [
        TensorType(dtype, ("n", *axes, "c"), device),
        TensorType(dtype, ("filter_elements",), device),
        TensorType(torch_dtype_to_max(signature.bias_dtype), ("bias_elements",), device),
        TensorType(out_dtype, ("add_n", *(f"add_{axis}" for axis in axes), "add_c"), device),
        TensorType(DType.int64, (GEOMETRY_LENGTH,), host),
        TensorType(DType.float32, (SCALARS_LENGTH,), host),
        # Without elements: it names the output's sizes, which no other operand has.
        TensorType(DType.uint8, (*output, 0), host),
        *[TensorType(DType.float32, ("scale_elements",), device)] * signature.scaled,
    ]
    with Graph(
        name or f"maxconv_conv{rank}d",
        input_types=types,
        kernel_library=kernel_library(),
        module=module,
    ) as graph:
        x, filter, bias, residual, geometry, scalars, _, *scale = (
            value.tensor for value in graph.inputs
        )
        if not scale:
            scale = [ops.constant(np.zeros(0, np.float32), DType.float32, device)]
        operands = [x, filter, bias, residual, *scale, geometry, scalars]
        out_types = [TensorType(out_dtype, output, device)]
        # Nobody asks for the reference by name here.
        kernels = sum(1 << k for k in GPU_KERNELS if k not in (Kernel.AUTO, Kernel.REFERENCE))
        parameters: dict[str, bool | int | str | DType] = {}
        if signature.scaled:
            parameters["scaled"] = True
        if signature.device != HOST:
            parameters["kernels"] = kernels
        graph.output(*ops.custom("maxconv.conv", device, operands, out_types, parameters))
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
        maxconv.library.LibraryError: The kernels cannot be compiled.
    """
    if rank not in (1, 2, 3):
        raise ValueError(f"rank: {rank} is not a spatial rank; 1, 2 or 3 is allowed")
    if dtype not in DTYPES:
        allowed = ", ".join(map(str, DTYPES))
        raise TypeError(f"dtype: {dtype} is not supported; {allowed} are allowed")
    place = torch.device(device)
    check_device("device", place, ("cpu", "cuda"))
    _model(Signature(rank, dtype, dtype, HOST if place.type == "cpu" else place.index or 0))


def as_buffer(tensor: Tensor) -> Buffer:
    """Returns MAX's view of a contiguous tensor's memory.

    On the CPU by way of numpy, which is 10 us a call faster than ``Buffer.from_dlpack`` of a torch
    tensor: 3 in the conversion, the rest in the execution that reads the buffer.
    """
    if tensor.dtype in _BYTES:
        return Buffer.from_dlpack(tensor.view(torch.uint8)).view(_BYTES[tensor.dtype])
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


def run(signature: Signature, operands: Operands) -> Tensor:
    """Returns the convolution, ``[N, *spatial, K]``, in memory that no other tensor shares.

    Raises:
        ValueError: The op refused the operands; the message says why.
    """
    model = _models.get(signature) or _model(signature)
    given = operands[:-1] if operands.scale is None else operands
    output = model.execute(*given)[0]
    if signature.device != HOST:
        # The object: PyTorch asks it for the capsule with its current stream, which then waits.
        return from_dlpack(output)
    # The capsule itself: from_dlpack asks an object for its device first.
    return from_dlpack(output.__dlpack__())
