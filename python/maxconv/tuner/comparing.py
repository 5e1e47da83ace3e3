"""``maxconv tune --compare`` and ``--plot``: how searches do against the same measurements."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .asked import say_left_out
from .compare import Comparison, Memo, Race, race, recorded_space, table
from .measure import CpuMeasurer, executor_of
from .measure.base import DISPATCHED
from .records import Environment, Records, environments
from .search import SEARCHES
from .search.random import RandomSearch, RandomSettings
from .session import DISPATCH, measure_candidates
from .solver import Solver
from .space import Space
from .trials import Candidate, Trial

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["add_arguments", "asks", "run"]

#: Configurations whose times on a CPU are measured again before trials are counted.
_LEADERS = 24

#: What records call the random configurations that are measured before any search begins.
_REFERENCE = "reference"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a comparison."""
    group = parser.add_argument_group(
        "comparing searches",
        "Each configuration is measured once, whichever search proposes it. On sm90 the "
        "measurements are those of --records, and nothing else is proposed.",
    )
    group.add_argument(
        "--compare",
        nargs="+",
        choices=tuple(SEARCHES),
        metavar="SEARCH",
        help=f"run searches that know nothing, and count trials: {', '.join(SEARCHES)}",
    )
    group.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="with --compare: of each; by default 3"
    )
    group.add_argument(
        "--reference",
        type=int,
        default=256,
        metavar="N",
        help="with --compare on a CPU: random configurations that are measured first, so that the "
        "best known is not the searches' alone; by default 256",
    )
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the best so far over trials, of each search: of --compare, or without it of "
        "what --records has",
    )


def asks(args: argparse.Namespace) -> bool:
    """Returns whether a comparison or a picture is asked for."""
    return args.compare is not None or args.plot is not None


def run(args: argparse.Namespace, spaces: Mapping[str, Space], here: Environment) -> int:
    """Compares searches, or draws what records have of them; returns the exit status.

    Args:
        args: The command line.
        spaces: Of the problems, by name.
        here: This machine and its versions.

    Raises:
        ValueError: An argument is not allowed, or there is nothing to compare or to draw.
    """
    _check(args)
    with contextlib.ExitStack() as stack:
        records = None
        if args.records is not None:
            environment = here if args.target == "cpu" else _recorded(args.records, args.target)
            records = stack.enter_context(Records(args.records, environment))
        if args.compare is None:
            assert records is not None
            races, best = _read(records, spaces)
        else:
            races, best = _raced(args, spaces, records)
            for line in table([Comparison.of(n, races, best.__getitem__) for n in args.compare]):
                print(line)
    if args.plot is not None:
        from .picture import draw

        draw(races, best, args.plot)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Checks the arguments before anything is measured."""
    for name in ("seeds", "reference"):
        if getattr(args, name) < (name == "seeds"):
            raise ValueError(f"--{name}: {getattr(args, name)} is too few")
    if args.compare is not None and len(set(args.compare)) != len(args.compare):
        raise ValueError(f"--compare: {' '.join(args.compare)} names a search twice")
    if args.target not in ("cpu", "sm90"):
        raise ValueError(f"--compare: nothing is measured for {args.target}; cpu and sm90 are")
    needs = args.compare is None or args.target != "cpu"
    if needs and (args.records is None or not args.records.is_file()):
        raise ValueError(f"--records: {args.records} is no file; what is recorded is needed")
    if args.plot is not None:
        try:
            from .picture import check_format
        except ModuleNotFoundError as error:
            raise ValueError(
                f"--plot: {error.name} is not installed; pip install 'maxconv[plot]' installs it"
            ) from error
        check_format(args.plot)


def _recorded(path: Path, target: str) -> Environment:
    """Returns where most trials of a target were measured; another machine than this one."""
    found = environments(path, target)
    if not found:
        raise ValueError(f"--records: {path} has nothing of {target}; --import keeps results there")
    print(f"replaying what was measured on {found[0].device}", file=sys.stderr)
    return found[0]


Raced = tuple[list[Race], dict[str, float]]


def _raced(args: argparse.Namespace, spaces: Mapping[str, Space], records: Records | None) -> Raced:
    """Runs all searches of all problems."""
    if args.target != "cpu":
        assert records is not None
        left_out = {n: "nothing is recorded of it" for n, s in spaces.items() if not records.of(s)}
        say_left_out(left_out, len(spaces))
        spaces = {name: space for name, space in spaces.items() if name not in left_out}
        if not spaces:
            raise ValueError(f"--records: {args.records} has none of these problems")
    races: list[Race] = []
    best: dict[str, float] = {}
    for number, (name, whole) in enumerate(spaces.items(), start=1):
        with _measurements(args, whole, records) as (space, memo):
            ran = []
            for search, seed in itertools.product(args.compare, range(args.seeds)):
                _say(f"[{number}/{len(spaces)}] {name}: {search}, seed {seed}")
                ran.append(race(name, space, search, seed, memo, args.budget))
                if records is not None and args.target == "cpu":
                    records.write(whole, ran[-1][1], search=search, seed=seed)
            if args.target == "cpu":
                memo.again(_LEADERS)
            own = [memo.timed(*each) for each in ran]
            best[name] = memo.best
        races += own
        compared = (Comparison.of(n, own, best.__getitem__) for n in args.compare)
        told = ", ".join(f"{each.search} {each.trials:.1f}" for each in compared)
        print(f"{name}: {len(memo)} configurations known; trials: {told}", flush=True)
    return races, best


@contextlib.contextmanager
def _measurements(
    args: argparse.Namespace, space: Space, records: Records | None
) -> Iterator[tuple[Space, Memo]]:
    """Yields what is searched, and what measures it."""
    known = [] if records is None else records.trials(space, Solver(space.model, 0))
    if args.target != "cpu":
        yield recorded_space(space, known), Memo(_replayed, known)
        return
    measurer = CpuMeasurer(space, make=executor_of(args.executor))
    try:
        outcome = measurer.measure([measurer.choice()], DISPATCHED)[0]
        if outcome.incumbent is None:
            raise ValueError(f"dispatch: the kernel's own choice fails: {outcome.error}")
        yardstick = outcome.incumbent

        def measure(candidates: Sequence[Candidate]) -> list[Trial]:
            return measure_candidates(measurer, space, candidates, yardstick)

        memo = Memo(measure, known)
        if args.reference:
            drawn = RandomSearch(space, -1, RandomSettings(args.reference)).propose([])
            for start in range(0, len(drawn), 32):
                _say(f"reference: {start} of {len(drawn)}")
                trials = memo(drawn[start : start + 32])
                if records is not None:
                    records.write(space, trials, search=_REFERENCE, seed=0)
        yield space, memo
    finally:
        measurer.close()


def _replayed(candidates: Sequence[Candidate]) -> list[Trial]:
    raise RuntimeError(f"compare: {len(candidates)} proposed configurations were not recorded")


def _read(records: Records, spaces: Mapping[str, Space]) -> Raced:
    """Returns the searches that are recorded of problems, in the order of their trials."""
    races: list[Race] = []
    best: dict[str, float] = {}
    for name, space in spaces.items():
        found: dict[tuple[str, int], list[float | None]] = {}
        for record in records.of(space):
            if record.search in SEARCHES:
                found.setdefault((record.search, record.seed), []).append(record.seconds)
        ran = [r.seconds for r in records.of(space) if r.seconds and r.search != DISPATCH]
        if not found or not ran:
            raise ValueError(f"--records: no search of {name} is recorded there")
        best[name] = min(ran)
        for (search, seed), seconds in found.items():
            failed = seconds.count(None)
            races.append(Race(name, search, seed, tuple(seconds), len(seconds), failed))
    return races, best


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
