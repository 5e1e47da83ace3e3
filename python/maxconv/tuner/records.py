"""Records of trials, in an SQLite file.

A file holds every trial that was ever written to it, of any device and version. Only those of the
same device and versions are used: others tell about other code, or other hardware.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .._problem import ConvProblem
from .._problems import problem_of
from .solver import InfeasibleError, Solver
from .space import Space, configuration
from .table import Confirmation
from .trials import Trial, candidate_of

__all__ = ["SCHEMA", "Environment", "Record", "RecordError", "Records", "environments"]

#: The version of the schema; another one's files are not read.
SCHEMA = 3

#: What marks a file as one of these (SQLite's ``application_id``): "mcTN".
_APPLICATION = 0x6D63544E

_COLUMNS = (
    *("time", "device", "driver", "versions", "target", "kernel", "problem", "dtype", "out_dtype"),
    *("residual", "units", "configuration", "seconds", "spread", "error", "search", "seed"),
)

_CREATE = """
CREATE TABLE trials (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    device TEXT NOT NULL,
    driver TEXT NOT NULL,
    versions TEXT NOT NULL,
    target TEXT NOT NULL,
    kernel TEXT NOT NULL,
    problem TEXT NOT NULL,
    dtype TEXT NOT NULL,
    out_dtype TEXT NOT NULL,
    residual INTEGER NOT NULL,
    units INTEGER NOT NULL,
    configuration TEXT NOT NULL,
    seconds REAL,
    spread REAL NOT NULL,
    error TEXT,
    search TEXT NOT NULL,
    seed INTEGER NOT NULL,
    CHECK ((seconds IS NULL) <> (error IS NULL))
);
CREATE INDEX trials_of_problem ON trials (target, kernel, problem);
CREATE TABLE confirmations (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    device TEXT NOT NULL,
    driver TEXT NOT NULL,
    versions TEXT NOT NULL,
    target TEXT NOT NULL,
    problem TEXT NOT NULL,
    dtype TEXT NOT NULL,
    out_dtype TEXT NOT NULL,
    residual INTEGER NOT NULL,
    units INTEGER NOT NULL,
    tuned TEXT NOT NULL,
    configuration TEXT NOT NULL,
    kernel TEXT NOT NULL,
    before REAL NOT NULL,
    before_spread REAL NOT NULL,
    after REAL NOT NULL,
    after_spread REAL NOT NULL,
    gain TEXT NOT NULL
);
"""


class RecordError(ValueError):
    """A file is not one of records, or is broken."""


@dataclass(frozen=True)
class Environment:
    """Where trials were measured."""

    device: str
    """The GPU's name, or the CPU's."""
    driver: str
    """The GPU's driver, or the kernel of the operating system."""
    versions: Mapping[str, str]
    """Of the package, MAX and Mojo, and what the kernels' source says of itself."""

    @property
    def versions_text(self) -> str:
        """The versions in one form, as they are compared."""
        return json.dumps(dict(self.versions), sort_keys=True)


@dataclass(frozen=True)
class Record:
    """A trial as it is written."""

    problem: str
    """``ConvProblem.numbers``, as JSON."""
    configuration: Mapping[str, int]
    seconds: float | None
    spread: float
    error: str | None
    search: str
    seed: int
    time: float
    """When, in seconds since 1970."""


class Records:
    """A file of records, made where it is missing.

    A round is written in one transaction: a process that is killed loses at most the round that it
    was about to write.

    Args:
        path: The file.
        environment: Where trials are measured now.

    Raises:
        RecordError: The file is no file of records, is broken, or has another schema.
        OSError: It cannot be opened or made.
    """

    def __init__(self, path: str | os.PathLike[str], environment: Environment) -> None:
        self.path = Path(path)
        self.environment = environment
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"records: the folder {self.path.parent} does not exist")
        self._database = sqlite3.connect(self.path, isolation_level=None)
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise RecordError(f"records: {self.path} is no file of records: {error}") from error
        except RecordError:
            self._database.close()
            raise

    def _open(self) -> None:
        (application,) = self._database.execute("PRAGMA application_id").fetchone()
        (schema,) = self._database.execute("PRAGMA user_version").fetchone()
        (tables,) = self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not tables and not application and not schema:
            with _Transaction(self._database):
                for statement in filter(str.strip, _CREATE.split(";")):
                    self._database.execute(statement)
                self._database.execute(f"PRAGMA application_id = {_APPLICATION}")
                self._database.execute(f"PRAGMA user_version = {SCHEMA}")
            return
        if application != _APPLICATION:
            raise RecordError(f"records: {self.path} is a database of another program")
        if schema != SCHEMA:
            raise RecordError(
                f"records: {self.path} has schema {schema}; this version reads schema {SCHEMA}: "
                "name another file, or use the version that wrote it"
            )
        (state,) = self._database.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise RecordError(
                f"records: {self.path} is broken, as a copy that was cut off: {state}; restore it, "
                "or name another file"
            )

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def write(self, space: Space, trials: Sequence[Trial], *, search: str, seed: int) -> None:
        """Appends a round of trials, all of them or none.

        Args:
            space: Theirs.
            trials: What was measured.
            search: The search that proposed them, by name.
            seed: Its seed.

        Raises:
            RecordError: The file cannot be written.
        """
        now = time.time()
        rows = [
            (
                *(now, self.environment.device, self.environment.driver),
                self.environment.versions_text,
                *(space.target, space.kernel.name, _text(space.problem)),
                *(space.dtype, space.out_dtype, int(space.residual), space.units),
                json.dumps(configuration(space, trial.candidate.values)),
                *(trial.seconds, trial.spread, trial.error, search, seed),
            )
            for trial in trials
        ]
        self._insert("trials", _COLUMNS, rows)

    def confirm(self, space: Space, confirmation: Confirmation) -> None:
        """Appends what a session ended with.

        Args:
            space: Its space.
            confirmation: The fastest configuration beside what dispatch chooses.

        Raises:
            RecordError: The file cannot be written.
        """
        found = dataclasses.asdict(confirmation)
        for name in ("problem", "configuration", "gain"):
            found[name] = json.dumps(found[name])
        found |= {
            "time": time.time(),
            "device": self.environment.device,
            "driver": self.environment.driver,
            "versions": self.environment.versions_text,
            "target": space.target,
            "residual": int(space.residual),
        }
        self._insert("confirmations", tuple(found), [tuple(found.values())])

    def confirmations(self, target: str) -> list[Confirmation]:
        """Returns what sessions without a residual ended with here, the oldest first.

        Args:
            target: Of their spaces.
        """
        names = [field.name for field in dataclasses.fields(Confirmation)]
        query = f"SELECT {', '.join(names)} FROM confirmations WHERE target = ? AND residual = 0"
        query += " AND device = ? AND versions = ? ORDER BY id"
        values = (target, self.environment.device, self.environment.versions_text)
        found = []
        for row in self._database.execute(query, values):
            fields = dict(zip(names, row, strict=True))
            fields["problem"] = tuple(json.loads(fields["problem"]))
            fields["gain"] = tuple(json.loads(fields["gain"]))
            fields["configuration"] = json.loads(fields["configuration"])
            found.append(Confirmation(**fields))
        return found

    def _insert(self, table: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Appends rows, all of them or none."""
        places = ", ".join("?" * len(columns))
        statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})"
        try:
            with _Transaction(self._database):
                self._database.executemany(statement, rows)
        except sqlite3.DatabaseError as error:
            raise RecordError(f"records: {self.path} cannot be written: {error}") from error

    def of(self, space: Space) -> list[Record]:
        """Returns what was recorded of a space in this environment, the oldest first."""
        return self._read(space, _text(space.problem))

    def problems(self, space: Space) -> list[ConvProblem]:
        """Returns other problems with records of a space's kernel and types, made here."""
        found = {record.problem for record in self._read(space, None)} - {_text(space.problem)}
        return [problem_of(json.loads(text)) for text in sorted(found)]

    def foreign(self, space: Space) -> int:
        """Returns how many records of a space are of another device or version, and not used."""
        values = (space.target, space.kernel.name, _text(space.problem))
        query = "SELECT count(*) FROM trials WHERE target = ? AND kernel = ? AND problem = ?"
        (every,) = self._database.execute(query, values).fetchone()
        (own,) = self._database.execute(
            f"{query} AND device = ? AND versions = ?",
            (*values, self.environment.device, self.environment.versions_text),
        ).fetchone()
        return int(every) - int(own)

    def trials(self, space: Space, solver: Solver) -> list[Trial]:
        """Returns the recorded trials of a space, the last one of each configuration.

        Configurations that are in the space no more are left out.
        """
        latest: dict[tuple[int, ...], Trial] = {}
        for record in self.of(space):
            try:
                candidate = candidate_of(space, solver, record.configuration)
            except (InfeasibleError, ValueError):
                continue
            latest.pop(candidate.key, None)
            latest[candidate.key] = Trial(
                candidate, record.seconds, spread=record.spread, error=record.error
            )
        return list(latest.values())

    def _read(self, space: Space, problem: str | None) -> list[Record]:
        names = [field.name for field in dataclasses.fields(Record)]
        where = "target = ? AND kernel = ? AND dtype = ? AND out_dtype = ? AND residual = ?"
        where += " AND units = ? AND device = ? AND versions = ?"
        values: list[Any] = [space.target, space.kernel.name, space.dtype, space.out_dtype]
        values += [int(space.residual), space.units, self.environment.device]
        values += [self.environment.versions_text]
        if problem is not None:
            where, values = f"{where} AND problem = ?", [*values, problem]
        query = f"SELECT {', '.join(names)} FROM trials WHERE {where} ORDER BY id"
        found = []
        for row in self._database.execute(query, values):
            fields = dict(zip(names, row, strict=True))
            fields["configuration"] = json.loads(fields["configuration"])
            found.append(Record(**fields))
        return found


def environments(path: str | os.PathLike[str], target: str) -> list[Environment]:
    """Returns where the trials of a target in a file were measured, that of most trials first.

    Args:
        path: The file.
        target: Of the trials' spaces.

    Raises:
        RecordError: The file is no file of records, is broken, or has another schema.
    """
    query = "SELECT device, driver, versions FROM trials WHERE target = ?"
    query += " GROUP BY device, versions ORDER BY count(*) DESC"
    # Whose trials are read does not matter yet.
    with Records(path, Environment("", "", {})) as records:
        rows = records._database.execute(query, (target,)).fetchall()
    return [Environment(device, driver, json.loads(versions)) for device, driver, versions in rows]


class _Transaction:
    """All statements inside, or none."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._database.execute("COMMIT" if kind is None else "ROLLBACK")


def _text(problem: ConvProblem) -> str:
    """Returns a problem as it is written; those of a lower rank have three spatial axes too."""
    return json.dumps(problem.numbers())
