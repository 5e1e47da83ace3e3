"""What measures configurations on a GPU is chosen and built here, without one."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from maxconv import _cli as cli
from maxconv._problems import find_problem
from maxconv._program import LIBRARIES, Pipe, ProgramError
from maxconv.tuner.gpu.build import build, built_versions, tasks_of
from maxconv.tuner.gpu.choose import ChoiceSettings, choose
from maxconv.tuner.gpu.configurations import (
    NOT_IN_TABLE,
    Configurations,
    Listed,
    table_rows,
    without_split,
)
from maxconv.tuner.gpu.folder import PROGRAM, Folder, read_folder, write_folder
from maxconv.tuner.gpu.problems import Measured
from maxconv.tuner.gpu.run import RESULTS, Result, Timed
from maxconv.tuner.records import Environment, Records
from maxconv.tuner.space import Space, open_space

NAME = "resnet50.conv3_3x3"

#: Fields of rows of the hand-written table, in their order: operations/nvidia/sm90/gemm.
ROWS = {
    1: (256, 128, 2, 1, 1, 2, 1, 1, 0, 4, 4, 0, 0, 0, 64, 2, 2, 16, 1, 0, 1, 0),
    7: (160, 64, 1, 1, 1, 2, 0, 1, 8, 4, 9, 0, 1, 0, 32, 5, 2, 8, 1, 0, 0, 1),
    11: (128, 128, 1, 1, 8, 2, 1, 1, 8, 4, 7, 0, 0, 0, 32, 4, 2, 16, 1, 0, 0, 0),
    17: (64, 80, 2, 1, 1, 1, 1, 0, 0, 11, 11, 0, 0, 0, 64, 2, 2, 16, 1, 0, 1, 0),
}


def asked(batch: int = 8) -> Measured:
    problem = replace(find_problem(NAME).problem, batch=batch)
    return Measured(NAME, problem, 3, "problem", 32)


def space() -> Space:
    return open_space(asked().problem, "sm90", residual=True)


def test_the_table_is_told_field_by_field() -> None:
    judge = space().judge
    rows = {entry.row: entry for entry in table_rows(judge)}
    assert {row: rows[row].values for row in ROWS} == ROWS
    assert NOT_IN_TABLE not in rows
    row, split = judge.facts.row("choice")
    assert row in rows
    # The other way: the kernel reads from the numbers what it wrote.
    listed = Configurations(without_split(judge.fields), tuple(rows.values()))
    [judged] = judge.judge([listed.configuration([*rows].index(row), split)])
    assert judged.refusal is None
    [first] = judge.judge([listed.configuration([*rows].index(3), 1)])
    values = dict(zip(listed.fields, rows[3].values, strict=True))
    assert first.counts["threads"] == 128 * (1 + values["consumers"])
    assert first.counts["accumulators"] == 192 * 128 / (2 * 128)
    rings = 128 * (192 * 5 + 128 * 5)
    buffers = values["consumers"] * 3 * 32 * 128
    assert 0 < first.counts["shared_bytes"] - rings - buffers <= 1024


def test_what_is_chosen(tmp_path: Path) -> None:
    problems = [asked(1), asked(64)]
    settings = ChoiceSettings(configurations=9, studied=1, population=6, generations=1)
    texts: list[str] = []
    made = choose(problems, settings, texts.append)
    table = [entry for entry in made.listed if entry.row != NOT_IN_TABLE]
    new = made.listed[len(table) :]
    assert table == sorted(table, key=lambda entry: entry.row)
    assert 1 <= len(new) <= 9
    assert {entry.origin for entry in new} <= {"dressed", "neighbour", "genetic"}
    assert not {entry.values for entry in new} & {entry.values for entry in table}
    assert texts[0] == "breeding configurations (1 of 1, 0 so far)"
    tasks = tasks_of(problems, made, slower=1.0)
    for problem, task in zip(problems, tasks, strict=True):
        ratios = [ratio for _, _, ratio in task.candidates]
        assert ratios == sorted(ratios)
        assert task.numbers == tuple(problem.problem.numbers())
        own = [ratio for index, _, ratio in task.candidates if index < len(table)]
        others = [ratio for index, _, ratio in task.candidates if index >= len(table)]
        assert min(own) == 1.0 < max(own)
        assert max(others, default=0.0) <= 1.0
    with pytest.raises(ValueError, match="there is none to choose configurations for"):
        choose([], settings)


def test_what_was_measured_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = without_split(space().judge.fields)
    made = Configurations(fields, (Listed(ROWS[1], 1), Listed(ROWS[11], origin="genetic")))
    write_folder(tmp_path, Folder("now", {"maxconv": "1"}, made, ()))
    timed = (
        Timed(1, 4, [2e-5] * 5, [3e-5] * 5, final=True),
        Timed(0, 1, error="wrong: 1 of 2 elements"),
    )
    result = Result(NAME, tuple(asked().problem.numbers()), "fused", 3, "a GPU", (0, 1), timed)
    about = {"device": "a GPU", "driver": "5", "versions": {"maxconv": "1"}}
    lines = [{"about": about}, asdict(result)]
    (tmp_path / RESULTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = tmp_path / "trials.sqlite"
    command = ["tune", "--target", "sm90", "--import", str(tmp_path), str(tmp_path)]
    assert cli.main([*command, "--records", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "30.00 us, 20.00 us by 1/4, 1.500x +- 0.000" in printed
    assert f"2 trials written to {file}" in printed
    with Records(file, Environment("a GPU", "5", {"maxconv": "1"})) as records:
        kept = records.of(space())
    by_split = {entry.configuration["split_k"]: entry for entry in kept}
    assert by_split[4].seconds == pytest.approx(2e-5)
    assert by_split[4].configuration == made.configuration(1, 4)
    assert by_split[1].error == "wrong: 1 of 2 elements"
    assert by_split[1].problem == json.dumps(asked().problem.numbers())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"configurations": 0}, "configurations: 0 is not positive"),
        ({"dressed": 0.8, "neighbours": 0.3}, "0.8 and 0.3 exceed 1 together"),
    ],
)
def test_bad_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChoiceSettings(**settings)  # type: ignore[arg-type]


def test_the_table_runs_nothing() -> None:
    fields = without_split(space().judge.fields)
    new = Configurations(fields, (Listed(ROWS[1]),))
    with pytest.raises(ValueError, match=f"{NAME}: no row of the hand-written table runs it"):
        tasks_of([asked()], new, slower=2.0)


def test_a_folder_of_others_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("x")
    assert cli.main(["tune", "--target", "sm90", NAME, "--build", str(tmp_path)]) == 1
    assert f"--build: {tmp_path} holds other files" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "x"


@pytest.mark.extended
def test_the_program_is_built(tmp_path: Path) -> None:
    ptx = importlib.import_module("tests.ptx")
    fields = without_split(space().judge.fields)
    new = list(ROWS[1])
    new[fields.index("num_act_pipeline_stages")] = 3
    made = Configurations(fields, (Listed(ROWS[1], 1), Listed(tuple(new), origin="neighbour")))
    folder = tmp_path / "built"
    build(folder, made, tasks_of([asked()], made, slower=2.0), built_versions())
    held = read_folder(folder)
    assert held.configurations == made
    assert json.loads(json.dumps(made.as_json())) == made.as_json()
    kernels = [text for text in ptx.held(folder / PROGRAM) if "wgmma" in text]
    assert len(kernels) == 2
    if shutil.which("ptxas"):
        for number, text in enumerate(kernels):
            path = tmp_path / f"{number}.ptx"
            path.write_text(text)
            assert ptx.NO_SPILLS in ptx.assemble(path, tmp_path)
    try:
        subprocess.run(["nvidia-smi"], capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        with pytest.raises(ProgramError, match=r"libnvidia-ml|no GPU|CUDA"):
            Pipe([str(folder / PROGRAM)], folder / LIBRARIES)
