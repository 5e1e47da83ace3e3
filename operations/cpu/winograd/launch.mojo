"""Winograd's minimal filtering in the registry: what it takes, how it is planned
and launched."""

from std.collections import Optional

from ...conv.fields import KERNEL_WINOGRAD
from ...conv.known import KnownFilter, KnownProblem
from ...conv.memory import HostBuffer
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ..config import fused_input_refusal
from ..dot.widening import Widening
from ..epilogue import TileStore
from ..gemm.launch import panels_refusal
from ..kernel import CpuKernel
from ..named import checked_cut, raise_refusal
from ..pool import Pool
from .candidates import choose_cut, is_faster
from .cut import WinogradCut
from .kernel import BlockTasks, FilterTasks, InputTasks, WinogradParams
from .scheduler import MAX_INTEGER_PRODUCTS, WinogradPlan
from .transforms import (
    MAX_TAPS,
    MIN_TAPS,
    WORD_CHANNELS,
    transformed_type,
)


def _is_small_square(problem: ConvProblem) -> Bool:
    """Whether the filter slides by one pixel and has 2 x 2 or 3 x 3 taps side
    by side along h and w."""
    comptime for axis in [1, 2]:
        if problem.stride[axis] != 1 or problem.dilation[axis] != 1:
            return False
    return (
        problem.filter[1] == problem.filter[2]
        and MIN_TAPS <= problem.filter[2] <= MAX_TAPS
    )


def _integer_refusal(problem: ConvProblem) -> Optional[String]:
    """Why the kernel cannot take a problem of integers, or None."""
    if problem.group_channels() % WORD_CHANNELS != 0:
        return String(
            t"winograd reads {WORD_CHANNELS} channels of integers at once; here"
            t" a group has {problem.group_channels()}"
        )
    if problem.gemm_k() > MAX_INTEGER_PRODUCTS:
        return String(
            t"winograd's int32 holds sums of {MAX_INTEGER_PRODUCTS} products"
            t" whatever they are, but here an output has {problem.gemm_k()}"
        )
    return None


struct Winograd[P: Pool](CpuKernel):
    """Few taps with fewer multiplications: F(2x2, 3x3) and F(3x3, 2x2).

    Parameters:
        P: The threads that it runs on.
    """

    comptime code = KERNEL_WINOGRAD
    comptime takes_cuts = True
    comptime Plan = WinogradPlan
    comptime Queue = Self.P

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """None: it runs on every CPU."""
        return None

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        if types.input.is_integral() and Widening.spread(types.input) == 1:
            return String(
                t"winograd multiplies integers of 16 bits, but this CPU"
                t" multiplies {types.input} as it is"
            )
        return fused_input_refusal(Self.code, types)

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        var possible = False
        comptime for taps in range(MIN_TAPS, MAX_TAPS + 1):
            possible |= known.filter().may_have(taps=taps, stride=1)
        return possible and not known.is_depthwise()

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        var refusal = panels_refusal(Self.code, problem)
        if not refusal and operands.types.input.is_integral():
            refusal = _integer_refusal(problem)
        if refusal or _is_small_square(problem):
            return refusal
        return String(
            t"winograd takes 2 x 2 or 3 x 3 taps, stride 1 and dilation 1 along"
            t" h and w; here filter {problem.filter}, stride {problem.stride},"
            t" dilation {problem.dilation}"
        )

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        return _is_small_square(problem) and is_faster(
            problem, operands.types, device.units
        )

    @staticmethod
    def named_plan(
        problem: ConvProblem,
        operands: Operands,
        device: Device,
        numbers: List[Int],
    ) raises -> WinogradPlan:
        # Whoever wants exact products gets no more of these than a model gives.
        if operands.exact:
            raise Error("precision: winograd rounds more than products do")
        var input = operands.types.input
        var named = checked_cut[WinogradCut](numbers)
        raise_refusal(named.shape_refusal(problem, input))
        return WinogradPlan(problem, input, named.cut(problem), device.units)

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> WinogradPlan:
        var input = operands.types.input
        return WinogradPlan(
            problem,
            input,
            choose_cut(problem, input, device.units),
            device.units,
        )

    @staticmethod
    def launch[
        known: KnownFilter, scaled: Bool
    ](
        plan: WinogradPlan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Self.P,
    ) raises:
        comptime dtype = type_of(arguments).Source.dtype
        var memory = HostBuffer[transformed_type(dtype)](plan.shared(problem))
        var params = WinogradParams(
            arguments.activation.data(),
            arguments.filter,
            arguments.quantization.zero_point,
            TileStore(arguments),
            problem,
            plan,
            memory.elements,
            plan.rounds.round(0),
        )
        comptime if not dtype.is_integral():
            if plan.cut.shares_input:
                plan.preparation.run(InputTasks(params), queue)
        for index in range(plan.rounds.count()):
            params.round = plan.rounds.round(index)
            if not plan.cut.shares_input:
                var parts = params.round.panels * plan.parts
                plan.preparation.some(parts).run(FilterTasks(params), queue)
            var tasks = params.round.blocks * plan.tile_blocks
            plan.multiplication.some(tasks).run(BlockTasks(params), queue)
        _ = memory^
