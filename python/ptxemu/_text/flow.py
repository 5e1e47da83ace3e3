"""A function's basic blocks, and where threads that diverge reconverge.

Lanes that take different sides of a branch run on separate paths until they reach the branch's
immediate post-dominator: the first block that every path to the function's end goes through.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .._errors import PtxSyntaxError
from .syntax import Function, Instruction, Label

__all__ = ["END", "FlowBlock", "flow_blocks"]

#: The index that stands for the function's end.
END = -1

_LEAVES = ("bra", "brx", "ret", "exit", "trap")


@dataclass
class FlowBlock:
    """Instructions that run one after the other.

    Attributes:
        first: Index of the first instruction.
        body: Those before the branch.
        branch: The branch at the end, if there is one.
        successors: Blocks that may follow, ``END`` for the function's end. After a conditional
            branch the target, then the next block.
        reconvergence: Where paths that diverge here reconverge; ``END`` if only at the end.
    """

    first: int
    body: list[Instruction]
    branch: Instruction | None = None
    successors: list[int] = field(default_factory=list)
    reconvergence: int = END


def flow_blocks(function: Function) -> list[FlowBlock]:
    """Cuts a function into basic blocks.

    Raises:
        PtxSyntaxError: A branch's target is no label.
    """
    code = function.code
    starts = {0}
    for index, instruction in enumerate(code):
        if instruction.base in _LEAVES:
            starts.add(index + 1)
            starts.update(_targets(function, instruction))
    order = sorted(start for start in starts if start < len(code))
    number = {start: i for i, start in enumerate(order)}
    blocks = []
    for i, start in enumerate(order):
        stop = order[i + 1] if i + 1 < len(order) else len(code)
        body, branch = code[start:stop], None
        if body and body[-1].base in _LEAVES:
            branch = body.pop()
        following = i + 1 if stop < len(code) else END
        block = FlowBlock(start, body, branch)
        block.successors = _successors(function, branch, number, following)
        blocks.append(block)
    _set_reconvergence(blocks)
    return blocks


def _targets(function: Function, instruction: Instruction) -> list[int]:
    """Indices of the instructions that a branch may go to."""
    if instruction.base == "bra":
        return [_index(function, instruction, 0)]
    if instruction.base == "brx":
        table = instruction.operands[1]
        if not isinstance(table, Label) or table.name not in function.tables:
            raise PtxSyntaxError(f"line {instruction.line}: no list of branch targets")
        return list(function.tables[table.name].targets)
    return []


def _index(function: Function, instruction: Instruction, operand: int) -> int:
    label = instruction.operands[operand]
    if not isinstance(label, Label):
        raise PtxSyntaxError(f"line {instruction.line}: the target is no label")
    return function.labels[label.name]


def _successors(
    function: Function, branch: Instruction | None, number: dict[int, int], following: int
) -> list[int]:
    if branch is None:
        return [following]
    targets = [number.get(target, END) for target in _targets(function, branch)]
    if branch.base in ("ret", "exit", "trap"):
        targets = [END]
    return [*targets, following] if branch.guard is not None else targets


def _set_reconvergence(blocks: list[FlowBlock]) -> None:
    """Immediate post-dominators: Cooper, Harvey and Kennedy's algorithm on the reversed graph."""
    order = _postorder(blocks)
    rank = {block: i for i, block in enumerate(order)}
    # Blocks from which the end is not reached, loops for ever, reconverge at the end.
    after: dict[int, int] = {END: END}
    changed = True
    while changed:
        changed = False
        for block in reversed(order):
            if block == END:
                continue
            found: int | None = None
            for successor in blocks[block].successors:
                if successor in after:
                    found = successor if found is None else _common(after, rank, found, successor)
            if found is not None and after.get(block) != found:
                after[block] = found
                changed = True
    for index, flow in enumerate(blocks):
        flow.reconvergence = after.get(index, END)


def _postorder(blocks: list[FlowBlock]) -> list[int]:
    """Blocks in postorder of a traversal from the end against the branches; the end comes last."""
    before: dict[int, list[int]] = {END: []}
    for index, block in enumerate(blocks):
        for successor in block.successors:
            before.setdefault(successor, []).append(index)
    order: list[int] = []
    seen = {END}
    stack = [(END, iter(before[END]))]
    while stack:
        node, children = stack[-1]
        for child in children:
            if child not in seen:
                seen.add(child)
                stack.append((child, iter(before.get(child, []))))
                break
        else:
            order.append(node)
            stack.pop()
    return order


def _common(after: dict[int, int], rank: dict[int, int], a: int, b: int) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = after[a]
        while rank[b] < rank[a]:
            b = after[b]
    return a
