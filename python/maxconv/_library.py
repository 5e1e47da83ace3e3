"""The Mojo kernels, precompiled once a user and handed to MAX.

``operations/`` ships as source. MAX needs it as one precompiled file, which any graph then loads.
That file is kept in a cache, under a name made of the content of the source and the versions of MAX
and Mojo, so that an upgrade or an edit never meets an old one. It does not depend on the CPU: it
holds Mojo code before its elaboration.

The cache is ``$MAXCONV_CACHE_DIR/maxconv``, else ``$XDG_CACHE_HOME/maxconv``, else
``~/.cache/maxconv``. What is in it runs with the user's rights, so it is theirs alone (mode 0700).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ._progress import progress

if TYPE_CHECKING:
    from max.graph import KernelLibrary

__all__ = [
    "OPERATIONS",
    "CacheState",
    "LibraryError",
    "cache_dir",
    "cache_state",
    "cached",
    "compiler_version",
    "find",
    "fingerprint",
    "kernel_library",
    "library_path",
    "max_version",
    "mojo_version",
    "run_mojo",
    "run_or_raise",
]

#: The Mojo package with the kernels, as source: for ``custom_extensions=[...]``, and for ``-I`` of
#: Mojo programs that use its parts.
OPERATIONS = (Path(__file__).parent / "operations").resolve()

# Mojo takes a package's name from its file's name, and MAX loads no two of one name in one graph.
_FILE_NAME = "maxconv.mojoc"
# Beside the entries: what a writer has not finished, and the entries' locks.
_STAGING_PREFIX = ".staging-"
_LOCKS = ".locks"
# What made the last entry: a machine that has a cache and no compiler finds entries by it.
_COMPILER = ".compiler"
_UNUSED_S = 30 * 24 * 3600.0
_ABANDONED_S = 24 * 3600.0


class LibraryError(RuntimeError):
    """The kernels could not be precompiled, or the cache cannot be used; the message says why."""


@dataclass(frozen=True)
class CacheState:
    """What the cache holds.

    ``entry`` is the file that the installed source and versions map to, ``compiled`` whether it is
    there; ``entries`` and ``size`` (bytes) count what is there for any source and version.
    """

    directory: Path
    entry: Path
    compiled: bool
    entries: int
    size: int


def kernel_library() -> KernelLibrary:
    """Returns a kernel library with the ``maxconv`` ops, for ``Graph(..., kernel_library=...)``.

    The first call of a user after an installation precompiles the kernels, which takes seconds;
    several processes may do so at once. Each call returns a library of its own, so that what a
    graph adds to it stays with that graph.

    Raises:
        LibraryError: See ``library_path``.
    """
    from max.graph import KernelLibrary

    return KernelLibrary([library_path()])


def library_path() -> Path:
    """Returns the precompiled kernels (``.mojoc``), and makes them where they are missing.

    ``custom_extensions=`` takes them, as it takes ``OPERATIONS``, their source, which MAX compiles
    anew for each graph.

    Raises:
        LibraryError: Mojo is missing or rejects the source (the message holds its output), or the
            cache cannot be written or belongs to another user.
    """
    return precompiled(OPERATIONS)


def precompiled(source: Path) -> Path:
    """Returns the precompiled form of a Mojo package's source, from the cache or made now.

    Args:
        source: A folder with an ``__init__.mojo``. It is only read.

    Raises:
        LibraryError: See ``library_path``.
    """

    def make(file: Path) -> None:
        run_or_raise(source, file, "precompile", str(source))

    name = functools.partial(fingerprint, source)
    return cached(_FILE_NAME, name, make, "compiling maxconv's Mojo kernels")


def find(file_name: str, fingerprint: Callable[[], str]) -> Path | None:
    """Returns a file of the cache, if it is there.

    Args:
        file_name: What it is called in the entry's folder.
        fingerprint: Names everything that the file depends on.

    Raises:
        LibraryError: The cache cannot be used, or belongs to another user.
    """
    entry = _private_directory(cache_dir()) / fingerprint() / file_name
    if not entry.is_file():
        return None
    # Says that the entry is in use; in a read-only cache nothing is ever removed.
    with contextlib.suppress(OSError):
        os.utime(entry)
    return entry


def cached(
    file_name: str, fingerprint: Callable[[], str], make: Callable[[Path], None], doing: str
) -> Path:
    """Returns a file of the cache; of processes that miss it at once, one makes it.

    Args:
        file_name: What it is called in the entry's folder.
        fingerprint: Names everything that the file depends on. It is asked again once the file is
            made: what was edited meanwhile belongs under another name.
        make: Writes the file.
        doing: What whoever waits is told.

    Raises:
        LibraryError: ``make`` raised it, or the cache cannot be written or belongs to another user.
    """
    entry = find(file_name, fingerprint)
    if entry is not None:
        return entry
    directory = cache_dir()
    with progress(doing, announce=bool(os.environ.get("MAXCONV_PROGRESS"))):
        try:
            return _make_entry(directory, file_name, fingerprint, make)
        except OSError as error:
            raise LibraryError(
                f"{doing}: the kernels' cache {directory} cannot be written ({error}); set "
                "MAXCONV_CACHE_DIR to a folder that can, or fill it with 'maxconv build'"
            ) from error


def cache_dir() -> Path:
    """Returns the folder of the precompiled kernels, whether it exists or not.

    Raises:
        LibraryError: The user has no home folder and no variable names another one.
    """
    if base := os.environ.get("MAXCONV_CACHE_DIR"):
        return Path(base).absolute() / "maxconv"
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    if os.path.isabs(base):
        return Path(base) / "maxconv"
    try:
        return Path.home() / ".cache" / "maxconv"
    except RuntimeError as error:
        raise LibraryError(
            f"no folder for the kernels' cache ({error}); set MAXCONV_CACHE_DIR to one"
        ) from error


def cache_state() -> CacheState:
    """Returns what the cache holds, and changes nothing.

    Raises:
        LibraryError: See ``cache_dir``.
    """
    directory = cache_dir()
    files = list(directory.glob(f"*/{_FILE_NAME}")) if os.access(directory, os.R_OK) else []
    entry = _entry(directory, OPERATIONS)
    return CacheState(
        directory=directory,
        entry=entry,
        compiled=entry in files,
        entries=len(files),
        size=sum(file.stat().st_size for file in files),
    )


@functools.cache
def max_version() -> str:
    """Returns the version of MAX."""
    try:
        return importlib.metadata.version("max")
    except importlib.metadata.PackageNotFoundError:
        # A conda package need not carry Python's metadata.
        from max.engine import __version__ as version

        return str(version)


@functools.cache
def mojo_version() -> str:
    """Returns the version of the Mojo compiler.

    Raises:
        LibraryError: There is no Mojo in this environment.
    """
    try:
        return importlib.metadata.version("mojo")
    except importlib.metadata.PackageNotFoundError:
        # A conda package need not carry Python's metadata; the compiler prints "Mojo 1.2.0 (...)".
        finished = run_mojo("--version")
        output = finished.stdout.split()
        if finished.returncode or not output:
            raise LibraryError(
                "the Mojo compiler of this environment does not tell its version: mojo --version "
                f"ends with {finished.returncode} and {finished.stderr.strip()!r}"
            ) from None
        return output[1] if len(output) > 1 else output[0]


def run_mojo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the compiler of this very environment, which need not be activated."""
    try:
        from mojo.run import subprocess_run_mojo

        finished: subprocess.CompletedProcess[str] = subprocess_run_mojo(
            list(arguments), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
    except (ImportError, RuntimeError, FileNotFoundError) as error:
        raise LibraryError(
            f"the Mojo compiler is missing from this environment ({error}); "
            "install the versions of MAX and Mojo that maxconv names"
        ) from error
    return finished


def _entry(directory: Path, source: Path) -> Path:
    """Returns where the cache keeps this source's precompiled form."""
    return directory / fingerprint(source) / _FILE_NAME


def fingerprint(*sources: Path, of: str = "") -> str:
    """Returns a name for what the compiler would read: the source, MAX and Mojo.

    Args:
        sources: Folders of Mojo files; the first is a package.
        of: What else the file depends on.

    Raises:
        LibraryError: The first folder has no ``__init__.mojo``, or there is no Mojo.
    """
    if not (sources[0] / "__init__.mojo").is_file():
        raise LibraryError(f"{sources[0]} is no Mojo package: it has no __init__.mojo")
    digest = hashlib.sha256(f"max {max_version()} mojo {compiler_version()}{of}\n".encode())
    for source in sources:
        files = {file.relative_to(source).as_posix(): file for file in source.rglob("*.mojo")}
        for name in sorted(files):
            content = files[name].read_bytes()
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()[:32]


def compiler_version() -> str:
    """Returns the version of the compiler, of the one that filled the cache if there is none.

    Raises:
        LibraryError: There is none, and no cache.
    """
    try:
        return mojo_version()
    except LibraryError:
        with contextlib.suppress(OSError):
            return (cache_dir() / _COMPILER).read_text(encoding="utf-8")
        raise


def run_or_raise(source: Path, file: Path, *arguments: str) -> None:
    """Has Mojo write a file.

    Raises:
        LibraryError: It did not; the message holds its output.
    """
    finished = run_mojo(*arguments, "-o", str(file))
    if finished.returncode or not file.is_file():
        raise LibraryError(
            f"Mojo {mojo_version()} could not compile {source}:\n"
            f"{finished.stdout}{finished.stderr}".rstrip()
        )


def _make_entry(
    directory: Path, file_name: str, fingerprint: Callable[[], str], make: Callable[[Path], None]
) -> Path:
    while True:
        name = fingerprint()
        entry = directory / name / file_name
        # Of an entry, not of the cache: two libraries may be built side by side.
        with _lock(directory, name):
            _sweep(directory, name)
            # Another process may have made it while this one waited.
            if entry.is_file():
                return entry
            staging = Path(tempfile.mkdtemp(prefix=f"{_STAGING_PREFIX}{name}-", dir=directory))
            try:
                made = staging / file_name
                make(made)
                if fingerprint() == name:
                    _publish(made, entry)
                    compiler = staging / _COMPILER
                    compiler.write_text(mojo_version(), encoding="utf-8")
                    os.replace(compiler, directory / _COMPILER)
                    return entry
            finally:
                shutil.rmtree(staging, ignore_errors=True)


def _publish(made: Path, entry: Path) -> None:
    """Moves a finished file to its place in one step: readers see all of it, or none."""
    with made.open("rb") as stream:
        os.fsync(stream.fileno())
    entry.parent.mkdir(mode=0o700, exist_ok=True)
    os.replace(made, entry)


@contextlib.contextmanager
def _lock(directory: Path, name: str) -> Iterator[None]:
    """Lets one thread of one process at a time write an entry.

    The system lets go of the lock of one that dies.
    """
    locks = directory / _LOCKS
    locks.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(directory: Path, name: str) -> None:
    """Removes what killed writers left, and entries that nothing used for a month.

    A writer of this entry is dead, or it would hold the lock; one of another entry may work.
    """
    now = time.time()
    for leftover in directory.glob(f"{_STAGING_PREFIX}*"):
        dead = leftover.name.startswith(f"{_STAGING_PREFIX}{name}-")
        if dead or _age(leftover, now) > _ABANDONED_S:
            shutil.rmtree(leftover, ignore_errors=True)
    for entry in directory.glob("[!.]*/*"):
        if _age(entry, now) > _UNUSED_S:
            shutil.rmtree(entry.parent, ignore_errors=True)


def _age(path: Path, now: float) -> float:
    """Returns for how many seconds nothing changed a file; one that is gone is new."""
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _private_directory(directory: Path) -> Path:
    """Makes the cache's folder, for this user alone, or refuses one that others may change.

    A folder of root's is accepted as it stands: a system's image may carry a filled cache.

    Raises:
        LibraryError: The folder cannot be made, belongs to another user, or lies where another
            user could replace it.
    """
    remedy = "set MAXCONV_CACHE_DIR to a folder of your own"
    trusted = (os.geteuid(), 0)
    try:
        # The parents keep the user's usual permissions: they are no folders of maxconv.
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.stat()
        owners = {status.st_uid, directory.lstat().st_uid}
        if strangers := owners.difference(trusted):
            raise LibraryError(
                f"the kernels' cache {directory} belongs to user {strangers.pop()}, "
                f"not to user {trusted[0]}; {remedy}"
            )
        if status.st_uid == trusted[0] and status.st_mode & 0o077:
            directory.chmod(0o700)
        parent = directory.parent.stat().st_mode
        if directory.stat().st_mode & 0o022 or (
            parent & stat.S_IWOTH and not parent & stat.S_ISVTX
        ):
            raise LibraryError(f"every user may change the kernels' cache {directory}; {remedy}")
    except OSError as error:
        raise LibraryError(
            f"the kernels' cache {directory} cannot be used ({error}); {remedy}"
        ) from error
    return directory
