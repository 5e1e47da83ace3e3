"""The Blackwell convolution on the emulator, as ``nvidia/sm100/launch.mojo`` launches it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.blackwell import Kernel, Program, pairs
from tests.emulated.convolution import bfloat16, floats
from tests.emulated.values import FLOAT8_EXPONENT_BITS, float8

from maxconv._problem import ConvProblem
from ptxemu import DevicePointer, Machine, TensorMap
from ptxemu.tma import DataType, L2Promotion, Swizzle

#: What stands for the pointers in the parameters (``tests/mojo/emit_sm100.mojo``).
OUTPUT, BIAS, SCALE = 0x1111 << 48, 0x2222 << 48, 0x3333 << 48
_SWIZZLES = {32: Swizzle.B32, 64: Swizzle.B64, 128: Swizzle.B128}
_NONE, _LEAKY_RELU, _RELU = 0, 3, 1
_HARD_SWISH, _HARD_SIGMOID = 6, 10
#: The slope of the test program's leaky ReLU.
_SLOPE = 0.5

Array = npt.NDArray[Any]
Values = npt.NDArray[Any]


def encoded(values: Values, dtype: str) -> Array:
    """Values in an element type's bits, rounded to nearest even."""
    if dtype == "bfloat16":
        return bfloat16(np.ascontiguousarray(values, np.float32))
    if dtype in FLOAT8_EXPONENT_BITS:
        return float8(FLOAT8_EXPONENT_BITS[dtype], values)
    bits: Array = values.astype(dtype)
    return bits


def decoded(bits: Array, dtype: str) -> Values:
    """The values of bits of an output's type."""
    wide = floats(bits) if dtype == "bfloat16" else bits
    return wide.astype(np.float64)


def map_type(dtype: str) -> DataType:
    """What ``operations/nvidia/tma`` takes elements for."""
    types = {
        "bfloat16": DataType.BFLOAT16,
        "float16": DataType.FLOAT16,
        "float32": DataType.TFLOAT32,
    }
    return types.get(dtype, DataType.UINT8)


@dataclass(frozen=True)
class Fused:
    """What is fused into a launch: codes as the op has them."""

    bias: bool = False
    scale: bool = False
    activation: int = _NONE
    final_activation: int = _NONE
    beta: float = 0.0


@dataclass(frozen=True)
class Case:
    """A problem, what is fused, and operands: small integers, exact in every type used."""

    problem: ConvProblem
    fused: Fused = field(default_factory=Fused)
    seed: int = 0

    def operands(self) -> dict[str, Values]:
        """Draws them."""
        rng = np.random.default_rng(self.seed)
        p = self.problem
        taps = p.filter_size
        shapes = {
            "activation": (p.batch, *p.input_size, p.channels),
            "filter": (p.filters, *taps, p.group_channels),
            "bias": (p.filters,),
            "scale": (p.filters,),
            "residual": (p.batch, *p.output_size, p.filters),
        }
        drawn = {name: rng.integers(-3, 4, shape) * 1.0 for name, shape in shapes.items()}
        drawn["scale"] = 2.0 ** rng.integers(-1, 2, shapes["scale"])
        return drawn

    def arguments(self) -> list[str]:
        """As ``emit_sm100`` takes them."""
        p = self.problem
        spatial = [p.input_size, p.filter_size, p.stride, p.dilation, p.pad_before, p.pad_after]
        missing = 3 - len(p.filter_size)
        lacking = (1, 1, 1, 1, 0, 0)
        triples = [
            [value] * missing + [int(size) for size in sizes]
            for value, sizes in zip(lacking, spatial, strict=True)
        ]
        numbers = [p.batch, p.channels, p.filters, p.groups, *itertools.chain(*triples)]
        f = self.fused
        flags = [int(f.bias), int(f.scale), int(f.beta != 0), f.activation, f.final_activation]
        return [*map(str, numbers), *map(str, flags), str(f.beta)]

    @property
    def pixels(self) -> int:
        """Of the output, over all images."""
        return int(self.problem.batch) * math.prod(map(int, self.problem.output_size))

    def expected(self, kernel: Kernel) -> Values:
        """The output in float64, rounded once to its type, and what the test fuses behind."""
        data = self.operands()
        total = convolution(self.problem, data["activation"], data["filter"])
        if self.fused.scale:
            total *= data["scale"]
        if self.fused.bias:
            total += data["bias"]
        total = activated(total, self.fused.activation)
        if self.fused.beta:
            total += self.fused.beta * data["residual"]
        total = activated(total, self.fused.final_activation)
        rounded = decoded(encoded(total, kernel.out), kernel.out)
        index = np.indices(rounded.shape)
        if kernel.has_lambda:
            pixel = np.arange(rounded[..., 0].size).reshape(*rounded.shape[:-1], 1)
            added = (pixel % 5 + index[-1] % 3) * kernel.lambda_computes
        elif kernel.computes or kernel.stores:
            added = sum((axis % 4 for axis in index[:-1]), start=index[-1] % 2)
        else:
            return rounded
        again = decoded(encoded(rounded + added, kernel.out), kernel.out)
        return np.moveaxis(again, -1, 0) if kernel.stores else again


def activated(values: Values, code: int) -> Values:
    """The values of an activation; the leaky ReLU's slope is the test program's."""
    if code == _RELU:
        return np.maximum(values, 0)
    if code == _LEAKY_RELU:
        return np.where(values > 0, values, values * _SLOPE)
    if code in (_HARD_SWISH, _HARD_SIGMOID):
        # In the kernel's steps, each of which float32 rounds.
        ramp: Values = np.clip(values + 3, 0, 6).astype(np.float32) * np.float32(1 / 6)
        swish: Values = ramp * values.astype(np.float32)
        return swish if code == _HARD_SWISH else ramp
    assert code == _NONE
    return values


def convolution(p: ConvProblem, activation: Values, weights: Values) -> Values:
    """The convolution ``[N, *output, K]`` in float64."""
    pads = [(0, 0), *zip(p.pad_before, p.pad_after, strict=True), (0, 0)]
    padded = np.pad(activation, pads)
    sizes = tuple(map(int, p.output_size))
    total = np.zeros((int(p.batch), *sizes, int(p.filters)))
    channels, filters = int(p.group_channels), int(p.group_filters)
    for tap in itertools.product(*map(range, p.filter_size)):
        starts = [t * d for t, d in zip(tap, p.dilation, strict=True)]
        window = tuple(
            slice(start, start + (size - 1) * stride + 1, stride)
            for start, size, stride in zip(starts, sizes, p.stride, strict=True)
        )
        of_images: tuple[slice, ...] = (slice(None), *window)
        slices: tuple[slice | int, ...] = (slice(None), *tap)
        pixels = padded[of_images]
        for group in range(p.groups):
            source = pixels[..., group * channels : (group + 1) * channels]
            k = slice(group * filters, (group + 1) * filters)
            total[..., k] += source @ weights[k][slices].T
    return total


def numbers(text: str) -> tuple[int, ...]:
    """Numbers with commas."""
    return tuple(map(int, text.split(",")))


@dataclass(frozen=True)
class Run:
    """What came out of a launch."""

    output: Values
    instructions: int


def run(
    program: Program, kernel: Kernel, case: Case, seed: int, sms: int = 0, ptx: str = ""
) -> Run:
    """Runs a kernel, or a changed text of it, with a scheduling seed.

    ``sms`` is how many blocks run at a time; 0: two clusters.
    """
    lines = (pairs(line) for line in program.run("launch", *case.arguments()))
    launch = next(line for line in lines if line["name"] == kernel.name)
    assert launch["refusal"] == "", launch["refusal"]
    assert case.fused.scale == bool(kernel.scaled), "a scale is compiled, or it is not"
    machine = Machine("sm_100a", sms=sms or 2 * kernel.cluster, seed=seed)
    data = case.operands()
    activation = machine.alloc(encoded(data["activation"], kernel.act))
    weights = machine.alloc(encoded(data["filter"], kernel.filter))
    shape = case.expected(kernel).shape
    poison = np.full(shape, np.nan, np.float64)
    output = machine.alloc(encoded(poison, kernel.out))
    # What a function captures: where it stores, and of how many pixels. Nothing else is stored.
    untouched = machine.alloc(encoded(poison, kernel.out))
    captured = [output, case.pixels] if kernel.lambda_stores else []
    assert len(captured) == kernel.captures
    parameters = bytes.fromhex(launch["params"])
    parameters = with_pointer(parameters, OUTPUT, untouched if captured else output)
    bias = machine.alloc(encoded(data["bias"], kernel.bias))
    parameters = with_pointer(parameters, BIAS, bias)
    if kernel.scaled:
        scale = machine.alloc(data["scale"].astype(np.float32))
        parameters = with_pointer(parameters, SCALE, scale)
    maps = tensor_maps(
        kernel,
        launch,
        activation,
        weights,
        output,
        machine.alloc(encoded(data["residual"], kernel.out)),
    )
    instructions = machine.load(ptx or kernel.ptx).launch(
        grid=int(launch["blocks"]),
        block=kernel.threads,
        cluster=kernel.cluster,
        shared_bytes=kernel.shared,
        args=[*maps, parameters, bytes.fromhex(launch["geometry"]), *captured],
        budget=20_000_000,
    )
    np.testing.assert_array_equal(untouched.read(), encoded(poison, kernel.out))
    return Run(decoded(output.read(), kernel.out), instructions)


def tensor_maps(
    kernel: Kernel,
    launch: dict[str, str],
    activation: DevicePointer,
    weights: DevicePointer,
    output: DevicePointer,
    residual: DevicePointer,
) -> list[TensorMap]:
    """The descriptors of a launch, of those that the kernel takes."""
    maps = [_activation_map(kernel, launch, activation), _filter_map(kernel, launch, weights)]
    maps.append(maps[-1] if kernel.stores else _matrix_map(kernel, launch, output))
    if kernel.residual:
        maps.append(_matrix_map(kernel, launch, residual))
    return maps


def with_pointer(parameters: bytes, placeholder: int, pointer: DevicePointer) -> bytes:
    """Parameters with a pointer in a placeholder's place."""
    old = placeholder.to_bytes(8, "little")
    # The bytes behind the last field are whatever was there, which may be the pointer again.
    assert old in parameters
    return parameters.replace(old, int(pointer).to_bytes(8, "little"))


def _strides(steps: Sequence[int], kind: DataType) -> tuple[int, ...]:
    return tuple(step * kind.bits // 8 for step in steps[1:])


def _options(swizzle: Swizzle) -> dict[str, Any]:
    return {"swizzle": swizzle, "l2_promotion": L2Promotion.L2_256B}


def _activation_map(kernel: Kernel, launch: dict[str, str], data: DevicePointer) -> TensorMap:
    kind = map_type(kernel.act)
    return TensorMap.im2col(
        kind,
        data,
        numbers(launch["act_extents"]),
        _strides(numbers(launch["act_steps"]), kind),
        numbers(launch["lower"]),
        numbers(launch["upper"]),
        128 * 8 // kind.bits,
        kernel.act_box,
        (1, *numbers(launch["strides"]), 1),
        **_options(Swizzle.B128),
    )


def _filter_map(kernel: Kernel, launch: dict[str, str], data: DevicePointer) -> TensorMap:
    kind = map_type(kernel.filter)
    return TensorMap.tiled(
        kind,
        data,
        numbers(launch["filter_extents"]),
        _strides(numbers(launch["filter_steps"]), kind),
        (128 * 8 // kind.bits, 1, kernel.filter_box),
        **_options(Swizzle.B128),
    )


def _matrix_map(kernel: Kernel, launch: dict[str, str], data: DevicePointer) -> TensorMap:
    kind = DataType.FLOAT32 if kernel.out == "float32" else map_type(kernel.out)
    return TensorMap.tiled(
        kind,
        data,
        numbers(launch["out_extents"]),
        _strides(numbers(launch["out_steps"]), kind),
        (kernel.subtile, kernel.tile_m // kernel.group, 1),
        **_options(_SWIZZLES[kernel.row]),
    )
