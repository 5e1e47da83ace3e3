"""The constraint model of a space of configurations.

It has variables with finite domains and constraints of six kinds, prints and counts them. Nothing
here solves it; ``solver`` does. The six kinds are Heron's (ASPLOS 2023, "Heron: Automatically
Constrained High-Performance Library Generation for Deep Learning Accelerators").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Assignment", "Constraint", "Kind", "Model", "Role", "Term", "Variable"]

#: A variable by its name, or a constant.
Term = str | int

#: A value for each variable of a model.
Assignment = Mapping[str, int]


class Kind(Enum):
    """What a constraint says of its target ``v``."""

    PROD = "PROD"
    """``v`` is the product of the operands."""
    SUM = "SUM"
    """``v`` is the sum of the operands."""
    EQ = "EQ"
    """``v`` is the operand."""
    LE = "LE"
    """``v`` is at most the operand."""
    IN = "IN"
    """``v`` is one of the operands, which are constants."""
    SELECT = "SELECT"
    """``v`` is the operand at the place that the index names."""


class Role(Enum):
    """What a variable is."""

    TUNABLE = "tunable"
    """A field of the kernel's configuration: what is searched."""
    PLACE = "place"
    """Where a tunable's value stands in its domain."""
    DERIVED = "derived"
    """What follows from the tunables, by the constraints."""


@dataclass(frozen=True)
class Variable:
    """A variable with a finite domain.

    Raises:
        ValueError: The domain is empty, or its values are not ascending.
    """

    name: str
    domain: Sequence[int]
    """Its values, ascending: a tuple, or a ``range`` of step 1."""
    role: Role = Role.DERIVED

    def __post_init__(self) -> None:
        if not self.domain:
            raise ValueError(f"domain: that of {self.name} is empty; at least one value is needed")
        if isinstance(self.domain, range):
            if self.domain.step != 1:
                raise ValueError(f"domain: that of {self.name} has step {self.domain.step}, not 1")
        elif any(a >= b for a, b in zip(self.domain, self.domain[1:], strict=False)):
            raise ValueError(f"domain: {self.domain!r} of {self.name} is not ascending")

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest value."""
        return self.domain[0], self.domain[-1]

    def __str__(self) -> str:
        if isinstance(self.domain, range) and len(self.domain) > 2:
            return f"{self.name} in {self.domain[0]}..{self.domain[-1]}"
        return f"{self.name} in {{{', '.join(map(str, self.domain))}}}"


@dataclass(frozen=True)
class Constraint:
    """What must hold of some variables.

    Raises:
        ValueError: The kind takes another number of operands, or no index.
    """

    kind: Kind
    target: str
    operands: tuple[Term, ...]
    index: str | None = None
    """Of SELECT: the variable that names a place, from 0."""
    why: str = ""
    """For people: what it is there for."""

    def __post_init__(self) -> None:
        count = len(self.operands)
        if count == 0 or (self.kind in (Kind.EQ, Kind.LE) and count != 1):
            raise ValueError(f"operands: {self.kind.value} of {self.target} has {count}")
        if (self.index is not None) != (self.kind is Kind.SELECT):
            raise ValueError(f"index: {self.index!r} with {self.kind.value} of {self.target}")
        if self.kind is Kind.IN and not all(isinstance(term, int) for term in self.operands):
            raise ValueError(f"operands: IN of {self.target} takes constants only")

    @property
    def names(self) -> tuple[str, ...]:
        """The variables that it is about, the target first."""
        terms = (self.target, self.index, *self.operands)
        return tuple(dict.fromkeys(term for term in terms if isinstance(term, str)))

    def holds(self, values: Assignment) -> bool:
        """Whether it holds of values of its variables."""

        def value(term: Term) -> int:
            return values[term] if isinstance(term, str) else term

        target, operands = values[self.target], [value(term) for term in self.operands]
        if self.kind is Kind.PROD:
            return target == math.prod(operands)
        if self.kind is Kind.SUM:
            return target == sum(operands)
        if self.kind is Kind.EQ:
            return target == operands[0]
        if self.kind is Kind.LE:
            return target <= operands[0]
        if self.kind is Kind.IN:
            return target in operands
        place = values[self.index or ""]
        return 0 <= place < len(operands) and target == operands[place]

    def __str__(self) -> str:
        terms = list(map(str, self.operands))
        if self.kind is Kind.PROD:
            text = f"{self.target} = {' * '.join(terms)}"
        elif self.kind is Kind.SUM:
            text = f"{self.target} = {' + '.join(terms)}"
        elif self.kind is Kind.EQ:
            text = f"{self.target} = {terms[0]}"
        elif self.kind is Kind.LE:
            text = f"{self.target} <= {terms[0]}"
        elif self.kind is Kind.IN:
            text = f"{self.target} in {{{', '.join(terms)}}}"
        else:
            text = f"{self.target} = [{', '.join(terms)}][{self.index}]"
        return f"{text}  ({self.why})" if self.why else text


@dataclass
class Model:
    """Variables and the constraints over them, in the order in which they were added."""

    variables: dict[str, Variable] = field(default_factory=dict)
    constraints: list[Constraint] = field(default_factory=list)
    tunables: list[str] = field(default_factory=list)
    """The names of the tunable variables."""

    def add(self, variable: Variable) -> str:
        """Adds a variable, and returns its name.

        Raises:
            ValueError: There is one of that name.
        """
        if variable.name in self.variables:
            raise ValueError(f"variable: {variable.name} is there already")
        self.variables[variable.name] = variable
        if variable.role is Role.TUNABLE:
            self.tunables.append(variable.name)
        return variable.name

    def require(
        self,
        kind: Kind,
        target: str,
        *operands: Term,
        index: str | None = None,
        why: str = "",
    ) -> None:
        """Adds a constraint.

        Raises:
            ValueError: It names a variable that is not there, or is none of its kind.
        """
        constraint = Constraint(kind, target, operands, index, why)
        for name in constraint.names:
            if name not in self.variables:
                raise ValueError(f"constraint: {constraint} names {name!r}, which is no variable")
        self.constraints.append(constraint)

    def bounds(self, term: Term) -> tuple[int, int]:
        """Returns the least and the largest value of a term."""
        return self.variables[term].bounds if isinstance(term, str) else (term, term)

    @property
    def raw_size(self) -> int:
        """How many configurations there are if no constraint is heeded.

        That is the product of the sizes of the tunables' domains; other variables follow from them.
        """
        return math.prod(len(self.variables[name].domain) for name in self.tunables)

    def violated(self, values: Assignment) -> list[Constraint]:
        """Returns the constraints that do not hold of an assignment, those of domains included."""
        found = [
            Constraint(Kind.IN, v.name, tuple(v.domain), why="its domain")
            for v in self.variables.values()
            if values[v.name] not in v.domain
        ]
        return found + [c for c in self.constraints if not c.holds(values)]

    def counts(self) -> dict[str, int]:
        """Returns how many variables there are of each role, and constraints of each kind."""
        roles = Counter(v.role.value for v in self.variables.values())
        kinds = Counter(c.kind.value for c in self.constraints)
        ordered = {role.value: roles[role.value] for role in Role}
        return ordered | {kind.value: kinds[kind.value] for kind in Kind}

    def __str__(self) -> str:
        lines = []
        for role in Role:
            of_role = [v for v in self.variables.values() if v.role is role]
            lines.append(f"{len(of_role)} {role.value} variables")
            # A place is as wide as its tunable: it has nothing to tell.
            if role is not Role.PLACE:
                lines += [f"  {variable}" for variable in of_role]
        lines.append(f"{len(self.constraints)} constraints")
        lines += [f"  {c.kind.value:6} {c}" for c in self.constraints]
        kinds = ", ".join(f"{self.counts()[kind.value]} {kind.value}" for kind in Kind)
        lines.append(f"constraints by kind: {kinds}")
        lines.append(f"raw space: {self.raw_size:.3e} configurations")
        return "\n".join(lines)
