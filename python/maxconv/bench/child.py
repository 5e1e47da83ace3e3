"""What the benchmark runs in processes of its own: ``python -m maxconv.bench.child``.

``max REQUEST ANSWER`` tries MAX's own convolutions, which may end the process. ``memory PROBLEM
DTYPE`` measures a convolution's memory, for which a process must have done nothing else.
``graphs ARCHITECTURE DTYPE FOLDER NAME...`` compiles for a GPU that is not here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Runs one of them; returns the exit status."""
    match arguments:
        case ["max", request, answer]:
            from .cpu.peers_max import serve

            with Path(answer).open("a", encoding="utf-8") as stream:
                for event in serve(json.loads(Path(request).read_text(encoding="utf-8"))):
                    print(json.dumps(event), file=stream, flush=True)
        case ["memory", name, dtype]:
            from .cpu.memory import measure_here

            print(json.dumps(asdict(measure_here(name, dtype))))
        case ["graphs", architecture, dtype, folder, *names]:
            from .gpu.graphs import compile_graphs

            compile_graphs(architecture, dtype, Path(folder), names)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
