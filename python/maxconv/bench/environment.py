"""Where a benchmark runs: the machine, the versions, the checkout, the children's environment."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import maxconv
from maxconv._machine import cpu_features, cpu_model

__all__ = [
    "Checkout",
    "Machine",
    "checkout",
    "child_environment",
    "driver_version",
    "machine",
    "slug",
    "source_digest",
    "usable_threads",
    "versions",
]

_DISTRIBUTIONS = {
    "max": "max",
    "mojo": "mojo",
    "torch": "torch",
    "cudnn": "nvidia-cudnn-cu13",
    "cudnn_frontend": "nvidia-cudnn-frontend",
    "triton": "triton",
    "numpy": "numpy",
}


@dataclass(frozen=True)
class Machine:
    """What of a machine decides its figures."""

    cpu: str
    """The processor's name."""
    features: tuple[str, ...]
    """Instruction sets that matter to a convolution."""
    cpus: int
    """Logical processors of the machine."""
    system: str
    """Operating system and release."""
    load: float | None
    """Average number of running processes in the minute before: 0 on a quiet machine."""
    threads: int
    """That a contender may use."""
    gpu: str | None = None
    """The GPU's name, where that is measured."""
    driver: str | None = None
    """The GPU's driver."""
    multiprocessors: int | None = None
    """The GPU's."""


@dataclass(frozen=True)
class Checkout:
    """A clone of the repository that this package runs from."""

    root: Path
    commit: str
    modified: bool
    """Whether files differ from the commit."""


def machine() -> Machine:
    """Returns this machine."""
    try:
        load = round(os.getloadavg()[0], 2)
    except OSError:
        load = None
    return Machine(
        cpu=cpu_model(),
        features=cpu_features(),
        cpus=os.cpu_count() or 1,
        system=platform.platform(),
        load=load,
        threads=usable_threads(),
    )


def driver_version() -> str | None:
    """Returns the version of NVIDIA's driver, or ``None`` where the system does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    lines = finished.stdout.split()
    return lines[0] if finished.returncode == 0 and lines else None


def versions() -> dict[str, str | None]:
    """Returns the versions of what decides a figure; ``None`` for what is not installed."""
    found: dict[str, str | None] = {"maxconv": maxconv.__version__}
    for name, distribution in _DISTRIBUTIONS.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "python": platform.python_version()}


def source_digest() -> str:
    """Returns a digest of what the benchmark runs of this package, kernels included."""
    digest = hashlib.sha256()
    package = Path(maxconv.__file__).resolve().parent
    # The kernels' folder is a link in a clone, which a walk does not follow.
    for folder in (package, (package / "operations").resolve()):
        found = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
        for file in sorted(found):
            if file.suffix in (".py", ".mojo", ".yaml"):
                content = file.read_bytes()
                name = file.relative_to(folder).as_posix()
                digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def usable_threads() -> int:
    """Returns how many threads this process may use at once; ``taskset`` sets it on Linux."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def checkout() -> Checkout | None:
    """Returns the clone that this package runs from, or ``None`` where it is installed."""
    package = Path(maxconv.__file__).resolve().parent
    root = package.parents[1]
    # A wheel in an environment inside somebody's repository is no clone of this one.
    if package != root / "python" / "maxconv":
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    return Checkout(root, commit, bool(_git(root, "status", "--porcelain")))


def _git(root: Path, *arguments: str) -> str | None:
    try:
        finished = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return finished.stdout.strip() if finished.returncode == 0 else None


def child_environment() -> dict[str, str]:
    """Returns the environment for a child process that imports this very package."""
    own = str(Path(maxconv.__file__).parents[1])
    path = [own, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def slug(text: str) -> str:
    """Returns a text as a part of a file's name: ``"AMD EPYC 9654"`` is ``"amd-epyc-9654"``."""
    text = re.sub(r"\((?:r|tm|c)\)|\b(?:cpu|processor)\b|@.*", " ", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-") or "unknown"
