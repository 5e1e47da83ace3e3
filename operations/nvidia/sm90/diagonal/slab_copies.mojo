"""The copies of the slab kernel: a thread each of two warps starts TMA loads of
windows, and TMA stores of outputs and loads of residuals."""

from max.gpu import barrier, thread_idx
from std.utils import IndexList

from ...limits import WARP
from ...overlap import wait_for_earlier_kernels
from ...tma.copy import (
    commit_stores,
    load_tile,
    prefetch_map,
    store_tile,
    wait_stores_read,
)
from ...tma.descriptor import TensorMap
from .block import StagePosition
from .slab_storage import SlabStorage
from .slabs import TILE_BYTES, SlabGeometry, SlabPlace, SlabWork


@always_inline
def load_windows(
    ref activation: TensorMap,
    geometry: SlabGeometry,
    storage: SlabStorage[_],
    work: SlabWork,
):
    """The warp that loads. It initializes the barriers, and starts to load the
    first windows before the block syncs.

    Args:
        activation: The activation's descriptor.
        geometry: The problem.
        storage: The block's.
        work: The block's.
    """
    var loads = UInt32(thread_idx.x) % UInt32(WARP) == 0
    if loads:
        prefetch_map(activation)
        storage.init()
    wait_for_earlier_kernels()
    var first = min(work.count, geometry.stages)
    if loads:
        for index in range(first):
            _load_window(activation, geometry, storage, work, index, index)
    barrier()
    if loads:
        var position = StagePosition(0, 0)
        for index in range(first, work.count):
            storage.empty(position.stage).wait(position.parity)
            _load_window(
                activation, geometry, storage, work, index, position.stage
            )
            position = position.after(1, geometry.stages)


@always_inline
def _load_window(
    ref activation: TensorMap,
    geometry: SlabGeometry,
    storage: SlabStorage[_],
    work: SlabWork,
    index: UInt32,
    stage: UInt32,
):
    """Starts loading a tile's window."""
    comptime shape = storage.shape
    comptime stride = shape.stride
    var place = work.place(geometry, index)
    var full = storage.full(stage)
    full.arrive_expecting(shape.stage_bytes())
    comptime for phase in range(stride):
        load_tile[5](
            storage.window(geometry, stage)
            + UInt32(phase * shape.phase_bytes()),
            activation,
            full.address,
            IndexList[5](
                Int(work.channel),
                Int(
                    Int32(place.column) * Int32(stride)
                    + geometry.start_w
                    + Int32(phase)
                ),
                Int(Int32(place.row) * Int32(stride) + geometry.start_h),
                Int(Int32(place.plane) * geometry.step_d + geometry.start_d),
                Int(place.image),
            ),
        )


@always_inline
def store_tiles[
    *, stores: Bool
](
    ref output: TensorMap,
    ref residual: TensorMap,
    has_residual: Bool,
    geometry: SlabGeometry,
    storage: SlabStorage[_],
    work: SlabWork,
):
    """The warp that stores: it makes every buffer ready, and again when it has
    been written and stored.

    Parameters:
        stores: Whether TMA stores the output; otherwise the teams have stored
            what they have written.

    Args:
        output: The output's descriptor, if TMA stores it.
        residual: The residual's, if there is one.
        has_residual: Whether there is.
        geometry: The problem.
        storage: The block's.
        work: The block's.
    """
    var copies = UInt32(thread_idx.x) % UInt32(WARP) == 0
    if copies:
        comptime if stores:
            prefetch_map(output)
        if has_residual:
            prefetch_map(residual)
    wait_for_earlier_kernels()
    barrier()
    if not copies:
        return
    for buffer in range(geometry.buffers):
        _make_ready(
            residual, has_residual, geometry, storage, work, buffer, buffer
        )
    var buffer = StagePosition(0, 0)
    for index in range(work.count):
        storage.written(buffer.stage).wait(buffer.parity)
        comptime if stores:
            store_tile[5](
                output,
                storage.buffer(buffer.stage),
                _corner(work, work.place(geometry, index)),
            )
            commit_stores()
            # The store of the tile before has read its buffer.
            wait_stores_read[1]()
        if index > 0:
            _make_ready(
                residual,
                has_residual,
                geometry,
                storage,
                work,
                index - 1 + geometry.buffers,
                buffer.after(geometry.buffers - 1, geometry.buffers).stage,
            )
        buffer = buffer.after(1, geometry.buffers)
    comptime if stores:
        wait_stores_read[0]()


@always_inline
def _make_ready(
    ref residual: TensorMap,
    has_residual: Bool,
    geometry: SlabGeometry,
    storage: SlabStorage[_],
    work: SlabWork,
    index: UInt32,
    buffer: UInt32,
):
    """Releases a buffer to a team, for one of the block's tiles if there is that
    tile, after the load of its residual if there is one."""
    if index >= work.count:
        return
    var ready = storage.ready(buffer)
    if not has_residual:
        ready.arrive()
        return
    ready.arrive_expecting(TILE_BYTES)
    load_tile[5](
        storage.buffer(buffer),
        residual,
        ready.address,
        _corner(work, work.place(geometry, index)),
    )


@always_inline
def _corner(work: SlabWork, place: SlabPlace) -> IndexList[5]:
    """A tile's first output, innermost dimension first."""
    return IndexList[5](
        Int(work.channel),
        Int(place.column),
        Int(place.row),
        Int(place.plane),
        Int(place.image),
    )
