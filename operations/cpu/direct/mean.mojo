"""The mean over each image's pixels on a CPU: lanes are channels. Integers are
added up exactly."""

from std.math import ceildiv
from std.math.uutils import udivmod
from std.utils.numerics import max_finite, min_finite

from ...conv.memory import CACHE_LINE, Reads, Writes
from ...conv.quantization import Quantization, Steps
from ..config import LANES
from ..pool import Pool, Work, run_tasks
from ..rounding import rounded

comptime WIDTHS = [4 * LANES, LANES, 4, 1]
"""Channels that are added up at once: as many as are left."""

comptime BLOCK = 64
"""Pixels whose sum is added to that of those in front: the error of a float32
sum grows with how many are added one after the other."""

comptime MIN_TASK_ELEMENTS = 1 << 15
"""Elements below which a task is not worth waking a thread for."""

comptime UNIT = CACHE_LINE
"""Channels that a task has multiples of: their outputs fill whole cache lines."""


@fieldwise_init
struct Means[dtype: DType, out_dtype: DType](ImplicitlyCopyable, Movable):
    """The means of `[images, pixels, channels]`: `[images, channels]`, each
    `sum * factor + shift`, which integers are rounded from.

    Parameters:
        dtype: Of the elements: a float, int8 or uint8.
        out_dtype: Of the means: the same.
    """

    comptime Sum = DType.int32 if Self.dtype.is_integral() else DType.float32
    """The sums' type."""

    var input: Reads[Self.dtype]
    var output: Writes[Self.out_dtype]
    var images: Int
    var pixels: Int
    var channels: Int
    var factor: Float32
    var shift: Float32
    var quantization: Quantization
    """Of integers that come out."""

    def mean[width: Int](self, image: Int, channel: Int):
        """Computes some channels of an image.

        Parameters:
            width: How many.

        Args:
            image: Which.
            channel: The first.
        """
        var first = self.input.unsafe_offset(
            image * self.pixels * self.channels + channel
        )
        var sums = SIMD[Self.Sum, width](0)
        var begin = 0
        while begin < self.pixels:
            var end = min(self.pixels, begin + BLOCK)
            var block = SIMD[Self.Sum, width](0)
            for pixel in range(begin, end):
                block += first.unsafe_load[width=width](
                    pixel * self.channels
                ).cast[Self.Sum]()
            sums += block
            begin = end
        var values = sums.cast[DType.float32]() * self.factor + self.shift
        var to = self.output.unsafe_offset(image * self.channels + channel)
        comptime if Self.out_dtype.is_integral():
            comptime low = min_finite[DType.float32]()
            comptime high = max_finite[DType.float32]()
            var steps = Steps.of[Self.out_dtype](self.quantization, low, high)
            to.unsafe_store(0, steps.apply[Self.out_dtype](values))
        else:
            to.unsafe_store(0, rounded[Self.out_dtype](values))


@fieldwise_init
struct _Blocks[dtype: DType, out_dtype: DType](Work):
    """Means, with an image's channels in blocks.

    Parameters:
        dtype: Of the elements.
        out_dtype: Of the means.
    """

    var means: Means[Self.dtype, Self.out_dtype]
    var block: Int
    """Channels of a task."""

    def run(self, worker: Int, task: Int):
        var image, block = udivmod(
            task, ceildiv(self.means.channels, self.block)
        )
        var channel = block * self.block
        var end = min(self.means.channels, channel + self.block)
        comptime for width in WIDTHS:
            while channel + width <= end:
                self.means.mean[width](image, channel)
                channel += width


def compute_means(means: Means, pool: Some[Pool]) raises:
    """Computes all means.

    Args:
        means: Where they are.
        pool: The threads.

    Raises:
        If the threads refuse the work.
    """
    var elements = means.images * means.pixels * means.channels
    var workers = min(pool.threads(), elements // MIN_TASK_ELEMENTS)
    var blocks = ceildiv(max(1, workers), max(1, means.images))
    var block = ceildiv(ceildiv(means.channels, blocks), UNIT) * UNIT
    var tasks = means.images * ceildiv(means.channels, block)
    var work = _Blocks(means, block)
    run_tasks(pool, work, tasks, min(workers, tasks))
