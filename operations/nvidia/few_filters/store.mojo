"""How a warp stores its sums: through its own shared memory, so that
neighbouring threads store neighbouring bytes."""

from max.gpu import barrier, thread_idx
from max.gpu.sync import syncwarp
from std.sys.info import size_of
from std.utils import StaticTuple

from ...conv.access import OutputTarget
from ...conv.epilogue import Epilogue
from ..geometry import IMAGE, spatial
from ..limits import WARP
from ..pipeline.chunks import CHUNK_BYTES, shared_pointer
from ..pipeline.matrices import Sums, sum_type_of
from ..tma.copy import SharedAddress
from .geometry import STORE_RUNS, STORE_VECTORS, TilePlace, WindowGeometry
from .tile import MATRIX_FILTERS, MATRIX_ROWS, WarpTile


struct WarpStore[
    dtype: DType,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    tile: WarpTile,
]:
    """The end of a warp's tile.

    Parameters:
        dtype: Of the activation.
        Output: The output's type.
        bias_type: Of the bias.
        residual_type: Of the residual.
        tile: Of a warp.
    """

    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime rows = Self.tile.rows
    comptime columns = Self.tile.columns()
    comptime sum_type = sum_type_of(Self.dtype)
    comptime Totals = StaticTuple[Sums[Self.dtype], Self.rows * Self.columns]
    comptime group = Self.tile.patch_rows()
    """Multiplies along the pixels whose sums are stored at once."""
    comptime vector = CHUNK_BYTES // size_of[Self.Output.dtype]()
    """Elements of a store."""
    comptime placed = Self.Output.computes or Self.Output.stores
    """Whether stores ask where a pixel is."""

    @staticmethod
    @always_inline
    def store(
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: WindowGeometry,
        totals: Self.Totals,
        place: TilePlace,
        patch: SharedAddress,
        part: UInt32,
    ):
        """Adds up the sums of the warps that share a warp's pixels, applies the
        epilogue, and stores. All threads of the block call it.

        Args:
            epilogue: The epilogue.
            output: The output.
            geometry: The problem.
            totals: The thread's sums.
            place: Of the warp's first pixel.
            patch: The warp's shared memory.
            part: Which of these warps it is.
        """
        var first = place
        var parts = geometry.parts
        var patches = patch - part * geometry.warps * geometry.patch_bytes
        for group in range(Self.rows // Self.group):
            Self._wait(parts)
            comptime for i in range(Self.rows // Self.group):
                if group == i:
                    if geometry.general.group_filters.value % 2 == 0:
                        Self._write[i * Self.group, True](
                            geometry, totals, patch
                        )
                    else:
                        Self._write[i * Self.group, False](
                            geometry, totals, patch
                        )
            Self._wait(parts)
            if geometry.stores == STORE_VECTORS:
                Self._store_pieces[Self.vector, False](
                    epilogue, output, geometry, first, patches, part
                )
            elif not Self.placed and geometry.stores == STORE_RUNS:
                comptime if not Self.placed:
                    Self._store_pieces[Self.vector, True](
                        epilogue, output, geometry, first, patches, part
                    )
            else:
                Self._store_pieces[1, False](
                    epilogue, output, geometry, first, patches, part
                )
            first.row += Int32(Self.group) * geometry.step_rows
            first.column += Int32(Self.group) * geometry.step_columns

    @staticmethod
    @always_inline
    def _wait(parts: UInt32):
        """Waits for the threads that share a patch."""
        if parts > 1:
            barrier()
        else:
            syncwarp()

    @staticmethod
    @always_inline
    def _write[
        first: Int, even: Bool
    ](geometry: WindowGeometry, totals: Self.Totals, patch: SharedAddress):
        """Writes the thread's sums of some multiplies, from the `first` on, a
        row a pixel; in pairs if the number of filters is `even`."""
        var lane = UInt32(thread_idx.x) % UInt32(WARP)
        var stride = geometry.patch_stride
        var column = lane % 4 * 2
        var data = shared_pointer[Self.sum_type](
            patch + 4 * (lane // 4 * stride + column)
        )
        # Behind the filters are the next pixel's.
        var left = Int32(geometry.general.group_filters.value) - Int32(column)
        comptime for j in range(Self.columns):
            comptime k = Int32(j * MATRIX_FILTERS)
            comptime for i in range(Self.group):
                var values = totals[(first + i) * Self.columns + j]
                comptime for half in range(2):
                    var at = Int(stride) * (i * MATRIX_ROWS + 8 * half) + Int(k)
                    var pair = values.slice[2, offset=2 * half]()
                    comptime if even:
                        if k < left:
                            data.unsafe_store[alignment=8](at, pair)
                    else:
                        if k < left:
                            data.unsafe_store(at, pair[0])
                        if k + 1 < left:
                            data.unsafe_store(at + 1, pair[1])

    @staticmethod
    @always_inline
    def _store_pieces[
        width: Int, runs: Bool
    ](
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: WindowGeometry,
        first: TilePlace,
        patches: SharedAddress,
        part: UInt32,
    ):
        """Adds up the parts, applies the epilogue and stores, `width`
        neighbouring filters at a time; of neighbouring pixels where these are
        `runs`."""
        comptime alignment = min(width, 4) * size_of[Self.sum_type]()
        var lane = UInt32(thread_idx.x) % UInt32(WARP)
        var data = shared_pointer[Self.sum_type](patches)
        var part_elements = Int(geometry.warps * geometry.patch_bytes // 4)
        var filters = geometry.general.group_filters
        var pieces = UInt32(Self.group) * geometry.pieces.value
        for index in range(
            part * UInt32(WARP) + lane, pieces, geometry.parts * UInt32(WARP)
        ):
            var i, piece = geometry.pieces.split(index)
            var element = piece * UInt32(width)
            var column, k = filters.split(element)
            var row = first.row + Int32(i) * geometry.step_rows
            var origin = first.column + Int32(i) * geometry.step_columns
            if (
                row >= geometry.rows
                or origin + Int32(column) >= geometry.columns
            ):
                continue
            var at = (
                i * UInt32(MATRIX_ROWS) + column
            ) * geometry.patch_stride + k
            var total = data.unsafe_load[width=width, alignment=alignment](
                Int(at)
            )
            for other in range(1, Int(geometry.parts)):
                total += data.unsafe_load[width=width, alignment=alignment](
                    Int(at) + other * part_elements
                )
            var image_row = Int(first.image) * Int(geometry.rows) + Int(row)
            var pixel = image_row * Int(geometry.columns) + Int(origin)
            var offset = pixel * Int(filters.value) + Int(element)
            var sums = total.cast[DType.float32]()
            var value: SIMD[DType.float32, width]
            comptime if runs:
                value = Self._apply_run[width](
                    epilogue, geometry, sums, k, offset
                )
            else:
                value = epilogue.apply[width, width](sums, Int(k), offset)
            # Only what is fused asks where a pixel is.
            var position = geometry.output(
                pixel + Int(column)
            ) if Self.placed else 0
            output.store[width](
                Int(position[IMAGE]),
                spatial(position),
                Int(k),
                offset,
                value.cast[Self.Output.dtype](),
            )

    @staticmethod
    @always_inline
    def _apply_run[
        width: Int
    ](
        epilogue: Self.FusedWork,
        geometry: WindowGeometry,
        total: SIMD[DType.float32, width],
        filter: UInt32,
        offset: Int,
    ) -> SIMD[DType.float32, width]:
        """The epilogue of elements that follow each other through pixels."""
        var scaled = total
        var bias = SIMD[DType.float32, width](0)
        if epilogue.has_scale or epilogue.has_bias:
            var filters = geometry.general.group_filters.value
            var k = filter
            comptime for i in range(width):
                scaled[i] = epilogue.scaled[1](total[i], Int(k))[0]
                bias[i] = epilogue.load_bias[1](Int(k))[0]
                k = k + 1 if k + 1 < filters else 0
        return epilogue.finish[width](
            scaled, bias, epilogue.load_residual[width, width](offset)
        )
