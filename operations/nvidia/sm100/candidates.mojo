"""The table of configurations of the Blackwell kernel, and for which operands
ops are compiled with them."""

from ...conv.operands import OperandTypes
from .config import Conv2dConfig


@fieldwise_init
struct Candidate[act_type: DType, filter_type: DType, out_type: DType](
    ImplicitlyCopyable, Movable
):
    """A row of the table.

    Parameters:
        act_type: Of the activation.
        filter_type: Of the filter.
        out_type: Of the output.
    """

    var config: Conv2dConfig[Self.act_type, Self.filter_type, Self.out_type]
    var inputs: Int
    """Bytes of the inputs that ops are compiled with it for: `NO_INPUTS`,
    `HALF_INPUTS` or `ALL_INPUTS`."""
    var fused_outputs: Bool
    """Whether it is for outputs that the graph compiler fused something behind
    too."""

    def offered(self, types: OperandTypes) -> Bool:
        """Whether ops with such operands are compiled with it.

        Args:
            types: Of the operands.
        """
        if types.fused_output and not self.fused_outputs:
            return False
        if types.input.is_half_float():
            return self.inputs != NO_INPUTS
        return self.inputs == ALL_INPUTS


comptime NO_INPUTS = 0
"""The tests compile it, and no op."""

comptime HALF_INPUTS = 2
"""16 bits."""

comptime ALL_INPUTS = 4
"""Every type."""


def candidates[
    act_type: DType, filter_type: DType, out_type: DType
]() -> List[Candidate[act_type, filter_type, out_type]]:
    """The table.

    Parameters:
        act_type: Of the activation.
        filter_type: Of the filter.
        out_type: Of the output.
    """
    comptime Config = Conv2dConfig[act_type, filter_type, out_type]
    comptime Row = Candidate[act_type, filter_type, out_type]
    return [
        Row(Config.default_1sm(), ALL_INPUTS, True),
        Row(Config.default_2sm(), ALL_INPUTS, True),
        Row(Config.pipelined(64, k_group_size=2), HALF_INPUTS, False),
        Row(Config.pipelined(256, block_swizzle_size=8), NO_INPUTS, False),
        Row(
            Config.pipelined(128, cta_group=2, k_group_size=2),
            NO_INPUTS,
            False,
        ),
        Row(
            Config.pipelined(
                256, cta_group=2, cluster_m=4, block_swizzle_size=4
            ),
            NO_INPUTS,
            False,
        ),
        Row(Config.pipelined(128, cluster_m=2, cluster_n=2), NO_INPUTS, False),
        # Four blocks share a tile, of problems with few tiles.
        Row(Config.pipelined(128, cluster_k=4), HALF_INPUTS, False),
        Row(Config.pipelined(64, cluster_k=2), NO_INPUTS, False),
    ]


comptime CANDIDATES = len(
    candidates[DType.bfloat16, DType.bfloat16, DType.bfloat16]()
)
"""Rows of the table."""

comptime SHARED = 7
"""The row whose tiles four blocks share, for problems with few tiles."""


def candidate[
    act_type: DType, filter_type: DType, out_type: DType
](index: Int) -> Conv2dConfig[act_type, filter_type, out_type]:
    """A row's configuration.

    Parameters:
        act_type: Of the activation.
        filter_type: Of the filter.
        out_type: Of the output.

    Args:
        index: From 0 to `CANDIDATES - 1`.
    """
    return candidates[act_type, filter_type, out_type]()[index].config
