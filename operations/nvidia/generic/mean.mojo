"""The mean over each image's pixels (global average pooling), on the CUDA cores
of any GPU.

A block adds up some channels of an image, a warp's lanes beside each other along
the channels. Images of many pixels and few channels are shared by the blocks of
a cluster:

    wait for the kernel before
    pixels -> registers, `UNROLL` loads in flight -> sums of a thread
    sums -> shuffles -> sums of a warp -> shared memory -> sums of a block
    sums of a block -> shared memory of the cluster's first block
    first block: sums / pixels -> output

Every sum is taken in one order, which depends on the shape and on the number of
multiprocessors alone.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    thread_idx,
)
from max.gpu.memory import external_memory
from max.gpu.primitives.warp import shuffle_xor
from max.gpu.sync import barrier
from std.sys.info import size_of
from std.utils import IndexList, StaticTuple

from ...conv.access import OutputTarget
from ...conv.device_value import DeviceValue
from ...conv.memory import Reads
from ...conv.pooling import Reduction
from ...conv.problem import SPATIAL
from ..device import target_capability
from ...conv.divisor import Divisor
from ..limits import MAX_CLUSTER, WARP
from ..overlap import wait_for_earlier_kernels
from ..pipeline.barrier import sync_cluster, sync_cluster_relaxed
from ..pipeline.chunks import shared_pointer
from ..pipeline.exchange import (
    QUAD,
    QUAD_BYTES,
    Quad,
    peer_address,
    store_peer,
)

comptime THREADS = 256
"""Threads of a block."""

comptime WARPS = THREADS // WARP

comptime RESIDENT = 3
"""Blocks of a multiprocessor for which registers suffice. Without it ptxas makes
room for as many as threads allow, and no room for loads in flight."""

comptime UNROLL = 8
"""Loads of a thread in flight."""

comptime LOAD_BYTES = 16
"""Bytes that a thread loads at once, at most."""

comptime FIRST_CLUSTERS = 90
"""The first compute capability, times ten, that has clusters."""


@fieldwise_init
struct MeanGeometry(DeviceValue, TrivialRegisterPassable):
    """The shape of a mean, for the kernel."""

    var pixels: UInt32
    """Of an image."""
    var channels: UInt32
    var parts: Divisor
    """Blocks that share an image's channels: those of a cluster."""
    var columns: Divisor
    """Blocks of an image along the channels."""
    var share: Float32
    """One over the pixels."""


@fieldwise_init
struct MeanKernel[dtype: DType, width: Int, lanes: Int, Output: OutputTarget]:
    """The kernel for one shape of blocks.

    Parameters:
        dtype: Of input and output. Sums are float32.
        width: Channels of one load: 1, or a power of two that divides the
            channels.
        lanes: Threads of a block beside each other along the channels: a power
            of two up to `WARP`, `QUAD` channels at least.
        Output: How the output is reached.
    """

    comptime rows = THREADS // Self.lanes
    """Pixels that a block loads at once."""
    comptime filters = Self.lanes * Self.width
    """Channels of a block."""
    comptime Sums = SIMD[DType.float32, Self.width]
    comptime quads = Self.filters // QUAD
    comptime row_bytes = UInt32(4 * Self.filters)
    comptime shared_bytes = (WARPS + MAX_CLUSTER) * Int(Self.row_bytes)
    """The sums of the block's warps, and those of the cluster's blocks."""

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
        `nvvm.minctasm`=SIMDLength(RESIDENT),
    )
    def run(
        input: Reads[Self.dtype],
        output: Self.Output,
        geometry: MeanGeometry,
    ):
        """Averages some channels of an image.

        Args:
            input: `[N, pixels, C]`.
            output: `[N, 1, 1, 1, C]`.
            geometry: The shape.
        """
        var shared = UInt32(
            Int(
                external_memory[
                    Float32, address_space=AddressSpace.SHARED, alignment=16
                ]()
            )
        )
        var group, part = geometry.parts.split(UInt32(block_idx.x))
        var image, block = geometry.columns.split(group)
        var first = block * UInt32(Self.filters)
        var thread = UInt32(thread_idx.x)
        var row, lane = divmod(thread, UInt32(Self.lanes))
        # Lanes without channels add up the last ones again.
        var channel = min(
            first + lane * UInt32(Self.width),
            geometry.channels - UInt32(Self.width),
        )
        var image_start = Int(image) * Int(geometry.pixels)
        var data = input.unsafe_offset(
            image_start * Int(geometry.channels) + Int(channel)
        )
        comptime if target_capability() >= FIRST_CLUSTERS:
            # Only a block that runs has shared memory to write to.
            if geometry.parts.value > 1:
                sync_cluster_relaxed()
        wait_for_earlier_kernels()
        var sums = Self._sum_pixels(data, geometry, part, row)
        comptime for i in range(5):
            comptime distance = WARP >> (i + 1)
            comptime if distance >= Self.lanes:
                comptime for j in range(Self.width):
                    sums[j] += shuffle_xor(sums[j], UInt32(distance))
        var warp, in_warp = divmod(thread, UInt32(WARP))
        if in_warp < UInt32(Self.lanes):
            var at = shared + warp * Self.row_bytes
            shared_pointer[DType.float32](
                at + lane * UInt32(4 * Self.width)
            ).unsafe_store[alignment=4 * min(Self.width, QUAD)](0, sums)
        barrier()
        var quad = thread * UInt32(QUAD_BYTES)
        var total = Quad()
        if thread < UInt32(Self.quads):
            total = Self._add_rows(shared + quad, UInt32(WARPS))
        comptime if target_capability() >= FIRST_CLUSTERS:
            if geometry.parts.value > 1:
                var exchange = shared + UInt32(WARPS) * Self.row_bytes + quad
                if thread < UInt32(Self.quads):
                    store_peer(
                        peer_address(exchange + part * Self.row_bytes, 0), total
                    )
                sync_cluster()
                if part != 0:
                    return
                if thread < UInt32(Self.quads):
                    total = Self._add_rows(exchange, geometry.parts.value)
        if thread < UInt32(Self.quads):
            var row_start = Int(image) * Int(geometry.channels)
            comptime for i in range(QUAD):
                var c = first + thread * UInt32(QUAD) + UInt32(i)
                if c < geometry.channels:
                    var mean = Reduction[Self.dtype, True].rounded[1](
                        total[i] * geometry.share
                    )
                    output.store[1](
                        Int(image),
                        IndexList[SPATIAL](0, 0, 0),
                        Int(c),
                        row_start + Int(c),
                        rebind[Scalar[Self.Output.dtype]](mean),
                    )

    @staticmethod
    @always_inline
    def _sum_pixels(
        data: Reads[Self.dtype],
        geometry: MeanGeometry,
        part: UInt32,
        row: UInt32,
    ) -> Self.Sums:
        """Adds up a thread's pixels of its channels."""
        var stride = geometry.parts.value * UInt32(Self.rows)
        var sums = Self.Sums(0)
        for pixel in range(
            part * UInt32(Self.rows) + row,
            geometry.pixels,
            stride * UInt32(UNROLL),
        ):
            var loaded = StaticTuple[SIMD[Self.dtype, Self.width], UNROLL](
                fill=0
            )
            comptime for i in range(UNROLL):
                # No load is behind a branch, where the next would wait for it.
                var at = min(pixel + UInt32(i) * stride, geometry.pixels - 1)
                loaded[i] = data.unsafe_load[
                    width=Self.width,
                    alignment=Self.width * size_of[Self.dtype](),
                ](Int(at) * Int(geometry.channels))
            comptime for i in range(UNROLL):
                if pixel + UInt32(i) * stride < geometry.pixels:
                    sums += loaded[i].cast[DType.float32]()
        return sums

    @staticmethod
    @always_inline
    def _add_rows(address: UInt32, count: UInt32) -> Quad:
        """Adds up rows of this block's shared memory, in their order."""
        var total = Quad(0)
        for i in range(count):
            total += shared_pointer[DType.float32](
                address + i * Self.row_bytes
            ).unsafe_load[width=QUAD, alignment=QUAD_BYTES](0)
        return total
