"""The choice of a kernel, printed once for each problem.

`MAXCONV_LOG=dispatch` prints a line to stderr for each new problem, with the
kernel and the reasons.
"""

from std.ffi import _Global, external_call
from std.sys import stderr
from std.utils.lock import BlockingScopedLock, BlockingSpinLock

from .operands import OperandTypes
from .problem import ConvProblem


struct Seen(Movable):
    """The lines that were printed, by their hashes."""

    var lock: BlockingSpinLock
    var hashes: List[UInt64]

    def __init__(out self):
        """None yet."""
        self.lock = BlockingSpinLock()
        self.hashes = List[UInt64]()


def _nothing_seen() -> Seen:
    return Seen()


comptime _SEEN = _Global["maxconv_dispatch_seen", _nothing_seen]


def is_traced() -> Bool:
    """Whether `MAXCONV_LOG` is `dispatch`. It reads the environment and
    allocates no string."""
    comptime expected = StaticString("dispatch")
    comptime name = StaticString("MAXCONV_LOG\0")
    var value = external_call["getenv", Int](name.unsafe_ptr())
    if value == 0:
        return False
    var text = Pointer[UInt8, MutUntrackedOrigin](unsafe_from_address=value)
    for i in range(expected.byte_length()):
        if text[unsafe_offset=i] != expected.as_bytes()[i]:
            return False
    return text[unsafe_offset=expected.byte_length()] == 0


def trace(line: String) raises:
    """Prints a line unless it was printed before.

    Args:
        line: The problem, the kernel and the reasons.

    Raises:
        If the process has no room for what was printed.
    """
    # FNV-1a, 64 bits (Fowler, Noll, Vo).
    var hashed = UInt64(0xCBF29CE484222325)
    for byte in line.as_bytes():
        hashed = (hashed ^ UInt64(byte)) * UInt64(0x100000001B3)
    var seen = _SEEN.get_or_create_ptr()
    with BlockingScopedLock(seen[].lock):
        for known in seen[].hashes:
            if known == hashed:
                return
        seen[].hashes.append(hashed)
    print(line, file=stderr)


def trace_choice(
    problem: ConvProblem, types: OperandTypes, kernel: StaticString, why: String
) raises:
    """Prints the choice of a kernel unless it was printed before.

    Args:
        problem: The convolution.
        types: Of its operands.
        kernel: The name of the kernel that was chosen.
        why: The reasons.

    Raises:
        If the process has no room for what was printed.
    """
    trace(
        String(
            t"maxconv: {problem}, {types.input} -> {types.output}:"
            t" {kernel}: {why}"
        )
    )
