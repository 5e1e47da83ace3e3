"""The record of a run: everything that was measured, and where; as JSON, and from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .environment import Machine, slug
from .memory import Memory
from .statistics import Timing, geometric_mean
from .timing import Protocol

__all__ = ["FORMAT", "Functions", "Ratio", "Record", "Result", "load", "results_name", "summary"]

#: Version of the JSON form; ``benchmarks/record.schema.json`` describes it.
FORMAT = 2


@dataclass(frozen=True)
class Result:
    """A problem's measurements."""

    name: str
    family: str | None
    problem: str
    """The convolution in one line."""
    rank: int
    """Spatial dimensions."""
    depthwise: bool
    flops: int
    nbytes: int
    """Of activation, filter and output."""
    convolutions: int
    """How many a contender's call runs."""
    timings: Mapping[str, Timing]
    """Of one of the convolutions of a call, by contender."""
    singles: Mapping[str, Timing]
    """Of calls of one convolution, by contender; empty where ``timings`` are that already."""
    errors: Mapping[str, float]
    """How far outputs lie from the reference, in parts of ``1 + |reference|``, by contender."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why a contender has no timing, by contender."""

    def median(self, contender: str, *, single: bool = False) -> float | None:
        """Returns the seconds of a convolution, or ``None`` for a contender without timing.

        Args:
            contender: Its name.
            single: Whether the convolution is the only one of its call.
        """
        timings = self.singles if single and self.convolutions > 1 else self.timings
        timing = timings.get(contender)
        return None if timing is None else timing.median_s

    def gflops(self, contender: str) -> float | None:
        """Returns GFLOP/s at the median, or ``None`` for a contender without timing."""
        seconds = self.median(contender)
        return None if seconds is None else self.flops / seconds / 1e9

    def ratio(self, slower: str, faster: str = "ours", *, single: bool = False) -> float | None:
        """Returns how many times the time of ``faster`` ``slower`` takes, at the medians."""
        over, under = (self.median(name, single=single) for name in (slower, faster))
        return None if over is None or under is None else over / under

    def torch(self, single: bool = False) -> str:
        """Returns the faster one of torch's two contenders."""
        times = {name: self.median(name, single=single) for name in ("torch_prepacked", "torch")}
        found = {name: time for name, time in times.items() if time is not None}
        return min(found, key=found.__getitem__, default="torch")

    @property
    def max(self) -> str:
        """MAX's contender: with the filter as an input where it takes no constant one."""
        return "max" if "max" in self.timings else "max_input"


@dataclass(frozen=True)
class Functions:
    """The public functions against the op: problems of ``names`` as one graph, and one by one.

    The filters are constants of the graph. Times are medians in seconds.
    """

    names: tuple[str, ...]
    equal: bool
    """Whether all outputs are equal, bit for bit."""
    graph_s: float
    sum_s: float


@dataclass(frozen=True)
class Ratio:
    """A ratio over several problems, and the problem where it is worst for maxconv."""

    what: str
    geometric_mean: float
    worst: float
    worst_problem: str
    problems: int


@dataclass(frozen=True)
class Record:
    """A run."""

    date: str
    """UTC, ISO 8601."""
    command: str
    commit: str | None
    """The checkout's, or ``None`` for an installed package."""
    modified: bool
    """Whether the checkout's files differed from the commit."""
    dtype: str
    threads: int
    machine: Machine
    versions: Mapping[str, str | None]
    protocol: Protocol
    tolerance: float
    results: Sequence[Result]
    memory: Sequence[Memory] = ()
    functions: Functions | None = None

    def to_json(self) -> str:
        """Returns the record as JSON, with its summary."""
        made = {"format": FORMAT, **asdict(self)}
        made["summary"] = [asdict(ratio) for ratio in summary(self.results)]
        return json.dumps(made, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Reads what ``to_json`` wrote; the summary is left, since it follows from the rest.

        Raises:
            ValueError: It is something else, or of another format; the message says which.
        """
        try:
            read: dict[str, Any] = json.loads(text)
            if (format := read.pop("format")) != FORMAT:
                age = "an old one: measure again" if format in range(1, FORMAT) else "unknown here"
                raise ValueError(f"its format is {format}, {age}")
            del read["summary"]
            machine = {**read.pop("machine")}
            machine["features"] = tuple(machine["features"])
            functions = read.pop("functions")
            if functions is not None:
                functions = Functions(**{**functions, "names": tuple(functions["names"])})
            return cls(
                machine=Machine(**machine),
                protocol=Protocol(**read.pop("protocol")),
                results=[_result(entry) for entry in read.pop("results")],
                memory=[Memory(**entry) for entry in read.pop("memory")],
                functions=functions,
                **read,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no record of format {FORMAT}: {error}") from error


def _result(entry: Mapping[str, Any]) -> Result:
    timings = {
        kind: {name: Timing(**timing) for name, timing in entry[kind].items()}
        for kind in ("timings", "singles")
    }
    return Result(**{**entry, **timings})


def load(path: Path) -> Record:
    """Reads a record.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no record; the message names the file.
    """
    try:
        return Record.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def results_name(record: Record) -> str:
    """Returns the name under which a record is kept in ``benchmarks/results``."""
    return f"{record.date[:10]}-{slug(record.machine.cpu)}-{record.dtype}.json"


def summary(results: Sequence[Result]) -> list[Ratio]:
    """Returns the ratios over problems that the project's targets are about.

    Speeds (``times as fast as``) are worst where they are smallest, costs (``times the time``)
    where they are largest. A speed is followed by that of one convolution a call, if calls have
    more. What has no problem is left out.
    """
    plane = [result for result in results if result.rank == 2]
    others = [result for result in results if result.rank != 2]
    deep = [result for result in plane if result.depthwise]
    dense = [result for result in plane if not result.depthwise]
    no_constant = [result for result in plane if "max" not in result.timings]
    rows = [
        *_speeds("torch, 2-D", plane, Result.torch),
        *_speeds("torch, 1-D and 3-D", others, Result.torch),
        *_speeds("MAX, 2-D, constant filter", dense, lambda *_: "max"),
        *_speeds("MAX, 2-D depthwise, constant filter", deep, lambda *_: "max"),
        *_speeds(
            "MAX with the filter as an input, 2-D that takes no constant one",
            no_constant,
            lambda *_: "max_input",
        ),
        *_speeds("MAX, 1-D and 3-D", others, lambda result, _: result.max),
        _cost("times the time with bias, ReLU and residual as arguments, 2-D", plane, "ours_fused"),
        _cost("times the time with these fused by the graph compiler, 2-D", plane, "ours_lambda"),
        _cost("times the time with a filter that each call packs, 2-D", plane, "ours_raw"),
    ]
    return [row for row in rows if row is not None]


def _speeds(
    whom: str, results: Sequence[Result], contender: Callable[[Result, bool], str]
) -> Iterator[Ratio | None]:
    """Yields how many times as fast as a contender maxconv is, within a call and alone in it."""
    several = any(result.convolutions > 1 for result in results)
    for single in (False, True) if several else (False,):
        ratios = {
            result.name: result.ratio(contender(result, single), single=single)
            for result in results
        }
        alone = ", one convolution a call" * single
        yield _over(f"times as fast as {whom}{alone}", ratios, min)


def _cost(what: str, results: Sequence[Result], contender: str) -> Ratio | None:
    return _over(what, {result.name: result.ratio(contender) for result in results}, max)


def _over(what: str, ratios: Mapping[str, float | None], worst: Any) -> Ratio | None:
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if not known:
        return None
    name = worst(known, key=known.__getitem__)
    return Ratio(what, geometric_mean(known.values()), known[name], name, len(known))
