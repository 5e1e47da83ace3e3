"""Writes the Hopper kernel with epilogues of visitors as PTX, one file a chain
and candidate, into the folder that is the only argument; needs no GPU.

Prints a line a file, `KERNEL`: its name, the threads of a block, its shared
memory in bytes, and why it cannot be built, if so. Then a line for each thing
that visitors refuse, `REFUSES`: its name and the reason.
"""

from max.gpu.host import get_gpu_target
from std.collections import Optional
from std.compile import compile_info
from std.sys import argv
from std.utils import IndexList

from operations.conv.access import MemoryOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import ACTIVATION_NONE, ACTIVATION_SILU
from operations.conv.memory import Reads, Writes
from operations.conv.problem import SPATIAL, ConvProblem
from operations.nvidia.sm90.gemm.candidates import candidate
from operations.nvidia.sm90.gemm.config import Sm90Config
from operations.nvidia.epilogue.auxiliary import AuxiliaryOutput
from operations.nvidia.epilogue.callbacks import EpilogueVisitor
from operations.nvidia.sm90.gemm.legality import visitor_refusal
from operations.nvidia.epilogue.steps import (
    Activate,
    AddResidual,
    ChannelBias,
    ChannelScale,
    Discard,
    Rounded,
)
from operations.nvidia.epilogue.sums import sum_channels
from operations.nvidia.epilogue.conv_visitor import ConvVisitor
from operations.nvidia.sm90.gemm.kernel import ConvKernel
from operations.nvidia.sm90.gemm.visit import visited_config

comptime TYPE = DType.bfloat16
"""Of all tensors."""

comptime SHOWN = [0, 8]
"""Candidates: cooperative consumers, and ping-pong."""


def reads[dtype: DType]() -> Reads[dtype]:
    """An address that nobody reads from."""
    return Reads[dtype](unsafe_from_address=64)


def writes[dtype: DType](address: Int = 64) -> Writes[dtype]:
    """An address that nobody writes to."""
    return Writes[dtype](unsafe_from_address=address)


def epilogue(has_scale: Bool) -> Epilogue[TYPE, TYPE]:
    """An op's epilogue with bias and residual."""
    return Epilogue[TYPE, TYPE](
        has_bias=True,
        has_residual=True,
        has_scale=has_scale,
        scale=reads[DType.float32](),
        bias=reads[TYPE](),
        residual=reads[TYPE](),
        beta=1,
        activation=Activation(ACTIVATION_SILU, 0, 0),
        final_activation=Activation(ACTIVATION_NONE, 0, 0),
    )


def problem(filters: Int) -> ConvProblem:
    """A pointwise convolution."""
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


def emit[Visitor: EpilogueVisitor, //](name: String, visitor: Visitor) raises:
    """Writes a chain's kernels."""
    comptime for index in SHOWN:
        comptime config = visited_config[Visitor](index, TYPE)
        comptime kernel = ConvKernel[TYPE, MemoryOutput[TYPE], Visitor, config]
        var info = compile_info[
            kernel.run, emission_kind="asm", target=get_gpu_target["sm_90a"]()
        ]()
        with open(String(t"{argv()[1]}/{name}-{index}.ptx"), "w") as file:
            file.write(String(info.asm))
        print(
            "KERNEL",
            String(t"{name}-{index}"),
            config.threads(),
            kernel.shared_bytes(),
            config.refusal().or_else(""),
        )


def refuse[
    Visitor: EpilogueVisitor, //, out_type: DType = TYPE
](
    name: String,
    visitor: Visitor,
    config: Sm90Config = candidate(8),
    filters: Int = 64,
):
    """Prints why a visitor cannot run."""
    var refusal = visitor_refusal(visitor, config, problem(filters), out_type)
    print("REFUSES", name, refusal.or_else("nothing"))


def refuse_all() raises:
    """Prints all reasons."""
    var sums = sum_channels(writes[DType.float32]())
    var second = AuxiliaryOutput[TYPE](MemoryOutput(writes[TYPE]()))
    var wide = AuxiliaryOutput[DType.float32](
        MemoryOutput(writes[DType.float32]())
    )
    var odd = AuxiliaryOutput[TYPE](MemoryOutput(writes[TYPE](40)))
    var unswapped = candidate(8)
    unswapped.swapped = False
    var without = candidate(8)
    without.epilogue.num_epi_load_stages = 0
    refuse("sums", sums, unswapped)
    refuse("auxiliary_type", wide, unswapped)
    refuse[DType.float32]("auxiliary_filters", second, filters=20)
    refuse("auxiliary_address", odd)
    refuse("room", second, candidate(0))
    refuse("residual", AddResidual(1), without)
    refuse("no_residual", AddResidual(0), without)
    refuse("none", second.then(sums).then(Discard()))
    for has_scale in [False, True]:
        try:
            if has_scale:
                _ = ConvVisitor[TYPE].of(epilogue(has_scale))
            else:
                _ = ConvVisitor[TYPE, True].of(epilogue(has_scale))
            print("REFUSES", "scale nothing")
        except error:
            print("REFUSES", "scale", error)


def main() raises:
    var sums = sum_channels(writes[DType.float32](), writes[DType.float32]())
    var scaled_bias = ChannelScale(reads[DType.float32]()).then(
        ChannelBias(reads[TYPE]())
    )
    emit("scaled", ConvVisitor[TYPE, True].of(epilogue(True)))
    emit(
        "all",
        scaled_bias.then(AuxiliaryOutput[TYPE](MemoryOutput(writes[TYPE]())))
        .then(Activate[ACTIVATION_SILU]())
        .then(AddResidual(1))
        .then(Rounded[TYPE]())
        .then(sums),
    )
    emit("sums_only", scaled_bias.then(sums).then(Discard()))
    refuse_all()
