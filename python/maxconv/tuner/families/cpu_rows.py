"""The direct kernels of the CPU: ``operations/cpu/direct``.

They are those of depthwise and grouped convolutions, and of few filters. A tunable is a field of
``RowCut`` of the same name. All are run-time values: nothing is compiled for them.
"""

from __future__ import annotations

import functools

from ..generators import candidates, place, stage_fuse, table
from ..model import Kind, Model
from ..rules import Rule, RuleKind, Workload

__all__ = ["RULES"]


def _tile(model: Model, workload: Workload) -> None:
    """Image rows into tasks, and filters or columns into blocks."""
    facts = workload.facts
    candidates(model, "cuts_columns", facts.row("cuts_columns"), "blocks of filters, or of columns")
    candidates(model, "rows", facts.row("rows"), "image rows of a task")
    blocks = facts.rows("blocks")
    candidates(model, "block", {size for sizes in blocks for size in sizes}, "filters or columns")
    units, most = ([row[0] for row in facts.rows(n)] for n in ("block_unit", "most_block"))
    fits = [
        table(model, f"fits.of_{cuts}", "block", functools.partial(_fits, unit, largest))
        for cuts, unit, largest in zip(facts.row("cuts_columns"), units, most, strict=True)
    ]
    allowed = stage_fuse(model, "fits", place(model, "cuts_columns"), fits)
    model.require(Kind.EQ, allowed, 1, why="a size of such blocks")


def _fits(unit: int, most: int, size: int) -> int:
    """Returns whether blocks may have a size: 1 or 0."""
    return int(size % unit == 0 and size <= most)


#: In order.
RULES = (Rule(RuleKind.MULTI_LEVEL_TILING, "image rows, filters or columns", _tile),)
