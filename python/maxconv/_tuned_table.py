"""Tuned tables as files: what ``maxconv tune`` found to be faster than what dispatch chooses.

A table is a YAML file that people can read, compare and keep: a row for each problem, with what was
measured. A row is for one CPU, one number of threads and one version of everything.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ._fields import CPU_FEATURES_VARIABLE, DOT_KERNELS, Kernel
from ._library import OPERATIONS, cache_dir, compiler_version, fingerprint, max_version
from ._machine import cpu_features, cpu_model
from ._version import __version__

__all__ = [
    "CUT_FIELDS",
    "SCHEMA",
    "Device",
    "Row",
    "TableError",
    "Timing",
    "kernel_versions",
    "read_table",
    "this_device",
    "user_table",
    "write_table",
]

#: The version of the tables' form; another one's are not read.
SCHEMA = 2

_ROWS = ("cuts_columns", "rows", "block")
_DOT = ("access", "lines", "columns", "unit_count", "threads")

#: The numbers of each kernel's cut, in the order in which it reads them.
CUT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "implicit_gemm": ("access", "tile_rows", "tiles", "group_count", "unit_count", "depth"),
    "winograd": ("shares_input", "tiles", "unit_count", "units_at_once", "slice"),
    **dict.fromkeys((Kernel.WIDENING.name.lower(), *(k.name.lower() for k in DOT_KERNELS)), _DOT),
    **dict.fromkeys(("depthwise", "grouped", "few_filters"), _ROWS),
}

_PROBLEM_NUMBERS = 22


class TableError(ValueError):
    """A file is no tuned table, or is broken; the message says where."""


@dataclass(frozen=True)
class Device:
    """What a row was measured on."""

    model: str
    """The CPU's name."""
    architecture: str
    """Of its instructions: ``x86_64``."""
    features: tuple[str, ...]
    """Its instruction sets that matter here, and what the environment leaves of them."""


@dataclass(frozen=True)
class Timing:
    """How long something took."""

    kernel: str
    us: float
    """Microseconds of a call, the median."""
    spread: float
    """Half of the distance of the quartiles, over the median."""


@dataclass(frozen=True)
class Row:
    """What was found for a problem."""

    problem: tuple[int, ...]
    """``ConvProblem.numbers``."""
    dtype: str
    """Of activation and filter."""
    out_dtype: str
    """Of the output."""
    threads: int
    device: Device
    configuration: Mapping[str, int]
    """Of the kernel ``after`` ran: a number for each of its ``CUT_FIELDS``."""
    before: Timing
    """What dispatch chooses."""
    after: Timing
    """This configuration, in turns with it."""
    gain: tuple[float, float, float]
    """How many times as fast, in neighbouring turns: the quartiles."""
    versions: Mapping[str, str]

    @property
    def key(self) -> tuple[Any, ...]:
        """What there may be one row of."""
        return (self.device, self.dtype, self.out_dtype, self.threads, self.problem)


def this_device() -> Device:
    """Returns this machine's CPU, as rows tell it from others."""
    features = cpu_features()
    allowed = os.environ.get(CPU_FEATURES_VARIABLE)
    if allowed is not None:
        features = (*features, f"{CPU_FEATURES_VARIABLE}={allowed}")
    return Device(cpu_model(), platform.machine(), features)


def kernel_versions() -> dict[str, str]:
    """Returns the versions of everything that a kernel's speed depends on.

    Raises:
        LibraryError: There is neither a Mojo compiler nor a cache that one filled.
    """
    return {
        "maxconv": __version__,
        "max": max_version(),
        "mojo": compiler_version(),
        "operations": fingerprint(OPERATIONS, of="tuner"),
    }


def user_table() -> Path:
    """Returns the path of the user's own table, whether it is there or not.

    Raises:
        LibraryError: See ``cache_dir``.
    """
    return cache_dir() / "tuned.yaml"


def read_table(path: Path) -> list[Row]:
    """Returns the rows of a table.

    Raises:
        TableError: It is none, it is broken, or it is of another schema.
        OSError: It cannot be read.
    """
    # PyTorch's calls need no YAML where nothing was tuned.
    import yaml

    content = path.read_bytes()
    try:
        document = yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise TableError(f"tuned table: {path} is no YAML: {error}") from error
    if not isinstance(document, dict) or document.keys() != {"schema", "count", "rows"}:
        raise TableError(f"tuned table: {path} has not the keys schema, count and rows")
    if document["schema"] != SCHEMA:
        raise TableError(
            f"tuned table: {path} has schema {document['schema']!r}; this version reads {SCHEMA}"
        )
    entries = document["rows"]
    if not isinstance(entries, list) or len(entries) != document["count"]:
        raise TableError(f"tuned table: {path} has not the {document['count']!r} rows of its count")
    found = []
    for place, entry in enumerate(entries):
        try:
            found.append(_row(entry))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TableError(f"tuned table: row {place} of {path}: {error!r}") from error
    if len({row.key for row in found}) != len(found):
        raise TableError(f"tuned table: {path} has two rows of one problem")
    return found


def _row(entry: Any) -> Row:
    """Returns a row, checked.

    Raises:
        AttributeError: Something is no mapping or no text.
        KeyError: A key is missing.
        TypeError: Something is of another type.
        ValueError: Something is not as it must be.
    """
    names = {field.name for field in fields(Row)}
    if entry.keys() != names:
        raise ValueError(f"keys {sorted(entry)} are not {sorted(names)}")
    device = Device(**{**entry["device"], "features": tuple(entry["device"]["features"])})
    row = Row(
        problem=tuple(entry["problem"]),
        dtype=entry["dtype"],
        out_dtype=entry["out_dtype"],
        threads=entry["threads"],
        device=device,
        configuration=dict(entry["configuration"]),
        before=Timing(**entry["before"]),
        after=Timing(**entry["after"]),
        gain=tuple(map(float, entry["gain"])),  # type: ignore[arg-type] # the length is checked
        versions=dict(entry["versions"]),
    )
    numbers = (*row.problem, row.threads, *row.configuration.values())
    if len(row.problem) != _PROBLEM_NUMBERS or not all(type(number) is int for number in numbers):
        raise ValueError(f"problem {row.problem} is not {_PROBLEM_NUMBERS} whole numbers")
    if row.after.kernel not in CUT_FIELDS:
        raise ValueError(f"kernel {row.after.kernel!r} is not one of {', '.join(CUT_FIELDS)}")
    fields_of_kernel = CUT_FIELDS[row.after.kernel]
    if tuple(row.configuration) != fields_of_kernel:
        raise ValueError(f"configuration {row.configuration} has not {', '.join(fields_of_kernel)}")
    if len(entry["gain"]) != 3 or row.threads < 1:
        raise ValueError("three quartiles and one thread are the least of a row")
    if any(len(text.split()) != 1 for text in (row.dtype, row.out_dtype)):
        raise ValueError(f"dtypes {row.dtype!r} and {row.out_dtype!r} are no names of types")
    return row


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Writes a table in one step: readers see the old one or the new one.

    Args:
        path: Where to; its folder exists.
        rows: What it holds.

    Raises:
        OSError: It cannot be written.
    """
    import yaml

    entries = []
    for row in sorted(rows, key=lambda row: repr(row.key)):
        entry = asdict(row) | {"problem": list(row.problem), "gain": list(row.gain)}
        entry["device"]["features"] = list(row.device.features)
        entries.append(entry)
    text = yaml.safe_dump(
        {"schema": SCHEMA, "count": len(entries), "rows": entries},
        sort_keys=False,
        default_flow_style=None,
        width=120,
    )
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
