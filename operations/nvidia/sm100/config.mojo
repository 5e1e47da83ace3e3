"""Configurations of the Blackwell kernel, and the only statement of what each
can take.

A configuration is a compile-time value; the geometry it is asked about is a
run-time one. One that no kernel can be built from does not compile.
"""

from max.gpu.host.nvidia.tma import TensorMapSwizzle
from std.collections import Optional
from std.math import ceildiv
from std.sys.info import size_of
from std.utils import IndexList

from ...conv.memory import element_bytes
from ...conv.operands import OperandTypes
from ...conv.problem import ConvProblem
from ..im2col.tiles import TileGeometry
from ..im2col.traversal import ROW_BYTES, Traversal
from ..limits import (
    MAX_CLUSTER,
    MAX_INDEX,
    MAX_MMA_N,
    MAX_SHARED_BYTES,
    MMA_K_BYTES,
    PATTERN_BYTES,
    WARP,
)
from ..pipeline.barrier import BARRIER_BYTES

comptime EPILOGUE_WARPS = 4
"""Warps of the epilogue: one for each 32 lanes of tensor memory."""

comptime EPILOGUE_THREADS = EPILOGUE_WARPS * WARP
"""Threads of the epilogue."""

comptime TMEM_LANES = 128
"""Rows of a block's tensor memory."""

comptime TMEM_COLUMNS = 512
"""Columns of 32 bits of a block's tensor memory; all are allocated."""

comptime MAX_GROUPS = 16
"""Stages of the input ring, at most: more would wait for nothing."""

comptime CLC_RESPONSE_BYTES = 16
"""Bytes of the answer to a request for the next cluster's work."""

comptime SUBTILE_FILTERS = 32
"""Filters that the epilogue stores at a time."""

comptime SUM_BYTES = size_of[DType.float32]()
"""Bytes of an accumulator's value."""

comptime MAX_BANDS = 64
"""Largest `block_swizzle_size`."""


@fieldwise_init
struct GemmTypes(ImplicitlyCopyable, Movable):
    """The types of the operands."""

    var act: DType
    """Of the activation: bfloat16, float16, float8_e4m3fn, float8_e5m2, int8,
    uint8, or float32, of which the products take the 19 bits of tf32."""
    var filter: DType
    """Of the filter: the activation's, or the other float8."""
    var out: DType
    """Of output and residual: bfloat16, float16 or float32."""

    @staticmethod
    def of(types: OperandTypes) -> Self:
        """An op's.

        Args:
            types: Of its operands.
        """
        return Self(types.input, types.input, types.output)

    def refusal(self) -> String:
        """Why no instruction multiplies or stores these types; empty if one
        does."""
        var same = self.act == self.filter and (
            self.act.is_half_float()
            or self.act == DType.float32
            or self.act == DType.int8
            or self.act == DType.uint8
        )
        if not same and not (_is_float8(self.act) and _is_float8(self.filter)):
            return String(
                t"types: no instruction multiplies {self.act} by {self.filter};"
                t" two of bfloat16, float16, float32, int8 or uint8, or two of"
                t" float8_e4m3fn and float8_e5m2, are"
            )
        if not (self.out.is_half_float() or self.out == DType.float32):
            return String(
                t"types: output {self.out} is not bfloat16, float16 or float32"
            )
        return String()


def _is_float8(dtype: DType) -> Bool:
    """Whether it is one of the two types of 8 bits that mix."""
    return dtype == DType.float8_e4m3fn or dtype == DType.float8_e5m2


@fieldwise_init
struct Conv2dConfig(ImplicitlyCopyable, Movable, Writable):
    """How blocks of the Blackwell kernel are built.

    As an implicit GEMM, M are output pixels, N filters, K products. A block, or
    a pair of blocks that multiply together (`cta_group` 2), computes a tile of
    `mma_shape` M by N. Of a pair each block holds half of the tile's pixels,
    with all of its filters, and loads half of the filters."""

    var types: GemmTypes
    var block_tile_shape: IndexList[3]
    """M, N and K of what one block loads in a step of the sum."""
    var mma_shape: IndexList[3]
    """M, N and K of an instruction."""
    var output_tile_shape: IndexList[2]
    """M and N of a sub-tile that the epilogue stores at a time."""
    var cluster_shape: IndexList[3]
    """Blocks of a cluster along M, which share filters, along N, which share
    activations, and along K, which share a tile: each adds up a part of its
    sum, and stores some of its sub-tiles."""
    var cta_group: Int
    """Blocks that multiply together: 1 or 2."""
    var k_group_size: Int
    """Steps of the sum that a stage of the input ring holds."""
    var num_pipeline_stages: Int
    """Steps of the sum that the input ring holds."""
    var num_accum_pipeline_stages: Int
    """Accumulators in tensor memory: one is stored while another is summed."""
    var num_clc_pipeline_stages: Int
    """Answers of the scheduler that the slowest role may be behind."""
    var num_output_stages: Int
    """Buffers that sub-tiles of the output pass through."""
    var num_epi_load_stages: Int
    """Buffers of sub-tiles of the residual; 0: none can be added."""
    var block_swizzle_size: Int
    """Clusters along M that compute the same filters one after the other."""

    @staticmethod
    def pipelined(
        types: GemmTypes,
        mma_n: Int,
        *,
        cta_group: Int = 1,
        cluster_m: Int = 0,
        cluster_n: Int = 1,
        cluster_k: Int = 1,
        k_group_size: Int = 1,
        block_swizzle_size: Int = 1,
    ) -> Self:
        """A configuration with as many input stages as shared memory holds.

        Args:
            types: Of the operands.
            mma_n: Filters of a tile.
            cta_group: Blocks that multiply together.
            cluster_m: Blocks of a cluster along the pixels; 0: `cta_group`.
            cluster_n: Blocks of a cluster along the filters.
            cluster_k: Blocks of a cluster that share a tile's sum.
            k_group_size: Steps of the sum in a stage.
            block_swizzle_size: As the field.

        Returns:
            The configuration; `refusal` says whether it can be built.
        """
        var bytes = element_bytes(types.act)
        var config = Self(
            types=types,
            block_tile_shape=IndexList[3](
                TMEM_LANES, mma_n // cta_group, ROW_BYTES // bytes
            ),
            mma_shape=IndexList[3](
                TMEM_LANES * cta_group, mma_n, MMA_K_BYTES // bytes
            ),
            output_tile_shape=IndexList[2](TMEM_LANES, SUBTILE_FILTERS),
            cluster_shape=IndexList[3](
                cluster_m if cluster_m > 0 else cta_group, cluster_n, cluster_k
            ),
            cta_group=cta_group,
            k_group_size=k_group_size,
            num_pipeline_stages=k_group_size,
            num_accum_pipeline_stages=2,
            num_clc_pipeline_stages=3,
            num_output_stages=2,
            num_epi_load_stages=2,
            block_swizzle_size=block_swizzle_size,
        )
        for groups in range(2, MAX_GROUPS + 1):
            var longer = config
            longer.num_pipeline_stages = groups * k_group_size
            if longer.shared_bytes() > MAX_SHARED_BYTES:
                break
            config = longer
        return config

    @staticmethod
    def default_1sm(types: GemmTypes) -> Self:
        """One block a tile of 128 pixels and 128 filters."""
        return Self.pipelined(types, 128)

    @staticmethod
    def default_2sm(types: GemmTypes) -> Self:
        """Two blocks a tile of 256 pixels and 256 filters."""
        return Self.pipelined(types, 256, cta_group=2)

    def num_group_pipeline_stages(self) -> Int:
        """Stages of the input ring: groups of `k_group_size` steps."""
        return self.num_pipeline_stages // self.k_group_size

    def cluster_size(self) -> Int:
        """Blocks of a cluster."""
        return self.sharers() * self.split_k()

    def sharers(self) -> Int:
        """Blocks of a cluster that share loads: those of one part."""
        return self.cluster_shape[0] * self.cluster_shape[1]

    def split_k(self) -> Int:
        """Parts of a tile's sum."""
        return self.cluster_shape[2]

    def cluster_pixels(self) -> Int:
        """Pixels of the tiles of a whole cluster."""
        return self.cluster_shape[0] * self.block_tile_shape[0]

    def cluster_filters(self) -> Int:
        """Filters of the tiles of a whole cluster."""
        return self.cluster_shape[1] * self.mma_shape[1]

    def act_tile_dim0(self) -> Int:
        """Pixels that one load brings: blocks along N share a tile's."""
        return self.block_tile_shape[0] // self.cluster_shape[1]

    def filter_tile_dim0(self) -> Int:
        """Filters that one load brings: blocks, or pairs, along M share them.
        """
        return self.block_tile_shape[1] // (
            self.cluster_shape[0] // self.cta_group
        )

    def subtiles(self) -> Int:
        """Sub-tiles of a block's part of a tile."""
        return self.mma_shape[1] // self.output_tile_shape[1]

    def own_subtiles(self) -> Int:
        """Sub-tiles that a block stores, at most: every `split_k`-th."""
        return ceildiv(self.subtiles(), self.split_k())

    def partial_bytes(self) -> Int:
        """Bytes of a sub-tile of another block's part."""
        return self.output_tile_shape[0] * self.output_tile_shape[1] * SUM_BYTES

    def exchange_bytes(self) -> Int:
        """Bytes of what a block gets of a tile from those that share it."""
        return (self.split_k() - 1) * self.own_subtiles() * self.partial_bytes()

    def act_tile_bytes(self) -> Int:
        """Bytes of activations in a step of a block's sum."""
        return self.block_tile_shape[0] * ROW_BYTES

    def filter_tile_bytes(self) -> Int:
        """Bytes of filters in a step of a block's sum."""
        return self.block_tile_shape[1] * ROW_BYTES

    def step_bytes(self) -> Int:
        """Bytes that a step of the sum brings to a block."""
        return self.act_tile_bytes() + self.filter_tile_bytes()

    def input_expected_bytes(self) -> Int:
        """Bytes of a step that complete on the barrier of the block that
        multiplies: its own, and of a pair the other block's."""
        return self.cta_group * self.step_bytes()

    def output_row_bytes(self) -> Int:
        """Bytes of a pixel in a sub-tile."""
        return self.output_tile_shape[1] * element_bytes(self.types.out)

    def src_expected_bytes(self) -> Int:
        """Bytes of a sub-tile of residual or output."""
        return self.output_tile_shape[0] * self.output_row_bytes()

    def output_swizzle(self) -> TensorMapSwizzle:
        """How the rows of a sub-tile are swizzled: over their length."""
        if self.output_row_bytes() == 128:
            return TensorMapSwizzle.SWIZZLE_128B
        if self.output_row_bytes() == 64:
            return TensorMapSwizzle.SWIZZLE_64B
        return TensorMapSwizzle.SWIZZLE_32B

    def num_barriers(self) -> Int:
        """Barriers in shared memory: two a stage of each pipeline (inputs,
        accumulators, the scheduler's answers and its throttle, residuals, other
        blocks' sums), and one in front of the tensor memory's release."""
        return 1 + 2 * (
            self.num_group_pipeline_stages()
            + self.num_accum_pipeline_stages
            + 2 * self.num_clc_pipeline_stages
            + self.num_epi_load_stages
            + (1 if self.split_k() > 1 else 0)
        )

    def header_bytes(self) -> Int:
        """Bytes in front of the tiles: the scheduler's answers, the barriers,
        the address of the tensor memory; rounded up to where tiles may begin.
        """
        var bytes = (
            self.num_clc_pipeline_stages * CLC_RESPONSE_BYTES
            + self.num_barriers() * BARRIER_BYTES
            + size_of[DType.uint32]()
        )
        return (bytes + PATTERN_BYTES - 1) // PATTERN_BYTES * PATTERN_BYTES

    def shared_bytes(self) -> Int:
        """Shared memory of a block."""
        return (
            self.header_bytes()
            + self.num_pipeline_stages * self.step_bytes()
            + (self.num_output_stages + self.num_epi_load_stages)
            * self.src_expected_bytes()
            + self.exchange_bytes()
        )

    def refusal(self) -> String:
        """Why no kernel can be built so; empty if one can."""
        var refused = self.types.refusal()
        if not refused:
            refused = self._refused_shapes()
        if not refused:
            refused = self._refused_cluster()
        if not refused:
            refused = self._refused_stages()
        return refused

    def _refused_shapes(self) -> String:
        """Why tile, instruction and sub-tile do not fit one another."""
        var tile = self.block_tile_shape
        var mma = self.mma_shape
        var depth = ROW_BYTES // element_bytes(self.types.act)
        var mma_depth = MMA_K_BYTES // element_bytes(self.types.act)
        if self.cta_group != 1 and self.cta_group != 2:
            return String(t"cta_group: {self.cta_group} is not 1 or 2")
        if mma[0] != TMEM_LANES * self.cta_group:
            return String(
                t"mma_shape: M {mma[0]} is not {TMEM_LANES * self.cta_group},"
                t" {TMEM_LANES} rows of each of {self.cta_group} blocks' tensor"
                t" memory"
            )
        var columns = 16 * self.cta_group
        if mma[1] < columns or mma[1] > MAX_MMA_N or mma[1] % columns != 0:
            return String(
                t"mma_shape: N {mma[1]} is no multiple of {columns} from"
                t" {columns} to {MAX_MMA_N}"
            )
        if mma[2] != mma_depth:
            return String(
                t"mma_shape: K {mma[2]} is not {mma_depth}, {MMA_K_BYTES} bytes"
                t" of {self.types.act}"
            )
        if tile[0] * self.cta_group != mma[0]:
            return String(
                t"block_tile_shape: M {tile[0]} of {self.cta_group} blocks is"
                t" not the instruction's {mma[0]}"
            )
        if tile[1] * self.cta_group != mma[1]:
            return String(
                t"block_tile_shape: N {tile[1]} of {self.cta_group} blocks is"
                t" not the instruction's {mma[1]}"
            )
        if tile[2] != depth:
            return String(
                t"block_tile_shape: K {tile[2]} is not {depth}, a row of"
                t" {ROW_BYTES} bytes of {self.types.act}; longer steps are"
                t" k_group_size"
            )
        if self.output_tile_shape[0] != tile[0]:
            return String(
                t"output_tile_shape: M {self.output_tile_shape[0]} is not the"
                t" block's {tile[0]}"
            )
        if (
            self.output_tile_shape[1] < 1
            or mma[1] % self.output_tile_shape[1] != 0
        ):
            return String(
                t"output_tile_shape: N {self.output_tile_shape[1]} does not"
                t" divide the tile's {mma[1]}"
            )
        var row = self.output_row_bytes()
        if row != 32 and row != 64 and row != 128:
            return String(
                t"output_tile_shape: {self.output_tile_shape[1]} filters of"
                t" {self.types.out} are {row} bytes, not a swizzle's 32, 64 or"
                t" 128"
            )
        return String()

    def _refused_cluster(self) -> String:
        """Why blocks cannot share loads so."""
        var m = self.cluster_shape[0]
        var n = self.cluster_shape[1]
        var k = self.cluster_shape[2]
        if m < 1 or n < 1 or k < 1:
            return String(t"cluster_shape: ({m}, {n}, {k}) are not positive")
        if m % self.cta_group != 0:
            return String(
                t"cluster_shape: {m} blocks along M are no multiple of"
                t" cta_group {self.cta_group}"
            )
        if m * n * k > MAX_CLUSTER:
            return String(
                t"cluster_shape: {m * n * k} blocks are more than {MAX_CLUSTER}"
            )
        if k > self.subtiles():
            return String(
                t"cluster_shape: {k} blocks along K, but a tile has"
                t" {self.subtiles()} sub-tiles to store"
            )
        if self.block_tile_shape[0] % (8 * n) != 0:
            return String(
                t"cluster_shape: {n} blocks along N cannot each load an equal"
                t" multiple of 8 of {self.block_tile_shape[0]} pixels"
            )
        var sharers = m // self.cta_group
        if self.block_tile_shape[1] % (8 * sharers) != 0:
            return String(
                t"cluster_shape: {sharers} blocks or pairs along M cannot each"
                t" load an equal multiple of 8 of {self.block_tile_shape[1]}"
                t" filters"
            )
        if self.block_swizzle_size < 1 or self.block_swizzle_size > MAX_BANDS:
            return String(
                t"block_swizzle_size: {self.block_swizzle_size} is not 1 to"
                t" {MAX_BANDS}"
            )
        return String()

    def _refused_stages(self) -> String:
        """Why there are no pipelines of these stages."""
        if self.k_group_size < 1:
            return String(t"k_group_size: {self.k_group_size} is not positive")
        if self.num_pipeline_stages % self.k_group_size != 0:
            return String(
                t"num_pipeline_stages: {self.num_pipeline_stages} is no"
                t" multiple of k_group_size {self.k_group_size}"
            )
        var groups = self.num_group_pipeline_stages()
        if groups < 2 or groups > MAX_GROUPS:
            return String(
                t"num_pipeline_stages: {self.num_pipeline_stages} are {groups}"
                t" groups of {self.k_group_size}, not 2 to {MAX_GROUPS};"
                t" {self.shared_bytes()} bytes of shared memory with them, of"
                t" {MAX_SHARED_BYTES}"
            )
        if self.num_accum_pipeline_stages < 1:
            return String(
                t"num_accum_pipeline_stages: {self.num_accum_pipeline_stages}"
                t" is not positive"
            )
        var columns = self.num_accum_pipeline_stages * self.mma_shape[1]
        if columns > TMEM_COLUMNS:
            return String(
                t"tensor memory: {self.num_accum_pipeline_stages} accumulators"
                t" of {self.mma_shape[1]} columns are {columns}, but a block"
                t" has {TMEM_COLUMNS}"
            )
        if self.num_clc_pipeline_stages < 1:
            return String(
                t"num_clc_pipeline_stages: {self.num_clc_pipeline_stages} is"
                t" not positive"
            )
        if self.num_output_stages < 2:
            return String(
                t"num_output_stages: {self.num_output_stages}, but one is"
                t" written while another is stored: at least 2"
            )
        if self.num_epi_load_stages < 0:
            return String(
                t"num_epi_load_stages: {self.num_epi_load_stages} is negative"
            )
        if self.header_bytes() != PATTERN_BYTES:
            return String(
                t"stages: {self.num_barriers()} barriers and"
                t" {self.num_clc_pipeline_stages} answers do not fit"
                t" {PATTERN_BYTES} bytes"
            )
        if self.shared_bytes() > MAX_SHARED_BYTES:
            return String(
                t"shared memory: {self.shared_bytes()} bytes, but a block has"
                t" {MAX_SHARED_BYTES}"
            )
        return String()

    def problem_refusal(self, problem: ConvProblem) -> Optional[String]:
        """Why the kernel cannot take a problem, or None.

        Args:
            problem: The convolution, valid (`ConvProblem.validate`).

        Returns:
            The reason, or None if the kernel can.
        """
        var refused = self.refusal()
        if refused:
            return refused
        var traversal = self.traversal(problem)
        var refusal = traversal.output_refusal(element_bytes(self.types.out))
        if not refusal:
            refusal = traversal.refusal(0)
        if refusal:
            return refusal
        var steps = traversal.steps()
        if steps < self.split_k():
            return String(
                t"cluster_shape: {self.split_k()} blocks along K, but a tile's"
                t" sum has {steps} steps"
            )
        var pixels = traversal.pixels(0)
        if pixels + self.cluster_pixels() >= MAX_INDEX:
            return String(t"{pixels} output pixels; coordinates have 31 bits")
        var blocks = self.blocks(traversal)
        if blocks >= MAX_INDEX:
            return String(
                t"{blocks} blocks; a grid has at most {MAX_INDEX - 1}"
            )
        return None

    def traversal(self, problem: ConvProblem) -> Traversal:
        """How its loads traverse a problem's activation."""
        return Traversal(problem, self.types.act)

    def geometry(self, traversal: Traversal) -> TileGeometry:
        """A problem cut into tiles."""
        var cut = TileGeometry.of(
            traversal, 0, self.cluster_pixels(), self.cluster_filters()
        )
        cut.split(0, self.split_k())
        return cut

    def blocks(self, traversal: Traversal) -> Int:
        """Blocks of the grid: a cluster for each of the cut's tiles, which
        running clusters take over from those that have not started."""
        return Int(self.geometry(traversal).tiles()) * self.cluster_size()

    def write_to(self, mut writer: Some[Writer]):
        """Writes the configuration on one line."""
        writer.write(
            t"tile {self.mma_shape[0]}x{self.mma_shape[1]},"
            t" {self.cta_group} blocks, cluster"
            t" {self.cluster_shape[0]}x{self.cluster_shape[1]}x{self.split_k()},"
            t" {self.num_pipeline_stages} stages in groups of"
            t" {self.k_group_size},"
            t" {self.num_accum_pipeline_stages} accumulators, sub-tiles of"
            t" {self.output_tile_shape[1]} filters, residual and output stages"
            t" {self.num_epi_load_stages}+{self.num_output_stages}"
        )
