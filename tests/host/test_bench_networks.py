"""The tables of a record of what real networks convolve, from made-up ones."""

from __future__ import annotations

import dataclasses
import json
import re

import jsonschema
import pytest
from tests.bench_records import (
    MAX,
    OURS,
    OURS_FUSED,
    SCHEMA,
    TORCH,
    TORCH_FUSED,
    gpu_record,
    record,
    result,
)

from maxconv._problems import Network, find_problem
from maxconv.bench import networks, report
from maxconv.bench.entrant import CALL, FUSED, Key
from maxconv.bench.networks import Rows
from maxconv.bench.record import Record, Result

CUDNN = Key("cudnn", FUSED)

WRONG = "wrong result: the output is off by 0.5; 0.016 is allowed"


def results() -> list[Result]:
    """Returns results whose worst is the third, and whose last has no time of maxconv."""
    fused = {OURS_FUSED: 1.0, TORCH_FUSED: 1.5, CUDNN: 1.04}
    # 0.5 ms of products and 0.25 ms of bytes on an H200.
    first = result("unet.mid", {OURS: 1.0, TORCH: 2.0, **fused})
    return [
        dataclasses.replace(first, flops=494_700_000_000, nbytes=1_200_000_000),
        result("unet.mid@8", {OURS: 4.0, TORCH: 4.4}),
        result("unet.down1", {OURS: 2.0, TORCH: 1.0}, flops=9_894_000_000, nbytes=2_400_000_000),
        result("mobilenet.dw_14", {TORCH: 1.0}, {OURS: WRONG}),
    ]


def networks_record(**changes: object) -> Record:
    command = "python -m maxconv bench --device gpu --problems networks"
    return gpu_record(**{"command": command, "results": results(), **changes})


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two networks; of the second one convolution has no time."""

    def network(name: str, batches: tuple[int, ...], counts: dict[str, int]) -> Network:
        problems = {problem: find_problem(problem) for problem in counts}
        return Network(name, "3x9x9", batches, problems, counts)

    made = [
        network("net", (1, 8), {"unet.mid": 3, "unet.down1": 1}),
        network("other", (1, 8), {"unet.mid": 1, "mobilenet.dw_14": 2}),
        network("small", (8,), {"unet.mid": 2}),
    ]
    monkeypatch.setattr(networks, "load_networks", lambda: {each.name: each for each in made})


def table(made: Record, title: str) -> tuple[list[str], Rows]:
    """Returns a table's header and rows."""
    found = {name: (header, rows) for name, header, rows, _ in networks.tables(made)}
    header, rows = found[next(name for name in found if name.startswith(title))]
    assert {len(row) for row in rows} == {len(header)}
    return header, rows


def test_the_opponent_is_the_fastest_of_the_others() -> None:
    first, second, _, last = results()
    assert first.opponent() == ("torch", 2.0 / 1e3)
    assert first.opponent(FUSED) == ("cudnn", 1.04 / 1e3)
    assert first.advantage() == pytest.approx(2.0)
    assert first.advantage(FUSED) == pytest.approx(1.04)
    assert second.opponent(FUSED) is None
    assert second.advantage(FUSED) is None
    assert last.advantage() is None
    assert first.advantage(figure=CALL) == pytest.approx(2.05 / 1.05)
    # maxconv's other ways are no opponents.
    faster = result("unet.mid", {OURS: 2.0, OURS._replace(variant="in a MAX graph"): 1.0, MAX: 3.0})
    assert faster.opponent() == ("max", 3.0 / 1e3)
    assert faster.advantage() == pytest.approx(1.5)


def test_what_was_wrong() -> None:
    last = results()[-1]
    assert [entry.key for entry in last.of_wrong("maxconv")] == [OURS]
    assert last.of_wrong("torch") == []
    refused = result("unet.mid", {}, {OURS: "no kernel takes it", TORCH: WRONG})
    assert refused.of_wrong("maxconv") == []
    assert [entry.key for entry in refused.of_wrong("torch")] == [TORCH]


def test_how_the_ratios_lie(listed: None) -> None:
    header, rows = table(networks_record(), "Times as fast")
    assert header == [
        *("with", "problems", "geometric mean", "below the goal"),
        *("worst", "10%", "25%", "median", "75%", "90%", "best"),
    ]
    # Of 0.5, 1.1 and 2.0, and of 1.04 alone, which is below what fused work should reach.
    quantiles = ["0.50x", "0.62x", "0.80x", "1.10x", "1.55x", "1.82x", "2.00x"]
    assert rows == [
        ["bare", "3", "1.03x", "1 (1.0x)", *quantiles],
        ["fused", "1", "1.04x", "1 (1.05x)", *["1.04x"] * 7],
    ]


def test_the_sum_over_a_network(listed: None) -> None:
    header, rows = table(networks_record(), "Sums")
    assert header == [
        *("network", "batch", "maxconv, bare", "the fastest others", "ratio"),
        *("maxconv, fused", "the fastest others", "ratio"),
    ]
    # As often as the network has each, and only where each was measured.
    assert rows == [
        ["net", "1", "5000", "7000", "1.40x", "-", "-", "-"],
        ["small", "8", "8000", "8800", "1.10x", "-", "-", "-"],
    ]


def test_the_sum_over_a_network_of_the_list() -> None:
    times = {OURS: 0.02, TORCH: 0.03, OURS_FUSED: 0.03, TORCH_FUSED: 0.06}
    made = networks_record(results=[result("vit_b16.conv_proj@64", times)])
    assert table(made, "Sums")[1] == [["vit_b16", "64", "20", "30", "1.50x", "30", "60", "2.00x"]]


def test_the_worst_problem_is_first(listed: None) -> None:
    header, rows = table(networks_record(), "Problems")
    assert header == [
        *("problem", "convolution", "bare, us", "others", "ratio", "fused, us", "others", "ratio"),
        *("TFLOP/s", "GB/s", "of the limit"),
    ]
    assert [row[0] for row in rows] == ["unet.down1", "unet.mid", "unet.mid@8", "mobilenet.dw_14"]
    worst, second, _, last = rows
    assert worst[2:] == [
        *("2000.0", "1000.0", "0.50x", "-", "-", "-", "4.9", "1200", "25% bytes"),
    ]
    assert second[1] == str(find_problem("unet.mid").problem)
    assert second[2:] == [
        *("1000.0", "2000.0", "2.00x", "1000.0", "1040.0", "1.04x"),
        *("494.7", "1200", "50% products"),
    ]
    assert last[2:] == ["-", "1000.0", *["-"] * 7]


@pytest.mark.parametrize(
    ("gpu", "shares"),
    [
        ("NVIDIA H100 80GB HBM3", ["36% bytes", "50% products"]),
        ("NVIDIA H999", ["-", "-"]),
        (None, ["-", "-"]),
    ],
)
def test_the_limit_is_a_gpus(listed: None, gpu: str | None, shares: list[str]) -> None:
    machine = dataclasses.replace(gpu_record().machine, gpu=gpu)
    rows = table(networks_record(machine=machine), "Problems")[1]
    assert [row[-1] for row in rows[:2]] == shares
    assert [row[-3:-1] for row in rows[:2]] == [["4.9", "1200"], ["494.7", "1200"]]


def test_the_report_of_networks(listed: None) -> None:
    made = networks_record()
    jsonschema.validate(json.loads(made.to_json()), SCHEMA)
    assert Record.from_json(made.to_json()) == made
    text = report.render_text([made])
    rows = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    assert ["net", "1", "5000", "7000", "1.40x", "-", "-", "-"] in rows
    assert f"Without maxconv: mobilenet.dw_14: {WRONG}." in text
    # The tables of other runs are not there.
    assert "Summary" not in text
    assert "as a user calls it" not in text
    headings = re.findall("^## (.*)$", report.render_markdown([made]), flags=re.MULTILINE)
    assert headings == [title for title, *_ in networks.tables(made)]
    assert len(headings) == 3


def test_a_report_of_nothing() -> None:
    made = networks_record(results=[])
    assert list(networks.tables(made)) == []
    assert report.render_text([made]).startswith("2026-07-27, NVIDIA H200")


@pytest.mark.parametrize(("count", "others"), [(40, ""), (41, " and 33 others")])
def test_a_note_does_not_name_hundreds(count: int, others: str) -> None:
    names = [f"unet.mid@{batch}" for batch in range(2, 2 + count)]
    missing = [result(name, {OURS: 1.0}, {TORCH: "too large"}) for name in names]
    timed = result("unet.mid", {OURS: 1.0, TORCH: 1.0})
    text = report.render_text([record(results=[*missing, timed])])
    shown = ", ".join(names[:8] if others else names)
    assert f"Without torch: {shown}{others}: too large." in text


def test_which_suite_a_record_is_of() -> None:
    for words, suite in {
        "--problems networks": "networks",
        "--family vit_b16 --problems networks --batch 8": "networks",
        "--problems heron": "heron",
        "--problems vit_b16.conv_proj": None,
        "--family networks": None,
        "": None,
    }.items():
        made = gpu_record(command=f"python -m maxconv bench {words}")
        assert made.suite == suite, words
