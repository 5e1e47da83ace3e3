"""The benchmark's record: its ratios, its JSON, its tables and its plot."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jsonschema
import pytest
from tests.bench_records import SCHEMA, record, result, timing
from tests.documents import ROOT

from maxconv.bench import report
from maxconv.bench.environment import slug
from maxconv.bench.memory import Memory
from maxconv.bench.record import Functions, Record, load, results_name, summary
from maxconv.bench.timing import FULL

# Ratios and summaries.


def test_ratios_are_of_medians() -> None:
    first, second, *_ = record().results
    assert first.ratio("max") == pytest.approx(1.5)
    assert first.ratio("torch_fused", "ours_fused") == pytest.approx(1 / 1.02)
    assert first.torch() == "torch_prepacked"
    assert first.gflops("ours") == pytest.approx(2 * 56 * 56 * 64 * 64 * 9 / 1e-3 / 1e9)
    assert second.torch() == "torch"
    assert (first.max, second.max) == ("max", "max_input")
    assert second.ratio("max") is None
    assert second.gflops("max") is None


def test_ratios_of_calls_of_one_convolution() -> None:
    first, second, *_ = record().results
    assert first.ratio("max", single=True) == pytest.approx(1.55 / 1.05)
    assert second.ratio("max", single=True) is None
    assert first.ratio("ours_fused", single=True) is None
    # The faster one of torch's two may be another.
    faster = dict(first.singles) | {"torch": timing(1e-5)}
    assert dataclasses.replace(first, singles=faster).torch(single=True) == "torch"
    assert dataclasses.replace(first, singles=faster).torch() == "torch_prepacked"
    # Where a call has one convolution anyway, the time is that.
    large = result("unet.down1", {"ours": 40, "torch": 60})
    assert (large.convolutions, large.singles) == (1, {})
    assert large.ratio("torch", single=True) == pytest.approx(1.5)


def test_the_summary() -> None:
    made = {ratio.what: ratio for ratio in summary(record().results)}
    torch = made["times as fast as torch, 2-D"]
    assert torch.geometric_mean == pytest.approx((0.8 * 1.25 * 2.0) ** (1 / 3))
    assert torch.worst == pytest.approx(0.8)
    assert (torch.worst_problem, torch.problems) == ("resnet50.conv2_3x3", 3)
    alone = made["times as fast as torch, 2-D, one convolution a call"]
    assert alone.geometric_mean == pytest.approx((0.85 * 1.3 * 2.05) ** (1 / 3) / 1.05)
    assert [alone.worst, alone.problems] == pytest.approx([0.85 / 1.05, 3])
    dense = made["times as fast as MAX, 2-D, constant filter"]
    assert [dense.geometric_mean, dense.problems] == pytest.approx([1.5, 1])
    deep = made["times as fast as MAX, 2-D depthwise, constant filter"]
    assert [deep.worst, deep.problems] == pytest.approx([30, 1])
    fused = made["times the time with bias, ReLU and residual as arguments, 2-D"]
    # Of a cost, the largest is the worst.
    assert fused.worst == pytest.approx(1.04)
    assert fused.worst_problem == "resnet50.conv2_expand"
    assert made["times as fast as torch, 1-D and 3-D"].problems == 1
    assert "times as fast as MAX, 1-D and 3-D" not in made


def test_the_summary_of_large_problems_says_each_thing_once() -> None:
    large = [result("unet.down1", {"ours": 40, "torch": 60, "max": 50})]
    assert [ratio.what for ratio in summary(large)] == [
        "times as fast as torch, 2-D",
        "times as fast as MAX, 2-D, constant filter",
    ]


# The record.


def test_a_record_follows_its_schema_and_comes_back() -> None:
    for made in (record(), record(commit=None, functions=None, memory=[])):
        text = made.to_json()
        jsonschema.validate(json.loads(text), SCHEMA)
        assert Record.from_json(text) == made
        assert Record.from_json(text).to_json() == text


def test_the_schema_is_one_and_names_every_field() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    made = json.loads(record().to_json())
    assert set(SCHEMA["properties"]) == set(SCHEMA["required"]) == set(made)
    for key, value in (("threads", 0), ("dtype", "int8"), ("date", "yesterday"), ("format", 1)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**made, key: value}, SCHEMA)


KEPT = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_the_kept_records(path: Path) -> None:
    jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), SCHEMA)
    kept = load(path)
    assert path.name == results_name(kept)
    assert kept.protocol == FULL
    assert report.render_markdown(kept)


def test_the_name_of_a_record() -> None:
    assert results_name(record()) == "2026-07-27-fast-one-float32.json"
    assert slug("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz") == "intel-xeon-platinum-8481c"
    assert slug("AMD EPYC 9654 96-Core Processor") == "amd-epyc-9654-96-core"
    assert slug("™") == "unknown"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 3}', '{"format": 2}', '{"format": 2, "summary": []}']
)
def test_what_is_no_record(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"record\.json: this is no record of format 2"):
        load(path)


@pytest.mark.parametrize(
    ("format", "message"),
    [(1, "its format is 1, an old one: measure again"), (3, "its format is 3, unknown here")],
)
def test_a_record_of_another_format(format: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(record().to_json().replace('"format": 2', f'"format": {format}'))
    with pytest.raises(ValueError, match=rf"record\.json: .* of format 2: {message}$"):
        load(path)


# Tables.


def test_the_table_for_people() -> None:
    text = report.render_text(record())
    lines = text.splitlines()
    assert lines[0].startswith("2026-07-27, Fast One, 2 threads, float32, maxconv 1.2.3, max 1.2.3")
    assert lines[0].endswith("commit 0123456789")
    first = next(line for line in lines if line.startswith("resnet50.conv2_3x3"))
    assert re.split(r"\s{2,}", first) == [
        "resnet50.conv2_3x3",
        "1x56x56x64 -> 64 3x3 p1x1",
        "231",
        "289",
        "154",
        "0.80x",
        "1.50x",
        "0.920-1.160",
        "1.25x",
        "1.02x",
    ]
    alone = [line for line in lines if line.startswith("resnet50.conv2_3x3")][1]
    assert re.split(r"\s{2,}", alone) == [
        "resnet50.conv2_3x3",
        "8",
        "1050 / 1000",
        "850 / 800",
        "1550 / 1500",
        "0.81x",
        "1.48x",
    ]
    expand = next(line for line in lines if line.startswith("resnet50.conv2_expand"))
    assert "2.00x*" in expand
    assert "*: MAX takes no constant filter here" in text
    assert "Without MAX with a constant filter: resnet50.conv2_expand: Failed to compile." in text
    assert "audio.dilated: the process dies of SIGSEGV." in text
    assert "outputs equal, bit for bit; 2.00 ms against 2.10 ms one by one" in text
    assert re.search(r"vae\.up_256 +16\.0 +8\.0 +2\.0 +1\.5 +yes", text)
    assert "Other programs" not in text
    # Families in the order of the list, and columns under each other.
    assert [text.index(f"\n{family}\n") for family in ("resnet50", "depthwise", "audio")] == sorted(
        text.index(f"\n{family}\n") for family in ("resnet50", "depthwise", "audio")
    )
    header = next(line for line in lines if line.startswith("problem"))
    assert header.index("convolution") == first.index("1x56x56x64")


def test_no_table_of_single_convolutions_where_all_are() -> None:
    text = report.render_text(record(results=[result("unet.down1", {"ours": 40, "torch": 60})]))
    assert "The only convolution of its call" in report.render_text(record())
    assert "of its call" not in text
    assert "one convolution a call" not in text


def test_the_tables_warn() -> None:
    busy = dataclasses.replace(record().machine, load=1.5)
    too_much = Memory("vae.up_256", 1, 1, 1, 9 << 20)
    functions = Functions(("audio.dilated",), False, 0.002, 0.002)
    made = record(machine=busy, memory=[too_much], functions=functions, modified=True)
    text = report.render_text(made)
    for words in ("(load 1.5)", "outputs NOT equal", "1 convolution with", "with changes"):
        assert words in text
    assert re.search(r"vae\.up_256 .* NO\n", text)


def test_the_table_of_the_readme() -> None:
    text = report.render_markdown(record())
    assert text.startswith("`python -m maxconv bench`: 2026-07-27, Fast One, 2 threads, float32")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    tables = [row for row in cells if row[0] == "---"]
    assert len(tables) == 3
    expected = ["resnet50.conv2_3x3", "1x56x56x64 -> 64 3x3 p1x1", "231", "289", "154"]
    assert [*expected, "0.80x", "1.50x", "1.02x"] in cells
    assert [len(row) for row in cells].count(8) == 2 + 4
    alone = ["audio.dilated", "8", "1050 / 1000", "1050 / 1000", "- / -", "1.00x", "-"]
    assert cells[-1] == alone
    assert ["times as fast as torch, 2-D", "1.26x", "0.80x", "resnet50.conv2_3x3", "3"] in cells


# The plot.


def test_the_plot(tmp_path: Path) -> None:
    from maxconv.bench.plot import plot

    for name in ("plot.png", "plot.svg"):
        plot(record(), tmp_path / name)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    for words in ("resnet50.conv2_3x3", "MAX, constant filter", "MAX, filter as input", "torch"):
        assert f"<!-- {words} -->" in drawn
