"""Writes the kernels of group normalization for the emulator, as PTX, into the
folder that is the first argument; needs no GPU.

    emit_group_norm FOLDER PROBLEM...

A problem is the type, images, pixels, channels, groups, multiprocessors, 1 if
the addresses are aligned or 0, and the activation's code, joined by an x;
epsilon is 2^-10. For each kernel a file of its name, type, channels of a load
and lanes, and for each problem a line of what its launches pass: channels of a
load and lanes; blocks of the first and last kernel, and of the second; bytes of
shared memory of the first and second; elements of sums and in all; the two
geometries and the activation as hexadecimal bytes.
"""

from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv
from std.sys.info import size_of
from std.utils import IndexList

from operations.conv.access import MemoryOutput
from operations.conv.epilogue import Activation
from operations.conv.operands import Device
from operations.conv.problem import SPATIAL
from operations.nvidia.epilogue.activations import DeviceActivation
from operations.nvidia.generic.group_norm import (
    FinishKernel,
    MomentsKernel,
    NormalizeKernel,
)
from operations.nvidia.generic.group_norm_launch import (
    LANES,
    NormProblem,
    plan_group_norm,
)
from operations.nvidia.generic.mean import LOAD_BYTES

comptime TYPES = [DType.bfloat16, DType.float32]

comptime CAPABILITY = 90

comptime EPSILON = Float32(1.0 / 1024)


def describe[dtype: DType](words: List[Int]) raises:
    """Prints the line of a problem."""
    var problem = NormProblem(
        words[0],
        IndexList[SPATIAL](1, 1, words[1]),
        words[2],
        words[3],
        EPSILON,
    )
    var refusal = problem.refusal()
    if refusal:
        raise Error(refusal.value())
    var plan = plan_group_norm[dtype](
        problem, aligned=words[5] == 1, device=Device(CAPABILITY, words[4])
    )
    var shared = 0
    comptime for width in [1, LOAD_BYTES // size_of[dtype]()]:
        comptime for lanes in LANES:
            if plan.width == width and plan.lanes == lanes:
                shared = MomentsKernel[dtype, width, lanes].shared_bytes
    print(
        String(t"{plan.width}-{plan.lanes}"),
        plan.blocks,
        plan.finishing,
        shared,
        FinishKernel[dtype, DType.float32].shared_bytes,
        plan.sums(),
        plan.workspace(),
        bytes_of(plan.geometry),
        bytes_of(plan.group),
        bytes_of(DeviceActivation.of(Activation(words[6], 0, 0))),
    )


def main() raises:
    comptime target = get_gpu_target["sm_90a"]()
    var folder = String(argv()[1])
    comptime for dtype in TYPES:
        var finish = compile_info[
            FinishKernel[dtype, DType.float32].run,
            emission_kind="asm",
            target=target,
        ]()
        with open(String(t"{folder}/finish-{dtype}.ptx"), "w") as file:
            file.write(String(finish.asm))
        comptime for width in [1, LOAD_BYTES // size_of[dtype]()]:
            comptime for lanes in LANES:
                var moments = compile_info[
                    MomentsKernel[dtype, width, lanes].run,
                    emission_kind="asm",
                    target=target,
                ]()
                var name = String(t"{dtype}-{width}-{lanes}.ptx")
                with open(String(t"{folder}/moments-{name}"), "w") as file:
                    file.write(String(moments.asm))
                var normalize = compile_info[
                    NormalizeKernel[
                        dtype, width, lanes, MemoryOutput[dtype]
                    ].run,
                    emission_kind="asm",
                    target=target,
                ]()
                with open(String(t"{folder}/normalize-{name}"), "w") as file:
                    file.write(String(normalize.asm))
    for i in range(2, len(argv())):
        var words = String(argv()[i]).split("x")
        var numbers = List[Int]()
        for j in range(1, len(words)):
            numbers.append(Int(String(words[j])))
        comptime for dtype in TYPES:
            if String(words[0]) == String(dtype):
                describe[dtype](numbers)
