"""The lines that a program is asked by, on its standard input."""

from std.io.io import _fdopen
from std.sys import stdin


struct Requests:
    """Standard input, line by line.

    `input` opens a file descriptor for each line and closes none: a program
    that is asked often ends in `fclose` when it has as many as a process may.
    """

    var _file: _fdopen["r"]

    def __init__(out self):
        """Opens standard input, once."""
        self._file = _fdopen["r"](stdin)

    def next(self) raises -> String:
        """The next line, without its end.

        Raises:
            There is none.
        """
        return self._file.readline()
