"""What a launch passes, in the words of the emulator's tests."""

from std.memory import Pointer
from std.sys.info import size_of


def bytes_of[T: AnyType](value: T) -> String:
    """A value's bytes, as hexadecimal digits."""
    comptime digits = "0123456789abcdef"
    var bytes = Pointer(to=value).unsafe_bitcast[UInt8]()
    var text = String()
    for i in range(size_of[T]()):
        var byte = Int(bytes.unsafe_offset(i)[])
        text += digits[byte=byte >> 4]
        text += digits[byte=byte & 15]
    return text
