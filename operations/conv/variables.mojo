"""Variables of the environment, which a process is asked for where it reads them
once."""

from std.collections import Optional
from std.ffi import external_call


def variable[name: StaticString]() -> Optional[String]:
    """The text of a variable of the environment, or None if it is not set.

    Parameters:
        name: What it is called.
    """
    comptime terminated = StaticString(name + "\0")
    var value = external_call["getenv", Int](terminated.unsafe_ptr())
    if value == 0:
        return None
    return String(
        unsafe_from_utf8_ptr=Pointer[UInt8, ImmUntrackedOrigin](
            unsafe_from_address=value
        )
    )
