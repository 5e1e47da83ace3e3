"""The Winograd kernel of the CPU: ``operations/cpu/winograd``.

A tunable is a field of ``WinogradCut`` of the same name. All are run-time values: nothing is
compiled for them. The size of an output tile follows from the filter's taps.
"""

from __future__ import annotations

from ..generators import bounded_if, candidates, place, product, stage_fuse, table
from ..model import Kind, Model, Term
from ..rules import Rule, RuleKind, Workload
from .parts import parts

__all__ = ["RULES"]


def _first(model: Model, workload: Workload) -> None:
    """Which operand is transformed first, into memory that all tasks share."""
    candidates(model, "shares_input", workload.facts.row("shares_input"), "filter first, or input")
    table(model, "shares_filter", "shares_input", lambda shares: 1 - shares)


def _tile(model: Model, workload: Workload) -> None:
    """Output tiles and filters into tasks, products into slices."""
    facts = workload.facts
    most = facts["most_units_at_once"]
    candidates(model, "tiles", facts.row("tiles"), "output tiles of a task")
    at_once = range(1, min(most, facts["units"]) + 1)
    units = {*parts(facts["units"]), *at_once}
    candidates(model, "unit_count", units, "register tiles over a task's filters")
    candidates(model, "units_at_once", at_once, "register tiles whose sums are kept")
    candidates(model, "slice", facts.row("slices"), "products between two spills")
    model.require(Kind.LE, "units_at_once", "unit_count", why="sums of a task's filters")
    # Tasks that share the input keep all sums, and spill them.
    bounded_if(model, "unit_count", "shares_input", None, most)
    shares = model.variables["shares_input"].domain
    least: list[Term] = ["unit_count" if shared else 1 for shared in shares]
    kept = stage_fuse(model, "units_kept", place(model, "shares_input"), least)
    model.require(Kind.LE, kept, "units_at_once", why="sums of a slice are added to")
    bounded_if(model, "slice", "shares_filter", facts["depth"], None)


def _tensorize(model: Model, workload: Workload) -> None:
    """A register tile multiplies whole panels, for each position of a tile."""
    panels = workload.facts["tile_panels"]
    table(model, "task_columns", "unit_count", lambda units: units * panels)


def _cache(model: Model, workload: Workload) -> None:
    """Transformed inputs of a task stay in L3; those of a register tile are what they are."""
    facts = workload.facts
    inputs = facts["tile_inputs"]
    several = table(model, "has_tiles", "tiles", lambda tiles: int(tiles > facts["least_tiles"]))
    product(model, "own_inputs", "tiles", several, "shares_filter", inputs)
    model.require(Kind.LE, "own_inputs", facts["own_inputs"], why="a task's inputs in L3")


#: In order.
RULES = (
    Rule(RuleKind.ADD_CACHE_STAGE, "the filter transformed first, or the input", _first),
    Rule(RuleKind.MULTI_LEVEL_TILING, "output tiles, filters, products", _tile),
    Rule(RuleKind.TENSORIZE, "register tiles of whole panels", _tensorize),
    Rule(RuleKind.MULTI_LEVEL_SCRATCHPAD, "a task's transformed inputs in L3", _cache),
)
