"""The shared libraries behind PyTorch's ops, as files: built by ``mojo build``, kept in the cache.

A library is for a family of types. A CPU has one library of all kernels. A GPU has one that chooses
the kernel, which the CPU runs, one for each kernel, one for the mean over pixels, and one for group
normalization. The benchmark has one more for a CPU: the peak of its multiplications; the tuner one
of the limits of kernels' configurations.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ._fields import Kernel
from ._library import OPERATIONS, cached, find, fingerprint, run_or_raise

__all__ = [
    "BESIDE",
    "CPU_LEVELS",
    "SUFFIX",
    "Family",
    "beside_file",
    "chooser_file",
    "explain_file",
    "host_file",
    "kernel_file",
    "peak_file",
    "rules_file",
]

#: The folder of the Mojo files with the libraries' C functions.
SOURCE: Final = (Path(__file__).parent / "library").resolve()

#: What the names of shared libraries end with.
SUFFIX: Final = ".dylib" if sys.platform == "darwin" else ".so"

#: Kinds of CPUs that one image may serve, the fastest code first, and what tells them in
#: ``/proc/cpuinfo`` (x86-64 psABI, "Micro-Architecture Levels").
CPU_LEVELS: Final = {
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl avx2 bmi1 bmi2 f16c fma abm movbe",
    "x86-64-v3": "avx2 bmi1 bmi2 f16c fma abm movbe",
}

#: What a GPU computes beside convolutions, by the roots of its libraries.
BESIDE: Final = {"mean": "mean over pixels", "group_norm": "group normalization"}

#: What code that launches a GPU's kernels is compiled for, by the machine.
_ANY_CPU: Final = {"x86_64": "x86-64-v3"}


class Family(NamedTuple):
    """The types that a library is built for, by the package's names."""

    dtype: str
    """Of activation and filter."""
    bias: str
    """Of the bias."""
    output: str
    """Of residual and output."""
    scaled: bool
    """Whether each filter has a factor."""
    depth_to_space: bool = False
    """Whether filters are pixels of a larger image, which the output then is."""

    def for_choice(self) -> Family:
        """Returns the family whose choice of a kernel is this one's: a bias makes no difference."""
        return self._replace(bias="float32")


def host_file(family: Family, level: str | None = None, *, features: int | None = None) -> Path:
    """Returns the library of a CPU's kernels, from the cache or made now.

    Args:
        family: The operands' types.
        level: Of ``CPU_LEVELS``, for those CPUs; by default for this machine's. Then one for a
            level that this CPU has will do, if it is there.
        features: What this machine's CPU multiplies with, a bit for each ``CpuFeature``: the
            library has the kernels that dispatch chooses from there. By default, and of a level, it
            has all. Those of float32 ask a CPU for nothing.

    Raises:
        LibraryError: See ``maxconv.library_path``.
    """
    known: tuple[str, ...] = ()
    if features is not None and family.dtype != "float32":
        known = ("-D", f"features={features}")
    return _of_level("host", family, level, "kernels", known=known)


def chooser_file(family: Family) -> Path:
    """Returns the library that chooses a GPU's kernel, from the cache or made now.

    Raises:
        LibraryError: See ``maxconv.library_path``.
    """
    return _built("choose", family.for_choice(), "choice of a GPU's kernel", *_any_cpu())


def kernel_file(code: Kernel, family: Family, architecture: str) -> Path:
    """Returns the library of a GPU's kernel, from the cache or made now; the GPU need not be here.

    Args:
        code: Which.
        family: The operands' types.
        architecture: What compilers call the GPU: ``sm_90a``.

    Raises:
        LibraryError: See ``maxconv.library_path``.
    """
    options = ("--target-accelerator", architecture, "-D", f"kernel={int(code)}")
    name = code.name.lower()
    what = f"kernel {name} for {architecture}"
    return _built("gpu", family, what, *_any_cpu(), *options, modules=[SOURCE / "kernels" / name])


def beside_file(root: str, dtype: str, architecture: str) -> Path:
    """Returns the library of what a GPU computes beside convolutions, from the cache or made now.

    Args:
        root: Of ``BESIDE``.
        dtype: Of input and output.
        architecture: What compilers call the GPU: ``sm_90a``.

    Raises:
        LibraryError: See ``maxconv.library_path``.
    """
    family = Family(dtype, dtype, dtype, scaled=False)
    what = f"{BESIDE[root]} for {architecture}"
    return _built(root, family, what, *_any_cpu(), "--target-accelerator", architecture)


def peak_file(dtype: str) -> Path:
    """Returns the library of what multiplies a type on this machine's CPU, from the cache or made.

    Args:
        dtype: Of activation and filter.

    Raises:
        LibraryError: See ``maxconv.library_path``.
    """
    return _built("peak", Family(dtype, "float32", dtype, scaled=False), "loop of the peak")


def explain_file(dtype: str, level: str | None = None) -> Path:
    """Returns the library that says which kernel runs where, from the cache or made now.

    Args:
        dtype: Of activation and filter.
        level: As ``host_file`` takes it. A CPU's kernels are then those of that level.

    Raises:
        LibraryError: See ``maxconv.library_path``.
    """
    family = Family(dtype, "float32", dtype, scaled=False)
    doing = f"compiling what maxconv's kernels say of themselves, {dtype}"
    # Nothing of it runs long enough to be worth the compiler's time.
    return _of_level("explain", family, level, "", "-O1", doing=doing)


def rules_file() -> Path:
    """Returns the library of what the tuner asks of kernels, from the cache or made now.

    Raises:
        LibraryError: See ``maxconv.library_path``.
    """
    family = Family("float32", "float32", "float32", scaled=False)
    return _built("tune", family, "", doing="compiling the limits of maxconv's kernels")


def _of_level(
    root: str,
    family: Family,
    level: str | None,
    what: str,
    *options: str,
    known: tuple[str, ...] = (),
    doing: str | None = None,
) -> Path:
    """Returns the library of a root for a level of CPUs, or for this machine's.

    For the latter one of any level that this CPU has serves, if it is there and no other is; and
    one that was compiled without the options that say what is ``known`` of this CPU.
    """
    if level is not None:
        return _built(root, family, what, *options, "--target-cpu", level, doing=doing)
    if find(_file_name(root), _entry(root, family, *options, *known)) is None:
        others = [("--target-cpu", level) for level in _levels()]
        for more in [(), *others] if known else others:
            found = find(_file_name(root), _entry(root, family, *options, *more))
            if found is not None:
                return found
    return _built(root, family, what, *options, *known, doing=doing)


def _any_cpu() -> tuple[str, ...]:
    """Returns the compiler's options for code that launches kernels: nearly any CPU runs it."""
    cpu = _ANY_CPU.get(platform.machine())
    return () if cpu is None else ("--target-cpu", cpu)


def _built(
    root: str,
    family: Family,
    what: str,
    *options: str,
    modules: Sequence[Path] = (),
    doing: str | None = None,
) -> Path:
    """Returns the library of a root of ``SOURCE``, from the cache or made now.

    It is for this machine's CPU, unless the options name another.

    Args:
        root: The file's name.
        family: The operands' types.
        what: It is, for who waits.
        options: Of the compiler.
        modules: Folders of what the root imports beside the packages; the options tell one from
            another.
        doing: What is told meanwhile; by default that ``what`` is compiled for PyTorch.
    """
    defines = [part for pair in family._asdict().items() for part in ("-D", "{}={}".format(*pair))]
    includes = [part for folder in (SOURCE.parent, *modules) for part in ("-I", str(folder))]
    command = ("build", "--emit", "shared-lib", *includes, *options, *defines)

    def make(file: Path) -> None:
        run_or_raise(SOURCE, file, *command, str(SOURCE / f"{root}.mojo"))

    doing = doing or f"compiling maxconv's {what} for PyTorch, {family.dtype}"
    return cached(_file_name(root), _entry(root, family, *options), make, doing)


def _file_name(root: str) -> str:
    return f"libmaxconv_{root}{SUFFIX}"


def _entry(root: str, family: Family, *options: str) -> Callable[[], str]:
    """Returns what names a library's entry in the cache."""
    cpu = platform.machine() if "--target-cpu" in options else _host_cpu()
    of = f"{root} {family} {cpu} {' '.join(options)}"
    return functools.partial(fingerprint, OPERATIONS, SOURCE, of=of)


@functools.cache
def _processor() -> tuple[str, ...]:
    """Returns what Linux says of the first processor, a line a fact."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return ()
    return tuple(cpuinfo.read_text(errors="replace").split("\n\n")[0].splitlines())


def _levels() -> list[str]:
    """Returns the levels that this machine's CPU has, the fastest code first."""
    flags = {flag for line in _processor() if line.startswith("flags") for flag in line.split()}
    return [level for level, needed in CPU_LEVELS.items() if flags.issuperset(needed.split())]


@functools.cache
def _host_cpu() -> str:
    """Returns a name that two CPUs share only if code for one runs on the other."""
    kinds = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
    facts = [line for line in _processor() if line.startswith(kinds) and "MHz" not in line]
    described = "".join((platform.machine(), platform.processor(), *facts))
    return hashlib.sha256(described.encode()).hexdigest()[:16]
