"""Writes the Hopper kernel's PTX, one file a candidate, into the folder that
is the only argument; needs no GPU.

Prints a line a candidate: its index, the threads of a block, its shared memory
in bytes, 1 if it moves registers, 1 if blocks share loads, and why it cannot
be built, if so.
"""

from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv

from operations.conv.access import MemoryOutput
from operations.sm90.dispatch import CANDIDATES, candidate
from operations.sm90.kernel import ConvKernel


def main() raises:
    comptime for index in range(CANDIDATES):
        comptime config = candidate(index)
        comptime kernel = ConvKernel[
            DType.bfloat16, MemoryOutput[DType.bfloat16], DType.bfloat16, config
        ].run
        var info = compile_info[
            kernel, emission_kind="asm", target=get_gpu_target["sm_90a"]()
        ]()
        with open(String(t"{argv()[1]}/{index}.ptx"), "w") as file:
            file.write(String(info.asm))
        print(
            index,
            config.threads(),
            config.shared_bytes(),
            Int(config.moves_registers()),
            Int(config.cluster_size() > 1),
            config.refusal().or_else(""),
        )
