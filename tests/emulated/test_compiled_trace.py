"""Traces: every span ends, every warp has its track, every wait an arrow; nothing is disturbed."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.emulated.convolution import Kernel, Operands, WithResidual, run

from ptxemu import EmulatorError, Trace
from ptxemu.trace import BARRIER, ENGINE, RUNNING, WARP, Span

Emitted = tuple[Path, list[Kernel]]

#: Of the filters, each at least a stage of a tile's activations.
TAPS = 9


def traced(kernel: Kernel, seed: int, ptx: str = "") -> tuple[Trace, np.ndarray | None]:
    trace = Trace()
    try:
        return trace, run(kernel, Operands.random(seed), seed, ptx, trace)
    except EmulatorError:
        return trace, None


@pytest.fixture(scope="module")
def pair(emitted: Emitted) -> Trace:
    """The kernel whose two blocks share loads."""
    trace, output = traced(emitted[1][1], 0)
    assert output is not None
    return trace


def of_kind(trace: Trace, kind: str) -> list[Span]:
    return [span for span in trace.spans if span.track.kind == kind]


def test_every_span_ends_and_no_two_of_a_track_overlap(pair: Trace) -> None:
    ends: dict[object, int] = defaultdict(lambda: -1)
    for span in pair.spans:
        assert span.end is not None
        assert ends[span.track] <= span.start < span.end
        ends[span.track] = span.end


def test_every_warp_has_a_track_that_runs_and_waits(pair: Trace, emitted: Emitted) -> None:
    warps = emitted[1][1].threads // 32
    tracks = {(s.track.block, s.track.name) for s in of_kind(pair, WARP)}
    assert tracks == {(block, f"warp {w}") for block in range(2) for w in range(warps)}
    assert len(pair.blocks) == 2
    first: dict[tuple[int, str], Span] = {}
    for span in of_kind(pair, WARP):
        first.setdefault((span.track.block, span.track.name), span)
        assert span.name == RUNNING or span.name.startswith("wait: ")
    assert all(span.name == RUNNING for span in first.values())


def test_every_wait_has_the_arrow_that_ends_it(pair: Trace) -> None:
    waits = [span for span in of_kind(pair, WARP) if span.name != RUNNING]
    ended: dict[int, int] = defaultdict(int)
    for arrow in pair.arrows:
        ended[id(arrow.target)] += 1
        assert arrow.target.end is not None and arrow.source.end is not None
        assert arrow.source.start <= arrow.left < arrow.source.end
        assert arrow.left < arrow.came < arrow.target.end
    assert waits
    assert all(ended[id(wait)] == 1 for wait in waits)
    assert len(pair.arrows) == len(waits)


def test_what_ends_a_wait_is_of_the_right_kind(pair: Trace) -> None:
    """A stage's bytes come by TMA, a multiply's end by wgmma, a named barrier by a warp.

    A stage's release comes from a warp, or from a peer through the cluster.
    """
    causes = defaultdict(set)
    for arrow in pair.arrows:
        subject = arrow.target.name.removeprefix("wait: ").split()[0]
        causes[subject].add(arrow.source.track.name.split()[0])
    assert causes["mbarrier"] == {"TMA", "warp", "cluster"}
    assert causes["wgmma"] == {"wgmma"}
    assert causes["barrier"] == causes["barrier.cluster"] == {"warp"}


def test_phases_follow_each_other(pair: Trace) -> None:
    phases: dict[object, list[Span]] = defaultdict(list)
    for span in of_kind(pair, BARRIER):
        if span.track.name.startswith("mbarrier"):
            phases[span.track].append(span)
    assert any(len(spans) > 2 for spans in phases.values())
    for spans in phases.values():
        assert [span.name for span in spans] == [f"phase {k}" for k in range(len(spans))]
        assert [span.details["completed"] for span in spans] == [True] * (len(spans) - 1) + [False]
        assert all(a.end == b.start - 1 for a, b in pairwise(spans))


def test_engines_name_lines_and_bytes(pair: Trace, emitted: Emitted) -> None:
    text = emitted[1][1].ptx.split("\n")
    loads = [s for s in of_kind(pair, ENGINE) if s.track.name == "TMA" and "load" in s.name]
    assert loads
    assert all("cp.async.bulk.tensor" in text[span.details["line"] - 1] for span in loads)
    assert {int(span.name.split()[-2]) for span in loads} == {48 * 128, 128 * 128}


def test_a_first_tiles_residual_is_asked_for_behind_its_activations(
    small: list[tuple[Kernel, bool]],
) -> None:
    kernel = next(kernel for kernel, fused in small if fused)
    text, trace = kernel.ptx.split("\n"), Trace()
    run(kernel, WithResidual.draw(0, kernel.end, True), 0, "", trace)
    firsts: dict[tuple[int, str], list[int]] = defaultdict(list)
    for span in of_kind(trace, ENGINE):
        # Activations have an axis more than the residual; filters are no im2col loads.
        line = text[span.details["line"] - 1] if "line" in span.details else ""
        for rank in ("4d", "3d"):
            if f"tensor.{rank}.shared" in line and "im2col" in line:
                firsts[span.track.block, rank].append(span.start)
    blocks = {block for block, _ in firsts}
    assert blocks
    for block in blocks:
        activations, residuals = sorted(firsts[block, "4d"]), sorted(firsts[block, "3d"])
        assert len(activations) >= TAPS
        assert activations[TAPS - 1] < residuals[0]


def test_a_trace_disturbs_nothing(emitted: Emitted) -> None:
    kernel, operands = emitted[1][0], Operands.random(3)
    plain = run(kernel, operands, 3)
    trace, output = traced(kernel, 3)
    assert output is not None
    assert np.array_equal(plain, output)
    assert np.array_equal(plain, operands.expected())
    with pytest.raises(ValueError, match="it has a launch already"):
        run(kernel, operands, 3, "", trace)


def test_the_file_is_what_viewers_read(pair: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    pair.write(path)
    events = json.loads(path.read_text())["traceEvents"]
    kinds = defaultdict(list)
    for event in events:
        kinds[event["ph"]].append(event)
    assert set(kinds) == {"M", "X", "s", "f", "i"}
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in kinds["M"] if e["name"] == "thread_name"
    }
    assert all((e["pid"], e["tid"]) in names for ph in "Xsfi" for e in kinds[ph])
    assert all(e["dur"] > 0 for e in kinds["X"])
    # A viewer binds an arrow's ends to the slices of its track that enclose them.
    for event in kinds["s"] + kinds["f"]:
        around = [
            e
            for e in kinds["X"]
            if (e["pid"], e["tid"]) == (event["pid"], event["tid"])
            and e["ts"] <= event["ts"] < e["ts"] + e["dur"]
        ]
        assert len(around) == 1
    assert sorted(e["id"] for e in kinds["s"]) == sorted(e["id"] for e in kinds["f"])


def test_a_stopped_kernel_has_a_trace_too(emitted: Emitted) -> None:
    kernel = emitted[1][0]
    trace, output = traced(kernel, 0, kernel.ptx.replace("wgmma.wait_group.sync.aligned 0;", ""))
    assert output is None
    assert trace.error is not None
    assert all(span.end is not None for span in trace.spans)
    kind = type(trace.error).__name__
    assert [i.track.kind for i in trace.instants if i.name.startswith(kind)] == [WARP]
