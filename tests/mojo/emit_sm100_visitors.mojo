"""The Blackwell kernel with epilogues of visitors, for tests: what it compiles
to, what a launch passes to it, and what visitors refuse there.

    emit_sm100_visitors FOLDER compile
    emit_sm100_visitors FOLDER refuse
    emit_sm100_visitors FOLDER launch GEOMETRY... EPILOGUE...

As `emit_sm100`; `compile` writes the kernel that adds up the rows of sums, too,
as `add_rows.ptx`. Every chain has a bias; further pointers are `SUMS_AT`,
`SQUARES_AT` and `AUXILIARY_AT`.
"""

from max.gpu.host import get_gpu_target
from sm100_emitted import (
    BIAS_AT,
    SCALE_AT,
    Emitted,
    problem_of,
)
from sm100_outputs import Placed, Plain, TestOutput
from std.compile import compile_info
from std.sys import argv
from std.utils import IndexList

from operations.conv.access import MemoryOutput
from operations.conv.fields import ACTIVATION_LEAKY_RELU
from operations.conv.memory import Reads, Writes
from operations.conv.problem import SPATIAL, ConvProblem
from operations.nvidia.epilogue.auxiliary import AuxiliaryOutput
from operations.nvidia.epilogue.callbacks import EpilogueVisitor
from operations.nvidia.epilogue.chain import Chain
from operations.nvidia.epilogue.steps import (
    Activate,
    AddResidual,
    ChannelBias,
    ChannelScale,
    Discard,
    Rounded,
)
from operations.nvidia.epilogue.sums import (
    ChannelSums,
    add_rows,
    sum_channels,
)
from operations.nvidia.sm100.config import Conv2dConfig, GemmTypes
from operations.nvidia.sm100.layout import visitor_refusal
from operations.nvidia.sm100.visit import visited_config, with_room

comptime SUMS_AT = 0x5555000000000000
comptime SQUARES_AT = 0x6666000000000000
comptime AUXILIARY_AT = 0x7777000000000000

comptime SLOPE = Float32(0.5)
"""Of the leaky ReLU."""

comptime BETA = Float32(2.0)
"""Of the residual."""

comptime Type = DType.bfloat16


def bias() -> ChannelBias[Type]:
    """Each filter's bias."""
    return ChannelBias(Reads[Type](unsafe_from_address=BIAS_AT))


def scale() -> ChannelScale[DType.float32]:
    """Each filter's scale."""
    return ChannelScale(Reads[DType.float32](unsafe_from_address=SCALE_AT))


def sums() -> ChannelSums[True]:
    """Sums of values and of their squares."""
    return sum_channels(
        Writes[DType.float32](unsafe_from_address=SUMS_AT),
        Writes[DType.float32](unsafe_from_address=SQUARES_AT),
    )


def auxiliary[dtype: DType]() -> AuxiliaryOutput[dtype]:
    """A second tensor."""
    return AuxiliaryOutput[dtype](
        MemoryOutput(Writes[dtype](unsafe_from_address=AUXILIARY_AT))
    )


def emit[
    Output: TestOutput,
    Visitor: EpilogueVisitor,
    //,
    index: Int,
    residual: Bool = False,
    register_based: Bool = True,
](name: String, output: Output, visitor: Visitor) raises:
    """Does what the mode says with a chain on a candidate that has room."""
    comptime types = GemmTypes(Type, Type, Output.dtype)
    comptime roomy = visited_config[Visitor](types, index)
    Emitted[Output, Visitor, roomy, residual, register_based].emit(
        name, visitor, Type, True
    )


def emit_all(problem: ConvProblem) raises:
    """Chains on a block, a pair, and blocks that share a tile."""
    var plain = Plain[Type].of(problem)
    emit[0, True](
        "all-0",
        plain,
        scale()
        .then(bias())
        .then(auxiliary[DType.float32]())
        .then(Activate[ACTIVATION_LEAKY_RELU](SLOPE))
        .then(AddResidual(BETA))
        .then(Rounded[Type]())
        .then(sums()),
    )
    emit[1](
        "before-1",
        plain,
        bias()
        .then(auxiliary[Type]())
        .then(Activate[ACTIVATION_LEAKY_RELU](SLOPE)),
    )
    emit[7]("sums-7", plain, bias().then(sums()).then(Discard()))
    emit[0, register_based=False](
        "stored-0",
        Placed[Type, True].of(problem),
        bias().then(sums()),
    )


def pointwise(filters: Int) -> ConvProblem:
    """A small problem."""
    return ConvProblem(
        spatial_rank=2,
        batch=1,
        channels=64,
        filters=filters,
        groups=1,
        input=IndexList[SPATIAL](1, 8, 8),
        filter=IndexList[SPATIAL](fill=1),
        output=IndexList[SPATIAL](1, 8, 8),
        stride=IndexList[SPATIAL](fill=1),
        dilation=IndexList[SPATIAL](fill=1),
        pad_before=IndexList[SPATIAL](fill=0),
        pad_after=IndexList[SPATIAL](fill=0),
    )


def refuse[
    Visitor: EpilogueVisitor, //
](visitor: Visitor, config: Conv2dConfig, filters: Int = 64):
    """Prints why a visitor cannot run."""
    var refusal = visitor_refusal(visitor, config, pointwise(filters))
    print(refusal.or_else("nothing"))


def refuse_all():
    """Prints all reasons."""
    var one = Conv2dConfig.default_1sm(GemmTypes(Type, Type, Type))
    var config = with_room(one, 64 * 1024)
    var wide = one
    wide.output_tile_shape[1] = 64
    wide = with_room(wide, 64 * 1024)
    refuse(sums(), config)
    refuse(sums(), wide)
    refuse(auxiliary[DType.float32](), config)
    refuse(auxiliary[DType.float32](), wide)
    refuse(auxiliary[Type](), one)
    refuse(auxiliary[Type](), config, 20)
    refuse(ChannelBias(Reads[Type](unsafe_from_address=0x108)), config)
    refuse(
        ChannelScale(Reads[DType.float32](unsafe_from_address=0x104)), config
    )
    one.num_epi_load_stages = 0
    refuse(AddResidual(1), one)
    refuse(AddResidual(0), one)


def main() raises:
    if argv()[2] == "refuse":
        refuse_all()
        return
    if argv()[2] == "compile":
        var info = compile_info[
            add_rows, emission_kind="asm", target=get_gpu_target["sm_100a"]()
        ]()
        with open(String(t"{argv()[1]}/add_rows.ptx"), "w") as file:
            file.write(String(info.asm))
        emit_all(pointwise(64))
    else:
        emit_all(problem_of())
