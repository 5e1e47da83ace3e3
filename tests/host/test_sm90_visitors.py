"""Epilogues of visitors compile for the Hopper kernel without a GPU, and refuse what they cannot do
with a sentence: at run time as a reason, at compile time as an error."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from tests import ptx

from maxconv import _library as library

SHARED_BYTES = 227 * 1024
CHAINS = ("scaled", "all", "sums_only")
REASONS = [
    ("sums", "sums over pixels need filters as the multiply's rows: each of a consumer's threads"),
    (
        "auxiliary_type",
        "an auxiliary output of float32 needs filters as the multiply's rows",
    ),
    (
        "auxiliary_filters",
        "an auxiliary output of bfloat16 is stored 16 bytes at a time; here 20 output channels in "
        "each group",
    ),
    ("auxiliary_address", "an auxiliary output begins at a multiple of 16 bytes; here it does not"),
    (
        "room",
        "the epilogue's visitors need 32768 bytes of shared memory, and the configuration leaves "
        "15360",
    ),
    ("residual", "num_epi_load_stages: 0 stages, but there is a residual"),
    ("no_residual", "nothing"),
    ("none", "nothing"),
    ("scale", "epilogue: has_scale is False, but the kernel was compiled with scaled=True"),
    ("scale", "epilogue: has_scale is True, but the kernel was compiled with scaled=False"),
]

#: Functions of ``misuse_visitors.mojo`` that must not compile, and why.
MISUSES = {
    "looked_at": "a visitor that discards the output must be the last of its chain",
    "two_of_several_forms": "a chain has at most one visitor that picks from several forms",
    "auxiliary_type": "an auxiliary output is of bfloat16, float16 or float32",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the kernels are written."""
    return tmp_path_factory.mktemp("visitors")


@pytest.fixture(scope="module")
def printed(folder: Path) -> list[str]:
    """What the program said."""
    return ptx.emit("emit_visitors", folder)


def test_every_chain_can_be_built(printed: list[str], folder: Path) -> None:
    kernels = [line.split(" ", 4)[1:] for line in printed if line.startswith("KERNEL ")]
    assert {name.rsplit("-", 1)[0] for name, *_ in kernels} == set(CHAINS)
    for name, threads, shared, *refusal in kernels:
        assert "".join(refusal) == ""
        assert int(shared) <= SHARED_BYTES
        text = (folder / f"{name}.ptx").read_text()
        assert f".maxntid {threads}\n" in text
        assert "local" not in re.sub(r"//.*", "", text), "an array in local memory"
        sums, stores = not name.startswith("scaled"), not name.startswith("sums_only")
        assert ("vote.sync.ballot" in text) == sums
        assert ("stmatrix.sync.aligned" in text) == stores, "values pass through shared memory"


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_chains_assemble_without_spills(printed: list[str], folder: Path, tmp_path: Path) -> None:
    for line in printed:
        if not line.startswith("KERNEL "):
            continue
        _, name, threads, *_ = line.split(" ")
        report = ptx.assemble(folder / f"{name}.ptx", tmp_path)
        assert ptx.NO_SPILLS in report, name
        used = re.search(r"Used (\d+) registers", report)
        assert used and int(used[1]) * int(threads) <= ptx.REGISTERS


def test_visitors_say_why_not(printed: list[str]) -> None:
    refusals = [line.split(" ", 2)[1:] for line in printed if line.startswith("REFUSES ")]
    assert [name for name, _ in refusals] == [name for name, _ in REASONS]
    for (_, found), (_, reason) in zip(refusals, REASONS, strict=True):
        assert found.startswith(reason)


def test_misuse_does_not_compile(tmp_path: Path) -> None:
    """Each chain with the sentence that says why; the chain that means something compiles."""
    built = library.run_mojo(
        *("build", "--emit", "object", "-I", str(ptx.import_folder())),
        *("-I", str(ptx.SOURCES), str(ptx.SOURCES / "misuse_visitors.mojo")),
        *("-o", str(tmp_path / "misuse.o")),
    )
    assert built.returncode != 0
    reports = re.split(r"^\S+: error: ", built.stderr, flags=re.MULTILINE)[1:]
    found = {
        function[1]: " ".join(re.findall(r"constraint failed: (.*)", report))
        for report in reports
        if (function := re.match(r"function instantiation failed\ndef (\w+)\(", report))
    }
    assert found.keys() == MISUSES.keys(), built.stderr
    for name, sentence in MISUSES.items():
        assert found[name].startswith(sentence), built.stderr
