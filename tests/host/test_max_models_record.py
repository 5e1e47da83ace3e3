"""The records of `benchmarks/max_models.py`: what they hold, and that their tables say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.documents import ROOT

RESULTS = ROOT / "benchmarks" / "results"
KEPT = sorted(RESULTS.glob("*-max-models.json"))

ABOUT = {"machine", "driver", "versions", "device", "arguments", "rows", "commit"}
ROW = {"model", "size", "dtype", "timings", "compile_s", "distances", "taken", "left", "problems"}
TIMING = ["samples", "best_s", "p10_s", "median_s", "p90_s"]


def _runs(path: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return runs


def _printed(timing: dict[str, float]) -> str:
    """Returns a table's cell: milliseconds, at most four digits."""

    def digits(seconds: float) -> str:
        value = seconds * 1e3
        return f"{value:.{min(2, 4 - len(str(int(value))))}f}"

    median, low, high = (digits(timing[key]) for key in ("median_s", "p10_s", "p90_s"))
    return f"{median} ({low}, {high})"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_what_a_record_holds(path: Path) -> None:
    for run in _runs(path):
        assert set(run) == ABOUT
        assert run["rows"]
        for row in run["rows"]:
            assert set(row) == ROW
            assert row["timings"]
            for timing in row["timings"].values():
                assert list(timing) == TIMING
                assert 0 < timing["p10_s"] <= timing["median_s"] <= timing["p90_s"]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_its_tables_are_of_it(path: Path) -> None:
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for run in _runs(path):
        assert run["commit"] in text
        for row in run["rows"]:
            cells = [_printed(timing) for timing in row["timings"].values()]
            assert any(all(f"| {cell} |" in line for cell in cells) for line in rows), row


def test_there_are_records_and_each_has_tables() -> None:
    assert KEPT
    assert [path.with_suffix(".json") for path in sorted(RESULTS.glob("*-max-models.md"))] == KEPT
