"""What a zero point of the activation takes from the sums of its products.

    sum((x - zero_point) * filter) = sum(x * filter) - zero_point * sum(filter)

Both sums are over the taps inside the image, of which an output has as many as
its neighbours but at the borders. A table has the second for each class of
outputs that share their taps, and each filter: one class for all outputs that no
border cuts, and one for each other along an axis.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, grid_dim
from max.gpu import thread_idx
from max.gpu.memory import external_memory
from max.gpu.primitives import warp
from std.math import ceildiv
from std.sys.info import size_of
from std.utils import IndexList, StaticTuple

from ..conv.device_value import DeviceValue
from ..conv.fields import INTERLEAVED
from ..conv.memory import CACHE_LINE, Reads, Writes
from ..conv.problem import SPATIAL, ConvProblem
from .limits import MAX_BLOCKS, WARP
from .overlap import wait_for_earlier_kernels
from .stream import LaunchGrid, Stream

comptime THREADS = 128
"""Threads of a block."""

comptime MAX_TAPS = 8192
"""Taps whose sums fit the shared memory that every block has."""


@fieldwise_init
struct OutputClasses(DeviceValue, TrivialRegisterPassable):
    """The classes of outputs along each axis: those before `first` have one each,
    so have those behind `last`, and all between share one."""

    var first: IndexList[SPATIAL]
    var last: IndexList[SPATIAL]
    var counts: IndexList[SPATIAL]

    def __init__(out self, problem: ConvProblem):
        """Finds them.

        Args:
            problem: The convolution, valid.
        """
        self.first = IndexList[SPATIAL](fill=0)
        self.last = IndexList[SPATIAL](fill=0)
        self.counts = IndexList[SPATIAL](fill=1)
        for axis in range(SPATIAL):
            var outputs = problem.output[axis]
            var stride = problem.stride[axis]
            var before = ceildiv(problem.pad_before[axis], stride)
            # Of the last output whose taps end inside the image.
            var room = problem.input[axis] + problem.pad_before[axis]
            var last = (room - problem.span(axis)) // stride
            if before > min(last, outputs - 1):
                # None has all taps: each is a class of its own.
                self.first[axis] = outputs
                self.last[axis] = outputs
                self.counts[axis] = outputs
            else:
                self.first[axis] = before
                self.last[axis] = min(last, outputs - 1)
                self.counts[axis] = before + outputs - self.last[axis]

    def count(self) -> Int:
        """Classes of all axes."""
        return self.counts[0] * self.counts[1] * self.counts[2]

    @always_inline
    def index(self, at: IndexList[SPATIAL]) -> Int:
        """The class of an output.

        Args:
            at: The output.
        """
        var index = 0
        comptime for axis in range(SPATIAL):
            var own = min(at[axis], self.first[axis]) + max(
                at[axis] - self.last[axis], 0
            )
            index = index * self.counts[axis] + own
        return index

    @always_inline
    def output(self, index: Int) -> IndexList[SPATIAL]:
        """An output of a class.

        Args:
            index: The class.
        """
        var rest, w = divmod(index, self.counts[2])
        var d, h = divmod(rest, self.counts[1])
        var at = IndexList[SPATIAL](d, h, w)
        comptime for axis in range(SPATIAL):
            if at[axis] > self.first[axis]:
                at[axis] += self.last[axis] - self.first[axis]
        return at


@fieldwise_init
struct ZeroPointTable(DeviceValue, TrivialRegisterPassable):
    """The products of a zero point, as a kernel subtracts them."""

    var values: Reads[DType.int32]
    """`[classes, K]`; not read if the zero point is 0."""
    var present: Bool
    """Whether it is not."""
    var filters: Int
    """Of all groups."""
    var classes: OutputClasses

    @staticmethod
    def nothing() -> Self:
        """Of a zero point of 0."""
        comptime one = IndexList[SPATIAL](fill=1)
        return Self(
            Reads[DType.int32](unsafe_from_address=CACHE_LINE),
            False,
            0,
            OutputClasses(one, one, one),
        )

    @always_inline
    def load[
        width: Int, alignment: Int
    ](self, at: IndexList[SPATIAL], filter: Int) -> SIMD[DType.int32, width]:
        """What to subtract from the sums of neighbouring filters, if it is
        `present`.

        Parameters:
            width: How many.
            alignment: Elements; `filter` is a multiple of as many, and so is
                the number of filters.

        Args:
            at: The output pixel.
            filter: The first filter.
        """
        comptime bytes = alignment * size_of[DType.int32]()
        return self.values.unsafe_load[width=width, alignment=bytes](
            self.classes.index(at) * self.filters + filter
        )


def zero_point_elements(problem: ConvProblem) -> Int:
    """Elements of a table's `values`.

    Args:
        problem: The convolution, valid.
    """
    return OutputClasses(problem).count() * problem.filters


def fill_zero_point_table(
    stream: Stream,
    problem: ConvProblem,
    filter: Reads[DType.int8],
    zero_point: Int32,
    values: Writes[DType.int32],
    *,
    interleaved: Bool,
) raises -> ZeroPointTable:
    """Enqueues the table's kernel.

    Args:
        stream: Where to run; nothing is waited for.
        problem: The convolution, valid and with outputs.
        filter: `[K, T, R, S, C / groups]` in device memory, or `[C / 4, R, S, K,
            4]`.
        zero_point: Of the activation.
        values: Where to, as many as `zero_point_elements` says.
        interleaved: Whether the filter is the latter.

    Returns:
        The table, for kernels that are enqueued behind.

    Raises:
        If there are too many taps; what the driver refused.
    """
    if problem.taps() > MAX_TAPS:
        raise Error(
            t"zero_point: {zero_point} beside a filter of {problem.taps()} taps"
            t" is not supported on a GPU; up to {MAX_TAPS} are"
        )
    var classes = OutputClasses(problem)
    stream.enqueue[fill_kernel](
        LaunchGrid(
            min(problem.filters, MAX_BLOCKS),
            THREADS,
            shared_bytes=problem.taps() * size_of[DType.int32](),
        ),
        filter,
        values,
        problem,
        classes,
        zero_point,
        Int32(1 if interleaved else 0),
    )
    return ZeroPointTable(values.as_imm(), True, problem.filters, classes)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS))
)
def fill_kernel(
    filter: Reads[DType.int8],
    values: Writes[DType.int32],
    problem: ConvProblem,
    classes: OutputClasses,
    zero_point: Int32,
    interleaved: Int32,
):
    """A block a filter: first the sum of each tap, then of each class.

    Args:
        filter: As `fill_zero_point_table` has it, like all others.
        values: The same.
        problem: The same.
        classes: Of the outputs.
        zero_point: The same.
        interleaved: Not 0 if the filter is interleaved.
    """
    var sums = external_memory[
        Int32, address_space=AddressSpace.SHARED, alignment=16
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var own, lane = divmod(Int(thread_idx.x), WARP)
    var taps = problem.taps()
    var channels = problem.group_channels()
    # Elements between filters, taps and blocks of channels.
    var next_filter = taps * channels
    var next_tap = channels
    var next_block = INTERLEAVED
    if interleaved != 0:
        next_filter = INTERLEAVED
        next_tap = problem.filters * INTERLEAVED
        next_block = next_tap * taps
    wait_for_earlier_kernels()
    for k in range(Int(block_idx.x), problem.filters, Int(grid_dim.x)):
        for tap in range(own, taps, THREADS // WARP):
            var first = filter.unsafe_offset(k * next_filter + tap * next_tap)
            var sum = Int32(0)
            for c in range(lane, channels, WARP):
                var block, part = divmod(c, INTERLEAVED)
                sum += first[unsafe_offset=block * next_block + part].cast[
                    DType.int32
                ]()
            sum = warp.sum(sum)
            if lane == 0:
                sums[unsafe_offset=tap] = sum
        barrier()
        for index in range(Int(thread_idx.x), classes.count(), THREADS):
            var origin = (
                classes.output(index) * problem.stride - problem.pad_before
            )
            var first = IndexList[SPATIAL](fill=0)
            var end = IndexList[SPATIAL](fill=0)
            comptime for axis in range(SPATIAL):
                first[axis] = problem.taps_before(axis, origin[axis], 0)
                end[axis] = problem.taps_before(
                    axis, origin[axis], problem.input[axis]
                )
            var total = Int32(0)
            for t in range(first[0], end[0]):
                for r in range(first[1], end[1]):
                    var row = (t * problem.filter[1] + r) * problem.filter[2]
                    for s in range(first[2], end[2]):
                        total += sums[unsafe_offset=row + s]
            values[unsafe_offset=index * problem.filters + k] = (
                zero_point * total
            )
        barrier()
