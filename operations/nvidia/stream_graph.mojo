"""A CUDA graph captured from a stream, and its time on the device.

`DeviceGraph` of MAX makes a node of each launch and waits for one before the
next begins; a capture keeps what `Stream.overlaps` asks for, as PyTorch's
graphs do (CUDA Programming Guide, "Programmatic Dependent Launch", use in CUDA
graphs).
"""

from max.gpu.host import DeviceContext
from std.ffi import OwnedDLHandle
from std.memory import Pointer

from .stream import Stream

comptime RELAXED = Int32(2)
"""`CU_STREAM_CAPTURE_MODE_RELAXED`: a launch may load its kernel."""

comptime NON_BLOCKING = UInt32(1)
"""`CU_STREAM_NON_BLOCKING`."""


struct _Driver(Movable):
    """The CUDA driver's functions."""

    var library: OwnedDLHandle

    def __init__(out self) raises:
        """Opens the driver.

        Raises:
            If there is none.
        """
        self.library = OwnedDLHandle("libcuda.so.1")

    def call[
        name: StringSpan[ImmStaticOrigin], *Ts: AnyType
    ](self, *arguments: *Ts) raises:
        """Calls a function.

        Parameters:
            name: Of the function.
            Ts: The types of the arguments.

        Args:
            arguments: The function's.

        Raises:
            The error that it returns.
        """
        var status = self.library.call[name, Int32](*arguments)
        if status != 0:
            raise Error(t"{name}: the CUDA driver's error {status}")


struct StreamGraph(Movable):
    """Launches that were captured from a stream of its own."""

    var driver: _Driver
    var stream: Int
    """The `CUstream`."""
    var executable: Int
    """The `CUgraphExec`."""
    var begin: Int
    """The `CUevent` before the replays."""
    var end: Int
    """The one behind them."""

    def __init__[
        Enqueue: def(mut Stream) raises -> None, //
    ](out self, ctx: DeviceContext, enqueue: Enqueue) raises:
        """Captures launches.

        Parameters:
            Enqueue: Of `enqueue`.

        Args:
            ctx: The device, which has run each of the kernels before.
            enqueue: Makes the launches on the stream that it is given.

        Raises:
            What the driver refused.
        """
        ctx.synchronize()
        ctx.set_as_current()
        self.driver = _Driver()
        ref driver = self.driver
        var handle = 0
        driver.call["cuStreamCreate"](Pointer(to=handle), NON_BLOCKING)
        self.stream = handle
        driver.call["cuEventCreate"](Pointer(to=handle), UInt32(0))
        self.begin = handle
        driver.call["cuEventCreate"](Pointer(to=handle), UInt32(0))
        self.end = handle
        driver.call["cuStreamBeginCapture_v2"](self.stream, RELAXED)
        var stream = Stream(ctx, cuda_stream=self.stream)
        enqueue(stream)
        var graph = 0
        driver.call["cuStreamEndCapture"](self.stream, Pointer(to=graph))
        driver.call["cuGraphInstantiateWithFlags"](
            Pointer(to=handle), graph, UInt64(0)
        )
        self.executable = handle
        driver.call["cuGraphDestroy"](graph)

    def seconds(self, times: Int) raises -> Float64:
        """Replays the graph, and returns the device's seconds of all replays
        together.

        Args:
            times: How many replays, one behind the other.

        Raises:
            What the driver refused, or the kernels' error.
        """
        self.driver.call["cuEventRecord"](self.begin, self.stream)
        for _ in range(times):
            self.driver.call["cuGraphLaunch"](self.executable, self.stream)
        self.driver.call["cuEventRecord"](self.end, self.stream)
        self.driver.call["cuStreamSynchronize"](self.stream)
        var milliseconds = Float32(0)
        self.driver.call["cuEventElapsedTime"](
            Pointer(to=milliseconds), self.begin, self.end
        )
        return Float64(milliseconds) / 1e3

    def __deinit__(deinit self):
        ref library = self.driver.library
        _ = library.call["cuGraphExecDestroy", Int32](self.executable)
        _ = library.call["cuEventDestroy_v2", Int32](self.begin)
        _ = library.call["cuEventDestroy_v2", Int32](self.end)
        _ = library.call["cuStreamDestroy_v2", Int32](self.stream)
