"""The configurations that `dispatch` chooses from."""

from .config import Sm90Config

comptime CANDIDATES = 19
"""Configurations to choose from."""


def _rows(
    tile_m: Int,
    tile_n: Int,
    activation_stages: Int,
    filter_stages: Int,
    output_stages: Int,
    *,
    consumers: Int = 2,
    cooperative: Bool = True,
    blocks_m: Int = 1,
    blocks_n: Int = 1,
    halo: Int = 0,
    stationary: Bool = False,
    splits: Bool = False,
) -> Sm90Config:
    """A configuration whose filters are the multiply's rows; the copy engine
    stores tiles without a halo."""
    return Sm90Config(
        tile_m=tile_m,
        tile_n=tile_n,
        consumers=consumers,
        cooperative=cooperative,
        swapped=True,
        blocks_m=blocks_m,
        blocks_n=blocks_n,
        halo=halo,
        activation_stages=activation_stages,
        filter_stages=filter_stages,
        stationary=stationary,
        splits=splits,
        output_stages=output_stages,
        engine_store=halo == 0,
    )


def candidate(index: Int) -> Sm90Config:
    """A configuration to choose from.

    Args:
        index: From 0 to `CANDIDATES - 1`.
    """
    if index == 0:
        return _rows(256, 128, 3, 5, 1, blocks_m=2, halo=8)
    if index == 1:
        return _rows(256, 128, 3, 5, 1, blocks_n=2, halo=16)
    if index == 2:
        return _rows(256, 128, 4, 4, 1, blocks_m=2)
    if index == 3:
        return _rows(256, 128, 4, 4, 1, blocks_n=2)
    if index == 4:
        return _rows(224, 128, 3, 5, 1, blocks_n=2, halo=16)
    if index == 5:
        return _rows(224, 128, 4, 4, 1, blocks_n=2)
    if index == 6:
        return _rows(192, 128, 5, 5, 1)
    if index == 7:
        return _rows(192, 128, 5, 5, 1, blocks_n=2)
    if index == 8:
        return _rows(96, 128, 7, 7, 1)
    if index == 9:
        return _rows(96, 128, 7, 7, 1, blocks_n=2)
    if index == 10:
        return _rows(256, 64, 4, 4, 2, cooperative=False)
    if index == 11:
        return _rows(256, 64, 3, 8, 2, cooperative=False, halo=8)
    if index == 12:
        return _rows(
            256, 64, 3, 9, 2, cooperative=False, halo=8, stationary=True
        )
    if index == 13:
        return _rows(
            160, 64, 4, 9, 2, cooperative=False, halo=8, stationary=True
        )
    if index == 14:
        return _rows(64, 64, 8, 8, 1, consumers=1, splits=True)
    if index == 15:
        return _rows(64, 128, 8, 8, 1, splits=True)
    if index == 16:
        return _rows(128, 128, 6, 6, 1, splits=True)
    if index == 17:
        return _rows(128, 128, 5, 5, 2, cooperative=False)
    return _rows(128, 128, 4, 7, 1, halo=8, splits=True)


def offered[in_type: DType](index: Int) -> Bool:
    """Whether a candidate is compiled for a type: all are for 16 bits, which
    they were tuned for, a few for others.

    Parameters:
        in_type: Of activation and filter.

    Args:
        index: Of the candidate.
    """
    comptime if in_type.is_half_float():
        return True
    return (
        index == 0
        or index == 6
        or index == 8
        or index == 10
        or index == 14
        or index == 16
    )
