"""The loader of a consumer's epilogue: fills its buffers with the residual.

One thread asks TMA for a sub-tile after the other, or the warp loads them row by
row where TMA cannot.
"""

from std.sys.info import size_of
from std.utils import IndexList

from ....conv.memory import Reads
from ...im2col.tiles import Tile, TileGeometry
from ...tma.copy import load_im2col
from ...tma.descriptor import TensorMap
from .config import Sm90Config
from .epilogue_buffers import EpilogueBuffers
from .epilogue_config import (
    ROW_BYTES,
    SUBTILE_FILTERS,
    panel_filters,
    panels,
)
from .epilogue_unaligned_rows import UnalignedRowLoad, is_unaligned
from .split_k import OwnSubtiles


@always_inline
def load_residual[
    dtype: DType, //, config: Sm90Config, any_filters: Bool
](
    mut buffers: EpilogueBuffers,
    ref map: TensorMap,
    residual: Reads[dtype],
    geometry: TileGeometry,
    tile: Tile,
):
    """Fills buffers with the residual of a consumer's own sub-tiles. One thread,
    or all of a warp where pixels are unaligned.

    Parameters:
        dtype: Of the residual.
        config: The configuration.
        any_filters: Whether pixels may be unaligned.

    Args:
        buffers: The consumer's.
        map: The residual's descriptor, `[N*P, Q, K]`, im2col; not read where
            pixels are unaligned.
        residual: `[N, *output, K]`.
        geometry: The problem.
        tile: The consumer's part.
    """
    comptime pixels = config.epilogue.pixels(size_of[dtype]())
    comptime filter_subtiles = config.filter_subtiles()
    comptime subtiles = filter_subtiles * config.consumer_pixels() // pixels
    comptime panel_bytes = pixels * ROW_BYTES
    var own = OwnSubtiles.of[config, subtiles](geometry, tile)
    for i in range(own.first, own.end()):
        var block, part = divmod(i, UInt32(filter_subtiles))
        var pixel = tile.pixel + block * UInt32(pixels)
        var filter = tile.filter + part * SUBTILE_FILTERS
        ref ring = buffers.residuals
        var stage = ring.address(buffers.residual.stage)
        comptime if any_filters:
            if is_unaligned[dtype](geometry):
                ring.await_empty(buffers.residual)
                UnalignedRowLoad[dtype, pixels](buffers.lane).fill(
                    residual,
                    geometry,
                    stage,
                    buffers.ends(),
                    pixel,
                    filter,
                    tile.filter_end(geometry),
                )
                if buffers.lane == 0:
                    ring.full(buffers.residual.stage).arrive()
                buffers.residual.step()
                continue
        var at = geometry.pixel(pixel)
        var barrier = ring.acquire(buffers.residual)
        comptime for panel in range(panels[dtype]()):
            load_im2col[3](
                stage + UInt32(panel * panel_bytes),
                map,
                barrier.address,
                IndexList[3](
                    Int(filter) + panel * panel_filters[dtype](),
                    Int(at.w),
                    Int(at.row),
                ),
                IndexList[1](0),
            )
        buffers.residual.step()
