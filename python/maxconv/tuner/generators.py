"""What rules add to a model: variables and constraints of a few patterns.

Loop split, loop fuse, candidates, stage fuse and memory limit are Heron's generators (ASPLOS 2023);
the rest is arithmetic that the kernels' limits are written in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from .model import Kind, Model, Role, Term, Variable
from .schedule import Schedule

__all__ = [
    "bounded_if",
    "candidates",
    "ceildiv",
    "loop_fuse",
    "loop_split",
    "memory_limit",
    "place",
    "product",
    "rounded_up",
    "stage_fuse",
    "table",
    "table2",
    "total",
]


def candidates(model: Model, name: str, values: Iterable[int], why: str = "") -> str:
    """Adds a tunable variable that takes one of some values, and returns its name."""
    domain = tuple(sorted(set(values)))
    model.add(Variable(name, domain, Role.TUNABLE))
    model.require(Kind.IN, name, *domain, why=why)
    return name


def place(model: Model, name: str) -> str:
    """Returns the variable that says where a tunable's value stands in its domain."""
    domain = model.variables[name].domain
    where = f"{name}.place"
    if where not in model.variables:
        model.add(Variable(where, range(len(domain)), Role.PLACE))
        model.require(Kind.SELECT, name, *domain, index=where, why="its place in its domain")
    return where


def table(model: Model, name: str, of: str, function: Callable[[int], Term], why: str = "") -> str:
    """Adds a variable that a function of a tunable's value gives, and returns its name."""
    return stage_fuse(
        model, name, place(model, of), [function(v) for v in model.variables[of].domain], why
    )


def table2(
    model: Model, name: str, of: tuple[str, str], rows: Sequence[Sequence[int]], why: str = ""
) -> str:
    """Adds a variable that a table of two tunables' values gives, and returns its name.

    Args:
        model: Where to add.
        name: Of the variable.
        of: The tunables.
        rows: A number for each value of the second tunable, in a row for each of the first.
        why: For people.
    """
    first, second = (place(model, tunable) for tunable in of)
    start = product(model, f"{name}.row", first, len(model.variables[of[1]].domain))
    cell = total(model, f"{name}.place", start, second)
    return stage_fuse(model, name, cell, [value for row in rows for value in row], why)


def stage_fuse(model: Model, name: str, index: str, options: Sequence[Term], why: str = "") -> str:
    """Adds a variable that is the option whose place an index names, and returns its name.

    That is what follows for a stage from where it is fused into another: its extent is that of the
    loops below the place.
    """
    lows, highs = zip(*(model.bounds(option) for option in options), strict=True)
    model.add(Variable(name, _domain(min(lows), max(highs))))
    model.require(Kind.SELECT, name, *options, index=index, why=why)
    return name


def product(model: Model, name: str, *terms: Term, why: str = "") -> str:
    """Adds a variable that is the product of terms that are not negative, and returns its name."""
    low = math.prod(model.bounds(term)[0] for term in terms)
    high = math.prod(model.bounds(term)[1] for term in terms)
    model.add(Variable(name, _domain(low, high)))
    model.require(Kind.PROD, name, *terms, why=why)
    return name


def total(model: Model, name: str, *terms: Term, why: str = "") -> str:
    """Adds a variable that is the sum of terms, and returns its name."""
    low = sum(model.bounds(term)[0] for term in terms)
    high = sum(model.bounds(term)[1] for term in terms)
    model.add(Variable(name, _domain(low, high)))
    model.require(Kind.SUM, name, *terms, why=why)
    return name


def loop_split(model: Model, loop: str, name: str, *inner: Term, why: str = "") -> str:
    """Splits a loop into ``inner`` ones and an outermost one, without a remainder.

    Args:
        model: Where to add.
        loop: The loop's extent, a variable that is positive.
        name: Of the outermost loop's extent, which is added.
        inner: Extents of the others.
        why: For people.

    Returns:
        ``name``.
    """
    least = math.prod(max(1, model.bounds(term)[0]) for term in inner)
    model.add(Variable(name, range(1, max(1, model.bounds(loop)[1] // least) + 1)))
    model.require(Kind.PROD, loop, *inner, name, why=why)
    return name


def loop_fuse(model: Model, name: str, *loops: Term, why: str = "") -> str:
    """Adds the extent of loops that become one, and returns its name."""
    return product(model, name, *loops, why=why)


def ceildiv(model: Model, name: str, value: Term, divisor: Term, why: str = "") -> str:
    """Adds the quotient of positive terms, rounded up, and returns its name."""
    low = -(-model.bounds(value)[0] // model.bounds(divisor)[1])
    high = -(-model.bounds(value)[1] // model.bounds(divisor)[0])
    model.add(Variable(name, range(low, high + 1)))
    whole = product(model, f"{name}.whole", name, divisor, why=why)
    enough = total(model, f"{name}.most", value, divisor, -1)
    # value <= whole <= value + divisor - 1
    model.require(Kind.LE, whole, enough, why=why)
    if isinstance(value, str):
        model.require(Kind.LE, value, whole, why=why)
    else:
        least = model.add(Variable(f"{name}.value", (value,)))
        model.require(Kind.LE, least, whole, why=why)
    return name


def rounded_up(model: Model, name: str, value: str, unit: int, why: str = "") -> str:
    """Adds the least multiple of a unit that is not less than a variable, and returns its name."""
    low, high = (-(-bound // unit) for bound in model.bounds(value))
    count = model.add(Variable(f"{name}.units", range(low, high + 1)))
    product(model, name, count, unit, why=why)
    model.require(Kind.LE, value, name)
    model.require(Kind.LE, name, total(model, f"{name}.most", value, unit - 1))
    return name


def bounded_if(model: Model, name: str, flag: str, below: Term | None, above: Term | None) -> None:
    """Bounds a variable where a flag, a variable that is 0 or 1, is 1.

    Args:
        model: Where to add.
        name: The variable.
        flag: The flag.
        below: The least value, or None: any.
        above: The largest value, or None: any.
    """
    low, high = model.bounds(name)
    if below is not None:
        least = stage_fuse(model, f"{name}.least_if_{flag}", flag, (low, below))
        model.require(Kind.LE, least, name)
    if above is not None:
        most = stage_fuse(model, f"{name}.most_if_{flag}", flag, (high, above))
        model.require(Kind.LE, name, most)


def memory_limit(model: Model, schedule: Schedule, limit: int) -> list[str]:
    """Limits the bytes that live together in each stage of a schedule.

    Returns:
        The names of the sums that it adds, one for each set of buffers that live together.

    Raises:
        ValueError: The limit is not positive.
    """
    if limit < 1:
        raise ValueError(f"limit: {limit} bytes of {schedule.memory}; at least 1 is needed")
    sums = []
    for stage, names in schedule.peaks().items():
        bytes_ = [schedule.sizes[name] for name in names]
        why = f"{schedule.memory}: {', '.join(names)} live in {stage}"
        live = total(model, f"{schedule.memory}.in_{stage}", *bytes_, why=why)
        model.require(Kind.LE, live, limit, why=f"limit of {schedule.memory}")
        sums.append(live)
    return sums


def _domain(low: int, high: int) -> range:
    return range(low, high + 1)
