"""Graphs that test files declare, so that those of all files are compiled together.

A graph takes MAX half a minute to compile, most of it the same for all. A file names its graphs in
``GRAPHS`` and takes them compiled from the fixture ``models``; running one file compiles only its
own. Files about ``override_max`` have ``OVERRIDDEN`` and the fixture ``overridden``: they run in
another process. Extended tests take theirs from ``EXTENDED``, by the fixture ``further_models``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from max.engine import InferenceSession, Model
    from max.graph import Graph, Module


@dataclass(frozen=True)
class Source:
    """How a graph is made."""

    build: Callable[[str, Module], Graph]
    """Makes it, of the name and in the module that it is given."""
    weights: Callable[[], Mapping[str, Any]] = dict
    """Returns its weights, by names that no other graph has."""


def input_type(shape: tuple[int | str, ...], kind: str = "float32") -> Any:
    """The type of a tensor in a CPU's memory."""
    from max.dtype import DType
    from max.graph import DeviceRef, TensorType

    return TensorType(DType[kind], shape, DeviceRef.CPU())


def compile_together(session: InferenceSession, sources: Mapping[str, Source]) -> dict[str, Model]:
    """Compiles graphs in one go; returns them by name."""
    from max.graph import Module

    from maxconv._library import library_path

    module = Module()
    weights: dict[str, Any] = {}
    for name, source in sources.items():
        source.build(name, module)
        own = source.weights()
        assert weights.keys().isdisjoint(own), name
        weights |= own
    return session.load_all(module, custom_extensions=[library_path()], weights_registry=weights)


def declared(files: Iterable[Any], under: str = "GRAPHS") -> dict[str, Source]:
    """Returns the graphs that some test files declare, by name.

    Args:
        files: The modules.
        under: What holds a file's graphs.
    """
    sources: dict[str, Source] = {}
    for file in dict.fromkeys(files):
        graphs: Mapping[str, Source] = getattr(file, under, {})
        assert sources.keys().isdisjoint(graphs), file
        sources |= graphs
    return sources
