"""The configurations of the Hopper kernel that are checked and timed."""

from operations.sm90.config import Sm90Config

comptime COUNT = 22


def make(
    tile_m: Int,
    tile_n: Int,
    activation_stages: Int,
    filter_stages: Int,
    output_stages: Int,
    *,
    blocks_m: Int = 1,
    blocks_n: Int = 1,
    halo: Int = 0,
    cooperative: Bool = True,
    engine_store: Bool = True,
    consumers: Int = 2,
    swapped: Bool = False,
) -> Sm90Config:
    """A configuration."""
    return Sm90Config(
        tile_m=tile_m,
        tile_n=tile_n,
        consumers=consumers,
        cooperative=cooperative,
        swapped=swapped,
        blocks_m=blocks_m,
        blocks_n=blocks_n,
        halo=halo,
        activation_stages=activation_stages,
        filter_stages=filter_stages,
        output_stages=output_stages,
        engine_store=engine_store,
    )


def configuration(index: Int) -> Sm90Config:
    """The configuration of an index from 0 to `COUNT - 1`."""
    if index == 0:
        return make(128, 128, 5, 5, 2)
    if index == 1:
        return make(128, 256, 4, 4, 1)
    if index == 2:
        return make(128, 256, 4, 4, 1, blocks_m=2)
    if index == 3:
        return make(128, 256, 4, 4, 1, blocks_n=2)
    if index == 4:
        return make(192, 128, 5, 5, 1, consumers=3)
    if index == 5:
        return make(256, 64, 4, 4, 2, cooperative=False)
    if index == 6:
        return make(256, 128, 4, 4, 1, swapped=True)
    if index == 7:
        return make(256, 128, 4, 4, 1, swapped=True, blocks_m=2)
    if index == 8:
        return make(256, 128, 4, 4, 1, swapped=True, blocks_n=2)
    if index == 9:
        return make(
            256,
            128,
            3,
            5,
            1,
            swapped=True,
            blocks_m=2,
            halo=8,
            engine_store=False,
        )
    if index == 10:
        return make(
            256, 128, 3, 5, 1, swapped=True, halo=8, engine_store=False
        )
    if index == 11:
        return make(192, 128, 5, 5, 1, swapped=True)
    if index == 12:
        return make(192, 128, 5, 5, 1, swapped=True, blocks_n=2)
    if index == 13:
        return make(96, 128, 7, 7, 1, swapped=True)
    if index == 14:
        return make(96, 128, 7, 7, 1, swapped=True, blocks_n=2)
    if index == 15:
        return make(256, 64, 4, 4, 2, swapped=True, cooperative=False)
    if index == 16:
        return make(
            256,
            64,
            3,
            8,
            2,
            swapped=True,
            cooperative=False,
            halo=8,
            engine_store=False,
        )
    if index == 17:
        return make(256, 64, 4, 4, 2, swapped=True)
    if index == 18:
        return make(
            256, 64, 3, 8, 2, swapped=True, halo=8, engine_store=False
        )
    if index == 19:
        return make(224, 128, 4, 4, 1, swapped=True, blocks_n=2)
    if index == 20:
        return make(
            192, 128, 3, 6, 2, swapped=True, halo=8, engine_store=False
        )
    return make(128, 128, 5, 5, 2, swapped=True)
