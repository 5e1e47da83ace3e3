"""Who imports whom among the Python and Mojo modules, read from their sources.

Imports that only a type checker follows count, and so do those inside functions: a reader follows
them all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from tests.documents import ROOT

PYTHON = ROOT / "python"
OPERATIONS = ROOT / "operations"
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


# The Mojo package. An area is a folder, or the modules of ``nvidia`` that its kernels share.

_MOJO_IMPORT = re.compile(
    r"^[ \t]*from[ \t]+(?P<dots>\.*)(?P<name>[\w.]*)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n]*)",
    re.MULTILINE,
)
_STRING = re.compile(r'"""[\s\S]*?"""')

#: The module that knows every kernel.
LISTS = {"nvidia.registry"}

#: The areas from which each may import besides itself. Top modules (registrations, explain) import
#: what they like.
_SHARED = {"conv", "nvidia", "nvidia.tma", "nvidia.pipeline", "nvidia.im2col", "nvidia.epilogue"}
_HOPPER = _SHARED | {"nvidia.sm90"}
MAY_IMPORT = {
    "conv": set[str](),
    "cpu": {"conv"},
    # What all GPUs share, from the bottom up.
    "nvidia": {"conv"},
    "nvidia.tma": {"conv", "nvidia"},
    "nvidia.pipeline": {"conv", "nvidia", "nvidia.tma"},
    "nvidia.im2col": {"conv", "nvidia", "nvidia.tma", "nvidia.pipeline"},
    "nvidia.epilogue": _SHARED,
    # Kernels, which do not import each other.
    "nvidia.generic": _SHARED,
    "nvidia.few_filters": _SHARED,
    "nvidia.sm80": _SHARED,
    "nvidia.sm90": _SHARED,
    "nvidia.sm90.gemm": _HOPPER,
    "nvidia.sm90.diagonal": _HOPPER,
    "nvidia.sm90.stem": _HOPPER,
    "nvidia.sm90.window": _HOPPER,
    "nvidia.sm100": _SHARED,
}

#: The only import that closes a circle: a visitor's ``then`` returns a chain, which is a visitor.
BACKWARDS = {("nvidia.epilogue.callbacks", "nvidia.epilogue.chain")}


def mojo_modules(root: Path = OPERATIONS) -> dict[str, Path]:
    """The modules of a Mojo package, by their names in it; a package is named by its folder."""
    found = {}
    for path in sorted(root.rglob("*.mojo")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def mojo_graph(found: Mapping[str, Path], package: str = "operations") -> Graph:
    """The modules of a Mojo package that each of them imports."""
    edges: dict[str, set[str]] = {}
    for name, path in found.items():
        edges[name] = set()
        own = name.split(".") if name else []
        inside = own if path.name == "__init__.mojo" else own[:-1]
        for match in _MOJO_IMPORT.finditer(_STRING.sub("", path.read_text(encoding="utf-8"))):
            above, taken = len(match["dots"]), match["name"].split(".") if match["name"] else []
            if above:
                source = [*inside[: len(inside) - above + 1], *taken]
            elif taken[0] == package:
                source = taken[1:]
            else:
                continue
            names = re.findall(r"\w+", re.sub(r"\bas\s+\w+|#.*", "", match["names"]))
            whole = {".".join([*source, entry]) for entry in names} & found.keys()
            edges[name] |= (whole or {".".join(source)}) - {name}
    return edges


def area(module: str) -> str:
    """The area of a module; empty for a top module."""
    folder, _, _ = module.rpartition(".")
    inside = [known for known in MAY_IMPORT if f"{module}.".startswith(f"{known}.")]
    return max(inside, key=len, default=folder)


def broken_rules(edges: Graph) -> set[tuple[str, str]]:
    """The imports that no rule allows."""
    broken = set()
    for name, targets in edges.items():
        for target in targets:
            own, other = area(name), area(target)
            of_all = name in LISTS and other.startswith(("conv", "nvidia"))
            # A convolution is planned and launched by what the lists hold.
            of_list = target in LISTS and name == "nvidia.convolve"
            if not own or (own == other and target not in LISTS) or of_all or of_list:
                continue
            if target in LISTS or other not in MAY_IMPORT[own]:
                broken.add((name, target))
    return broken


def test_the_mojo_imports_are_read() -> None:
    edges = mojo_graph(mojo_modules())
    assert len(edges) > 100
    assert {source.suffix for source in mojo_modules().values()} == {".mojo"}
    unknown = {target for targets in edges.values() for target in targets} - edges.keys()
    assert not unknown
    assert "conv.target" in edges["registrations"]
    assert edges["nvidia.registry"] >= {"nvidia.sm90.gemm.launch", "nvidia.sm100.launch"}


def test_every_mojo_folder_has_a_rule() -> None:
    folders = {area(name) for name, path in mojo_modules().items() if path.stem != "__init__"}
    assert folders - {""} == MAY_IMPORT.keys()


def test_mojo_modules_import_what_is_below_them() -> None:
    assert not broken_rules(mojo_graph(mojo_modules()))


def test_the_mojo_package_has_no_circle_of_imports() -> None:
    edges = {name: set(targets) for name, targets in mojo_graph(mojo_modules()).items()}
    for name, target in BACKWARDS:
        edges[name].remove(target)
    assert not circle(edges)
    for name, target in BACKWARDS:
        assert circle({**edges, name: edges[name] | {target}}), f"{name} is below {target} now"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("conv.problem", "from ..cpu.kernel import x"),
        ("conv.problem", "from operations.nvidia.limits import x"),
        ("cpu.gemm.launch", "from ...nvidia.stream import x"),
        ("nvidia.stream", "from .sm100.launch import x"),
        ("nvidia.tma.copy", "def late():\n    from ..sm90.wgmma import x"),
        ("nvidia.im2col.tiles", "from ..epilogue.layout import x"),
        ("nvidia.epilogue.steps", "from ..sm90.gemm.config import (\n    x,\n    y as z,\n)"),
        ("nvidia.epilogue.steps", "from ..registry import x"),
        ("nvidia.generic.grouped", "from ..sm90.wgmma import x"),
        ("nvidia.sm90.stem.kernel", "from ..gemm import config"),
        ("nvidia.sm90.gemm.kernel", "from ...sm100.mma import x"),
        ("nvidia.sm90.wgmma", "from .gemm.mma import x"),
        ("nvidia.sm100.kernel", "from ..generic.rows import x"),
    ],
)
def test_a_forbidden_mojo_import_is_seen(tmp_path: Path, module: str, line: str) -> None:
    path = tmp_path.joinpath(*module.split(".")).with_suffix(".mojo")
    path.parent.mkdir(parents=True)
    path.write_text(f'"""from ..conv.fields import not_this\n"""\n\n{line}\n')
    if line.endswith("config"):
        other = path.parent.parent / "gemm" / "config.mojo"
        other.parent.mkdir()
        other.touch()
    found = broken_rules({module: mojo_graph(mojo_modules(tmp_path))[module]})
    assert len(found) == 1
    path.write_text("from std.utils import IndexList\n")
    assert not broken_rules(mojo_graph(mojo_modules(tmp_path)))


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by these alone: of two with one name it collects one."""
    files = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert sorted(files) == sorted(set(files))
