"""Compiled kernels on a GPU: ours and MAX's, with what the emulator gives for them.

    python -m tests.emulated.hardware FOLDER

FOLDER has the Hopper convolution (``lines.txt`` and the files it names, of
``tests/mojo/emit_emulated.mojo``) and MAX's matmul (``matmul*.ptx``).
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.emulated import convolution, max_sm90
from tests.ptxemu.isa.case import Case
from tests.ptxemu.isa.driver import outputs

__all__ = ["cases"]


def cases(folder: Path) -> list[Case]:
    """Every kernel of a folder with a problem."""
    lines = (folder / "lines.txt").read_text().splitlines()
    kernels = [convolution.Kernel.of(line, folder) for line in lines]
    operands = convolution.Operands.random(5)
    found = [convolution.case(kernel, operands) for kernel in kernels]
    for path in sorted(folder.glob("matmul*.ptx")):
        found.append(max_sm90.case(max_sm90.Kernel.of(path.read_text()), 5))
    return found


def main(folder: Path) -> int:
    """Runs all; returns how many are not what they should be."""
    wrong = 0
    for case in cases(folder):
        for _, output, message in outputs(case.code, [case]):
            text = message if output is None else case.difference(output)
            wrong += bool(text)
            print(case.name, text or "as expected, bit for bit", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
