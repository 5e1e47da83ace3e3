"""The arguments of a convolution other than its tensors, read and checked where a call comes in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakValueDictionary

from ._checks import (
    Padding,
    check_at_least,
    check_dtype,
    check_integer,
    check_number,
    check_precision,
    check_scale,
    check_upsample,
    read_padding,
    show,
    spatial_tuple,
)
from ._dtypes import DTYPE_BYTES, INTEGERS, OUTPUT_BYTES
from ._fields import (
    CPU_KERNELS,
    GPU_KERNELS,
    INTERLEAVED_CPU_KERNELS,
    INTERLEAVED_KERNELS,
    INTERLEAVED_LAYOUT,
    Activation,
    Kernel,
    Precision,
)
from .activations import ActivationSpec, parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from max.graph import DeviceRef

__all__ = ["ConvArguments", "Flat", "read_upsample"]

#: Arguments as integers, floats and names, for boundaries that take nothing else: stride, padding
#: (empty for ``"same"``), dilation, groups, the codes of both activations, ``SCALARS``, the code of
#: the precision, the output's type, the factors of the enlargement (empty for none), the zero
#: points of input, residual and output, and the output's scale.
Flat: TypeAlias = tuple[
    tuple[int, ...],
    tuple[int, ...],
    tuple[int, ...],
    int,
    tuple[int, int],
    tuple[float, ...],
    int | None,
    str | None,
    tuple[int, ...],
    tuple[int, ...],
    float | None,
]


def read_upsample(upsample: object, rank: int) -> tuple[int, ...] | None:
    """Returns the factors of an enlargement, one a spatial dimension; ``None`` if all are 1.

    Raises:
        TypeError: It is neither an integer nor a sequence of integers.
        ValueError: The sequence has another length than ``rank``.
    """
    factors = spatial_tuple("upsample", upsample, rank)
    return None if all(factor == 1 for factor in factors) else factors


@dataclass(frozen=True)
class ConvArguments:
    """What a caller says of a convolution besides its tensors.

    Every way in makes one of these, once: ``read`` from the arguments of a graph function or of a
    module, ``maxconv.torch`` from PyTorch's. Whoever is handed one need not check its values again.
    What also depends on a filter, a type or a device stands open until it is there: ``pads``,
    ``output_dtype`` and ``kernel``.

    Raises:
        ValueError: A stride, a dilation, a factor or ``groups`` is below 1, a padding below 0, or
            ``"same"`` or a factor above 1 is combined with a stride above 1.
    """

    stride: tuple[int, ...]
    """One a spatial dimension, outermost first."""
    dilation: tuple[int, ...]
    """One a spatial dimension."""
    padding: tuple[int, ...] | None
    """Zeros around the input: one number a spatial dimension for both of its sides, or ``(before,
    after)`` of each; ``None`` is ``"same"``: an output of the input's size."""
    groups: int
    # Without defaults: torch.compile traces constructors, and PyTorch up to 2.11 only with defaults
    # of Python's own types.
    activation: ActivationSpec
    final_activation: ActivationSpec
    beta: float = 1.0
    precision: Precision | None = Precision.TF32
    """Of products of float32; ``None`` is what PyTorch's settings say in a call."""
    out_dtype: str | None = None
    """A key of ``OUTPUT_BYTES``, or ``None`` for the input's type."""
    config: object = None
    """The kernel that must run, as the caller wrote it; ``kernel`` reads it."""
    upsample: tuple[int, ...] | None = None
    """How often each input element is repeated before it is convolved, a spatial dimension;
    ``None`` is once."""
    zero_point: int = 0
    """The integer that stands for 0 in the input."""
    residual_zero_point: int = 0
    """The same in the residual."""
    out_zero_point: int = 0
    """The same in the output."""
    out_scale: float | None = None
    """What a step of an output of integers stands for; ``None`` for floats."""
    _flat: Flat | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks the values."""
        check_at_least("stride", self.stride, 1)
        check_at_least("dilation", self.dilation, 1)
        check_at_least("groups", self.groups, 1)
        if self.upsample is not None:
            check_upsample(self.upsample, self.stride)
        if self.padding is not None:
            check_at_least("padding", self.padding, 0)
        elif any(stride != 1 for stride in self.stride):
            raise ValueError(
                f"padding: 'same' with stride {show(self.stride)} is undefined; stride 1 is allowed"
            )
        if self.out_scale is not None:
            check_scale("out_scale", self.out_scale)

    @classmethod
    def read(
        cls,
        rank: int,
        *,
        stride: object = 1,
        dilation: object = 1,
        padding: Padding = 0,
        groups: object = 1,
        activation: object = None,
        final_activation: object = None,
        beta: object = 1.0,
        precision: object = "tf32",
        out_dtype: object = None,
        config: object = None,
        upsample: object = 1,
        zero_point: object = 0,
        residual_zero_point: object = 0,
        out_scale: object = None,
        out_zero_point: object = 0,
    ) -> ConvArguments:
        """Reads arguments in the forms that the graph functions take; ``conv2d`` documents them.

        Args:
            rank: Spatial dimensions: 1, 2 or 3.
            stride: One integer, or one a spatial dimension.
            dilation: One integer, or one a spatial dimension.
            padding: What ``read_padding`` takes.
            groups: An integer.
            activation: An ``ActivationLike``.
            final_activation: An ``ActivationLike``.
            beta: A number.
            precision: The name of a ``Precision``.
            out_dtype: A ``DType`` or its name; ``None`` for the input's.
            config: The name of a kernel, or ``None``.
            upsample: One integer, or one a spatial dimension.
            zero_point: An integer.
            residual_zero_point: An integer.
            out_scale: A number, or ``None``.
            out_zero_point: An integer.

        Raises:
            TypeError: An argument is of a wrong Python type.
            ValueError: An argument has a value that is not allowed.
        """
        return cls(
            stride=spatial_tuple("stride", stride, rank),
            dilation=spatial_tuple("dilation", dilation, rank),
            padding=read_padding(padding, rank),
            groups=check_integer("groups", groups),
            activation=parse("activation", activation),
            final_activation=parse("final_activation", final_activation),
            beta=check_number("beta", beta),
            precision=check_precision(precision),
            out_dtype=None
            if out_dtype is None
            else check_dtype("out_dtype", out_dtype, OUTPUT_BYTES),
            config=config,
            upsample=read_upsample(upsample, rank),
            zero_point=check_integer("zero_point", zero_point),
            residual_zero_point=check_integer("residual_zero_point", residual_zero_point),
            out_scale=None if out_scale is None else check_number("out_scale", out_scale),
            out_zero_point=check_integer("out_zero_point", out_zero_point),
        )

    @classmethod
    def of_flat(cls, flat: Flat) -> ConvArguments:
        """Returns the arguments of a flat form.

        Where somebody holds arguments of that form that are ``remembered``, it returns these: they
        were checked. Others are checked now.

        Raises:
            ValueError: A value is not allowed.
        """
        known = _flattened.get(flat)
        if known is not None:
            return known
        stride, padding, dilation, groups, (first, last), scalars, precision, out_dtype = flat[:8]
        upsample, zero_points, out_scale = flat[8:]
        beta, *parameters = scalars
        own, of_residual, of_output = zero_points
        return cls(
            stride=stride,
            dilation=dilation,
            padding=padding or None,
            groups=groups,
            activation=ActivationSpec(Activation(first), *parameters[:2]),
            final_activation=ActivationSpec(Activation(last), *parameters[2:]),
            beta=beta,
            precision=None if precision is None else Precision(precision),
            out_dtype=out_dtype,
            upsample=upsample or None,
            zero_point=own,
            residual_zero_point=of_residual,
            out_zero_point=of_output,
            out_scale=out_scale,
        )

    def flatten(self) -> Flat:
        """Returns the arguments in the form that boundaries take; ``config`` is none of them."""
        return self._flat or (
            self.stride,
            self.padding or (),
            self.dilation,
            self.groups,
            (int(self.activation.kind), int(self.final_activation.kind)),
            (self.beta, *self.activation.parameters, *self.final_activation.parameters),
            None if self.precision is None else int(self.precision),
            self.out_dtype,
            self.upsample or (),
            (self.zero_point, self.residual_zero_point, self.out_zero_point),
            self.out_scale,
        )

    def remembered(self) -> ConvArguments:
        """Returns these arguments, and lets ``of_flat`` find them by their flat form."""
        flat = self.flatten()
        object.__setattr__(self, "_flat", flat)
        _flattened[flat] = self
        return self

    @property
    def rank(self) -> int:
        """Spatial dimensions: 1, 2 or 3."""
        return len(self.stride)

    def pads(self, filter_size: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the zeros before and after each spatial dimension.

        ``"same"`` puts an odd zero after, as PyTorch does.

        Args:
            filter_size: Taps a spatial dimension.
        """
        if self.padding is None:
            total = [d * (r - 1) for r, d in zip(filter_size, self.dilation, strict=True)]
            before = tuple(zeros // 2 for zeros in total)
            return before, tuple(t - b for t, b in zip(total, before, strict=True))
        if len(self.padding) == self.rank:
            return self.padding, self.padding
        return self.padding[0::2], self.padding[1::2]

    def output_dtype(self, dtype: str) -> str:
        """Returns the output's type for an input of ``dtype``.

        Raises:
            ValueError: It is the input's, and no output has that.
        """
        if self.out_dtype is not None:
            return self.out_dtype
        if dtype not in DTYPE_BYTES:
            raise ValueError(
                f"out_dtype: None stands for the input's {dtype}, which is no type of outputs; "
                f"{', '.join(DTYPE_BYTES)} are allowed"
            )
        return dtype

    @property
    def output_factor(self) -> float:
        """Steps of the output in 1."""
        return 1.0 if self.out_scale is None else 1 / self.out_scale

    def refuse_integers(self) -> None:
        """Refuses what the GPUs' libraries, which PyTorch's functions call, do not take.

        Raises:
            ValueError: The output is of integers, or the input has a zero point.
        """
        if self.out_dtype in INTEGERS:
            raise ValueError(
                f"out_dtype: {self.out_dtype} is not supported by PyTorch's functions on a GPU; "
                f"{', '.join(DTYPE_BYTES)} are allowed"
            )
        if self.zero_point:
            raise ValueError(
                f"zero_point: {self.zero_point} is not supported by PyTorch's functions on a GPU; "
                "0 is allowed"
            )

    def check_types(self, dtype: str) -> None:
        """Checks what goes with the types of input and output.

        Args:
            dtype: Of the input.

        Raises:
            ValueError: A type has no such zero point, or integers have no scale or floats have one.
        """
        out_dtype = self.out_dtype or dtype
        if out_dtype in INTEGERS:
            if self.out_scale is None:
                raise ValueError(
                    f"out_scale: None beside out_dtype={out_dtype}; a positive number is needed"
                )
        elif self.out_scale is not None:
            raise ValueError(
                f"out_scale: {self.out_scale} beside an output of {out_dtype}; None is allowed"
            )
        for name, value, of in (
            ("zero_point", self.zero_point, dtype),
            ("residual_zero_point", self.residual_zero_point, out_dtype),
            ("out_zero_point", self.out_zero_point, out_dtype),
        ):
            least, largest = INTEGERS.get(of, (0, 0))
            if not least <= value <= largest:
                raise ValueError(
                    f"{name}: {value} is not allowed beside {of}; {least} to {largest} are"
                )

    def kernel(self, device: DeviceRef, *, interleaved: bool = False) -> Kernel:
        """Reads ``config`` for an input on ``device``.

        Args:
            device: Where.
            interleaved: Whether input or output are.

        Raises:
            TypeError: It is no name.
            ValueError: It is not the name of a kernel that exists there.
        """
        if self.config is None:
            return Kernel.AUTO
        everything = GPU_KERNELS if device.is_gpu() else CPU_KERNELS
        known = tuple(kernel for kernel in everything if kernel not in INTERLEAVED_KERNELS)
        whose = ""
        if interleaved:
            known, whose = INTERLEAVED_CPU_KERNELS, " for interleaved layouts"
            if device.is_gpu():
                known, whose = INTERLEAVED_KERNELS, f" for {INTERLEAVED_LAYOUT}"
        kernels = {kernel.name.lower(): kernel for kernel in (Kernel.AUTO, *known)}
        names = ", ".join(kernels)
        if not isinstance(self.config, str):
            raise TypeError(
                f"config: {self.config!r} is a {type(self.config).__name__}; None or one of "
                f"{names} is allowed"
            )
        if self.config.lower() not in kernels:
            raise ValueError(
                f"config: {self.config!r} is not a kernel of device {device}{whose}; {names} are "
                "allowed"
            )
        return kernels[self.config.lower()]


#: Arguments that are remembered, by their flat form, as long as somebody holds them.
_flattened: WeakValueDictionary[Flat, ConvArguments] = WeakValueDictionary()
