"""The Blackwell implicit GEMM: ``operations/nvidia/sm100``.

A tunable is a field of ``Conv2dConfig`` of the same name; of the fields that are none the types
leave no choice. What refuses a configuration there is a constraint here.
"""

from __future__ import annotations

from ..generators import (
    bounded_if,
    candidates,
    ceildiv,
    loop_fuse,
    loop_split,
    memory_limit,
    product,
    rounded_up,
    stage_fuse,
    table,
    total,
)
from ..model import Kind, Model, Role, Variable
from ..rules import Rule, RuleKind, Workload
from ..schedule import Schedule, Stage

__all__ = ["RULES"]

BLOCK_N, MMA_M, MMA_N = "block_tile_shape.n", "mma_shape.m", "mma_shape.n"
OUTPUT_N = "output_tile_shape.n"
CLUSTER_M, CLUSTER_N, CLUSTER_K = (f"cluster_shape.{axis}" for axis in "mnk")
STAGES, ACCUM_STAGES = "num_pipeline_stages", "num_accum_pipeline_stages"
CLC_STAGES, OUTPUT_STAGES = "num_clc_pipeline_stages", "num_output_stages"
LOAD_STAGES = "num_epi_load_stages"


def _multiply(model: Model, workload: Workload) -> None:
    """Tiles of one instruction, of one block or of two that multiply together."""
    facts = workload.facts
    lanes, most = facts["tmem_lanes"], facts["max_mma_n"]
    candidates(model, "cta_group", (1, 2), "blocks that multiply together")
    candidates(model, MMA_M, (lanes, 2 * lanes), "pixels of an instruction")
    model.require(Kind.PROD, MMA_M, lanes, "cta_group", why="lanes of tensor memory")
    candidates(model, MMA_N, range(16, most + 1, 16), "filters of an instruction")
    candidates(model, BLOCK_N, range(8, most + 1, 8), "filters of a block")
    model.require(Kind.PROD, MMA_N, BLOCK_N, "cta_group", why="a pair's filters")
    loop_split(model, MMA_N, "mma_shape.n.count", 16, "cta_group", why="columns of tcgen05.mma")
    candidates(model, "k_group_size", (1, 2, 4), "steps of a stage")


def _cluster(model: Model, workload: Workload) -> None:
    """Blocks that share loads, or the sum of a tile."""
    facts = workload.facts
    most = facts["max_cluster"]
    sizes = [1 << i for i in range(most.bit_length())]
    for name in (CLUSTER_M, CLUSTER_N, CLUSTER_K):
        candidates(model, name, sizes, "blocks of a cluster")
    loop_split(model, CLUSTER_M, "sharers", "cta_group", why="whole pairs")
    product(model, "cluster_size", CLUSTER_M, CLUSTER_N, CLUSTER_K)
    model.require(Kind.LE, "cluster_size", most, why="blocks of a cluster")
    pixels = model.add(Variable("block_tile_shape.m", (facts["tmem_lanes"],)))
    loop_split(model, pixels, "act_rows", 8, CLUSTER_N, why="pixels that a block loads")
    loop_split(model, BLOCK_N, "filter_rows", 8, "sharers", why="filters that a block loads")
    bands = [1 << i for i in range(facts["max_bands"].bit_length())]
    candidates(model, "block_swizzle_size", bands, "clusters along M with the same filters")


def _rings(model: Model, workload: Workload) -> None:
    """Stages of loads, accumulators, the scheduler, residuals and outputs."""
    facts = workload.facts
    most = facts["max_groups"]
    candidates(model, STAGES, range(2, 4 * most + 1), "steps that the input ring holds")
    groups = loop_split(model, STAGES, "ring_groups", "k_group_size", why="whole groups")
    model.require(Kind.LE, groups, most, why="groups of the input ring")
    least = model.add(Variable("ring_groups.least", (2,)))
    model.require(Kind.LE, least, groups, why="groups of the input ring")
    candidates(model, ACCUM_STAGES, (1, 2, 4, 8), "accumulators in tensor memory")
    columns = product(model, "tmem_columns", ACCUM_STAGES, MMA_N)
    model.require(Kind.LE, columns, facts["tmem_columns"], why="tensor memory")
    candidates(model, CLC_STAGES, range(1, 9), "answers of the scheduler")


def _epilogue(model: Model, workload: Workload) -> None:
    """How sums leave."""
    row = workload.facts["output_bytes"]
    widths = [swizzle // row for swizzle in (32, 64, 128)]
    candidates(model, OUTPUT_N, widths, "filters that are stored at a time")
    loop_split(model, MMA_N, "subtiles", OUTPUT_N)
    model.require(Kind.LE, CLUSTER_K, "subtiles", why="each block stores a sub-tile")
    candidates(model, OUTPUT_STAGES, range(2, 9), "buffers of outputs")
    candidates(model, LOAD_STAGES, range(int(workload.residual), 9), "buffers of residuals")


def _memory(model: Model, workload: Workload) -> None:
    """Shared memory of a block."""
    facts = workload.facts
    lanes, row = facts["tmem_lanes"], facts["row_bytes"]
    product(model, "act_ring_bytes", STAGES, lanes, row)
    product(model, "filter_ring_bytes", STAGES, BLOCK_N, row)
    product(model, "subtile_bytes", OUTPUT_N, lanes, facts["output_bytes"])
    product(model, "outputs_bytes", OUTPUT_STAGES, "subtile_bytes")
    product(model, "residuals_bytes", LOAD_STAGES, "subtile_bytes")
    own = ceildiv(model, "own_subtiles", "subtiles", CLUSTER_K, "sub-tiles that a block stores")
    others = table(model, "others", CLUSTER_K, lambda k: k - 1)
    partial = (OUTPUT_N, lanes, facts["sum_bytes"])
    product(model, "exchange_bytes", others, own, *partial, why="sums of other blocks")
    splits = table(model, "is_split", CLUSTER_K, lambda k: int(k > 1))
    pipelines = ("ring_groups", ACCUM_STAGES, CLC_STAGES, CLC_STAGES, LOAD_STAGES, splits)
    one = total(model, "stage_barriers", *pipelines)
    total(model, "barriers", one, one, 1)
    product(model, "barrier_bytes", "barriers", facts["barrier_bytes"])
    product(model, "response_bytes", CLC_STAGES, facts["response_bytes"])
    head = total(model, "head", "barrier_bytes", "response_bytes", facts["address_bytes"])
    rounded_up(model, "header_bytes", head, facts["pattern_bytes"])
    model.require(Kind.EQ, "header_bytes", facts["pattern_bytes"], why="one pattern of barriers")
    memory_limit(model, _schedule(), facts["max_shared_bytes"])


def _schedule() -> Schedule:
    """Returns the kernel's: roles run side by side, each a tile ahead of the next."""
    rings = ("activations", "filters")
    buffers = ("outputs", "residuals", "exchange")
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
            "outputs": "outputs_bytes",
            "residuals": "residuals_bytes",
            "exchange": "exchange_bytes",
        },
    )


def _split_k(model: Model, workload: Workload) -> None:
    """Blocks that share a tile: no more than its sum has steps, and one wave of tiles."""
    facts = workload.facts
    model.require(Kind.LE, CLUSTER_K, facts["steps"], why="steps of a tile's sum")
    product(model, "cluster_pixels", CLUSTER_M, facts["tmem_lanes"])
    product(model, "cluster_filters", CLUSTER_N, MMA_N)
    ceildiv(model, "clusters.m", facts["pixels"], "cluster_pixels", "tiles along the pixels")
    ceildiv(model, "clusters.n", facts["filters"], "cluster_filters", "tiles along the filters")
    tiles = loop_fuse(model, "tiles", "clusters.m", "clusters.n", facts["groups"])
    sizes = range(facts["max_cluster"] + 1)
    size = model.add(Variable("cluster_size.place", range(len(sizes)), Role.PLACE))
    model.require(Kind.EQ, size, "cluster_size")
    places = [0, *(max(1, facts["units"] // blocks) for blocks in sizes[1:])]
    fit = stage_fuse(model, "cluster_places", size, places, "clusters that run at a time")
    bounded_if(model, tiles, "is_split", None, fit)


def _nothing(model: Model, workload: Workload) -> None:
    """A stage that is inlined adds nothing."""


#: In order.
RULES = (
    Rule(RuleKind.ALWAYS_INLINE, "im2col in the loads' coordinates, no matrix", _nothing),
    Rule(RuleKind.TENSORIZE, "tiles: tcgen05.mma of one block or two", _multiply),
    Rule(RuleKind.MULTI_SCOPE_SCRATCHPAD, "blocks of a cluster share loads", _cluster),
    Rule(RuleKind.ADD_CACHE_STAGE, "rings of operands, accumulators and answers", _rings),
    Rule(RuleKind.ADD_CACHE_STAGE, "residual and output through buffers", _epilogue),
    Rule(RuleKind.MULTI_LEVEL_SCRATCHPAD, "shared memory of a block", _memory),
    Rule(RuleKind.MULTI_SCOPE_SCRATCHPAD, "blocks of a cluster share a tile", _split_k),
)
