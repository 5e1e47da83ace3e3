"""Pooling on the CUDA cores of any GPU: memory decides how long it takes.

A thread has neighbouring channels of an item, `COLUMNS` output pixels of a row.
Threads beside each other have the channels beside each other. Where window and
stride along w are known, all pixels of a window's row are loaded before the
first is used, each once for all the outputs that it belongs to.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from std.sys.info import size_of
from std.utils import IndexList, StaticTuple

from ...conv.access import OutputTarget
from ...conv.device_value import DeviceValue
from ...conv.memory import Reads
from ...conv.pooling import PoolProblem, Reduction
from ...conv.problem import SPATIAL
from ..overlap import wait_for_earlier_kernels
from .depthwise import InputRow, Item
from .depthwise_geometry import COLUMNS, THREADS, DepthwiseGeometry

comptime RESIDENT = 5
"""Blocks of a multiprocessor for which registers suffice. Without it ptxas makes
room for as many as threads allow, and no room for loads in flight."""

comptime MAX_PIXELS = 13
"""Pixels of a row that a thread holds, at most: 7 taps with stride 2."""


def pixels_of_row(taps: Int, stride: Int) -> Int:
    """Input pixels of a row that an item's windows span.

    Args:
        taps: Of the window along w, next to each other.
        stride: Along w.
    """
    return (COLUMNS - 1) * stride + taps


@fieldwise_init
struct PoolGeometry(DeviceValue, ImplicitlyCopyable, Movable):
    """A pooling as the kernel sees it."""

    var image: DepthwiseGeometry
    """The depthwise convolution whose filter is the window."""
    var share: Float32
    """The pooling's."""
    var pooling: PoolProblem
    """For those that do."""


@fieldwise_init
struct PoolKernel[
    dtype: DType,
    average: Bool,
    Output: OutputTarget,
    width: Int,
    taps: Int,
    stride: Int,
]:
    """The kernel of a window.

    Parameters:
        dtype: Of input and output.
        average: Whether it is the mean, not the largest element.
        Output: How the output is reached.
        width: Neighbouring channels of a thread.
        taps: Of the window along w, next to each other, or 0: any.
        stride: Along w; of any number of taps it is not read.
    """

    comptime Values = Reduction[Self.dtype, Self.average]
    comptime Loaded = SIMD[Self.dtype, Self.width]
    comptime Vector = SIMD[Self.Values.accumulator, Self.width]
    comptime Row = StaticTuple[Self.Vector, COLUMNS]

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
        `nvvm.minctasm`=SIMDLength(RESIDENT),
    )
    def run(
        input: Reads[Self.dtype], output: Self.Output, geometry: PoolGeometry
    ):
        """A block: some items, and some of the channels.

        Args:
            input: `[N, D, H, W, C]`.
            output: `[N, Z, P, Q, C]`.
            geometry: The problem.
        """
        ref image = geometry.image
        var worker, slab = image.slabs.split(UInt32(block_idx.x))
        var strip, lane = image.lanes.split(UInt32(thread_idx.x))
        var vector = slab * image.lanes.value + lane
        var index = worker * image.block_items + strip
        wait_for_earlier_kernels()
        if (
            vector >= image.vectors
            or strip >= image.block_items
            or index >= image.items
        ):
            return
        var item = Item.of(image, index)
        var channel = Int(vector) * Self.width
        var held = Self.Row(fill=Self.Values.neutral[Self.width]())
        for t in range(image.taps_d):
            for r in range(image.taps_h):
                var line = InputRow.of(
                    image,
                    item.image,
                    item.d + t * image.dilation_d,
                    item.h + r * image.dilation_h,
                )
                if not line.inside:
                    continue
                var row = input.unsafe_offset(line.offset + channel)
                comptime if Self.taps > 0:
                    Self._add_row(row, image, item, held)
                else:
                    Self._add_taps(row, image, item, held)
        Self._store(output, geometry, item, channel, held)

    @staticmethod
    @always_inline
    def _load(
        row: Reads[Self.dtype], image: DepthwiseGeometry, w: Int32
    ) -> Self.Loaded:
        """Loads a pixel, or what changes nothing outside the image. There it
        loads the nearest pixel and drops it, so that there is no branch."""
        var column = max(Int32(0), min(w, image.width - 1))
        var value = row.unsafe_load[
            width=Self.width, alignment=Self.width * size_of[Self.dtype]()
        ](Int(UInt32(column) * image.channels))
        var inside = UInt32(w) < UInt32(image.width)
        return value if inside else Self.Values.neutral[Self.width]().cast[
            Self.dtype
        ]()

    @staticmethod
    @always_inline
    def _add_row(
        row: Reads[Self.dtype],
        image: DepthwiseGeometry,
        item: Item,
        mut held: Self.Row,
    ):
        """Adds a row of the item's windows."""
        comptime pixels = pixels_of_row(Self.taps, Self.stride)
        var loaded = StaticTuple[Self.Loaded, pixels](fill=Self.Loaded(0))
        comptime for j in range(pixels):
            loaded[j] = Self._load(row, image, item.w + Int32(j))
        comptime for q in range(COLUMNS):
            comptime for s in range(Self.taps):
                held[q] = Self.Values.combine(
                    held[q], Self.Values.held(loaded[q * Self.stride + s])
                )

    @staticmethod
    @always_inline
    def _add_taps(
        row: Reads[Self.dtype],
        image: DepthwiseGeometry,
        item: Item,
        mut held: Self.Row,
    ):
        """Adds a row of the item's windows, tap by tap."""
        for s in range(image.taps_w):
            comptime for q in range(COLUMNS):
                var w = item.w + s * image.dilation_w
                w += Int32(q) * image.step_w
                held[q] = Self.Values.combine(
                    held[q],
                    Self.Values.held(Self._load(row, image, w)),
                )

    @staticmethod
    @always_inline
    def _store(
        output: Self.Output,
        geometry: PoolGeometry,
        item: Item,
        channel: Int,
        result: Self.Row,
    ):
        """Stores those outputs of an item that exist."""
        ref image = geometry.image
        var plane = item.image * Int(image.out_planes.value) + Int(item.plane)
        var line = plane * Int(image.out_rows.value) + Int(item.row)
        var rows = 0
        comptime if Self.average:
            if geometry.share == 0:
                rows = geometry.pooling.counted(
                    0, Int(item.plane)
                ) * geometry.pooling.counted(1, Int(item.row))
        comptime for q in range(COLUMNS):
            var column = item.column + UInt32(q)
            if column < image.out_columns:
                var value = result[q]
                comptime if Self.average:
                    var share = geometry.share
                    if share == 0:
                        share = 1 / Float32(
                            rows * geometry.pooling.counted(2, Int(column))
                        )
                    value *= share.cast[Self.Values.accumulator]()
                var pixel = line * Int(image.out_columns) + Int(column)
                output.store[Self.width](
                    item.image,
                    IndexList[SPATIAL](
                        Int(item.plane), Int(item.row), Int(column)
                    ),
                    channel,
                    pixel * Int(image.filters) + channel,
                    rebind[SIMD[Self.Output.dtype, Self.width]](
                        Self.Values.rounded(value)
                    ),
                )
