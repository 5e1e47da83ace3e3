"""The op of a convolution as every caller sees it: its operands, what they hold, its parameters.

Importing this module imports neither MAX nor PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ._arguments import ConvArguments
from ._dtypes import INPUT_BYTES, INTEGERS, OUTPUT_BYTES, UINT8, bias_dtype
from ._fields import COPY_BYTES, SEVERAL, STEM_CHANNELS, Kernel, Precision
from ._problem import ConvProblem

__all__ = [
    "Operands",
    "centered",
    "filters_missing",
    "known_problem",
    "known_to_cpu",
    "op_parameters",
]

#: Bytes of a sum of integers, which kernels store where the op makes the output of it.
_SUM_BYTES = 4

#: Products of an output element from which on tensor cores gain more than wider pixels cost: by an
#: estimate of both, not measured.
_FEWEST_PRODUCTS = 64

S = TypeVar("S")
T = TypeVar("T")


@dataclass(slots=True)
class Operands(Generic[T]):
    """What stands for each operand of the op, in its order: types, graph values or buffers."""

    x: T
    """The activation, ``[N, *spatial, C]``."""
    filter: T
    """The filter's elements, flat."""
    bias: T | None
    """``[K]``, of the activation's type or float32."""
    residual: T | None
    """``[N, *spatial, K]``, of the output's type."""
    scale: T | None
    """``[K]``, float32."""
    geometry: T
    """``encode``'s, in host memory; so is the next one."""
    scalars: T

    def __iter__(self) -> Iterator[T]:
        """Goes through those that are there."""
        return iter(self.values())

    def values(self) -> list[T]:
        """Returns those that are there."""
        inputs = (self.x, self.filter, self.bias, self.residual, self.scale)
        every = (*inputs, self.geometry, self.scalars)
        return [operand for operand in every if operand is not None]

    def with_values(self, values: Iterable[S]) -> Operands[S]:
        """Returns operands of which the same are there, with these values in the op's order."""
        rest = iter(values)
        return Operands(
            x=next(rest),
            filter=next(rest),
            bias=None if self.bias is None else next(rest),
            residual=None if self.residual is None else next(rest),
            scale=None if self.scale is None else next(rest),
            geometry=next(rest),
            scalars=next(rest),
        )

    def completed(
        self, empty: Callable[[str, int], T], *, dtype: str, out_dtype: str, rank: int
    ) -> Operands[T]:
        """Returns all operands, with an empty one in the place of each that is not there.

        Args:
            empty: Makes one, of a type and a rank.
            dtype: Of the activation.
            out_dtype: Of the output.
            rank: Of the output.
        """
        of_bias = bias_dtype(dtype, "float32")
        return replace(
            self,
            bias=empty(of_bias, 1) if self.bias is None else self.bias,
            residual=empty(out_dtype, rank) if self.residual is None else self.residual,
            scale=empty("float32", 1) if self.scale is None else self.scale,
        )


def op_parameters(
    known: Mapping[str, bool | int], *, scaled: bool, depth_to_space: bool = False
) -> dict[str, bool | int]:
    """Returns the op's parameters.

    Args:
        known: Facts of ``KnownProblem``: the op is compiled for that alone.
        scaled: Whether there is a scale: an op without one is spared the multiplication.
        depth_to_space: Whether filters are pixels of a larger image.
    """
    flags = {"scaled": scaled, "depth_to_space": depth_to_space}
    return {**known, **{name: True for name, flag in flags.items() if flag}}


def filters_missing(problem: ConvProblem, dtype: str, out_dtype: str, kernel: Kernel) -> int:
    """Returns how many filters of zeros a graph adds on a GPU, whose results it cuts off again.

    With them a pixel of the output has whole pieces of ``COPY_BYTES``. Tensor cores store nothing
    else where the graph compiler fuses work behind, and CUDA cores take many times as long: 2.7 ms
    for the image of 1024x1024 pixels and 3 channels that ends a VAE decoder, on an H200.

    Args:
        problem: The convolution.
        dtype: Of the activation.
        out_dtype: Of the output.
        kernel: What was asked for.
    """
    filters, channels = problem.filters, problem.channels
    if not (isinstance(filters, int) and isinstance(channels, int)):
        return 0
    tiled = (
        problem.groups == 1
        and problem.subpixel.taps * channels >= _FEWEST_PRODUCTS
        and channels > STEM_CHANNELS
        and channels * INPUT_BYTES[dtype] % COPY_BYTES == 0
        and kernel in (Kernel.AUTO, Kernel.SM90, Kernel.SM100)
    )
    sums = out_dtype in INTEGERS or dtype == UINT8
    piece = COPY_BYTES // (_SUM_BYTES if sums else OUTPUT_BYTES[out_dtype])
    # Of an enlarged image's filters there are as many as places in a block.
    piece //= math.gcd(piece, math.prod(problem.upsample))
    return -filters % piece if tiled else 0


def known_problem(
    problem: ConvProblem, kernel: Kernel = Kernel.AUTO, precision: Precision = Precision.TF32
) -> dict[str, bool | int]:
    """Returns what a graph knows of a problem, as parameters of the op.

    The op's registry compiles a GPU's op with the kernels, and their configurations, that such a
    problem may need (``KnownProblem`` in operations/conv/known.mojo). Symbolic sizes are left out.

    Args:
        problem: The convolution.
        kernel: What was asked for.
        precision: Of the products of float32.
    """
    problem = problem.subpixel
    known: dict[str, bool | int] = {
        "kernel": int(kernel),
        "exact": precision is Precision.FLOAT32,
        "groups": problem.groups,
        "taps": problem.filter_size[-1],
        "stride": problem.stride[-1],
    }
    for name, count in (("channels", problem.channels), ("filters", problem.filters)):
        if isinstance(count, int):
            known[name] = count // problem.groups
    return known


def centered(arguments: ConvArguments) -> dict[str, bool | int]:
    """Returns the parameter of a GPU's op that says of an activation that it has a zero point.

    Kernels then store sums, of which the op takes what belongs to the zero point
    (operations/nvidia/summed_output.mojo).

    Args:
        arguments: Of the convolution.
    """
    return {"centered": True} if arguments.zero_point else {}


def known_to_cpu(problem: ConvProblem, kernel: Kernel = Kernel.AUTO) -> dict[str, bool | int]:
    """Returns what a CPU's op is compiled for: a part of what ``known_problem`` returns.

    It is little, so that the convolutions of a network share what is compiled: whether there is one
    group, and whether a group has one channel and one filter. That tells depthwise convolutions,
    grouped ones and all others apart, which run on different kernels.

    Args:
        problem: The convolution.
        kernel: What was asked for.
    """
    problem = problem.subpixel
    known: dict[str, bool | int] = {"kernel": int(kernel)}
    groups, channels, filters = problem.groups, problem.channels, problem.filters
    if not isinstance(channels, int) or not isinstance(filters, int):
        return known
    if groups == 1 and (channels, filters) != (1, 1):
        return known | {"groups": 1}
    known["groups"] = _one_or_several(groups)
    known["channels"] = _one_or_several(channels // groups)
    known["filters"] = _one_or_several(filters // groups)
    return known


def _one_or_several(count: int) -> int:
    return 1 if count == 1 else SEVERAL
