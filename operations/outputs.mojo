"""How kernels reach the output of a registered op."""

from extensibility import (
    ComputeOutputFusion,
    ManagedTensorSlice,
    OutputFusion,
)

from .conv.access import (
    ComputedOutput,
    MemoryOutput,
    OutputTarget,
    StoredOutput,
)

comptime TargetOf[
    dtype: DType,
    rank: Int,
    Stored: OutputFusion,
    Computed: ComputeOutputFusion,
    is_stored: Bool,
    is_computed: Bool,
]: OutputTarget = StoredOutput[dtype, rank, Stored] if is_stored else (
    ComputedOutput[dtype, rank, Computed] if is_computed else MemoryOutput[
        dtype
    ]
)
"""The kind of an output, by what the graph compiler fused behind its op."""


def target_of(
    output: ManagedTensorSlice[mut=True, ...],
    out target: TargetOf[
        output.dtype,
        output.rank,
        output.OutFusion,
        output.ComputeFusion,
        output._has_output_store_fusion,
        output._has_compute_fusion,
    ],
):
    """Takes an output out of its tensor: a pointer, or fused work.

    Args:
        output: The tensor.
    """
    comptime Target = type_of(target)
    var data = output.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    comptime if output._has_output_store_fusion:
        target = rebind[Target](
            StoredOutput[output.dtype, output.rank](data, output.out_fusion)
        )
    elif output._has_compute_fusion:
        target = rebind[Target](
            ComputedOutput[output.dtype, output.rank](
                data, output.compute_fusion
            )
        )
    else:
        target = rebind[Target](MemoryOutput[output.dtype](data))
