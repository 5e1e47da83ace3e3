"""Who imports whom among the Python modules, read from their sources.

Imports that only a type checker follows count, and so do those inside functions: a reader follows
them all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from tests.documents import ROOT

PYTHON = ROOT / "python"
Graph = Mapping[str, set[str]]


def modules(package: str, root: Path = PYTHON) -> dict[str, Path]:
    """The modules of a package, by their full names; its links lead to what is no Python of it."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path) -> Iterator[tuple[str, str]]:
    """What a module imports: a module, and the name that is taken from it, if one is."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((entry.name, "") for entry in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((source, entry.name) for entry in node.names)


def graph(found: Mapping[str, Path]) -> Graph:
    """The modules of a package that each of them imports."""
    edges: dict[str, set[str]] = {}
    for name, path in found.items():
        edges[name] = set()
        for source, taken in imported(name, path):
            target = f"{source}.{taken}" if f"{source}.{taken}" in found else source
            if target in found and target != name:
                edges[name].add(target)
    return edges


def circle(edges: Graph) -> list[str]:
    """Modules of which each imports the next; empty if there is no circle."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def others(package: str) -> dict[str, set[str]]:
    """Packages that a package's modules import, with the modules that do."""
    found: dict[str, set[str]] = {}
    for name, path in modules(package).items():
        for source, _ in imported(name, path):
            found.setdefault(source.split(".")[0], set()).add(name)
    return found


def test_ptxemu_has_no_circle_of_imports() -> None:
    edges = graph(modules("ptxemu"))
    assert len(edges) > 50
    assert "ptxemu._warps.paths" in edges["ptxemu._instructions.memory"]
    assert not circle(edges)


def test_ptxemus_folders_have_no_circle_either() -> None:
    """A folder, or a module at the top, imports only what is below it."""
    folders: dict[str, set[str]] = {}
    for name, targets in graph(modules("ptxemu")).items():
        own = ".".join(name.split(".")[:2])
        tops = {".".join(target.split(".")[:2]) for target in targets}
        folders.setdefault(own, set()).update(tops - {own})
    assert not circle(folders)


def test_the_convolutions_and_the_emulator_do_not_import_each_other() -> None:
    of_emulator, of_convolutions = others("ptxemu"), others("maxconv")
    assert "numpy" in of_emulator
    assert "numpy" in of_convolutions
    assert not of_emulator.keys() & {"maxconv", "max", "mojo", "torch"}
    assert "ptxemu" not in of_convolutions


@pytest.mark.parametrize(
    "source",
    [
        "from . import b",
        "from .b import name",
        "import package.b",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.b import name",
        "def late() -> None:\n    from .b import name",
    ],
)
def test_a_circle_is_seen(tmp_path: Path, source: str) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text(source)
    (package / "b.py").write_text("")
    assert not circle(graph(modules("package", tmp_path)))
    (package / "b.py").write_text("from .a import other")
    assert set(circle(graph(modules("package", tmp_path)))) == {"package.a", "package.b"}
