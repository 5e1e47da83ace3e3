"""Samples of a space: the constraint model as OR-Tools' CP-SAT solves it.

A sample is one solve: the tunables get shuffled random values as hints and a random seed, and the
solver returns the first assignment that it comes to. Nothing is enumerated.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._extra import extra
from .model import Assignment, Constraint, Kind, Model, Term, Variable

__all__ = ["ExhaustedError", "InfeasibleError", "Solver", "SolverTimeoutError"]

_SECONDS = 30.0
"""Of a solve, at most: most take a hundredth."""

_TRIES = 8
"""Solves with hints of their own before what is excluded becomes a constraint."""


class InfeasibleError(ValueError):
    """No configuration satisfies every constraint.

    ``clash`` are constraints that no assignment satisfies together, as far as the solver says.
    """

    def __init__(self, message: str, clash: Sequence[Constraint] = ()) -> None:
        super().__init__(message)
        self.clash = tuple(clash)


class ExhaustedError(InfeasibleError):
    """Every configuration that satisfies the constraints is excluded."""


class SolverTimeoutError(RuntimeError):
    """A solve took too long."""


class Solver:
    """Draws assignments of a model.

    The same seed and the same calls give the same assignments.

    Args:
        model: The model.
        seed: Of everything random.

    Raises:
        MissingExtraError: OR-Tools is not installed.
    """

    def __init__(self, model: Model, seed: int) -> None:
        self.model = model
        self._cp = extra("ortools.sat.python.cp_model")
        self._random = random.Random(seed)
        self._base = _Translation(self._cp, model)

    def sample(
        self,
        *,
        excluded: Iterable[Assignment] = (),
        fixed: Mapping[str, int] | None = None,
        hints: Assignment | None = None,
        also: Sequence[Constraint] = (),
    ) -> dict[str, int]:
        """Draws an assignment.

        Args:
            excluded: Assignments whose tunables the drawn one must not have.
            fixed: Values that tunables must have.
            hints: Values that tunables should have where that is possible; by default random ones.
            also: Constraints beside the model's.

        Raises:
            InfeasibleError: There is none; the message names the constraints that clash.
            ExhaustedError: There is none that is not excluded.
            ValueError: A name is no tunable of the model, or a value is not in its domain.
            SolverTimeoutError: The solver has not found one in half a minute.
        """
        self._check(fixed or {}, "fixed")
        self._check(hints or {}, "hints")
        limits = [Constraint(Kind.EQ, n, (v,), why="asked for") for n, v in (fixed or {}).items()]
        return self._draw({self.key(a) for a in excluded}, [*limits, *also], hints)

    def samples(self, count: int, *, excluded: Iterable[Assignment] = ()) -> list[dict[str, int]]:
        """Draws assignments that differ from one another in their tunables.

        Args:
            count: How many, at most: fewer where the space has no more.
            excluded: As ``sample`` takes them.

        Raises:
            InfeasibleError: The space is empty, whatever is excluded.
            ValueError: ``count`` is not positive.
        """
        if count < 1:
            raise ValueError(f"count: {count} is not positive; at least 1 is needed")
        taken = {self.key(assignment) for assignment in excluded}
        drawn: list[dict[str, int]] = []
        while len(drawn) < count:
            try:
                drawn.append(self._draw(taken, (), None))
            except ExhaustedError:
                break
            taken.add(self.key(drawn[-1]))
        return drawn

    def key(self, assignment: Assignment) -> tuple[int, ...]:
        """Returns the values of an assignment's tunables, in the model's order."""
        return tuple(assignment[name] for name in self.model.tunables)

    def _draw(
        self,
        taken: set[tuple[int, ...]],
        limits: Sequence[Constraint],
        hints: Assignment | None,
    ) -> dict[str, int]:
        for attempt in range(_TRIES if taken else 1):
            # Hints that lead to what is excluded would lead there again.
            found = self._solve(limits, hints if attempt == 0 else None, ())
            if found is None:
                raise self._infeasible(limits)
            if self.key(found) not in taken:
                return found
        found = self._solve(limits, None, sorted(taken))
        if found is None:
            raise ExhaustedError(
                f"space: all of its configurations are excluded, of which there are {len(taken)}"
            )
        return found

    def _check(self, values: Mapping[str, int], what: str) -> None:
        for name, value in values.items():
            variable = self.model.variables.get(name)
            if name not in self.model.tunables or variable is None:
                raise ValueError(f"{what}: {name!r} is no tunable variable")
            if value not in variable.domain:
                raise ValueError(f"{what}: {value} is no value of {variable}")

    def _solve(
        self,
        limits: Sequence[Constraint],
        hints: Assignment | None,
        taken: Sequence[tuple[int, ...]],
    ) -> dict[str, int] | None:
        """Solves once; None if it is infeasible."""
        # What bounds one variable is its domain for a while; a copy takes longer than a solve.
        bounded: dict[str, Sequence[int]] = {}
        further = []
        for constraint in limits:
            if constraint.kind in (Kind.EQ, Kind.IN) and len(constraint.names) == 1:
                name = constraint.target
                before = bounded.get(name, self.model.variables[name].domain)
                asked = (term for term in constraint.operands if isinstance(term, int))
                bounded[name] = [value for value in asked if value in before]
            else:
                further.append(constraint)
        if not all(bounded.values()):
            return None
        base = self._base.copy() if further or taken else self._base
        for constraint in further:
            base.add(constraint)
        try:
            for name, domain in bounded.items():
                base.restrict(name, domain)
            return self._solved(base, hints, taken)
        finally:
            for name in bounded:
                base.restrict(name, self.model.variables[name].domain)

    def _solved(
        self,
        base: _Translation,
        hints: Assignment | None,
        taken: Sequence[tuple[int, ...]],
    ) -> dict[str, int] | None:
        """Solves a translation."""
        names = [*self.model.tunables]
        if taken:
            base.cp.add_forbidden_assignments([base.variables[name] for name in names], taken)
        wanted = dict(hints or {})
        # The order matters too: early hints bound the domains of later ones.
        self._random.shuffle(names)
        base.cp.clear_hints()
        for name in names:
            value = wanted.get(name, self._random.choice(self.model.variables[name].domain))
            base.cp.add_hint(base.variables[name], value)
        solver = self._cp.CpSolver()
        parameters = solver.parameters
        parameters.num_workers = 1
        parameters.random_seed = self._random.randrange(1 << 31)
        parameters.randomize_search = True
        parameters.search_branching = type(parameters).HINT_SEARCH
        # Presolve would give what no constraint needs its least value. Without the others, which
        # serve to prove or to optimize, a sample takes a quarter of the time.
        parameters.cp_model_presolve = False
        parameters.cp_model_probing_level = 0
        parameters.linearization_level = 0
        parameters.symmetry_level = 0
        parameters.max_time_in_seconds = _SECONDS
        status = solver.solve(base.cp)
        if status == self._cp.INFEASIBLE:
            return None
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            raise SolverTimeoutError(
                f"solver: {solver.status_name(status)} after {_SECONDS:.0f} s; the space has "
                f"{len(self.model.variables)} variables"
            )
        return {name: solver.value(v) for name, v in base.variables.items()}

    def _infeasible(self, limits: Sequence[Constraint]) -> InfeasibleError:
        """Asks which constraints clash: each stands behind a literal that is assumed."""
        assumed = _Translation(self._cp, self.model, assumptions=True)
        for constraint in limits:
            assumed.add(constraint)
        assumed.cp.add_assumptions([*assumed.literals.values()])
        solver = self._cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_time_in_seconds = _SECONDS
        solver.solve(assumed.cp)
        indices = set(solver.sufficient_assumptions_for_infeasibility())
        clash = [c for c, literal in assumed.literals.items() if literal.index in indices]
        told = "; ".join(map(str, clash)) or "the solver does not say which"
        return InfeasibleError(
            f"space: no configuration satisfies all constraints; these clash: {told}", clash
        )


class _Translation:
    """A model as CP-SAT has it."""

    def __init__(self, cp: Any, model: Model, *, assumptions: bool = False) -> None:
        self.cp: Any = cp.CpModel()
        self._module = cp
        self._assumptions = assumptions
        self.literals: dict[Constraint, Any] = {}
        self.variables = {v.name: self._variable(v) for v in model.variables.values()}
        for constraint in model.constraints:
            self.add(constraint)

    def copy(self) -> _Translation:
        """Returns a copy to which constraints may be added."""
        other: _Translation = object.__new__(_Translation)
        other.__dict__.update(self.__dict__)
        other.cp = self.cp.clone()
        other.variables = {
            name: other.cp.get_int_var_from_proto_index(v.index)
            for name, v in self.variables.items()
        }
        return other

    def add(self, constraint: Constraint) -> None:
        """Adds a constraint."""
        made = self._constraint(constraint)
        if self._assumptions and made is not None:
            literal = self.cp.new_bool_var(str(constraint))
            made.only_enforce_if(literal)
            self.literals[constraint] = literal

    def restrict(self, name: str, values: Sequence[int]) -> None:
        """Sets a variable's domain."""
        if isinstance(values, range):
            domain = self._module.Domain(values[0], values[-1])
        else:
            domain = self._module.Domain.from_values(list(values))
        held = self.cp.proto.variables[self.variables[name].index].domain
        held.clear()
        held.extend(domain.flattened_intervals())

    def _variable(self, variable: Variable) -> Any:
        if isinstance(variable.domain, range):
            return self.cp.new_int_var(*variable.bounds, variable.name)
        domain = self._module.Domain.from_values(list(variable.domain))
        return self.cp.new_int_var_from_domain(domain, variable.name)

    def _constraint(self, constraint: Constraint) -> Any:
        target = self.variables[constraint.target]
        operands = [self._term(term) for term in constraint.operands]
        if constraint.kind is Kind.PROD:
            return self._product(target, operands)
        if constraint.kind is Kind.SUM:
            return self.cp.add(target == sum(operands))
        if constraint.kind is Kind.EQ:
            return self.cp.add(target == operands[0])
        if constraint.kind is Kind.LE:
            return self.cp.add(target <= operands[0])
        if constraint.kind is Kind.IN:
            domain = self._module.Domain.from_values([*map(int, constraint.operands)])
            return self.cp.add_linear_expression_in_domain(target, domain)
        index = self.variables[constraint.index or ""]
        self.cp.add_element(index, operands, target)
        return None

    def _product(self, target: Any, operands: Sequence[Any]) -> Any:
        """A product; CP-SAT's own takes variables, and constants are a factor of it."""
        factor, variables = 1, []
        for operand in operands:
            if isinstance(operand, int):
                factor *= operand
            else:
                variables.append(operand)
        if len(variables) < 2:
            return self.cp.add(target == factor * (variables[0] if variables else 1))
        self.cp.add_multiplication_equality(target, [factor * variables[0], *variables[1:]])
        return None

    def _term(self, term: Term) -> Any:
        return self.variables[term] if isinstance(term, str) else term
