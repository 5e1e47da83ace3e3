"""Problem -> configuration of the Blackwell kernel."""

from max.gpu.host import DeviceContext

from ...conv.access import OutputTarget
from ...conv.epilogue import Epilogue
from ...conv.memory import Reads
from ...conv.problem import ConvProblem
from .candidates import CANDIDATES, candidate, offered, offered_fused
from .config import Conv2dConfig
from .launch import convolve as convolve_on
from .model import Prediction, predict


@fieldwise_init
struct Choice(Copyable, Movable):
    """A candidate, or why there is none."""

    var index: Int
    """Of the candidate; -1 if every one refuses."""
    var reason: String
    """Of the choice, or of the last candidate that refused: a sentence without
    its full stop."""

    @staticmethod
    def none() -> Choice:
        """Nothing has been asked."""
        return Choice(-1, String())


def is_considered[
    act_type: DType,
    filter_type: DType,
    out_type: DType,
    //,
    config: Conv2dConfig[act_type, filter_type, out_type],
](prediction: Prediction) -> Bool:
    """Whether to choose a configuration if it is the fastest: tiles are shared
    only among multiprocessors that would have none.

    Parameters:
        act_type: Of the activation.
        filter_type: Of the filter.
        out_type: Of the output.
        config: The configuration.

    Args:
        prediction: The model's, for the problem.
    """
    return config.split_k() == 1 or prediction.waves == 1


def choose[
    in_type: DType, out_type: DType
](
    problem: ConvProblem,
    multiprocessors: Int,
    fused_output: Bool = False,
    residual: Bool = False,
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
        residual: Whether one is added.

    Returns:
        The choice.
    """
    var best = Choice.none()
    var fastest = Float64(0)
    comptime for index in range(CANDIDATES):
        comptime config = candidate[in_type, in_type, out_type](index)
        comptime if offered[in_type](index):
            if offered_fused(index) or not fused_output:
                var refusal = config.can_implement(problem)
                if refusal:
                    if best.index < 0:
                        best.reason = refusal.value()
                else:
                    var prediction = predict[config](
                        problem, multiprocessors, residual
                    )
                    var seconds = prediction.seconds
                    if is_considered[config](prediction) and (
                        best.index < 0 or seconds < fastest
                    ):
                        fastest = seconds
                        best.index = index
                        var microseconds = round(seconds * 1e7) / 10
                        best.reason = String(
                            t"{config}: {microseconds} us by a model that no"
                            t" timing has met"
                        )
    return best^


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
        in_type: Of activation and filter.
        Output: The output, and what the graph compiler fused behind it.
        bias_type: Of the bias.
        residual_type: Of the residual: the output's.
        scaled: Whether each filter has a scale.

    Args:
        ctx: The device; nothing is waited for.
        problem: The convolution, valid.
        activation: `[N, *input, C]` in device memory.
        filter: `[K, *filter, C / groups]` in device memory.
        epilogue: What is fused; its operands in device memory.
        output: `[N, *output, K]`, its elements in device memory.
        choice: What `choose` returned for these types.

    Raises:
        Why no configuration can take the problem, or what the driver refused.
    """
    comptime fused = Output.computes or Output.stores
    if choice.index < 0:
        raise Error(t"sm100: {choice.reason}; problem {problem}")
    comptime for index in range(CANDIDATES):
        comptime if offered[in_type](index) and (
            not fused or offered_fused(index)
        ):
            if choice.index == index:
                # Stores of one pixel's neighbouring filters lie side by side
                # only after shared memory.
                convolve_on[
                    candidate[in_type, in_type, Output.dtype](index),
                    register_based_epilogue=not Output.stores,
                    scaled=scaled,
                ](ctx, problem, activation, filter, epilogue, output)
