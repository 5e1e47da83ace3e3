"""``maxconv inspect``: the GPU kernels' PTX, or what it takes of a multiprocessor; needs no GPU."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import _library as library
from ._dtypes import FLOAT8, FLOAT8_WIDE, INT8
from ._fields import GPU_KERNELS, HOPPER_DTYPES
from ._progress import progress
from ._targets import BLACKWELL, HOPPER, TARGETS

__all__ = ["Resources", "add_arguments", "assemble", "emit", "run"]

#: Names of storage types on the command line.
_DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": FLOAT8,
    "fp8_wide": FLOAT8_WIDE,
    "i8": INT8,
}
_NAMES = tuple(kernel.name.lower() for kernel in GPU_KERNELS)

_PROGRAM = """
from std.sys import argv

from operations.nvidia.registry import inspect_kernels


def main() raises:
    inspect_kernels[DType.{dtype}, "{kernel}"](String(argv()[1]))
"""


@dataclass(frozen=True)
class Resources:
    """What a kernel takes, as ``ptxas`` says; memory in bytes."""

    kernel: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int
    dynamic_shared: int | None
    """``None`` where the problem decides."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maxconv inspect``."""
    parser.add_argument("--target", choices=TARGETS, default=HOPPER, help="the GPU to compile for")
    parser.add_argument(
        "--op",
        choices=("conv1d", "conv2d", "conv3d"),
        default="conv2d",
        help="the function; every rank runs on the same kernels",
    )
    parser.add_argument("--kernel", choices=_NAMES, help="one kernel; all of them by default")
    parser.add_argument("--dtype", choices=(*_DTYPES, *_DTYPES.values()), default="bf16")
    parser.add_argument("--emit", choices=("ptx", "resources"), default="resources")
    parser.add_argument("--out", metavar="FOLDER", help="with --emit ptx: a file each, there")


def run(args: argparse.Namespace) -> int:
    """Prints PTX or a table; returns the exit status.

    Raises:
        ValueError: The target has no such kernel.
        LibraryError: The compiler is missing or fails, or ``ptxas`` is.
    """
    assembler = find_assembler() if args.emit == "resources" else None
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.out or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with progress(f"compiling the kernels for {args.target}"):
            kernels = emit(folder, args.target, _DTYPES.get(args.dtype, args.dtype), args.kernel)
        if assembler is not None:
            print(
                _table([assemble(assembler, args.target, file, kernels[file]) for file in kernels])
            )
            return 0
        for file in kernels:
            print(file if args.out else file.read_text(encoding="utf-8"))
    return 0


def emit(
    folder: Path, target: str, dtype: str, kernel: str | None = None
) -> dict[Path, int | None]:
    """Compiles kernels to PTX, without a GPU.

    Args:
        folder: Where to write a file for each.
        target: The architecture, as ``sm_90a``.
        dtype: The storage type of all operands; beside one of 8 bits, bfloat16 is the output's.
        kernel: The name of a kernel, or ``None`` for all.

    Returns:
        The files, and the dynamic shared memory of a block in bytes, where the kernel decides it.

    Raises:
        ValueError: The target has no such kernel, or none for the type.
        LibraryError: The compiler is missing or fails.
    """
    if dtype in HOPPER_DTYPES and target not in (HOPPER, BLACKWELL):
        raise ValueError(
            f"dtype: {dtype} has kernels for {HOPPER} and {BLACKWELL} alone; the target is {target}"
        )
    source = _PROGRAM.format(dtype=dtype, kernel=kernel or "")
    with tempfile.TemporaryDirectory() as scratch:
        program, main = Path(scratch, "emit"), Path(scratch, "emit.mojo")
        main.write_text(source, encoding="utf-8")
        include = str(library.OPERATIONS.parent)
        built = library.run_mojo(
            *("build", "-I", include, "--target-accelerator", target, str(main), "-o", str(program))
        )
        if built.returncode:
            raise library.LibraryError(f"Mojo could not compile for {target}:\n{built.stderr}")
        finished = subprocess.run(
            [str(program), str(folder)], capture_output=True, text=True, check=False
        )
        if finished.returncode:
            raise library.LibraryError(f"the kernels could not be written:\n{finished.stderr}")
    lines = [line.split() for line in finished.stdout.splitlines()]
    if not lines:
        raise ValueError(f"kernel: {kernel} does not exist for {target} and {dtype}")
    return {
        folder / f"{name}.ptx": None if int(shared) < 0 else int(shared) for name, shared in lines
    }


def find_assembler() -> str:
    """Returns the path of ``ptxas``.

    Raises:
        LibraryError: It is not there.
    """
    if found := shutil.which("ptxas"):
        return found
    raise library.LibraryError(
        "ptxas is not on the path, and registers are known to no one else; install NVIDIA's CUDA "
        "toolkit, or use --emit ptx"
    )


def assemble(assembler: str, target: str, ptx: Path, shared: int | None) -> Resources:
    """Assembles a kernel and returns what it takes.

    Args:
        assembler: ``ptxas``.
        target: The architecture.
        ptx: The kernel.
        shared: Dynamic shared memory, where it is known.

    Raises:
        LibraryError: The assembler refuses it; the message holds its output.
    """
    finished = subprocess.run(
        [assembler, f"-arch={target}", "-v", str(ptx), "-o", "/dev/null"],
        capture_output=True,
        text=True,
        check=False,
    )
    output = finished.stdout + finished.stderr
    if finished.returncode:
        raise library.LibraryError(f"ptxas refuses {ptx.stem}:\n{output}")

    def largest(pattern: str) -> int:
        return max((int(value) for value in re.findall(pattern, output)), default=0)

    return Resources(
        kernel=ptx.stem,
        registers=largest(r"Used (\d+) registers"),
        spill_stores=largest(r"(\d+) bytes spill stores"),
        spill_loads=largest(r"(\d+) bytes spill loads"),
        stack=largest(r"(\d+) bytes stack frame"),
        static_shared=largest(r"(\d+) bytes smem"),
        dynamic_shared=shared,
    )


def _table(rows: Sequence[Resources]) -> str:
    names = {
        "kernel": "kernel",
        "registers": "registers",
        "spill_stores": "spill stores",
        "spill_loads": "spill loads",
        "stack": "stack",
        "static_shared": "static shared",
        "dynamic_shared": "dynamic shared",
    }
    width = max(len(row.kernel) for row in rows) + 2
    lines = ["  ".join([f"{'kernel':{width}}", *list(names.values())[1:]])]
    for row in rows:
        values = asdict(row)
        cells = [f"{row.kernel:{width}}"]
        for key, title in list(names.items())[1:]:
            value = values[key]
            cells.append(f"{'by problem' if value is None else value:>{len(title)}}")
        lines.append("  ".join(cells))
    return "\n".join(lines)
