"""Which GPU this is compiled for."""

from max.gpu.host import DeviceContext


def is_hopper() -> Bool:
    """Whether this is compiled for a GPU of compute capability 9.0."""
    comptime info = DeviceContext.default_device_info
    return info.compute == 9.0 and info.api == "cuda"
