"""The configurations of the Hopper kernel that are checked and timed."""

from operations.sm90.config import Sm90Config

comptime COUNT = 9


def configuration(index: Int) -> Sm90Config:
    """The configuration of an index from 0 to `COUNT - 1`."""
    var base = Sm90Config(
        tile_m=128,
        tile_n=128,
        consumers=2,
        cooperative=True,
        blocks_m=1,
        blocks_n=1,
        halo=0,
        activation_stages=5,
        filter_stages=5,
        output_stages=2,
    )
    if index == 0:
        return base
    if index == 1:
        base.tile_n = 256
        base.activation_stages = 4
        base.filter_stages = 4
        base.output_stages = 1
        return base
    if index == 2:
        base = configuration(1)
        base.blocks_m = 2
        return base
    if index == 3:
        base = configuration(1)
        base.tile_m = 256
        base.tile_n = 128
        base.blocks_m = 2
        return base
    if index == 4:
        base.cooperative = False
        base.blocks_m = 2
        return base
    if index == 5:
        base.tile_m = 256
        base.tile_n = 64
        base.activation_stages = 4
        base.filter_stages = 4
        return base
    if index == 6:
        # 128x256, halo.
        base = configuration(2)
        base.halo = 8
        base.activation_stages = 2
        base.filter_stages = 5
        return base
    if index == 7:
        # 256x128, halo.
        base = configuration(3)
        base.halo = 8
        base.activation_stages = 2
        base.filter_stages = 6
        base.output_stages = 2
        return base
    # 256x64, halo.
    base = configuration(5)
    base.halo = 8
    base.activation_stages = 3
    base.filter_stages = 8
    return base
