"""Operands of the registered op, for those who call it through MAX's own bridge to PyTorch.

``max.experimental.torch.CustomOpLibrary`` makes operators of PyTorch's of the registered ops. Such
an operator writes to its first argument and takes every operand of the op, of which two say what
the convolution is: ``conv_operands`` makes these of the arguments of ``torch.nn.functional``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .._checks import LAYOUTS, check_device, check_same_device, renamed, show
from .._dtypes import INPUT_BYTES
from .._fields import Layout, Precision
from .._packing import packed_length
from .._problem import encode
from .._signature import Operands, known_problem, op_parameters
from ..activations import ActivationLike
from ._arguments import Ints, check_input_dtype, check_tensors, read
from ._dtypes import BY_NAME, CPU_FILTERS, DTYPES, GPU_FILTERS, NAMES, OUTPUTS, listed
from ._filters import pack_on_host
from ._plan import check_sizes

__all__ = ["ConvOperands", "conv_operands", "pack_filter"]


@dataclass(frozen=True, eq=False)
class ConvOperands:
    """What the op takes of a convolution besides its tensors; ``conv_operands`` makes it.

    It holds for tensors of these shapes and any dtype.
    """

    input_shape: tuple[int, ...]
    """``[N, *spatial, C]``."""
    filter_lengths: Mapping[int, int]
    """Elements of what ``pack_filter`` returns, by the bytes of one."""
    output_shape: tuple[int, ...]
    """``[N, *spatial, K]``."""
    has_bias: bool
    """Whether there is a bias."""
    has_residual: bool
    """Whether there is a residual."""
    has_scale: bool
    """Whether there is a scale."""
    device: str
    """Where the tensors are: ``cpu`` or ``cuda``."""
    geometry: Tensor
    """The op's operand of this name, int64: in host memory on every device, as the next one."""
    scalars: Tensor
    """The op's operand of this name, float32."""
    parameters: Mapping[str, bool | int]
    """The op's parameters, for ``library.maxconv_conv_cpu[parameters]``: it is compiled faster, and
    for such convolutions alone. Without them it takes no scale."""

    def filter_shape(self, dtype: torch.dtype) -> tuple[int]:
        """Returns the shape of what ``pack_filter`` returns: one dimension.

        Args:
            dtype: Of the weight.

        Raises:
            TypeError: The dtype is unsupported.
        """
        if dtype not in NAMES:
            raise TypeError(f"dtype: {dtype} is not supported; {listed(tuple(NAMES))} are allowed")
        return (self.filter_lengths[dtype.itemsize],)

    def arguments(
        self,
        output: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns all arguments of the operator in its order, empty ones for what is not there.

        Tensors must be contiguous. ``tensor.permute(0, 2, 3, 1)`` of a channels-last one is.

        Args:
            output: ``output_shape``, float32, bfloat16 or float16: where the operator writes.
            input: ``input_shape``, of a dtype that ``conv2d`` takes.
            weight: What ``pack_filter`` returned, of the input's dtype.
            bias: ``[K]`` of the input's dtype (the output's for a dtype of 8 bits) or float32.
            residual: Of the output's shape and dtype.
            scale: ``[K]``, float32.

        Raises:
            TypeError: One is no tensor, or its dtype is unsupported or does not go with the
                others'.
            ValueError: A shape, a device or a memory layout is not allowed, or ``conv_operands``
                was told otherwise of what is there.
            RuntimeError: One requires grad while grad mode is on.
        """
        self._check(output, input, weight, bias, residual, scale)
        # What is not there is never read: it may be in host memory on every device.
        every = Operands(input, weight, bias, residual, scale, self.geometry, self.scalars)
        whole = every.completed(
            lambda dtype, rank: torch.empty((0,) * rank, dtype=BY_NAME[dtype]),
            dtype=NAMES[input.dtype],
            out_dtype=NAMES[output.dtype],
            rank=input.dim(),
        )
        return output, *whole.values()

    def _check(
        self,
        output: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        scale: Tensor | None,
    ) -> None:
        for name, tensor, is_there in (
            ("bias", bias, self.has_bias),
            ("residual", residual, self.has_residual),
            ("scale", scale, self.has_scale),
        ):
            if (tensor is not None) != is_there:
                given = "None" if tensor is None else "a tensor"
                raise ValueError(f"{name}: {given}, but conv_operands was told {name}={is_there}")
        outputs = DTYPES if output.is_cuda else OUTPUTS
        if output.dtype not in outputs:
            raise TypeError(
                f"output: dtype {output.dtype} is not supported; {listed(outputs)} are allowed"
            )
        out_dtype = NAMES[output.dtype]
        if input.dtype not in DTYPES:
            check_input_dtype(input, out_dtype)
        check_tensors(input, weight, bias, residual, scale, out_dtype)
        check_same_device("input", input.device.type, self.device, "convolution")
        check_same_device("output", output.device, input.device)
        _check_shape("output", output, self.output_shape, "[N, *spatial, K]")
        _check_shape("input", input, self.input_shape, "[N, *spatial, C]")
        _check_shape("weight", weight, self.filter_shape(weight.dtype), "what pack_filter returns")
        for name, tensor in (("bias", bias), ("scale", scale)):
            if tensor is not None:
                _check_shape(name, tensor, self.output_shape[-1:], "one element a filter")
        if residual is not None:
            _check_shape("residual", residual, self.output_shape, "that of the output")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], words: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name}: shape {show(tuple(tensor.shape))} is not what the operands were made for; "
            f"{show(shape)} is needed: {words}"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name}: strides {show(tensor.stride())} of a tensor that is not contiguous; those of "
            "tensor.contiguous() are needed"
        )


def conv_operands(
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    *,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    bias: bool = False,
    residual: bool = False,
    scale: bool = False,
    activation: ActivationLike = None,
    beta: float = 1.0,
    final_activation: ActivationLike = None,
    precision: str = "tf32",
    device: torch.device | str = "cpu",
) -> ConvOperands:
    """Returns what MAX's op of a convolution takes, from the arguments of PyTorch's.

    The op is ``maxconv_conv_cpu`` or ``maxconv_conv_gpu`` of
    ``max.experimental.torch.CustomOpLibrary(maxconv.library_path())``. It computes what ``conv2d``
    does, and takes and gives tensors whose channels come last.

    Args:
        input_shape: As PyTorch has it: ``[N, C, *spatial]``, of one to three spatial dimensions.
        weight_shape: ``[K, C / groups, *taps]``.
        stride: One integer, or one a spatial dimension.
        padding: The same, for both sides; ``"valid"``, ``"same"``.
        dilation: As ``stride``.
        groups: Divides the channels of input and output.
        bias: Whether there is one.
        residual: Whether there is one.
        scale: Whether there is one.
        activation: As ``conv2d`` takes it, like the next two.
        beta: Factor of the residual.
        final_activation: What follows the residual.
        precision: ``"tf32"`` or ``"float32"``, of products of float32 on a GPU.
        device: Where the tensors are: on a CPU or a CUDA device.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or the sizes are those of no
            convolution.
    """
    for name, flag in (("bias", bias), ("residual", residual), ("scale", scale)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: a {type(flag).__name__} is given; True or False is allowed")
    place = torch.device(device).type
    check_device("device", place, ("cpu", "cuda"))
    rank = _spatial_rank(weight_shape)
    if len(input_shape) != rank + 2:
        raise ValueError(
            f"input: shape {show(tuple(input_shape))} has rank {len(input_shape)}; with a weight "
            f"of rank {rank + 2} the same rank is needed: [N, C, *spatial]"
        )
    epilogue = (activation, beta, final_activation, precision, None)
    arguments = read(rank, stride, padding, dilation, groups, *epilogue)
    problem = check_sizes(tuple(input_shape), tuple(weight_shape), arguments)
    layout = Layout.PACKED if place == "cpu" else Layout.KRSC
    geometry, scalars = encode(
        problem, arguments, filter_layout=layout, has_bias=bias, has_residual=residual
    )
    lengths = dict.fromkeys((1, 2, 4), math.prod(weight_shape))
    if layout is Layout.PACKED:
        filters, channels, *taps = weight_shape
        for dtype in ("float32", "bfloat16", "int8"):
            lengths[INPUT_BYTES[dtype]] = packed_length(
                taps, filters=filters, group_channels=channels, groups=groups, dtype=dtype
            )
    known = known_problem(problem, precision=arguments.precision or Precision.TF32)
    return ConvOperands(
        cast("tuple[int, ...]", problem.input_shape),
        lengths,
        cast("tuple[int, ...]", problem.output_shape),
        bias,
        residual,
        scale,
        place,
        torch.from_numpy(geometry),
        torch.from_numpy(scalars),
        op_parameters(known, scaled=scale),
    )


def pack_filter(weight: Tensor, groups: int = 1) -> Tensor:
    """Returns a weight's elements as the kernels of its device read them, in one dimension.

    On a CPU they stand in panels, as ``maxconv.pack_filter`` has them; on a GPU they are those of
    ``[K, *taps, C / groups]``.

    Args:
        weight: ``[K, C / groups, *taps]``, of a dtype that ``conv2d`` takes.
        groups: Of the convolution.

    Raises:
        TypeError: The dtype is unsupported.
        ValueError: ``weight`` is of another rank, is empty, or has filters that ``groups`` does not
            divide.
    """
    _spatial_rank(weight.shape)
    allowed = GPU_FILTERS if weight.is_cuda else CPU_FILTERS
    if weight.dtype not in allowed:
        raise TypeError(
            f"weight: dtype {weight.dtype} is not supported; {listed(allowed)} are allowed"
        )
    if weight.is_cuda:
        last = weight.detach().movedim(1, -1)
        return last.clone(memory_format=torch.contiguous_format).reshape(-1)
    with renamed(filter="weight"):
        return pack_on_host(weight, groups)


def _spatial_rank(weight_shape: Sequence[int]) -> int:
    rank = len(weight_shape) - 2
    if rank not in LAYOUTS:
        raise ValueError(
            f"weight: shape {show(tuple(weight_shape))} has rank {rank + 2}; 3, 4 or 5 is allowed: "
            "[K, C / groups, *taps]"
        )
    return rank
