"""What visitors are told of a Blackwell configuration."""

from std.collections import Optional
from std.math import ceildiv

from ...conv.problem import ConvProblem
from ..epilogue.callbacks import EpilogueVisitor, LaunchShape
from ..epilogue.layout import VisitLayout
from ..epilogue.params import visitor_refusal as refusal_of_visitor
from .config import EPILOGUE_THREADS, Conv2dConfig


def layout_of(config: Conv2dConfig) -> VisitLayout:
    """How the epilogue's values are cut up: a thread has a pixel, with all
    filters of a sub-tile."""
    return VisitLayout(
        pixels=config.output_tile_shape[0],
        filters=config.output_tile_shape[1],
        filter_subtiles=config.subtiles(),
        threads=EPILOGUE_THREADS,
        thread_filters=config.output_tile_shape[1],
        out_type=config.types.out,
        delayed=False,
    )


def launch_shape(config: Conv2dConfig, problem: ConvProblem) -> LaunchShape:
    """A launch as visitors see it: which block stores a tile is found out while
    the kernel runs, so each tile along the pixels is a reducer."""
    return LaunchShape(
        problem, ceildiv(problem.gemm_m(), config.block_tile_shape[0])
    )


def visitor_refusal[
    Visitor: EpilogueVisitor, //
](visitor: Visitor, config: Conv2dConfig, problem: ConvProblem) -> Optional[
    String
]:
    """Why a configuration cannot run with a visitor.

    Args:
        visitor: The visitor.
        config: The configuration, which does not refuse the problem.
        problem: The convolution.

    Returns:
        The reason, or None if it can.
    """
    return refusal_of_visitor(
        visitor,
        layout_of(config),
        problem,
        consumers=1,
        shared_bytes=config.shared_bytes(),
        epi_load_stages=config.num_epi_load_stages,
    )
