"""What a tuner measured to be faster than what a registry chooses.

The process reads it once, from the file that a variable names, which the Python
package derives from tables of what was tuned (`_tuned.py`):

    maxconv tuned cpu 2
    float32 float32 2 1 64 64 1 1 56 56 1 3 3 1 1 1 1 1 1 0 1 1 0 1 1 = winograd 0 48 4 4 64
    end 1

A row has the types of input and output, the threads, the numbers of
`ConvProblem.of_numbers`, and behind the sign a kernel and the numbers of its
cut. A file that is not so to its last byte is not used at all.
"""

from std.collections import Optional
from std.ffi import _Global

from .fields import KERNEL_NAMES
from .operands import OperandTypes
from .problem import PROBLEM_NUMBERS, ConvProblem
from .variables import variable

comptime TUNED_VARIABLE = "MAXCONV_TUNED_FILE"
"""The variable that names the file. Where it is missing or empty, there is
none."""

comptime TUNED_SCHEMA = "maxconv tuned cpu 2"
"""The first line of a file."""

comptime KEY_WORDS = 3 + PROBLEM_NUMBERS
"""Words of a row in front of the sign."""


@fieldwise_init
struct TunedRow(Copyable, Movable):
    """A row."""

    var key: String
    """What was tuned, as `tuned_key` writes it."""
    var kernel: Int
    """A `KERNEL_*` code."""
    var numbers: List[Int]
    """Of its cut, as `ConvKernel.named_plan` takes them."""


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


def parsed_rows(text: String) raises -> List[TunedRow]:
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
    var found = List[TunedRow]()
    for row in range(rows):
        found.append(_parsed_row(String(lines[1 + row])))
    return found^


def _parsed_row(line: String) raises -> TunedRow:
    """A row of its line."""
    var words = line.split(" ")
    if len(words) < KEY_WORDS + 2 or String(words[KEY_WORDS]) != "=":
        raise Error(t"{line} has not the words of a row")
    var key = String(words[0])
    for place in range(1, KEY_WORDS):
        key += String(t" {words[place]}")
    var kernel = _kernel_of(String(words[KEY_WORDS + 1]))
    var numbers = List[Int]()
    for place in range(KEY_WORDS + 2, len(words)):
        numbers.append(atol(words[place]))
    return TunedRow(key^, kernel, numbers^)


def _kernel_of(name: String) raises -> Int:
    """The `KERNEL_*` code of a name."""
    var names = materialize[KERNEL_NAMES]()
    for code in range(len(names)):
        if String(names[code]) == name:
            return code
    raise Error(t"{name} is no kernel")


def _read() -> List[TunedRow]:
    """The rows of the process's file, none if there is none or it is broken."""
    var path = variable[TUNED_VARIABLE]()
    if path and path.value().byte_length() != 0:
        try:
            with open(path.value(), "r") as file:
                return parsed_rows(file.read())
        except:
            pass
    return List[TunedRow]()


comptime _TUNED = _Global["maxconv_tuned_2", _read]
"""Its name ends with the version of `TunedRow`."""


@no_inline
def tuned_row(
    problem: ConvProblem, types: OperandTypes, threads: Int
) -> Optional[TunedRow]:
    """What was found for a problem, which may not be able to run so.

    Args:
        problem: The convolution.
        types: Of its operands.
        threads: How many threads there are.
    """
    # Nothing was tuned with loads that compute, or in other layouts.
    if types.fused_input or types.interleaved != 0:
        return None
    try:
        ref rows = _TUNED.get_or_create_ptr()[]
        if len(rows) == 0:
            return None
        var key = tuned_key(problem, types, threads)
        for row in rows:
            if row.key == key:
                return row.copy()
    except:
        pass
    return None
