"""Operands of a convolution with everything fused behind it, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tests.emulated.convolution import Array, with_pointer
from tests.emulated.values import loaded, stored
from tests.reference import conv_reference

from maxconv._problem import ConvProblem
from ptxemu import Machine

#: What stands for the pointers in what a launch passes (``tests/mojo/fused_epilogue.mojo``).
SCALE, BIAS, RESIDUAL, OUTPUT = 0x1111 << 48, 0x2222 << 48, 0x3333 << 48, 0x4444 << 48


def with_fused(
    epilogue: bytes, machine: Machine, scale: Array, bias: Array, residual: npt.NDArray[Any]
) -> bytes:
    """Puts scale, bias and residual, as they are stored, into the machine's memory, and their
    pointers into an epilogue."""
    for placeholder, values in ((SCALE, scale), (BIAS, bias), (RESIDUAL, residual)):
        epilogue = with_pointer(epilogue, placeholder, machine.alloc(values))
    return epilogue


class Given(Protocol):
    """A problem as a test names it."""

    @property
    def conv(self) -> ConvProblem:
        """The convolution."""

    @property
    def output(self) -> str:
        """The output's type, and the residual's."""

    @property
    def placed(self) -> bool:
        """Whether ``tests/mojo/add_place.mojo`` is fused behind it."""


@dataclass(frozen=True)
class Operands:
    """Small integers, whose products and sums are exact in float32 in any order."""

    activation: Array
    filter: Array
    scale: Array
    bias: Array
    residual: Array

    @classmethod
    def random(cls, problem: ConvProblem, seed: int) -> Operands:
        """Draws them."""
        rng = np.random.default_rng(seed)
        filters = problem.filters
        shapes = (
            problem.input_shape,
            (filters, *problem.filter_size, problem.group_channels),
            (filters,),
            (filters,),
            problem.output_shape,
        )
        return cls(*(rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes))

    @classmethod
    def coordinates(cls, problem: ConvProblem, tap: int) -> Operands:
        """An activation whose values tell pixels and channels apart, and a filter that copies the
        channel of its own number at one tap: outputs name the input that they were made of."""
        filters = problem.filters
        shape: tuple[int, ...] = tuple(map(int, problem.input_shape))
        values = np.arange(np.prod(shape)).reshape(shape) % 251
        kernel = np.zeros((filters, int(problem.taps), int(problem.group_channels)), np.float32)
        for k in range(filters):
            kernel[k, tap, k % kernel.shape[2]] = 1
        kernel = kernel.reshape(filters, *problem.filter_size, kernel.shape[2])
        zeros = np.zeros(filters, np.float32)
        outputs = np.zeros(tuple(map(int, problem.output_shape)), np.float32)
        return cls(values.astype(np.float32), kernel, zeros, zeros, outputs)

    def expected(self, given: Given, fused: bool, scaled: bool = True) -> Array:
        """The outputs, rounded to their type, and once more behind what the graph fused; of the
        epilogues of ``tests/mojo/fused_epilogue.mojo``."""
        problem, dtype = given.conv, given.output
        with np.errstate(invalid="ignore"):
            total = conv_reference(
                self.activation,
                self.filter,
                stride=problem.stride,
                dilation=problem.dilation,
                pad_before=problem.pad_before,
                pad_after=problem.pad_after,
                groups=problem.groups,
            ).astype(np.float32)
        if fused and not scaled:
            total += self.bias
            total = np.maximum(np.where(total > 0, total, total / 2) + self.residual, 0)
        elif fused:
            total = np.maximum(total * self.scale + self.bias, 0) + self.residual
        rounded = loaded(stored(total, dtype), dtype)
        if not given.placed:
            return rounded
        shape = rounded.shape[:1] + (1,) * (5 - rounded.ndim) + rounded.shape[1:]
        index = np.indices(shape).reshape(5, *rounded.shape)
        added = np.tensordot([1, 3, 5, 7, 9], index, 1) % 8
        return loaded(stored(rounded + added.astype(np.float32), dtype), dtype)
