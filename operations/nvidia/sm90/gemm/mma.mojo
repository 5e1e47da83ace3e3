"""The multiply: a warpgroup's accumulators += tile x tile, both read from
shared memory (wgmma).

Tiles are rows of 128 bytes, swizzled over 8 rows, the products' dimension
innermost ("K-major").
"""

from max.gpu.compute.mma import (
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from std.math import ceildiv
from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of
from std.utils import StaticTuple

from ...im2col.traversal import ROW_BYTES
from ...limits import MAX_MMA_N, MMA_K_BYTES, WARPGROUP
from ...tma.copy import SharedAddress
from ..wgmma import MMA_M, chunk_descriptor


def sum_type_of(dtype: DType) -> DType:
    """The type of accumulators: of integers int32's bits, which `wgmma_async` of MAX
    calls uint32; else float32.

    Args:
        dtype: Of activation and filter.
    """
    return DType.uint32 if dtype.is_integral() else DType.float32


def multiplies_of(columns: Int) -> Int:
    """Multiplies side by side that so many columns take.

    Args:
        columns: Of a consumer's part.
    """
    return ceildiv(columns, MAX_MMA_N)


struct Accumulators[rows: Int, columns: Int, sum_type: DType = DType.float32](
    Movable
):
    """A warpgroup's part of an output tile, in registers.

    Of thread t, register r of 64-row block b holds row `64*b + 16*(t/32) +
    (t%32)/4 + 8*((r/2)%2)` and column `8*(r/4) + 2*(t%4) + r%2`.

    Parameters:
        rows: A multiple of 64.
        columns: A multiple of 8 up to 256, or of 16 up to 512.
        sum_type: As `sum_type_of` has it.
    """

    comptime blocks = Self.rows // MMA_M
    comptime width = MMA_M * Self.columns // WARPGROUP
    comptime parts = multiplies_of(Self.columns)
    """Multiplies side by side, each with as many of a block's columns."""
    comptime part_columns = Self.columns // Self.parts
    comptime part_width = Self.width // Self.parts
    comptime Part = StaticTuple[Scalar[Self.sum_type], Self.part_width]

    var values: StaticTuple[Self.Part, Self.blocks * Self.parts]
    """The parts of the first block, then those of the next."""

    @always_inline
    def __init__(out self):
        """Registers whose values do not matter."""
        self.values = StaticTuple[Self.Part, Self.blocks * Self.parts]()
        comptime for part in range(Self.blocks * Self.parts):
            self.values[part] = Self.Part(fill=0)

    @always_inline
    def multiply[
        row_type: DType, column_type: DType, *, overwrite: Bool = False
    ](mut self, row_chunk: UInt32, column_chunk: UInt32):
        """Starts multiplying one stage, and closes the group that `wait`
        waits for.

        Parameters:
            row_type: Of the tile whose rows are the accumulators' rows.
            column_type: Of the other one, of the same size.
            overwrite: Whether to replace the values instead of adding to them.

        Args:
            row_chunk: The address of the stage's tile whose rows are the
                accumulators' rows, as descriptors have it.
            column_chunk: That of the tile whose rows are the columns.
        """
        comptime steps = ROW_BYTES // MMA_K_BYTES
        comptime depth = MMA_K_BYTES // size_of[row_type]()
        wgmma_fence_aligned()
        comptime for k in range(steps):
            comptime for i in range(Self.blocks * Self.parts):
                comptime row = i // Self.parts * MMA_M
                comptime column = i % Self.parts * Self.part_columns
                self.values[i] = wgmma_async[
                    MMA_M,
                    Self.part_columns,
                    depth,
                    a_type=row_type,
                    b_type=column_type,
                    scale_d=0 if overwrite and k == 0 else 1,
                ](
                    chunk_descriptor[
                        row_type, row * ROW_BYTES + k * MMA_K_BYTES
                    ](row_chunk),
                    chunk_descriptor[
                        column_type, column * ROW_BYTES + k * MMA_K_BYTES
                    ](column_chunk),
                    self.values[i],
                )
        wgmma_commit_group_sync()

    @always_inline
    def wait[pending: Int](mut self):
        """Waits until all but the latest multiplies are done; after
        `wait[0]` the values may be read.

        Parameters:
            pending: Multiplies that may still run.
        """
        wgmma_wait_group_sync[pending]()
        comptime if pending == 0:
            self._pin()

    @always_inline
    def _pin(mut self):
        """Keeps the compiler from reading a value before the wait, of whose
        effect on registers it knows nothing."""
        comptime for i in range(Self.blocks * Self.parts):
            comptime for r in range(Self.part_width):
                comptime kind = "f" if Self.sum_type == DType.float32 else "r"
                self.values[i][r] = inlined_assembly[
                    "",
                    Scalar[Self.sum_type],
                    constraints=String("=", kind, ",0,~{memory}"),
                ](self.values[i][r])

    @always_inline
    def replace(
        mut self, block: Int, register: Int, value: Scalar[Self.sum_type]
    ):
        """Replaces a sum.

        Args:
            block: Of 64 rows.
            register: In the block.
            value: The new one.
        """
        var part, at = divmod(register, Self.part_width)
        self.values[block * Self.parts + part][at] = value

    @always_inline
    def value[
        *, as_bits: Bool = False
    ](self, block: Int, register: Int) -> Float32:
        """A sum, rounded to float32; after `wait[0]`.

        Parameters:
            as_bits: Whether integers are not rounded, but int32's bits are
                taken for float32's.

        Args:
            block: Of 64 rows.
            register: In the block.
        """
        var part, at = divmod(register, Self.part_width)
        var sum = self.values[block * Self.parts + part][at]
        comptime if Self.sum_type == DType.float32:
            return rebind[Float32](sum)
        elif as_bits:
            return bitcast[DType.float32, 1](sum)[0]
        else:
            return bitcast[DType.int32, 1](sum)[0].cast[DType.float32]()
