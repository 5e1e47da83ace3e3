"""The record of a run: everything that was measured, and where; as JSON, and from it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .cpu.memory import Memory
from .entrant import BARE, CONTENDERS, FIGURES, FUSED, KERNEL, MAXCONV, WORKS, WRONG, Key
from .environment import Machine, slug
from .models.variants import VARIANTS
from .statistics import Timing, geometric_mean
from .timing import Protocol

__all__ = [
    "FORMAT",
    "HERON",
    "NETWORKS",
    "OF_THE_PEAK",
    "SUITES",
    "Forward",
    "Functions",
    "Measurement",
    "ModelResult",
    "Peak",
    "Ratio",
    "Record",
    "Result",
    "load",
    "peers",
    "results_name",
    "summary",
]

#: Version of the JSON form; ``benchmarks/record.schema.json`` describes it.
FORMAT = 4

#: What the summary calls maxconv's share of a CPU's peak.
OF_THE_PEAK = "of the peak"

#: What ``--problems`` takes for the convolutions of real networks, and of Heron's operators.
NETWORKS, HERON = SUITES = ("networks", "heron")


@dataclass(frozen=True)
class Measurement:
    """One contender's figures of one problem, or why there are none."""

    contender: str
    work: str
    """``bare`` or ``fused``."""
    variant: str = ""
    """How the contender was called, where there is more than one way; empty for its main one."""
    kernel: Timing | None = None
    """Of one convolution among many in a call: the kernel alone."""
    call: Timing | None = None
    """Of one convolution as a user calls it, the host's part included."""
    error: float | None = None
    """How far outputs lie from the reference, in parts of ``1 + |reference|``."""
    missing: str | None = None
    """Why nothing was timed."""
    note: str = ""

    @property
    def key(self) -> Key:
        """Its name within the problem."""
        return Key(self.contender, self.work, self.variant)

    def median(self, figure: str) -> float | None:
        """Returns the seconds of a figure, or ``None`` where it was not timed."""
        timing: Timing | None = getattr(self, figure)
        return None if timing is None else timing.median_s


@dataclass(frozen=True)
class Peak:
    """How fast a CPU multiplies a type where operands stay in registers."""

    unit: str
    """The instruction."""
    threads: int
    per_second: float
    """Operations, a multiply-add as two: FLOP/s, or OP/s of integers."""
    calls: int
    """Of which the fastest counts."""


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
    """How many share the call that gives a kernel's time."""
    measurements: Sequence[Measurement]

    def of(self, contender: str, work: str = BARE) -> list[Measurement]:
        """Returns a contender's measurements of a kind of work that have a figure."""
        return [
            entry
            for entry in self.measurements
            if (entry.contender, entry.work) == (contender, work) and entry.missing is None
        ]

    def of_wrong(self, contender: str) -> list[Measurement]:
        """Returns a contender's measurements whose output was wrong."""
        return [
            entry
            for entry in self.measurements
            if entry.contender == contender and (entry.missing or "").startswith(WRONG)
        ]

    def best(self, contender: str, work: str, figure: str) -> Measurement | None:
        """Returns what stands for a contender in a table, or ``None``.

        For maxconv this is its main variant; for each other its fastest one.
        """
        known = [entry for entry in self.of(contender, work) if entry.median(figure) is not None]
        if contender == MAXCONV:
            known = [entry for entry in known if not entry.variant]
        return min(known, key=lambda entry: entry.median(figure) or 0.0, default=None)

    def median(self, contender: str, work: str = BARE, figure: str = KERNEL) -> float | None:
        """Returns the seconds of ``best``, or ``None``."""
        found = self.best(contender, work, figure)
        return None if found is None else found.median(figure)

    def ratio(self, peer: str, work: str = BARE, figure: str = KERNEL) -> float | None:
        """Returns how many times as fast as a peer maxconv is, at the medians."""
        over, under = (self.median(name, work, figure) for name in (peer, MAXCONV))
        return None if over is None or under is None else over / under

    def share(self, peak: Peak | None, work: str = BARE, figure: str = KERNEL) -> float | None:
        """Returns maxconv's operations a second as a share of a peak, at the median."""
        seconds = self.median(MAXCONV, work, figure)
        return None if seconds is None or peak is None else self.flops / seconds / peak.per_second

    def opponent(self, work: str = BARE, figure: str = KERNEL) -> tuple[str, float] | None:
        """Returns the fastest of the others and its seconds, or ``None``."""
        times = {name: self.median(name, work, figure) for name in CONTENDERS if name != MAXCONV}
        known = [(name, time) for name, time in times.items() if time is not None]
        return min(known, key=lambda entry: entry[1], default=None)

    def advantage(self, work: str = BARE, figure: str = KERNEL) -> float | None:
        """Returns how many times as fast as ``opponent`` maxconv is, at the medians."""
        own, other = self.median(MAXCONV, work, figure), self.opponent(work, figure)
        return None if own is None or other is None else other[1] / own

    def fusing(self, contender: str, figure: str = KERNEL) -> float | None:
        """Returns a contender's time of the fused work as a multiple of the convolution's."""
        over, under = (self.median(contender, work, figure) for work in (FUSED, BARE))
        return None if over is None or under is None else over / under


@dataclass(frozen=True)
class Forward:
    """One way of running a model: its forward pass, and what it takes to get there."""

    variant: str
    """A name of ``models.variants``."""
    channels_last: bool
    """The memory format of weights and inputs."""
    call: Timing | None = None
    """Of a forward pass, as a user calls the model."""
    error: float | None = None
    """How far outputs lie from the reference, as a share of its largest element."""
    first_call_s: float | None = None
    """Seconds from the model to its first output: conversion, compilation, capture, the call."""
    kept: int | None = None
    """Bytes that it holds between calls, weights included."""
    peak: int | None = None
    """Bytes that a call takes besides, at most."""
    missing: str | None = None
    """Why nothing was timed."""


@dataclass(frozen=True)
class ModelResult:
    """A model's measurements at a batch."""

    name: str
    library: str
    batch: int
    inputs: str
    """Their shapes."""
    reference: str
    """The type in which eager PyTorch computes what outputs are compared with."""
    forwards: Sequence[Forward]
    parameters: int | None = None
    replaced: int | None = None
    """Convolutions that ``maxconv.torch.convert`` replaced."""
    left: Mapping[str, int] = field(default_factory=dict)
    """Why it left modules in PyTorch, and how many."""

    def opponent(self) -> float | None:
        """Returns the seconds of PyTorch's fastest way, or ``None``."""
        return min(
            (
                forward.call.median_s
                for forward in self.forwards
                if forward.call and not VARIANTS[forward.variant].ours
            ),
            default=None,
        )

    def ratios(self) -> dict[str, float]:
        """Returns how many times as fast as PyTorch's fastest way each way of maxconv's is."""
        opponent = self.opponent()
        return {
            forward.variant: opponent / forward.call.median_s
            for forward in self.forwards
            if opponent and forward.call and VARIANTS[forward.variant].ours
        }


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
    work: str
    figure: str
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
    device: str
    """``cpu`` or ``gpu``."""
    dtype: str
    activation: str
    """That of the fused work."""
    machine: Machine
    versions: Mapping[str, str | None]
    protocol: Protocol
    tolerance: float
    """Of ``1 + |reference|``; of the largest element of a model's reference."""
    results: Sequence[Result]
    models: Sequence[ModelResult] = ()
    starts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each variant's first call in the process, of a model of one convolution."""
    memory: Sequence[Memory] = ()
    functions: Functions | None = None
    peak: Peak | None = None
    """That of the dtype; of convolutions on a CPU, since it is measured."""

    @property
    def suite(self) -> str | None:
        """That of ``SUITES`` whose problems it is of, if it is of any."""
        words = shlex.split(self.command)
        asked = (words[place + 1] for place, word in enumerate(words) if word == "--problems")
        return next((word for word in asked if word in SUITES), None)

    def to_json(self) -> str:
        """Returns the record as JSON, with its summary."""
        made = {"format": FORMAT, **asdict(self)}
        if self.peak is None:
            del made["peak"]
        made["summary"] = [asdict(ratio) for ratio in summary(self.results, self.peak)]
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
            peak = read.pop("peak", None)
            return cls(
                machine=Machine(**machine),
                protocol=Protocol(**read.pop("protocol")),
                results=[Result(**_measured(entry)) for entry in read.pop("results")],
                models=[_model(entry) for entry in read.pop("models")],
                memory=[Memory(**entry) for entry in read.pop("memory")],
                functions=functions,
                peak=peak and Peak(**peak),
                **read,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no record of format {FORMAT}: {error}") from error


def _measured(entry: Mapping[str, Any]) -> dict[str, Any]:
    measurements = []
    for read in entry["measurements"]:
        timings = {name: read[name] and Timing(**read[name]) for name in FIGURES}
        measurements.append(Measurement(**{**read, **timings}))
    return {**entry, "measurements": measurements}


def _model(entry: Mapping[str, Any]) -> ModelResult:
    forwards = [
        Forward(**{**read, "call": read["call"] and Timing(**read["call"])})
        for read in entry["forwards"]
    ]
    return ModelResult(**{**entry, "forwards": forwards})


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
    machine = record.machine
    what = f"-{record.suite}" if record.suite else ""
    if record.models:
        variants = {forward.variant for model in record.models for forward in model.forwards}
        what = "-quantized-models" if "quantized" in variants else "-models"
    return f"{record.date[:10]}-{slug(machine.gpu or machine.cpu)}-{record.dtype}{what}.json"


def peers(results: Sequence[Result], work: str, figure: str) -> list[str]:
    """Returns the other contenders that have a figure of some result, in the contenders' order."""
    return [
        name
        for name in CONTENDERS
        if name != MAXCONV
        and any(result.median(name, work, figure) is not None for result in results)
    ]


def summary(results: Sequence[Result], peak: Peak | None = None) -> list[Ratio]:
    """Returns the ratios over problems that the project's targets are about.

    Speeds (``times as fast as``, ``of the peak``) are worst where they are smallest, costs
    (``times the time``) where they are largest. What has no problem is left out.

    Args:
        results: Of the problems.
        peak: What ``of the peak`` is about; without it there is none of these.
    """
    groups = {
        "2-D": [result for result in results if result.rank == 2 and not result.depthwise],
        "2-D depthwise": [result for result in results if result.rank == 2 and result.depthwise],
        "1-D and 3-D": [result for result in results if result.rank != 2],
    }
    rows: list[Ratio | None] = []
    for work in WORKS:
        for peer in CONTENDERS[1:]:
            rows += _speeds(peer, groups, work)
        rows += _shares(peak, groups, work)
    for figure in FIGURES:
        for group, members in groups.items():
            fusing = {result.name: result.fusing(MAXCONV, figure) for result in members}
            what = f"times the time of the convolution alone, {group}"
            rows.append(_over(what, FUSED, figure, fusing, max))
    return [row for row in rows if row is not None]


def _speeds(peer: str, groups: Mapping[str, Sequence[Result]], work: str) -> Iterator[Ratio | None]:
    for group, members in groups.items():
        for figure in FIGURES:
            ratios = {result.name: result.ratio(peer, work, figure) for result in members}
            yield _over(f"times as fast as {peer}, {group}", work, figure, ratios, min)


def _shares(
    peak: Peak | None, groups: Mapping[str, Sequence[Result]], work: str
) -> Iterator[Ratio | None]:
    for group, members in groups.items():
        for figure in FIGURES:
            shares = {result.name: result.share(peak, work, figure) for result in members}
            yield _over(f"{OF_THE_PEAK}, {group}", work, figure, shares, min)


def _over(
    what: str,
    work: str,
    figure: str,
    ratios: Mapping[str, float | None],
    worst: Callable[..., str],
) -> Ratio | None:
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if not known:
        return None
    name = worst(known, key=known.__getitem__)
    mean = geometric_mean(known.values())
    return Ratio(what, work, figure, mean, known[name], name, len(known))
