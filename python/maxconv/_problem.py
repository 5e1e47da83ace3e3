"""What a convolution is, in Python: geometry, output shapes, the GEMM it maps to.

A convolution has one, two or three spatial dimensions, named ``w``; ``h, w``; or ``d, h, w``. Every
per-dimension tuple is outermost first. Sizes are ``int`` or, where MAX knows them only at run time,
``max.graph.Dim``; nothing else of MAX is used, and importing this module does not import MAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ._arguments import ConvArguments
from ._checks import (
    AXES,
    LAYOUTS,
    Padding,
    Size,
    check_at_least,
    check_dtype,
    check_filter_layout,
    check_integer,
    check_size,
    check_upsample,
    filter_shape_parts,
    show,
    spatial_tuple,
)
from ._dtypes import INPUT_BYTES, OUTPUT_BYTES
from ._fields import Activation, Kernel, Layout, Precision, encode_geometry, encode_scalars
from ._subpixel import SubpixelAxis

__all__ = ["ConvProblem", "GemmShape", "encode", "output_size"]


def _sizes(name: str, values: object, length: int) -> tuple[Size, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(
            f"{name}: {values!r} is a {type(values).__name__}; a tuple of {length} sizes is allowed"
        )
    if len(values) != length:
        raise ValueError(
            f"{name}: {show(tuple(values))} has {len(values)} entries; {length} are needed"
        )
    return tuple(check_size(name, value) for value in values)


def _checked_rank(filter_size: Sequence[int]) -> int:
    rank = len(filter_size)
    if rank not in AXES:
        raise ValueError(
            f"filter: {show(tuple(filter_size))} has {rank} spatial dimensions; 1, 2 or 3 are "
            "allowed"
        )
    return rank


def output_size(
    size: Size, *, taps: int, stride: int, dilation: int, pad_before: int, pad_after: int
) -> Size:
    """Returns an output size, ``floor((padded - span) / stride) + 1``.

    A symbolic size gives a symbolic one, written as MAX's own convolutions and poolings write it,
    so that the shapes of two branches of a network compare equal.
    """
    span = dilation * (taps - 1) + 1
    return (size + (pad_before + pad_after - span + stride)) // stride


@dataclass(frozen=True)
class GemmShape:
    """The matrix product that a convolution is: ``groups`` products of ``m x k`` by ``k x n``."""

    m: int
    n: int
    k: int
    groups: int


@dataclass(frozen=True)
class ConvProblem:
    """The geometry of one convolution, checked.

    Activation ``[batch, *input_size, channels]``, filter ``[filters, *filter_size, channels /
    groups]``, output ``[batch, *output_size, filters]``. ``batch``, ``input_size``, ``channels``
    and ``filters`` may be symbolic; what concerns only their values is then checked by the kernel.
    Each input element is first repeated ``upsample`` times along each dimension.

    Raises:
        TypeError: An entry is of a wrong Python type.
        ValueError: An entry has a value that no convolution has.
    """

    batch: Size
    input_size: tuple[Size, ...]
    channels: Size
    filters: Size
    filter_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pad_before: tuple[int, ...]
    pad_after: tuple[int, ...]
    groups: int = 1
    upsample: tuple[int, ...] = ()
    """One factor a spatial dimension; given as ``()``, 1 for each."""

    def __post_init__(self) -> None:
        """Checks and normalizes the fields."""
        rank = _checked_rank(self.filter_size)
        fields: dict[str, object] = {
            "batch": check_size("input", self.batch),
            "input_size": _sizes("input", self.input_size, rank),
            "channels": check_size("input", self.channels),
            "filters": check_size("filter", self.filters),
            "groups": check_integer("groups", self.groups),
        }
        for name in ("filter_size", "stride", "dilation", "pad_before", "pad_after"):
            label = (
                name if name in ("stride", "dilation") else "padding" if "pad" in name else "filter"
            )
            values = spatial_tuple(label, getattr(self, name), rank)
            check_at_least(label, values, 0 if "pad" in name else 1)
            fields[name] = values
        factors = spatial_tuple("upsample", self.upsample or 1, rank)
        fields["upsample"] = factors
        self._set(fields)
        check_at_least("groups", self.groups, 1)
        if self.upsamples:
            check_upsample(factors, self.stride)
        self._check_sizes()

    def _set(self, fields: Mapping[str, object]) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        arguments: ConvArguments,
        input_shape: Sequence[Any],
        *,
        filters: Size,
        filter_size: tuple[int, ...],
        group_channels: Size,
        groups: int | None = None,
    ) -> ConvProblem:
        """Builds a problem from arguments that were checked when they came in.

        Only what depends on sizes is checked here.

        Args:
            arguments: The arguments.
            input_shape: ``[N, *spatial, C]`` (channels last).
            filters: As ``filter_shape_parts`` returned it, like the next two.
            filter_size: Taps a spatial dimension.
            group_channels: Channels that a filter reads.
            groups: Where the filter knows them, and the arguments do not.

        Raises:
            TypeError: An entry of ``input_shape`` is no size.
            ValueError: The sizes are those of no convolution.
        """
        rank = arguments.rank
        if len(input_shape) != rank + 2:
            raise ValueError(
                f"input: shape {show(tuple(input_shape))} has rank {len(input_shape)}; a "
                f"convolution with {rank} spatial dimension{'s' * (rank > 1)} takes rank "
                f"{rank + 2}: [batch, {', '.join(AXES[rank])}, channels]"
            )
        count = arguments.groups if groups is None else groups
        batch, *input_size, channels = (check_size("input", entry) for entry in input_shape)
        if isinstance(channels, int) and isinstance(group_channels, int):
            # Divisibility first: its message is the more useful one where both are wrong.
            if channels % count == 0 and channels != group_channels * count:
                raise ValueError(
                    f"filter: {group_channels} channels a group do not match the input's "
                    f"{channels} channels in groups={count}; {channels // count} are needed"
                )
        elif isinstance(group_channels, int):
            # The filter says what the symbolic dimension must turn out to be; the kernel compares.
            channels = group_channels * count
        before, after = arguments.pads(filter_size)
        problem = object.__new__(cls)
        problem._set(
            {
                "batch": batch,
                "input_size": tuple(input_size),
                "channels": channels,
                "filters": filters,
                "filter_size": filter_size,
                "stride": arguments.stride,
                "dilation": arguments.dilation,
                "pad_before": before,
                "pad_after": after,
                "groups": count,
                "upsample": arguments.upsample or (1,) * rank,
            }
        )
        problem._check_sizes()
        return problem

    @classmethod
    def from_arguments(
        cls,
        input_shape: Sequence[Any],
        filter_shape: Sequence[Any],
        *,
        filter_layout: object,
        stride: object = 1,
        dilation: object = 1,
        padding: Padding = 0,
        groups: object = 1,
        upsample: object = 1,
        rank: int = 2,
    ) -> ConvProblem:
        """Builds a problem from the arguments of a graph function.

        Args:
            input_shape: ``[N, *spatial, C]`` (channels last).
            filter_shape: The filter's shape in ``filter_layout``.
            filter_layout: A name in ``LAYOUTS[rank]`` or a ``max.graph.FilterLayout``.
            stride: An integer, or one a spatial dimension.
            dilation: An integer, or one a spatial dimension.
            padding: What ``maxconv.conv2d`` takes.
            groups: An integer.
            upsample: An integer, or one a spatial dimension.
            rank: Spatial dimensions: 1, 2 or 3.

        Raises:
            TypeError: An argument is of a wrong Python type.
            ValueError: An argument has a value that is not allowed.
        """
        layout = check_filter_layout(filter_layout, rank)
        filters, taps, group_channels = filter_shape_parts(filter_shape, layout, rank)
        arguments = ConvArguments.read(
            rank,
            stride=stride,
            dilation=dilation,
            padding=padding,
            groups=groups,
            upsample=upsample,
        )
        return cls.of(
            arguments,
            input_shape,
            filters=filters,
            filter_size=taps,
            group_channels=group_channels,
        )

    @classmethod
    def from_parts(
        cls,
        input_shape: Sequence[Any],
        *,
        filters: Size,
        filter_size: tuple[int, ...],
        group_channels: Size,
        stride: object = 1,
        dilation: object = 1,
        padding: Padding = 0,
        groups: object = 1,
        upsample: object = 1,
    ) -> ConvProblem:
        """Builds a problem from the extents of a filter.

        Args:
            input_shape: ``[N, *spatial, C]`` (channels last).
            filters: Output channels.
            filter_size: Taps a spatial dimension, of which there are 1, 2 or 3.
            group_channels: Input channels that a filter reads.
            stride: An integer, or one a spatial dimension.
            dilation: An integer, or one a spatial dimension.
            padding: What ``maxconv.conv2d`` takes.
            groups: An integer.
            upsample: An integer, or one a spatial dimension.

        Raises:
            TypeError: An argument is of a wrong Python type.
            ValueError: An argument has a value that is not allowed.
        """
        rank = _checked_rank(filter_size)
        taps = spatial_tuple("filter", filter_size, rank)
        check_at_least("filter", taps, 1)
        arguments = ConvArguments.read(
            rank,
            stride=stride,
            dilation=dilation,
            padding=padding,
            groups=groups,
            upsample=upsample,
        )
        return cls.of(
            arguments,
            input_shape,
            filters=check_size("filter", filters),
            filter_size=taps,
            group_channels=check_size("filter", group_channels),
        )

    def _check_sizes(self) -> None:
        """Checks what depends on the sizes of input and filter, as far as they are known."""
        for name, what, count in (
            ("input", "channels", self.channels),
            ("filter", "filters", self.filters),
        ):
            if not isinstance(count, int):
                continue
            if count < 1:
                raise ValueError(f"{name}: {count} {what}; at least 1 is needed")
            if count % self.groups:
                raise ValueError(
                    f"{name}: {count} {what} are not divisible by groups={self.groups}"
                )
        if isinstance(self.batch, int) and self.batch < 0:
            raise ValueError(f"input: batch {self.batch} is negative; at least 0 is needed")
        for i, axis in enumerate(AXES[self.spatial_rank]):
            size = self.input_size[i]
            if not isinstance(size, int):
                continue
            if size < 0:
                raise ValueError(f"input: {axis} extent {size} is negative; at least 0 is needed")
            padded = size * self.upsample[i] + self.pad_before[i] + self.pad_after[i]
            span = self.span[i]
            if span > padded:
                raise ValueError(
                    f"filter: {axis} extent {self.filter_size[i]} with dilation {self.dilation[i]} "
                    f"spans {span} but the "
                    f"padded input has only {padded}; enlarge the padding or the input"
                )

    @property
    def spatial_rank(self) -> int:
        """Spatial dimensions: 1, 2 or 3."""
        return len(self.filter_size)

    @property
    def taps(self) -> int:
        """Taps of the filter, ``T * R * S``."""
        return math.prod(self.filter_size)

    @property
    def span(self) -> tuple[int, ...]:
        """Input elements that the dilated filter spans, a spatial dimension."""
        return tuple(d * (r - 1) + 1 for r, d in zip(self.filter_size, self.dilation, strict=True))

    @property
    def group_channels(self) -> Size:
        """Input channels that one filter reads, ``C / groups``."""
        return self.channels if self.groups == 1 else self.channels // self.groups

    @property
    def group_filters(self) -> Size:
        """Output channels of a group, ``K / groups``."""
        return self.filters if self.groups == 1 else self.filters // self.groups

    @property
    def is_depthwise(self) -> bool:
        """Whether each output channel reads its own input channel and no other."""
        return self.group_channels == 1 and self.group_filters == 1

    @property
    def is_pointwise(self) -> bool:
        """Whether output pixel ``m`` reads input pixel ``m`` and no other."""
        return (
            self.taps == 1
            and set(self.stride) == {1}
            and set(self.pad_before) == {0}
            and set(self.pad_after) == {0}
        )

    @property
    def is_static(self) -> bool:
        """Whether every size is known."""
        sizes = (self.batch, *self.input_size, self.channels, self.filters)
        return all(isinstance(size, int) for size in sizes)

    @property
    def upsamples(self) -> bool:
        """Whether the input is enlarged."""
        return set(self.upsample) != {1}

    @property
    def subpixel_axes(self) -> tuple[SubpixelAxis, ...]:
        """The sub-pixel form along each spatial dimension."""
        return tuple(
            SubpixelAxis.of(
                factor=self.upsample[i],
                taps=self.filter_size[i],
                dilation=self.dilation[i],
                pad_before=self.pad_before[i],
                pad_after=self.pad_after[i],
            )
            for i in range(self.spatial_rank)
        )

    @property
    def subpixel(self) -> ConvProblem:
        """The convolution that kernels run: of the input as it is, itself unless ``upsamples``."""
        if not self.upsamples:
            return self
        axes, ones = self.subpixel_axes, (1,) * self.spatial_rank
        return replace(
            self,
            filters=self.filters * math.prod(self.upsample),
            filter_size=tuple(axis.taps for axis in axes),
            dilation=ones,
            pad_before=tuple(axis.pad_before for axis in axes),
            pad_after=tuple(axis.pad_after for axis in axes),
            upsample=ones,
        )

    @property
    def output_size(self) -> tuple[Size, ...]:
        """The output's spatial sizes; static where the input's are."""
        return tuple(
            output_size(
                self.input_size[i] * self.upsample[i],
                taps=self.filter_size[i],
                stride=self.stride[i],
                dilation=self.dilation[i],
                pad_before=self.pad_before[i],
                pad_after=self.pad_after[i],
            )
            for i in range(self.spatial_rank)
        )

    @property
    def input_shape(self) -> tuple[Size, ...]:
        """``(N, *spatial, C)``."""
        return (self.batch, *self.input_size, self.channels)

    @property
    def output_shape(self) -> tuple[Size, ...]:
        """``(N, *spatial, K)``."""
        return (self.batch, *self.output_size, self.filters)

    def filter_shape(self, layout: str) -> tuple[Size, ...]:
        """Returns the filter's shape in one of ``LAYOUTS[spatial_rank]``."""
        own, default, _ = LAYOUTS[self.spatial_rank]
        if check_filter_layout(layout, self.spatial_rank) == own:
            return (self.filters, *self.filter_size, self.group_channels)
        if layout == default:
            return (*self.filter_size, self.group_channels, self.filters)
        return (self.filters, self.group_channels, *self.filter_size)

    @property
    def gemm(self) -> GemmShape:
        """The matrix product that this convolution is.

        Raises:
            ValueError: A size is symbolic.
        """
        self._need_static("gemm")
        pixels = math.prod(cast("tuple[int, ...]", self.output_size))
        return GemmShape(
            m=cast(int, self.batch) * pixels,
            n=cast(int, self.group_filters),
            k=self.taps * cast(int, self.group_channels),
            groups=self.groups,
        )

    @property
    def flops(self) -> int:
        """Floating-point operations: a multiply-add is two, taps that read padding count.

        Raises:
            ValueError: A size is symbolic.
        """
        gemm = self.gemm
        return 2 * gemm.m * gemm.n * gemm.k * gemm.groups

    def nbytes(self, dtype: str = "float32", out_dtype: str | None = None) -> int:
        """Returns the bytes that must move at least once: activation, filter and output.

        Args:
            dtype: Storage type of activation and filter, a key of ``INPUT_BYTES``.
            out_dtype: Storage type of the output, a key of ``OUTPUT_BYTES``; by default ``dtype``.

        Raises:
            ValueError: A size is symbolic, or a type is not such a key.
        """
        self._need_static("nbytes")
        read = math.prod(cast("tuple[int, ...]", self.input_shape))
        read += cast(int, self.filters) * self.gemm.k
        written = math.prod(cast("tuple[int, ...]", self.output_shape))
        of_input = INPUT_BYTES[check_dtype("dtype", dtype, INPUT_BYTES)]
        of_output = OUTPUT_BYTES[check_dtype("out_dtype", out_dtype or dtype, OUTPUT_BYTES)]
        return read * of_input + written * of_output

    def geometry(
        self,
        *,
        filter_layout: Layout = Layout.PACKED,
        kernel: Kernel = Kernel.AUTO,
        activation: Activation = Activation.NONE,
        final_activation: Activation = Activation.NONE,
        has_bias: bool = False,
        has_residual: bool = False,
        precision: Precision = Precision.TF32,
        zero_points: tuple[int, int, int] = (0, 0, 0),
        batch_last: tuple[bool, bool] = (False, False),
    ) -> npt.NDArray[np.int64]:
        """Returns the ``geometry`` operand of the op for this problem."""
        run, axes = self.subpixel, self.subpixel_axes if self.upsamples else ()
        return encode_geometry(
            stride=run.stride,
            dilation=run.dilation,
            pad_before=run.pad_before,
            pad_after=run.pad_after,
            filter_size=run.filter_size,
            groups=run.groups,
            filter_layout=filter_layout,
            kernel=kernel,
            activation=activation,
            final_activation=final_activation,
            has_bias=has_bias,
            has_residual=has_residual,
            precision=precision,
            block=[axis.block for axis in axes] or None,
            crop=[axis.crop for axis in axes] or None,
            zero_points=zero_points,
            batch_last=batch_last,
        )

    def numbers(self) -> list[int]:
        """Returns the problem as ``ConvProblem.of_numbers`` of the operations reads it.

        Batch, channels, filters and groups; three values each (depth, height, width) of input,
        filter, stride, dilation, padding before and padding after.

        Raises:
            ValueError: A size is symbolic.
        """
        self._need_static("numbers")
        missing = 3 - self.spatial_rank
        numbers = [self.batch, self.channels, self.filters, self.groups]
        for values, fill in (
            (self.input_size, 1),
            (self.filter_size, 1),
            (self.stride, 1),
            (self.dilation, 1),
            (self.pad_before, 0),
            (self.pad_after, 0),
        ):
            numbers += [*[fill] * missing, *values]
        return [int(number) for number in numbers]

    def _need_static(self, what: str) -> None:
        if not self.is_static:
            raise ValueError(
                f"{what}: the problem's shape {show(self.input_shape)} is symbolic; static sizes "
                "are needed"
            )

    def __str__(self) -> str:
        """One line for logs and tables."""
        size = "x".join(str(s) for s in (self.batch, *self.input_size, self.channels))
        taps = "x".join(map(str, self.filter_size))
        parts = [f"{size} -> {self.filters}", taps]
        if set(self.stride) != {1}:
            parts.append("s" + "x".join(map(str, self.stride)))
        pads = [
            str(b) if b == a else f"{b}:{a}"
            for b, a in zip(self.pad_before, self.pad_after, strict=True)
        ]
        if set(pads) != {"0"}:
            parts.append("p" + "x".join(pads))
        if set(self.dilation) != {1}:
            parts.append("d" + "x".join(map(str, self.dilation)))
        if self.groups != 1:
            parts.append(f"g{self.groups}")
        if self.upsamples:
            parts.append("u" + "x".join(map(str, self.upsample)))
        return " ".join(parts)


def encode(
    problem: ConvProblem,
    arguments: ConvArguments,
    *,
    filter_layout: Layout,
    has_bias: bool,
    has_residual: bool,
    kernel: Kernel = Kernel.AUTO,
    precision: Precision | None = None,
    batch_last: tuple[bool, bool] = (False, False),
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Returns the op's operands ``geometry`` and ``scalars``.

    Args:
        problem: The convolution.
        arguments: Those that it was built from: the epilogue's are read.
        filter_layout: The order of the filter's elements.
        has_bias: Whether there is one.
        has_residual: Whether there is one.
        kernel: What must run.
        precision: What the arguments' ``None`` stands for.
        batch_last: Whether activation and output are C/xHWNx.
    """
    activation, final = arguments.activation, arguments.final_activation
    given = arguments.precision if precision is None else precision
    assert given is not None, "only a caller knows what the precision stands for"
    geometry = problem.geometry(
        filter_layout=filter_layout,
        kernel=kernel,
        activation=activation.kind,
        final_activation=final.kind,
        has_bias=has_bias,
        has_residual=has_residual,
        precision=given,
        zero_points=(
            arguments.zero_point,
            arguments.residual_zero_point if has_residual else 0,
            arguments.out_zero_point,
        ),
        batch_last=batch_last,
    )
    scalars = encode_scalars(
        beta=arguments.beta if has_residual else 1.0,
        activation_parameters=activation.parameters,
        final_parameters=final.parameters,
        output_factor=arguments.output_factor,
    )
    return geometry, scalars
