"""The cuts that a tuner measured to be faster than what dispatch chooses.

The process reads them once, from the file that a variable names, which the
Python package derives from tables of what was tuned (`_tuned.py`):

    maxconv tuned cpu 1
    float32 float32 2 1 64 64 1 1 56 56 1 3 3 1 1 1 1 1 1 0 1 1 0 1 1 = 1 6 4 1 2 576
    end 1

A row has the types of input and output, the threads, the numbers of
`ConvProblem.of_numbers`, and behind the sign the fields of `NamedCut`. A file
that is not so to its last byte is not used at all.
"""

from std.collections import Optional
from std.ffi import _Global

from ...conv.operands import OperandTypes
from ...conv.problem import PROBLEM_NUMBERS, ConvProblem
from ..variables import variable
from .candidates import FilterCut
from .cut import NamedCut

comptime TUNED_VARIABLE = "MAXCONV_TUNED_FILE"
"""The variable that names the file. Where it is missing or empty, there is
none."""

comptime TUNED_SCHEMA = "maxconv tuned cpu 1"
"""The first line of a file."""

comptime CUT_NUMBERS = 6
"""Numbers of a cut."""

comptime KEY_WORDS = 3 + PROBLEM_NUMBERS
"""Words of a row in front of the sign."""


@fieldwise_init
struct TunedCut(Copyable, Movable):
    """A row."""

    var key: String
    """What was tuned, as `tuned_key` writes it."""
    var cut: NamedCut


def tuned_key(
    problem: ConvProblem, types: OperandTypes, threads: Int
) -> String:
    """What a row says of the problem that was tuned.

    Args:
        problem: The convolution.
        types: Of its operands.
        threads: How many threads there are.
    """
    var key = String(t"{types.input} {types.output} {threads}")
    for number in problem.numbers():
        key += String(t" {number}")
    return key^


def parsed_cuts(text: String) raises -> List[TunedCut]:
    """The rows of a file.

    Args:
        text: What is in it.

    Raises:
        If it is not one of these, or was cut off.
    """
    var lines = text.split("\n")
    var rows = len(lines) - 3
    if rows < 0 or String(lines[0]) != TUNED_SCHEMA:
        raise Error(t"the first line is not {TUNED_SCHEMA}")
    var last = String(t"end {rows}")
    if String(lines[rows + 1]) != last or lines[rows + 2].byte_length() != 0:
        raise Error(t"the last line does not say that there are {rows} rows")
    var cuts = List[TunedCut]()
    for row in range(rows):
        var words = lines[1 + row].split(" ")
        if (
            len(words) != KEY_WORDS + 1 + CUT_NUMBERS
            or String(words[KEY_WORDS]) != "="
        ):
            raise Error(t"row {row} has not the words of one")
        var key = String(words[0])
        for place in range(1, KEY_WORDS):
            key += String(t" {words[place]}")
        var numbers = List[Int]()
        for place in range(CUT_NUMBERS):
            numbers.append(atol(words[KEY_WORDS + 1 + place]))
        cuts.append(
            TunedCut(
                key^,
                NamedCut(
                    access=numbers[0],
                    tile_rows=numbers[1],
                    tiles=numbers[2],
                    filters=FilterCut(numbers[3], numbers[4]),
                    depth=numbers[5],
                ),
            )
        )
    return cuts^


def _read() -> List[TunedCut]:
    """The rows of the process's file, none if there is none or it is broken."""
    var path = variable[TUNED_VARIABLE]()
    if path and path.value().byte_length() != 0:
        try:
            with open(path.value(), "r") as file:
                return parsed_cuts(file.read())
        except:
            pass
    return List[TunedCut]()


comptime _TUNED = _Global["maxconv_tuned_1", _read]
"""Its name ends with the version of `TunedCut`."""


def tuned_cut(
    problem: ConvProblem, types: OperandTypes, threads: Int
) -> Optional[NamedCut]:
    """The cut that was found for a problem, which may not be able to run so.

    Args:
        problem: The convolution.
        types: Of its operands.
        threads: How many threads there are.
    """
    # Nothing was tuned with loads that compute.
    if types.fused_input:
        return None
    try:
        ref cuts = _TUNED.get_or_create_ptr()[]
        if len(cuts) == 0:
            return None
        var key = tuned_key(problem, types, threads)
        for tuned in cuts:
            if tuned.key == key:
                return tuned.cut
    except:
        pass
    return None
