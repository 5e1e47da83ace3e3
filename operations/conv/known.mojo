"""What is known of a filter when an op is compiled, so that it is compiled with
the configurations for that filter alone."""

from .problem import ConvProblem


@fieldwise_init
struct KnownFilter(ImplicitlyCopyable, Movable):
    """What is known of a filter; 0 stands for what only a call tells."""

    var taps: Int
    """Along w."""
    var stride: Int
    """Along w."""
    var group_channels: Int
    """Input channels of a group."""

    @staticmethod
    def of(problem: ConvProblem) -> KnownFilter:
        """A problem's filter.

        Args:
            problem: The convolution.
        """
        return KnownFilter(
            problem.filter[2], problem.stride[2], problem.group_channels()
        )

    def depthwise(self) -> KnownFilter:
        """The same filter, where groups are known to have one channel."""
        return KnownFilter(self.taps, self.stride, 1)

    def may_have(self, *, taps: Int, stride: Int) -> Bool:
        """Whether the filter may turn out to be so.

        Args:
            taps: Along w.
            stride: Along w.
        """
        return (self.taps == 0 or self.taps == taps) and (
            self.stride == 0 or self.stride == stride
        )


comptime UNKNOWN_FILTER = KnownFilter(0, 0, 0)
"""A filter of which nothing is known: an op takes any."""
