"""Group normalization (Wu and He, "Group Normalization", ECCV 2018) of images
with their channels last, on the CUDA cores of any GPU: memory decides how long
it takes.

    moments     pixels -> sums of each channel, one pair a block -> memory
    finish      sums of a group's channels -> its mean and variance
                -> scale and shift of each channel -> memory
    normalize   pixels * scale + shift -> activation -> output

Sums are of differences from the image's first pixel: a sum of squares of what
lies far from 0 has no digits left for the variance. Every sum is taken in one
order, which depends on the shape and on the number of multiprocessors alone.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.memory import external_memory
from max.gpu.primitives.warp import shuffle_xor
from max.gpu.sync import barrier
from std.math import rsqrt
from std.sys.info import size_of
from std.utils import StaticTuple

from ...conv.access import OutputTarget
from ...conv.device_value import DeviceValue
from ...conv.divisor import Divisor
from ...conv.memory import Reads, Writes
from ..epilogue.activations import DeviceActivation
from ..limits import WARP
from ..overlap import wait_for_earlier_kernels
from ..pipeline.chunks import shared_pointer
from .norm import PixelSizes, activated

comptime THREADS = 256
"""Threads of a block."""

comptime WARPS = THREADS // WARP

comptime RESIDENT = 3
"""Blocks of a multiprocessor for which registers suffice. Without it ptxas makes
room for as many as threads allow, and no room for loads in flight."""

comptime UNROLL = 8
"""Loads of a thread in flight where pixels are summed."""

comptime APPLIED = 4
"""Loads of a thread in flight where pixels are normalized."""

comptime MOMENTS = 2
"""Numbers of a channel that a block leaves: the sum of differences, and of their
squares."""

comptime COEFFICIENTS = 2
"""Numbers of a channel that the last kernel takes: scale and shift."""


@fieldwise_init
struct NormGeometry(DeviceValue, TrivialRegisterPassable):
    """The shape of a normalization, for its kernels."""

    var pixels: UInt32
    """Of an image."""
    var channels: UInt32
    var parts: Divisor
    """Blocks that share some channels of an image."""
    var columns: Divisor
    """Blocks of an image along the channels."""
    var part_pixels: UInt32
    """Pixels of a block; the last one may have fewer."""
    var sizes: PixelSizes


@fieldwise_init
struct GroupGeometry(DeviceValue, TrivialRegisterPassable):
    """The groups of a normalization, for the kernel that combines sums."""

    var pixels: UInt32
    """Of an image."""
    var channels: UInt32
    """Of a pixel."""
    var groups: Divisor
    var group_channels: UInt32
    var parts: UInt32
    """Pairs of sums of a channel."""
    var part_pixels: UInt32
    """Pixels of a pair; the last one may have fewer."""
    var lanes: Divisor
    """Threads of a block beside each other along a group's channels: a power of
    two."""
    var epsilon: Float32


@fieldwise_init
struct Moments(TrivialRegisterPassable):
    """Mean and squared differences of some numbers (Chan, Golub and LeVeque,
    "Algorithms for Computing the Sample Variance", The American Statistician,
    1983)."""

    var count: Float32
    var mean: Float32
    var squares: Float32
    """The sum of squared differences from the mean."""

    @always_inline
    def with_others(self, others: Moments) -> Moments:
        """Those of both.

        Args:
            others: Other numbers'.
        """
        if others.count == 0:
            return self
        var count = self.count + others.count
        var share = others.count / count
        var delta = others.mean - self.mean
        return Moments(
            count,
            self.mean + delta * share,
            self.squares + others.squares + delta * delta * self.count * share,
        )


@fieldwise_init
struct Place(TrivialRegisterPassable):
    """What a thread has of an image: neighbouring channels of some pixels."""

    var image: UInt32
    var part: UInt32
    var first: UInt32
    """The first channel of the block."""
    var lane: UInt32
    var channel: UInt32
    """The thread's first one."""
    var begin: UInt32
    """The thread's first pixel."""
    var end: UInt32
    """Where the block's pixels end."""

    @staticmethod
    @always_inline
    def of[width: Int, lanes: Int](geometry: NormGeometry) -> Place:
        """The calling thread's.

        Parameters:
            width: Channels of a thread.
            lanes: Threads beside each other along the channels.

        Args:
            geometry: The shape.
        """
        var group, part = geometry.parts.split(UInt32(block_idx.x))
        var image, column = geometry.columns.split(group)
        var row, lane = divmod(UInt32(thread_idx.x), UInt32(lanes))
        var first = column * UInt32(lanes * width)
        var begin = part * geometry.part_pixels
        return Place(
            image,
            part,
            first,
            lane,
            # Lanes without channels have the last ones again.
            min(
                first + lane * UInt32(width), geometry.channels - UInt32(width)
            ),
            begin + row,
            min(begin + geometry.part_pixels, geometry.pixels),
        )


@always_inline
def load_pixels[
    dtype: DType, //, width: Int, count: Int
](
    data: Reads[dtype],
    first: UInt32,
    stride: UInt32,
    end: UInt32,
    channels: UInt32,
) -> StaticTuple[SIMD[dtype, width], count]:
    """Loads a thread's channels of some pixels.

    Parameters:
        dtype: Of the elements.
        width: Channels.
        count: Pixels.

    Args:
        data: The thread's first channel of the image's first pixel.
        first: The first pixel, before `end`.
        stride: From one pixel to the next.
        end: Behind the last pixel; in place of what lies there the last pixel is
            loaded: no load is behind a branch, where the next would wait for it.
        channels: Of a pixel.
    """
    var loaded = StaticTuple[SIMD[dtype, width], count](fill=0)
    comptime for i in range(count):
        var at = min(first + UInt32(i) * stride, end - 1)
        loaded[i] = data.unsafe_load[
            width=width, alignment=width * size_of[dtype]()
        ](Int(at) * Int(channels))
    return loaded


@fieldwise_init
struct MomentsKernel[dtype: DType, width: Int, lanes: Int]:
    """The kernel that sums pixels.

    Parameters:
        dtype: Of the input.
        width: Channels of one load: 1, or a power of two that divides the
            channels.
        lanes: Threads of a block beside each other along the channels: a power
            of two up to `WARP`.
    """

    comptime rows = THREADS // Self.lanes
    """Pixels that a block loads at once."""
    comptime filters = Self.lanes * Self.width
    """Channels of a block."""
    comptime Vector = SIMD[DType.float32, Self.width]
    comptime shared_bytes = 4 * MOMENTS * WARPS * Self.filters

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
        `nvvm.minctasm`=SIMDLength(RESIDENT),
    )
    def run(
        input: Reads[Self.dtype],
        sums: Writes[DType.float32],
        geometry: NormGeometry,
    ):
        """Sums some pixels of some channels.

        Args:
            input: `[N, pixels, C]`.
            sums: `[N, parts, MOMENTS, C]`.
            geometry: The shape.
        """
        var place = Place.of[Self.width, Self.lanes](geometry)
        wait_for_earlier_kernels()
        var totals = Self._sum_pixels(input, geometry, place)
        var shared = UInt32(
            Int(
                external_memory[
                    Float32, address_space=AddressSpace.SHARED, alignment=16
                ]()
            )
        )
        Self._leave(shared, place, totals)
        barrier()
        var image_part = Int(place.image) * Int(geometry.parts.value) + Int(
            place.part
        )
        for i in range(Int(thread_idx.x), MOMENTS * Self.filters, THREADS):
            var total = Float32(0)
            comptime for warp in range(WARPS):
                total += shared_pointer[DType.float32](
                    shared + UInt32(4 * (warp * MOMENTS * Self.filters + i))
                ).unsafe_load(0)
            var moment, filter = divmod(i, Self.filters)
            var channel = Int(place.first) + filter
            if channel < Int(geometry.channels):
                var row = image_part * MOMENTS + moment
                sums.unsafe_store(row * Int(geometry.channels) + channel, total)

    @staticmethod
    @always_inline
    def _sum_pixels(
        input: Reads[Self.dtype], geometry: NormGeometry, place: Place
    ) -> StaticTuple[Self.Vector, MOMENTS]:
        """Sums a thread's pixels, as differences from the image's first."""
        var data = input.unsafe_offset(
            Int(place.image) * Int(geometry.pixels) * Int(geometry.channels)
            + Int(place.channel)
        )
        comptime alignment = Self.width * size_of[Self.dtype]()
        var pivot = data.unsafe_load[width=Self.width, alignment=alignment](
            0
        ).cast[DType.float32]()
        var sums = Self.Vector(0)
        var squares = Self.Vector(0)
        comptime stride = UInt32(Self.rows)
        for pixel in range(place.begin, place.end, stride * UInt32(UNROLL)):
            var loaded = load_pixels[Self.width, UNROLL](
                data, pixel, stride, place.end, geometry.channels
            )
            comptime for i in range(UNROLL):
                if pixel + UInt32(i) * stride < place.end:
                    var difference = loaded[i].cast[DType.float32]() - pivot
                    sums += difference
                    squares = difference.fma(difference, squares)
        var totals = StaticTuple[Self.Vector, MOMENTS](fill=sums)
        totals[1] = squares
        return totals

    @staticmethod
    @always_inline
    def _leave(
        shared: UInt32,
        place: Place,
        totals: StaticTuple[Self.Vector, MOMENTS],
    ):
        """Leaves a warp's sums in shared memory, `[warp, MOMENTS, filters]`."""
        var warp, in_warp = divmod(UInt32(thread_idx.x), UInt32(WARP))
        comptime for moment in range(MOMENTS):
            var value = totals[moment]
            comptime for i in range(5):
                comptime distance = WARP >> (i + 1)
                comptime if distance >= Self.lanes:
                    comptime for j in range(Self.width):
                        value[j] += shuffle_xor(value[j], UInt32(distance))
            if in_warp < UInt32(Self.lanes):
                var row = warp * UInt32(MOMENTS) + UInt32(moment)
                var at = row * UInt32(Self.filters) + place.lane * UInt32(
                    Self.width
                )
                shared_pointer[DType.float32](shared + 4 * at).unsafe_store[
                    alignment=4 * min(Self.width, 4)
                ](0, value)


@fieldwise_init
struct FinishKernel[dtype: DType, weight_type: DType]:
    """The kernel that makes of sums what each channel is multiplied with, and
    what is added: a block for each group of each image.

    Parameters:
        dtype: Of the input.
        weight_type: Of weight and bias.
    """

    comptime fields = 3
    """Of `Moments`."""
    comptime shared_bytes = 4 * Self.fields * WARPS
    """Moments of a warp."""

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS))
    )
    def run(
        input: Reads[Self.dtype],
        sums: Reads[DType.float32],
        weight: Reads[Self.weight_type],
        bias: Reads[Self.weight_type],
        affine: UInt32,
        coefficients: Writes[DType.float32],
        geometry: GroupGeometry,
    ):
        """Combines the sums of a group.

        Args:
            input: `[N, pixels, C]`.
            sums: `[N, parts, MOMENTS, C]`, of differences from each image's
                first pixel.
            weight: `[C]`; not read unless `affine`.
            bias: The same.
            affine: Whether the normalized values are multiplied with the weight
                and the bias is added.
            coefficients: `[N, COEFFICIENTS, C]`.
            geometry: The groups.
        """
        var image, group = geometry.groups.split(UInt32(block_idx.x))
        var row, lane = geometry.lanes.split(UInt32(thread_idx.x))
        var first = Int(group * geometry.group_channels)
        var channels = Int(geometry.channels)
        wait_for_earlier_kernels()
        var pixel = input.unsafe_offset(
            Int(image) * Int(geometry.pixels) * channels + first
        )
        var own = sums.unsafe_offset(
            Int(image) * Int(geometry.parts) * MOMENTS * channels + first
        )
        var held = Moments(0, 0, 0)
        for channel in range(
            lane, geometry.group_channels, geometry.lanes.value
        ):
            var total = Float32(0)
            var squares = Float32(0)
            var count = UInt32(0)
            for part in range(
                row, geometry.parts, UInt32(THREADS) // geometry.lanes.value
            ):
                var at = Int(part) * MOMENTS * channels + Int(channel)
                total += own.unsafe_load(at)
                squares += own.unsafe_load(at + channels)
                count += min(
                    geometry.part_pixels,
                    geometry.pixels - part * geometry.part_pixels,
                )
            if count == 0:
                continue
            var mean = total / Float32(count)
            held = held.with_others(
                Moments(
                    Float32(count),
                    pixel.unsafe_load(Int(channel)).cast[DType.float32]()
                    + mean,
                    squares - total * mean,
                )
            )
        held = Self._of_block(held)
        # The deviation's square is the mean of the squared differences.
        var rate = rsqrt(held.squares / held.count + geometry.epsilon)
        var to = coefficients.unsafe_offset(
            Int(image) * COEFFICIENTS * channels + first
        )
        for channel in range(
            UInt32(thread_idx.x), geometry.group_channels, UInt32(THREADS)
        ):
            var scale = rate
            var shift = Float32(0)
            if affine != 0:
                var c = first + Int(channel)
                scale *= weight.unsafe_load(c).cast[DType.float32]()
                shift = bias.unsafe_load(c).cast[DType.float32]()
            to.unsafe_store(Int(channel), scale)
            to.unsafe_store(channels + Int(channel), shift - held.mean * scale)

    @staticmethod
    @always_inline
    def _of_block(own: Moments) -> Moments:
        """Combines the moments of a block's threads; each thread has the
        result."""
        var held = own
        comptime for i in range(5):
            comptime distance = UInt32(1 << i)
            held = held.with_others(
                Moments(
                    shuffle_xor(held.count, distance),
                    shuffle_xor(held.mean, distance),
                    shuffle_xor(held.squares, distance),
                )
            )
        var shared = UInt32(
            Int(
                external_memory[
                    Float32, address_space=AddressSpace.SHARED, alignment=16
                ]()
            )
        )
        var warp, in_warp = divmod(UInt32(thread_idx.x), UInt32(WARP))
        if in_warp == 0:
            var to = shared_pointer[DType.float32](
                shared + warp * UInt32(4 * Self.fields)
            )
            to.unsafe_store(0, held.count)
            to.unsafe_store(1, held.mean)
            to.unsafe_store(2, held.squares)
        barrier()
        var result = Moments(0, 0, 0)
        comptime for i in range(WARPS):
            var from_ = shared_pointer[DType.float32](
                shared + UInt32(4 * Self.fields * i)
            )
            result = result.with_others(
                Moments(
                    from_.unsafe_load(0),
                    from_.unsafe_load(1),
                    from_.unsafe_load(2),
                )
            )
        return result


@fieldwise_init
struct NormalizeKernel[
    dtype: DType, width: Int, lanes: Int, Output: OutputTarget
]:
    """The kernel that scales and shifts pixels.

    Parameters:
        dtype: Of input and output.
        width: Channels of one load, as `MomentsKernel` has it.
        lanes: Threads of a block beside each other along the channels.
        Output: How the output is reached.
    """

    comptime rows = THREADS // Self.lanes
    """Pixels that a block loads at once."""

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
        `nvvm.minctasm`=SIMDLength(RESIDENT),
    )
    def run(
        input: Reads[Self.dtype],
        coefficients: Reads[DType.float32],
        output: Self.Output,
        activation: DeviceActivation,
        geometry: NormGeometry,
    ):
        """Normalizes some pixels of some channels.

        Args:
            input: `[N, D, H, W, C]`.
            coefficients: `[N, COEFFICIENTS, C]`.
            output: `[N, D, H, W, C]`.
            activation: What follows the normalization.
            geometry: The shape.
        """
        var place = Place.of[Self.width, Self.lanes](geometry)
        var channels = Int(geometry.channels)
        var start = Int(place.image) * Int(geometry.pixels) * channels + Int(
            place.channel
        )
        var data = input.unsafe_offset(start)
        wait_for_earlier_kernels()
        var own = coefficients.unsafe_offset(
            Int(place.image) * COEFFICIENTS * channels + Int(place.channel)
        )
        comptime aligned = 4 * min(Self.width, 4)
        var scale = own.unsafe_load[width=Self.width, alignment=aligned](0)
        var shift = own.unsafe_load[width=Self.width, alignment=aligned](
            channels
        )
        comptime stride = UInt32(Self.rows)
        comptime exact = Self.dtype == DType.float32
        for pixel in range(place.begin, place.end, stride * UInt32(APPLIED)):
            var loaded = load_pixels[Self.width, APPLIED](
                data, pixel, stride, place.end, geometry.channels
            )
            comptime for i in range(APPLIED):
                var at = pixel + UInt32(i) * stride
                if at < place.end:
                    var value = loaded[i].cast[DType.float32]()
                    output.store[Self.width](
                        Int(place.image),
                        geometry.sizes.at[Self.Output](at),
                        Int(place.channel),
                        start + Int(at) * channels,
                        activated[exact=exact](
                            activation, value.fma(scale, shift)
                        ).cast[Self.Output.dtype](),
                    )
