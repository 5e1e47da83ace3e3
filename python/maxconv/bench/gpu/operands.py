"""A problem's operands on a GPU: the first set has the numbers that ``kernels.mojo`` makes."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from maxconv._dtypes import INPUT_BYTES, INT8
from maxconv._problem import ConvProblem
from maxconv._problems import NamedProblem

from ..device import is_narrow, launches, out_type
from ..entrant import BARE, FUSED, WORKS
from .clock import Clock, input_sets

__all__ = [
    "SEEDS",
    "Exponents",
    "Operands",
    "command",
    "exponents",
    "filled",
    "geometry",
    "set_count",
    "valued",
]

#: Seeds that a set of operands takes: those of set ``i`` begin at ``i * SEEDS``.
SEEDS = 4

_WORD = 0xFFFFFFFF

#: Elements by which a further set is rotated against the one before.
_ROTATION = 7919

#: Values are integers from -510 to 510 times this, or for filters times less.
_EXPONENT = -7


def _hash(index: Tensor, seed: int) -> Tensor:
    """Mixes the bits of indices below 2^32 (the finalizer of MurmurHash3)."""
    h = index ^ (seed * 0x9E3779B9 & _WORD)
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def valued(index: Tensor, seed: int, *, exponent: int = _EXPONENT, dtype: str) -> Tensor:
    """Returns the values at some places of an operand, around 0.

    They have about the spread of a normal distribution: the sum of the four bytes of a hash, less
    its mean, times ``2 ** exponent``. That is exact in float32, and then rounded once, so that
    every program makes the same values. Of int8 they are the floor of a quarter of the sum.
    """
    h = _hash(index, seed)
    total = (h & 255) + (h >> 8 & 255) + (h >> 16 & 255) + (h >> 24) - 510
    if dtype == INT8:
        return (total >> 2).to(torch.int8)
    return (total.to(torch.float32) * 2.0**exponent).to(getattr(torch, dtype))


def filled(count: int, seed: int, *, exponent: int = _EXPONENT, dtype: str, device: str) -> Tensor:
    """Returns the values of an operand: see ``valued``."""
    return valued(torch.arange(count, device=device), seed, exponent=exponent, dtype=dtype)


@dataclass(frozen=True)
class Exponents:
    """Powers of two with which outputs are about 1."""

    activation: int
    """Of a unit of the activation, and of bias and residual."""
    filter: int
    """Of a unit of the filter."""
    scale: int
    """Of the first filter's scale, where there is one; the next two have its half, its quarter."""


def exponents(named: NamedProblem, dtype: str) -> Exponents:
    """Returns a problem's exponents.

    A filter of more than 8 bits is small itself; those of 8 bits keep their range, and the scale is
    small. Units of int8 are 1, and its values have a variance of 2^5.2 squared.
    """
    products = math.prod(named.problem.filter_size) * int(named.problem.group_channels)
    smaller = -round(math.log2(products) / 2)
    if dtype == INT8:
        return Exponents(_EXPONENT, 0, smaller - 10)
    if is_narrow(dtype):
        return Exponents(_EXPONENT, _EXPONENT, smaller)
    return Exponents(_EXPONENT, _EXPONENT + smaller, 0)


def command(named: NamedProblem, dtype: str) -> str:
    """Returns the line by which ``kernels.mojo`` makes the same operands.

    The numbers of the problem, the sets, the exponents; that of the scale where there is one.
    """
    made = exponents(named, dtype)
    numbers = [*geometry(named.problem), set_count(named, dtype), made.activation, made.filter]
    numbers += [made.scale] * is_narrow(dtype)
    return " ".join(("problem", *map(str, numbers)))


def geometry(problem: ConvProblem) -> list[int]:
    """Returns a problem as ``ConvProblem.of_numbers`` of the operations reads it.

    Batch, channels, filters and groups; three values each (depth, height, width) of input, filter,
    stride, dilation, padding before and padding after.
    """
    return problem.numbers()


def set_count(named: NamedProblem, dtype: str) -> int:
    """Returns how many sets of a problem's operands exceed the L2 cache together."""
    problem = named.problem
    read = math.prod(map(int, problem.input_shape)) * INPUT_BYTES[dtype]
    stored = math.prod(map(int, problem.output_shape)) * INPUT_BYTES[out_type(dtype)]
    return input_sets(read + 2 * stored)


@dataclass
class Operands:
    """As many sets of a problem's operands as exceed the L2 cache together.

    Tensors have torch's order of dimensions, and channels innermost in memory.
    """

    named: NamedProblem
    dtype: str
    clock: Clock
    many: bool = False
    """Whether it is one of hundreds."""
    sets: int = 0
    launches: int = 0
    """Of a graph, or of a call without one."""
    x: list[Tensor] = field(default_factory=list)
    filter: list[Tensor] = field(default_factory=list)
    bias: list[Tensor] = field(default_factory=list)
    residual: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Makes the operands.

        Raises:
            ValueError: The problem has padding that torch's functions do not take.
        """
        problem = self.named.problem
        if problem.pad_before != problem.pad_after:
            raise ValueError(
                f"{self.named.name}: padding {problem.pad_before} before and {problem.pad_after} "
                "after; torch's functions take the same"
            )
        self.sets = set_count(self.named, self.dtype)
        self.launches = launches(
            problem.flops, problem.nbytes(self.dtype), self.sets, many=self.many
        )
        filters = (problem.filters, *problem.filter_size, problem.group_channels)
        self.x = self._make(problem.input_shape, 0)
        self.filter = self._make(filters, 1, exponents(self.named, self.dtype).filter)
        self.bias = self._make((problem.filters,), 2)
        self.residual = self._make(problem.output_shape, 3)

    def _make(
        self, shape: tuple[object, ...], seed: int, exponent: int = _EXPONENT
    ) -> list[Tensor]:
        """Returns an operand of each set: the first one's values, rotated.

        Only the first set is checked, and making values takes twenty operations.
        """
        sizes = [int(str(size)) for size in shape]
        values = filled(
            math.prod(sizes),
            seed,
            exponent=exponent,
            dtype=self.dtype,
            device=self.clock.device,
        )
        sets = [values, *(values.roll(_ROTATION * index) for index in range(1, self.sets))]
        made = (each.reshape(sizes) for each in sets)
        return [each.movedim(-1, 1) if len(sizes) > 1 else each for each in made]

    def convolve(self, index: int) -> Tensor:
        """Returns the convolution of a set."""
        return self.convolution(self.x[index], self.filter[index], None)

    def convolution(self, x: Tensor, filter: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the problem's convolution of any operands."""
        p = self.named.problem
        function = (functional.conv1d, functional.conv2d, functional.conv3d)[p.spatial_rank - 1]
        return function(x, filter, bias, p.stride, p.pad_before, p.dilation, p.groups)

    def convolve_row(self, index: int) -> Tensor:
        """Returns the convolution of a set in one dimension, as one of a row of an image.

        Where torch's ``conv2d`` takes channels last, its ``conv1d`` copies the activation.
        """
        p = self.named.problem
        (stride,), (padding,), (dilation,) = p.stride, p.pad_before, p.dilation
        y = functional.conv2d(
            self.x[index].unsqueeze(2),
            self.filter[index].unsqueeze(2),
            None,
            (1, stride),
            (0, padding),
            (1, dilation),
            p.groups,
        )
        return y.squeeze(2)

    def fuse(self, index: int) -> Tensor:
        """Returns ``silu(convolution + bias) + residual`` of a set."""
        return self.fused(self.x[index], self.filter[index], self.bias[index], self.residual[index])

    def fused(self, x: Tensor, filter: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        """Returns the fused work of any operands."""
        return functional.silu(self.convolution(x, filter, bias)) + residual

    def _exact(self, x: Tensor, filter: Tensor) -> Tensor:
        """Returns the convolution of operands in float32, without rounding products to tf32."""
        flags = {"benchmark": False, "allow_tf32": False}
        try:
            with torch.backends.cudnn.flags(enabled=True, **flags):
                return self.convolution(x, filter, None)
        except RuntimeError:  # cuDNN has fewer kernels for channels last
            with torch.backends.cudnn.flags(enabled=True, **flags):
                return self.convolution(x.contiguous(), filter.contiguous(), None)

    def references(self, works: Collection[str] = WORKS) -> dict[str, Tensor]:
        """Returns what all are compared with, in float32, of the first set, by work."""
        x, filter, bias, residual = (
            values[0].float() for values in (self.x, self.filter, self.bias, self.residual)
        )
        bare = self._exact(x, filter)
        references = {BARE: bare}
        if FUSED in works:
            shape = (-1, *[1] * self.named.problem.spatial_rank)
            references[FUSED] = functional.silu(bare + bias.view(shape)) + residual
        return references
