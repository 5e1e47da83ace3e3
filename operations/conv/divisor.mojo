"""Division by numbers that the host knows, for kernels."""

from std.math import ceildiv


struct Divisor(ImplicitlyCopyable, TrivialRegisterPassable):
    """Division of numbers below 2^31 by a number that the host knows: a
    multiplication and a shift (Granlund and Montgomery, "Division by Invariant
    Integers using Multiplication", PLDI 1994)."""

    var value: UInt32
    var multiplier: UInt32
    var shift: UInt32

    def __init__(out self, value: Int):
        """Prepares to divide.

        Args:
            value: From 1 to 2^31 - 1.
        """
        var bits = 0
        while 1 << bits < value:
            bits += 1
        self.value = UInt32(value)
        self.multiplier = UInt32(ceildiv(1 << (31 + bits), value))
        self.shift = UInt32(bits)

    @always_inline
    def split(self, number: UInt32) -> Tuple[UInt32, UInt32]:
        """Quotient and remainder.

        Args:
            number: Below 2^31.
        """
        var product = UInt64(number) * UInt64(self.multiplier)
        var quotient = UInt32(product >> UInt64(31 + self.shift))
        return quotient, number - quotient * self.value


struct SmallDivisor(ImplicitlyCopyable, TrivialRegisterPassable):
    """Division of numbers by one that the host knows, where the product of both
    is below 2^32: the high half of a multiplication of 32 bits."""

    var value: UInt32
    var multiplier: UInt32
    """2^32 over the value, rounded up; 0 for 1."""
    var one: UInt32
    """Whether the value is 1, 0 or 1."""

    def __init__(out self, value: Int):
        """Prepares to divide.

        Args:
            value: From 1 to 2^32 - 1.
        """
        self.value = UInt32(value)
        self.multiplier = UInt32(ceildiv(1 << 32, value) if value > 1 else 0)
        self.one = UInt32(1 if value == 1 else 0)

    @always_inline
    def split(self, number: UInt32) -> Tuple[UInt32, UInt32]:
        """Quotient and remainder.

        Args:
            number: Times the divisor below 2^32.
        """
        var product = UInt64(number) * UInt64(self.multiplier)
        var quotient = UInt32(product >> 32) + number * self.one
        return quotient, number - quotient * self.value
