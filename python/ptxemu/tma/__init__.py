"""A model of TMA, the tensor memory accelerator of Hopper and Blackwell, in numpy.

``TiledDescriptor`` and ``Im2colDescriptor`` hold every field of the driver's two encode calls;
``explain`` prints one, ``validate`` says what the driver would refuse, ``load`` and ``store`` move
exactly the bytes that the instruction moves. ``activation_descriptor`` and ``filter_descriptor``
make the descriptors of a convolution::

    problem = Fprop((8, 56, 56, 64), (64, 3, 3, 64), pad_before=(1, 1), pad_after=(1, 1))
    descriptor = activation_descriptor(problem, DataType.BFLOAT16, channels_per_pixel=64)
    print(explain(descriptor))
    for offsets in filter_offsets(problem):
        tile = load(descriptor, activation, pixel_coordinates(problem, 0), offsets)
"""

from ._descriptor import (
    DataType,
    Descriptor,
    Im2colDescriptor,
    Interleave,
    L2Promotion,
    OobFill,
    Swizzle,
    TiledDescriptor,
    packed_strides,
)
from ._explanation import explain
from ._fprop import (
    Fprop,
    activation_descriptor,
    filter_descriptor,
    filter_offsets,
    pixel_coordinates,
    refusals,
)
from ._swizzle import swizzle_address, swizzle_bits, swizzle_period
from ._transfer import NAN_FILL, TF32_NAN, Move, bring, load, plan, store
from ._validation import BOX_BYTES, CORNER_RANGE, OFFSET_MAXIMUM, Violation, validate

__all__ = [
    "BOX_BYTES",
    "CORNER_RANGE",
    "NAN_FILL",
    "OFFSET_MAXIMUM",
    "TF32_NAN",
    "DataType",
    "Descriptor",
    "Fprop",
    "Im2colDescriptor",
    "Interleave",
    "L2Promotion",
    "Move",
    "OobFill",
    "Swizzle",
    "TiledDescriptor",
    "Violation",
    "activation_descriptor",
    "bring",
    "explain",
    "filter_descriptor",
    "filter_offsets",
    "load",
    "packed_strides",
    "pixel_coordinates",
    "plan",
    "refusals",
    "store",
    "swizzle_address",
    "swizzle_bits",
    "swizzle_period",
    "validate",
]
