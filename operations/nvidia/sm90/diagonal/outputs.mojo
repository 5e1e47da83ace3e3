"""Stores of the diagonal kernel's outputs where the graph compiler fused
something: by threads, not by TMA."""

from max.gpu import thread_idx
from std.utils import IndexList

from ....conv.access import OutputTarget
from ....conv.problem import SPATIAL
from ...limits import WARP
from ...pipeline.chunks import load_chunk
from ...tma.copy import SharedAddress
from .geometry import DiagonalGeometry, DiagonalStep
from .mma import keep_rolled
from .plan import MATRIX, STEP_ROWS


@always_inline
def store_fused_batch(
    target: Some[OutputTarget],
    geometry: DiagonalGeometry,
    data: SharedAddress,
    first: DiagonalStep,
    batch: UInt32,
):
    """Stores a batch's outputs, which every warp has written, through what the
    graph compiler fused.

    Args:
        target: The output.
        geometry: The problem.
        data: The batch's buffer.
        first: Its first step.
        batch: Its steps.
    """
    var from_ = data
    var step = first
    for _ in range(batch):
        keep_rolled()
        _store_fused(target, geometry, from_, step)
        step.row += step.next
        from_ += geometry.step_bytes


@always_inline
def _store_fused(
    target: Some[OutputTarget],
    geometry: DiagonalGeometry,
    from_: SharedAddress,
    step: DiagonalStep,
):
    """Stores a step's outputs through what the graph compiler fused, 8 channels
    at a time."""
    comptime out_type = type_of(target).dtype
    var first, group = geometry.slab_warps.split(UInt32(thread_idx.x))
    var channel = step.channel + group * MATRIX
    if channel >= geometry.channels:
        return
    var columns = min(geometry.columns, geometry.out_columns - step.column)
    var rows = min(UInt32(STEP_ROWS), geometry.out_rows - step.row)
    var images = min(geometry.images, geometry.batch_images - step.image)
    for i in range(images):
        for row in range(rows):
            var p = step.row + row
            for column in range(first, columns, UInt32(WARP)):
                var q = step.column + column
                var values = rebind[SIMD[out_type, MATRIX]](
                    load_chunk[out_type](
                        from_
                        + i * geometry.image_output_bytes
                        + row * geometry.output_row_bytes
                        + geometry.offset_in_slab(column, group)
                    )
                )
                var image = step.image + i
                var offset = geometry.output_offset(image, step, p, q)
                target.store[MATRIX](
                    Int(image),
                    IndexList[SPATIAL](Int(step.plane), Int(p), Int(q)),
                    Int(channel),
                    offset + Int(channel),
                    values,
                )
