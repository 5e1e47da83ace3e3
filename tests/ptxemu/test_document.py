"""docs/ptxemu.md: its programs run, and it names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.documents import ROOT, Block, blocks

import ptxemu
from ptxemu._run.schema import SCHEMA

DOCUMENT = ROOT / "docs" / "ptxemu.md"
PROGRAMS = [block for block in blocks(DOCUMENT) if block.language == "python"]


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_the_programs_run(block: Block) -> None:
    source = "\n" * (block.line - 1) + block.text
    exec(compile(source, str(DOCUMENT), "exec"), {"__name__": "__main__"})


def test_there_is_a_program() -> None:
    assert PROGRAMS
    assert all(block.not_run is None for block in PROGRAMS)


def test_every_error_is_told() -> None:
    text = DOCUMENT.read_text()
    errors = {name for name in ptxemu.__all__ if name.endswith("Error")}
    # The base of all, and those of texts that do not run.
    shown = errors - {"EmulatorError", "PtxSyntaxError", "UnsupportedError"}
    assert shown == {name for name in re.findall(r"`(\w+Error)`", text) if name != "EmulatorError"}


def test_every_field_of_a_description_is_told() -> None:
    text = DOCUMENT.read_text()
    assert all(f"`{name}`" in text for name in SCHEMA["properties"])


def test_every_folder_and_file_is_told() -> None:
    text = DOCUMENT.read_text()
    root = Path(ptxemu.__file__).parent
    folders = {f"`{path.parent.name}/`" for path in root.glob("*/__init__.py")}
    files = {f"`{path.name}`" for path in root.glob("*.py") if not path.stem.startswith("__")}
    assert "`_warps/`" in folders
    assert "`_machine.py`" in files
    assert not [name for name in folders | files if name not in text]
