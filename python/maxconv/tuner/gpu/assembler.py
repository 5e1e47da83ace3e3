"""``ptxas`` with a memory: what was assembled once is copied.

A process assembles each kernel anew, some tenths of a second each. Here several processes assemble
kernels side by side, and the one that measures, or starts anew behind a failure, finds them.

Run as a program it takes the path of ``ptxas``, the folder, and the arguments of ``ptxas``.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["assemble", "assembling"]

#: The options of ``ptxas`` before the file that it writes.
_OUTPUT = ("-o", "--output-file")


def assembling(assembler: str, folder: Path) -> dict[str, str]:
    """Returns the variable with which MAX's runtime assembles through this module.

    Args:
        assembler: The path of ``ptxas``.
        folder: Where what it made is kept; made, if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder.resolve() / "ptxas"
    words = (sys.executable, str(Path(__file__).resolve()), assembler, str(script.parent))
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"MODULAR_NVPTX_COMPILER_PATH": str(script)}


def assemble(arguments: Sequence[str], assembler: str, folder: Path) -> int:
    """Runs ``ptxas``, or copies what it made of the same text with the same options.

    Args:
        arguments: Those of ``ptxas``.
        assembler: Its path.
        folder: Where what it made is kept.

    Returns:
        Its exit status.
    """
    places = [i + 1 for i, word in enumerate(arguments[:-1]) if word in _OUTPUT]
    inputs = [i for i, word in enumerate(arguments) if i not in places and Path(word).is_file()]
    if len(places) != 1 or len(inputs) != 1:
        return subprocess.run([assembler, *arguments], check=False).returncode
    output = Path(arguments[places[0]])
    options = [word for i, word in enumerate(arguments) if i not in (places[0], inputs[0])]
    digest = hashlib.sha256("\0".join(options).encode())
    digest.update(Path(arguments[inputs[0]]).read_bytes())
    kept = folder / f"{digest.hexdigest()}.cubin"
    if kept.is_file():
        shutil.copyfile(kept, output)
        return 0
    status = subprocess.run([assembler, *arguments], check=False).returncode
    if status == 0:
        # Others may make the same one meanwhile: it is there whole or not at all.
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as made:
            made.write(output.read_bytes())
        os.replace(made.name, kept)
    return status


if __name__ == "__main__":
    sys.exit(assemble(sys.argv[3:], sys.argv[1], Path(sys.argv[2])))
