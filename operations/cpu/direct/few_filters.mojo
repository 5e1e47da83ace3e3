"""Convolution with few filters on the CPU: lanes are input channels, registers
are pixels by filters.

A panel of the implicit GEMM would leave most of its lanes to filters that do
not exist. Here a step multiplies `LANES` channels of neighbouring output pixels
by the same channels of every filter, and each tile ends with a sum over lanes.
Taps that lie side by side in memory are one run of channels.
"""

from std.bit import log2_floor
from std.collections import Optional
from std.math import ceildiv
from std.sys.intrinsics import PrefetchOptions, prefetch
from std.utils import IndexList

from ...conv.fields import KERNEL_FEW_FILTERS, PANEL
from ...conv.known import KnownFilter, KnownProblem
from ...conv.memory import HostBuffer, Reads, Writes
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ..config import (
    HALF_PANEL,
    HAS_HALF_PANELS,
    LANES,
    fused_input_refusal,
    integer_refusal,
    vector_registers,
)
from ..epilogue import TileStore
from ..named import checked_cut, raise_refusal
from ..pixel import load_channels
from ..pool import Pool
from .cut import RowCut
from .image_row import COLUMNS, ColumnTile, ImageRow, Span
from .launch import (
    MIN_TASK_COLUMNS,
    RowKernel,
    RowPlan,
    RowTasks,
    SpanKernel,
    choose_rows,
)

comptime MAX_FEW_FILTERS = HALF_PANEL
"""Filters that the kernel takes."""

comptime MOST_CHOSEN_FILTERS = 6 if HAS_HALF_PANELS else MAX_FEW_FILTERS
"""Filters of the most that it is faster for than a panel, or half a one."""

comptime MAX_FEW_DEPTH = 16 * 1024
"""Products of a filter that the kernel unpacks: all filters take 512 KiB at
most."""

comptime MIN_FEW_DEPTH = 9
"""Products of the smallest filter that the kernel is faster for than a panel:
adding up lanes costs the same for every depth."""

comptime MIN_FEW_COLUMNS = COLUMNS // 2
"""Output columns of the narrowest image that it is faster for."""

comptime TILE_FILTERS = 4
"""Filters of the widest register tile."""

comptime Vector = SIMD[DType.float32, LANES]


def tile_pixels(filters: Int) -> Int:
    """Output pixels of a register tile: as many as leave registers for the
    filters and one activation.

    Args:
        filters: Filters of the tile.

    Returns:
        A power of two, at most `COLUMNS`.
    """
    var pixels = COLUMNS
    while pixels > 1 and (pixels + 1) * filters + 1 > vector_registers():
        pixels //= 2
    return pixels


@fieldwise_init
struct UnpackedFilter(ImplicitlyCopyable, Movable):
    """The filter as float32 `[filters][depth]`, behind the zeros that a pixel
    outside the image reads."""

    var zeros: Writes[DType.float32]
    var filters: Writes[DType.float32]
    var stride: Int
    """Elements between two filters."""

    def __init__(out self, problem: ConvProblem, memory: Writes[DType.float32]):
        """Where the parts lie; nothing is written.

        Args:
            problem: The convolution.
            memory: `length(problem)` values.
        """
        self.zeros = memory
        self.filters = memory.unsafe_offset(Self._zeros(problem))
        self.stride = Self._stride(problem)

    @staticmethod
    def _zeros(problem: ConvProblem) -> Int:
        return ceildiv(problem.channels, PANEL) * PANEL

    @staticmethod
    def _stride(problem: ConvProblem) -> Int:
        # An odd number of cache lines: filters do not compete for one set.
        return (ceildiv(problem.gemm_k(), PANEL) | 1) * PANEL

    @staticmethod
    def length(problem: ConvProblem) -> Int:
        """Float32 values of all parts, in whole cache lines.

        Args:
            problem: The convolution.

        Returns:
            The length.
        """
        return Self._zeros(problem) + problem.filters * Self._stride(problem)

    def unpack[
        filter_type: DType
    ](self, problem: ConvProblem, filter: Reads[filter_type]):
        """Writes all parts.

        Parameters:
            filter_type: The packed filter's type.

        Args:
            problem: The convolution, of one panel.
            filter: The packed filter.
        """
        for i in range(Self._zeros(problem)):
            self.zeros[unsafe_offset=i] = 0
        var layout = problem.panel_layout(filter_type)
        for row in range(layout.rows):
            for i in range(layout.products):
                for f in range(problem.filters):
                    self.filters[
                        unsafe_offset=f * self.stride
                        + row * layout.products
                        + i
                    ] = filter[
                        unsafe_offset=layout.offset(
                            row * layout.row_depth + i, f
                        )
                    ].cast[
                        DType.float32
                    ]()


@always_inline
def _step[
    x_type: DType, pixels: Int, filters: Int, whole: Bool
](
    starts: Array[Reads[x_type], pixels],
    weights: Reads[DType.float32],
    weight_stride: Int,
    channel: Int,
    count: Int,
    mut acc: Array[Vector, pixels * filters],
):
    """Adds a vector of channels, or the `count` that are left of them."""
    var weight = Array[Vector, filters](fill=Vector(0))
    comptime for f in range(filters):
        weight[f] = load_channels[DType.float32, LANES, whole](
            weights.unsafe_offset(f * weight_stride + channel), count
        )
    comptime for i in range(pixels):
        var value = load_channels[x_type, LANES, whole](
            starts[i].unsafe_offset(channel), count
        )
        comptime for f in range(filters):
            acc[i * filters + f] = value.fma(weight[f], acc[i * filters + f])


@always_inline
def _add_run[
    x_type: DType, pixels: Int, filters: Int
](
    starts: Array[Reads[x_type], pixels],
    weights: Reads[DType.float32],
    weight_stride: Int,
    length: Int,
    ahead: Reads[x_type],
    mut acc: Array[Vector, pixels * filters],
):
    """Adds `length` channels that lie side by side for every pixel, and asks
    for as many at `ahead`."""
    var whole = length // LANES * LANES
    for channel in range(0, whole, LANES):
        prefetch[params=PrefetchOptions().for_read().high_locality()](
            ahead.unsafe_offset(channel)
        )
        _step[x_type, pixels, filters, True](
            starts, weights, weight_stride, channel, LANES, acc
        )
    if whole < length:
        _step[x_type, pixels, filters, False](
            starts, weights, weight_stride, whole, length - whole, acc
        )


def _every_second(first: Int) -> IndexList[LANES]:
    """The even or odd lanes of two vectors, for `shuffle`."""
    var mask = IndexList[LANES](fill=0)
    for lane in range(LANES):
        mask[lane] = 2 * lane + first
    return mask


@always_inline
def _store_sums[
    count: Int
](acc: Array[Vector, count], to: Writes[DType.float32]):
    """Stores the sum over lanes of each vector, in whole vectors of sums: in
    each level the neighbouring lanes of two vectors add up to one."""
    comptime even = _every_second(0)
    comptime odd = _every_second(1)
    comptime for first in range(0, count, LANES):
        var parts = Array[Vector, LANES](fill=Vector(0))
        comptime for j in range(min(LANES, count - first)):
            parts[j] = acc[first + j]
        comptime for level in range(log2_floor(LANES)):
            comptime for j in range(LANES >> (level + 1)):
                var left = parts[2 * j]
                var right = parts[2 * j + 1]
                parts[j] = left.shuffle[mask=even](right) + left.shuffle[
                    mask=odd
                ](right)
        to.unsafe_store(first, parts[0])


@always_inline
def _next_pixels[
    x_type: DType, pixels: Int
](row: ImageRow[x_type], q: Int) -> Reads[x_type]:
    """What only the tile behind this one reads, in the row of the input image
    that no output row before it has read; perhaps outside the image."""
    ref problem = row.problem
    return row.input(q, row.depth.end - 1, row.height.end - 1).pixel(
        (pixels - 1) * problem.stride[2] + problem.span(2)
    )


@always_inline
def _tile[
    x_type: DType, pixels: Int, filters: Int
](
    row: ImageRow[x_type],
    filter: UnpackedFilter,
    q: Int,
    inside: Bool,
    first: Int,
    to: Writes[DType.float32],
):
    """Computes `pixels` neighbouring pixels by `filters` filters."""
    ref problem = row.problem
    var acc = Array[Vector, pixels * filters](fill=Vector(0))
    var zeros = filter.zeros.as_imm().unsafe_bitcast[Scalar[x_type]]()
    # Without dilation the taps of a row lie side by side.
    var taps = problem.filter[2] if inside and problem.dilation[2] == 1 else 1
    var ahead = _next_pixels[x_type, pixels](row, q)
    for t in range(row.depth.begin, row.depth.end):
        for r in range(row.height.begin, row.height.end):
            var input = row.input(q, t, r)
            for s in range(0, problem.filter[2], taps):
                var starts = Array[Reads[x_type], pixels](fill=zeros)
                comptime for i in range(pixels):
                    var column = s * problem.dilation[2] + i * problem.stride[2]
                    if inside or input.contains(column):
                        starts[i] = input.pixel(column)
                var tap = (t * problem.filter[1] + r) * problem.filter[2] + s
                _add_run[x_type, pixels, filters](
                    starts,
                    filter.filters.as_imm().unsafe_offset(
                        first * filter.stride + tap * problem.channels
                    ),
                    filter.stride,
                    taps * problem.channels,
                    ahead,
                    acc,
                )
                ahead = ahead.unsafe_offset(taps * problem.channels)
    _store_sums(acc, to)


@no_inline
def _span[
    x_type: DType, filters: Int
](
    row: ImageRow[x_type],
    filter: UnpackedFilter,
    span: Span,
    to: Writes[DType.float32],
):
    """Computes a span of `filters` filters."""
    # A copy: as far as the compiler knows, a sum's store may change an argument.
    var local = row
    comptime pixels = tile_pixels(filters)
    var tile = ColumnTile(span)
    while tile.next(local, span):
        for i in range(0, COLUMNS, pixels):
            _tile[x_type, pixels, filters](
                local,
                filter,
                tile.q + i,
                tile.inside,
                span.begin,
                to.unsafe_offset((tile.q + i - span.q) * filters),
            )


@fieldwise_init
struct FewFiltersSpans(ImplicitlyCopyable, SpanKernel):
    """The kernel's arithmetic. One vector may be written behind a span's sums.
    """

    var filter: UnpackedFilter

    def filters_at_once(self, filters: Int) -> Int:
        """See `SpanKernel`: all filters, or parts of about the same size."""
        return ceildiv(filters, ceildiv(filters, TILE_FILTERS))

    def compute[
        dtype: DType
    ](self, row: ImageRow[dtype], span: Span, to: Writes[DType.float32]):
        comptime for filters in range(1, TILE_FILTERS + 1):
            if span.filters() == filters:
                _span[dtype, filters](row, self.filter, span, to)


@fieldwise_init
struct FewFiltersPlan(ImplicitlyCopyable, Movable, Writable):
    """A cut of rows and columns."""

    var rows: RowPlan
    var filters: Int

    def write_to(self, mut writer: Some[Writer]):
        """Writes how the kernel runs.

        Args:
            writer: Where to.
        """
        writer.write(
            t"{self.filters} filters leave most of a panel empty: lanes are"
            t" channels, {LANES} at a time"
        )


struct FewFilters[P: Pool](RowKernel):
    """Convolutions whose filters fill less than a panel.

    Parameters:
        P: The threads that it runs on.
    """

    comptime code = KERNEL_FEW_FILTERS
    comptime takes_cuts = True
    comptime Plan = FewFiltersPlan
    comptime Queue = Self.P
    comptime filter_unit = 0

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """None: it runs on every CPU."""
        return None

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        var refusal = integer_refusal(Self.code, types)
        return refusal if refusal else fused_input_refusal(Self.code, types)

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        return (
            known.may_have_one_group()
            and known.filters <= MAX_FEW_FILTERS
            and not known.is_depthwise()
        )

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        if problem.groups > 1 or problem.is_depthwise():
            return String(
                t"few_filters takes one group and no depthwise filter; here"
                t" {problem.groups} of {problem.group_channels()} channels and"
                t" {problem.group_filters()} filters"
            )
        if problem.filters > MAX_FEW_FILTERS:
            return String(
                t"few_filters takes up to {MAX_FEW_FILTERS} filters; here"
                t" {problem.filters}"
            )
        if problem.gemm_k() > MAX_FEW_DEPTH:
            return String(
                t"few_filters keeps filters of up to {MAX_FEW_DEPTH} products"
                t" in scratch memory; here {problem.gemm_k()}"
            )
        return None

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        """See `ConvKernel`: as measured, up to a quarter of a panel nearly
        always, up to half of it if channels fill the lanes and there is depth
        to add up."""
        if problem.groups > 1:
            return False
        if problem.filters <= PANEL // 4:
            return (
                problem.gemm_k() >= MIN_FEW_DEPTH
                and problem.output[2] >= MIN_FEW_COLUMNS
            )
        return (
            problem.filters <= MOST_CHOSEN_FILTERS
            and problem.group_channels() >= 2 * PANEL
            and problem.gemm_k() >= 8 * PANEL
            and problem.output[2] >= 2 * MIN_FEW_COLUMNS
        )

    @staticmethod
    def choice(problem: ConvProblem, threads: Int) -> RowCut:
        return choose_rows(
            problem, threads, unit=MIN_TASK_COLUMNS, cuts_columns=True
        )

    @staticmethod
    def named_plan(
        problem: ConvProblem,
        operands: Operands,
        device: Device,
        numbers: List[Int],
    ) raises -> FewFiltersPlan:
        var cut = checked_cut[RowCut](numbers)
        raise_refusal(cut.refusal(problem, Self.filter_unit))
        return Self._planned(problem, cut, device.units)

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> FewFiltersPlan:
        var cut = Self.choice(problem, device.units)
        return Self._planned(problem, cut, device.units)

    @staticmethod
    def _planned(
        problem: ConvProblem, cut: RowCut, threads: Int
    ) -> FewFiltersPlan:
        """The plan of a cut."""
        return FewFiltersPlan(
            RowPlan(problem, cut, threads, slack=LANES), problem.filters
        )

    @staticmethod
    def launch[
        known: KnownFilter, scaled: Bool
    ](
        plan: FewFiltersPlan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Self.P,
    ) raises:
        var memory = HostBuffer[DType.float32](UnpackedFilter.length(problem))
        var filter = UnpackedFilter(problem, memory.elements)
        filter.unpack(problem, arguments.filter)
        plan.rows.schedule.run(
            RowTasks(
                FewFiltersSpans(filter),
                plan.rows,
                problem,
                arguments.activation.data(),
                0,
                TileStore(arguments),
            ),
            queue,
        )
        _ = memory^
