"""A device that a caller of a library opens once."""

from max.gpu.host import DeviceContext
from std.memory.alloc import unsafe_alloc

from library.call import sentence, write
from operations.conv.operands import Device
from operations.nvidia.device import device_of


@fieldwise_init
struct Opened(Movable):
    """A device that has been opened."""

    var ctx: DeviceContext
    var device: Device


comptime Handle = Pointer[Opened, MutUntrackedOrigin]


def open_device(index: Int64, made: Int64) -> Int64:
    """Opens a device for a caller, to whom it returns what a library's
    functions do.

    Args:
        index: Of the GPU, among those that the process sees.
        made: The address of where to write the device's handle.
    """
    try:
        var ctx = DeviceContext(device_id=Int(index))
        var handle = unsafe_alloc[Opened](1)
        handle.unsafe_write(Opened(ctx, device_of(ctx)))
        write(made, Int64(Int(handle)))
        return 0
    except error:
        return sentence(error)


def opened(handle: Int64) -> ref[MutUntrackedOrigin] Opened:
    """The device that a handle names.

    Args:
        handle: What `open_device` made.
    """
    return Handle(unsafe_from_address=Int(handle))[]
