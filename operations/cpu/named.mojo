"""Cuts that somebody names by numbers, instead of a kernel's own search."""

from std.collections import Optional


trait NumberedCut(ImplicitlyCopyable, Movable):
    """How a kernel cuts a problem into tasks, as numbers: a tuned table and a
    tuner hold no more of it."""

    @staticmethod
    def fields() -> List[StaticString]:
        """The names of the numbers, in their order."""
        ...

    @staticmethod
    def of_numbers(numbers: List[Int]) -> Self:
        """The cut of its numbers.

        Args:
            numbers: One for each of `fields`.
        """
        ...

    def numbers(self) -> List[Int]:
        """One for each of `fields`."""
        ...


def checked_cut[Cut: NumberedCut](numbers: List[Int]) raises -> Cut:
    """The cut of numbers that somebody names.

    Parameters:
        Cut: Its type.

    Args:
        numbers: Of the cut.

    Raises:
        If there are fewer or more than the cut has.
    """
    var fields = Cut.fields()
    if len(numbers) != len(fields):
        var names = StaticString(", ").join(fields)
        raise Error(t"configuration: {len(numbers)} numbers are not {names}")
    return Cut.of_numbers(numbers)


def raise_refusal(refusal: Optional[String]) raises:
    """Raises what a cut is refused for, if it is.

    Args:
        refusal: The sentence, or None.

    Raises:
        It.
    """
    if refusal:
        raise Error(t"configuration: {refusal.value()}")


def range_refusal(
    field: StaticString, number: Int, least: Int, most: Int, unit: Int = 1
) -> Optional[String]:
    """Why a number is not one of a field's, or None.

    Args:
        field: Its name.
        number: The number.
        least: The least one.
        most: The largest one.
        unit: What all are multiples of.
    """
    if number < least or number > most:
        return String(t"{field}: {number} is not {least} to {most}")
    if number % unit != 0:
        return String(t"{field}: {number} is no multiple of {unit}")
    return None
