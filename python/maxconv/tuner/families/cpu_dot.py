"""The dot-product GEMM of the CPU: ``operations/cpu/dot``.

A tunable is a field of ``DotCut`` of the same name. All are run-time values: nothing is compiled
for them.
"""

from __future__ import annotations

from ..generators import candidates, place, product, stage_fuse, table, total
from ..model import Kind, Model
from ..rules import Rule, RuleKind, Workload
from .parts import parts

__all__ = ["RULES"]


def _access(model: Model, workload: Workload) -> None:
    """How register tiles read the activation."""
    codes = workload.facts.row("access")
    candidates(model, "access", codes, "gathered, a rectangle of the image, matrix, lines")
    is_image = [int(code == workload.facts["image"]) for code in codes]
    stage_fuse(model, "in_image", place(model, "access"), is_image)


def _tile(model: Model, workload: Workload) -> None:
    """Pixels into blocks, filters into blocks, blocks to threads."""
    facts = workload.facts
    widest, tallest = (
        [row[0] for row in facts.rows(name)] for name in ("most_columns", "most_lines")
    )
    lines = [size for size in facts.row("lines") if size <= max(tallest)]
    columns = _whole_tiles(facts.row("columns"), facts["rows"], max(widest))
    candidates(model, "lines", lines, "lines of a block")
    candidates(model, "columns", columns, "pixels of a block's line")
    candidates(model, "unit_count", parts(facts["units"]), "register tiles over a block's filters")
    threads = facts["threads"]
    candidates(model, "threads", {1, threads}, "the calling thread, or all")
    for name, most in (("lines", tallest), ("columns", widest)):
        stage_fuse(model, f"{name}.most", place(model, "access"), most)
        model.require(Kind.LE, name, f"{name}.most", why="of the output")


def _whole_tiles(sizes: tuple[int, ...], rows: int, most: int) -> set[int]:
    """Returns sizes, and the same in whole register tiles."""
    found = {min(most, -(-size // rows) * rows) for size in sizes}
    return found | {size for size in sizes if size <= most}


def _tensorize(model: Model, workload: Workload) -> None:
    """A register tile multiplies whole panels by chunks of products."""
    panels = workload.facts["panels"]
    table(model, "block_panels", "unit_count", lambda units: units * panels)


def _cache(model: Model, workload: Workload) -> None:
    """Activations of a block stay in L2; a line of a register tile's pixels is what it is."""
    facts = workload.facts
    access = place(model, "access")
    codes = facts.row("access")
    # What an access that this problem has not would take makes no difference.
    bytes_of = dict(zip(codes, (row[0] for row in facts.rows("pixel_bytes")), strict=True))
    flat = [0 if code == facts["image"] else bytes_of[code] for code in codes]
    row_bytes = stage_fuse(model, "column_bytes", access, flat)
    counted = product(model, "row_bytes", "columns", row_bytes)
    lines = table(
        model,
        "input_lines",
        "lines",
        lambda count: (count - 1) * facts["line_stride"] + facts["line_span"],
    )
    columns = table(
        model,
        "input_columns",
        "columns",
        lambda count: (count - 1) * facts["column_stride"] + facts["column_span"],
    )
    image = bytes_of.get(facts["image"], 0)
    pixels = product(model, "rectangle_bytes", lines, columns, "in_image", image)
    rest = product(model, "rectangle_rest", "in_image", facts["rectangle_rest"])
    held = total(model, "block_bytes", counted, pixels, rest)
    tall = table(model, "has_lines", "lines", lambda count: int(count > 1))
    wide = table(model, "has_tiles", "columns", lambda count: int(count > facts["rows"]))
    several = total(model, "several", tall, wide)
    limits = (max(model.bounds(held)[1], 1), facts["max_block_bytes"], facts["max_block_bytes"])
    most = stage_fuse(model, "block_bytes.most", several, limits)
    model.require(Kind.LE, held, most, why="a block in L2")


#: In order.
RULES = (
    Rule(RuleKind.ADD_CACHE_STAGE, "activations in place, as an image or gathered", _access),
    Rule(RuleKind.MULTI_LEVEL_TILING, "pixels, filters, threads", _tile),
    Rule(RuleKind.TENSORIZE, "register tiles of whole panels", _tensorize),
    Rule(RuleKind.MULTI_LEVEL_SCRATCHPAD, "a block's activations in L2", _cache),
)
