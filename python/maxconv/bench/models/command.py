"""The part of ``maxconv bench`` that is about models: its arguments, their checks, the list."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..device import GPU, Device
from ..record import ModelResult, Record
from .catalogue import ALL, Source, check_installed, load_catalogue, select
from .variants import VARIANTS, check_backend, usable, usual

__all__ = ["OPTIONS", "add_arguments", "check", "listing", "measure", "words"]

#: Arguments that go with ``--models`` only.
OPTIONS = ("variants", "batch", "channels_last")

#: Arguments that are about single convolutions.
_CONVOLUTIONS = ("family", "problems", "contenders", "work", "plot", "build", "target", "source")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that are about models."""
    models = parser.add_argument_group("whole PyTorch models, instead of convolutions")
    models.add_argument(
        "--models",
        nargs="*",
        metavar="NAME",
        help=f"these; without a name some common ones; {ALL}: every one",
    )
    models.add_argument("--list", action="store_true", help="list the models, and measure nothing")
    models.add_argument(
        "--variants",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(VARIANTS)} (default: all that the device has, but those of integers)",
    )
    models.add_argument(
        "--batch",
        nargs="+",
        type=int,
        metavar="N",
        help="batches (default: those of the list); also of --problems networks",
    )
    models.add_argument(
        "--channels-last",
        action=argparse.BooleanOptionalAction,
        help="the memory format (default: channels last, and on a CPU also contiguous for torch)",
    )


def check(args: argparse.Namespace, device: Device) -> None:
    """Checks the arguments that are about models, and completes them.

    Raises:
        ValueError: One is wrong, or what it needs is not here.
    """
    if args.models is None:
        for name in OPTIONS:
            # `command.select` says which convolutions have batches.
            if name != "batch" and getattr(args, name) is not None:
                raise ValueError(f"{_flag(name)}: it is for --models")
        return
    for name in _CONVOLUTIONS:
        if getattr(args, name) is not None:
            flag = "from" if name == "source" else name
            raise ValueError(f"models: --{flag} does not go with it, since it is for convolutions")
    for batch in args.batch or ():
        if batch < 1:
            raise ValueError(f"batch: {batch} is not positive; at least 1 is needed")
    allowed = usable(device.name)
    for name in args.variants or ():
        if name not in VARIANTS:
            raise ValueError(f"variants: {name!r} is not one; {', '.join(VARIANTS)} are allowed")
        if name not in allowed:
            why = "convolves integers" if VARIANTS[name].integers else "replays a CUDA graph"
            raise ValueError(
                f"variants: {name!r} on a {device.name}: it {why}; {', '.join(allowed)} are allowed"
            )
    default = usual(device.name)
    args.variants = [name for name in allowed if name in (args.variants or default)]
    some = args.models not in ([], [ALL]) or args.quick or args.batch or args.variants != default
    if args.out and some:
        raise ValueError(
            "out: only a whole run is kept by date and machine, with --models or --models "
            f"{ALL}, and without --quick, --batch and --variants; --json keeps any other"
        )
    check_installed(select(args.models, device.name, args.batch or ()))
    if device.name == GPU.name:
        from ..gpu.run import check_gpu

        check_gpu()
    check_backend(args.variants)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def measure(args: argparse.Namespace, record: Record, keep: Callable[[Record], None]) -> Record:
    """Measures the models that arguments ask for.

    Args:
        args: They have been checked.
        record: The run, without results.
        keep: Is given the record so far after each model.
    """
    import torch

    from .run import Bench, measure_models, measure_starts

    bench = Bench(args.device, args.dtype, record.protocol, args.variants, args.channels_last)
    batches = args.batch or ()
    sources = select(args.models, args.device, batches)
    record = replace(
        record,
        # Users leave the number of threads to torch, and so does this.
        machine=replace(record.machine, threads=torch.get_num_threads()),
        versions={**record.versions, **_versions(sources)},
        starts=measure_starts(bench),
    )

    def keep_models(results: Sequence[ModelResult]) -> None:
        keep(replace(record, models=results))

    return replace(record, models=measure_models(sources, bench, batches, keep_models))


def _versions(sources: Iterable[Source]) -> dict[str, str]:
    """Returns the versions of the libraries that models come from."""
    libraries = load_catalogue().libraries
    names = dict.fromkeys(libraries[source.library] for source in sources)
    return {name: importlib.metadata.version(name) for name in names}


def words(args: argparse.Namespace) -> list[str]:
    """Returns the words of the command line that ask for the same models."""
    if args.models is None:
        return []
    said = ["--models", *args.models]
    if args.variants != usual(args.device):
        said += ["--variants", *args.variants]
    if args.batch:
        said += ["--batch", *map(str, args.batch)]
    if args.channels_last is not None:
        said.append("--channels-last" if args.channels_last else "--no-channels-last")
    return said


def listing() -> str:
    """Returns the models of the list, one a line, with what they need."""
    catalogue = load_catalogue()
    here = {name: importlib.util.find_spec(name) is not None for name in catalogue.libraries}
    rows = []
    for name, source in catalogue.models.items():
        sizes = [f"{key} {','.join(map(str, of))}" for key, of in source.batches.items()]
        library = source.library + ("" if here[source.library] else " (not installed)")
        rows.append(f"{name:<26}{library:<44}{'; '.join(sizes)}")
    return "\n".join(rows) + "\n"
