"""Prints which kernels an op is compiled with, of what a graph knows.

A line of the file that is the only argument is a storage type, an output type,
a GPU's compute capability times ten or 0 for a CPU, the channels of a block of
interleaved tensors or 0, and the numbers of `KnownProblem`: kernel, exact,
groups, channels, filters, taps, stride and features. A line of output is the
kernels' names. The last line is the features that this CPU is found to have.

Does not compile unless Python's lists of the kernels are the registries'.
"""

from std.sys import argv

from operations.conv.fields import CPU_KERNELS, GPU_KERNELS
from operations.conv.known import KnownProblem
from operations.conv.operands import OperandTypes
from operations.conv.kernel import kernel_name
from operations.conv.registry import has_kernel
from operations.cpu.features import ANY_CPU, has_feature
from operations.cpu.registry import CPU_REGISTRY
from operations.cpu.registry import check_registry as check_cpu_registry
from operations.nvidia.registry import GPU_REGISTRY
from operations.nvidia.registry import check_registry as check_gpu_registry


def dtype_of(name: String) raises -> DType:
    """The type of a name."""
    comptime for dtype in [
        DType.float32,
        DType.bfloat16,
        DType.float16,
        DType.float8_e4m3fn,
        DType.float8_e5m2,
        DType.int8,
    ]:
        if name == String(dtype):
            return dtype
    raise Error(t"{name} is no type")


def main() raises:
    check_cpu_registry()
    check_gpu_registry()
    var text: String
    with open(String(argv()[1]), "r") as file:
        text = file.read()
    for line in text.splitlines():
        var words = line.split()
        var n = List[Int]()
        for i in range(2, len(words)):
            n.append(Int(words[i]))
        var types = OperandTypes.unfused(
            dtype_of(String(words[0])),
            dtype_of(String(words[1])),
            interleaved=n[1],
        )
        var known = KnownProblem(
            kernel=n[2],
            exact=n[3] == 1,
            groups=n[4],
            channels=n[5],
            filters=n[6],
            taps=n[7],
            stride=n[8],
            features=n[9],
        )
        var names = String()
        if n[0] == 0:
            var kernels = CPU_REGISTRY.needed(types, 0, known)
            for kernel in materialize[CPU_KERNELS]():
                if has_kernel(kernels, kernel):
                    names += kernel_name(kernel) + " "
        else:
            var kernels = GPU_REGISTRY.needed(types, n[0], known)
            for kernel in materialize[GPU_KERNELS]():
                if has_kernel(kernels, kernel):
                    names += kernel_name(kernel) + " "
        print(names)
    var found = 0
    for feature in range(ANY_CPU):
        found |= Int(has_feature(feature)) << feature
    print(found)
