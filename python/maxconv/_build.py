"""``maxconv build``: fills the cache, for an image or before the first call."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ._dtypes import CPU_BYTES, DTYPE_BYTES, INPUT_BYTES, OUTPUT_BYTES
from ._fields import Kernel
from ._library import cache_dir, library_path
from ._library_files import (
    BESIDE,
    CPU_LEVELS,
    Family,
    beside_file,
    chooser_file,
    host_file,
    kernel_file,
)
from ._native import chooser
from ._targets import TARGETS
from ._tuned import known_features

__all__ = ["add_arguments", "build_gpu", "run"]

_HOST = "host"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maxconv build``."""
    parser.add_argument(
        "--target",
        action="append",
        choices=(_HOST, *CPU_LEVELS, *TARGETS),
        help="this machine's CPU, a level of CPUs, or a GPU that need not be here; may be repeated;"
        " by default host",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=tuple(INPUT_BYTES),
        default=tuple(DTYPE_BYTES),
        help="of activation and filter; by default %(default)s",
    )
    parser.add_argument(
        "--bias", choices=tuple(DTYPE_BYTES), help="type of the bias; by default the dtype"
    )
    parser.add_argument(
        "--output", choices=tuple(OUTPUT_BYTES), help="type of the output; by default the dtype"
    )
    parser.add_argument("--scaled", action="store_true", help="with a factor for each filter")
    parser.add_argument("--upsample", action="store_true", help="of images that are enlarged")


def run(args: argparse.Namespace) -> int:
    """Builds what is asked for and prints where it is; returns the exit status.

    Raises:
        ValueError: A dtype of 8 bits has no type for its output, or is one that a CPU lacks.
        LibraryError: A library cannot be built.
    """
    targets = args.target or [_HOST]
    families = [_family(name, args) for name in args.dtype]
    for target in targets:
        if target not in TARGETS and (bad := [f.dtype for f in families if f.dtype in _WIDE_ONLY]):
            allowed = ", ".join(CPU_BYTES)
            raise ValueError(f"--dtype: {bad[0]} is for GPUs; for {target} {allowed} are allowed")
    started = time.monotonic()
    _announce(library_path())
    for target in targets:
        for family in families:
            for path in _files(target, family):
                _announce(path)
    print(f"{cache_dir()}: complete after {time.monotonic() - started:.0f} s")
    return 0


_DTYPES = ", ".join(DTYPE_BYTES)

# What has 8 bits, and what of it only a GPU takes.
_NARROW = frozenset(INPUT_BYTES) - frozenset(DTYPE_BYTES)
_WIDE_ONLY = _NARROW - frozenset(CPU_BYTES)


def _family(dtype: str, args: argparse.Namespace) -> Family:
    if dtype in _NARROW and args.upsample:
        raise ValueError(f"--upsample: it is not supported with {dtype}; {_DTYPES} are allowed")
    if dtype in _NARROW and args.output is None:
        raise ValueError(f"--output: it must be given with {dtype}; {_DTYPES} are allowed")
    bias = "float32" if dtype in _NARROW else dtype
    output = args.output or dtype
    return Family(dtype, args.bias or bias, output, args.scaled, depth_to_space=args.upsample)


def _files(target: str, family: Family) -> Iterable[Path]:
    """Builds a target's libraries."""
    if target in TARGETS:
        return build_gpu(family, target, TARGETS[target].capability)
    if target == _HOST:
        return [host_file(family, features=known_features())]
    return [host_file(family, target)]


def build_gpu(family: Family, architecture: str, capability: int) -> Iterator[Path]:
    """Builds what calls on a GPU may need, on all cores; the GPU need not be here.

    Args:
        family: The operands' types.
        architecture: What compilers call the GPU: ``sm_90a``.
        capability: Its compute capability, times ten.

    Yields:
        The libraries.

    Raises:
        LibraryError: A library cannot be built; see ``maxconv.library_path``.
    """

    def build(code: Kernel) -> Path:
        return kernel_file(code, family, architecture)

    kernels = chooser(family).kernels(capability)
    yield chooser_file(family)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = pool.map(build, kernels)
        # Of what a convolution stores.
        beside = [pool.submit(beside_file, root, family.output, architecture) for root in BESIDE]
        yield from built
        for made in beside:
            yield made.result()


def _announce(path: Path) -> None:
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)", flush=True)
