"""What a configuration of the Hopper implicit GEMM can take of problems, types
and visitors."""

from std.collections import Optional

from ....conv.memory import element_bytes
from ....conv.operands import OperandTypes
from ....conv.problem import SPATIAL, ConvProblem, axis_name
from ...epilogue.callbacks import EpilogueVisitor
from ...epilogue.layout import VisitLayout
from ...epilogue.params import visitor_refusal as refusal_of_visitor
from ...geometry import LIMIT
from ...im2col.traversal import Traversal
from ...limits import MAX_INDEX
from ...pipeline.async_copy import PIECE_BYTES
from .config import Sm90Config
from .epilogue_config import (
    COLUMN_FILTERS,
    CONSUMER_THREADS,
    HALF_BYTES,
    MATRIX_ROWS,
    ROW_FILTERS,
    SUBTILE_FILTERS,
)


def problem_refusal(
    config: Sm90Config,
    traversal: Traversal,
    out_type: DType,
    *,
    whole_pieces: Bool = True,
) -> Optional[String]:
    """Why the kernel cannot take a problem, or None.

    Args:
        config: The configuration.
        traversal: Of a problem that is valid (`ConvProblem.validate`).
        out_type: Of the output: float32, int32, or a type of 16 bits.
        whole_pieces: Whether pixels of the output must be multiples of
            `COPY_BYTES`: a visitor reads tensors of the output's shape, and
            work fused behind takes whole pieces. Threads that load rows of
            residuals and store those of plain outputs do not need it.

    Returns:
        The reason, or None if the kernel can.
    """
    var refusal = config.refusal()
    if refusal:
        return refusal
    var bytes = element_bytes(out_type)
    if not config.swapped and bytes != HALF_BYTES:
        return String(
            t"the multiply's rows must be filters for {out_type} outputs"
        )
    if config.epilogue.pixels(bytes) < MATRIX_ROWS:
        return String(
            t"output_tile_shape: M {config.epilogue.output_tile_shape[0]} is"
            t" for 16-bit outputs; here {out_type}"
        )
    if whole_pieces or not config.unaligned:
        refusal = traversal.output_refusal(bytes)
    if not refusal:
        refusal = _gather_refusal(
            config, traversal
        ) if config.gathers() else traversal.refusal(config.halo)
    if not refusal:
        refusal = _halo_refusal(config, traversal)
    if not refusal:
        refusal = _stationary_refusal(config, traversal)
    if not refusal:
        refusal = _end_refusal(config, traversal)
    if refusal:
        return refusal
    var pixels = traversal.pixels(config.halo)
    if pixels + config.cluster_pixels() >= MAX_INDEX:
        return String(t"{pixels} output pixels; coordinates have 31 bits")
    return None


def stores_any_filters(types: OperandTypes) -> Bool:
    """Whether threads may store pixels that are no multiple of `COPY_BYTES`.
    With wider outputs registers would spill; fused work takes whole pieces.

    Args:
        types: Of the operands.
    """
    return element_bytes(types.output) == HALF_BYTES and not types.fused_output


def layout_of(config: Sm90Config, out_type: DType) -> VisitLayout:
    """How a consumer's values are cut up, for visitors.

    Args:
        config: The configuration.
        out_type: Of output and residual.
    """
    return VisitLayout(
        pixels=config.epilogue.pixels(element_bytes(out_type)),
        filters=SUBTILE_FILTERS,
        filter_subtiles=config.filter_subtiles(),
        threads=CONSUMER_THREADS,
        thread_filters=ROW_FILTERS if config.swapped else COLUMN_FILTERS,
        out_type=out_type,
        delayed=config.epilogue.delay_store,
    )


def visitor_refusal[
    Visitor: EpilogueVisitor, //
](
    visitor: Visitor,
    config: Sm90Config,
    problem: ConvProblem,
    out_type: DType,
) -> Optional[String]:
    """Why a configuration cannot run with a visitor.

    Args:
        visitor: The visitor.
        config: The configuration, which does not refuse the problem.
        problem: The convolution.
        out_type: Of the output.

    Returns:
        The reason, or None if it can.
    """
    if config.ends_filters() and not Visitor.any_filters:
        return String(
            t"block_tile_shape: N {config.block_tile_shape[1]} is no multiple"
            t" of {SUBTILE_FILTERS}, which the visitor does not take"
        )
    return refusal_of_visitor(
        visitor,
        layout_of(config, out_type),
        problem,
        consumers=config.consumers,
        shared_bytes=config.shared_bytes(),
        epi_load_stages=config.epilogue.num_epi_load_stages,
    )


def _gather_refusal(
    config: Sm90Config, traversal: Traversal
) -> Optional[String]:
    """Why threads cannot load a problem's pixels."""
    if traversal.groups != 1:
        return String(
            t"threads load pixels of one group; here {traversal.groups}"
        )
    for axis in range(SPATIAL):
        var reach = traversal.input[axis] + traversal.span(axis)
        if reach >= LIMIT:
            return String(
                t"{traversal.input[axis]} pixels and a filter of"
                t" {traversal.span(axis)} along {axis_name(axis)}; threads load"
                t" with coordinates of 30 bits"
            )
    if not config.gathers_directly():
        return None
    var bytes = traversal.channels * traversal.channel_bytes
    if bytes % PIECE_BYTES != 0:
        return String(
            t"threads copy pieces of {PIECE_BYTES} bytes straight into rings;"
            t" here pixels of {bytes}"
        )
    var pixels = traversal.images
    for axis in range(SPATIAL):
        pixels *= traversal.input[axis] + traversal.span(axis)
    pixels = max(pixels, traversal.filters * traversal.taps())
    if pixels * bytes // PIECE_BYTES >= MAX_INDEX:
        return String(
            t"{pixels} pixels of {bytes} bytes; pieces of {PIECE_BYTES} bytes"
            t" are counted with 31 bits"
        )
    return None


def _halo_refusal(config: Sm90Config, traversal: Traversal) -> Optional[String]:
    """Why a stage with a halo does not serve a filter row."""
    if config.halo == 0:
        return None
    if traversal.stride[2] != 1:
        return String(
            t"a halo needs stride 1 along w; here {traversal.stride[2]}"
        )
    if traversal.span(2) - 1 > config.halo:
        return String(
            t"a halo of {config.halo} pixels does not hold the filter's span of"
            t" {traversal.span(2)} along w"
        )
    return None


def _end_refusal(config: Sm90Config, traversal: Traversal) -> Optional[String]:
    """Why tiles do not end where sub-tiles do not."""
    if not config.ends_filters():
        return None
    var tile = config.block_tile_shape[1]
    if traversal.groups != 1 or traversal.filters % tile != 0:
        return String(
            t"a tile of {tile} filters takes multiples of as many, in one"
            t" group; here {traversal.filters} in each of {traversal.groups}"
        )
    return None


def _stationary_refusal(
    config: Sm90Config, traversal: Traversal
) -> Optional[String]:
    """Why the filter ring does not hold the whole filter."""
    if not config.stationary:
        return None
    var steps = traversal.steps()
    if steps > config.num_filter_pipeline_stages:
        return String(
            t"a stationary filter has at most"
            t" {config.num_filter_pipeline_stages} stages; here {steps}"
        )
    if traversal.filters > config.cluster_filters():
        return String(
            t"a stationary filter has at most"
            t" {config.cluster_filters()} filters of a group; here"
            t" {traversal.filters}"
        )
    return None
