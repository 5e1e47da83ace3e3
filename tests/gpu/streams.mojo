"""A shared library whose one function convolves on a CUDA stream of its
caller's, for `test_gpu_streams.py`: bfloat16, channels last, Hopper's implicit
GEMM.

    mojo build -I . --emit shared-lib --target-accelerator sm_90a \\
        tests/gpu/streams.mojo -o build/libstreams.so
"""

from max.gpu.host import DeviceContext
from std.ffi import _Global

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import (
    ACTIVATION_NONE,
    ACTIVATION_SILU,
    KERNEL_AUTO,
    KERNEL_SM90,
    KERNEL_STEM,
)
from operations.conv.known import UNKNOWN_FILTER
from operations.conv.memory import Reads, Writes
from operations.conv.operands import Arguments
from operations.conv.problem import PROBLEM_NUMBERS, ConvProblem
from operations.nvidia.convolve import convolve
from operations.nvidia.stream import Stream

comptime TYPE = DType.bfloat16

comptime Words = Pointer[Int64, MutUntrackedOrigin]


struct Device(Movable):
    """The context that every call shares."""

    var ctx: Optional[DeviceContext]

    def __init__(out self):
        """The first GPU, or nothing."""
        try:
            self.ctx = DeviceContext()
        except:
            self.ctx = None


def _device() -> Device:
    return Device()


comptime _DEVICE = _Global["maxconv_test_streams", _device]


def _reads(address: Int64) -> Reads[TYPE]:
    return Reads[TYPE](unsafe_from_address=Int(address))


def _convolve(stream: Int64, pointers: Words, numbers: Words) raises:
    """Convolves; the pointers are those of activation, filter, bias, residual
    and output, and 0 for a bias and a residual that are not there."""
    var problem_numbers = List[Int]()
    for i in range(PROBLEM_NUMBERS):
        problem_numbers.append(Int(numbers[unsafe_offset=i]))
    var fused = pointers[unsafe_offset=2] != 0
    var epilogue = Epilogue[TYPE, TYPE](
        has_bias=fused,
        has_residual=fused,
        has_scale=False,
        scale=Reads[DType.float32](unsafe_from_address=16),
        bias=_reads(pointers[unsafe_offset=2]),
        residual=_reads(pointers[unsafe_offset=3]),
        beta=1.0,
        activation=Activation(
            ACTIVATION_SILU if fused else ACTIVATION_NONE, 0, 0
        ),
        final_activation=Activation(ACTIVATION_NONE, 0, 0),
    )
    ref device = _DEVICE.get_or_create_ptr()[]
    if not device.ctx:
        raise Error("no GPU")
    var queue = Stream(device.ctx.value(), cuda_stream=Int(stream))
    convolve[
        kernels=(1 << KERNEL_SM90) | (1 << KERNEL_STEM),
        known=UNKNOWN_FILTER,
        scaled=False,
    ](
        queue,
        ConvProblem.of_numbers(problem_numbers),
        Arguments(
            MemoryActivation[TYPE](_reads(pointers[unsafe_offset=0])),
            _reads(pointers[unsafe_offset=1]),
            epilogue,
            MemoryOutput[TYPE](
                Writes[TYPE](unsafe_from_address=Int(pointers[unsafe_offset=4]))
            ),
        ),
        requested=KERNEL_AUTO,
        exact=False,
    )


@export
def convolve_on_stream(
    stream: Int64, pointers: Words, numbers: Words
) abi("C") -> Int32:
    """Enqueues a convolution on a stream; returns 0, or 1 after an error, which
    it prints.

    Args:
        stream: The `CUstream` handle; 0 is the default stream.
        pointers: Of activation, filter, bias, residual and output.
        numbers: Those of `ConvProblem.of_numbers`.
    """
    try:
        _convolve(stream, pointers, numbers)
        return 0
    except error:
        print(error)
        return 1
