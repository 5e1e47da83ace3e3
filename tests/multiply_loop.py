"""The loop of a Blackwell kernel's PTX that multiplies, to compare kernels with one another."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests import ptx

MULTIPLY = "tcgen05.mma"


@dataclass(frozen=True)
class Compiled:
    """What is known of a compiled kernel without a GPU."""

    name: str
    threads: int
    shared: int
    stages: int
    ring: int
    """Bytes of the input ring's stages."""
    loop: int
    """Instructions of the loop that multiplies."""
    multiplies: int
    """Of them, those that do."""
    registers: int
    """Of a thread; 0 where there is no ``ptxas``."""

    @classmethod
    def of(
        cls,
        name: str,
        text: str,
        folder: Path,
        *,
        threads: int,
        shared: int,
        stages: int,
        step: int,
    ) -> Compiled:
        """Looks at a kernel.

        Args:
            name: Of the kernel.
            text: Its PTX.
            folder: For what is assembled.
            threads: Of a block.
            shared: Bytes of a block.
            stages: Of the input ring.
            step: Bytes of a stage.
        """
        loop, multiplies = multiply_loop(text)
        registers = _registers(text, folder) if shutil.which("ptxas") else 0
        return cls(name, threads, shared, stages, stages * step, loop, multiplies, registers)

    @property
    def beside(self) -> float:
        """Instructions of the loop for each multiply."""
        return self.loop / self.multiplies

    def __str__(self) -> str:
        """A line of a table."""
        return (
            f"{self.name:12} {self.registers:4} registers, {self.multiplies} multiplies of a loop "
            f"of {self.loop} instructions: {self.beside:.1f} for each; {self.stages} stages, "
            f"{self.ring} bytes of {self.shared}"
        )


def multiply_loop(text: str) -> tuple[int, int]:
    """Instructions of the smallest loop that multiplies, and how many of them do."""
    lines = [line.strip() for line in text.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\$\w+:", line)}
    loops = []
    for end, line in enumerate(lines):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        if target and labels[target[1]] < end:
            body = [one for one in lines[labels[target[1]] : end + 1] if _is_instruction(one)]
            multiplies = sum(MULTIPLY in one for one in body)
            if multiplies:
                loops.append((len(body), multiplies))
    return min(loops)


def _is_instruction(line: str) -> bool:
    return line.endswith(";") and not line.startswith((".", "//"))


def _registers(text: str, folder: Path) -> int:
    """Of a thread; the kernel must not spill any."""
    source = folder / "compared.ptx"
    source.write_text(text)
    report = ptx.assemble(source, folder, "sm_100a")
    assert ptx.NO_SPILLS in report
    used = re.search(r"Used (\d+) registers", report)
    assert used
    return int(used[1])
