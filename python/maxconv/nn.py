"""Convolution modules in the style of ``max.experimental.nn``.

``Conv2d`` has the constructor, the parameters (``weight``, ``bias``) and the layouts of
``max.experimental.nn.Conv2d``, so a checkpoint of either loads into the other; ``Conv1d`` and
``Conv3d`` are alike. They also work inside ``Sequential`` and the rest of a module tree::

    model = Sequential(
        Conv2d(3, 3, 64, padding=1, has_bias=True, activation="relu"), Conv2d(3, 64, 3, padding=1)
    )
    model.load_state_dict(weights)
    run = model.compile(TensorType(DType.float32, ["n", "h", "w", 3], model.device))

A compiled model packs its filters once, when it is loaded. A module that is called without being
compiled packs its filter in every call. No module needs ``custom_extensions``, for each gives
maxconv's kernels to the graph that it is called in; only a model with ``as_subgraph`` around such
modules is compiled with ``custom_extensions=[maxconv.library_path()]``. New parameters are drawn
as PyTorch draws them.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType
from max.experimental.nn import Module
from max.experimental.realization_context import ensure_context
from max.experimental.tensor import Tensor, defaults
from max.graph import DeviceRef, Graph, TensorValue
from max.graph.type import ConvInputLayout, FilterLayout

from ._arguments import ConvArguments
from ._checks import (
    LAYOUTS,
    Padding,
    check_at_least,
    check_dtype,
    check_filter_layout,
    check_integer,
    renamed,
    show,
    spatial_tuple,
)
from ._graph import import_kernels
from ._ops import convolve, convolve_transpose
from ._packing import cast_array
from .activations import ActivationLike

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d"]


class _Holder(Module[..., Tensor]):
    """What convolutions and transposed convolutions hold alike."""

    spatial_rank: ClassVar[int]
    #: Of the weight's filters and channels, which are the module's outputs.
    _transposed: ClassVar[bool] = False

    weight: Tensor
    bias: Tensor | Literal[0]

    #: What is no tensor, as it was when the module was made.
    arguments: ConvArguments

    def _place(
        self,
        dtype: DType | None,
        device: Device | DeviceRef | None,
        has_bias: bool,
        permute: bool,
        name: str | None,
        filter_layout: FilterLayout | str | None,
    ) -> None:
        """Keeps where the parameters are and how they are laid out."""
        _, default, torchs = LAYOUTS[self.spatial_rank]
        self.dtype = dtype
        self.device = device
        self.has_bias = has_bias
        self.permute = permute
        self.name = name
        self.filter_layout = check_filter_layout(
            (torchs if permute else default) if filter_layout is None else filter_layout,
            self.spatial_rank,
        )

    def _draw(
        self, kernel_size: int | tuple[int, ...], in_channels: int, out_channels: int
    ) -> None:
        """Makes the parameters; ``arguments`` and what ``_place`` keeps are there."""
        rank, groups = self.spatial_rank, self.arguments.groups
        self.kernel_size = spatial_tuple("kernel_size", kernel_size, rank)
        check_at_least("kernel_size", self.kernel_size, 1)
        for label, value in (("in_channels", in_channels), ("out_channels", out_channels)):
            check_at_least(label, check_integer(label, value), 1)
            if value % groups:
                raise ValueError(f"{label}: {value} is not divisible by num_groups={groups}")
        self.in_channels, self.out_channels = in_channels, out_channels
        filters, channels = out_channels, in_channels
        if self._transposed:
            filters, channels = channels, filters
        own, default, torchs = LAYOUTS[rank]
        shape = {
            own: (filters, *self.kernel_size, channels // groups),
            default: (*self.kernel_size, channels // groups, filters),
            torchs: (filters, channels // groups, *self.kernel_size),
        }[self.filter_layout]
        reach = (math.prod(self.kernel_size) * channels // groups) ** -0.5
        self.weight = _drawn(shape, reach, self.dtype, self.device)
        self.bias = _drawn((out_channels,), reach, self.dtype, self.device) if self.has_bias else 0

    @property
    def stride(self) -> tuple[int, ...]:
        """One a spatial dimension."""
        return self.arguments.stride

    @property
    def dilation(self) -> tuple[int, ...]:
        """One a spatial dimension."""
        return self.arguments.dilation

    @property
    def padding(self) -> tuple[int, ...] | str:
        """``(before, after)`` of each spatial dimension, or ``"same"``."""
        return "same" if self.arguments.padding is None else self.arguments.padding

    @property
    def num_groups(self) -> int:
        """Groups of channels and filters."""
        return self.arguments.groups

    @property
    def _input_layout(self) -> ConvInputLayout:
        return ConvInputLayout.NCHW if self.permute else ConvInputLayout.NHWC

    def _parameters(self, x: Tensor) -> tuple[TensorValue, TensorValue | None]:
        """Returns weight and bias in the current graph, which is given maxconv's kernels."""
        import_kernels(Graph.current)
        weight, bias = TensorValue(self.weight.to(x.device)), self.bias
        return weight, TensorValue(bias.to(x.device)) if isinstance(bias, Tensor) else None


def _drawn(
    shape: tuple[int, ...], reach: float, dtype: DType | None, device: Device | DeviceRef | None
) -> Tensor:
    """Draws a parameter as PyTorch does; with numpy, for MAX would compile a graph for each."""
    place = device.to_device() if isinstance(device, DeviceRef) else device
    kind, mesh = defaults(dtype, place)
    values = np.random.default_rng().uniform(-reach, reach, shape)
    data = cast_array(values, "float64", check_dtype("dtype", kind))
    buffer = Buffer.from_numpy(data)
    if kind == DType.bfloat16:
        buffer = buffer.view(DType.bfloat16)
    return Tensor.from_dlpack(buffer.to(mesh.devices[0]))


def _paddings(padding: Padding, rank: int) -> Padding:
    """Reads a module's padding, of which one entry a dimension stands for both sides."""
    if isinstance(padding, tuple | list) and len(padding) == rank:
        return tuple(entry for entry in padding for _ in range(2))
    return padding


class _Conv(_Holder):
    """What the convolutions of all ranks share."""

    def __init__(
        self,
        kernel_size: int | tuple[int, ...],
        in_channels: int,
        out_channels: int,
        dtype: DType | None = None,
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        num_groups: int = 1,
        device: Device | DeviceRef | None = None,
        has_bias: bool = False,
        permute: bool = False,
        name: str | None = None,
        *,
        filter_layout: FilterLayout | str | None = None,
        activation: ActivationLike = None,
        final_activation: ActivationLike = None,
        beta: float = 1.0,
        config: str | None = None,
        precision: str = "tf32",
        upsample: int | tuple[int, ...] = 1,
    ) -> None:
        with renamed(groups="num_groups"):
            self.arguments = ConvArguments.read(
                self.spatial_rank,
                stride=stride,
                dilation=dilation,
                padding=_paddings(padding, self.spatial_rank),
                groups=num_groups,
                activation=activation,
                final_activation=final_activation,
                beta=beta,
                precision=precision,
                config=config,
                upsample=upsample,
            )
        self._place(dtype, device, has_bias, permute, name, filter_layout)
        self._draw(kernel_size, in_channels, out_channels)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Convolves ``x``.

        Args:
            x: ``[N, *spatial, in_channels]``, or ``[N, in_channels, *spatial]`` with ``permute``.
            residual: Of the result's shape; ``beta`` times it is added after the activation.

        Returns:
            ``final_activation(activation(conv(x, weight) + bias) + beta * residual)``, laid out as
            ``x`` is.

        Raises:
            TypeError: An argument is no tensor.
            ValueError: A shape or a type does not fit; see ``maxconv.conv2d``.
        """
        with ensure_context():
            weight, bias = self._parameters(x)
            result = convolve(
                TensorValue(x),
                weight,
                self.arguments,
                bias,
                None if residual is None else TensorValue(residual),
                None,
                self._input_layout,
                self.filter_layout,
            )
            return Tensor.from_graph_value(result)


class Conv1d(_Conv):
    """A convolution of signals, ``[N, W, C]``.

    The arguments are those of ``Conv2d``, with one spatial dimension. The weight is
    ``[S, C / num_groups, K]``, or ``[K, C / num_groups, S]`` with ``permute``. A ``padding`` of two
    integers is ``(before, after)``.
    """

    spatial_rank = 1


class Conv2d(_Conv):
    """A convolution of images, with the constructor of ``max.experimental.nn.Conv2d`` and more.

    Args:
        kernel_size: Taps: one integer, or ``(h, w)``.
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        dtype: Type of the parameters; by default the device's.
        stride: One integer, or ``(h, w)``.
        padding: One integer for all sides, ``(h, w)``, ``(h_before, h_after, w_before, w_after)``,
            ``"same"`` or ``"valid"``.
        dilation: One integer, or ``(h, w)``.
        num_groups: Groups of channels and filters.
        device: Where the parameters are.
        has_bias: Whether there is a bias, ``[out_channels]``.
        permute: Whether everything is laid out as in PyTorch: the weight
            ``[K, C / num_groups, R, S]``, the input and the output ``[N, C, H, W]``. Otherwise the
            weight is ``[R, S, C / num_groups, K]``, input and output are ``[N, H, W, C]``.
        name: Kept, and not used.
        filter_layout: The weight's layout where it is not what ``permute`` says: ``"FCRS"`` takes
            PyTorch's weights for channels-last images.
        activation: A name, or what ``maxconv.activations`` makes: applied before the residual is
            added.
        final_activation: The same, applied after it.
        beta: What the residual of a call is multiplied with.
        config: The kernel that must run, by the names that ``maxconv.conv2d`` lists.
        precision: ``"tf32"`` or ``"float32"``: what a GPU leaves of float32 operands.
        upsample: How often each pixel of the input is repeated before it is convolved: one integer,
            or ``(h, w)``.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed.
    """

    spatial_rank = 2


class Conv3d(_Conv):
    """A convolution of volumes or videos, ``[N, D, H, W, C]``.

    The arguments are those of ``Conv2d``, with three spatial dimensions. The weight is
    ``[T, R, S, C / num_groups, K]``, or ``[K, C / num_groups, T, R, S]`` with ``permute``.
    """

    spatial_rank = 3


class ConvTranspose2d(_Holder):
    """A transposed convolution of images.

    The arguments are those of ``Conv2d``, and ``output_padding``: rows and columns of which
    ``padding`` cuts less at the end. The weight is ``[R, S, K / num_groups, C]``, or PyTorch's
    ``[C, K / num_groups, R, S]`` with ``permute``.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed.
    """

    spatial_rank = 2
    _transposed = True

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        in_channels: int,
        out_channels: int,
        dtype: DType | None = None,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, ...] = 0,
        dilation: int | tuple[int, int] = 1,
        output_padding: int | tuple[int, int] = 0,
        num_groups: int = 1,
        device: Device | DeviceRef | None = None,
        has_bias: bool = False,
        permute: bool = False,
        name: str | None = None,
        *,
        filter_layout: FilterLayout | str | None = None,
        activation: ActivationLike = None,
        config: str | None = None,
        precision: str = "tf32",
    ) -> None:
        sides = _paddings(padding, 2)
        if isinstance(sides, str):
            raise ValueError(
                f"padding: {show(sides)} is not defined for a transposed convolution; "
                "integers are allowed"
            )
        with renamed(groups="num_groups"):
            self.arguments = ConvArguments.read(
                2,
                stride=stride,
                dilation=dilation,
                padding=sides,
                groups=num_groups,
                activation=activation,
                precision=precision,
                config=config,
            )
        self.output_padding = spatial_tuple("output_padding", output_padding, 2)
        self._place(dtype, device, has_bias, permute, name, filter_layout)
        self._draw(kernel_size, in_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the transposed convolution of ``x``.

        Args:
            x: ``[N, H, W, in_channels]``, or ``[N, in_channels, H, W]`` with ``permute``.

        Returns:
            ``activation(conv_transpose(x, weight) + bias)``, laid out as ``x`` is.

        Raises:
            TypeError: ``x`` is no tensor.
            ValueError: A shape or a type does not fit; see ``maxconv.conv2d_transpose``.
        """
        with ensure_context():
            weight, bias = self._parameters(x)
            result = convolve_transpose(
                TensorValue(x),
                weight,
                self.arguments,
                self.output_padding,
                bias,
                None,
                self._input_layout,
                self.filter_layout,
            )
            return Tensor.from_graph_value(result)
