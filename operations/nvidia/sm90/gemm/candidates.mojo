"""The configurations that `dispatch` chooses from."""

from std.utils import IndexList

from ...split_k import MAX_SPLIT_K
from .config import Sm90Config
from .epilogue_config import SUBTILE_FILTERS, EpilogueConfig

comptime CANDIDATES = 15
"""Configurations to choose from."""


def _rows(
    tile_m: Int,
    tile_n: Int,
    act_stages: Int,
    filter_stages: Int,
    epilogue_stages: Int,
    *,
    subtile_pixels: Int = 64,
    consumers: Int = 2,
    cooperative: Bool = True,
    cluster_m: Int = 1,
    cluster_n: Int = 1,
    halo: Int = 0,
    stationary: Bool = False,
    splits: Bool = False,
) -> Sm90Config:
    """A configuration whose filters are the multiply's rows; TMA
    stores tiles without a halo."""
    return Sm90Config(
        block_tile_shape=IndexList[2](tile_m, tile_n),
        cluster_shape=IndexList[3](
            cluster_m, cluster_n, MAX_SPLIT_K if splits else 1
        ),
        consumers=consumers,
        cooperative=cooperative,
        swapped=True,
        halo=halo,
        num_act_pipeline_stages=act_stages,
        num_filter_pipeline_stages=filter_stages,
        stationary=stationary,
        epilogue=EpilogueConfig(
            output_tile_shape=IndexList[2](subtile_pixels, SUBTILE_FILTERS),
            num_epi_load_stages=epilogue_stages,
            num_output_stages=min(2, epilogue_stages),
            fragment_size=16 if cooperative else 8,
            reuse_c=True,
            delay_store=False,
            tma_store=halo == 0,
            whole_rows=halo > 0 and not cooperative,
        ),
    )


def candidate(index: Int) -> Sm90Config:
    """A configuration to choose from.

    Args:
        index: From 0 to `CANDIDATES - 1`.
    """
    if index == 0:
        return _rows(256, 128, 3, 5, 2, cluster_m=2, halo=8)
    if index == 1:
        return _rows(256, 128, 4, 4, 2, cluster_m=2)
    if index == 2:
        return _rows(224, 128, 3, 5, 7, cluster_n=2, halo=16, subtile_pixels=32)
    if index == 3:
        return _rows(224, 128, 4, 4, 6, cluster_n=2, subtile_pixels=32)
    if index == 4:
        return _rows(192, 128, 5, 5, 3, subtile_pixels=32)
    if index == 5:
        return _rows(192, 128, 5, 5, 3, cluster_n=2, subtile_pixels=32)
    if index == 6:
        return _rows(96, 128, 7, 7, 3, subtile_pixels=32)
    if index == 7:
        return _rows(96, 128, 7, 7, 3, cluster_n=2, subtile_pixels=32)
    if index == 8:
        return _rows(256, 64, 3, 8, 3, cooperative=False, halo=8)
    if index == 9:
        return _rows(
            160,
            64,
            4,
            9,
            5,
            cooperative=False,
            halo=8,
            stationary=True,
            subtile_pixels=32,
        )
    if index == 10:
        return _rows(64, 64, 8, 8, 4, consumers=1, splits=True)
    if index == 11:
        return _rows(64, 128, 8, 8, 2, splits=True)
    if index == 12:
        return _rows(128, 128, 5, 5, 4, cooperative=False)
    if index == 13:
        return _rows(128, 128, 4, 7, 4, halo=8, splits=True, subtile_pixels=32)
    return _rows(256, 64, 3, 8, 3, cooperative=False, cluster_n=2, halo=16)


def offered[in_type: DType, out_type: DType](index: Int) -> Bool:
    """Whether a candidate is compiled for types: all are for 16 bits, which
    they were tuned for, a few for others.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.

    Args:
        index: Of the candidate.
    """
    comptime if in_type.is_half_float():
        # Its epilogue of values of four bytes would spill registers.
        return out_type.is_half_float() or index != 2
    return (
        index == 0
        or index == 4
        or index == 6
        or index == 8
        or index == 10
        or index == 12
    )


def offered_fused(index: Int) -> Bool:
    """Whether a candidate is compiled for outputs that the graph compiler
    fused something behind: few, as every such op compiles them anew.

    Args:
        index: Of the candidate.
    """
    return index == 0 or index == 4 or index == 6 or index == 8 or index == 10
