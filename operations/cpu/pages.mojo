"""Pages of memory that nobody has touched yet.

An allocator returns large blocks to the system and takes them anew: the first
touch of each page of 4 KiB is a fault, which costs more than a kernel needs to
fill the page. A page of 2 MiB is one fault. Where the system hands those out to
whoever asks (transparent_hugepage/enabled: madvise), a kernel asks.
"""

from std.ffi import external_call
from std.math import align_down, align_up
from std.sys.info import CompilationTarget

comptime HUGE_PAGE = 2 << 20
"""Bytes of a large page, of x86-64 and of Arm with pages of 4 KiB."""

comptime LARGE_OUTPUT = 2 * HUGE_PAGE
"""Bytes from which on an output may lie in memory that was taken anew, as numpy
has it for its arrays. To ask costs a microsecond."""

comptime _MADV_HUGEPAGE = Int32(14)


def ask_for_large_pages(address: Int, bytes: Int):
    """Asks for large pages where an output lies; what is touched already stays.
    A system that has none goes on as if nobody had asked.

    Args:
        address: Of the output; 0: it is not known.
        bytes: Of the output.
    """
    if address == 0 or bytes < LARGE_OUTPUT:
        return
    comptime if CompilationTarget.is_linux():
        var first = align_up(address, HUGE_PAGE)
        var end = align_down(address + bytes, HUGE_PAGE)
        _ = external_call["madvise", Int32](first, end - first, _MADV_HUGEPAGE)
