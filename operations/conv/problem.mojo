"""What a convolution is, on every target: geometry, GEMM mapping, validation.

A convolution of spatial rank 1, 2 or 3 is held with three spatial dimensions
(depth, height, width); the dimensions that a lower rank lacks have extent 1,
stride 1, dilation 1 and no padding, so nothing below this file asks for a rank.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv
from std.utils import IndexList

from .memory import Reads
from .panels import PanelLayout, shared_interleaved
from .fields import (
    GEOMETRY_ACTIVATION,
    GEOMETRY_BLOCK_D,
    GEOMETRY_CROP_D,
    GEOMETRY_DILATION_D,
    GEOMETRY_FILTER_LAYOUT,
    GEOMETRY_FILTER_T,
    GEOMETRY_FINAL_ACTIVATION,
    GEOMETRY_GROUPS,
    GEOMETRY_HAS_BIAS,
    GEOMETRY_HAS_RESIDUAL,
    GEOMETRY_KERNEL,
    GEOMETRY_LENGTH,
    GEOMETRY_PAD_AFTER_D,
    GEOMETRY_PAD_BEFORE_D,
    GEOMETRY_SPATIAL_RANK,
    GEOMETRY_STRIDE_D,
    LAYOUT_FCRS,
    LAYOUT_INTERLEAVED,
    LAYOUT_KRSC,
    LAYOUT_PACKED,
    LAYOUT_RSCF,
    PANEL,
)

comptime SPATIAL = 3

comptime RANK = SPATIAL + 2
"""Of the shapes that hold every spatial dimension."""

comptime PROBLEM_NUMBERS = 4 + 6 * SPATIAL
"""Numbers from which `ConvProblem.of_numbers` makes a problem."""


@fieldwise_init
struct ConvProblem(
    DevicePassable,
    Equatable,
    Hashable,
    ImplicitlyCopyable,
    Movable,
    Writable,
):
    """The geometry of one convolution, as run-time values.

    Activation `[batch, *input, channels]`, filter `[filters, *filter,
    channels / groups]`, output `[batch, *output, filters]`; all extents in
    elements. As an implicit GEMM and per group: `gemm_m` output pixels by
    `gemm_n` filters by `gemm_k` products.
    """

    var spatial_rank: Int
    var batch: Int
    var channels: Int
    var filters: Int
    var groups: Int
    var input: IndexList[SPATIAL]
    var filter: IndexList[SPATIAL]
    var output: IndexList[SPATIAL]
    var stride: IndexList[SPATIAL]
    var dilation: IndexList[SPATIAL]
    var pad_before: IndexList[SPATIAL]
    var pad_after: IndexList[SPATIAL]

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """The name in messages."""
        return "ConvProblem"

    def __init__[
        rank: Int
    ](
        out self,
        geometry: Geometry,
        x_shape: IndexList[rank],
        out_shape: IndexList[rank],
    ):
        """Reads a problem off the geometry operand and the tensors' shapes.

        Args:
            geometry: The decoded geometry operand.
            x_shape: `[batch, *input, channels]`.
            out_shape: `[batch, *output, filters]`; where filters are pixels of
                a larger image (depth_to_space.mojo), the shape of that.
        """
        var block = geometry.spatial(GEOMETRY_BLOCK_D)
        var crop = geometry.spatial(GEOMETRY_CROP_D)
        self.spatial_rank = rank - 2
        self.batch = x_shape[0]
        self.channels = x_shape[rank - 1]
        self.filters = out_shape[rank - 1] * block[0] * block[1] * block[2]
        self.groups = geometry[GEOMETRY_GROUPS]
        self.input = IndexList[SPATIAL](fill=1)
        self.output = IndexList[SPATIAL](fill=1)
        comptime missing = SPATIAL - (rank - 2)
        comptime for i in range(rank - 2):
            self.input[missing + i] = x_shape[1 + i]
            # A block that is not positive is refused with the other numbers.
            self.output[missing + i] = ceildiv(
                out_shape[1 + i] + crop[missing + i], max(1, block[missing + i])
            )
        self.filter = geometry.spatial(GEOMETRY_FILTER_T)
        self.stride = geometry.spatial(GEOMETRY_STRIDE_D)
        self.dilation = geometry.spatial(GEOMETRY_DILATION_D)
        self.pad_before = geometry.spatial(GEOMETRY_PAD_BEFORE_D)
        self.pad_after = geometry.spatial(GEOMETRY_PAD_AFTER_D)

    def __init__(
        out self,
        geometry: Geometry,
        x_shape: Reads[DType.int64],
        out_shape: Reads[DType.int64],
    ):
        """Reads a problem off the geometry operand and shapes in host memory.

        Args:
            geometry: The decoded geometry operand.
            x_shape: `RANK` sizes: `[N, D, H, W, C]`.
            out_shape: The same of the output: `[N, Z, P, Q, K]`.
        """
        var input = IndexList[RANK](fill=0)
        var output = IndexList[RANK](fill=0)
        for i in range(RANK):
            input[i] = Int(x_shape[unsafe_offset=i])
            output[i] = Int(out_shape[unsafe_offset=i])
        self = Self(geometry, input, output)

    def numbers(self) -> List[Int]:
        """The problem as `of_numbers` takes it."""
        var numbers: List[Int] = [
            self.batch,
            self.channels,
            self.filters,
            self.groups,
        ]
        for triple in [
            self.input,
            self.filter,
            self.stride,
            self.dilation,
            self.pad_before,
            self.pad_after,
        ]:
            for axis in range(SPATIAL):
                numbers.append(triple[axis])
        return numbers^

    @staticmethod
    def of_numbers(numbers: List[Int]) raises -> Self:
        """A problem from plain numbers, as programs pass it to each other.

        Args:
            numbers: Batch, channels, filters and groups; then, three numbers
                each, the extents of input and filter, stride, dilation, and
                the padding before and after.

        Raises:
            If there are not `PROBLEM_NUMBERS`, or they are no valid problem.
        """
        if len(numbers) != PROBLEM_NUMBERS:
            raise Error(
                t"problem: {len(numbers)} numbers; {PROBLEM_NUMBERS} are needed"
            )

        def three(triple: Int) {imm numbers} -> IndexList[SPATIAL]:
            var first = 4 + SPATIAL * triple
            return IndexList[SPATIAL](
                numbers[first], numbers[first + 1], numbers[first + 2]
            )

        var problem = Self(
            spatial_rank=SPATIAL,
            batch=numbers[0],
            channels=numbers[1],
            filters=numbers[2],
            groups=numbers[3],
            input=three(0),
            filter=three(1),
            output=IndexList[SPATIAL](fill=1),
            stride=three(2),
            dilation=three(3),
            pad_before=three(4),
            pad_after=three(5),
        )
        for axis in range(SPATIAL):
            problem.output[axis] = problem.expected_output(axis)
        problem.validate(
            LAYOUT_KRSC, problem.filters * problem.gemm_k(), DType.float32
        )
        return problem

    def taps(self) -> Int:
        """Filter positions, `T * R * S`."""
        return self.filter[0] * self.filter[1] * self.filter[2]

    def group_channels(self) -> Int:
        """Input channels that one filter reads, `C / groups`."""
        return self.channels // self.groups

    def group_filters(self) -> Int:
        """Output channels of one group, `K / groups`."""
        return self.filters // self.groups

    def has_outputs(self) -> Bool:
        """Whether there is an output to compute."""
        return self.gemm_m() != 0 and self.filters != 0

    def gemm_m(self) -> Int:
        """Output pixels, `N * Z * P * Q`."""
        return self.batch * self.output[0] * self.output[1] * self.output[2]

    def gemm_n(self) -> Int:
        """Filters of one group, `K / groups`."""
        return self.group_filters()

    def gemm_k(self) -> Int:
        """Products of one output element, `T * R * S * C / groups`."""
        return self.taps() * self.group_channels()

    def panel_groups(self) -> Int:
        """Groups whose filters share a panel: as many as fill it, where each
        has as many channels as filters and their number divides `PANEL`."""
        var width = self.group_filters()
        if (
            width < 2
            or width >= PANEL
            or PANEL % width != 0
            or width != self.group_channels()
            or self.filters % PANEL != 0
        ):
            return 1
        return PANEL // width

    def packed_groups(self) -> Int:
        """Groups, or sets of groups that share a panel, of a packed filter."""
        return self.groups // self.panel_groups()

    def packed_filters(self) -> Int:
        """Filters of one of the `packed_groups`."""
        return self.group_filters() * self.panel_groups()

    def panels(self) -> Int:
        """Filter panels of one of the `packed_groups`."""
        return (self.packed_filters() + PANEL - 1) // PANEL

    @always_inline
    def panel_filters(self, panel: Int, panels: Int) -> Int:
        """Filters of some panels of a group; the last one may not be full.

        Args:
            panel: The first, of the group's.
            panels: How many.
        """
        return min(panels * PANEL, self.gemm_n() - panel * PANEL)

    def is_depthwise(self) -> Bool:
        """Whether each output channel reads just its own input channel."""
        return self.group_channels() == 1 and self.group_filters() == 1

    def is_pointwise(self) -> Bool:
        """Whether output pixel m reads just input pixel m."""
        return (
            self.taps() == 1
            and self.stride == IndexList[SPATIAL](fill=1)
            and self.pad_before == IndexList[SPATIAL](fill=0)
            and self.pad_after == IndexList[SPATIAL](fill=0)
        )

    def panel_layout(self, dtype: DType) -> PanelLayout:
        """The order of the elements of a panel. Where groups share one nothing is
        filled up, and what lies side by side divides the channels of a group.

        Args:
            dtype: Of the filter.
        """
        var rows = self.filter[0] * self.filter[1]
        var products = self.filter[2] * self.group_channels()
        if self.panel_groups() > 1:
            return PanelLayout(
                rows,
                products,
                products,
                shared_interleaved(dtype, self.group_channels()),
            )
        return PanelLayout.of(rows, products, dtype)

    def packed_length(self, dtype: DType) -> Int:
        """Elements of the packed filter: whole panels, or one value a tap and
        channel where the convolution is depthwise.

        Args:
            dtype: Of the filter.
        """
        if self.is_depthwise():
            return self.taps() * self.channels
        var panel = self.panel_layout(dtype).elements()
        return self.packed_groups() * self.panels() * panel

    def filter_length(self, layout: Int, dtype: DType) -> Int:
        """Elements that the filter operand has.

        Args:
            layout: Its `LAYOUT_*` code.
            dtype: Its type.
        """
        if layout == LAYOUT_PACKED:
            return self.packed_length(dtype)
        return self.filters * self.gemm_k()

    def padded(self, axis: Int) -> Int:
        """Extent of the padded input along a spatial axis."""
        return self.input[axis] + self.pad_before[axis] + self.pad_after[axis]

    def span(self, axis: Int) -> Int:
        """Input extent that the dilated filter covers along a spatial axis."""
        return (self.filter[axis] - 1) * self.dilation[axis] + 1

    @always_inline
    def taps_before(self, axis: Int, origin: Int, end: Int) -> Int:
        """Taps along a spatial axis that lie before a position.

        Args:
            axis: The axis.
            origin: The position of tap 0.
            end: The position.
        """
        var room = end - origin
        # A GPU divides in many instructions.
        if self.dilation[axis] != 1:
            room = ceildiv(room, self.dilation[axis])
        return max(0, min(self.filter[axis], room))

    def expected_output(self, axis: Int) -> Int:
        """Output extent along a spatial axis: `floor((padded - span) / stride)
        + 1`."""
        return (self.padded(axis) - self.span(axis)) // self.stride[axis] + 1

    def validate(
        self,
        layout: Int,
        filter_elements: Int,
        dtype: DType,
        *,
        interleaved: Bool = False,
    ) raises:
        """Checks what only run-time sizes can tell.

        Args:
            layout: The filter operand's layout code.
            filter_elements: The filter operand's length.
            dtype: The filter operand's type.
            interleaved: Whether the activation is interleaved, as the filter
                must be then, and only then.

        Raises:
            Naming the argument, its value and what is allowed.
        """
        if self.groups < 1:
            raise Error(
                t"groups: {self.groups} is not positive; it must be at least 1"
            )
        for axis in range(SPATIAL):
            self._validate_axis(axis)
        if self.channels % self.groups != 0:
            raise Error(
                t"input: {self.channels} channels are not divisible by"
                t" groups={self.groups}"
            )
        if self.filters % self.groups != 0:
            raise Error(
                t"filter: {self.filters} filters are not divisible by"
                t" groups={self.groups}"
            )
        if interleaved and layout != LAYOUT_INTERLEAVED:
            raise Error(
                t"filter_layout: code {layout} is not {LAYOUT_INTERLEAVED}:"
                t" beside an activation in NC/4HW4 a filter is in"
                t" {layout_name(LAYOUT_INTERLEAVED)}"
            )
        if not interleaved and not LAYOUT_PACKED <= layout <= LAYOUT_FCRS:
            raise Error(t"filter_layout: code {layout} is not 0 to 3")
        var expected = self.filter_length(layout, dtype)
        if filter_elements != expected:
            raise Error(
                t"filter: {filter_elements} elements do not match {expected} ="
                t" what {self.filters} filters of {self.taps()} taps and"
                t" {self.group_channels()} channels take in layout"
                t" {layout_name(layout)}"
            )

    def _validate_axis(self, axis: Int) raises:
        var name = axis_name(axis)
        if self.stride[axis] < 1:
            raise Error(
                t"stride: {self.stride[axis]} along {name} is not positive;"
                t" every stride must be at least 1"
            )
        if self.dilation[axis] < 1:
            raise Error(
                t"dilation: {self.dilation[axis]} along {name} is not positive;"
                t" every dilation must be at least 1"
            )
        if self.pad_before[axis] < 0 or self.pad_after[axis] < 0:
            raise Error(
                t"padding: ({self.pad_before[axis]}, {self.pad_after[axis]})"
                t" along {name} is negative; every padding must be at least 0"
            )
        if self.filter[axis] < 1:
            raise Error(
                t"filter: extent {self.filter[axis]} along {name} is not"
                t" positive; every extent must be at least 1"
            )
        if self.span(axis) > self.padded(axis):
            raise Error(
                t"filter: {name} extent {self.filter[axis]} with dilation"
                t" {self.dilation[axis]} spans {self.span(axis)} but the padded"
                t" input has only {self.padded(axis)}; enlarge the padding or"
                t" the input"
            )
        if self.output[axis] != self.expected_output(axis):
            raise Error(
                t"output: {name} extent {self.output[axis]} must be"
                t" {self.expected_output(axis)} for this input, filter, stride,"
                t" dilation and padding"
            )

    def write_to(self, mut writer: Some[Writer]):
        """Writes the geometry on one line.

        Args:
            writer: Where to.
        """
        writer.write(
            t"{self.batch}x{self.input}x{self.channels} -> {self.filters},"
            t" filter {self.filter}, stride {self.stride}, dilation"
            t" {self.dilation}, padding {self.pad_before}/{self.pad_after},"
            t" groups {self.groups}"
        )


@fieldwise_init
struct Geometry(ImplicitlyCopyable, Movable):
    """The geometry operand: `GEOMETRY_LENGTH` integers in host memory, indexed
    by the `GEOMETRY_*` names."""

    var values: IndexList[GEOMETRY_LENGTH]

    def __init__(out self, data: Reads[DType.int64], length: Int) raises:
        """Copies the operand.

        Args:
            data: The operand in host memory.
            length: How many values it has.

        Raises:
            If the length is not `GEOMETRY_LENGTH`.
        """
        if length != GEOMETRY_LENGTH:
            raise Error(
                t"geometry: {length} values, but this op takes"
                t" {GEOMETRY_LENGTH}; the Python package and operations/ are of"
                t" different versions"
            )
        self.values = IndexList[GEOMETRY_LENGTH](fill=0)
        for i in range(GEOMETRY_LENGTH):
            self.values[i] = Int(data[unsafe_offset=i])

    def __getitem__(self, field: Int) -> Int:
        """The value of one `GEOMETRY_*` field."""
        return self.values[field]

    def spatial(self, first: Int) -> IndexList[SPATIAL]:
        """The three values of a spatial field, from its `_D` or `_T` name."""
        return IndexList[SPATIAL](
            self.values[first], self.values[first + 1], self.values[first + 2]
        )


def axis_name(axis: Int) -> StaticString:
    """The letter of a spatial axis in messages: d, h or w."""
    if axis == 0:
        return "d"
    return "h" if axis == 1 else "w"


def layout_name(layout: Int) -> StaticString:
    """The name of a filter layout code."""
    if layout == LAYOUT_PACKED:
        return "PACKED"
    if layout == LAYOUT_KRSC:
        return "KRSC"
    if layout == LAYOUT_RSCF:
        return "RSCF"
    return "FCRS" if layout == LAYOUT_FCRS else "C/4RSK4"
