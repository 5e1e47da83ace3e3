"""The search for a configuration: of a kernel's candidates, those that refuse
are dropped, and the device's model scores the rest."""

from std.collections import Optional


trait Candidates:
    """The configurations with which a kernel may run a problem: a table, whose
    rows may count several times, as with split-K."""

    def count(self) -> Int:
        """How many there are."""
        ...

    def refusal(self, index: Int) -> Optional[String]:
        """Why a candidate cannot run the problem, or None.

        Args:
            index: From 0 to `count() - 1`.
        """
        ...

    def cost(self, index: Int) -> Float64:
        """How long a candidate takes, by the device's model, in a unit that
        all candidates of the kernel share.

        Args:
            index: Of a candidate that does not refuse.
        """
        ...


@fieldwise_init
struct Found(Copyable, Movable):
    """The cheapest candidate, or why there is none."""

    var index: Int
    """-1 if every candidate refuses."""
    var cost: Float64
    """The model's."""
    var refusal: String
    """Of the last candidate that refused."""


def cheapest(candidates: Some[Candidates]) -> Found:
    """The candidate of least cost; of equal ones, the first.

    Args:
        candidates: To choose from.
    """
    var found = Found(-1, 0.0, String("there is no candidate"))
    for index in range(candidates.count()):
        var refusal = candidates.refusal(index)
        if refusal:
            found.refusal = refusal.value()
            continue
        var cost = candidates.cost(index)
        if found.index < 0 or cost < found.cost:
            found.index = index
            found.cost = cost
    return found^


def refusal_of_all(candidates: Some[Candidates]) -> Optional[String]:
    """Why no candidate can run the problem, or None if one can.

    Args:
        candidates: To choose from.

    Returns:
        The last candidate's reason.
    """
    var refusal = Optional[String](String("there is no candidate"))
    for index in range(candidates.count()):
        refusal = candidates.refusal(index)
        if not refusal:
            return None
    return refusal
