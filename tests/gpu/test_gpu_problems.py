"""Every named problem on a GPU, in every type and with every kind of work behind it, exactly.

Operands are small integers: products and sums are exact in float32 in any order, so that what is
left is the rounding to the output's type, and every element must be equal.
"""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.gpu.network import (
    OUTPUTS,
    TYPES,
    Types,
    every_fusion,
    rounded,
    to_device,
    to_float32,
)
from tests.reference import conv_reference

from maxconv._fields import (
    Activation,
    Kernel,
    Layout,
    Precision,
    encode_geometry,
    encode_scalars,
)
from maxconv._problem import ConvProblem
from maxconv._problems import load_problems

if TYPE_CHECKING:
    from max.driver import Device
    from max.engine import InferenceSession, Model

pytestmark = pytest.mark.gpu

Floats = npt.NDArray[np.float32]

#: Those whose graphs have every output and every kernel.
WHOLE = tuple(name for name, types in TYPES.items() if types.outputs == OUTPUTS)
#: The larger ones are for the benchmark: their oracle would take minutes.
NAMES = tuple(name for name, entry in load_problems().items() if entry.problem.flops < 2e10)


def integers(shape: tuple[int, ...], magnitude: int, seed: int) -> Floats:
    generator = np.random.default_rng(seed)
    return generator.integers(-magnitude, magnitude + 1, shape).astype(np.float32)


def full(sizes: tuple[int, ...], fill: int) -> tuple[int, ...]:
    return (fill,) * (3 - len(sizes)) + sizes


def static(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


class Operands:
    """A problem's operands, and the exact convolution."""

    def __init__(self, problem: ConvProblem) -> None:
        sizes = full(static(problem.input_size), 1)
        self.problem = problem
        self.x = integers((int(problem.batch), *sizes, int(problem.channels)), 2, 1)
        taps = full(problem.filter_size, 1)
        self.w = integers((int(problem.filters), *taps, int(problem.group_channels)), 1, 2)
        self.bias = integers((int(problem.filters),), 8, 3)
        output = static(problem.output_shape)
        self.output = (output[0], *full(tuple(output[1:-1]), 1), output[-1])
        self.residual = integers(self.output, 8, 4)
        self.factors = integers((int(problem.filters),), 2, 5)
        #: Powers of two: exact in every type.
        self.scale = 2.0 ** integers((int(problem.filters),), 2, 6)

    @functools.cached_property
    def sums(self) -> npt.NDArray[np.float64]:
        p = self.problem
        return conv_reference(
            self.x,
            self.w,
            stride=full(p.stride, 1),
            dilation=full(p.dilation, 1),
            pad_before=full(p.pad_before, 0),
            pad_after=full(p.pad_after, 0),
            groups=p.groups,
        )

    def filter(self, layout: Layout) -> Floats:
        """The filter, flat, in a layout."""
        order = {
            Layout.KRSC: (0, 1, 2, 3, 4),
            Layout.RSCF: (1, 2, 3, 4, 0),
            Layout.FCRS: (0, 4, 1, 2, 3),
        }
        return np.ascontiguousarray(self.w.transpose(order[layout])).reshape(-1)


@functools.cache
def operands_of(name: str) -> Operands:
    return Operands(load_problems()[name].problem)


class Network:
    """The compiled graph of an entry of ``TYPES``."""

    def __init__(self, session: InferenceSession, device: Device, name: str) -> None:
        self.model: Model = session.load(every_fusion(name))
        self.device, self.types = device, TYPES[name]

    def run(
        self,
        operands: Operands,
        *,
        layout: Layout = Layout.KRSC,
        kernel: Kernel = Kernel.AUTO,
        epilogue: bool = False,
        precision: Precision = Precision.TF32,
    ) -> dict[str, Floats]:
        from max.driver import Buffer
        from max.dtype import DType

        p, types, device = operands.problem, self.types, self.device
        geometry = encode_geometry(
            stride=full(p.stride, 1),
            dilation=full(p.dilation, 1),
            pad_before=full(p.pad_before, 0),
            pad_after=full(p.pad_after, 0),
            filter_size=full(p.filter_size, 1),
            groups=p.groups,
            filter_layout=layout,
            kernel=kernel,
            activation=Activation.RELU if epilogue else Activation.NONE,
            final_activation=Activation.LEAKY_RELU if epilogue else Activation.NONE,
            has_bias=epilogue,
            has_residual=epilogue,
            precision=precision,
        )
        scalars = encode_scalars(beta=-0.5, final_parameters=(0.25, 0.0))
        empty = np.zeros(0, np.float32)
        residual = operands.residual if epilogue else empty.reshape((0,) * 5)
        inputs: list[Any] = [
            to_device(operands.x, types.dtype, device),
            to_device(operands.filter(layout), types.dtype, device),
            to_device(operands.bias if epilogue else empty, types.bias_dtype, device),
            to_device(residual, types.out_dtype, device),
            Buffer.from_numpy(geometry),
            *[Buffer.from_numpy(scalars)] * len(types.outputs),
            Buffer(DType.uint8, (*operands.output, 0)),
            to_device(operands.factors, types.out_dtype, device),
        ]
        if types.scaled:
            inputs.append(to_device(operands.scale, "float32", device))
        self._poison(operands.output)
        results = self.model.execute(*inputs)
        return dict(zip(types.outputs, (to_float32(result) for result in results), strict=True))

    def _poison(self, shape: tuple[int, ...]) -> None:
        """Fills with NaN what the allocator may hand out for the outputs."""
        sizes = ("float32", *[self.types.out_dtype] * 3)
        held = [to_device(np.full(shape, np.nan, np.float32), size, self.device) for size in sizes]
        self.device.synchronize()
        del held


@pytest.fixture(scope="module", params=TYPES)
def network(gpu_session: InferenceSession, gpu: Device, request: pytest.FixtureRequest) -> Network:
    return Network(gpu_session, gpu, request.param)


def expected(operands: Operands, types: Types, epilogue: bool) -> dict[str, Floats]:
    dtype = types.out_dtype
    sums = operands.sums * operands.scale if types.scaled else operands.sums
    if epilogue:
        sums = np.maximum(sums + operands.bias, 0) - 0.5 * operands.residual
        sums = np.where(sums > 0, sums, 0.25 * sums)
    plain = rounded(sums, dtype)
    computed = rounded((np.maximum(plain, 0) * operands.factors).astype(np.float64), dtype)
    return {
        "plain": plain,
        "computed": computed,
        "stored": np.moveaxis(computed, -1, 1),
        "converted": plain,
    }


def check(network: Network, operands: Operands, **arguments: Any) -> None:
    results = network.run(operands, **arguments)
    wanted = expected(operands, network.types, arguments.get("epilogue", False))
    for name in network.types.outputs:
        np.testing.assert_array_equal(results[name], wanted[name], err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_named_problems(network: Network, name: str) -> None:
    operands = operands_of(name)
    check(network, operands)
    check(network, operands, epilogue=True)


def drawn(seed: int) -> ConvProblem:
    """A random problem of any rank; half of them have channels that TMA takes."""
    draw = random.Random(seed)
    rank, groups = draw.choice([1, 2, 2, 3]), draw.choice([1, 1, 1, 2, 3, 4])
    step, most = draw.choice([(1, 20), (8, 12)])
    per_group, filters = (step * draw.randint(1, most) for _ in range(2))
    longest = {1: 300, 2: 30, 3: 10}[rank]
    sizes: list[int] = []
    taps: list[int] = []
    strides: list[int] = []
    dilations: list[int] = []
    padding: list[int] = []
    while len(sizes) < rank:
        size, tap = draw.randint(1, longest), draw.randint(1, {1: 7, 2: 7, 3: 4}[rank])
        dilation, sides = draw.choice([1, 1, 2, 3]), [draw.randint(0, 5), draw.randint(0, 5)]
        if (tap - 1) * dilation < size + sum(sides):
            sizes.append(size)
            taps.append(tap)
            strides.append(draw.choice([1, 1, 2, 3]))
            dilations.append(dilation)
            padding += sides
    return ConvProblem.from_parts(
        (draw.randint(1, 4), *sizes, per_group * groups),
        filters=filters * groups,
        filter_size=tuple(taps),
        group_channels=per_group,
        stride=tuple(strides),
        dilation=tuple(dilations),
        padding=tuple(padding),
        groups=groups,
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_problems(network: Network, seed: int) -> None:
    check(network, Operands(drawn(seed)), epilogue=bool(seed % 2))


@pytest.mark.parametrize("network", WHOLE, indirect=True)
@pytest.mark.parametrize("kernel", [Kernel.REFERENCE, Kernel.IMPLICIT_GEMM, Kernel.GROUPED])
def test_kernels_by_name(network: Network, kernel: Kernel) -> None:
    for name in NAMES:
        if name.startswith("odd.") or name in ("resnet50.conv5_3x3", "resnext.conv4_g32"):
            check(network, operands_of(name), kernel=kernel, epilogue=True)


@pytest.mark.parametrize("network", WHOLE, indirect=True)
@pytest.mark.parametrize("layout", [Layout.RSCF, Layout.FCRS])
def test_filters_in_other_layouts(network: Network, layout: Layout) -> None:
    for name in NAMES:
        if name.startswith("odd.") or name == "resnet50.conv4_3x3":
            check(network, operands_of(name), layout=layout)


@pytest.mark.parametrize("network", WHOLE, indirect=True)
def test_no_images(network: Network) -> None:
    problem = ConvProblem.from_parts((0, 5, 6, 8), filters=16, filter_size=(3, 3), group_channels=8)
    results = network.run(Operands(problem))
    assert results["plain"].shape == (0, 1, 3, 4, 16)


@pytest.mark.parametrize("network", WHOLE, indirect=True)
def test_refusals(network: Network) -> None:
    operands = operands_of("odd.groups_uneven")
    with pytest.raises(ValueError, match="filter_layout: PACKED is packed for a CPU; a GPU takes"):
        network.run(PackedOperands(operands.problem, network.types.dtype), layout=Layout.PACKED)
    with pytest.raises(
        ValueError, match=r"config: depthwise cannot take .* one input channel a gro"
    ):
        network.run(operands, kernel=Kernel.DEPTHWISE)
    with pytest.raises(ValueError, match=r"config: pointwise cannot take .* runs on CPUs only"):
        network.run(operands, kernel=Kernel.POINTWISE)
    with pytest.raises(ValueError, match="config: sm90 cannot take this convolution: "):
        network.run(operands, kernel=Kernel.SM90)
    wrong = Operands(operands.problem)
    wrong.w = wrong.w[:-6]
    with pytest.raises(
        ValueError, match=r"filter: \d+ elements do not match \d+ = what 18 filters"
    ):
        network.run(wrong)


@pytest.mark.parametrize("network", ["float32"], indirect=True)
@pytest.mark.parametrize("name", ["resnet50.conv4_3x3", "resnet50.conv2_reduce"])
def test_precision(network: Network, name: str) -> None:
    operands = Operands(load_problems()[name].problem)
    generator = np.random.default_rng(6)
    operands.x, operands.w = (
        generator.standard_normal(values.shape).astype(np.float32)
        for values in (operands.x, operands.w)
    )

    def error(**arguments: Any) -> float:
        result = network.run(operands, **arguments)["plain"].astype(np.float64)
        return float(np.linalg.norm(result - operands.sums) / np.linalg.norm(operands.sums))

    # Both operands of a product are rounded to 11 bits: errors of up to 2**-11 of each, evenly
    # distributed, are 2**-11 / sqrt(3) * sqrt(2) = 4e-4 of a product, and less where a value is in
    # the upper half of its binade. Sums of some thousand float32 stay under 1e-5.
    assert 1e-4 < error() < 4e-4
    assert error(precision=Precision.FLOAT32) < 1e-5
    with pytest.raises(ValueError, match=r"sm90 rounds float32 operands to tf32, but precision="):
        error(precision=Precision.FLOAT32, kernel=Kernel.SM90)


class PackedOperands(Operands):
    """Operands whose filter has as many elements as one that a CPU packs."""

    def __init__(self, problem: ConvProblem, dtype: str) -> None:
        super().__init__(problem)
        self.dtype = dtype

    def filter(self, layout: Layout) -> Floats:
        from maxconv._packing import packed_length

        p = self.problem
        length = packed_length(
            p.filter_size,
            filters=int(p.filters),
            group_channels=int(p.group_channels),
            groups=p.groups,
            dtype=self.dtype,
        )
        return np.zeros(length, np.float32)
