"""The implicit GEMM of the CPU: ``operations/cpu/gemm``.

A tunable is a field of ``NamedCut`` of the same name. All are run-time values: nothing is compiled
for them.
"""

from __future__ import annotations

from ..generators import (
    bounded_if,
    candidates,
    memory_limit,
    place,
    product,
    stage_fuse,
    table,
    table2,
)
from ..model import Kind, Model
from ..rules import Rule, RuleKind, Workload
from ..schedule import Schedule, Stage
from .parts import parts

__all__ = ["RULES"]


def _access(model: Model, workload: Workload) -> None:
    """How register tiles read the activation."""
    candidates(model, "access", workload.facts.row("access"), "gathered, strips, matrix")


def _tile(model: Model, workload: Workload) -> None:
    """Pixels into register tiles and tasks, filters into tasks, products into slices."""
    facts = workload.facts
    rows, counts = facts.row("tile_rows"), facts.rows("tiles_of_rows")
    possible = [row for place, row in enumerate(rows) if any(tiles[place] for tiles in counts)]
    candidates(model, "tile_rows", possible, "pixels of a register tile")
    candidates(model, "tiles", range(1, facts["max_tiles"] + 1), "register tiles of a task")
    candidates(model, "group_count", parts(facts["groups"]), "groups of a task")
    candidates(model, "unit_count", parts(facts["units"]), "pieces of a task's filters")
    candidates(model, "depth", facts.row("depths"), "products of a slice")
    # Of a size that an access does not cut lines into there are 0 tiles.
    by_access = [
        table(
            model,
            f"tiles.of_access_{code}",
            "tile_rows",
            dict(zip(rows, tiles, strict=True)).__getitem__,
        )
        for code, tiles in zip(facts.row("access"), counts, strict=True)
    ]
    stage_fuse(model, "tiles.most", place(model, "access"), by_access)
    model.require(Kind.LE, "tiles", "tiles.most", why="tiles of all pixels")
    strips = [int(code == facts["strips"]) for code in facts.row("access")]
    stage_fuse(model, "in_strips", place(model, "access"), strips)
    table(model, "gathers_or_matrix", "access", lambda code: int(code != facts["strips"]))
    bounded_if(model, "group_count", "gathers_or_matrix", None, 1)
    longest = [row[0] for row in facts.rows("longest_depth")]
    stage_fuse(model, "depth.most", place(model, "access"), longest)
    model.require(Kind.LE, "depth", "depth.most", why="runs of a strip")


def _tensorize(model: Model, workload: Workload) -> None:
    """A register tile multiplies whole panels, and tasks are cut in units of the fewest."""
    table(model, "unit_sums", "tile_rows", lambda rows: rows * workload.facts["unit_columns"])


def _cache(model: Model, workload: Workload) -> None:
    """Activations of a task's tiles, and its sums, stay in L2."""
    facts = workload.facts
    depths, rows = facts.row("depths"), facts.row("tile_rows")
    product(model, "read_elements", "tile_rows", "depth", "group_count")
    strides = dict(zip(depths, facts.row("gathered_strides"), strict=True))
    stride = table(model, "gathered_stride", "depth", strides.__getitem__)
    product(model, "gathered_elements", "tile_rows", stride)
    by_depth = dict(zip(depths, facts.rows("strip_elements"), strict=True))
    kept_rows = model.variables["tile_rows"].domain
    by_place = [
        [by_depth[depth][rows.index(row)] for row in kept_rows]
        for depth in model.variables["depth"].domain
    ]
    strip = table2(model, "strip_elements", ("depth", "tile_rows"), by_place)
    # Of one group; those of several share what a strip is rounded up by.
    product(model, "strips_elements", strip, "group_count")
    kept = ("gathered_elements", "strips_elements")
    stage_fuse(model, "tile_elements", "in_strips", kept)
    several = table(model, "has_tiles", "tiles", lambda tiles: int(tiles > 1))
    # One tile takes what it takes.
    for name in ("read_elements", "tile_elements"):
        held = product(model, f"{name}.of_task", name, "tiles")
        counted = stage_fuse(model, f"{name}.counted", several, (0, held))
        model.require(Kind.LE, counted, facts["max_block_elements"], why="a slice in L2")
    sliced = table(model, "is_sliced", "depth", lambda depth: int(depth < facts["products"]))
    product(model, "kept_sums", "tiles", "group_count", "unit_count", "unit_sums")
    sums = stage_fuse(model, "sums", sliced, (facts["stored_sums"], "kept_sums"))
    memory_limit(
        model,
        Schedule(
            "sums",
            (
                Stage("multiply", writes=("partial sums",), reads=("partial sums",)),
                Stage("store", reads=("partial sums",)),
            ),
            {"partial sums": sums},
        ),
        facts["max_sums"],
    )


#: In order.
RULES = (
    Rule(RuleKind.ADD_CACHE_STAGE, "activations in place, in strips or gathered", _access),
    Rule(RuleKind.MULTI_LEVEL_TILING, "pixels, filters, products", _tile),
    Rule(RuleKind.TENSORIZE, "register tiles of whole panels", _tensorize),
    Rule(RuleKind.MULTI_LEVEL_SCRATCHPAD, "a task's activations and sums in L2", _cache),
)
