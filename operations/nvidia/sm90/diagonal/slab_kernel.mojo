"""The slab kernel, for groups of 16 and 32 channels on Hopper: persistent, windows
of the image in shared memory, all taps multiplied from there by wgmma.

    a warp:             for each tile: load its window
    two warpgroups, in turns with two more:
                        for each tile:
                            for each tap: multiply pixels by filters
                            finish, write
    a warp:             for each tile: store the outputs, load another's residual

TMA writes zeros where a window lies outside the image, and its swizzle is a
function of the address in shared memory, so that a multiply may begin at any
pixel of a window, and at any group of its channels.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    thread_idx,
)
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.primitives.warp import broadcast
from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.utils import IndexList, StaticTuple

from ....conv.access import OutputTarget
from ....conv.epilogue import Epilogue
from ....conv.memory import Reads
from ....conv.problem import SPATIAL
from ...limits import MMA_K_BYTES, WARP, WARPGROUP
from ...overlap import wait_for_earlier_kernels
from ...pipeline.barrier import sync_threads, sync_warp
from ...pipeline.chunks import CHUNK_BYTES, load_chunk, swizzled
from ...pipeline.matrices import load_matrices
from ...tma.copy import SharedAddress, fence_async_proxy
from ...tma.descriptor import TensorMap
from ..wgmma import DESCRIPTOR_SHIFT, MMA_M
from .block import StagePosition
from .mma import store_matrices
from .plan import MATRIX, PIXEL_BYTES, SLAB, DiagonalConfig
from .slab_copies import load_windows, store_tiles
from .slab_epilogue import (
    MEMBER_CHUNKS,
    MEMBER_SUMS,
    MemberSums,
    SlabFusion,
)
from .slab_storage import SlabStorage
from .slabs import (
    CONSUMERS,
    MEMBER_CHANNELS,
    MEMBERS,
    SLAB_THREADS,
    SQUARE,
    TEAM_THREADS,
    TEAMS,
    SlabGeometry,
    SlabPlace,
    SlabShape,
    SlabWork,
    descriptor_half,
)

comptime FIRST_TEAM = 1
"""The named barrier of the first team; the others' follow."""


@fieldwise_init
struct SlabKernel[
    dtype: DType,
    bias_type: DType,
    Output: OutputTarget,
    config: DiagonalConfig,
]:
    """The kernel of a configuration.

    Parameters:
        dtype: Of activation and filter: bfloat16 or float16.
        bias_type: Of the bias.
        Output: How the output is reached; the residual has its type, bfloat16
            or float16.
        config: The configuration, for groups of several chunks of channels.
    """

    comptime shape = SlabShape.of(Self.config)
    comptime out_type = Self.Output.dtype
    comptime taps = Self.config.taps
    comptime stride = Self.config.stride
    comptime Storage = SlabStorage[Self.shape]
    comptime Fusion = SlabFusion[Self.bias_type, Self.out_type]
    comptime FusedWork = Epilogue[Self.bias_type, Self.out_type]
    comptime group_channels = Self.shape.group_channels
    comptime groups = MEMBER_CHANNELS // Self.group_channels
    """Of a warpgroup."""
    comptime GroupSums = StaticTuple[
        Float32, MMA_M * Self.group_channels // WARPGROUP
    ]
    """Of thread t, register r is of pixel `16*(t/32) + (t%32)/4 + 8*((r/2)%2)`
    and of filter `8*(r/4) + 2*(t%4) + r%2` of the group."""
    comptime AllSums = StaticTuple[Self.GroupSums, Self.groups]
    comptime stores_tiles = not (Self.Output.computes or Self.Output.stores)
    """Whether TMA stores the output."""

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
            Int32(SLAB_THREADS)
        ),
        `nvvm.minctasm`=SIMDLength(1),
    )
    @__llvm_arg_metadata(activation, `nvvm.grid_constant`)
    @__llvm_arg_metadata(output, `nvvm.grid_constant`)
    @__llvm_arg_metadata(residual, `nvvm.grid_constant`)
    def run(
        activation: TensorMap,
        output: TensorMap,
        residual: TensorMap,
        filter: Reads[Self.dtype],
        epilogue: Self.FusedWork,
        target: Self.Output,
        geometry: SlabGeometry,
    ):
        """A block: every tile of a slab whose number is its own, modulo the
        slab's blocks.

        Args:
            activation: Descriptor of the activation `[N, D, H, W, C]`, a
                window's even or odd columns a box.
            output: Descriptor of the output `[N, Z, P, Q, C]`, a tile a box;
                not used if fused work stores.
            residual: Descriptor of the residual, a tile a box; not used if
                there is none.
            filter: `[K, 1, R, S, C / groups]`.
            epilogue: What happens before the store.
            target: The output.
            geometry: The problem.
        """
        var storage = Self.Storage()
        var work = SlabWork(geometry, UInt32(block_idx.x))
        # The assembler then knows that a warp's threads go the same way.
        var warp = broadcast(UInt32(thread_idx.x) // UInt32(WARP))
        if warp == UInt32(CONSUMERS // WARP):
            load_windows(activation, geometry, storage, work)
        elif warp > UInt32(CONSUMERS // WARP):
            store_tiles[stores=Self.stores_tiles](
                output, residual, epilogue.has_residual, geometry, storage, work
            )
        else:
            Self._compute_tiles(
                filter, epilogue, target, geometry, storage, work, warp
            )

    @staticmethod
    @always_inline
    def _compute_tiles(
        filter: Reads[Self.dtype],
        epilogue: Self.FusedWork,
        target: Self.Output,
        geometry: SlabGeometry,
        storage: Self.Storage,
        work: SlabWork,
        warp: UInt32,
    ):
        """A warp of a warpgroup: a part of the channels of its team's tiles."""
        comptime warps = UInt32(WARPGROUP // WARP)
        var team, member = divmod(warp // warps, UInt32(MEMBERS))
        var lane = UInt32(thread_idx.x) % UInt32(WARP)
        wait_for_earlier_kernels()
        storage.copy_filters(filter, work.channel, geometry.channels)
        var fused = Self.Fusion(
            epilogue,
            work.channel + member * UInt32(MEMBER_CHANNELS) + lane % 4 * 2,
            geometry.channels,
        )
        barrier()
        var bare = epilogue.is_identity()
        # The matrix row of a tile's outputs whose address the thread passes.
        var pixel = warp % warps * 16 + lane % 16
        var own = swizzled[PIXEL_BYTES](pixel, member * UInt32(MEMBER_CHUNKS))
        var position = StagePosition(team, 0)
        var buffer = StagePosition(team, 0)
        for index in range(team, work.count, UInt32(TEAMS)):
            storage.full(position.stage).wait(position.parity)
            var sums = Self._multiply(geometry, storage, position.stage, member)
            sync_warp()
            if lane == 0:
                storage.empty(position.stage).arrive()
            position = position.after(UInt32(TEAMS), geometry.stages)
            var to = storage.buffer(buffer.stage)
            if not bare:
                sums = fused.activate(epilogue, sums)
            storage.ready(buffer.stage).wait(buffer.parity)
            if not bare:
                sums = Self._add_residual(epilogue, sums, to + own)
            Self._write(sums, to + own)
            comptime if Self.stores_tiles:
                fence_async_proxy()
            else:
                sync_threads[TEAM_THREADS](FIRST_TEAM + Int(team))
                Self._store_fused(
                    target,
                    geometry,
                    to,
                    work.channel,
                    work.place(geometry, index),
                    UInt32(thread_idx.x) % UInt32(TEAM_THREADS),
                )
            sync_warp()
            if lane == 0:
                storage.written(buffer.stage).arrive()
            buffer = buffer.after(UInt32(TEAMS), geometry.buffers)

    @staticmethod
    @always_inline
    def _multiply(
        geometry: SlabGeometry,
        storage: Self.Storage,
        stage: UInt32,
        member: UInt32,
    ) -> MemberSums:
        """The sums of a warpgroup's groups of a tile."""
        comptime row_bytes = Self.shape.row_bytes()
        comptime row_chunks = row_bytes // CHUNK_BYTES
        comptime pixel_chunks = PIXEL_BYTES // CHUNK_BYTES
        comptime pitch = Self.shape.columns() * PIXEL_BYTES
        comptime pixels_half = descriptor_half[PIXEL_BYTES](Self.stride * pitch)
        comptime filters_half = descriptor_half[row_bytes](MATRIX * row_bytes)
        comptime step_chunks = MMA_K_BYTES // CHUNK_BYTES
        var pixels = (
            storage.window(geometry, stage) >> DESCRIPTOR_SHIFT
        ) + member * (UInt32(MEMBER_CHUNKS))
        var filters = (storage.filters() >> DESCRIPTOR_SHIFT) + member * (
            UInt32(MEMBER_CHANNELS * row_chunks)
        )
        var sums = Self.AllSums(fill=Self.GroupSums(fill=0))
        wgmma_fence_aligned()
        comptime for group in range(Self.groups):
            comptime for tap in range(Self.taps * Self.taps):
                comptime r = tap // Self.taps
                comptime s = tap % Self.taps
                comptime pixel = (
                    s % Self.stride * Self.shape.rows() + r
                ) * Self.shape.columns() + s // Self.stride
                comptime for k in range(row_bytes // MMA_K_BYTES):
                    comptime from_ = (
                        pixel * pixel_chunks
                        + group * row_chunks
                        + k * step_chunks
                    )
                    comptime by = (
                        tap * SLAB + group * Self.group_channels
                    ) * row_chunks + k * step_chunks
                    sums[group] = wgmma_async[
                        MMA_M,
                        Self.group_channels,
                        MMA_K_BYTES // 2,
                        a_type=Self.dtype,
                        b_type=Self.dtype,
                        scale_d=0 if tap == 0 and k == 0 else 1,
                    ](
                        _descriptor[Self.dtype](
                            pixels + UInt32(from_), pixels_half
                        ),
                        _descriptor[Self.dtype](
                            filters + UInt32(by), filters_half
                        ),
                        sums[group],
                    )
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[0]()
        # Keeps the compiler from reading a sum before the wait, whose effect on
        # registers it does not know.
        var result = MemberSums(0)
        comptime for i in range(MEMBER_SUMS):
            comptime count = MMA_M * Self.group_channels // WARPGROUP
            result[i] = inlined_assembly[
                "", Float32, constraints="=f,0,~{memory}"
            ](sums[i // count][i % count])
        return result

    @staticmethod
    @always_inline
    def _write(sums: MemberSums, to: SharedAddress):
        """Rounds and writes a tile's sums.

        Args:
            sums: The sums.
            to: The matrix row whose address the thread passes, of the first 8
                channels.
        """
        var rounded = bitcast[DType.uint32, MEMBER_SUMS // 2](
            sums.cast[Self.out_type]()
        )
        comptime for chunk in range(MEMBER_CHUNKS):
            # The swizzle keeps a warpgroup's chunks within 64 bytes.
            store_matrices(
                to ^ UInt32(chunk * CHUNK_BYTES),
                rounded[2 * chunk],
                rounded[2 * chunk + 1],
            )

    @staticmethod
    @always_inline
    def _add_residual(
        epilogue: Self.FusedWork, sums: MemberSums, at: SharedAddress
    ) -> MemberSums:
        """The steps behind the activation.

        Args:
            epilogue: The epilogue.
            sums: What they are done to.
            at: Where `_write` writes, and the residual is.
        """
        var old = SIMD[DType.uint32, MEMBER_SUMS // 2](0)
        if epilogue.has_residual:
            comptime for chunk in range(MEMBER_CHUNKS):
                var pair = load_matrices[2](at ^ UInt32(chunk * CHUNK_BYTES))
                old[2 * chunk] = pair[0]
                old[2 * chunk + 1] = pair[1]
        var values = bitcast[Self.out_type, MEMBER_SUMS](old)
        # All at once would take more registers than there are.
        comptime half = MEMBER_SUMS // 2
        return epilogue.add_residual[half](
            sums.slice[half](), values.slice[half]()
        ).join(
            epilogue.add_residual[half](
                sums.slice[half, offset=half](),
                values.slice[half, offset=half](),
            )
        )

    @staticmethod
    @always_inline
    def _store_fused(
        target: Self.Output,
        geometry: SlabGeometry,
        from_: SharedAddress,
        channel: UInt32,
        place: SlabPlace,
        thread: UInt32,
    ):
        """Stores a tile's outputs through what the graph compiler fused, 8
        channels at a time. All threads of a team call it."""
        comptime pixel_chunks = PIXEL_BYTES // CHUNK_BYTES
        for index in range(
            thread, UInt32(SQUARE * SQUARE * pixel_chunks), UInt32(TEAM_THREADS)
        ):
            var pixel, chunk = divmod(index, UInt32(pixel_chunks))
            var p = place.row + pixel // UInt32(SQUARE)
            var q = place.column + pixel % UInt32(SQUARE)
            var filter = channel + chunk * UInt32(MATRIX)
            if (
                p < geometry.out_rows
                and q < geometry.out_columns
                and filter < geometry.channels
            ):
                target.store[MATRIX](
                    Int(place.image),
                    IndexList[SPATIAL](Int(place.plane), Int(p), Int(q)),
                    Int(filter),
                    geometry.output_offset(place, p, q) + Int(filter),
                    rebind[SIMD[Self.out_type, MATRIX]](
                        load_chunk[Self.out_type](
                            from_ + swizzled[PIXEL_BYTES](pixel, chunk)
                        )
                    ),
                )


@always_inline
def _descriptor[
    dtype: DType
](chunk: UInt32, half: UInt32) -> WGMMADescriptor[dtype]:
    """A descriptor of the rows that begin at a chunk of shared memory.

    Parameters:
        dtype: Of the rows.
    """
    var bits = UInt64(chunk) | UInt64(half) << 32
    return WGMMADescriptor[dtype](Int64(bits))
