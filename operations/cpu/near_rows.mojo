"""Rows of a register tile that an instruction of x86 reads from one pointer."""

comptime NEAR_ROWS = 3
"""Rows that an address reaches from one pointer: it adds a register once or twice.
A pointer to each row would take all registers."""


def near_address[row: Int]() -> String:
    """The address of a row near another one, in the order of AT&T's assembler.

    Parameters:
        row: Which, 0 to `NEAR_ROWS - 1`; 0 for that one.

    Returns:
        Operand 2 of an instruction is the pointer to that one, operand 4 are the
        bytes between two rows.
    """
    comptime assert row < NEAR_ROWS, "an address reaches three rows"
    return ["($2)", "($2,$4)", "($2,$4,2)"][row]
