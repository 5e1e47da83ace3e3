"""Writes the Hopper kernel's PTX, one file a candidate and type but bfloat16,
whose files `maxconv inspect` writes, into the folder that is the only argument;
needs no GPU. Outputs are bfloat16; with WIDE defined float32, and then it
writes bfloat16's files too.

Prints a line a candidate and type: its name, the type of activation and filter,
the output's, the threads of a block, its shared memory in bytes, 1 if it moves
registers, 1 if blocks share loads, 1 if it adds up parts of a sum, 1 if threads
load, and why it cannot be built, if so.
"""

from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv, is_defined

from operations.conv.access import MemoryOutput
from operations.conv.operands import OperandTypes
from operations.nvidia.sm90.gemm.candidates import (
    CANDIDATES,
    TABLE,
    candidate,
)
from operations.nvidia.sm90.gemm.config import Sm90Config
from operations.nvidia.epilogue.conv_visitor import ConvVisitor
from operations.nvidia.sm90.gemm.kernel import ConvKernel


comptime WIDE = is_defined["WIDE"]()
"""Whether outputs are float32."""

comptime OUT = DType.float32 if WIDE else DType.bfloat16
"""Of the outputs."""


def is_inspected(in_type: DType) -> Bool:
    """Whether `maxconv inspect` writes the files of a type."""
    return in_type == DType.bfloat16 and not WIDE


def file_name(index: Int, in_type: DType) -> String:
    """The name of a candidate's file, as `maxconv inspect` calls its own."""
    if is_inspected(in_type):
        var kernel = "unaligned" if candidate(index).unaligned else "sm90"
        return String(t"{kernel}-{index}")
    return String(t"{index}-{in_type}")


def write[in_type: DType, config: Sm90Config](name: String) raises:
    """Writes a candidate of a type."""
    comptime Kernel = ConvKernel[
        in_type,
        MemoryOutput[OUT],
        ConvVisitor[OUT],
        config,
    ]
    comptime target = get_gpu_target["sm_90a"]()
    comptime if config.gathers():
        var info = compile_info[
            Kernel.run_gathered, emission_kind="asm", target=target
        ]()
        put(name, String(info.asm))
    else:
        var info = compile_info[
            Kernel.run, emission_kind="asm", target=target
        ]()
        put(name, String(info.asm))


def put(name: String, text: String) raises:
    """Writes a PTX file."""
    with open(String(t"{argv()[1]}/{name}.ptx"), "w") as file:
        file.write(text)


def emit[in_type: DType]() raises:
    """Writes and describes a type's candidates."""
    comptime types = OperandTypes.unfused(in_type, OUT)
    comptime for index in range(CANDIDATES):
        comptime config = TABLE[index].config
        comptime if TABLE[index].offered(types, unaligned=config.unaligned):
            comptime if not is_inspected(in_type):
                write[in_type, config](file_name(index, in_type))
            print(
                file_name(index, in_type),
                in_type,
                OUT,
                config.threads(),
                config.shared_bytes(),
                Int(config.moves_registers()),
                Int(config.cluster_size() > 1),
                Int(config.splits()),
                Int(config.gathers()),
                config.refusal().or_else(""),
            )


def main() raises:
    emit[DType.bfloat16]()
    emit[DType.float8_e4m3fn]()
    emit[DType.float32]()
