"""Calls MAX's own Hopper matmul in some configurations, so that the program
holds their kernels as PTX; it is built and read, and not run.

`C = A * B^T` of bfloat16, with the sizes of `tests/emulated/max_sm90.py`.
"""

from layout import TileTensor, row_major
from linalg.matmul.gpu.sm90.matmul import warp_specialize_gemm_with_multicasting
from linalg.utils_gpu import MatmulConfig
from max.gpu.host import DeviceContext
from std.utils.index import IndexList

comptime M = 200
comptime WHOLE_M = 256
comptime N = 256
comptime K = 192
comptime Dtype = DType.bfloat16
comptime Config = MatmulConfig[Dtype, Dtype, Dtype, True]


def config(cluster_n: Int, cluster_m: Int, columns: Int, stages: Int) -> Config:
    """Tiles of 128 rows and two warpgroups that multiply."""
    return Config(
        block_tile_shape=IndexList[3](128, columns, 64),
        mma_shape=IndexList[3](64, columns, 16),
        cluster_shape=IndexList[3](cluster_n, cluster_m, 1),
        num_pipeline_stages=stages,
        num_consumer=2,
        partitioned_multicast=False,
    )


def multiply[
    config: Config, use_tma_store: Bool, rows: Int
](ctx: DeviceContext) raises:
    """Launches one configuration."""
    var a = ctx.enqueue_create_buffer[Dtype](rows * K)
    var b = ctx.enqueue_create_buffer[Dtype](N * K)
    var c = ctx.enqueue_create_buffer[Dtype](rows * N)
    warp_specialize_gemm_with_multicasting[
        transpose_b=True, config=config, use_tma_store=use_tma_store
    ](
        TileTensor(c, row_major[rows, N]()),
        TileTensor(a, row_major[rows, K]()),
        TileTensor(b, row_major[N, K]()),
        ctx,
    )


def main() raises:
    with DeviceContext() as ctx:
        multiply[config(2, 1, 128, 4), True, M](ctx)
        multiply[config(1, 2, 64, 3), True, M](ctx)
        multiply[config(1, 1, 128, 4), False, WHOLE_M](ctx)
        ctx.synchronize()
