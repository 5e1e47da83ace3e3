"""Special registers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._errors import UnsupportedError
from .._hardware.blocks import ThreadBlock, warps_of
from .._hardware.registers import LANES, Array

__all__ = ["special_register"]


def special_register(name: str, block: ThreadBlock, warp: int) -> Array | int:
    """A special register's value (PTX ISA 9.0, 10), for the lanes of a block's warp.

    Raises:
        UnsupportedError: The emulator does not have the register.
    """
    lane = np.arange(LANES)
    thread = warp * LANES + lane
    grid, shape = block.grid, block.grid.shape
    width, height, _ = shape.block
    first = [b // c for b, c in zip(block.index, shape.cluster, strict=True)]
    inside = [b % c for b, c in zip(block.index, shape.cluster, strict=True)]
    vectors: dict[str, Sequence[Array | int]] = {
        "%tid": (thread % width, thread // width % height, thread // (width * height)),
        "%ntid": shape.block,
        "%ctaid": block.index,
        "%nctaid": shape.grid,
        "%clusterid": first,
        "%nclusterid": [g // c for g, c in zip(shape.grid, shape.cluster, strict=True)],
        "%cluster_ctaid": inside,
        "%cluster_nctaid": shape.cluster,
    }
    base, _, axis = name.partition(".")
    if base in vectors and axis in ("x", "y", "z"):
        return vectors[base]["xyz".index(axis)]
    scalars: dict[str, Array | int] = {
        "%laneid": lane,
        "%warpid": warp,
        "%nwarpid": warps_of(grid.threads),
        "%smid": block.rank % grid.device.sms,
        "%nsmid": grid.device.sms,
        "%gridid": 0,
        "%cluster_ctarank": block.rank,
        "%cluster_nctarank": grid.cluster_size,
        "%is_explicit_cluster": int(grid.cluster_size > 1),
        "%lanemask_eq": 1 << lane,
        "%lanemask_lt": (1 << lane) - 1,
        "%lanemask_le": (2 << lane) - 1,
        "%lanemask_gt": 0xFFFFFFFF & ~((2 << lane) - 1),
        "%lanemask_ge": 0xFFFFFFFF & ~((1 << lane) - 1),
        "%dynamic_smem_size": shape.dynamic_bytes,
        "%total_smem_size": grid.shared_bytes,
    }
    if name not in scalars:
        raise UnsupportedError(f"the special register {name} is not supported")
    return scalars[name]
