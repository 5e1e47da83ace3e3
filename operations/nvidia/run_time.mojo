"""Numbers that the compiler does not know, for loops that stay loops."""

from std.sys._assembly import inlined_assembly


@always_inline
def run_time(value: Int) -> UInt32:
    """A number that the compiler does not know: a loop up to it stays one.

    Args:
        value: The number.
    """
    return inlined_assembly[
        "mov.u32 $0, $1;", UInt32, constraints="=r,n", has_side_effect=False
    ](value)


@always_inline
def stay_in_branch():
    """Keeps the compiler from computing what stands in a branch ahead of it, and
    then choosing."""
    inlined_assembly["", NoneType, constraints="~{memory}"]()
