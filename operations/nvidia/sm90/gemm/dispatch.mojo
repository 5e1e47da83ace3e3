"""Which configuration of the Hopper kernel takes a problem: the one that a
model of waves and bytes finds fastest."""

from max.gpu.host import DeviceContext

from ....conv.access import OutputTarget
from ....conv.epilogue import Epilogue
from ....conv.memory import Reads
from ....conv.problem import ConvProblem
from ...im2col.traversal import Traversal
from .candidates import CANDIDATES, candidate, offered, offered_fused
from ...split_k import MAX_SPLIT_K
from .config import Sm90Config, can_implement
from .epilogue_visitor import ConvVisitor
from .grid import tile_clusters
from .launch import LaunchPlan
from .model import FusedWork, predicted_seconds
from .split_k import split_refusal


@fieldwise_init
struct Choice(Copyable, Movable, Writable):
    """A candidate, or why there is none."""

    var index: Int
    """Of the candidate; -1 if every one refuses."""
    var parts: Int
    """Of a tile's sum."""
    var seconds: Float64
    """The model's time."""
    var refusal: String
    """Of the last candidate that refused."""

    def write_to(self, mut writer: Some[Writer]):
        """Writes the choice on one line.

        Args:
            writer: Where to.
        """
        if self.index < 0:
            writer.write(self.refusal)
        else:
            var microseconds = round(self.seconds * 1e7) / 10
            writer.write(t"{candidate(self.index)}")
            if self.parts > 1:
                writer.write(t", {self.parts} parts")
            writer.write(t": {microseconds} us by the model")


def choose[
    in_type: DType, out_type: DType
](
    problem: ConvProblem,
    multiprocessors: Int,
    fused_output: Bool = False,
    work: FusedWork = FusedWork(),
) -> Choice:
    """The candidate that the model finds fastest among those that can take a
    problem.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.

    Args:
        problem: The convolution, valid and with at least one output.
        multiprocessors: Of the device.
        fused_output: Whether the graph compiler fused something behind the
            output.
        work: What the epilogue has to do.

    Returns:
        The choice.
    """
    var best = Choice(-1, 1, 0.0, String())
    var traversal = Traversal(problem)
    var refusal = traversal.refusal[in_type](0)
    if refusal:
        best.refusal = refusal.value()
        return best^
    for index in range(CANDIDATES):
        var config = candidate(index)
        if not offered[in_type, out_type](index):
            continue
        if fused_output and not offered_fused(index):
            continue
        refusal = can_implement[in_type, out_type](config, problem)
        if refusal:
            best.refusal = refusal.value()
            continue
        for parts in parts_to_try(config, traversal, multiprocessors):
            if split_refusal[in_type](config, traversal, parts):
                continue
            var seconds = predicted_seconds[in_type, out_type](
                config, problem, multiprocessors, parts, work, fused_output
            )
            if best.index < 0 or seconds < best.seconds:
                best.index = index
                best.parts = parts
                best.seconds = seconds
    return best^


def parts_to_try(
    config: Sm90Config, traversal: Traversal, multiprocessors: Int
) -> List[Int]:
    """Numbers of parts worth a look: 1, and more while there are
    multiprocessors without a tile.

    Args:
        config: The configuration.
        traversal: The problem's.
        multiprocessors: Of the device.
    """
    var result: List[Int] = [1]
    if config.splits():
        var clusters = tile_clusters(config, traversal)
        var parts = 2
        while parts <= MAX_SPLIT_K and clusters * parts <= 2 * multiprocessors:
            result.append(parts)
            parts *= 2
    return result^


def convolve[
    in_type: DType,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    //,
    *,
    scaled: Bool = False,
](
    ctx: DeviceContext,
    problem: ConvProblem,
    activation: Reads[in_type],
    filter: Reads[in_type],
    epilogue: Epilogue[bias_type, residual_type],
    output: Output,
    choice: Choice,
) raises:
    """Enqueues a convolution on a configuration.

    Parameters:
        in_type: Of activation and filter: bfloat16, float16, float8_e4m3fn,
            or float32, of which the products take the 19 bits of tf32.
        Output: The output, of bfloat16, float16 or float32, and what the graph
            compiler fused behind it.
        bias_type: Of the bias.
        residual_type: Of the residual: the output's.
        scaled: Whether each filter has a scale. It is known at compile time,
            so that kernels without one are spared it.

    Args:
        ctx: The device; nothing is waited for.
        problem: The convolution, valid and with at least one output.
        activation: `[N, *input, C]` in device memory.
        filter: `[K, *filter, C / groups]` in device memory.
        epilogue: What is fused; its operands in device memory.
        output: `[N, *output, K]`, its elements in device memory.
        choice: What `choose` returned for these types.

    Raises:
        Why no configuration can take the problem, or what the driver refused;
        if the epilogue has a scale, but is not `scaled`, or the contrary.
    """
    comptime assert residual_type == Output.dtype
    comptime fused = Output.computes or Output.stores
    if choice.index < 0:
        raise Error(t"sm90: {choice.refusal}; problem {problem}")
    comptime Visitor = ConvVisitor[bias_type, scaled]
    var visitor = Visitor.of(epilogue)
    comptime for index in range(CANDIDATES):
        comptime if offered[in_type, Output.dtype](index) and (
            not fused or offered_fused(index)
        ):
            if choice.index == index:
                LaunchPlan[in_type, Output, Visitor, candidate(index)](
                    ctx,
                    problem,
                    activation,
                    filter,
                    rebind[Reads[Output.dtype]](epilogue.residual),
                    visitor,
                    output,
                    choice.parts,
                ).launch(ctx)
