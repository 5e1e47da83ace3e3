"""A function made ready to run: every instruction a step."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import UnsupportedError
from .flow import FlowBlock, flow_blocks
from .instructions.control import build_leave
from .paths import Code, CodeBlock
from .registers import Layout
from .syntax import Function, Parameter, Variable
from .table import build

__all__ = ["Kernel", "compile_function"]


class Kernel:
    """A compiled function.

    Attributes:
        name: Its name.
        parameters: In order.
        variables: Of shared and local memory, its own and the module's, by name.
        layout: Where its registers are.
        code: Its basic blocks.
    """

    def __init__(self, function: Function, variables: dict[str, Variable]) -> None:
        self.name = function.name
        self.parameters: list[Parameter] = function.parameters
        self.directives = function.directives
        self.variables = variables
        self.layout = Layout()
        self.code: Code = []

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return max((entry.offset + entry.size for entry in self.parameters), default=0)


def compile_function(function: Function, module_variables: Mapping[str, Variable]) -> Kernel:
    """Builds the steps of a function.

    Raises:
        UnsupportedError: An instruction is not known; nothing has run.
    """
    if not function.is_entry:
        raise UnsupportedError(f"line {function.line}: .func {function.name} is not supported")
    variables = {
        name: variable
        for name, variable in module_variables.items()
        if variable.space in ("shared", "local")
    }
    variables.update({variable.name: variable for variable in function.variables})
    kernel = Kernel(function, variables)
    for flow in flow_blocks(function):
        kernel.code.append(_code_block(kernel.layout, function, flow))
    return kernel


def _code_block(layout: Layout, function: Function, flow: FlowBlock) -> CodeBlock:
    steps, lines, registers = [], [], []
    for instruction in flow.body:
        step, used = build(layout, instruction)
        steps.append(step)
        lines.append(instruction.line)
        registers.append(used)
    lines.append(flow.branch.line if flow.branch is not None else (lines or [function.line])[-1])
    leave = build_leave(layout, flow)
    return CodeBlock(tuple(steps), tuple(lines), tuple(registers), leave, flow.meet)
