"""A configuration of the Blackwell kernel that cannot be built, which must not
compile: `-D STAGES=7`; with 6 it can."""

from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import get_defined_int

from operations.conv.access import MemoryOutput
from operations.nvidia.epilogue.conv_visitor import ConvVisitor
from operations.nvidia.sm100.config import Conv2dConfig, GemmTypes
from operations.nvidia.sm100.kernel import Conv2dFpropKernel

comptime Type = DType.bfloat16


def config_of() -> Conv2dConfig:
    """The default with some number of stages."""
    var config = Conv2dConfig.default_1sm(GemmTypes(Type, Type, Type))
    config.num_pipeline_stages = get_defined_int["STAGES"]()
    return config


def main():
    comptime Kernel = Conv2dFpropKernel[
        MemoryOutput[Type], ConvVisitor[Type], config_of()
    ]
    var info = compile_info[
        Kernel.run, emission_kind="asm", target=get_gpu_target["sm_100a"]()
    ]()
    print(info.asm)
