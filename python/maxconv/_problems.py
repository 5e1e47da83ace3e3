"""Named convolutions, and convolutions written on a command line.

The names stand in ``problems.yaml``, which the tests, the benchmark and ``maxconv doctor`` share,
and in ``networks.yaml``, which lists what real networks convolve.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ._checks import Padding
from ._problem import ConvProblem

__all__ = [
    "NETWORKS",
    "PROBLEMS",
    "NamedProblem",
    "Network",
    "add_geometry",
    "find_problem",
    "load_families",
    "load_networks",
    "load_problems",
    "named_at",
    "network_problems",
    "parse_integers",
    "parse_padding",
    "parse_problem",
    "problem_of",
]

#: The file with the named problems.
PROBLEMS = Path(__file__).parent / "problems.yaml"

#: The file with the convolutions of real networks.
NETWORKS = Path(__file__).parent / "networks.yaml"

_REQUIRED = frozenset({"name", "input", "filters", "filter"})
_OPTIONAL = frozenset({"bench", "stride", "dilation", "padding", "groups"})


@dataclass(frozen=True)
class NamedProblem:
    """A convolution with a name; ``family`` is its family in a benchmark, if it has one."""

    name: str
    problem: ConvProblem
    family: str | None = None


@dataclass(frozen=True)
class Network:
    """A network, and its convolutions of a batch of one."""

    name: str
    input: str
    """What it is given, without the batch."""
    batches: tuple[int, ...]
    """Those that it is run with."""
    problems: Mapping[str, NamedProblem]
    """By name; ``family`` is the first network that has the shape."""
    counts: Mapping[str, int]
    """How many of its layers have the shape of a name."""


def load_problems(path: Path = PROBLEMS) -> Mapping[str, NamedProblem]:
    """Returns the named problems by name, in the order of the file.

    Raises:
        ValueError: An entry misses a field, has one that is unknown, repeats a name, or is no
            convolution; the message names the file and the entry.
    """
    return _parse(path.read_text(encoding="utf-8"), path.name)[0]


def load_families(device: str, path: Path = PROBLEMS) -> Mapping[str, tuple[NamedProblem, ...]]:
    """Returns the problems that the benchmark times by default, by family.

    Args:
        device: ``"cpu"``: the problems with a ``bench:`` family. ``"gpu"``: the lists under
            ``gpu:``.
        path: The file with the named problems.

    Raises:
        ValueError: See ``load_problems``; or the device is another.
    """
    problems, gpu = _parse(path.read_text(encoding="utf-8"), path.name)
    if device == "gpu":
        return gpu
    if device != "cpu":
        raise ValueError(f"device: {device!r} has no families; 'cpu' and 'gpu' are allowed")
    families: dict[str, tuple[NamedProblem, ...]] = {}
    for named in problems.values():
        if named.family is not None:
            families[named.family] = (*families.get(named.family, ()), named)
    return families


_Parsed = tuple[Mapping[str, NamedProblem], Mapping[str, tuple[NamedProblem, ...]]]


@functools.lru_cache(maxsize=4)
def _parse(text: str, file: str) -> _Parsed:
    """Reads the text of a file of this name; YAML is slow, and all ask for the same one."""
    document = yaml.safe_load(text)
    named: dict[str, NamedProblem] = {}
    for entry in document["problems"]:
        _add(named, file, entry, _REQUIRED | _OPTIONAL, entry.get("bench"))
    gpu: dict[str, tuple[NamedProblem, ...]] = {}
    for family, members in document.get("gpu", {}).items():
        try:
            found = (_find(named, name) for name in members)
            gpu[family] = tuple(replace(entry, family=family) for entry in found)
        except ValueError as error:
            raise ValueError(f"{file}: gpu: {family}: {error}") from error
    return MappingProxyType(named), MappingProxyType(gpu)


def _add(
    named: dict[str, NamedProblem],
    file: str,
    entry: Mapping[str, Any],
    fields: frozenset[str],
    family: str | None,
) -> None:
    """Checks an entry of a file, and adds its problem."""
    name = entry.get("name", "an entry without a name")
    where = f"{file}: {name}"
    if missing := _REQUIRED.difference(entry):
        raise ValueError(f"{where}: misses {', '.join(sorted(missing))}")
    if unknown := set(entry) - fields:
        raise ValueError(f"{where}: {', '.join(sorted(unknown))} is no field of a problem")
    if name in named:
        raise ValueError(f"{where}: the name stands there twice")
    if "@" in name:
        raise ValueError(f"{where}: a name has no @; NAME@BATCH is another batch of NAME")
    try:
        problem = _problem(entry)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    named[name] = NamedProblem(name, problem, family)


def load_networks(path: Path = NETWORKS) -> Mapping[str, Network]:
    """Returns the networks whose convolutions are listed, by name, in the order of the file.

    Raises:
        ValueError: As ``load_problems``; or an entry names a network that is not listed.
    """
    return _parse_networks(path.read_text(encoding="utf-8"), path.name)


@functools.lru_cache(maxsize=4)
def _parse_networks(text: str, file: str) -> Mapping[str, Network]:
    # Several times as fast, where PyYAML was built with it.
    document = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    named: dict[str, NamedProblem] = {}
    problems: dict[str, dict[str, NamedProblem]] = {name: {} for name in document["networks"]}
    counts: dict[str, dict[str, int]] = {name: {} for name in document["networks"]}
    for read in document["problems"]:
        entry = {**read}
        if "input" in entry:
            entry["input"] = [1, *entry["input"]]
        having: Mapping[str, int] = entry.pop("in", {})
        where = f"{file}: {entry.get('name', 'an entry without a name')}"
        if not having or not having.keys() <= problems.keys():
            raise ValueError(f"{where}: in: {dict(having)} names no network, or one not listed")
        _add(named, file, entry, _REQUIRED | _OPTIONAL - {"bench"}, next(iter(having)))
        for network, count in having.items():
            problems[network][entry["name"]] = named[entry["name"]]
            counts[network][entry["name"]] = count
    return MappingProxyType(
        {
            name: Network(
                name, about["input"], tuple(about["batches"]), problems[name], counts[name]
            )
            for name, about in document["networks"].items()
        }
    )


def named_at(name: str, batch: int) -> str:
    """Returns what a problem of ``networks.yaml`` is called at a batch."""
    return name if batch == 1 else f"{name}@{batch}"


def network_problems(
    networks: Sequence[str] = (), batches: Sequence[int] = ()
) -> list[NamedProblem]:
    """Returns the convolutions of networks at the batches that they are run with, each once.

    Args:
        networks: Their names; all, if empty.
        batches: Those of their batches that are wanted; all, if empty.

    Returns:
        Problems named ``NAME`` of a batch of one and ``NAME@BATCH`` of another, whose family is the
        first network that asks for them.

    Raises:
        ValueError: A network is not listed, or none of them is run with any of ``batches``.
    """
    listed = load_networks()
    for name in networks:
        if name not in listed:
            raise ValueError(f"family: {name!r} is no network; {', '.join(listed)} are allowed")
    found: dict[str, NamedProblem] = {}
    for network in (listed[name] for name in networks or listed):
        for batch in network.batches:
            if batches and batch not in batches:
                continue
            for entry in network.problems.values():
                name = named_at(entry.name, batch)
                problem = replace(entry.problem, batch=batch)
                found.setdefault(name, NamedProblem(name, problem, network.name))
    if not found:
        known = sorted({b for name in networks or listed for b in listed[name].batches})
        raise ValueError(
            f"batch: {', '.join(map(str, batches))} is no batch of these networks; "
            f"{', '.join(map(str, known))} are allowed"
        )
    return list(found.values())


def _problem(entry: Mapping[str, Any]) -> ConvProblem:
    groups = entry.get("groups", 1)
    return ConvProblem.from_parts(
        entry["input"],
        filters=entry["filters"],
        filter_size=tuple(entry["filter"]),
        group_channels=entry["input"][-1] // groups,
        stride=entry.get("stride", 1),
        dilation=entry.get("dilation", 1),
        padding=entry.get("padding", 0),
        groups=groups,
    )


def add_geometry(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that stand beside ``--conv``."""
    parser.add_argument("--stride", default="1", help="with --conv: 2 or 2x1")
    parser.add_argument("--dilation", default="1", help="with --conv: 2 or 2x1")
    parser.add_argument(
        "--padding",
        default="0",
        help="with --conv: 1, same, valid, or before and after each axis: 0x1x0x1",
    )
    parser.add_argument("--groups", type=int, default=1, help="with --conv")


def problem_of(numbers: Sequence[int]) -> ConvProblem:
    """Returns the convolution of ``ConvProblem.numbers``, in three spatial dimensions."""
    batch, channels, filters, groups = numbers[:4]
    inputs, taps, stride, dilation, before, after = (
        tuple(numbers[i : i + 3]) for i in range(4, 22, 3)
    )
    return ConvProblem(
        batch=batch,
        input_size=inputs,
        channels=channels,
        filters=filters,
        filter_size=taps,
        stride=stride,
        dilation=dilation,
        pad_before=before,
        pad_after=after,
        groups=groups,
    )


def find_problem(name: str) -> NamedProblem:
    """Returns the problem of a name; ``NAME@BATCH`` is that of ``NAME`` with another batch.

    Args:
        name: Of ``problems.yaml``, or of ``networks.yaml``.

    Raises:
        ValueError: There is none; the message lists the names that are close, or if none is those
            of ``problems.yaml``.
    """
    named = load_problems()
    if name.partition("@")[0] in named:
        return _find(named, name)
    every = {**named}
    for network in load_networks().values():
        every |= network.problems
    return _find(every, name, [*named])


def _find(
    named: Mapping[str, NamedProblem], name: str, offered: Sequence[str] = ()
) -> NamedProblem:
    """Finds a name; ``offered`` are told where none is close, instead of all."""
    base, at, batch = name.partition("@")
    if base not in named:
        close = difflib.get_close_matches(base, named, cutoff=0.4) or offered or list(named)
        raise ValueError(f"problem: {name!r} is not a named problem; near it: {', '.join(close)}")
    entry = named[base]
    if not at:
        return entry
    if not batch.isdecimal() or int(batch) < 1 or batch != str(int(batch)):
        raise ValueError(
            f"problem: {name!r} has no batch behind the @; a positive integer is needed"
        )
    if int(batch) == entry.problem.batch:
        raise ValueError(f"problem: {name!r} is {base!r}: one shape has one name")
    return replace(entry, name=name, problem=replace(entry.problem, batch=int(batch)))


def parse_problem(
    text: str,
    *,
    stride: object = 1,
    dilation: object = 1,
    padding: Padding = 0,
    groups: int = 1,
) -> ConvProblem:
    """Reads ``NxSPATIALxC:KxTAPS``: ``1x56x56x64:64x3x3`` is 64 filters of 3x3 on 56x56x64.

    Args:
        text: Sizes of the activation, channels last; a colon; the filters and the taps of each, one
            number a spatial dimension.
        stride: As in ``ConvProblem.from_parts``, as the rest.
        dilation: See there.
        padding: See there.
        groups: See there.

    Raises:
        ValueError: The text is written otherwise, or is no convolution.
    """
    match = re.fullmatch(r"(\d+(?:x\d+)+):(\d+(?:x\d+)+)", text)
    if match is None:
        raise ValueError(
            f"conv: {text!r} is not written NxSPATIALxC:KxTAPS; 1x56x56x64:64x3x3 is 64 filters of "
            "3x3 on one image of 56x56 pixels and 64 channels"
        )
    shape, (filters, *taps) = (tuple(map(int, part.split("x"))) for part in match.groups())
    if groups < 1:
        raise ValueError(f"groups: {groups} is not positive; at least 1 is needed")
    return ConvProblem.from_parts(
        shape,
        filters=filters,
        filter_size=tuple(taps),
        group_channels=shape[-1] // groups,
        stride=stride,
        dilation=dilation,
        padding=padding,
        groups=groups,
    )


def parse_integers(name: str, text: str) -> int | tuple[int, ...]:
    """Reads ``2`` as an integer, ``2x1`` and ``2,1`` as a tuple.

    Raises:
        ValueError: The text is neither; the message names the argument ``name``.
    """
    if not re.fullmatch(r"-?\d+(?:[x,]-?\d+)*", text):
        raise ValueError(f"{name}: {text!r} is not written as integers with x between them")
    values = tuple(map(int, re.split("[x,]", text)))
    return values[0] if len(values) == 1 else values


def parse_padding(text: str) -> Padding:
    """Reads a padding: ``same``, ``valid``, ``1``, or ``1x1x2x2`` (before and after, each axis).

    Raises:
        ValueError: The text is none of these.
    """
    return text if text in ("same", "valid") else parse_integers("padding", text)
