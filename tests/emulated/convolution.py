"""The Hopper convolution on the emulator: one image, a 3x3 filter or one of one tap."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsInt

import numpy as np
import numpy.typing as npt
from tests.ptxemu.isa.case import Case, Map, Struct
from tests.reference import conv_reference

from maxconv._problem import ConvProblem
from maxconv._subpixel import fold_array
from ptxemu import DevicePointer, Machine, TensorMap, Trace
from ptxemu.tma import DataType, L2Promotion, Swizzle, packed_strides

HEIGHT, WIDTH, CHANNELS, FILTERS = 8, 12, 64, 64
#: How many times the height and the filters a convolution of one tap has.
POINTWISE = 3
#: Channels that do not fill a row of a stage.
NARROW = 24
#: Filters that are no whole pieces of 16 bytes: less than one, of one tile, of two, of three.
ODD = 5, 13, 60, 71, 129
#: Blocks that share a tile's sum.
SPLITS = 2, 3, 5
#: What stands for the pointers in the parameters (``tests/mojo/emit_emulated.mojo``).
OUTPUT, BIAS, RESIDUAL = 0x1111 << 48, 0x2222 << 48, 0x3333 << 48
#: What residuals are multiplied with.
BETA = 2
#: Filters of 16 bits of which TMA takes multiples.
WHOLE_PIECE = 8
#: Of a descriptor.
TENSOR_MAP_BYTES = 128

Array = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Gathered:
    """A convolution whose operands threads load, and what is fused behind it."""

    channels: int
    filters: int
    residual: bool
    silu: bool

    def draw(self, seed: int) -> Operands:
        """Draws its operands."""
        if self.residual:
            return WithResidual.draw(seed, self.filters, self.silu, self.channels)
        return Operands.random(seed, channels=self.channels, odd=self.filters)


#: Those of ``tests/mojo/emit_emulated.mojo``: less than a row of a stage, two and three slices;
#: pixels that begin at multiples of 2 and of 4 bytes; a residual that TMA takes, and one that not.
GATHERED = (
    Gathered(13, 71, False, False),
    Gathered(70, 64, True, False),
    Gathered(131, 129, True, True),
)

#: The same of pixels that begin at multiples of 8 bytes, copied straight into the rings.
DIRECT = (
    Gathered(12, 71, False, False),
    Gathered(68, 64, True, False),
    Gathered(132, 129, True, True),
)

#: In a candidate's line, between its name and what a launch passes.
NUMBERS = 10


@dataclass(frozen=True)
class Kernel:
    """A candidate, as the Mojo side describes it: sizes and what a launch passes."""

    index: int
    threads: int
    shared_bytes: int
    blocks: int
    cluster: int
    keeps_filters: bool
    load_pixels: int
    store_pixels: int
    load_filters: int
    upper: int
    end: int
    """Filters at whose multiples a store's box ends."""
    parameters: bytes
    geometry: bytes
    gather: bytes
    """The geometry of loads by threads."""
    ptx: str

    @property
    def rows(self) -> bool:
        """Whether threads store rows of the output, and not TMA."""
        return "cp.async.bulk.tensor.3d.global.shared::cta" not in self.ptx

    @property
    def gathers(self) -> bool:
        """Whether threads load, and not TMA."""
        return "cp.async.bulk.tensor.4d.shared::cluster.global.im2col" not in self.ptx

    @classmethod
    def of(cls, line: str, folder: Path) -> Kernel:
        """Reads a line of the Mojo side; a name ends with the index."""
        name, *words = line.split()
        numbers, (parameters, geometry, *gather) = words[:NUMBERS], words[NUMBERS:]
        text = (folder / f"{name}.ptx").read_text()
        index = int(name.split("-")[-1])
        threads, shared, blocks, cluster, keeps, *rest = map(int, numbers)
        launch = bytes.fromhex(parameters), bytes.fromhex(geometry), bytes.fromhex("".join(gather))
        pixels, stored, filters, upper, end = rest
        boxes = pixels, stored, filters, upper, end
        return cls(index, threads, shared, blocks, cluster, keeps == 1, *boxes, *launch, text)


@dataclass(frozen=True)
class Operands:
    """Small integers, whose products and sums are exact in float32 in any order."""

    activation: Array
    filter: Array
    bias: Array

    @classmethod
    def random(
        cls, seed: int, taps: int = 3, channels: int = CHANNELS, odd: int | None = None
    ) -> Operands:
        """Draws them, for a filter of 3x3 taps or of one, or for an odd number of filters."""
        rng = np.random.default_rng(seed)
        height, filters = (n if taps == 3 else POINTWISE * n for n in (HEIGHT, FILTERS))
        if odd is not None:
            height, filters = POINTWISE * HEIGHT, odd
        shapes = (height, WIDTH, channels), (filters, taps, taps, channels), (filters,)
        values = [rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes]
        return cls(*values)

    @property
    def taps(self) -> int:
        """Of the filter, along each axis."""
        return int(self.filter.shape[1])

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Height, width, filters."""
        return self.activation.shape[0], WIDTH, len(self.filter)

    def total(self) -> npt.NDArray[np.float64]:
        """The convolution in float64."""
        height, width, _ = self.output_shape
        border = (self.taps // 2, self.taps // 2)
        padded = np.pad(self.activation.astype(np.float64), (border, border, (0, 0)))
        total = np.zeros(self.output_shape) + self.bias
        for r in range(self.taps):
            for s in range(self.taps):
                window = padded[r : r + height, s : s + width]
                total += np.einsum("hwc,kc->hwk", window, self.filter[:, r, s])
        return total

    def expected(self) -> Array:
        """The convolution, rounded to bfloat16."""
        return floats(bfloat16(self.total().astype(np.float32)))


@dataclass(frozen=True)
class WithResidual(Operands):
    """Those of a convolution behind which a residual is added, maybe behind SiLU."""

    residual: Array
    silu: bool

    @classmethod
    def draw(cls, seed: int, filters: int, silu: bool, channels: int = CHANNELS) -> WithResidual:
        """Draws them; the residual tells where it was read."""
        plain = Operands.random(seed, channels=channels, odd=filters)
        rng = np.random.default_rng(1000 + seed)
        residual = rng.integers(-100, 101, plain.output_shape).astype(np.float32)
        return cls(plain.activation, plain.filter, plain.bias, residual, silu)

    def expected(self) -> Array:
        """The convolution, SiLU and the residual in float64, rounded to bfloat16."""
        total = self.total()
        if self.silu:
            total *= 0.5 + 0.5 * np.tanh(total / 2)
        return floats(bfloat16((total + BETA * self.residual).astype(np.float32)))


@dataclass(frozen=True)
class Upsampled(Operands):
    """Those of an image that is enlarged twice: of the convolution that the kernel runs."""

    whole: Array
    """The filter of the enlarged image, ``[K, 3, 3, C]``."""

    @classmethod
    def draw(cls, seed: int) -> Upsampled:
        """Draws them."""
        rng = np.random.default_rng(seed)
        filters = FILTERS // 4
        shapes = (HEIGHT, WIDTH, CHANNELS), (filters, 3, 3, CHANNELS), (filters,)
        values = [rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes]
        activation, whole, bias = values
        problem = ConvProblem.from_parts(
            (1, *activation.shape), filters=filters, filter_size=(3, 3), group_channels=CHANNELS,
            padding=1, upsample=2,
        )  # fmt: skip
        folded = fold_array(whole, problem.subpixel_axes, 1)
        return cls(activation, folded, np.tile(bias, 4), whole)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Height, width, filters."""
        return 2 * HEIGHT, 2 * WIDTH, len(self.whole)

    def expected(self) -> Array:
        """The convolution of the enlarged image in float64, rounded to bfloat16."""
        large = self.activation.repeat(2, 0).repeat(2, 1)[np.newaxis]
        ones, bias = (1, 1), self.bias[: len(self.whole)]
        total = conv_reference(
            large, self.whole, stride=ones, dilation=ones, pad_before=ones, pad_after=ones,
            bias=bias,
        )  # fmt: skip
        return floats(bfloat16(total[0].astype(np.float32)))


def bfloat16(values: Array) -> Bits:
    """Bits of bfloat16, rounded to nearest even."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    high: Bits = (rounded >> np.uint32(16)).astype(np.uint16)
    return high


def floats(bits: Bits) -> Array:
    """bfloat16 as float32."""
    wide: Array = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def run(
    kernel: Kernel,
    operands: Operands,
    seed: int,
    ptx: str = "",
    trace: Trace | None = None,
    stored: Callable[[Array], npt.NDArray[np.generic]] = bfloat16,
    relays: int = 1,
) -> Array:
    """Runs a candidate, or a changed text of it; returns ``[height, width, filters]``.

    ``stored`` gives the bits of activation and filter. The grid has a row of blocks a relay.
    """
    machine = Machine("sm_90a", sms=kernel.blocks, seed=seed)
    activation = machine.alloc(stored(operands.activation))
    weights = machine.alloc(stored(operands.filter))
    bias = machine.alloc(bfloat16(operands.bias))
    output = machine.alloc(np.full(operands.output_shape, 0x7FC1, np.uint16))
    parameters = with_pointer(kernel.parameters, OUTPUT, output)
    parameters = with_pointer(parameters, BIAS, bias)
    if isinstance(operands, WithResidual):
        residual = machine.alloc(bfloat16(operands.residual))
        parameters = with_pointer(parameters, RESIDUAL, residual)
    if kernel.gathers:
        # No map stands for a residual that is not there, or that threads load.
        last: TensorMap | bytes = bytes(TENSOR_MAP_BYTES)
        if isinstance(operands, WithResidual) and operands.output_shape[2] % WHOLE_PIECE == 0:
            last = _residual_map(kernel, operands, residual)
        args = [activation, weights, last, parameters, kernel.geometry, kernel.gather]
    else:
        kind = DataType.UINT8 if stored(operands.bias).itemsize == 1 else DataType.BFLOAT16
        maps = tensor_maps(kernel, operands, (activation, weights, output), kind)
        last = maps[-1]
        if isinstance(operands, WithResidual) and not kernel.rows:
            last = _residual_map(kernel, operands, residual)
        args = [*maps, last, parameters, kernel.geometry]
    machine.load(ptx or kernel.ptx).launch(
        grid=(kernel.blocks, relays),
        block=kernel.threads,
        cluster=kernel.cluster,
        shared_bytes=kernel.shared_bytes,
        args=args,
        budget=3_000_000,
        trace=trace,
    )
    return floats(output.read())


def with_pointer(parameters: bytes, placeholder: int, pointer: DevicePointer) -> bytes:
    """Puts a pointer into parameters, where the Mojo side put the placeholder."""
    old = placeholder.to_bytes(8, "little")
    # The bytes behind the last field are whatever was there, which may be the pointer again.
    assert old in parameters
    return parameters.replace(old, int(pointer).to_bytes(8, "little"))


def tensor_maps(
    kernel: Kernel,
    operands: Operands,
    pointers: tuple[SupportsInt, SupportsInt, SupportsInt],
    kind: DataType = DataType.BFLOAT16,
) -> list[TensorMap]:
    """The maps that ``operations/nvidia/sm90/gemm/launch.mojo`` encodes.

    ``kind`` is that of activation and filter.
    """
    activation, weights, output = pointers
    height, width, channels = operands.activation.shape
    filters, border = len(operands.filter), operands.taps // 2
    stored = DataType.BFLOAT16
    options: dict[str, Any] = {"swizzle": Swizzle.B128, "l2_promotion": L2Promotion.L2_256B}
    pixels = (channels, width, height, 1)
    taps = (channels, operands.taps**2, filters)
    matrix = (kernel.end, height * width, filters // kernel.end)
    filter_map = TensorMap.tiled(
        kind,
        weights,
        taps,
        packed_strides(taps, kind),
        (channels, 1, kernel.load_filters),
        **options,
    )
    return [
        TensorMap.im2col(
            kind,
            activation,
            pixels,
            packed_strides(pixels, kind),
            (-border, -border),
            (kernel.upper, border - (operands.taps - 1)),
            channels,
            kernel.load_pixels,
            **options,
        ),
        filter_map,
        # A kernel whose threads store is passed no map of the output.
        filter_map
        if kernel.rows
        else TensorMap.tiled(
            stored,
            output,
            matrix,
            (2 * filters, 2 * kernel.end),
            (64, kernel.store_pixels, 1),
            **options,
        ),
    ]


def _residual_map(kernel: Kernel, operands: Operands, residual: SupportsInt) -> TensorMap:
    """The residual's, of tiles without a halo."""
    height, width, filters = operands.output_shape
    extents = (filters, width, height)
    return TensorMap.im2col(
        DataType.BFLOAT16,
        residual,
        extents,
        packed_strides(extents, DataType.BFLOAT16),
        (0,),
        (0,),
        64,
        kernel.store_pixels,
        swizzle=Swizzle.B128,
        l2_promotion=L2Promotion.L2_256B,
    )


def case(kernel: Kernel, operands: Operands) -> Case:
    """The same launch as a case, which a GPU runs too."""
    data = [bfloat16(values) for values in (operands.activation, operands.filter, operands.bias)]
    offsets = [kernel.parameters.index(p.to_bytes(8, "little")) for p in (OUTPUT, BIAS)]
    parameters = Struct(kernel.parameters, ((offsets[0], -1), (offsets[1], 2)))
    maps = [
        Map(array, tensor.descriptor)
        for array, tensor in zip((0, 1, -1), tensor_maps(kernel, operands, (0, 0, 0)), strict=True)
    ]
    name = re.search(r"\.entry (\w+)", kernel.ptx)
    assert name is not None
    return Case(
        name[1],
        kernel.ptx,
        tuple(data),
        bfloat16(operands.expected()),
        block=kernel.threads,
        grid=kernel.blocks,
        cluster=kernel.cluster,
        shared=kernel.shared_bytes,
        passed=(*maps, maps[-1], parameters, Struct(kernel.geometry)),
    )
