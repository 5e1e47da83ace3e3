"""Where a launch goes: the queue of a MAX device context, or a CUDA stream of
somebody else's."""

from max.gpu.host import (
    DeviceContext,
    DeviceStream,
    Dim,
    FuncAttribute,
)
from max.gpu.primitives.grid_controls import PDLLevel, pdl_launch_attributes
from std.builtin.device_passable import DevicePassable
from std.collections import Optional, OptionalReg


struct LaunchGrid(ImplicitlyCopyable, Movable):
    """The blocks of a launch."""

    var blocks: Int
    """Along x."""
    var rows: Int
    """Along y."""
    var threads: Int
    """Of a block."""
    var shared_bytes: Int
    """Dynamic shared memory of a block."""
    var cluster: Int
    """Blocks of a cluster."""

    def __init__(
        out self,
        blocks: Int,
        threads: Int,
        *,
        shared_bytes: Int = 0,
        cluster: Int = 1,
        rows: Int = 1,
    ):
        """Blocks along x and y.

        Args:
            blocks: How many along x.
            threads: Of a block.
            shared_bytes: Dynamic shared memory of a block.
            cluster: Blocks of a cluster.
            rows: Blocks along y, up to `MAX_GRID_ROWS` of limits.mojo.
        """
        self.blocks = blocks
        self.rows = rows
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.cluster = cluster


struct Stream(Movable):
    """A queue of a GPU; kernels run in its order."""

    var ctx: DeviceContext
    """The device, which compiles kernels and encodes descriptors."""
    var external: Optional[DeviceStream]
    """Somebody else's stream, or None: the context's own queue, which may be
    one that records a graph."""
    var overlaps: Bool
    """Whether a kernel's blocks may start before earlier kernels have ended
    (programmatic dependent launch), where the GPU can: so they may unless
    somebody says otherwise, to time it. Every kernel that is enqueued here
    waits for them itself (overlap.mojo)."""

    def __init__(out self, ctx: DeviceContext):
        """The context's own queue.

        Args:
            ctx: The context.
        """
        self.ctx = ctx
        self.external = None
        self.overlaps = True

    def __init__(out self, ctx: DeviceContext, *, cuda_stream: Int) raises:
        """A CUDA stream that somebody else owns.

        Args:
            ctx: A context of the stream's device.
            cuda_stream: The `CUstream` handle; 0 is the default stream.

        Raises:
            What the driver refused.
        """
        self.ctx = ctx
        var handle = Optional[Pointer[NoneType, MutUntrackedOrigin]]()
        if cuda_stream != 0:
            handle = Pointer[NoneType, MutUntrackedOrigin](
                unsafe_from_address=cuda_stream
            )
        self.external = ctx.create_external_stream(handle)
        self.overlaps = True

    @always_inline
    def enqueue[
        declared: TypeList[Trait=AnyType, ...],
        //,
        kernel: def(* args: * declared) thin capturing -> None,
        *Ts: DevicePassable,
        max_shared_bytes: Int = 0,
    ](self, grid: LaunchGrid, *arguments: *Ts) raises:
        """Enqueues a kernel, which the first call compiles.

        Parameters:
            declared: The types of the kernel's arguments.
            kernel: The kernel, which calls `wait_for_earlier_kernels`.
            Ts: The types of what is passed for them.
            max_shared_bytes: Dynamic shared memory that any launch of the
                kernel asks for, or 0 for no more than every kernel may have.

        Args:
            grid: The blocks.
            arguments: The kernel's arguments.

        Raises:
            What the driver refused.
        """
        var attribute = OptionalReg[FuncAttribute]()
        comptime if max_shared_bytes > 0:
            attribute = FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                UInt32(max_shared_bytes)
            )
        var cluster = OptionalReg[Dim]()
        if grid.cluster > 1:
            cluster = Dim(grid.cluster)
        var launch_attributes = pdl_launch_attributes(
            PDLLevel.ON if self.overlaps else PDLLevel.OFF
        )
        if self.external:
            self.external.value().enqueue_function(
                self.ctx.compile_function[kernel](func_attribute=attribute),
                *arguments,
                grid_dim=Dim(grid.blocks, grid.rows),
                block_dim=grid.threads,
                cluster_dim=cluster,
                shared_mem_bytes=grid.shared_bytes,
                attributes=launch_attributes^,
            )
        else:
            self.ctx.enqueue_function[kernel](
                *arguments,
                grid_dim=Dim(grid.blocks, grid.rows),
                block_dim=grid.threads,
                cluster_dim=cluster,
                shared_mem_bytes=grid.shared_bytes,
                func_attribute=attribute,
                attributes=launch_attributes^,
            )
