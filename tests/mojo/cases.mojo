"""The problems of the kernels' checks, their operands and their exact sums.

A line of input is a name and 26 integers: batch, channels, filters, groups,
then three each (depth, height, width) of input, filter, stride, dilation,
padding before and padding after, then the output's bias and residual flags,
the code of the activation (none, ReLU or a clamp, also at the end behind a
residual) and the filter's layout code.
"""

from std.utils import IndexList

from operations.conv.fields import LAYOUT_KRSC
from operations.conv.memory import Writes
from operations.cpu.packing import FilterStrides
from operations.conv.problem import SPATIAL, ConvProblem

comptime GUARD = 64
"""Elements in front of and behind an output that no kernel may touch."""

comptime ACTIVATION_MODULUS = 9
"""Of the activations' pattern, where they are floats."""

comptime FILTER_MODULUS = 7
"""Of the filters' pattern, where they are floats."""

comptime FIELDS = 26


@fieldwise_init
struct Case(Copyable, Movable):
    """A problem and what goes with it."""

    var name: String
    var problem: ConvProblem
    var has_bias: Bool
    var has_residual: Bool
    var activation: Int
    var layout: Int

    def seed(self) -> Int:
        """A number that differs from case to case."""
        ref p = self.problem
        return p.channels + p.filters + p.input[2] + p.filter[1]


def three(values: List[Int], first: Int) -> IndexList[SPATIAL]:
    """Three neighbouring values."""
    return IndexList[SPATIAL](
        values[first], values[first + 1], values[first + 2]
    )


def parse(line: String) raises -> Case:
    """Reads a line of input."""
    var words = line.split()
    if len(words) != FIELDS + 1:
        raise Error(t"{len(words)} words, {FIELDS + 1} expected: {line}")
    var values = List[Int]()
    for i in range(1, len(words)):
        values.append(Int(words[i]))
    var problem = ConvProblem(
        spatial_rank=3,
        batch=values[0],
        channels=values[1],
        filters=values[2],
        groups=values[3],
        input=three(values, 4),
        filter=three(values, 7),
        output=IndexList[SPATIAL](fill=1),
        stride=three(values, 10),
        dilation=three(values, 13),
        pad_before=three(values, 16),
        pad_after=three(values, 19),
    )
    for axis in range(SPATIAL):
        problem.output[axis] = problem.expected_output(axis)
    problem.validate(
        LAYOUT_KRSC, problem.filters * problem.gemm_k(), DType.float32
    )
    return Case(
        String(words[0]),
        problem,
        values[22] != 0,
        values[23] != 0,
        values[24],
        values[25],
    )


def pattern(index: Int, modulus: Int) -> Int:
    """A small integer around zero that differs between neighbours along every
    dimension: a multiplicative hash of the index."""
    return ((index * 2654435761) >> 7) % modulus - modulus // 2


def expected_sum(
    spec: Case,
    row: Int,
    filter: Int,
    *,
    activations: Int = ACTIVATION_MODULUS,
    filters: Int = FILTER_MODULUS,
    zero: Int = 0,
) -> Int:
    """The exact convolution of one output, straight from its definition, of
    patterns with these moduli, the activation's less `zero`."""
    var p = spec.problem
    var strides = FilterStrides(spec.layout, p)
    var rest, q = divmod(row, p.output[2])
    var zn, y = divmod(rest, p.output[1])
    var n, z = divmod(zn, p.output[0])
    var channels = p.channels // p.groups
    var group = filter // (p.filters // p.groups)
    var total = 0
    for t in range(p.filter[0]):
        var d = z * p.stride[0] + t * p.dilation[0] - p.pad_before[0]
        for r in range(p.filter[1]):
            var h = y * p.stride[1] + r * p.dilation[1] - p.pad_before[1]
            for s in range(p.filter[2]):
                var w = q * p.stride[2] + s * p.dilation[2] - p.pad_before[2]
                if not (
                    0 <= d < p.input[0]
                    and 0 <= h < p.input[1]
                    and 0 <= w < p.input[2]
                ):
                    continue
                var tap = (t * p.filter[1] + r) * p.filter[2] + s
                var pixel = ((n * p.input[0] + d) * p.input[1] + h) * p.input[
                    2
                ] + w
                for c in range(channels):
                    var x = pixel * p.channels + group * channels + c
                    var w = (
                        filter * strides.filter
                        + tap * strides.tap
                        + c * strides.channel
                    )
                    total += (pattern(x, activations) - zero) * pattern(
                        w, filters
                    )
    return total


def fill[
    dtype: DType
](to: Writes[dtype], count: Int, modulus: Int, shift: Int = 0):
    """Fills with the pattern, `shift` above."""
    for i in range(count):
        to[unsafe_offset=i] = Scalar[dtype](pattern(i, modulus) + shift)


def poison[dtype: DType](to: Writes[dtype], count: Int, value: Scalar[dtype]):
    """Fills an output of so many elements, and what lies around it."""
    for i in range(count + 2 * GUARD):
        to[unsafe_offset=i] = value
