"""The epilogues that the GPU tests run, and what they should make of sums."""

from extensibility.managed_tensor_slice import (
    ComputeOutputFusion,
    OutputFusion,
)
from max.gpu import block_idx, grid_dim, thread_idx
from std.atomic import Atomic
from std.math import isnan
from std.sys.info import size_of
from std.utils import IndexList

from operations.nvidia.epilogue.activations import DeviceActivation
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import (
    ACTIVATION_CLAMP,
    ACTIVATION_GELU,
    ACTIVATION_GELU_TANH,
    ACTIVATION_HARD_SWISH,
    ACTIVATION_LEAKY_RELU,
    ACTIVATION_NONE,
    ACTIVATION_RELU,
    ACTIVATION_SIGMOID,
    ACTIVATION_SILU,
    ACTIVATION_TANH,
)
from operations.conv.memory import Reads, Writes
from kernels import POISON, THREADS

comptime BIAS_TYPE = DType.bfloat16
"""Of the tests' bias."""

comptime FEATURES = 14
"""Epilogues to test."""


@fieldwise_init
struct AddFilter(ComputeOutputFusion):
    """What a graph may fuse: adds its filter's number to every element."""

    var unit: Int32

    def compute[
        dtype: DType,
        rank: Int,
        simd_width: SIMDLength,
        element_alignment: Int = 1,
    ](self, idx: IndexList[rank], val: SIMD[dtype, simd_width]) -> SIMD[
        dtype, simd_width
    ]:
        """Adds `unit` times the filter's number modulo 4."""
        var result = val
        comptime for i in range(Int(simd_width)):
            var number = (Int32(idx[rank - 1]) + Int32(i)) % 4 * self.unit
            result[i] += number.cast[dtype]()
        return result


@fieldwise_init
struct Feature(Copyable, Movable):
    """An epilogue, without its operands."""

    var name: String
    var has_bias: Bool
    var has_residual: Bool
    var beta: Float32
    var activation: Activation
    var final_activation: Activation
    var exact: Bool
    """Whether the sums' integers stay exact up to the rounding."""

    def epilogue[
        dtype: DType
    ](self, bias: Reads[BIAS_TYPE], residual: Reads[dtype]) -> Epilogue[
        BIAS_TYPE, dtype
    ]:
        """The epilogue with operands.

        Parameters:
            dtype: Of the residual.

        Args:
            bias: In device memory.
            residual: In device memory.
        """
        return Epilogue[BIAS_TYPE, dtype](
            has_bias=self.has_bias,
            has_residual=self.has_residual,
            has_scale=False,
            scale=Reads[DType.float32](unsafe_from_address=16),
            bias=bias,
            residual=residual,
            beta=self.beta,
            activation=self.activation,
            final_activation=self.final_activation,
        )


def feature(index: Int) -> Feature:
    """An epilogue to test.

    Args:
        index: From 0 to `FEATURES - 1`.
    """
    var none = Activation(ACTIVATION_NONE, 0, 0)
    var relu = Activation(ACTIVATION_RELU, 0, 0)
    var leaky = Activation(ACTIVATION_LEAKY_RELU, 0.25, 0)
    var clamp = Activation(ACTIVATION_CLAMP, -8, 24)
    if index == 0:
        return Feature("nothing", False, False, 1, none, none, True)
    if index == 1:
        return Feature("bias", True, False, 1, none, none, True)
    if index == 2:
        return Feature("relu", False, False, 1, relu, none, True)
    if index == 3:
        return Feature("residual", False, True, 1, none, none, True)
    if index == 4:
        return Feature("all", True, True, 0.5, leaky, clamp, True)
    if index == 5:
        return Feature("beta_0", True, True, 0, none, none, True)
    if index == 6:
        return Feature("residual_relu", True, True, 1, none, relu, True)
    var codes: List[Int] = [
        ACTIVATION_SILU,
        ACTIVATION_GELU,
        ACTIVATION_GELU_TANH,
        ACTIVATION_SIGMOID,
        ACTIVATION_TANH,
        ACTIVATION_HARD_SWISH,
    ]
    if index < 13:
        var smooth = Activation(codes[index - 7], 0, 0)
        return Feature(
            String(t"smooth_{codes[index - 7]}"),
            True,
            True,
            0.125,
            smooth,
            none,
            False,
        )
    var silu = Activation(ACTIVATION_SILU, 0, 0)
    var tanh = Activation(ACTIVATION_TANH, 0, 0)
    return Feature("two_smooth", True, True, -0.25, silu, tanh, False)


@always_inline
def _first() -> Int:
    """This thread's index in the grid."""
    return Int(block_idx.x) * THREADS + Int(thread_idx.x)


@always_inline
def _step() -> Int:
    """Threads of the grid."""
    return Int(grid_dim.x) * THREADS


def judge[
    dtype: DType
](
    sums: Pointer[Float32, MutAnyOrigin],
    found: Pointer[Scalar[dtype], MutAnyOrigin],
    elements: Int64,
    guard: Int64,
    filters: Int64,
    epilogue: Epilogue[BIAS_TYPE, dtype],
    tolerance: Float32,
    scale: Float32,
    wrong: Pointer[UInt32, MutAnyOrigin],
    first: Pointer[UInt32, MutAnyOrigin],
):
    """Counts elements that are not what the epilogue makes of a sum, times
    `scale` after the rounding; and guards that are not poison.

    A difference may be `tolerance` times the value, and as much of 1/16 for
    values near 0; with tolerance 0 none is allowed."""
    var end = Int(elements) + 2 * Int(guard)
    for i in range(_first(), end, _step()):
        var at = i - Int(guard)
        var value = found[unsafe_offset=i]
        var right: Bool
        if at < 0 or at >= Int(elements):
            right = value == Scalar[dtype](POISON)
        else:
            var expected = epilogue.apply[1](
                sums[unsafe_offset=at], at % Int(filters), at
            )
            var rounded = expected.cast[dtype]() * Scalar[dtype](scale)
            if tolerance == 0:
                right = value == rounded
            else:
                var difference = abs(value.cast[DType.float32]() - expected)
                right = difference <= tolerance * (abs(expected) + 0.0625)
        if not right:
            _ = Atomic.fetch_add(wrong, UInt32(1))
            Atomic.min(first, UInt32(i))


def differ[
    dtype: DType
](
    one: Pointer[Scalar[dtype], MutAnyOrigin],
    other: Pointer[Scalar[dtype], MutAnyOrigin],
    count: Int64,
    wrong: Pointer[UInt32, MutAnyOrigin],
    first: Pointer[UInt32, MutAnyOrigin],
):
    """Counts elements that differ."""
    for i in range(_first(), Int(count), _step()):
        if not one[unsafe_offset=i] == other[unsafe_offset=i]:
            _ = Atomic.fetch_add(wrong, UInt32(1))
            Atomic.min(first, UInt32(i))


def activate[
    exact: Bool
](
    arguments: Pointer[Float32, MutAnyOrigin],
    values: Pointer[Float32, MutAnyOrigin],
    count: Int64,
    formula: Int32,
    slope: Float32,
):
    """The kernel's formula of every argument, in pairs: `count` is even."""
    var activation = DeviceActivation(formula, slope, -2, 2)
    for i in range(2 * _first(), Int(count), 2 * _step()):
        values.unsafe_store(
            i,
            activation.apply[2, exact=exact](arguments.unsafe_load[width=2](i)),
        )


@fieldwise_init
struct Doubled(ComputeOutputFusion):
    """What the graph compiler might fuse: a value that is doubled, if it is
    handed in with the right index."""

    var shape: IndexList[4]

    def compute[
        dtype: DType,
        rank: Int,
        simd_width: SIMDLength,
        element_alignment: Int = 1,
    ](self, idx: IndexList[rank], val: SIMD[dtype, simd_width]) -> SIMD[
        dtype, simd_width
    ]:
        """Twice the value; -1 at an index outside the output."""
        comptime for axis in range(4):
            if idx[axis] < 0 or idx[axis] >= self.shape[axis]:
                return SIMD[dtype, simd_width](-1)
        return val + val


@fieldwise_init
struct Elsewhere[out_type: DType](OutputFusion):
    """What the graph compiler might fuse: a doubled value, stored to another
    tensor at its index.

    Parameters:
        out_type: Of that tensor.
    """

    var shape: IndexList[4]
    var to: Writes[Self.out_type]

    def store[
        dtype: DType,
        rank: Int,
        simd_width: SIMDLength,
        element_alignment: Int = 1,
    ](self, idx: IndexList[rank], val: SIMD[dtype, simd_width]):
        """Stores at the index's offset."""
        var offset = 0
        comptime for axis in range(4):
            offset = offset * self.shape[axis] + idx[axis]
        self.to.unsafe_store(offset, (val + val).cast[Self.out_type]())
