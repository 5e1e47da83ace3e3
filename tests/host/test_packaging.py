"""The wheel, an sdist's wheel and an editable installation carry what the package needs."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tests.documents import ROOT

from maxconv._version import __version__

CALL = "import sys, hatchling.build as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def build(what: str, tree: Path, out: Path) -> Path:
    """Calls the build backend as pip does, but in this environment: nothing is downloaded."""
    command = [sys.executable, "-c", CALL, what, str(out)]
    built = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return out / built.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the sources as git would give it: links as links, nothing that was made."""
    copy = tmp_path_factory.mktemp("tree") / "maxconv"
    names = ("__pycache__", ".git", ".*_cache", ".hypothesis", "dist", "build", "venv", ".venv")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*names))
    (copy / "graphs" / "__pycache__").mkdir()
    (copy / "graphs" / "__pycache__" / "denoise.cpython-311.pyc").touch()
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(build("build_wheel", tree, tmp_path_factory.mktemp("wheel")))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_kernels_graphs_and_types(tree: Path, wheel: dict[str, bytes]) -> None:
    for folder, patterns in {
        "operations": ["*.mojo"],
        "library": ["*.mojo"],
        "graphs": ["*.py", "*.npz", "*.png"],
    }.items():
        for pattern in patterns:
            files = list((tree / folder).rglob(pattern))
            assert files
            for file in files:
                name = f"maxconv/{file.relative_to(tree).as_posix()}"
                assert wheel[name] == file.read_bytes()
    for name in ("problems.yaml", "networks.yaml"):
        assert wheel[f"maxconv/{name}"] == (tree / "tests" / name).read_bytes()
    listed = "maxconv/bench/models/models.yaml"
    assert wheel[listed] == (tree / "python" / listed).read_bytes()
    for package in ("maxconv", "ptxemu"):
        assert f"{package}/py.typed" in wheel
        files = list((tree / "python" / package).rglob("*.py"))
        assert files
        for file in files:
            assert wheel[file.relative_to(tree / "python").as_posix()] == file.read_bytes()
    example = tree / "python" / "ptxemu" / "example"
    assert {file.name for file in example.iterdir()} == {"ring.json", "ring.ptx"}
    for file in example.iterdir():
        assert wheel[f"ptxemu/example/{file.name}"] == file.read_bytes()


def test_the_wheel_has_nothing_else(wheel: dict[str, bytes]) -> None:
    assert {name.split("/")[0] for name in wheel} == {
        "maxconv",
        "ptxemu",
        f"maxconv-{__version__}.dist-info",
    }
    assert not [name for name in wheel if "__pycache__" in name or name.endswith(".mojoc")]
    licences = [name for name in wheel if name.endswith("licenses/LICENSE")]
    assert [wheel[name] for name in licences] == [(ROOT / "LICENSE").read_bytes()]


def test_the_metadata(wheel: dict[str, bytes]) -> None:
    info = f"maxconv-{__version__}.dist-info"
    metadata = wheel[f"{info}/METADATA"].decode()
    for line in ("Name: maxconv", f"Version: {__version__}", "License-Expression: Apache-2.0"):
        assert f"{line}\n" in metadata
    assert "Requires-Python: <3.14,>=3.10\n" in metadata
    entry_points = wheel[f"{info}/entry_points.txt"].decode()
    assert "maxconv = maxconv._cli:main" in entry_points
    assert "ptxemu = ptxemu.cli:main" in entry_points


def test_an_sdists_wheel_is_the_same(tree: Path, wheel: dict[str, bytes], tmp_path: Path) -> None:
    sdist = build("build_sdist", tree, tmp_path)
    with tarfile.open(sdist) as archive:
        # Pythons older than 3.10.12 and 3.11.4 know no filters.
        if hasattr(tarfile, "data_filter"):
            archive.extractall(tmp_path, filter="data")
        else:
            archive.extractall(tmp_path)
    unpacked = tmp_path / f"maxconv-{__version__}"
    assert (unpacked / ".ci" / "run").stat().st_mode & 0o100
    (tmp_path / "out").mkdir()
    again = contents(build("build_wheel", unpacked, tmp_path / "out"))
    record = f"maxconv-{__version__}.dist-info/RECORD"
    assert {**again, record: b""} == {**wheel, record: b""}


def test_an_editable_installation_uses_the_tree(tree: Path, tmp_path: Path) -> None:
    editable = contents(build("build_editable", tree, tmp_path))
    links = [text.decode() for name, text in editable.items() if name.endswith(".pth")]
    assert {name.split("/")[0] for name in editable if not name.endswith(".pth")} == {
        f"maxconv-{__version__}.dist-info"
    }
    (folder,) = "".join(links).split()
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import maxconv._library as l, ptxemu; "
        "print(l.OPERATIONS, (l.OPERATIONS / '__init__.mojo').is_file(), ptxemu.__file__)"
    )
    # Isolated from PYTHONPATH and the current folder; what is installed comes behind `folder`.
    command = [sys.executable, "-I", "-c", program, folder]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    emulator = tree / "python" / "ptxemu" / "__init__.py"
    assert ended.stdout == f"{tree / 'operations'} True {emulator}\n", ended.stderr
