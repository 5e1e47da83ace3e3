"""The benchmark's record: its ratios, its JSON, its tables and its plot."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.bench_records import (
    OURS,
    OURS_FUSED,
    REORDERED,
    SCHEMA,
    TORCH,
    forward,
    gpu_record,
    measurement,
    models_record,
    record,
    result,
    timing,
)
from tests.documents import ROOT

from maxconv.bench import report
from maxconv.bench.cpu.memory import Memory
from maxconv.bench.entrant import BARE, CALL, COLORS, FUSED, KERNEL
from maxconv.bench.environment import slug
from maxconv.bench.models.variants import VARIANTS
from maxconv.bench.record import (
    Functions,
    Measurement,
    Peak,
    Record,
    load,
    peers,
    results_name,
    summary,
)

# Ratios and summaries.


def test_ratios_are_of_medians() -> None:
    first, second, *_ = record().results
    assert first.ratio("max") == pytest.approx(1.5)
    assert first.ratio("max", BARE, CALL) == pytest.approx(1.55 / 1.05)
    assert first.ratio("torch", FUSED) == pytest.approx(1 / 1.02)
    assert first.fusing("maxconv") == pytest.approx(1.02)
    assert second.ratio("torch", FUSED) is None
    assert second.ratio("cudnn") is None


def test_a_peer_is_its_fastest_variant_and_maxconv_its_usual_one() -> None:
    first, second, *_ = record().results
    best = first.best("torch", BARE, KERNEL)
    assert best is not None
    assert best.key == REORDERED
    assert first.median("torch") == pytest.approx(0.8e-3)
    assert second.median("max") == pytest.approx(2e-3)
    faster = result("unet.down1", {OURS: 40, OURS._replace(variant="in PyTorch"): 30, TORCH: 60})
    assert faster.median("maxconv") == pytest.approx(40e-3)
    assert faster.ratio("torch") == pytest.approx(1.5)
    # What was not timed does not stand for a contender.
    call_only = measurement(REORDERED, 0.1, kernel=None)
    mixed = dataclasses.replace(first, measurements=[*first.measurements, call_only])
    assert mixed.median("torch") == pytest.approx(0.8e-3)
    assert mixed.median("torch", BARE, CALL) == pytest.approx(0.15e-3)


def test_the_peers_stand_in_the_contenders_order() -> None:
    made = gpu_record()
    assert peers(made.results, FUSED, KERNEL) == ["torch", "torch.compile", "cudnn"]
    assert peers(made.results, BARE, KERNEL) == ["torch"]
    assert list(COLORS) == SCHEMA["$defs"]["contender"]["enum"]
    assert len(set(COLORS.values())) == len(COLORS)


def test_the_summary() -> None:
    made = {(row.what, row.work, row.figure): row for row in summary(record().results)}
    torch = made["times as fast as torch, 2-D", BARE, KERNEL]
    assert torch.geometric_mean == pytest.approx((0.8 * 1.25) ** 0.5)
    assert torch.worst == pytest.approx(0.8)
    assert (torch.worst_problem, torch.problems) == ("resnet50.conv2_3x3", 2)
    called = made["times as fast as torch, 2-D", BARE, CALL]
    assert called.geometric_mean == pytest.approx((0.85 * 1.3) ** 0.5 / 1.05)
    deep = made["times as fast as max, 2-D depthwise", BARE, KERNEL]
    assert [deep.worst, deep.problems] == pytest.approx([30, 1])
    fused = made["times the time of the convolution alone, 2-D", FUSED, KERNEL]
    # Of a cost, the largest is the worst.
    assert fused.worst == pytest.approx(1.04)
    assert fused.worst_problem == "resnet50.conv2_expand"
    assert made["times as fast as torch, 1-D and 3-D", BARE, KERNEL].problems == 1
    assert ("times as fast as max, 1-D and 3-D", BARE, KERNEL) not in made
    assert not any("peak" in what for what, *_ in made)


def test_the_summary_of_shares() -> None:
    shown = record()
    first, second, deep, _ = shown.results
    peak = Peak("float32 FMA, 256 bits", 2, 400e9, 20)
    assert shown.peak == peak
    # The first takes a millisecond.
    assert first.share(peak) == pytest.approx(first.flops / 1e-3 / 400e9)
    assert first.share(peak, BARE, CALL) == pytest.approx(first.flops / 1.05e-3 / 400e9)
    assert first.share(None) is None
    assert dataclasses.replace(first, measurements=[]).share(peak) is None
    made = {(row.what, row.work, row.figure): row for row in summary(shown.results, peak)}
    row = made["of the peak, 2-D", BARE, KERNEL]
    shares = [entry.share(peak) for entry in (first, second)]
    assert None not in shares
    assert row.geometric_mean == pytest.approx((shares[0] * shares[1]) ** 0.5)  # type: ignore[operator]
    assert (row.worst, row.worst_problem) == (shares[1], second.name)
    assert made["of the peak, 2-D depthwise", BARE, KERNEL].worst == deep.share(peak)
    assert ("of the peak, 2-D", FUSED, CALL) in made


# The record.


def test_a_record_without_a_peak() -> None:
    """Those of GPUs, of models, and those that were made before it was measured."""
    bare = record(peak=None)
    assert "peak" not in json.loads(bare.to_json())
    assert load_text(bare) == bare
    for text in (report.render_text([bare]), report.render_text([gpu_record()])):
        assert "peak" not in text
    assert rows_of(report.render_text([bare]), "resnet50.conv2_3x3")[0][4:6] == ["231", "800*"]


def test_integers_are_no_floating_point() -> None:
    text = report.render_text([record(dtype="uint8")])
    assert "The peak is 400 GOP/s" in text
    assert "GFLOP/s" not in text


def test_a_record_follows_its_schema_and_comes_back() -> None:
    alone = record(commit=None, functions=None, memory=[], peak=None)
    for made in (record(), alone, gpu_record(), models_record()):
        text = made.to_json()
        jsonschema.validate(json.loads(text), SCHEMA)
        assert Record.from_json(text) == made
        assert Record.from_json(text).to_json() == text


def test_a_record_without_percentiles() -> None:
    bare = dataclasses.replace(timing(1e-3), best_s=None, p10_s=None, p90_s=None)
    one = result("unet.down1", {})
    one = dataclasses.replace(one, measurements=[Measurement(*OURS, bare, bare, error=None)])
    made = record(results=[one])
    jsonschema.validate(json.loads(made.to_json()), SCHEMA)
    assert load_text(made) == made
    assert rows_of(report.render_text([made]), "unet.down1")[0][2:4] == ["1000", "-"]


def load_text(made: Record) -> Record:
    return Record.from_json(made.to_json())


def test_the_schema_is_one_and_names_every_field() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    made = json.loads(record().to_json())
    assert set(SCHEMA["properties"]) == {*SCHEMA["required"], "peak"} == set(made)
    bad = [("device", "tpu"), ("dtype", "int4"), ("date", "yesterday"), ("format", 2)]
    bad += [("starts", {"jit": 1.0}), ("starts", {"eager": 0})]
    bad += [("peak", None), ("peak", {**made["peak"], "per_second": 0}), ("peak", {"unit": "FMA"})]
    for key, value in bad:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**made, key: value}, SCHEMA)


@pytest.mark.parametrize(
    "changes",
    [
        {"variant": "jit"},
        {"call": None},
        {"missing": "both a time and a reason"},
        {"error": None},
        {"first_call_s": 0},
        {"kept": -1},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_wrong_way_of_running_a_model_is_not_valid(changes: dict[str, Any]) -> None:
    made = json.loads(models_record().to_json())
    jsonschema.validate(made, SCHEMA)
    made["models"][0]["forwards"][0].update(changes)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made, SCHEMA)


def test_the_schema_names_every_variant() -> None:
    assert SCHEMA["$defs"]["variant"]["enum"] == list(VARIANTS)


def test_a_models_opponent_is_the_fastest_of_torchs_ways() -> None:
    first, _, last = models_record().models
    assert first.opponent() == pytest.approx(0.055)
    assert first.ratios() == {"converted": pytest.approx(1.1)}
    assert last.ratios() == {}
    captured = dataclasses.replace(
        first, forwards=[*first.forwards, forward("captured", 10.0), forward("backend", 110.0)]
    )
    # maxconv's own ways are no opponents.
    assert captured.opponent() == pytest.approx(0.055)
    expected = {"converted": 1.1, "captured": 5.5, "backend": 0.5}
    assert captured.ratios() == pytest.approx(expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"contender": "ours"},
        {"work": "half"},
        {"kernel": None, "call": None},
        {"missing": "both a time and a reason"},
        {"extra": 1},
    ],
    ids=str,
)
def test_the_schema_refuses_a_bad_measurement(changes: dict[str, Any]) -> None:
    made = json.loads(record().to_json())
    entry = made["results"][0]["measurements"][0]
    made["results"][0]["measurements"][0] = {**entry, **changes}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made, SCHEMA)


RESULTS = ROOT / "benchmarks" / "results"
#: `benchmarks/max_models.py` keeps its own, which tests/host/test_max_models_record.py reads.
KEPT = sorted(set(RESULTS.rglob("*.json")) - set(RESULTS.glob("*-max-models.json")))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_the_kept_records(path: Path) -> None:
    jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), SCHEMA)
    kept = load(path)
    assert path.parent == RESULTS
    assert path.name.startswith(results_name(kept).removesuffix(".json"))
    assert kept.commit
    assert not kept.modified
    # Its tables stand beside it, made by `--report`.
    assert path.with_suffix(".md").read_text(encoding="utf-8") == report.render_markdown([kept])


def test_every_table_is_of_a_record() -> None:
    tables = set(RESULTS.rglob("*.md")) - set(RESULTS.glob("*-max-models.md"))
    assert [path.with_suffix(".json") for path in sorted(tables)] == KEPT


def test_the_name_of_a_record() -> None:
    assert results_name(record()) == "2026-07-27-fast-one-float32.json"
    assert results_name(gpu_record()) == "2026-07-27-nvidia-h200-bfloat16.json"
    assert results_name(models_record()) == "2026-07-27-fast-one-float32-models.json"
    networks = gpu_record(command="python -m maxconv bench --device gpu --problems networks")
    assert results_name(networks) == "2026-07-27-nvidia-h200-bfloat16-networks.json"
    assert slug("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz") == "intel-xeon-platinum-8481c"
    assert slug("AMD EPYC 9654 96-Core Processor") == "amd-epyc-9654-96-core"
    assert slug("™") == "unknown"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 4}', '{"format": 4}', '{"format": 4, "summary": []}']
)
def test_what_is_no_record(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"record\.json: this is no record of format 4"):
        load(path)


@pytest.mark.parametrize(
    ("format", "message"),
    [(3, "its format is 3, an old one: measure again"), (5, "its format is 5, unknown here")],
)
def test_a_record_of_another_format(format: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(record().to_json().replace('"format": 4', f'"format": {format}'))
    with pytest.raises(ValueError, match=rf"record\.json: .* of format 4: {message}$"):
        load(path)


# Tables.


def rows_of(text: str, name: str) -> list[list[str]]:
    """Returns the cells of a problem's rows, table by table."""
    return [re.split(r"\s{2,}", line) for line in text.splitlines() if line.startswith(name)]


def test_the_tables_for_people() -> None:
    text = report.render_text([record()])
    lines = text.splitlines()
    assert lines[0].startswith("2026-07-27, Fast One, 2 threads, float32, maxconv 1.2.3, max 1.2.3")
    assert lines[0].endswith("commit 0123456789")
    kernel, call, fused, *_ = rows_of(text, "resnet50.conv2_3x3")
    shape = ["resnet50.conv2_3x3", "1x56x56x64 -> 64 3x3 p1x1"]
    assert kernel == [*shape, "1000", "920-1160", "231", "58%", "800*", "1500", "0.80x", "1.50x"]
    assert call[:3] == [*shape, "1050"]
    assert call[-2:] == ["0.81x", "1.48x"]
    assert fused == [*shape, "1020", "938-1183", "227", "57%", "1000", "0.98x"]
    expand = rows_of(text, "resnet50.conv2_expand")[0]
    assert expand[6:] == ["1250", "2000*", "1.25x", "2.00x"]
    assert rows_of(text, "geometric mean")[0][-2:] == ["1.19x", "4.48x"]
    # Of little, more digits.
    assert rows_of(text, "mobilenet.dw_14")[0][5] == "0.5%"
    assert "The peak is 400 GFLOP/s: float32 FMA, 256 bits, of operands that stay in" in text
    assert re.search(r"of the peak, 2-D +bare +kernel +39% +26% +resnet50", text)
    assert "Without max: resnet50.conv2_expand: Failed to compile." in text
    assert "Without torch (filter reordered before): resnet50.conv2_expand: no kernel." in text
    assert "Without max (filter as an input): audio.dilated: the process dies of SIGSEGV." in text
    assert "outputs equal, bit for bit; 2.00 ms against 2.10 ms one by one" in text
    assert re.search(r"vae\.up_256 +16\.0 +8\.0 +2\.0 +1\.5 +yes", text)
    assert "With bias, ReLU and a residual: as a user calls it" in text
    assert "Other programs" not in text
    # Columns under each other.
    header = next(line for line in lines if line.startswith("problem"))
    assert header.index("convolution") == next(
        line for line in lines if line.startswith("resnet50.conv2_3x3")
    ).index("1x56x56x64")


def test_the_tables_of_a_gpu() -> None:
    text = report.render_text([gpu_record()])
    assert "NVIDIA H200, driver 580.1, bfloat16" in text.splitlines()[0]
    assert "cudnn 9.19" in text.splitlines()[0]
    kernel, _, fused, *_ = rows_of(text, "resnet50.conv2_3x3@64")
    assert kernel[4:] == ["574", "42.6", "1.65x"]
    assert fused[5:] == ["105", "61.0", "50.0", "3.28x", "1.91x", "1.56x"]
    assert rows_of(text, "mobilenet.dw_56_128@64")[2][5:] == ["183", "-", "-", "3.75x", "-", "-"]
    assert "TFLOP/s" in text
    assert "With bias, SiLU and a residual" in text
    assert "Without max: mobilenet.dw_56_128@64: not here: No module named 'max'." in text


def test_the_tables_of_models() -> None:
    text = report.render_text([models_record()])
    header = next(line for line in text.splitlines() if line.startswith("model "))
    assert re.split(r"\s{2,}", header) == [
        *("model", "batch", "eager, contiguous", "eager", "compile", "converted"),
        "torch's best / converted",
    ]
    rows = rows_of(text, "resnet50 ")
    # The fastest of torch's ways is the opponent.
    assert rows[0] == ["resnet50", "1", "75", "60", "55", "50", "1.10x"]
    assert rows[1] == ["resnet50", "8", "-", "1500", "-", "1200", "1.25x"]
    assert rows[2] == ["resnet50", "1", "2.50", "2.50", "2.50", "2.50"]
    assert rows[4] == ["resnet50", "1", *["3 + 1"] * 4]
    assert rows[6] == ["resnet50", "1", *["1.0e-06"] * 4]
    assert rows_of(text, "tasnet")[0] == ["tasnet", "1", "-", "9", "-", "-", "-"]
    assert [row[1:] for row in rows_of(text, "geometric mean")] == [
        ["all", "1.17x"],
        ["1", "1.10x"],
        ["> 1", "1.25x"],
    ]
    for words in (
        "Without tasnet, batch 1, converted: no such layer.",
        "Converted, resnet50: 1 left in PyTorch: it has forward hooks.",
        "reduce-overhead, captured, backend-reduce: do not apply to a CPU, which has no CUDA",
        "Ratios above 1 are in maxconv's favour",
    ):
        assert words in text
    # What is about single convolutions is not there.
    assert "Summary" not in text
    assert "do not apply" not in report.render_text([models_record(device="gpu")])


def test_other_ways_to_call_have_a_table() -> None:
    lines = report.render_text([record()]).splitlines()
    header = next(line for line in lines if "maxconv (filter packed in each call)" in line)
    row = re.split(r"\s{2,}", lines[lines.index(header) + 1])
    assert row == ["resnet50.conv2_3x3", "1250 / 1300", "800 / 850", "-"]


def test_the_tables_warn() -> None:
    busy = dataclasses.replace(record().machine, load=1.5)
    too_much = Memory("vae.up_256", 1, 1, 1, 9 << 20)
    functions = Functions(("audio.dilated",), False, 0.002, 0.002)
    made = record(machine=busy, memory=[too_much], functions=functions, modified=True)
    text = report.render_text([made])
    for words in ("(load 1.5)", "outputs NOT equal", "1 convolution with", "with changes"):
        assert words in text
    assert re.search(r"vae\.up_256 .* NO\n", text)


def test_a_note_is_said_once() -> None:
    noted = [
        result("unet.down1", {}, measurements=[measurement(OURS_FUSED, 1, note="one of 3")]),
        result("unet.mid", {}, measurements=[measurement(OURS_FUSED, 1, note="one of 3")]),
    ]
    text = report.render_text([record(results=noted)])
    assert text.count("Of maxconv, fused: everywhere: one of 3.") == 1


def test_the_document() -> None:
    text = report.render_markdown([record()])
    assert text.startswith("# Fast One, float32\n\n`python -m maxconv bench`: 2026-07-27, Fast One")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    expected = ["resnet50.conv2_3x3", "1x56x56x64 -> 64 3x3 p1x1", "1000", "920-1160", "231"]
    assert [*expected, "58%", "800*", "1500", "0.80x", "1.50x"] in cells
    assert "## With bias, ReLU and a residual: the kernel alone" in text
    for table in text.split("\n\n"):
        if table.startswith("|"):
            assert len({line.count("|") for line in table.splitlines()}) == 1


def test_a_document_is_of_one_commit() -> None:
    one, other = record(), gpu_record(commit="f" * 40)
    assert report.render_markdown([one, gpu_record()]).count("\n# ") == 1
    for render in (report.render_markdown, report.render_text):
        with pytest.raises(ValueError, match=r"report: the records are of the commits 0123.*, fff"):
            render([one, other])
    with pytest.raises(ValueError, match="of files that differ from its commit"):
        report.render_markdown([one, record(modified=True)])
    # One such record can be looked at.
    assert "with changes" in report.render_markdown([record(modified=True)])


# The plot.


@pytest.mark.parametrize("made", [record(), gpu_record()], ids=["cpu", "gpu"])
def test_the_plot(made: Record, tmp_path: Path) -> None:
    from maxconv.bench.plot import plot

    for name in ("plot.png", "plot.svg"):
        plot(made, tmp_path / name)
    picture = (tmp_path / "plot.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    # Twice the 800 pixels at which it is shown.
    assert int.from_bytes(picture[16:20], "big") == 1600
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    for words in (made.results[0].name, "1.0", "torch", "the convolution alone"):
        assert f"<!-- {words} -->" in drawn
    shown = {name for work in (BARE, FUSED) for name in peers(made.results, work, KERNEL)}
    for name, color in COLORS.items():
        # maxconv's is that of the line at 1.0.
        assert (color in drawn) == (name in shown or name == "maxconv"), name


def test_a_ratio_beyond_the_axis_is_written(tmp_path: Path) -> None:
    from maxconv.bench.plot import plot

    plot(record(), tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert "<!-- 30 -->" in drawn
    assert "<!-- 1.5 -->" in drawn


def test_nothing_to_plot(tmp_path: Path) -> None:
    from maxconv.bench.plot import plot

    alone = record(results=[result("unet.down1", {OURS: 1})])
    with pytest.raises(ValueError, match="no other contender than maxconv"):
        plot(alone, tmp_path / "plot.svg")
