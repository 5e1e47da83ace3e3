"""Problems as lines of text.

A line is a name and the problem, either in full

    batch input channels filters filter stride dilation before after groups

where every entry with one number a spatial axis joins them by an x (`8x28x28`),
or, two spatial axes and one group, as 15 integers: batch, height, width,
channels, filters, filter height and width, stride, dilation (h, w each),
padding (top, bottom, left, right). Empty lines and those that begin with # are
skipped.
"""

from std.utils import IndexList

from operations.conv.problem import SPATIAL, ConvProblem


@fieldwise_init
struct Case(Copyable, Movable):
    """A named problem."""

    var name: String
    var problem: ConvProblem


def read_cases(path: String) raises -> List[Case]:
    """Reads a file of problems.

    Args:
        path: Of the file.
    """
    var text: String
    with open(path, "r") as file:
        text = file.read()
    var cases = List[Case]()
    for line in text.splitlines():
        if line == "" or line.startswith("#"):
            continue
        cases.append(_parse(String(line)))
    return cases^


def _parse(line: String) raises -> Case:
    """Reads a line."""
    var words = List[String]()
    for word in line.split():
        words.append(String(word))
    if len(words) == 16:
        words = _in_full(words)
    if len(words) != 11:
        raise Error(t"{len(words)} words, 11 or 16 expected: {line}")
    var problem = ConvProblem(
        spatial_rank=len(words[2].split("x")),
        batch=Int(words[1]),
        channels=Int(words[3]),
        filters=Int(words[4]),
        groups=Int(words[10]),
        input=_axes(words[2], 1),
        filter=_axes(words[5], 1),
        output=IndexList[SPATIAL](fill=1),
        stride=_axes(words[6], 1),
        dilation=_axes(words[7], 1),
        pad_before=_axes(words[8], 0),
        pad_after=_axes(words[9], 0),
    )
    for axis in range(SPATIAL):
        problem.output[axis] = problem.expected_output(axis)
    problem.validate(1, problem.filters * problem.gemm_k(), DType.float32)
    return Case(words[0], problem)


def _in_full(words: List[String]) -> List[String]:
    """A problem of 15 integers in full."""
    return [
        words[0],
        words[1],
        words[2] + "x" + words[3],
        words[4],
        words[5],
        words[6] + "x" + words[7],
        words[8] + "x" + words[9],
        words[10] + "x" + words[11],
        words[12] + "x" + words[14],
        words[13] + "x" + words[15],
        "1",
    ]


def _axes(word: String, missing: Int) raises -> IndexList[SPATIAL]:
    """The numbers of an entry, as depth, height and width."""
    var numbers = word.split("x")
    if len(numbers) > SPATIAL:
        raise Error(t"{word}: more than {SPATIAL} axes")
    var result = IndexList[SPATIAL](fill=missing)
    for i in range(len(numbers)):
        result[SPATIAL - len(numbers) + i] = Int(String(numbers[i]))
    return result
