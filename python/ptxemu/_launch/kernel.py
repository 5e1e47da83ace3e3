"""A function made ready to run: every instruction a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .._errors import UnsupportedError
from .._hardware.blocks import SHARED_START
from .._hardware.registers import Layout
from .._instructions.control import build_leave
from .._text.flow import FlowBlock, flow_blocks
from .._text.syntax import Function, Parameter, Variable
from .._warps.paths import Code, CodeBlock
from .._warps.table import build

__all__ = ["Kernel", "Placement", "compile_function"]


@dataclass(frozen=True)
class Placement:
    """Where a kernel's variables lie.

    Attributes:
        offsets: State space and offset, by name.
        shared_bytes: Shared memory of a block.
        local_bytes: Local memory of a thread.
    """

    offsets: dict[str, tuple[str, int]]
    shared_bytes: int
    local_bytes: int


class Kernel:
    """A compiled function.

    Attributes:
        name: Its name.
        parameters: In order.
        variables: Of shared and local memory, its own and the module's, by name.
        layout: Where its registers are.
        code: What its warps run.
    """

    def __init__(self, function: Function, variables: dict[str, Variable], text: list[str]) -> None:
        self.name = function.name
        self.parameters: list[Parameter] = function.parameters
        self.directives = function.directives
        self.variables = variables
        self.layout = Layout()
        self.code = Code([], text)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return max((entry.offset + entry.size for entry in self.parameters), default=0)

    def place(self, dynamic_bytes: int) -> Placement:
        """Lays out static shared memory, then the dynamic; and local memory."""
        shared, local = SHARED_START, 0
        offsets: dict[str, tuple[str, int]] = {}
        dynamic_align = 16
        for variable in self.variables.values():
            if variable.space == "local":
                local = -(-local // variable.align) * variable.align
                offsets[variable.name] = ("local", local)
                local += variable.size
            elif variable.extern:
                dynamic_align = max(dynamic_align, variable.align)
            else:
                shared = -(-shared // variable.align) * variable.align
                offsets[variable.name] = ("shared", shared)
                shared += variable.size
        shared = -(-shared // dynamic_align) * dynamic_align if dynamic_bytes else shared
        for variable in self.variables.values():
            if variable.space == "shared" and variable.extern:
                offsets[variable.name] = ("shared", shared)
        return Placement(offsets, shared + dynamic_bytes - SHARED_START, -(-local // 16) * 16)


def compile_function(
    function: Function, module_variables: Mapping[str, Variable], text: list[str]
) -> Kernel:
    """Builds the steps of a function.

    Args:
        function: It.
        module_variables: Of its module, by name.
        text: The lines of the module.

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
    kernel = Kernel(function, variables, text)
    for flow in flow_blocks(function):
        kernel.code.blocks.append(_code_block(kernel.layout, function, flow))
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
    return CodeBlock(tuple(steps), tuple(lines), tuple(registers), leave, flow.reconvergence)
