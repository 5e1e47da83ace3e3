"""Writes MAX's own Blackwell convolution as PTX, one file a configuration and
entry point, into the folder that is the only argument; needs no GPU.

Prints a line a file: its name, the threads of a block, its shared memory in
bytes, rows, columns and depth of a block's tile, rows and columns of a
multiply, the blocks of a cluster along x and y, rows of an activation box, of a
filter box and of an output box, bytes of the operands' and of the output's
swizzle, stages of the input ring, and 1 if it adds a residual.
"""

from max.gpu.host import get_gpu_target
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from nn.conv.gpu.nvidia.sm100.conv2d_fprop_kernel import Conv2dFpropKernel
from nn.conv.gpu.nvidia.sm100.conv_config import Conv2dConfig
from std.compile import compile_info
from std.sys import argv
from std.sys.info import size_of
from std.utils.index import IndexList
from std.utils.static_tuple import StaticTuple

comptime Config[dtype: DType] = Conv2dConfig[dtype, dtype, dtype]
comptime BF16 = Config[DType.bfloat16]
comptime FP16 = Config[DType.float16]


def clustered(x: Int, y: Int) -> BF16:
    """One block multiplies, and blocks of a cluster share what they load."""
    var config = BF16.default_bf16_1sm()
    config.block_tile_shape = IndexList[3](128, 128, 64)
    config.num_pipeline_stages = 4
    config.cluster_shape = IndexList[3](x, y, 1)
    return config^


def paired(x: Int, y: Int, columns: Int) -> BF16:
    """Two blocks multiply, in a cluster of more, with tiles of other sizes."""
    var config = BF16.default_bf16()
    config.cluster_shape = IndexList[3](x, y, 1)
    config.block_tile_shape = IndexList[3](128, columns // 2, 64)
    config.mma_shape = IndexList[3](256, columns, 16)
    config.num_pipeline_stages = 4
    return config^


def grouped() -> BF16:
    """Two stages of loads a barrier."""
    var config = BF16.default_bf16_1sm()
    config.block_tile_shape = IndexList[3](128, 128, 64)
    config.num_pipeline_stages = 4
    config.k_group_size = 2
    return config^


def emit[
    dtype: DType, config: Config[dtype], has_residual: Bool
](name: String) raises:
    """Writes an entry point, and prints what its launch needs to know."""
    comptime Kernel = Conv2dFpropKernel[
        dtype,
        dtype,
        dtype,
        config,
        cluster_shape=StaticTuple[Int32, 3](
            Int32(config.cluster_shape[0]),
            Int32(config.cluster_shape[1]),
            Int32(config.cluster_shape[2]),
        ),
    ]
    comptime target = get_gpu_target["sm_100a"]()
    var text: String
    comptime if has_residual:
        text = String(
            compile_info[
                Kernel.run_with_residual, emission_kind="asm", target=target
            ]().asm
        )
    else:
        text = String(
            compile_info[Kernel.run, emission_kind="asm", target=target]().asm
        )
    with open(String(t"{argv()[1]}/{name}.ptx"), "w") as file:
        file.write(text)
    print(
        name,
        Kernel.NUM_THREADS,
        size_of[Kernel.SmemType](),
        Kernel.BM,
        Kernel.BN,
        Kernel.BK,
        Kernel.MMA_M,
        Kernel.MMA_N,
        Kernel.CLUSTER_M,
        Kernel.CLUSTER_N,
        Kernel.act_tile_dim0,
        Kernel.filter_tile_dim0,
        Kernel.out_tile_dim0,
        config.a_swizzle.bytes(),
        config.c_swizzle.bytes(),
        config.num_pipeline_stages // config.k_group_size,
        Int(has_residual),
    )


def main() raises:
    emit[DType.bfloat16, BF16.default_bf16_1sm(), False]("one")
    emit[DType.bfloat16, BF16.default_bf16_1sm(), True]("one-residual")
    comptime narrow = BF16.default_bf16_1sm[
        swizzle=TensorMapSwizzle.SWIZZLE_64B, num_pipeline_stages_override=6
    ]()
    emit[DType.bfloat16, narrow, False]("one-narrow")
    emit[DType.bfloat16, narrow, True]("one-narrow-residual")
    emit[DType.bfloat16, BF16.default_bf16(), False]("two")
    emit[DType.bfloat16, BF16.default_bf16(), True]("two-residual")
    comptime two_narrow = BF16.default_bf16[
        swizzle=TensorMapSwizzle.SWIZZLE_64B
    ]()
    emit[DType.bfloat16, two_narrow, False]("two-narrow")
    emit[DType.float16, FP16.default_fp16(), False]("two-half")
    emit[DType.bfloat16, clustered(2, 1), False]("one-clustered")
    emit[DType.bfloat16, paired(4, 1, 128), False]("two-clustered")
    emit[DType.bfloat16, grouped(), False]("one-grouped")
