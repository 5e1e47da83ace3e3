"""The configurations of the Blackwell kernel that are shipped."""

from .config import Conv2dConfig

comptime CANDIDATES = 9
"""Configurations to choose from."""

comptime SHARED = 7
"""The one whose tiles four blocks share, for problems with few tiles."""


def candidate[
    act_type: DType, filter_type: DType, out_type: DType
](index: Int) -> Conv2dConfig[act_type, filter_type, out_type]:
    """A configuration to choose from.

    Parameters:
        act_type: Of the activation.
        filter_type: Of the filter.
        out_type: Of the output.

    Args:
        index: From 0 to `CANDIDATES - 1`.
    """
    comptime Config = Conv2dConfig[act_type, filter_type, out_type]
    if index == 0:
        return Config.default_1sm()
    if index == 1:
        return Config.default_2sm()
    if index == 2:
        return Config.pipelined(64, k_group_size=2)
    if index == 3:
        return Config.pipelined(256, block_swizzle_size=8)
    if index == 4:
        return Config.pipelined(128, cta_group=2, k_group_size=2)
    if index == 5:
        return Config.pipelined(
            256, cta_group=2, cluster_m=4, block_swizzle_size=4
        )
    if index == 6:
        return Config.pipelined(128, cluster_m=2, cluster_n=2)
    if index == 7:
        return Config.pipelined(128, cluster_k=4)
    return Config.pipelined(64, cluster_k=2)


def offered[in_type: DType](index: Int) -> Bool:
    """Whether `dispatch` may choose a candidate for a type, and every op has it
    compiled.

    Parameters:
        in_type: Of activation and filter.

    Args:
        index: Of the candidate.
    """
    comptime if in_type.is_half_float():
        return index < 3 or index == SHARED
    return index < 2


def offered_fused(index: Int) -> Bool:
    """As `offered`, for outputs that the graph compiler fused something behind.

    Args:
        index: Of the candidate.
    """
    return index < 2
