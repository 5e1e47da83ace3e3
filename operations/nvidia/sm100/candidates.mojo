"""The table of configurations of the Blackwell kernel, and for which operands
ops are compiled with them."""

from ...conv.operands import OperandTypes
from .config import Conv2dConfig, GemmTypes


@fieldwise_init
struct Candidate(ImplicitlyCopyable, Movable):
    """A row of the table."""

    var config: Conv2dConfig
    var inputs: Int
    """Bytes of the inputs that ops are compiled with it for: `NO_INPUTS`,
    `HALF_INPUTS` or `ALL_INPUTS`."""
    var fused_outputs: Bool
    """Whether it is for outputs that the graph compiler fused something behind
    too."""

    def offered(self, types: OperandTypes) -> Bool:
        """Whether ops with such operands are compiled with it."""
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


def candidates(types: GemmTypes) -> List[Candidate]:
    """The table; what a plan calls a candidate is its index here."""
    var one = Conv2dConfig.default_1sm(types)
    var two = Conv2dConfig.default_2sm(types)
    comptime Row = Candidate
    comptime pipelined = Conv2dConfig.pipelined
    return [
        Row(one, ALL_INPUTS, True),
        Row(two, ALL_INPUTS, True),
        Row(pipelined(types, 64, k_group_size=2), HALF_INPUTS, False),
        Row(pipelined(types, 256, block_swizzle_size=8), NO_INPUTS, False),
        Row(
            pipelined(types, 128, cta_group=2, k_group_size=2),
            NO_INPUTS,
            False,
        ),
        Row(
            pipelined(
                types, 256, cta_group=2, cluster_m=4, block_swizzle_size=4
            ),
            NO_INPUTS,
            False,
        ),
        Row(pipelined(types, 128, cluster_m=2, cluster_n=2), NO_INPUTS, False),
        # Four blocks share a tile, of problems with few tiles.
        Row(pipelined(types, 128, cluster_k=4), HALF_INPUTS, False),
        Row(pipelined(types, 64, cluster_k=2), NO_INPUTS, False),
    ]


comptime CANDIDATES = len(
    candidates(GemmTypes(DType.bfloat16, DType.bfloat16, DType.bfloat16))
)
"""Rows of the table."""

comptime SHARED = 7
"""The row whose tiles four blocks share, for problems with few tiles."""


def candidate(types: GemmTypes, index: Int) -> Conv2dConfig:
    """A row's configuration.

    Args:
        types: Of the operands.
        index: From 0 to `CANDIDATES - 1`.
    """
    return candidates(types)[index].config
