"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from maxconv._problems import (
    NamedProblem,
    find_problem,
    load_families,
    load_problems,
    network_problems,
)
from maxconv._targets import HOPPER, TARGETS
from maxconv.tuner.heron import operator_problems

from .device import CPU, DEVICES, GPU, TOLERANCE, Device, is_narrow
from .entrant import CONTENDERS, MAX, MAXCONV, WORKS
from .environment import Checkout, checkout, machine, versions
from .models import command as models
from .record import HERON, NETWORKS, SUITES, Record, Result, load, results_name
from .report import check_one_commit, render_markdown, render_text
from .timing import Protocol

__all__ = ["add_arguments", "measure", "repeat", "run", "select"]

#: Seconds after which a run of hundreds of problems keeps what there is: to write it takes longer
#: than to time a problem.
_KEEP_S = 15.0

#: Arguments that only a measurement or a build takes.
_MEASURING = ("family", "problems", "dtype", "contenders", "work", "rounds", "models")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maxconv bench``."""
    what = parser.add_argument_group("what is measured")
    what.add_argument("--device", choices=DEVICES, default="cpu", help="where (default: cpu)")
    what.add_argument(
        "--problems",
        nargs="+",
        metavar="NAME",
        help="these problems only; maxconv doctor --list lists them, NAME@64 has a batch of 64; "
        f"{NETWORKS}: the convolutions of real networks, of those that --family names; "
        f"{HERON}: the operators that Heron was evaluated on, of those that --family names",
    )
    what.add_argument("--family", nargs="+", metavar="NAME", help="these families only")
    what.add_argument(
        "--dtype",
        help="storage type (default: float32, on a GPU bfloat16); on a CPU also "
        f"{', '.join(CPU.narrow_dtypes)} with int8 filters, beside torch's quantized operators; "
        f"on a GPU {', '.join(GPU.narrow_dtypes)}, of activation and filter, beside maxconv's own "
        "bfloat16",
    )
    what.add_argument(
        "--contenders",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(CONTENDERS)} (default: all; of {NETWORKS} and "
        f"{HERON} {', '.join(GPU.of_many)})",
    )
    what.add_argument("--work", nargs="+", metavar="WORK", help="bare, fused (default: both)")
    what.add_argument("--rounds", type=int, metavar="N", help="bursts of each contender")
    what.add_argument("--quick", action="store_true", help="few rounds, one problem a family")
    what.add_argument(
        "--minutes", type=float, metavar="N", help="begin no problem later; --resume goes on"
    )
    what.add_argument(
        "--resume", action="store_true", help="go on with what a run of --json or --out left"
    )
    models.add_arguments(parser)
    kept = parser.add_argument_group("what is kept")
    kept.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    kept.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write it here, named by date and machine"
    )
    kept.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios: a .png or .svg")
    kept.add_argument(
        "--modified", action="store_true", help="keep a record of files that no commit has"
    )
    kept.add_argument(
        "--report",
        nargs="+",
        type=Path,
        metavar="RECORD",
        help="measure nothing: print records' tables as Markdown, and draw the first one's plot",
    )
    split = parser.add_argument_group("a GPU on another machine")
    split.add_argument(
        "--build", type=Path, metavar="FOLDER", help="compile here, without a GPU, what runs there"
    )
    split.add_argument("--target", choices=TARGETS, help=f"of --build (default: {HOPPER})")
    split.add_argument(
        "--from", dest="source", type=Path, metavar="FOLDER", help="run there what was built"
    )


def run(args: argparse.Namespace) -> int:
    """Measures, builds or reports; returns the exit status: 1 if something found is wrong.

    Raises:
        ValueError: The arguments contradict each other or name what does not exist, or contenders
            disagree about a result.
        OSError: A file cannot be written.
    """
    if args.report:
        return _report(args)
    if args.list:
        print(models.listing(), end="")
        return 0
    device = DEVICES[args.device]
    problems = []
    if args.models is None:
        problems = select(
            device,
            args.family or (),
            args.problems or (),
            quick=args.quick,
            batches=args.batch or (),
        )
    _check(args, device, problems)
    if args.build:
        return _build(args)
    record = measure(problems, args)
    print(render_text([record]), end="")
    whole = not args.minutes or len(record.results) == len(problems)
    for path in _outputs(args, record):
        if whole:
            path.write_text(record.to_json(), encoding="utf-8")
        print(f"\n{path if whole else _partial(path)}")
    if whole:
        _forget(args, record)
    else:
        _keep(args, record)
        print(f"\n{len(record.results)} of {len(problems)} problems; --resume goes on")
    if args.plot:
        from .plot import plot

        plot(record, args.plot)
    return _verdict(record)


def select(
    device: Device,
    families: Sequence[str],
    names: Sequence[str],
    *,
    quick: bool = False,
    batches: Sequence[int] = (),
) -> list[NamedProblem]:
    """Returns the problems of some families and of some names, in the order of the list.

    Without either: all that stand in a family of the device; when ``quick``, the first of each.
    With a name of ``SUITES``: its problems. The families are networks, or Heron's operators.

    Raises:
        ValueError: A family or a name does not exist, or ``batches`` are given without networks.
    """
    for suite in SUITES:
        if suite in names and len(names) > 1:
            raise ValueError(f"problems: {suite} stands alone, without other names")
    if batches and NETWORKS not in names:
        raise ValueError(f"batch: it is for --models and --problems {NETWORKS}")
    if names and names[0] in SUITES:
        of_networks = names[0] == NETWORKS
        found = network_problems(families, batches) if of_networks else operator_problems(families)
        firsts = {named.family: named for named in reversed(found)}
        return [named for named in found if not quick or firsts[named.family] is named]
    existing = load_families(device.name)
    for family in families:
        if family not in existing:
            raise ValueError(
                f"family: {family!r} does not exist; {', '.join(existing)} are allowed"
            )
    wanted = [find_problem(name) for name in names]
    if not families and not names:
        families = tuple(existing)
    chosen = {
        named.name: named
        for family in families
        for named in existing[family][: 1 if quick else None]
    }
    listed = {named.name: named for members in existing.values() for named in members}
    chosen |= {named.name: listed.get(named.name, named) for named in wanted}
    order = [*listed, *load_problems(), *chosen]
    return [chosen[name] for name in dict.fromkeys(order) if name in chosen]


def _check(args: argparse.Namespace, device: Device, problems: Sequence[NamedProblem]) -> None:
    """Checks before minutes are spent that the arguments go together and results can be kept."""
    args.dtype = args.dtype or device.dtypes[0]
    types = device.dtypes + (device.narrow_dtypes if args.models is None else ())
    if args.dtype not in types:
        allowed = ", ".join(types)
        raise ValueError(f"dtype: {args.dtype!r} on a {device.name}: {allowed} are allowed")
    _check_resume(args, device)
    models.check(args, device)
    works = device.narrow_works if is_narrow(args.dtype) else device.works
    args.contenders = _chosen("contenders", args.contenders or _usual(args), works)
    args.work = _chosen("work", args.work, WORKS)
    if args.rounds is not None and args.rounds < 1:
        raise ValueError(f"rounds: {args.rounds} is not positive; at least 1 is needed")
    for name in ("json", "plot"):
        path: Path | None = getattr(args, name)
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{name}: the folder of {path} does not exist")
    if args.out and not args.out.is_dir():
        raise ValueError(f"out: {args.out} is no folder")
    of_suite = _is_many(args) and not args.batch
    if args.out and (args.quick or args.family or (args.problems and not of_suite)):
        raise ValueError(
            "out: only a whole run is kept by date and machine, without --quick, --family and "
            f"--problems but {' and '.join(SUITES)}; --json keeps any other"
        )
    if args.plot:
        from .plot import check_format

        check_format(args.plot)
    _check_gpu(args, device)
    # A folder's files are as modified as they were when it was built.
    clone = None if args.source else checkout()
    if (args.json or args.out or args.build) and clone and clone.modified and not args.modified:
        raise ValueError(
            f"modified: files differ from commit {clone.commit[:10]}, and a record names a commit; "
            "commit them, or give --modified"
        )
    if device.name == "gpu":
        for named in problems:
            if named.problem.pad_before != named.problem.pad_after:
                raise ValueError(
                    f"problems: {named.name} has other padding before than after, which torch's "
                    "functions do not take on a GPU; the same is allowed"
                )


def _check_resume(args: argparse.Namespace, device: Device) -> None:
    for name in ("minutes", "resume"):
        if getattr(args, name) and (device.name != "gpu" or args.models is not None):
            raise ValueError(f"{name}: it is for the convolutions of --device gpu")
    if args.minutes is not None and not args.minutes > 0:
        raise ValueError(f"minutes: {args.minutes} is not positive; more than 0 is needed")
    if (args.minutes or args.resume) and not (args.json or args.out):
        raise ValueError("minutes, resume: --json or --out keeps what there is, and is needed")


def _check_gpu(args: argparse.Namespace, device: Device) -> None:
    for name, value in (("build", args.build), ("from", args.source), ("target", args.target)):
        if value and device.name != "gpu":
            raise ValueError(f"{name}: it is for --device gpu, not {device.name}")
    if args.target and not args.build:
        raise ValueError("target: it is for --build; a GPU that is here names its own")
    if args.build:
        for name in ("json", "out", "plot", "source", "rounds"):
            if getattr(args, name):
                flag = "from" if name == "source" else name
                raise ValueError(f"build: --{flag} does not go with it, since nothing is measured")
        from .gpu.build import check_folder

        check_folder(args.build)
        return
    if device.name == "gpu":
        from .gpu.run import check_gpu

        if args.source:
            from .gpu.build import read_build

            made = read_build(args.source)
            if made.dtype != args.dtype:
                raise ValueError(f"dtype: {args.dtype!r}, but {args.source} is of {made.dtype!r}")
            if made.modified and not args.modified and (args.json or args.out):
                raise ValueError(
                    f"modified: {args.source} was built from files that differ from its commit, "
                    "and a record names a commit; build it again, or give --modified"
                )
        check_gpu()


def _is_many(args: argparse.Namespace) -> bool:
    """Returns whether the many problems of a suite are timed."""
    return bool(args.problems) and args.problems[0] in SUITES


def _usual(args: argparse.Namespace) -> list[str]:
    """Returns the contenders that take part where the arguments name none."""
    device = DEVICES[args.device]
    if is_narrow(args.dtype):
        return [*device.narrow_works]
    return [*(device.of_many if _is_many(args) else device.works)]


def _chosen(name: str, given: Sequence[str] | None, allowed: Iterable[str]) -> list[str]:
    known = list(allowed)
    for value in given or ():
        if value not in known:
            raise ValueError(f"{name}: {value!r} is not one; {', '.join(known)} are allowed")
    return [value for value in known if not given or value in given]


def _build(args: argparse.Namespace) -> int:
    from .gpu.build import build

    architecture = args.target or HOPPER
    made = build(
        args.build,
        architecture=architecture,
        dtype=args.dtype,
        contenders=args.contenders,
        clone=checkout(),
        graphs=_has_graphs(args),
    )
    files = [path for path in args.build.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"{args.build}: {made.architecture}, {made.dtype}, {len(files)} files, {size:.1f} MB")
    return 0


def _has_graphs(args: argparse.Namespace) -> bool:
    """Returns whether MAX graphs are timed."""
    if is_narrow(args.dtype):
        return False
    return not _is_many(args) or MAX in args.contenders


def measure(problems: Sequence[NamedProblem], args: argparse.Namespace) -> Record:
    """Measures problems, or models, as the arguments ask for.

    Raises:
        Mismatch: Contenders disagree about a result.
        RuntimeError: A child process failed.
    """
    device = DEVICES[args.device]
    protocol = device.full if args.models is None else device.models
    if _is_many(args):
        protocol = device.many
    if args.quick:
        protocol = protocol.quick
    if args.rounds:
        fewest = min(args.rounds, protocol.fewest_rounds)
        protocol = replace(protocol, rounds=args.rounds, fewest_rounds=fewest)
    if args.models is not None:
        return _measure_models(args, protocol)
    if device.name == "cpu":
        return _measure_cpu(problems, args, protocol)
    if args.source:
        return _measure_gpu(problems, args, protocol, args.source)
    with tempfile.TemporaryDirectory() as folder:
        return _measure_gpu(problems, args, protocol, _built_here(args, Path(folder)))


def _started(args: argparse.Namespace, protocol: Protocol, clone: Checkout | None) -> Record:
    """Returns a record without results, of this moment and machine."""
    return Record(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=repeat(args),
        commit=clone.commit if clone else None,
        modified=clone.modified if clone else False,
        device=args.device,
        dtype=args.dtype,
        activation=DEVICES[args.device].activation,
        machine=machine(),
        versions=versions(),
        protocol=protocol,
        tolerance=TOLERANCE[args.dtype],
        results=[],
    )


def _measure_cpu(
    problems: Sequence[NamedProblem], args: argparse.Namespace, protocol: Protocol
) -> Record:
    from .cpu.run import measure_memory, measure_problems

    # Before anything runs: afterwards the load is this program's own.
    record = _started(args, protocol, checkout())
    # First, since it is short and may fail.
    measured = "maxconv" in args.contenders and not is_narrow(args.dtype)
    memory = measure_memory(problems, args.dtype) if measured else []
    found = measure_problems(problems, args.dtype, protocol, args.contenders, args.work)
    return replace(record, memory=memory, **found._asdict())


def _measure_gpu(
    problems: Sequence[NamedProblem], args: argparse.Namespace, protocol: Protocol, folder: Path
) -> Record:
    from .gpu.build import read_build
    from .gpu.clock import Cuda
    from .gpu.run import measure_problems, this_machine

    made = read_build(folder)
    record = _started(args, protocol, checkout())
    record = replace(
        record,
        machine=this_machine(),
        commit=made.commit,
        modified=made.modified,
        # What compiled the kernels need not be here.
        versions={
            name: value or made.versions.get(name) for name, value in record.versions.items()
        },
    )

    done: list[Result] = []
    if args.resume and (before := _left(args, record)):
        # It keeps the name that it has in --out.
        record, done = replace(record, date=before.date), [*before.results]

    measured: list[Result] = []
    kept = time.monotonic()

    def keep(results: list[Result]) -> None:
        nonlocal measured, kept
        measured = results
        if not many or time.monotonic() - kept > _KEEP_S:
            _keep(args, replace(record, results=[*done, *measured]))
            kept = time.monotonic()

    known = {result.name for result in done}
    many = _is_many(args)
    try:
        measure_problems(
            [named for named in problems if named.name not in known],
            args.dtype,
            protocol,
            args.contenders,
            args.work,
            folder=folder,
            clock=Cuda(),
            keep=keep,
            many=many,
            seconds=60 * args.minutes if args.minutes else None,
        )
    finally:
        if measured:
            _keep(args, replace(record, results=[*done, *measured]))
    return replace(record, results=[*done, *measured])


def _left(args: argparse.Namespace, record: Record) -> Record | None:
    """Returns what a run before left, on this day or an earlier one; ``None``, if it left no file.

    Raises:
        ValueError: It is of another command, commit, GPU or version.
    """
    paths = [_partial(path) for path in _outputs(args, record)]
    if args.out:
        of_any_day = _partial(Path(results_name(replace(record, date="????-??-??"))))
        paths += sorted(args.out.glob(of_any_day.name), reverse=True)
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        return None
    before = load(found)
    for name in ("command", "commit", "modified", "dtype", "versions"):
        was, now = getattr(before, name), getattr(record, name)
        if was != now:
            raise ValueError(f"resume: {found} is of {name} {was!r}, and this run of {now!r}")
    if (was := before.machine.gpu) != (now := record.machine.gpu):
        raise ValueError(f"resume: {found} was measured on {was!r}, and this is {now!r}")
    return before


def _measure_models(args: argparse.Namespace, protocol: Protocol) -> Record:
    record = _started(args, protocol, checkout())
    if args.device == "gpu":
        from .gpu.run import this_machine

        record = replace(record, machine=this_machine())
    return models.measure(args, record, lambda so_far: _keep(args, so_far))


def _keep(args: argparse.Namespace, record: Record) -> None:
    """Leaves what there is, in case that the rest does not come about."""
    for path in _outputs(args, record):
        partial = _partial(path)
        # What ends this program leaves the old file or the new one, whole.
        new = partial.with_name(f"{partial.name}.new")
        new.write_text(record.to_json(), encoding="utf-8")
        new.replace(partial)


def _forget(args: argparse.Namespace, record: Record) -> None:
    """Removes what ``_keep`` left."""
    for path in _outputs(args, record):
        _partial(path).unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    """Returns where a run keeps what there is of a record."""
    return path.with_suffix(".partial.json")


def _built_here(args: argparse.Namespace, folder: Path) -> Path:
    """Builds for the GPU of this machine; returns the folder."""
    import torch

    from .gpu.build import build

    major, minor = torch.cuda.get_device_capability()
    names = [name for name in TARGETS if name.rstrip("a") == f"sm_{major}{minor}"]
    if not names:
        raise ValueError(
            f"device: no kernel is known for a GPU of compute capability {major}.{minor}; "
            f"{', '.join(TARGETS)} are allowed"
        )
    build(
        folder,
        architecture=names[0],
        dtype=args.dtype,
        contenders=args.contenders,
        clone=checkout(),
        graphs=_has_graphs(args),
    )
    return folder


def _outputs(args: argparse.Namespace, record: Record) -> list[Path]:
    paths = [args.json] if args.json else []
    return paths + ([args.out / results_name(record)] if args.out else [])


def _verdict(record: Record) -> int:
    """Says on stderr what is wrong with what was found; returns the exit status."""
    status = 0
    if exceeded := [entry.name for entry in record.memory if not entry.fits]:
        print(f"more memory than allowed: {', '.join(exceeded)}", file=sys.stderr)
        status = 1
    if record.functions is not None and not record.functions.equal:
        print("the public functions' outputs differ from the op's", file=sys.stderr)
        status = 1
    for entry in record.results:
        for measured in entry.of_wrong(MAXCONV):
            print(f"{entry.name}: {measured.key}: {measured.missing}", file=sys.stderr)
            status = 1
    for result in record.models:
        for forward in result.forwards:
            if forward.missing is not None:
                print(
                    f"{result.name}, batch {result.batch}: {forward.variant}: {forward.missing}",
                    file=sys.stderr,
                )
                status = 1
    return status


def repeat(args: argparse.Namespace) -> str:
    """Returns the command that repeats the measurement; where its results went is no part of it."""
    device = DEVICES[args.device]
    words = ["python", "-m", "maxconv", "bench"]
    if device.name != "cpu":
        words += ["--device", device.name]
    for name in ("family", "problems"):
        if values := getattr(args, name):
            words += [f"--{name}", *values]
    if args.models is None and args.batch:
        words += ["--batch", *map(str, args.batch)]
    if args.dtype != device.dtypes[0]:
        words += ["--dtype", args.dtype]
    words += models.words(args)
    for name, whole in (("contenders", _usual(args)), ("work", [*WORKS])):
        if (values := getattr(args, name)) != whole:
            words += [f"--{name}", *values]
    if args.rounds:
        words += ["--rounds", str(args.rounds)]
    if args.quick:
        words.append("--quick")
    return shlex.join(words)


def _report(args: argparse.Namespace) -> int:
    others = [
        *_MEASURING,
        *models.OPTIONS,
        "quick",
        "minutes",
        "resume",
        "list",
        "json",
        "out",
        "modified",
    ]
    for name in [*others, "build", "target", "source"]:
        if getattr(args, name) not in (None, False):
            flag = "from" if name == "source" else name.replace("_", "-")
            raise ValueError(f"report: --{flag} does not go with it, since nothing is measured")
    records = [load(path) for path in args.report]
    check_one_commit(records)
    if args.plot:
        from .plot import check_format, plot

        check_format(args.plot)
        plot(records[0], args.plot)
    print(render_markdown(records), end="")
    return 0
