"""The GPU kernels compile without a GPU, and `maxconv inspect` says what they take."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests import ptx

from maxconv import _cli as cli
from maxconv import _inspect as inspect
from maxconv._library import LibraryError

THREADS = 256
REGISTERS = 64 * 1024
needs_ptxas = pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas on the path")


@dataclass(frozen=True)
class Emission:
    """What ``maxconv inspect --emit ptx`` did."""

    folder: Path
    printed: list[str]

    @property
    def kernels(self) -> list[Path]:
        """The files."""
        return sorted(self.folder.iterdir())


@pytest.fixture(scope="module")
def emission(tmp_path_factory: pytest.TempPathFactory) -> Emission:
    """Every kernel of bfloat16 for the H100."""
    return Emission(*ptx.inspect_once(tmp_path_factory))


@pytest.fixture
def kernels(emission: Emission) -> list[Path]:
    return emission.kernels


def test_every_kernel_is_there(kernels: list[Path]) -> None:
    names = {file.stem.split("-")[0] for file in kernels}
    general = {"reference", "implicit_gemm", "grouped", "depthwise", "gemv", "sm80", "few_filters"}
    assert names == general | {"diagonal", "slabs", "stem", "window", "sm90", "unaligned"}
    wgmma = ("slabs", "stem", "window", "sm90", "unaligned")
    for file in kernels:
        text = file.read_text(encoding="utf-8")
        assert ".target sm_90a" in text
        assert ("wgmma.mma_async" in text) == (file.stem.split("-")[0] in wgmma)


@needs_ptxas
def test_no_kernel_spills_its_sums(kernels: list[Path]) -> None:
    for file in kernels:
        if file.stem.startswith(("sm90", "unaligned", "stem", "depthwise", "diagonal", "gemv")):
            continue  # test_sm90.py and test_gpu_direct.py look closer
        found = inspect.assemble(str(shutil.which("ptxas")), "sm_90a", file, None)
        # Some addresses may wait on the stack; the WIDE tile's sums alone take 128 bytes.
        assert max(found.spill_stores, found.spill_loads, found.stack) <= 32, found
        # Two blocks of the general kernels run on a multiprocessor at once.
        if file.stem.startswith(("implicit_gemm", "grouped")):
            assert found.registers * THREADS * 2 <= REGISTERS, found


@needs_ptxas
@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["fp16", "fp8", "fp32"])
def test_no_type_spills(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The table of each other type: the Hopper kernel as it should be, the others nearly so.

    Of fp32 the outputs are float32 too, as those of the ops.
    """
    assert cli.main(["inspect", "--dtype", dtype]) == 0
    _, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert any(row[0].startswith("sm90-") for row in rows)
    for name, registers, *spills, _, shared in rows:
        most = ptx.may_spill(name) if name.startswith(("sm90", "unaligned")) else 32
        assert max(map(int, spills)) <= most, name
        if name.startswith(("implicit_gemm", "grouped")):
            assert int(registers) * THREADS * 2 <= REGISTERS, name
            assert int(shared) <= 48 * 1024, name


@needs_ptxas
@pytest.mark.extended
def test_other_targets(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", "--target", "sm_80", "--dtype", "fp32", "--kernel", "grouped"]
    assert cli.main(arguments) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:2] == ["kernel", "registers"]
    assert re.fullmatch(r"grouped +\d+ +0 +0 +0 +\d+ +\d+", table[1]), table[1]
    assert int(table[1].split()[-1]) <= 48 * 1024


@needs_ptxas
@pytest.mark.extended
def test_a_kernel_that_the_target_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", "--target", "sm_80", "--dtype", "fp32", "--kernel", "sm90"]
    assert cli.main(arguments) == 1
    assert "kernel: sm90 does not exist for sm_80 and float32" in capsys.readouterr().err


@needs_ptxas
@pytest.mark.extended
def test_blackwell(capsys: pytest.CaptureFixture[str]) -> None:
    """Each configuration takes what the kernel's own test finds."""
    assert cli.main(["inspect", "--target", "sm_100a", "--kernel", "sm100"]) == 0
    _, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    names = [f"sm100-{index}" for index in range(9)]
    assert {row[0] for row in rows} == {*names, "sm100-0-residual", "sm100-1-residual"}
    # What blocks that share a tile exchange does not come out in whole stages.
    shared_bytes = {"sm100-7": 214016, "sm100-8": 222208}
    for name, registers, *spills, _, shared in rows:
        assert int(registers) * THREADS <= REGISTERS
        assert set(spills) == {"0"}
        assert int(shared) == shared_bytes.get(name, 230400)


def test_ptx_goes_to_a_folder(emission: Emission) -> None:
    files = [Path(line) for line in emission.printed]
    assert sorted(files) == emission.kernels
    assert emission.folder / "grouped.ptx" in files
    for file in files:
        assert ".visible .entry" in file.read_text(encoding="utf-8")


def test_without_ptxas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(LibraryError, match="ptxas is not on the path"):
        inspect.find_assembler()
    assert cli.main(["inspect"]) == 1
    assert "ptxas is not on the path, and registers are known" in capsys.readouterr().err
