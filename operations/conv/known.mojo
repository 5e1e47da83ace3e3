"""The facts about a problem that are known when an op is compiled. The op is
compiled with only the kernels and configurations that such a problem may
need."""

from .problem import ConvProblem

comptime UNKNOWN = 0
"""A number that is known only when the op is called."""

comptime UNKNOWN_FEATURES = -1
"""Instructions that are known only when the op is called: all that there are
may be there."""

comptime ANY_KERNEL = -1
"""A `config=` that is known only when the op is called."""


struct KnownProblem(ImplicitlyCopyable, Movable):
    """What a graph knows of a problem; `UNKNOWN` stands for the rest, and
    `SEVERAL` for a number of groups, channels or filters that is not 1. Both
    are below every number that is known."""

    var kernel: Int
    """The `KERNEL_*` code that is asked for, or `ANY_KERNEL`."""
    var exact: Bool
    """Whether products of float32 are known not to be rounded to tf32."""
    var groups: Int
    var channels: Int
    """Input channels of a group."""
    var filters: Int
    """Of a group."""
    var taps: Int
    """Along w."""
    var stride: Int
    """Along w."""
    var centered: Bool
    """Whether a GPU's activation of integers has a zero point; a CPU's may have
    one in any case."""
    var features: Int
    """Instructions that the CPU has, a bit for each `FEATURE_*` code, or
    `UNKNOWN_FEATURES`."""

    def __init__(
        out self,
        kernel: Int,
        exact: Bool,
        groups: Int,
        channels: Int,
        filters: Int,
        taps: Int,
        stride: Int,
        centered: Bool = False,
        features: Int = UNKNOWN_FEATURES,
    ):
        """Gathers the fields.

        Args:
            kernel: See the fields, like the others.
            exact: The same.
            groups: The same.
            channels: The same.
            filters: The same.
            taps: The same.
            stride: The same.
            centered: The same.
            features: The same.
        """
        self.kernel = kernel
        self.exact = exact
        self.groups = groups
        self.channels = channels
        self.filters = filters
        self.taps = taps
        self.stride = stride
        self.centered = centered
        self.features = features

    @staticmethod
    def nothing() -> KnownProblem:
        """Nothing is known: an op takes any problem."""
        return KnownProblem(
            ANY_KERNEL, False, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN
        )

    def filter(self) -> KnownFilter:
        """The facts about the filter alone."""
        return KnownFilter(
            self.taps,
            self.stride,
            self.channels,
            False,
            False,
            True,
            True,
            UNKNOWN,
        )

    def may_have_one_group(self) -> Bool:
        """Whether the problem may turn out not to be grouped."""
        return self.groups == UNKNOWN or self.groups == 1

    def is_depthwise(self) -> Bool:
        """Whether each group is known to have one channel and one filter."""
        return self.channels == 1 and self.filters == 1

    def may_be_multiple(self, count: Int, bytes: Int, of: Int) -> Bool:
        """Whether a group's channels or filters may fill whole units.

        Args:
            count: `channels` or `filters`.
            bytes: Of an element.
            of: Bytes of a unit.
        """
        return count <= UNKNOWN or count * bytes % of == 0


@fieldwise_init
struct KnownFilter(ImplicitlyCopyable, Movable):
    """What a graph knows of a filter; `UNKNOWN` stands for the rest."""

    var taps: Int
    """Along w."""
    var stride: Int
    """Along w."""
    var group_channels: Int
    """Input channels of a group."""
    var narrow: Bool
    """Whether groups are known to have no more than `NARROW_FILTERS`."""
    var tiled: Bool
    """Whether a kernel of tensor cores is known to take such filters, which
    leaves the others what is rare: addresses and sizes that it refuses."""
    var has_chunks: Bool
    """Whether pixels of the activation may be multiples of `COPY_BYTES`."""
    var lacks_chunks: Bool
    """Whether they may be none."""
    var filters: Int
    """The tile of filters that holds all of them, where a kernel is compiled
    for few."""

    @staticmethod
    def of(problem: ConvProblem) -> KnownFilter:
        """A problem's filter."""
        return KnownFilter(
            problem.filter[2],
            problem.stride[2],
            problem.group_channels(),
            False,
            False,
            True,
            True,
            UNKNOWN,
        )

    def depthwise(self) -> KnownFilter:
        """The same filter, where groups are known to have one channel."""
        var filter = self
        filter.group_channels = 1
        return filter

    def may_have(self, *, taps: Int, stride: Int) -> Bool:
        """Whether the filter may turn out to be so.

        Args:
            taps: Along w.
            stride: Along w.
        """
        return (self.taps == UNKNOWN or self.taps == taps) and (
            self.stride == UNKNOWN or self.stride == stride
        )


comptime NARROW_FILTERS = 64
"""Filters of a group that fill half of a wide tile, at most."""

comptime UNKNOWN_FILTER = KnownFilter(
    UNKNOWN, UNKNOWN, UNKNOWN, False, False, True, True, UNKNOWN
)
"""A filter of which nothing is known: an op takes any."""
