"""Assembles all kernels of a measuring program, by several processes, before it measures."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..._program import Pipe, ProgramError

__all__ = ["preload"]


def preload(
    command: Sequence[str],
    libraries: Path,
    environment: Mapping[str, str],
    count: int,
    workers: int,
) -> str:
    """Assembles all kernels; returns how that went.

    What fails here fails where it is measured, too, and is recorded there.

    Args:
        command: What starts the program.
        libraries: A folder of shared libraries that it loads.
        environment: The variables of ``assembling``.
        count: Of the program's configurations.
        workers: Processes.
    """
    begin = time.monotonic()

    def load(first: int) -> tuple[int, list[str]]:
        loaded, failed = 0, []
        try:
            with Pipe(command, libraries, environment=environment) as program:
                for index in range(first, count, workers):
                    try:
                        program.ask("load", index)
                        loaded += 1
                    except ProgramError as error:
                        failed.append(str(error))
                        program.revive()
        except ProgramError as error:
            failed.append(str(error))
        return loaded, failed

    with ThreadPoolExecutor(workers) as pool:
        done = list(pool.map(load, range(workers)))
    loaded = sum(number for number, _ in done)
    failures = dict.fromkeys(text for _, failed in done for text in failed)
    text = f"assembled {loaded} of {count} configurations in {time.monotonic() - begin:.0f} s"
    return f"{text}; failed: {'; '.join(failures)}" if failures else text
