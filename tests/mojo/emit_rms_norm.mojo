"""Writes the kernel of normalization by the root mean square for the emulator,
as PTX, into the folder that is the first argument; needs no GPU.

    emit_rms_norm FOLDER

For each problem of `PROBLEMS` and alignment a file, and a line of what its
launch passes: the type, images, pixels, channels, whether it is aligned, the
file's name, blocks, loads of a thread, and the geometry and the activation, SiLU,
as hexadecimal bytes. Epsilon is 2^-10, multiprocessors are 2.
"""

from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.math import ceildiv
from std.sys import argv
from std.utils import IndexList

from operations.conv.access import MemoryOutput
from operations.conv.epilogue import Activation
from operations.conv.fields import ACTIVATION_SILU
from operations.conv.problem import SPATIAL
from operations.nvidia.epilogue.activations import DeviceActivation
from operations.nvidia.generic.norm import PixelSizes
from operations.nvidia.generic.rms_norm import (
    RESIDENT,
    RmsGeometry,
    RmsNormKernel,
)
from operations.nvidia.generic.rms_norm_launch import RmsProblem, RmsShape

comptime EPSILON = Float32(1.0 / 1024)

comptime UNITS = 2


def emit[dtype: DType, channels: Int](images: Int, pixels: Int) raises:
    """Writes the kernels of a problem, and prints their lines."""
    comptime target = get_gpu_target["sm_90a"]()
    var problem = RmsProblem(
        images, IndexList[SPATIAL](1, 1, pixels), channels, EPSILON
    )
    var refusal = problem.refusal()
    if refusal:
        raise Error(refusal.value())
    comptime for aligned in [False, True]:
        comptime shape = RmsShape.of[dtype](channels, aligned=aligned)
        comptime Kernel = RmsNormKernel[
            dtype, shape.width, shape.lanes, shape.vectors, MemoryOutput[dtype]
        ]
        var info = compile_info[
            Kernel.run, emission_kind="asm", target=target
        ]()
        var name = String(
            t"{dtype}-{shape.width}-{shape.lanes}-{shape.vectors}"
        )
        with open(String(t"{argv()[1]}/{name}.ptx"), "w") as file:
            file.write(String(info.asm))
        var most = ceildiv(problem.pixels(), Kernel.rows * Kernel.held)
        print(
            dtype,
            images,
            pixels,
            channels,
            Int(aligned),
            name,
            min(most, RESIDENT * UNITS),
            shape.vectors,
            bytes_of(
                RmsGeometry(
                    UInt32(problem.pixels()),
                    UInt32(channels),
                    1 / Float32(channels),
                    EPSILON,
                    PixelSizes.of(problem.size),
                )
            ),
            bytes_of(DeviceActivation.of(Activation(ACTIVATION_SILU, 0, 0))),
        )


def main() raises:
    emit[DType.bfloat16, 96](1, 700)
    emit[DType.bfloat16, 40](2, 5)
    emit[DType.bfloat16, 384](1, 37)
    emit[DType.bfloat16, 1000](1, 9)
    emit[DType.bfloat16, 7](1, 33)
    emit[DType.bfloat16, 1048](1, 5)
    emit[DType.float32, 32](3, 50)
    emit[DType.float32, 20](1, 1)
