"""The GPU: its generation, and what of it decides how a problem runs."""

from max.gpu.host import DeviceAttribute, DeviceContext

from ..conv.fields import BLACKWELL_CAPABILITIES, HOPPER_CAPABILITIES
from ..conv.operands import Device


def target_capability() -> Int:
    """The compute capability, times ten, of the GPU that this is compiled for;
    0 if it is none of NVIDIA's."""
    comptime info = DeviceContext.default_device_info
    comptime if info.api == "cuda":
        return Int(Float64(info.compute) * 10 + 0.5)
    return 0


def device_of(ctx: DeviceContext) raises -> Device:
    """The GPU of a context.

    Args:
        ctx: The context.

    Raises:
        What the driver refused.
    """
    return Device(
        target_capability(),
        ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT),
        ctx.get_attribute(DeviceAttribute.L2_CACHE_SIZE),
    )


def is_hopper(capability: Int) -> Bool:
    """Whether the Hopper kernels run on a GPU.

    Args:
        capability: Its compute capability, times ten.
    """
    comptime for known in HOPPER_CAPABILITIES:
        if capability == known:
            return True
    return False


def is_blackwell(capability: Int) -> Bool:
    """Whether the Blackwell kernel runs on a GPU.

    Args:
        capability: Its compute capability, times ten.
    """
    comptime for known in BLACKWELL_CAPABILITIES:
        if capability == known:
            return True
    return False
