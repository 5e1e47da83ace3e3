"""From a tile's sums in shared memory to the output: adds up the warps' parts,
applies the epilogue, and stores filters side by side."""

from max.gpu import thread_idx
from std.sys.info import size_of
from std.utils import StaticTuple

from ...conv.access import OutputTarget
from ...conv.epilogue import Activation, Epilogue
from ...conv.fields import ACTIVATION_NONE, ACTIVATION_RELU, ACTIVATION_SILU
from ..geometry import IMAGE, spatial
from ..pipeline.chunks import CHUNK_BYTES, shared_pointer
from ..pipeline.device_memory import prefetch_line
from ..tma.copy import SharedAddress
from .geometry import MmaGeometry
from .tile import MmaTile

comptime TOGETHER = 8
"""Values that a thread loads the epilogue's operands of together, where it
stores filters one by one."""

comptime FORMS = [
    (ACTIVATION_NONE, ACTIVATION_NONE),
    (ACTIVATION_RELU, ACTIVATION_NONE),
    (ACTIVATION_NONE, ACTIVATION_RELU),
    (ACTIVATION_SILU, ACTIVATION_NONE),
]
"""Activations, and final ones, that have a loop of their own: in the one for all
others a warp goes past every formula, chunk by chunk."""


@fieldwise_init
struct Ahead[bias_type: DType, residual_type: DType, width: Int](
    TrivialRegisterPassable
):
    """What a thread loads before a tile's sums are in shared memory: of its
    first pixel, as its operands are stored.

    Parameters:
        bias_type: Of the bias.
        residual_type: Of the residual.
        width: Neighbouring filters.
    """

    var bias: SIMD[Self.bias_type, Self.width]
    var residual: SIMD[Self.residual_type, Self.width]


@fieldwise_init
struct TileEpilogue[
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    sum_type: DType,
    tile: MmaTile,
](ImplicitlyCopyable, Movable):
    """What becomes of a tile.

    Parameters:
        Output: The output's type.
        bias_type: Of the bias.
        residual_type: Of the residual.
        sum_type: Of the sums.
        tile: The tile.
    """

    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime Ahead = Ahead[Self.bias_type, Self.residual_type, ...]
    comptime placed = Self.Output.computes or Self.Output.stores
    """Whether something is fused behind, which asks where a pixel is."""
    comptime takes_sums = Self.Output.dtype == DType.int32
    """Whether the output makes of the sums what the epilogue is."""
    comptime chunk = CHUNK_BYTES // size_of[Self.Output.dtype]()
    """Filters that a thread stores at once where they are aligned."""

    var work: Self.FusedWork
    var output: Self.Output
    var geometry: MmaGeometry
    var pixel: Int
    """The tile's first."""
    var filter: UInt32
    """The tile's first."""
    var filters: UInt32
    """Of the group, from the tile's first on."""

    @always_inline
    def prefetch(self):
        """Asks for the tile's residual in the L2."""
        if not self.work.has_residual:
            return
        var last = min(self.filters, UInt32(Self.tile.filters)) - 1
        comptime threads = UInt32(Self.tile.threads())
        for row in range(
            UInt32(thread_idx.x), UInt32(Self.tile.pixels), threads
        ):
            if self._has_pixel(row):
                var first = self.work.residual.unsafe_offset(
                    self._offset(row, 0)
                )
                prefetch_line(first)
                prefetch_line(first.unsafe_offset(Int(last)))

    @always_inline
    def ahead(self, aligned: Bool) -> Self.Ahead[Self.chunk]:
        """Loads what the thread needs first.

        Args:
            aligned: As for `store`.
        """
        if not aligned:
            return Self.Ahead[Self.chunk](0, 0)
        return self._ahead[Self.chunk]()

    @always_inline
    def _ahead[width: Int](self) -> Self.Ahead[width]:
        """As `ahead`, of a thread that stores `width` filters at once."""
        comptime alignment = width * size_of[Self.bias_type]()
        var row, column = Self._first[width]()
        var result = Self.Ahead[width](0, self._residual[width](row, column))
        if self.work.has_bias and column < self.filters:
            result.bias = self.work.bias.unsafe_load[
                width=width, alignment=alignment
            ](Int(self.filter + column))
        return result

    @always_inline
    def store(
        self,
        sums: SharedAddress,
        ahead: Self.Ahead[Self.chunk],
        aligned: Bool,
    ):
        """Stores the tile.

        Args:
            sums: The parts of the warps that share products, `part_elements`
                each.
            ahead: What `ahead` returned.
            aligned: Whether outputs, bias, scale and residual may be accessed
                `chunk` filters at a time.
        """
        if aligned:
            self._store[Self.chunk](sums, ahead)
            return
        # Of what is fused behind, each value would be one more copy.
        comptime if Self.placed:
            self._store[1](sums, self._ahead[1]())
        else:
            self._store_singly(sums)

    @staticmethod
    @always_inline
    def _first[width: Int]() -> Tuple[UInt32, UInt32]:
        """The row and column of the tile that a thread stores first."""
        comptime pieces = UInt32(Self.tile.filters // width)
        var row, piece = divmod(UInt32(thread_idx.x), pieces)
        return row, piece * UInt32(width)

    @always_inline
    def _store[width: Int](self, sums: SharedAddress, ahead: Self.Ahead[width]):
        """As `store`, `width` neighbouring filters at a time."""
        comptime if Self.takes_sums:
            self._store_rows[width](Self.FusedWork.identity(), sums, ahead)
            return
        if self.work.is_identity():
            self._store_rows[width](Self.FusedWork.identity(), sums, ahead)
            return
        # What is fused behind would be compiled with each.
        comptime if not Self.placed:
            comptime for form in range(len(FORMS)):
                comptime activation = FORMS[form][0]
                comptime final = FORMS[form][1]
                if (
                    self.work.activation.code == activation
                    and self.work.final_activation.code == final
                ):
                    self._store_rows[width](
                        self._known[activation, final](), sums, ahead
                    )
                    return
        self._store_rows[width](self.work, sums, ahead)

    @always_inline
    def _known[activation: Int, final: Int](self) -> Self.FusedWork:
        """The epilogue, whose formulas the compiler then knows."""
        var zero_point = Float32(0)
        comptime if Self.residual_type.is_integral():
            zero_point = self.work.residual_zero_point[0]
        return Self.FusedWork(
            has_bias=self.work.has_bias,
            has_residual=self.work.has_residual,
            has_scale=self.work.has_scale,
            scale=self.work.scale,
            bias=self.work.bias,
            residual=self.work.residual,
            beta=self.work.beta,
            activation=Activation(
                activation, self.work.activation.p0, self.work.activation.p1
            ),
            final_activation=Activation(
                final,
                self.work.final_activation.p0,
                self.work.final_activation.p1,
            ),
            residual_zero_point=zero_point,
        )

    @always_inline
    def _store_rows[
        width: Int
    ](
        self,
        work: Self.FusedWork,
        sums: SharedAddress,
        ahead: Self.Ahead[width],
    ):
        """As `_store`, with what is known of the epilogue. Each residual is on
        its way while the one before is added."""
        comptime threads = Self.tile.threads()
        comptime pieces = Self.tile.filters // width
        comptime assert threads % pieces == 0, "a thread has the same filters"
        comptime rows = UInt32(threads // pieces)
        comptime last = UInt32(Self.tile.pixels)
        var first, column = Self._first[width]()
        if column >= self.filters:
            return
        var filter = Int(self.filter + column)
        var residual = ahead.residual
        for row in range(first, last, rows):
            if not self._has_pixel(row):
                return
            var next = SIMD[Self.residual_type, width](0)
            if work.has_residual and row + rows < last:
                next = self._residual[width](row + rows, column)
            comptime if Self.takes_sums:
                self._write[width](
                    row,
                    column,
                    self._sum[width](sums, row, column).cast[
                        Self.Output.dtype
                    ](),
                )
                continue
            # Of integers the only rounding before the epilogue's.
            var scaled = work.scaled[width, width](
                Self._sum[width](sums, row, column).cast[DType.float32](),
                filter,
            )
            var value = work.finish[width](
                scaled, ahead.bias.cast[DType.float32](), residual
            )
            self._write[width](row, column, value.cast[Self.Output.dtype]())
            residual = next

    @always_inline
    def _store_singly(self, sums: SharedAddress):
        """As `store` to memory, one filter at a time. The bias and the residual
        of some values are on their way together: stores, which may write what
        is read later as far as the compiler knows, come behind."""
        comptime threads = UInt32(Self.tile.threads())
        comptime columns = UInt32(Self.tile.filters)
        comptime steps = UInt32(Self.tile.pixels) * columns
        comptime assert steps % (threads * TOGETHER) == 0
        for first in range(
            UInt32(thread_idx.x), steps, threads * UInt32(TOGETHER)
        ):
            var values = SIMD[DType.float32, TOGETHER](0)
            var bias = SIMD[DType.float32, TOGETHER](0)
            var residual = SIMD[Self.residual_type, TOGETHER](0)
            var filters = StaticTuple[Int, TOGETHER](fill=0)
            var offsets = StaticTuple[Int, TOGETHER](fill=0)
            var exists = StaticTuple[Bool, TOGETHER](fill=False)
            comptime for i in range(TOGETHER):
                var row, column = divmod(first + UInt32(i) * threads, columns)
                values[i] = Self._sum[1](sums, row, column).cast[
                    DType.float32
                ]()
                exists[i] = self._has_pixel(row) and column < self.filters
                # What does not exist reads what the tile's first value does.
                row = row if exists[i] else 0
                column = column if exists[i] else 0
                filters[i] = Int(self.filter + column)
                offsets[i] = self._offset(row, column)
            if self.work.has_residual:
                comptime for i in range(TOGETHER):
                    residual[i] = self.work.residual.unsafe_load(offsets[i])
            if self.work.has_bias:
                comptime for i in range(TOGETHER):
                    bias[i] = self.work.bias.unsafe_load(filters[i]).cast[
                        DType.float32
                    ]()
            if self.work.has_scale:
                comptime for i in range(TOGETHER):
                    values[i] *= self.work.scale.unsafe_load(filters[i])
            values = self.work.finish[TOGETHER](values, bias, residual)
            comptime for i in range(TOGETHER):
                if exists[i]:
                    self.output.data().unsafe_store(
                        offsets[i], values[i].cast[Self.Output.dtype]()
                    )

    @staticmethod
    @always_inline
    def _sum[
        width: Int
    ](sums: SharedAddress, row: UInt32, column: UInt32) -> SIMD[
        Self.sum_type, width
    ]:
        """The sums of neighbouring filters, of all warps' parts."""
        comptime alignment = min(width, 4) * size_of[Self.sum_type]()
        var data = shared_pointer[Self.sum_type](sums)
        var at = Int(row * UInt32(Self.tile.sums_stride()) + column)
        var total = data.unsafe_load[width=width, alignment=alignment](at)
        comptime for part in range(1, Self.tile.product_warps):
            total += data.unsafe_load[width=width, alignment=alignment](
                at + part * Self.tile.part_elements()
            )
        return total

    @always_inline
    def _residual[
        width: Int
    ](self, row: UInt32, column: UInt32) -> SIMD[Self.residual_type, width]:
        """The residual of neighbouring filters, zeros where there is none."""
        if not self._has_pixel(row) or column >= self.filters:
            return 0
        return self.work.load_residual[width, width](self._offset(row, column))

    @always_inline
    def _has_pixel(self, row: UInt32) -> Bool:
        """Whether there is a pixel for a row of the tile."""
        return self.pixel + Int(row) < Int(self.geometry.general.pixels)

    @always_inline
    def _offset(self, row: UInt32, column: UInt32) -> Int:
        """The row-major offset in the output of a value of the tile."""
        var filters = Int(self.geometry.general.filters)
        return (self.pixel + Int(row)) * filters + Int(self.filter + column)

    @always_inline
    def _write[
        width: Int
    ](
        self,
        row: UInt32,
        column: UInt32,
        values: SIMD[Self.Output.dtype, width],
    ):
        """Writes neighbouring filters of a pixel."""
        # Only what is fused asks where a pixel is.
        var place = self.geometry.output(
            self.pixel + Int(row)
        ) if Self.placed else 0
        self.output.store[width](
            Int(place[IMAGE]),
            spatial(place),
            Int(self.filter + column),
            self._offset(row, column),
            values,
        )
