"""The models that ``--models`` knows, and how one is built; ``models.yaml`` lists them."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "ALL",
    "MODELS",
    "Catalogue",
    "Source",
    "build",
    "check_installed",
    "load_catalogue",
    "resolve",
    "select",
]

#: The file with the list.
MODELS = Path(__file__).parent / "models.yaml"

#: What ``--models`` takes for all that have batches for the device.
ALL = "all"

_REQUIRED = frozenset({"make", "inputs", "batches"})
_OPTIONAL = frozenset({"arguments", "config", "part", "reference"})
_REFERENCES = ("float64", "float32")


@dataclass(frozen=True)
class Source:
    """A model of the list; ``models.yaml`` says what the fields mean."""

    name: str
    make: str
    inputs: tuple[tuple[int, ...] | int, ...]
    batches: Mapping[str, tuple[int, ...]]
    arguments: Mapping[str, Any]
    config: str | None = None
    part: str | None = None
    reference: str = _REFERENCES[0]

    @property
    def library(self) -> str:
        """The package that its constructor comes from."""
        return self.make.partition(".")[0]


@dataclass(frozen=True)
class Catalogue:
    """The list."""

    models: Mapping[str, Source]
    default: Mapping[str, tuple[str, ...]]
    """By device, what ``--models`` alone times."""
    libraries: Mapping[str, str]
    """What pip calls each library."""


def load_catalogue(path: Path | None = None) -> Catalogue:
    """Returns the list of a file, by default ``MODELS``.

    Raises:
        ValueError: An entry misses a field, has one that is unknown, or has a value that is not
            allowed; the message names the file and the entry.
    """
    path = path or MODELS
    return _parse(path.read_text(encoding="utf-8"), path.name)


@functools.lru_cache(maxsize=4)
def _parse(text: str, file: str) -> Catalogue:
    document = yaml.safe_load(text)
    libraries = document["libraries"]
    models = {name: _source(f"{file}: {name}", name, e) for name, e in document["models"].items()}
    for name, source in models.items():
        if name == ALL:
            raise ValueError(f"{file}: {name}: the name means every model")
        if source.library not in libraries:
            raise ValueError(f"{file}: {name}: {source.library!r} does not stand under libraries")
    default = {device: tuple(names) for device, names in document["default"].items()}
    for device, names in default.items():
        for name in names:
            if name not in models or not models[name].batches.get(device):
                raise ValueError(f"{file}: default: {name!r} has no batches for a {device}")
    return Catalogue(MappingProxyType(models), default, libraries)


def _source(where: str, name: str, entry: Mapping[str, Any]) -> Source:
    if missing := _REQUIRED.difference(entry):
        raise ValueError(f"{where}: misses {', '.join(sorted(missing))}")
    if unknown := set(entry) - _REQUIRED - _OPTIONAL:
        raise ValueError(f"{where}: {', '.join(sorted(unknown))} is no field of a model")
    if entry.get("reference", _REFERENCES[0]) not in _REFERENCES:
        raise ValueError(
            f"{where}: reference: {entry['reference']!r} is not one; {', '.join(_REFERENCES)} are "
            "allowed"
        )
    fields = {
        **entry,
        "inputs": tuple(_input(where, value) for value in entry["inputs"]),
        "batches": {key: tuple(sizes) for key, sizes in entry["batches"].items()},
        "arguments": entry.get("arguments", {}),
    }
    return Source(name=name, **fields)


def _input(where: str, value: Any) -> tuple[int, ...] | int:
    sizes: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"{where}: inputs: {value!r} is no shape; positive whole numbers are")
    return tuple(sizes) if isinstance(value, list) else int(value)


def select(names: Sequence[str], device: str, batches: Sequence[int] = ()) -> list[Source]:
    """Returns models in the order of the list.

    Args:
        names: Of models, or ``all``; empty for the default of the device.
        device: ``cpu`` or ``gpu``.
        batches: Those of the command line, which take the place of the list's.

    Raises:
        ValueError: A name does not exist, or a model has no batch for the device.
    """
    catalogue = load_catalogue()
    models = catalogue.models
    for name in names:
        if name not in models and name != ALL:
            near = difflib.get_close_matches(name, models, n=3)
            raise ValueError(
                f"models: {name!r} is no model of the list; "
                + (f"near it: {', '.join(near)}; " if near else "")
                + "--list shows all"
            )
        if name in models and not batches and not models[name].batches.get(device):
            raise ValueError(f"models: {name} has no batches for a {device}; give --batch")
    chosen = set(names or catalogue.default[device])
    if ALL in chosen:
        chosen |= {name for name, source in models.items() if source.batches.get(device)}
    return [source for name, source in models.items() if name in chosen]


def check_installed(sources: Iterable[Source]) -> None:
    """Checks that the libraries of models are there.

    Raises:
        ValueError: One is not; the message names the models that need it, and what to install.
    """
    libraries = load_catalogue().libraries
    wanted: dict[str, list[str]] = {}
    for source in sources:
        wanted.setdefault(source.library, []).append(source.name)
    for library, names in wanted.items():
        if importlib.util.find_spec(library) is None:
            raise ValueError(
                f"models: {', '.join(names)}: {library} is not installed; "
                f"pip install {libraries[library]}, or pip install 'maxconv[models]' for all"
            )


def resolve(path: str) -> Callable[..., Any]:
    """Returns what a dotted path such as ``timm.create_model`` names.

    Raises:
        ValueError: It does not import, or names nothing; the message says why.
    """
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    # An extension that was built for another torch raises what it likes.
    except Exception as error:
        raise ValueError(f"{path} is not to be had here: {error}") from error
    return found


def build(source: Source) -> nn.Module:
    """Returns a model in eval mode with the random weights that its library draws.

    Raises:
        ValueError: See ``resolve``.
    """
    import torch

    torch.manual_seed(0)
    make = resolve(source.make)
    if source.config is None:
        model = make(**source.arguments)
    else:
        model = make(resolve(source.config)(**source.arguments))
    part: nn.Module = getattr(model, source.part) if source.part else model
    return part.eval()
