"""The GPU kernels compile without a GPU, and `maxconv inspect` says what they take."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from maxconv import cli, inspect
from maxconv.library import LibraryError

THREADS = 256
REGISTERS = 64 * 1024
needs_ptxas = pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas on the path")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, int | None]:
    """Every kernel of float16 for the H100, as PTX."""
    return inspect.emit(tmp_path_factory.mktemp("ptx"), "sm_90a", "float16")


def test_every_kernel_is_there(kernels: dict[Path, int | None]) -> None:
    names = {file.stem.split("-")[0] for file in kernels}
    assert names == {"reference", "implicit_gemm", "grouped", "depthwise", "stem", "sm90"}
    for file in kernels:
        text = file.read_text(encoding="utf-8")
        assert ".target sm_90a" in text
        assert ("wgmma.mma_async" in text) == (file.stem.split("-")[0] in ("stem", "sm90"))


@needs_ptxas
def test_no_kernel_spills_its_sums(kernels: dict[Path, int | None]) -> None:
    for file, shared in kernels.items():
        if file.stem.startswith("sm90"):
            continue  # test_sm90.py looks closer
        found = inspect.assemble(str(shutil.which("ptxas")), "sm_90a", file, shared)
        # Some addresses may wait on the stack; the WIDE tile's sums alone take 128 bytes.
        assert max(found.spill_stores, found.spill_loads, found.stack) <= 32, found
        # Two blocks of the general kernels run on a multiprocessor at once.
        if file.stem.startswith(("implicit_gemm", "grouped")):
            assert found.registers * THREADS * 2 <= REGISTERS, found
            assert shared is not None and shared <= 48 * 1024


@needs_ptxas
def test_other_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", "--target", "sm_80", "--dtype", "fp32", "--kernel", "grouped"]
    assert cli.main(arguments) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:2] == ["kernel", "registers"]
    assert re.fullmatch(r"grouped +\d+ +0 +0 +0 +\d+ +\d+", table[1]), table[1]
    assert cli.main([*arguments[:-1], "sm90"]) == 1
    assert "kernel: sm90 does not exist for sm_80 and float32" in capsys.readouterr().err


@needs_ptxas
def test_blackwell(capsys: pytest.CaptureFixture[str]) -> None:
    """Each configuration takes what the kernel's own test finds."""
    assert cli.main(["inspect", "--target", "sm_100a", "--kernel", "sm100"]) == 0
    _, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    names = [f"sm100-{index}" for index in range(7)]
    assert {row[0] for row in rows} == {*names, "sm100-0-residual", "sm100-1-residual"}
    for _, registers, *spills, _, shared in rows:
        assert int(registers) * THREADS <= REGISTERS
        assert set(spills) == {"0"}
        assert int(shared) == 230400


def test_ptx_goes_to_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", "--kernel", "grouped", "--emit", "ptx", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "grouped.ptx")
    assert ".visible .entry" in (tmp_path / "grouped.ptx").read_text(encoding="utf-8")


def test_without_ptxas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(LibraryError, match="ptxas is not on the path"):
        inspect.find_assembler()
    assert cli.main(["inspect"]) == 1
    assert "ptxas is not on the path, and registers are known" in capsys.readouterr().err
