"""Measures configurations on a GPU, with what a folder holds that ``--build`` wrote.

Needs nothing but Python and this package. Results are lines of JSON, one of each problem and work:
who starts again goes on where the last run ended.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..._program import LIBRARIES, Pipe, ProgramError, find_assembler
from .assembler import assembling
from .folder import PROGRAM, Folder, Task
from .preload import preload

__all__ = ["RESULTS", "WORKS", "Protocol", "Result", "Timed", "measure", "read_results"]

#: The file of results in the folder that is written.
RESULTS = "results.jsonl"

#: What is computed: the convolution alone, or with bias, SiLU and a residual.
WORKS = ("bare", "fused")

#: Index and split of a configuration.
Pair = tuple[int, int]


@dataclass(frozen=True)
class Protocol:
    """How a configuration is timed.

    Raises:
        ValueError: A number is not positive.
    """

    rounds: int = 5
    """Bursts of each configuration, one of the incumbent beside each."""
    final_rounds: int = 15
    """The same, of the best few, which are timed once more: of many noisy times the least is too
    low."""
    finalists: int = 3
    burst_s: float = 0.001
    """Seconds of a burst, at least: as many replays as that takes, and one."""
    hopeless: float = 1.2
    """A configuration whose first burst takes so many times the incumbent's gets no other."""
    timeout_s: float = 20.0
    """Seconds for an answer, before the program is taken for hung."""
    chances: int = 2
    """Problems on which a configuration may end the program before it gets no other."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name}: {value} is not positive")


@dataclass(frozen=True)
class Timed:
    """What measuring a configuration gave."""

    index: int
    """Of the configuration in the build."""
    split_k: int
    bursts: Sequence[float] = ()
    """Seconds of a launch, of each burst."""
    beside: Sequence[float] = ()
    """The incumbent's, of the burst next to each."""
    error: str | None = None
    """Why it was not timed."""
    final: bool = False
    """Whether it was timed once more, as one of the best."""


@dataclass(frozen=True)
class Result:
    """What was measured of a problem."""

    name: str
    numbers: tuple[int, ...]
    work: str
    layers: int
    device: str
    incumbent: Pair | None
    """What dispatch chooses."""
    timed: Sequence[Timed] = ()
    error: str | None = None
    """Why nothing was measured."""
    seconds: float = field(default=0.0, compare=False)
    """That measuring took."""


def measure(
    folder: Path,
    held: Folder,
    out: Path,
    *,
    minutes: float,
    works: Sequence[str] = WORKS[:1],
    protocol: Protocol | None = None,
    report: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
    workers: int = 8,
) -> int:
    """Measures problem after problem, until the time is over; returns how many are left.

    Args:
        folder: What ``--build`` wrote.
        held: What it holds.
        out: The folder of the results, which are appended to those that are there.
        minutes: After these no further problem begins.
        works: Of ``WORKS``.
        protocol: How often and how long.
        report: Is told of each problem.
        clock: Returns seconds.
        workers: Processes that assemble kernels before anything is measured; 0: none.

    Raises:
        ValueError: An argument is not allowed.
        OSError: The program cannot be started, or results cannot be written.
        ProgramError: It ends at once: there is no GPU, say. What was measured is kept.
    """
    if minutes <= 0:
        raise ValueError(f"--minutes: {minutes} is not positive")
    if workers < 0:
        raise ValueError(f"--workers: {workers} is negative; at least 0 is needed")
    if unknown := set(works).difference(WORKS):
        raise ValueError(f"--works: {', '.join(sorted(unknown))} is not one of {', '.join(WORKS)}")
    protocol = protocol or Protocol()
    begin = clock()
    out.mkdir(parents=True, exist_ok=True)
    path = out / RESULTS
    done = set()
    if path.exists():
        _cut(path)
        done = {(result.name, result.work) for result in read_results(path)}
    left = [(t, w) for w in works for t in held.tasks if (t.name, w) not in done]
    if not left:
        return 0
    command = [str((folder / PROGRAM).absolute())]
    libraries = (folder / LIBRARIES).absolute()
    environment = {}
    if (assembler := find_assembler()) and workers:
        environment = assembling(assembler, folder / "cubins")
        report(preload(command, libraries, environment, len(held.configurations.listed), workers))
    with ExitStack() as stack:
        program = Pipe(command, libraries, protocol.timeout_s, environment)
        stack.enter_context(program)
        lines = stack.enter_context(path.open("a", encoding="utf-8"))
        fatal: Counter[int] = Counter()
        about = {**program.about, "driver": _driver(), "built": held.date}
        print(json.dumps({"about": {**about, "versions": held.versions}}), file=lines, flush=True)
        for place, (task, work) in enumerate(left):
            if clock() - begin > 60 * minutes:
                return len(left) - place
            started = clock()
            result = Measuring(program, protocol, task, work, fatal).result()
            result = Result(**{**vars(result), "seconds": round(clock() - started, 3)})
            print(json.dumps(asdict(result)), file=lines, flush=True)
            report(f"{place + 1}/{len(left)} {result.name} {work}: {_summary(result)}")
    return 0


def _cut(path: Path) -> None:
    """Removes a last line that was not written to its end."""
    text = path.read_bytes()
    path.write_bytes(text[: text.rfind(b"\n") + 1])


def read_results(path: Path) -> list[Result]:
    """Reads results; a last line that was cut off is left out.

    Raises:
        ValueError: Another line is no result.
    """
    results = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            read: dict[str, Any] = json.loads(line)
            if "about" not in read:
                timed = tuple(Timed(**entry) for entry in read["timed"])
                pair = read["incumbent"]
                further = {"timed": timed, "numbers": tuple(read["numbers"])}
                further["incumbent"] = pair and (int(pair[0]), int(pair[1]))
                results.append(Result(**{**read, **further}))
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise ValueError(f"results: line {number} of {path} is no result: {error}") from error
    return results


@dataclass
class Measuring:
    """The measurement of one problem."""

    program: Pipe
    protocol: Protocol
    task: Task
    work: str
    fatal: Counter[int]
    """How often configurations have ended the program."""
    incumbent: Pair | None = None
    graph: int = -1
    """The incumbent's."""
    times: int = 1
    """Replays of a burst."""

    def result(self) -> Result:
        """Measures the configurations, and the best few once more."""
        timed: list[Timed] = []
        error = None
        try:
            self.open()
            for index, split, _ in self.task.candidates:
                timed.append(self.timed((index, split)))
            for pair in self.finalists(timed):
                timed.append(self.timed(pair, final=True))
        except ProgramError as failed:
            error = str(failed)
        return Result(
            name=self.task.name,
            numbers=self.task.numbers,
            work=self.work,
            layers=self.task.layers,
            device=str(self.program.about.get("device", "unknown")),
            incumbent=self.incumbent,
            timed=timed,
            error=error,
        )

    def open(self) -> None:
        """Makes the operands, and the incumbent's output and graph.

        Raises:
            ProgramError: The program refused, or ended.
        """
        self.program.revive()
        self.program.ask(self.task.line)
        chosen = self.program.ask("choose", self.work)
        self.incumbent = (int(chosen["index"]), int(chosen["split_k"]))
        made = self.program.ask("prepare", *self.incumbent, self.work, self.task.launches)
        if "graph" not in made:
            raise ProgramError(f"the incumbent is not timed: {_reason(made)}")
        self.graph = int(made["graph"])
        self.burst(self.graph)
        once = self.burst(self.graph) * self.task.launches
        self.times = max(1, math.ceil(self.protocol.burst_s / max(once, 1e-7)))

    def timed(self, pair: Pair, *, final: bool = False) -> Timed:
        """Measures a configuration; a program that it ended starts anew.

        Args:
            pair: The configuration.
            final: Whether it is one of the best.

        Raises:
            ProgramError: The program does not start anew, or not get as far as this again.
        """
        if self.fatal[pair[0]] >= self.protocol.chances:
            return Timed(*pair, error=f"it ended the program {self.fatal[pair[0]]} times before")
        if self.program.lost:
            self.open()
        bursts: list[float] = []
        beside: list[float] = []
        try:
            made = self.program.ask("prepare", *pair, self.work, self.task.launches)
            if "graph" not in made:
                return Timed(*pair, error=_reason(made), final=final)
            graph = int(made["graph"])
            for number in range(self.protocol.final_rounds if final else self.protocol.rounds):
                # Who goes first takes turns too.
                for ours in (True, False) if number % 2 else (False, True):
                    found = self.burst(graph if ours else self.graph)
                    (bursts if ours else beside).append(found)
                if not final and bursts[0] > self.protocol.hopeless * beside[0]:
                    break
        except ProgramError as error:
            self.fatal[pair[0]] += self.program.lost
            return Timed(*pair, error=str(error), final=final)
        return Timed(*pair, bursts, beside, final=final)

    def burst(self, graph: int) -> float:
        """Returns the seconds of a launch, of one burst of replays."""
        answer = self.program.ask("replay", graph, self.times)
        return float(answer["ns"]) / 1e9 / self.times / self.task.launches

    def finalists(self, timed: Sequence[Timed]) -> list[Pair]:
        """Returns the best few that are not the incumbent."""
        ran = [
            each for each in timed if each.bursts and (each.index, each.split_k) != self.incumbent
        ]
        ran.sort(key=lambda each: statistics.median(each.bursts) / statistics.median(each.beside))
        return [(each.index, each.split_k) for each in ran[: self.protocol.finalists]]


def _reason(answer: Mapping[str, Any]) -> str:
    """Returns why a configuration has no graph."""
    if "wrong" in answer:
        return f"wrong: {answer['wrong']} of {answer['elements']} elements"
    return f"refused: {answer.get('refusal', answer)}"


def _driver() -> str:
    """Returns the version of NVIDIA's driver, or what is known instead."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return (finished.stdout.split() or ["unknown"])[0]


def _summary(result: Result) -> str:
    """Returns a result on one line, for people."""
    if result.error is not None:
        return result.error
    final = [each for each in result.timed if each.final and each.bursts]
    ran = [each for each in result.timed if each.bursts and not each.final]
    failed = sum(each.error is not None for each in result.timed)
    text = f"{len(ran)} timed, {failed} failed in {result.seconds:.1f} s"
    if not final:
        return text
    ratios = {
        statistics.median(each.beside) / statistics.median(each.bursts): each for each in final
    }
    best = ratios[max(ratios)]
    before = statistics.median(best.beside) * 1e6
    return f"{before:.1f} us, {max(ratios):.3f}x by {best.index}/{best.split_k}; {text}"
