"""Writes the kernel of the mean over pixels for the emulator, as PTX, into the
folder that is the first argument; needs no GPU.

    emit_mean FOLDER PROBLEM...

A problem is the type, images, pixels, channels, multiprocessors, and 1 if the
input is aligned or 0, joined by an x. For each kernel a file of its type,
channels of a load and lanes, and for each problem a line of what its launch
passes: the file's name, blocks, blocks of a cluster, bytes of shared memory, and
the geometry as hexadecimal bytes.
"""

from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv
from std.sys.info import size_of

from operations.conv.access import MemoryOutput
from operations.conv.operands import Device
from operations.nvidia.generic.mean import LOAD_BYTES, MeanKernel
from operations.nvidia.generic.mean_launch import (
    LANES,
    mean_refusal,
    plan_mean,
)
from operations.nvidia.limits import WARP

comptime TYPES = [DType.bfloat16, DType.float32]

comptime CAPABILITY = 90


def describe[dtype: DType](words: List[Int]) raises:
    """Prints the line of a problem."""
    var refusal = mean_refusal(words[0], words[1], words[2])
    if refusal:
        raise Error(refusal.value())
    var plan = plan_mean[dtype](
        words[0],
        words[1],
        words[2],
        aligned=words[4] == 1,
        device=Device(CAPABILITY, words[3]),
    )
    comptime for width in [1, LOAD_BYTES // size_of[dtype]()]:
        comptime for lanes in LANES:
            if plan.width == width and plan.lanes == lanes:
                print(
                    String(t"{dtype}-{width}-{lanes}"),
                    plan.blocks,
                    plan.geometry.parts.value,
                    MeanKernel[
                        dtype, width, lanes, MemoryOutput[dtype]
                    ].shared_bytes,
                    bytes_of(plan.geometry),
                )


def main() raises:
    comptime target = get_gpu_target["sm_90a"]()
    comptime for dtype in TYPES:
        comptime for width in [1, LOAD_BYTES // size_of[dtype]()]:
            comptime for lanes in LANES:
                comptime if width > 1 or lanes == WARP:
                    comptime kernel = MeanKernel[
                        dtype, width, lanes, MemoryOutput[dtype]
                    ].run
                    var info = compile_info[
                        kernel, emission_kind="asm", target=target
                    ]()
                    var name = String(t"{dtype}-{width}-{lanes}")
                    with open(String(t"{argv()[1]}/{name}.ptx"), "w") as file:
                        file.write(String(info.asm))
    for i in range(2, len(argv())):
        var words = String(argv()[i]).split("x")
        var numbers = List[Int]()
        for j in range(1, len(words)):
            numbers.append(Int(String(words[j])))
        comptime for dtype in TYPES:
            if String(words[0]) == String(dtype):
                describe[dtype](numbers)
