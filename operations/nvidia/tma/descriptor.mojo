"""Tensor-map descriptors: what the host tells TMA about a tensor.

Dimensions and coordinates are innermost first, as the driver counts them.
"""

from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.host.nvidia.tma import (
    TMADescriptor,
    TensorMapDataType,
    TensorMapFloatOOBFill,
    TensorMapInterleave,
    TensorMapL2Promotion,
    TensorMapSwizzle,
)
from std.memory import Pointer
from std.sys.info import size_of
from std.utils import IndexList

from ...conv.memory import Reads

comptime TFLOAT32 = TensorMapDataType(11)
"""Elements of float32 that a load rounds to tf32."""

comptime TensorMap = TMADescriptor
"""The driver's 128 opaque bytes; a kernel takes it as a grid constant."""


@fieldwise_init
struct TensorView[rank: Int](ImplicitlyCopyable, Movable, Writable):
    """A tensor in device memory as a descriptor sees it: extents, and the
    elements between neighbours, innermost dimension first.

    Parameters:
        rank: How many dimensions, 3 to 5 for im2col, 1 to 5 otherwise.
    """

    var extents: IndexList[Self.rank]
    var steps: IndexList[Self.rank]
    """Elements between neighbours; the innermost are 1 apart."""

    def __init__(out self, extents: IndexList[Self.rank]):
        """A contiguous tensor.

        Args:
            extents: Innermost first.
        """
        self.extents = extents
        self.steps = IndexList[Self.rank](fill=1)
        for i in range(1, Self.rank):
            self.steps[i] = self.steps[i - 1] * extents[i - 1]

    def elements(self) -> Int:
        """Elements from the tensor's first to its last."""
        var last = 0
        for i in range(Self.rank):
            last += (self.extents[i] - 1) * self.steps[i]
        return last + 1

    def strides[dtype: DType](self) -> Array[Int64, Self.rank]:
        """Bytes between neighbours along each dimension.

        Parameters:
            dtype: Of an element.
        """
        var result = Array[Int64, Self.rank](fill=0)
        for i in range(Self.rank):
            result[i] = Int64(self.steps[i] * size_of[dtype]())
        return result^

    def write_to(self, mut writer: Some[Writer]):
        """Writes extents and steps."""
        writer.write(t"{self.extents}, steps {self.steps}")


@fieldwise_init
struct PixelBox[spatial: Int](ImplicitlyCopyable, Movable, Writable):
    """The traversal of an im2col load over the pixels of a tensor, innermost
    dimension (width) first.

    A traversal along a dimension starts at `lower`, advances by `stride` and
    wraps at `extent + upper`.

    Parameters:
        spatial: How many spatial dimensions, 1 to 3.
    """

    var lower: IndexList[Self.spatial]
    var upper: IndexList[Self.spatial]
    var stride: IndexList[Self.spatial]

    def write_to(self, mut writer: Some[Writer]):
        """Writes the corners and strides."""
        writer.write(
            t"corners {self.lower} to {self.upper}, strides {self.stride}"
        )


def _buffer[
    dtype: DType
](ctx: DeviceContext, data: Reads[dtype], elements: Int) raises -> DeviceBuffer[
    dtype
]:
    """Device memory as the encoders take it. They read only its address."""
    return DeviceBuffer[dtype](
        ctx,
        data.unsafe_mut_cast[True]().unsafe_origin_cast[MutUntrackedOrigin](),
        elements,
        owning=False,
    )


def encode_tiled[
    dtype: DType, rank: Int
](
    ctx: DeviceContext,
    data: Reads[dtype],
    tensor: TensorView[rank],
    box: IndexList[rank],
    swizzle: TensorMapSwizzle,
    data_type: TensorMapDataType = TensorMapDataType.from_dtype[dtype](),
    *,
    every: IndexList[rank] = IndexList[rank](fill=1),
) raises -> TensorMap:
    """Encodes the descriptor of a tensor that is loaded or stored in boxes.

    Parameters:
        dtype: Of an element.
        rank: Of the tensor.

    Args:
        ctx: The device.
        data: The tensor's first element, aligned to 16 bytes.
        tensor: Its extents; every stride but the innermost must be a multiple
            of 16 bytes.
        box: Elements along each dimension that one copy covers.
        swizzle: How rows of a box are swizzled in shared memory.
        data_type: What TMA takes an element for.
        every: Of which elements of a box along each dimension a copy moves one.

    Returns:
        The descriptor.

    Raises:
        What the driver refuses, with the fields.
    """
    var map = TensorMap()
    var extents = Array[Int64, rank](fill=0)
    var boxes = Array[Int32, rank](fill=0)
    var steps = Array[Int32, rank](fill=1)
    for i in range(rank):
        extents[i] = Int64(tensor.extents[i])
        boxes[i] = Int32(box[i])
        steps[i] = Int32(every[i])
    var strides = tensor.strides[dtype]()
    var buffer = _buffer(ctx, data, tensor.elements())
    try:
        buffer._tensor_map_encode_tiled(
            Pointer(to=map).unsafe_bitcast[NoneType](),
            data_type._value,
            Int32(rank),
            extents.unsafe_ptr(),
            strides.unsafe_ptr().unsafe_offset(1),
            boxes.unsafe_ptr(),
            steps.unsafe_ptr(),
            TensorMapInterleave.INTERLEAVE_NONE._value,
            swizzle._value,
            TensorMapL2Promotion.L2_256B._value,
            TensorMapFloatOOBFill.NONE._value,
        )
    except e:
        raise Error(
            t"cuTensorMapEncodeTiled: {e}; {dtype} tensor {tensor}, box {box},"
            t" swizzle {swizzle}"
        )
    return map


def encode_im2col[
    dtype: DType, rank: Int
](
    ctx: DeviceContext,
    data: Reads[dtype],
    tensor: TensorView[rank],
    traversal: PixelBox[rank - 2],
    channels: Int,
    pixels: Int,
    swizzle: TensorMapSwizzle,
    data_type: TensorMapDataType = TensorMapDataType.from_dtype[dtype](),
) raises -> TensorMap:
    """Encodes the descriptor of a tensor `[N, [[D,] H,] W, C]` whose pixels are
    loaded or stored in the order of a traversal.

    Parameters:
        dtype: Of an element.
        rank: Of the tensor, 3 to 5.

    Args:
        ctx: The device.
        data: The tensor's first element, aligned to 16 bytes.
        tensor: Its extents; every stride but the innermost must be a multiple
            of 16 bytes.
        traversal: Corners and strides.
        channels: Channels of a pixel that one copy moves.
        pixels: Pixels that one copy moves, up to 1024.
        swizzle: How pixels are swizzled in shared memory.
        data_type: What TMA takes an element for.

    Returns:
        The descriptor.

    Raises:
        What the driver refuses, with the fields.
    """
    comptime spatial = rank - 2
    var map = TensorMap()
    var extents = Array[Int64, rank](fill=0)
    var steps = Array[Int32, rank](fill=1)
    var lower = Array[Int32, spatial](fill=0)
    var upper = Array[Int32, spatial](fill=0)
    for i in range(rank):
        extents[i] = Int64(tensor.extents[i])
    for i in range(spatial):
        lower[i] = Int32(traversal.lower[i])
        upper[i] = Int32(traversal.upper[i])
        steps[i + 1] = Int32(traversal.stride[i])
    var strides = tensor.strides[dtype]()
    var buffer = _buffer(ctx, data, tensor.elements())
    try:
        buffer._tensor_map_encode_im2col(
            Pointer(to=map).unsafe_bitcast[NoneType](),
            data_type._value,
            Int32(rank),
            extents.unsafe_ptr(),
            strides.unsafe_ptr().unsafe_offset(1),
            lower.unsafe_ptr(),
            upper.unsafe_ptr(),
            Int32(channels),
            Int32(pixels),
            steps.unsafe_ptr(),
            TensorMapInterleave.INTERLEAVE_NONE._value,
            swizzle._value,
            TensorMapL2Promotion.L2_256B._value,
            TensorMapFloatOOBFill.NONE._value,
        )
    except e:
        raise Error(
            t"cuTensorMapEncodeIm2col: {e}; {dtype} tensor {tensor},"
            t" {traversal}, {channels} channels of {pixels} pixels, swizzle"
            t" {swizzle}"
        )
    return map
