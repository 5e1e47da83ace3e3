"""The Hopper kernel compiles without a GPU, to the instructions that it is about.

Where `ptxas` is on the path (CUDA's toolkit), it also assembles: no spills, and no more registers
and shared memory than a block has.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests import ptx

SHARED_BYTES = 227 * 1024
#: Depth and operand types of the multiply by type.
INSTRUCTIONS = {
    "bfloat16": "k16.f32.bf16.bf16",
    "float8_e4m3fn": "k32.f32.e4m3.e4m3",
    "float32": "k8.f32.tf32.tf32",
}


@dataclass(frozen=True)
class Candidate:
    """A configuration, as the Mojo side describes it, and its PTX."""

    name: str
    dtype: str
    out: str
    threads: int
    shared_bytes: int
    moves_registers: bool
    shares_loads: bool
    splits: bool
    gathers: bool
    refusal: str
    ptx: Path


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="narrow", marks=pytest.mark.extended),
        pytest.param(("WIDE",), id="wide", marks=pytest.mark.extended),
    ],
)
def candidates(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Candidate]:
    """Every candidate, compiled for sm_90a for every type that it is offered for.

    Outputs are bfloat16, or float32 where they are ``wide``.
    """
    # The wide ones are all the program's own.
    inspected, _ = (Path(), []) if request.param else ptx.inspect_once(tmp_path_factory)
    folder = tmp_path_factory.mktemp("sm90")
    found = []
    for line in ptx.emit("emit_sm90", folder, defined=request.param):
        name, dtype, out, threads, shared, *flags, refusal = line.split(" ", 9)
        moves, shares, splits, gathers = (flag == "1" for flag in flags)
        found.append(
            Candidate(
                name,
                dtype,
                out,
                int(threads),
                int(shared),
                moves,
                shares,
                splits,
                gathers,
                refusal,
                (inspected if name.startswith(("sm90", "unaligned")) else folder) / f"{name}.ptx",
            )
        )
    assert {candidate.dtype for candidate in found} == set(INSTRUCTIONS)
    return found


def test_every_candidate_can_be_built(candidates: list[Candidate]) -> None:
    for candidate in candidates:
        assert candidate.refusal == ""
        assert candidate.shared_bytes <= SHARED_BYTES


def test_ptx_holds_the_instructions(candidates: list[Candidate]) -> None:
    for candidate in candidates:
        text = candidate.ptx.read_text()
        multiplies = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+(\S+)", text))
        assert multiplies == {INSTRUCTIONS[candidate.dtype]}
        ranks = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d[^ ]*\.im2col\.", text)
        assert set(ranks) == ({"3"} if candidate.gathers else {"3", "4", "5"})
        assert ("cp.async.cg.shared.global" in text) >= candidate.gathers
        # Matrices are of values of two bytes, whose rounding hides the error of an approximation.
        is_narrow = candidate.out == "bfloat16"
        for narrow in ("stmatrix.sync.aligned", "ldmatrix.sync.aligned", "tanh.approx.f32"):
            assert (narrow in text) == is_narrow
        assert "ex2.approx.ftz.f32" in text
        assert f".maxntid {candidate.threads}\n" in text
        assert ("setmaxnreg" in text) == candidate.moves_registers
        assert ("multicast::cluster" in text) == candidate.shares_loads
        assert ("st.async" in text) == candidate.splits
        assert "local" not in re.sub(r"//.*", "", text), "an array in local memory"


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_candidates_assemble_without_spills(candidates: list[Candidate], tmp_path: Path) -> None:
    more = {}
    for candidate in candidates:
        report = ptx.assemble(candidate.ptx, tmp_path)
        spilled = max(int(n) for n in re.findall(r"(\d+) bytes (?:stack|spill)", report))
        if spilled > ptx.may_spill(candidate.name):
            more[candidate.name] = spilled
        assert "Potential Performance Loss" not in report, report
        used = re.search(r"Used (\d+) registers", report)
        assert used and int(used[1]) * candidate.threads <= ptx.REGISTERS
    assert not more


def test_odd_filters_are_taken_where_threads_store(tmp_path: Path) -> None:
    """With a residual too. Registers would spill with wider outputs, and what is fused behind by a
    graph, or by a visitor that does not say so, takes whole pieces."""
    lines = ptx.emit("odd_filters", tmp_path)
    answers = {tuple(line.split()[:4]): line.split(maxsplit=4)[4] for line in lines}
    taken = {asked for asked, answer in answers.items() if answer == "yes"}
    assert taken == {
        (of, "bfloat16", "plain", added)
        for of in ("bfloat16", "float8_e4m3fn")
        for added in ("-", "residual")
    }
    pieces = "TMA takes pixels of multiples of 16 bytes; here 819 output channels"
    assert all(pieces in answer for asked, answer in answers.items() if asked not in taken)
