"""The Hopper implicit GEMM: ``operations/nvidia/sm90/gemm``.

A tunable is a field of ``Sm90Config`` of the same name, but for ``split_k``, which the plan has.
What refuses a configuration there is a constraint here; limits are facts that the kernel tells.
"""

from __future__ import annotations

from ..generators import (
    bounded_if,
    candidates,
    ceildiv,
    loop_fuse,
    loop_split,
    memory_limit,
    place,
    product,
    rounded_up,
    stage_fuse,
    table,
    total,
)
from ..model import Kind, Model
from ..rules import Rule, RuleKind, Workload
from ..schedule import Schedule, Stage

__all__ = ["RULES"]

M, N = "block_tile_shape.m", "block_tile_shape.n"
CLUSTER_M, CLUSTER_N, CLUSTER_K = (f"cluster_shape.{axis}" for axis in "mnk")
SUBTILE_M = "epilogue.output_tile_shape.m"
ACT_STAGES, FILTER_STAGES = "num_act_pipeline_stages", "num_filter_pipeline_stages"
GATHER_STAGES = "num_gather_stages"
LOAD_STAGES, OUTPUT_STAGES = "epilogue.num_epi_load_stages", "epilogue.num_output_stages"

#: Tiles of more pixels or filters have more accumulators than registers.
_MOST_PIXELS = _MOST_FILTERS = 512
_BOOLEAN = (0, 1)


def _tile(model: Model, workload: Workload) -> None:
    """Outputs into tiles of blocks, and those into parts of consumers."""
    facts = workload.facts
    half, rows = facts["half_bytes"] == facts["output_bytes"], facts["matrix_rows"]
    subtile = facts["subtile_filters"]
    # Tiles that end within a sub-tile take one group, of whole tiles.
    divides = facts["groups"] == 1
    filters = [
        n
        for n in range(rows, _MOST_FILTERS + 1, rows)
        if n % subtile == 0 or (divides and facts["filters"] % n == 0)
    ]
    # Threads copy a chunk of a row at once, and a row a thread.
    if gathers := not facts["has_chunks"]:
        step = facts["gathered_rows"]
        filters = [n for n in filters if n <= facts["warpgroup"] and n % step == 0]
    pixels = range(rows, (facts["warpgroup"] if gathers else _MOST_PIXELS) + 1, rows)
    candidates(model, M, pixels, "pixels of a block's tile")
    candidates(model, N, filters, "filters of a block's tile")
    candidates(model, "consumers", (1, 2), "warpgroups that multiply")
    candidates(model, "cooperative", _BOOLEAN, "consumers share a tile")
    swapped = _BOOLEAN if half else (1,)
    candidates(model, "swapped", swapped, "filters are the multiply's rows")
    table(model, "consumers.least", "cooperative", lambda v: 1 if v else 2)
    model.require(Kind.LE, "consumers.least", "consumers", why="ping-pong takes 2 consumers")
    # Cooperative consumers share filters where each gets whole multiplies of them, or pixels.
    wide = table(model, "n.is_wide", N, lambda n: int(n % (2 * facts["mma_m"]) == 0))
    whole = stage_fuse(model, "n.is_cut", place(model, "consumers"), (1, wide))
    table(model, "splits_filters", "swapped", lambda v: whole if v else 0)
    table(model, "consumer_parts", "cooperative", lambda v: "consumers" if v else 1)
    parts_m = stage_fuse(model, "consumer_parts.m", "splits_filters", ("consumer_parts", 1))
    parts_n = stage_fuse(model, "consumer_parts.n", "splits_filters", (1, "consumer_parts"))
    loop_split(model, M, "consumer_pixels", parts_m, why="pixels of a consumer")
    loop_split(model, N, "consumer_filters", parts_n, why="filters of a consumer")


def _multiply(model: Model, workload: Workload) -> None:
    """A consumer's part as multiplies of wgmma: ``M`` 64, one or two of ``N`` up to 256."""
    facts = workload.facts
    ends = table(model, "n.ends_subtile", N, lambda n: int(n % facts["subtile_filters"] != 0))
    table(model, "mma_rows", "swapped", lambda v: "consumer_filters" if v else "consumer_pixels")
    table(model, "mma_columns", "swapped", lambda v: "consumer_pixels" if v else "consumer_filters")
    loop_split(model, "mma_rows", "mma_rows.count", facts["mma_m"], why="rows of wgmma")
    loop_split(model, "mma_columns", "mma_columns.count", 8, why="columns of wgmma")
    model.require(Kind.LE, "mma_columns", facts["max_columns"], why="columns of wgmma")
    product(model, "accumulated", "mma_rows", "mma_columns")
    loop_split(model, "accumulated", "accumulators", facts["warpgroup"], why="of a thread")
    limits = facts.row("accumulators")
    gathers = len(limits) // 2 * (not facts["has_chunks"])
    stage_fuse(model, "accumulators.most", place(model, "consumers"), limits[gathers : gathers + 2])
    model.require(Kind.LE, "accumulators", "accumulators.most", why="registers of a thread")
    total(model, "ends_swapped", ends, "swapped")
    model.require(Kind.LE, "ends_swapped", 1, why="a tile that ends within a sub-tile")


def _cluster(model: Model, workload: Workload) -> None:
    """Blocks that share loads, or the sum of a tile."""
    facts = workload.facts
    most = facts["max_cluster"]
    sizes = [1 << i for i in range(most.bit_length())]
    alone = bool(facts["unaligned"])
    candidates(model, CLUSTER_M, (1,) if alone else sizes, "blocks that share filters")
    candidates(model, CLUSTER_N, (1,) if alone else sizes, "blocks that share activations")
    candidates(model, CLUSTER_K, (1, facts["max_split_k"]), "blocks that may share a tile")
    product(model, "cluster_size", CLUSTER_M, CLUSTER_N)
    model.require(Kind.LE, "cluster_size", most, why="blocks of a cluster")
    splits = place(model, CLUSTER_K)
    bounded_if(model, "cluster_size", splits, None, 1)
    bounded_if(model, "cooperative", splits, 1, None)
    bounded_if(model, CLUSTER_N, "n.ends_subtile", None, 1)
    # Each block loads a multiple of 8 rows of what it shares.
    loop_split(model, N, "filter_rows", 8, CLUSTER_M, why="filters that a block loads")
    model.require(Kind.LE, "filter_rows", facts["max_box"] // 8, why="a box of TMA")
    ceildiv(model, "tiles.n", facts["filters"], N, "tiles along the filters")
    loop_split(model, "tiles.n", "clusters.n", CLUSTER_N, why="no block is idle")


def _halo(model: Model, workload: Workload) -> None:
    """Whether taps of a filter row share a stage."""
    halos = workload.facts.row("halos")
    gathers = not workload.facts["has_chunks"]
    candidates(model, "halo", halos[:1] if gathers else halos, "pixels beyond the tile")
    table(model, "has_halo", "halo", lambda v: int(v > 0))
    total(model, "act_stage_pixels", M, "halo")
    loop_split(model, "act_stage_pixels", "act_rows", 8, CLUSTER_N, why="pixels a block loads")


def _rings(model: Model, workload: Workload) -> None:
    """Stages of the rings that loads fill."""
    facts = workload.facts
    gathers = not facts["has_chunks"]
    candidates(model, ACT_STAGES, range(2, 13), "ring of activations")
    candidates(model, FILTER_STAGES, range(2, 17), "ring of filters")
    direct = facts["direct"]
    copied = ((direct,) if facts["has_pieces"] else ()) + (2, 3, 4)
    candidates(model, GATHER_STAGES, copied if gathers else (0,), "rows that threads copy")
    table(model, "copied_stages", GATHER_STAGES, lambda v: 0 if v == direct else v)
    if gathers:
        # Consumers read some of the stages that copies go straight into.
        is_direct = table(model, "gathers_directly", GATHER_STAGES, lambda v: int(v == direct))
        for ring in (ACT_STAGES, FILTER_STAGES):
            bounded_if(model, ring, is_direct, facts["held_stages"] + 1, None)
    candidates(model, "stationary", (0,) if gathers else _BOOLEAN, "the ring holds the filter")
    candidates(model, "unaligned", (facts["unaligned"],), "pixels are no multiples of 16 bytes")
    stationary = "stationary"
    if model.variables[stationary].domain != (0,):
        bounded_if(model, CLUSTER_M, stationary, None, 1)
        bounded_if(model, FILTER_STAGES, stationary, facts["steps"], None)
        product(model, "cluster_filters", CLUSTER_N, N)
        bounded_if(model, "cluster_filters", stationary, facts["filters"], None)
        bounded_if(model, stationary, place(model, CLUSTER_K), None, 0)


def _epilogue(model: Model, workload: Workload) -> None:
    """How a consumer's sums leave."""
    facts = workload.facts
    rows = facts["matrix_rows"]
    least = rows * facts["output_bytes"] // facts["half_bytes"]
    subtiles = [size for size in (rows, 2 * rows, 4 * rows) if size >= least]
    candidates(model, SUBTILE_M, subtiles, "pixels that are stored at a time")
    loop_split(model, "consumer_pixels", "pixel_subtiles", SUBTILE_M)
    columns = table(model, "subtile.least", "swapped", lambda v: rows if v else facts["mma_m"])
    model.require(Kind.LE, columns, SUBTILE_M, why="pixels are the multiply's rows")
    candidates(model, LOAD_STAGES, range(int(workload.residual), 9), "buffers of residuals")
    candidates(model, OUTPUT_STAGES, range(1, 5), "output stores under way")
    candidates(model, "epilogue.fragment_size", (8, 16, 32), "values visited at a time")
    table(model, "subtile_values", SUBTILE_M, lambda m: m * facts["subtile_filters"] // 128)
    loop_split(model, "subtile_values", "fragments", "epilogue.fragment_size")
    candidates(model, "epilogue.reuse_c", _BOOLEAN, "outputs overwrite residuals")
    candidates(model, "epilogue.delay_store", _BOOLEAN, "a store waits for the next sub-tile")
    stores = (0,) if facts["unaligned"] else _BOOLEAN
    candidates(model, "epilogue.tma_store", stores, "TMA stores, not threads")
    candidates(model, "epilogue.whole_rows", _BOOLEAN, "threads store rows side by side")
    total(model, "row_stores", "epilogue.tma_store", "epilogue.whole_rows")
    model.require(Kind.LE, "row_stores", 1, why="TMA stores, or threads")
    total(model, "halo_stores", "has_halo", "epilogue.tma_store")
    model.require(Kind.LE, "halo_stores", 1, why="TMA stores no tile with a halo")
    # Delayed stores that reuse buffers need one that no store holds, or they deadlock.
    held = total(model, "held_stages", OUTPUT_STAGES, "epilogue.delay_store")
    bounded_if(model, held, "epilogue.reuse_c", None, LOAD_STAGES)
    table(model, "stores_apart", "epilogue.reuse_c", lambda v: 1 - v)
    product(model, "delays_apart", "epilogue.delay_store", "stores_apart")
    bounded_if(model, OUTPUT_STAGES, "delays_apart", 2, None)


def _memory(model: Model, workload: Workload) -> None:
    """Shared memory of a block."""
    facts = workload.facts
    row, pattern = facts["row_bytes"], facts["pattern_bytes"]
    product(model, "act_ring_bytes", ACT_STAGES, "act_stage_pixels", row)
    product(model, "filter_ring_bytes", FILTER_STAGES, N, row)
    total(model, "gathered_rows", M, N)
    product(model, "copied_bytes", "copied_stages", "gathered_rows", facts["gathered_bytes"])
    rounded_up(model, "gather_bytes", "copied_bytes", pattern)
    outputs = table(
        model, "output_buffers", "epilogue.reuse_c", lambda v: 0 if v else OUTPUT_STAGES
    )
    total(model, "epilogue_buffers", LOAD_STAGES, outputs)
    product(model, "buffers_bytes", "consumers", "epilogue_buffers", SUBTILE_M, row)
    # Ends of residuals' rows, for each consumer in whole patterns.
    chunk = facts["chunk_bytes"] * facts["unaligned"]
    ends = table(model, "ends.of_one", SUBTILE_M, lambda m: -(-m * chunk // pattern) * pattern)
    product(model, "ends_bytes", "consumers", ends)
    product(model, "load_barriers", LOAD_STAGES, "consumers")
    rings = total(model, "ring_stages", ACT_STAGES, FILTER_STAGES, "load_barriers")
    exchange = table(model, "exchange.of_one", "consumers", lambda c: 1 + c)
    splits = place(model, CLUSTER_K)
    stage_fuse(model, "exchange_barriers", splits, (0, exchange))
    # And the one that loaders of residuals wait for, where there is one: the sum is rounded up.
    total(model, "barriers", rings, rings, "exchange_barriers", 1)
    product(model, "barrier_bytes", "barriers", facts["barrier_bytes"])
    rounded_up(model, "header_bytes", "barrier_bytes", pattern)
    memory_limit(model, _schedule(), facts["max_shared_bytes"])


def _schedule() -> Schedule:
    """Returns the kernel's.

    It is persistent: loads of the next tile run while one is multiplied and the last one stored.
    """
    rings = ("activations", "filters", "copied rows")
    buffers = ("epilogue", "ends")
    return Schedule(
        "shared",
        (
            Stage("prologue", writes=("barriers",)),
            Stage("fill", writes=rings, reads=("barriers",)),
            Stage("steady", writes=(*rings, *buffers), reads=("barriers", *rings, *buffers)),
            Stage("drain", reads=("barriers", *buffers)),
        ),
        {
            "barriers": "header_bytes",
            "activations": "act_ring_bytes",
            "filters": "filter_ring_bytes",
            "copied rows": "gather_bytes",
            "epilogue": "buffers_bytes",
            "ends": "ends_bytes",
        },
    )


def _split_k(model: Model, workload: Workload) -> None:
    """Blocks of a cluster that add up a tile's sum."""
    facts = workload.facts
    steps = facts["steps"]
    splits = place(model, CLUSTER_K)
    candidates(model, "split_k", facts.row("splits"), "share a tile")
    model.require(Kind.LE, "split_k", CLUSTER_K, why="blocks of the cluster")
    rounds = stage_fuse(model, "rounds", "has_halo", (steps, steps // facts["taps_w"]))
    model.require(Kind.LE, "split_k", rounds, why="stages of a tile's sum")
    # Sums of the sub-tiles that one block stores, of the others, where the rings may be.
    total(model, "loads_bytes", "act_ring_bytes", "filter_ring_bytes", "gather_bytes")
    sums = ("consumers", SUBTILE_M, "consumer_filters", facts["sum_bytes"])
    product(model, "subtile_sums", *sums, why="of all consumers")
    ceildiv(model, "own_blocks", "pixel_subtiles", "split_k", "of pixels, that a block stores")
    table(model, "others", "split_k", lambda v: v - 1)
    product(model, "exchanged", "subtile_sums", "own_blocks", "others", why="that a block is sent")
    model.require(Kind.LE, "exchanged", "loads_bytes", why="the rings' memory serves")
    ceildiv(model, "half_blocks", "pixel_subtiles", 2, "that a block stores of two")
    product(model, "exchanged.two", "subtile_sums", "half_blocks", why="that one of two is sent")
    stage_fuse(model, "exchange_bytes", splits, (0, "exchanged.two"))
    model.require(Kind.LE, "exchange_bytes", "loads_bytes", why="the rings' memory serves two")
    # Where tiles are shared, no multiprocessor has more than two blocks.
    pixels = table(model, "pixels", "halo", dict(_pixels(workload)).__getitem__)
    product(model, "cluster_pixels", CLUSTER_M, M)
    ceildiv(model, "clusters.m", pixels, "cluster_pixels", "tiles along the pixels")
    loop_fuse(model, "blocks", "clusters.m", "clusters.n", facts["groups"], "split_k")
    table(model, "is_split", "split_k", lambda v: int(v > 1))
    bounded_if(model, "blocks", "is_split", None, 2 * facts["units"])


def _pixels(workload: Workload) -> list[tuple[int, int]]:
    """The traversal's pixels of each halo."""
    facts = workload.facts
    return list(zip(facts.row("halos"), facts.row("pixels"), strict=True))


def _nothing(model: Model, workload: Workload) -> None:
    """A stage that is inlined adds nothing."""


#: In order.
RULES = (
    Rule(RuleKind.ALWAYS_INLINE, "im2col in the loads' coordinates, no matrix", _nothing),
    Rule(RuleKind.MULTI_LEVEL_TILING, "outputs: blocks, consumers", _tile),
    Rule(RuleKind.TENSORIZE, "consumers' parts: wgmma", _multiply),
    Rule(RuleKind.MULTI_SCOPE_SCRATCHPAD, "blocks of a cluster share loads", _cluster),
    Rule(RuleKind.USER_DEFINED, "a stage serves a filter row", _halo),
    Rule(RuleKind.ADD_CACHE_STAGE, "rings of activations and filters", _rings),
    Rule(RuleKind.ADD_CACHE_STAGE, "residual and output through buffers", _epilogue),
    Rule(RuleKind.MULTI_LEVEL_SCRATCHPAD, "shared memory of a block", _memory),
    Rule(RuleKind.MULTI_SCOPE_SCRATCHPAD, "blocks of a cluster share a tile", _split_k),
)
