"""Tuned tables: what is written, what is read, and what the kernels make of it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.host.kernel_checks import AVX512

from maxconv import _cli as cli
from maxconv import _tuned as tuned
from maxconv._fields import DOT_KERNELS, Kernel, Precision
from maxconv._problems import parse_problem
from maxconv._tuned import FILE_VARIABLE, TABLE_VARIABLE, derived, text_of
from maxconv._tuned_table import (
    CUT_FIELDS,
    Device,
    Row,
    TableError,
    Timing,
    kernel_versions,
    read_table,
    this_device,
    write_table,
)
from maxconv.tuner.command import this_environment
from maxconv.tuner.measure import CpuMeasurer, Protocol
from maxconv.tuner.records import Environment, Records
from maxconv.tuner.space import Space, open_space, open_spaces
from maxconv.tuner.table import Changes, Confirmation, change_table, configuration_in

HERE = Device("a CPU", "x86_64", ("avx2", "fma"))
VERSIONS = {"maxconv": "0.1.0", "max": "26.7.0", "mojo": "1.2.0", "operations": "abc"}

#: One that Winograd's kernel takes, and one of a single tap.
SQUARE = parse_problem("1x12x12x64:64x3x3")
POINT = parse_problem("1x8x8x32:64x1x1")
#: The kernel that rows are of, unless a test says another.
KERNEL = "implicit_gemm"
#: Pixels of a CPU's register tile, of which Winograd's blocks are multiples.
TILE_ROWS = 14 if AVX512 else 6
#: Cuts that dispatch does not choose, as ``CUT_FIELDS`` names their numbers.
CUTS = {SQUARE: (0, 4, 2, 1, 1, 144), POINT: (0, 4, 3, 1, 1, 16)}
#: One that dispatch gives to the implicit GEMM, and that Winograd's kernel takes.
SMALL = parse_problem("1x9x9x16:24x3x3", padding=1)
#: One of a filter a channel.
DEEP = parse_problem("1x9x9x24:24x3x3", padding=1, groups=24)


def row(
    problem: Any = SQUARE,
    cut: tuple[int, ...] | None = None,
    kernel: str = KERNEL,
    **changed: Any,
) -> Row:
    made = Row(
        problem=tuple(problem.numbers()),
        dtype="float32",
        out_dtype="float32",
        threads=1,
        device=HERE,
        configuration=dict(zip(CUT_FIELDS[kernel], cut or CUTS[problem], strict=True)),
        before=Timing("winograd", 12.5, 0.01),
        after=Timing(kernel, 10.0, 0.02),
        gain=(1.2, 1.25, 1.3),
        versions=VERSIONS,
    )
    return dataclasses.replace(made, **changed)


def confirmation(gain: tuple[float, float, float], **changed: Any) -> Confirmation:
    made = Confirmation(
        problem=tuple(SQUARE.numbers()),
        dtype="float32",
        out_dtype="float32",
        units=1,
        tuned=KERNEL,
        configuration=dict(zip(CUT_FIELDS[KERNEL], CUTS[SQUARE], strict=True)),
        kernel="winograd",
        before=12.5e-6,
        before_spread=0.01,
        after=10e-6,
        after_spread=0.02,
        gain=gain,
    )
    return dataclasses.replace(made, **changed)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    rows = [row(), row(POINT), row(threads=2), row(device=dataclasses.replace(HERE, model="B"))]
    write_table(path, rows)
    assert sorted(read_table(path), key=repr) == sorted(rows, key=repr)
    assert [file.name for file in tmp_path.iterdir()] == ["tuned.yaml"]
    write_table(path, [])
    assert read_table(path) == []


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    write_table(path, [row(), row(POINT)])
    whole = path.read_text()
    # However a copy was cut off, it is no table.
    for length in range(0, len(whole) - 1, 7):
        path.write_text(whole[:length])
        with pytest.raises(TableError, match="tuned table: "):
            read_table(path)
    for found, changed, message in [
        ("schema: 2", "schema: 1", "has schema 1; this version reads 2"),
        ("count: 2", "count: 3", "has not the 3 rows of its count"),
        ("rows:", "lines:", "has not the keys schema, count and rows"),
        ("threads: 1", "threads: 0", r"row \d of .*one thread"),
        ("threads: 1", "threads: 1.5", r"row \d of .*whole numbers"),
        ("threads: 1", "units: 1", r"row \d of .*keys"),
        ("float32", "float 32", r"row \d of .*no names of types"),
        ("access: 0, tile_rows", "tile_rows", r"row \d of .*configuration"),
        ("depth: 144", "depth: deep", r"row \d of .*whole numbers"),
        ("problem: [1, ", "problem: [", r"row \d of .*22 whole numbers"),
        ("us: 12.5", "ms: 12.5", r"row \d of .*TypeError"),
        ("implicit_gemm", "pointwise", r"row \d of .*'pointwise' is not one of implicit_gemm"),
        ("implicit_gemm", "winograd", r"row \d of .*has not shares_input"),
    ]:
        assert found in whole
        path.write_text(whole.replace(found, changed))
        with pytest.raises(TableError, match=message):
            read_table(path)
    write_table(path, [row(), row(gain=(1.3, 1.4, 1.5))])
    with pytest.raises(TableError, match="has two rows of one problem"):
        read_table(path)


def test_the_kernels_file_has_the_rows_of_this_cpu_and_version() -> None:
    other = dataclasses.replace(HERE, features=("avx2",))
    newer = {**VERSIONS, "operations": "abd"}
    rows = [row(), row(POINT, device=other), row(threads=2, versions=newer), row(threads=3)]
    text = text_of(derived(rows, HERE, VERSIONS))
    numbers = "1 64 64 1 1 12 12 1 3 3 1 1 1 1 1 1 0 0 0 0 0 0"
    cut = "implicit_gemm 0 4 2 1 1 144"
    assert text == (
        "maxconv tuned cpu 2\n"
        f"float32 float32 1 {numbers} = {cut}\n"
        f"float32 float32 3 {numbers} = {cut}\n"
        "end 2\n"
    )


@pytest.mark.parametrize(
    ("gain", "holds"),
    [
        ((1.05, 1.1, 1.15), True),
        ((1.019, 1.02, 1.021), True),
        # Less than a row has, a turn in four that is slower, more noise than gain.
        ((1.018, 1.019, 1.02), False),
        ((0.99, 1.3, 1.5), False),
        ((1.001, 1.05, 1.2), False),
        ((0.8, 0.9, 0.95), False),
    ],
)
def test_a_gain_holds_where_it_exceeds_the_noise(
    gain: tuple[float, float, float], holds: bool
) -> None:
    assert confirmation(gain).holds is holds


def test_a_table_keeps_what_was_confirmed_last(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    good, bad = confirmation((1.2, 1.25, 1.3)), confirmation((0.9, 1.0, 1.1))
    wide = dataclasses.replace(good, units=4)
    assert change_table(path, [bad], HERE, VERSIONS) == Changes(0, 0)
    assert not path.exists()
    assert change_table(path, [bad, good, wide], HERE, VERSIONS) == Changes(2, 0)
    assert read_table(path) == [row(), row(threads=4)]
    assert change_table(path, [good], HERE, VERSIONS) == Changes(0, 0)
    # Of another CPU, which says nothing of this one.
    assert change_table(path, [bad], dataclasses.replace(HERE, model="B"), VERSIONS) == Changes(
        0, 0
    )
    assert change_table(path, [good, bad], HERE, VERSIONS) == Changes(0, 1)
    assert read_table(path) == [row(threads=4)]
    path.write_text("schema: 9\n")
    with pytest.raises(TableError):
        change_table(path, [good], HERE, VERSIONS)
    assert path.read_text() == "schema: 9\n"
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        change_table(tmp_path / "nowhere" / "tuned.yaml", [good], HERE, VERSIONS)


@pytest.fixture(scope="module")
def space() -> Space:
    return open_space(SQUARE, "cpu", units=1)


def test_rows_have_the_fields_of_the_kernel(space: Space) -> None:
    asked = [(SQUARE, "float32"), (SQUARE, "uint8"), (DEEP, "float32")]
    asked += [(parse_problem("1x9x9x16:2x3x3"), "float32")]
    asked += [(parse_problem("1x9x9x32:32x3x3", groups=8), "float32")]
    found = set()
    for problem, dtype in asked:
        for each in open_spaces(problem, "cpu", dtype=dtype, units=1):
            assert each.judge.fields == CUT_FIELDS[each.kernel.name.lower()]
            found.add(each.kernel.name.lower())
    assert {"implicit_gemm", "winograd", "depthwise", "grouped", "few_filters"} <= found
    assert found & {"widening", *(kernel.name.lower() for kernel in DOT_KERNELS)}
    assert space.kernel.name.lower() == KERNEL
    assert configuration_in([row(SMALL, (0, TILE_ROWS, 1, 1, 16), "winograd")], space, HERE) is None
    assert configuration_in([row(POINT), row()], space, HERE) == row().configuration
    assert configuration_in([row(threads=2)], space, HERE) is None


def test_records_are_exported(
    space: Space, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records, table = tmp_path / "r.sqlite", tmp_path / "table.yaml"
    here = this_environment()
    good, point = confirmation((1.2, 1.25, 1.3)), tuple(POINT.numbers())
    with Records(records, here) as file:
        file.confirm(space, confirmation((0.9, 1.0, 1.1)))
        file.confirm(space, good)
        file.confirm(space, confirmation((1.0, 1.01, 1.02), problem=point))
        assert file.confirmations("cpu")[1] == good
        assert file.confirmations("sm90") == []
    with Records(records, Environment("another CPU", here.driver, here.versions)) as file:
        file.confirm(space, dataclasses.replace(good, problem=point))
    command = ["tune", "--records", str(records), "--export", str(table)]
    assert cli.main(command) == 0
    told = f"{table}: 3 confirmations of this machine and version; 1 written, 0 removed"
    assert told in capsys.readouterr().out
    [found] = read_table(table)
    assert found == row(device=this_device(), versions=kernel_versions())
    with Records(records, here) as file:
        file.confirm(space, confirmation((0.9, 1.0, 1.1)))
    assert cli.main(command) == 0
    assert "0 written, 1 removed" in capsys.readouterr().out
    assert read_table(table) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--export", "--target", "sm90"], "--export: --target sm90 has no tuned table; cpu has"),
        (["--export"], "--records: None is no file; --export reads one"),
        (["resnet50.conv1", "--export", "x.yaml"], "--export: it takes all problems of --records"),
    ],
)
def test_bad_arguments_of_an_export(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", *arguments]) == 1
    assert message in capsys.readouterr().err


# A process of its own: it reads its table once. It runs two problems, and says how.
_PROBE = """
import json, os, sys
from tests.host.test_tuned import ask
if len(sys.argv) > 1:
    from maxconv import _tuned
    _tuned.use_no_table()
    os.environ[_tuned.FILE_VARIABLE] = sys.argv[1]
print(json.dumps(ask()))
"""

ASKED = [
    (SQUARE, 1, Kernel.AUTO, Precision.TF32),
    (POINT, 1, Kernel.AUTO, Precision.TF32),
    (SQUARE, 2, Kernel.AUTO, Precision.TF32),
    (SQUARE, 1, Kernel.IMPLICIT_GEMM, Precision.TF32),
    (SMALL, 1, Kernel.AUTO, Precision.TF32),
    (SMALL, 1, Kernel.AUTO, Precision.FLOAT32),
    (DEEP, 1, Kernel.AUTO, Precision.TF32),
]


def ask() -> list[list[str]]:
    """How the library runs what is asked: kernel, reason, and what is wrong of the result."""
    from maxconv._fields import Layout, encode_scalars
    from maxconv._library_files import Family
    from maxconv._native import Call, host
    from maxconv._openmp import installed_parallel
    from maxconv.tuner.measure.oracle import operands

    library = host(Family("float32", "float32", "float32", scaled=False))
    found = []
    for problem, threads, kernel, precision in ASKED:
        made = operands(problem, "float32", "float32", 0)
        call = Call.of(
            tuple(map(int, problem.input_shape)),
            tuple(map(int, problem.output_shape)),
            made.filter.size,
            problem.geometry(filter_layout=Layout.PACKED, kernel=kernel, precision=precision),
            encode_scalars(),
        )
        prepared = library.prepare(call)
        made.poison()
        inputs = (made.activation.ctypes.data, made.filter.ctypes.data, 0, 0, 0)
        prepared.run(*inputs, made.output.ctypes.data, threads, installed_parallel())
        chosen, reason = library.explain(prepared, threads)
        found.append([chosen, reason, made.wrong() or ""])
    return found


def probe(table: Path | str, *arguments: str) -> tuple[list[list[str]], str]:
    environment = {**os.environ, TABLE_VARIABLE: str(table), FILE_VARIABLE: "of another process"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join((str(root), str(root / "python")))
    ended = subprocess.run(
        [sys.executable, "-c", _PROBE, *arguments],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[list[str]] = json.loads(ended.stdout)
    return found, ended.stderr


@pytest.fixture(scope="module")
def untuned() -> list[list[str]]:
    found, told = probe("")
    assert "RuntimeWarning" not in told
    assert found[1][0] == "pointwise"
    assert found[3][0] == "implicit_gemm"
    assert not any(reason.startswith("tuned") for _, reason, _ in found)
    return found


def ours(**changed: Any) -> dict[str, Any]:
    return {"device": this_device(), "versions": kernel_versions(), **changed}


def test_the_library_runs_what_was_tuned(untuned: list[list[str]], tmp_path: Path) -> None:
    table = tmp_path / "tuned.yaml"
    write_table(table, [row(**ours()), row(POINT, **ours())])
    found, told = probe(table)
    assert told == ""
    for (kernel, reason, wrong), cut in zip(found, (CUTS[SQUARE], CUTS[POINT]), strict=False):
        assert kernel == "implicit_gemm"
        assert reason.startswith("tuned: register tile ")
        assert f", {cut[-1]} products deep" in reason
        assert wrong == ""
    # Other threads, and a kernel that was asked for.
    assert found[2:] == untuned[2:]


def test_a_row_may_name_another_kernel(untuned: list[list[str]], tmp_path: Path) -> None:
    assert [kernel for kernel, _, _ in untuned[4:]] == [KERNEL, KERNEL, "depthwise"]
    table = tmp_path / "tuned.yaml"
    rows = [row(SMALL, (0, TILE_ROWS, 1, 1, 16), "winograd", **ours())]
    write_table(table, [*rows, row(DEEP, (1, 2, 8), "depthwise", **ours())])
    found, told = probe(table)
    assert told == ""
    assert found[4][0] == "winograd"
    assert found[4][1].startswith("tuned: F(2x2, 3x3), the filter transformed first; ")
    assert found[4][2] == ""
    # Whoever wants exact products gets what dispatch chooses.
    assert found[5] == untuned[5]
    assert found[6][0] == "depthwise"
    assert found[6][1] == f"tuned: {untuned[6][1]}"
    assert found[6][2] == ""
    # Of a kernel that does not take the problem.
    write_table(table, [row(DEEP, (0, TILE_ROWS, 1, 1, 16), "winograd", **ours())])
    assert probe(table) == (untuned, "")


def test_rows_that_are_stale_are_ignored(untuned: list[list[str]], tmp_path: Path) -> None:
    table = tmp_path / "tuned.yaml"
    mine = this_device()
    versions = kernel_versions()
    write_table(
        table,
        [
            # A cut that the kernel refuses; the others are of another place each.
            row(cut=(0, 4, 99, 1, 1, 144), **ours()),
            row(POINT, **ours(device=dataclasses.replace(mine, model="another"))),
            row(POINT, threads=2, **ours()),
            row(threads=2, **ours(versions={**versions, "operations": "another"})),
            row(POINT, out_dtype="bfloat16", **ours()),
        ],
    )
    assert probe(table) == (untuned, "")


def test_tables_that_are_broken_are_told_and_not_used(
    untuned: list[list[str]], tmp_path: Path
) -> None:
    table = tmp_path / "tuned.yaml"
    write_table(table, [row(**ours()), row(POINT, **ours())])
    table.write_bytes(table.read_bytes()[:-40])
    found, told = probe(table)
    assert found == untuned
    assert told.count("RuntimeWarning: what was tuned is not used: tuned table: ") == 1


def test_the_kernels_read_a_whole_file_or_none(untuned: list[list[str]], tmp_path: Path) -> None:
    lines = derived([row(**ours()), row(POINT, **ours())], this_device(), kernel_versions())
    whole = text_of(lines)
    file = tmp_path / "tuned.txt"
    file.write_text(whole)
    assert probe("", str(file))[0][0][1].startswith("tuned: ")
    for broken in (
        whole[: whole.index("end")],
        whole.replace("cpu 2", "cpu 1", 1),
        whole.replace("implicit_gemm", "implicit", 1),
        whole.replace(" = ", " 7 = ", 1),
        whole.replace("_gemm 0", "_gemm x", 1),
    ):
        file.write_text(broken)
        assert probe("", str(file))[0] == untuned


def test_the_users_own_table_is_used_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "tuned.yaml"
    monkeypatch.setattr(tuned, "user_table", lambda: table)
    monkeypatch.delenv(TABLE_VARIABLE, raising=False)
    assert tuned._file() is None
    write_table(table, [row()])
    # Of another machine, all of it.
    assert tuned._file() is None
    write_table(table, [row(), row(**ours())])
    file = tuned._file()
    assert file
    assert file.read_text() == text_of(derived([row()], HERE, VERSIONS))
    monkeypatch.setenv(TABLE_VARIABLE, str(tmp_path / "missing.yaml"))
    with pytest.warns(RuntimeWarning, match=r"what was tuned is not used: .*missing\.yaml"):
        assert tuned._file() is None
    monkeypatch.setenv(TABLE_VARIABLE, "")
    assert tuned._file() is None


def test_a_process_decides_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuned, "_decided", [])
    monkeypatch.setenv(FILE_VARIABLE, "of another process")
    tuned.use_no_table()
    assert FILE_VARIABLE not in os.environ
    tuned.use_table()
    assert tuned.table_in_use() is None
    with pytest.raises(ValueError, match="use None already"):
        tuned.use_file(tmp_path)
    monkeypatch.setattr(tuned, "_decided", [])
    tuned.use_file(tmp_path)
    assert os.environ[FILE_VARIABLE] == str(tmp_path)
    with pytest.raises(ValueError, match=f"use {tmp_path}; measure in another process"):
        tuned.use_no_table()


def test_a_configuration_is_confirmed_as_calls_run_it(
    space: Space,
    untuned: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What was tuned before is not what it is compared with.
    write_table(tmp_path / "tuned.yaml", [row(**ours())])
    monkeypatch.setenv(TABLE_VARIABLE, str(tmp_path / "tuned.yaml"))
    measurer = CpuMeasurer(space, Protocol(confirming=3, burst_s=1e-6))
    try:
        kernel = measurer.dispatched()
        assert kernel == untuned[0][0]
        outcome = measurer.confirm(row().configuration)
        refused = measurer.confirm({**row().configuration, "tiles": 99})
    finally:
        measurer.close()
    assert outcome.error is None
    made = Confirmation.of(space, row().configuration, kernel, outcome)
    assert made
    assert made.before > 0
    assert made.after > 0
    assert made.gain[0] <= made.gain[1] <= made.gain[2]
    assert str(refused.error).startswith(f"{FILE_VARIABLE}: the kernels did not take it: ")


@pytest.mark.extended
@pytest.mark.parametrize("used", [True, False])
def test_a_graphs_op_plans_what_was_tuned(tmp_path: Path, used: bool) -> None:
    table = tmp_path / "tuned.yaml"
    count = os.cpu_count() or 1
    write_table(table, [row(threads=threads + 1, **ours()) for threads in range(count)])
    command = [sys.executable, "-m", "maxconv", "doctor", "--json", "--conv", "1x12x12x64:64x3x3"]
    ended = subprocess.run(
        command,
        env={**os.environ, TABLE_VARIABLE: str(table) if used else ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ended.stdout)["problem"]["reason"].startswith("tuned: ") is used
