"""Heron's operators as convolutions: what is tuned, and how operands and results are arranged.

Heron (ASPLOS 2023) generates nine operators: convolutions of one, two and three dimensions, dilated
and transposed ones, products of matrices, of batches of them and with vectors, and prefix sums.
Each is a convolution, or a few, that the kernels run. ``heron.yaml`` has the shapes.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from .._arguments import ConvArguments
from .._checks import spatial_tuple
from .._phases import AxisPhase, AxisSplit, split_axes
from .._problem import ConvProblem
from .._problems import NamedProblem

__all__ = [
    "OPERATORS",
    "PRODUCTS",
    "BatchedProduct",
    "Convolution",
    "MatrixProduct",
    "Operator",
    "PrefixSum",
    "TransposedConvolution",
    "VectorProduct",
    "load_operators",
    "operator_problems",
]

#: The file with the shapes.
SHAPES = Path(__file__).parent / "heron.yaml"

Array = npt.NDArray[Any]


class Operator(ABC):
    """An operator of fixed sizes, as convolutions."""

    @property
    @abstractmethod
    def convolutions(self) -> tuple[ConvProblem, ...]:
        """What kernels run."""

    @abstractmethod
    def operands(self, first: Array, second: Array) -> tuple[tuple[Array, Array], ...]:
        """Returns activation ``[N, *spatial, C]`` and filters ``[K, *taps, C / groups]`` of each.

        Args:
            first: The operator's operand, as its class says; so is ``second``.
            second: See there.
        """

    @abstractmethod
    def result(self, outputs: Sequence[Array], first: Array) -> Array:
        """Returns what the operator computes.

        Args:
            outputs: Of the convolutions, ``[N, *spatial, K]``.
            first: The operator's operand.
        """


@dataclass(frozen=True)
class Convolution(Operator):
    """``c1d``, ``c2d``, ``c3d`` and ``dil``, of ``[N, *spatial, C]`` and ``[K, *taps, C]``."""

    input: Sequence[int]
    filters: int
    filter: Sequence[int]
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def convolutions(self) -> tuple[ConvProblem, ...]:
        """See ``Operator``."""
        return (
            ConvProblem.from_parts(
                self.input,
                filters=self.filters,
                filter_size=tuple(self.filter),
                group_channels=self.input[-1],
                stride=self.stride,
                dilation=self.dilation,
                padding=self.padding,
            ),
        )

    def operands(self, first: Array, second: Array) -> tuple[tuple[Array, Array], ...]:
        """See ``Operator``."""
        return ((first, second),)

    def result(self, outputs: Sequence[Array], first: Array) -> Array:
        """See ``Operator``."""
        return outputs[0]


@dataclass(frozen=True)
class TransposedConvolution(Operator):
    """``t2d``, of ``[N, H, W, C]`` and PyTorch's filters ``[C, K, R, S]``.

    One convolution of stride 1 for each phase of the output that a tap contributes to; one for all
    of them, side by side in the channels, where their geometries are equal. PyTorch's calls run it
    so.
    """

    input: Sequence[int]
    filters: int
    filter: Sequence[int]
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] = 0
    dilation: int | tuple[int, ...] = 1
    output_padding: int | tuple[int, ...] = 0

    @functools.cached_property
    def _axes(self) -> tuple[AxisSplit, ...]:
        rank = len(self.filter)
        arguments = ConvArguments.read(
            rank, stride=self.stride, dilation=self.dilation, padding=self.padding
        )
        more = spatial_tuple("output_padding", self.output_padding, rank)
        return split_axes(self.filter, arguments, more)

    @property
    def _phases(self) -> list[tuple[AxisPhase, ...]]:
        """Of the output, row by row."""
        return list(itertools.product(*(axis.phases for axis in self._axes)))

    @property
    def _parts(self) -> list[list[int]]:
        """The phases that each convolution computes."""
        every = [all(axis.taps for axis in phase) for phase in self._phases]
        alike = {
            tuple((len(a.taps), a.dilation, a.pad_before, a.pad_after) for a in phase)
            for phase in self._phases
        }
        if all(every) and len(alike) == 1:
            return [list(range(len(every)))]
        return [[place] for place, any_taps in enumerate(every) if any_taps]

    @property
    def convolutions(self) -> tuple[ConvProblem, ...]:
        """See ``Operator``."""
        found = []
        for part in self._parts:
            axes = self._phases[part[0]]
            found.append(
                ConvProblem.from_parts(
                    self.input,
                    filters=self.filters * len(part),
                    filter_size=tuple(len(axis.taps) for axis in axes),
                    group_channels=self.input[-1],
                    dilation=tuple(axis.dilation for axis in axes),
                    padding=tuple(
                        max(pad, 0) for axis in axes for pad in (axis.pad_before, axis.pad_after)
                    ),
                )
            )
        return tuple(found)

    def operands(self, first: Array, second: Array) -> tuple[tuple[Array, Array], ...]:
        """See ``Operator``."""
        found = []
        for part in self._parts:
            pieces = []
            for place in part:
                piece = second
                for axis, entry in enumerate(self._phases[place], start=2):
                    piece = np.take(piece, entry.taps, axis)
                pieces.append(np.moveaxis(piece, 0, -1))
            found.append((first, np.concatenate(pieces)))
        return tuple(found)

    def result(self, outputs: Sequence[Array], first: Array) -> Array:
        """See ``Operator``; phases without a tap are zeros."""
        sizes = [
            size + axis.growth for size, axis in zip(first.shape[1:-1], self._axes, strict=True)
        ]
        strides = [len(axis.phases) for axis in self._axes]
        extents = [size * step for size, step in zip(sizes, strides, strict=True)]
        whole = np.zeros((first.shape[0], *extents, self.filters), first.dtype)
        for part, output in zip(self._parts, outputs, strict=True):
            for number, place in enumerate(part):
                # A padding that would be negative is cut off the convolution's output instead.
                cut = (max(-axis.pad_before, 0) for axis in self._phases[place])
                own = (slice(c, c + size) for c, size in zip(cut, sizes, strict=True))
                channels = slice(number * self.filters, (number + 1) * self.filters)
                taken = (slice(None), *own, channels)
                offsets = map(int, np.unravel_index(place, strides))
                at = (slice(o, None, s) for o, s in zip(offsets, strides, strict=True))
                put = (slice(None), *at)
                whole[put] = output[taken]
        ends = (extent - axis.surplus for extent, axis in zip(extents, self._axes, strict=True))
        kept = (slice(None), *(slice(0, end) for end in ends))
        return np.ascontiguousarray(whole[kept])


def _pointwise(pixels: int, channels: int, filters: int, groups: int = 1) -> ConvProblem:
    """Returns the convolution of a line of pixels with filters of one tap."""
    return ConvProblem.from_parts(
        (1, pixels, channels),
        filters=filters,
        filter_size=(1,),
        group_channels=channels // groups,
        groups=groups,
    )


@dataclass(frozen=True)
class MatrixProduct(Operator):
    """``gemm``: ``A B^T`` of ``A [M, K]`` and ``B [N, K]``, a pointwise convolution of M pixels."""

    m: int
    k: int
    n: int

    @property
    def convolutions(self) -> tuple[ConvProblem, ...]:
        """See ``Operator``."""
        return (_pointwise(self.m, self.k, self.n),)

    def operands(self, first: Array, second: Array) -> tuple[tuple[Array, Array], ...]:
        """See ``Operator``; both are read in place."""
        return ((first[None], second[:, None]),)

    def result(self, outputs: Sequence[Array], first: Array) -> Array:
        """See ``Operator``."""
        return np.asarray(outputs[0][0])


@dataclass(frozen=True)
class VectorProduct(Operator):
    """``gemv``: ``A v`` of ``v [K]`` and ``A [M, K]``: one pixel, and the rows as filters."""

    m: int
    k: int

    @property
    def convolutions(self) -> tuple[ConvProblem, ...]:
        """See ``Operator``."""
        return (_pointwise(1, self.k, self.m),)

    def operands(self, first: Array, second: Array) -> tuple[tuple[Array, Array], ...]:
        """See ``Operator``; both are read in place."""
        return ((first[None, None], second[:, None]),)

    def result(self, outputs: Sequence[Array], first: Array) -> Array:
        """See ``Operator``."""
        return np.asarray(outputs[0][0, 0])


@dataclass(frozen=True)
class BatchedProduct(Operator):
    """``bmm``: ``A_b B_b^T`` of ``A [batch, M, K]`` and ``B [batch, N, K]``.

    A grouped pointwise convolution of M pixels: a matrix of the batch is a group of channels. The
    filters are B as it is; the activation is A with the batch behind the rows, ``[M, batch, K]``,
    which is how attention has it before its heads are split, and the result comes so too.
    """

    batch: int
    m: int
    k: int
    n: int

    @property
    def convolutions(self) -> tuple[ConvProblem, ...]:
        """See ``Operator``."""
        channels, filters = self.batch * self.k, self.batch * self.n
        return (_pointwise(self.m, channels, filters, self.batch),)

    def operands(self, first: Array, second: Array) -> tuple[tuple[Array, Array], ...]:
        """See ``Operator``."""
        activation = np.ascontiguousarray(first.transpose(1, 0, 2)).reshape(1, self.m, -1)
        return ((activation, second.reshape(-1, 1, self.k)),)

    def result(self, outputs: Sequence[Array], first: Array) -> Array:
        """See ``Operator``."""
        split = outputs[0].reshape(self.m, self.batch, self.n)
        return np.ascontiguousarray(split.transpose(1, 0, 2))


@dataclass(frozen=True)
class PrefixSum(Operator):
    """``scan``: sums of what stands before each place of a row, ``y[r, i] = sum(x[r, :i])``.

    A product with a triangle of ones, which is the second operand: ``[outputs, inputs]``, with ones
    where the input stands before the output. In blocks, each block of a row is a pixel, and the
    filters are the triangle of one block. Added across blocks is then what stands in all earlier
    ones: the prefix sums of the blocks' totals, one number a block, which ``result`` adds.

    Raises:
        ValueError: Blocks do not divide the inputs, or there are not as many outputs as inputs.
    """

    rows: int
    inputs: int
    outputs: int
    block: int | None = None
    """Elements; None takes a row whole, as Heron's release does."""

    def __post_init__(self) -> None:
        if self.block is not None and (self.inputs % self.block or self.outputs != self.inputs):
            raise ValueError(
                f"scan: blocks of {self.block} do not divide {self.inputs} inputs for "
                f"{self.outputs} outputs; a divisor and equal numbers are needed"
            )

    @property
    def triangle(self) -> Array:
        """The second operand, ``[outputs, inputs]``; in blocks, of one block."""
        outputs, inputs = (self.outputs, self.inputs) if self.block is None else (self.block,) * 2
        return np.tri(outputs, inputs, -1, dtype=np.float32)

    @property
    def convolutions(self) -> tuple[ConvProblem, ...]:
        """See ``Operator``."""
        outputs, inputs = self.triangle.shape
        return (_pointwise(self.rows * (self.inputs // inputs), inputs, outputs),)

    def operands(self, first: Array, second: Array) -> tuple[tuple[Array, Array], ...]:
        """See ``Operator``; ``second`` is ``triangle``."""
        return ((first.reshape(1, -1, second.shape[1]), second[:, None]),)

    def result(self, outputs: Sequence[Array], first: Array) -> Array:
        """See ``Operator``."""
        if self.block is None:
            return np.asarray(outputs[0][0])
        local = outputs[0].reshape(self.rows, -1, self.block)
        totals = first.reshape(local.shape).sum(2)
        before = np.cumsum(totals, 1) - totals
        whole: Array = (local + before[:, :, None]).reshape(self.rows, self.outputs)
        return whole


#: The operators by Heron's names.
OPERATORS: Mapping[str, type[Operator]] = {
    "c1d": Convolution,
    "c2d": Convolution,
    "c3d": Convolution,
    "dil": Convolution,
    "t2d": TransposedConvolution,
    "gemm": MatrixProduct,
    "gemv": VectorProduct,
    "bmm": BatchedProduct,
    "scan": PrefixSum,
}


#: Those that are one product of matrices, of a matrix and a vector, or of a batch of matrices.
PRODUCTS = ("gemm", "gemv", "bmm")


@functools.cache
def load_operators() -> Mapping[str, Mapping[str, Operator]]:
    """Returns the operators of ``heron.yaml``: by Heron's name, those of each shape by its name."""
    document = yaml.safe_load(SHAPES.read_text(encoding="utf-8"))
    return MappingProxyType(
        {
            name: {shape: OPERATORS[name](**fields) for shape, fields in shapes.items()}
            for name, shapes in document.items()
        }
    )


def operator_problems(operators: Sequence[str] = ()) -> list[NamedProblem]:
    """Returns the convolutions that operators are.

    Args:
        operators: Heron's names; all, if empty.

    Returns:
        Named ``heron.OPERATOR.SHAPE``, and where that takes several with their numbers behind it;
        an operator is a family.

    Raises:
        ValueError: A name is none of an operator.
    """
    loaded = load_operators()
    for name in operators:
        if name not in loaded:
            raise ValueError(f"operator: {name!r} is no operator; {', '.join(loaded)} are allowed")
    found = []
    for name in operators or loaded:
        for shape, operator in loaded[name].items():
            parts = operator.convolutions
            for number, problem in enumerate(parts):
                behind = f".{number}" if len(parts) > 1 else ""
                found.append(NamedProblem(f"heron.{name}.{shape}{behind}", problem, name))
    return found
