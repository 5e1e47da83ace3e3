"""The command line, and what `maxconv doctor` reports."""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from maxconv import _cli as cli
from maxconv import _doctor as doctor
from maxconv import _library as library
from maxconv import _machine as machine
from maxconv._problem import ConvProblem
from maxconv._version import __version__


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "maxconv", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def explain(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ConvProblem, str]]:
    """Answers for the kernels, and returns what they were asked."""
    asked = []

    def explain_choice(
        problem: ConvProblem,
        *,
        dtype: str,
        device: str,
        multiprocessors: int | None,
        layout: str,
    ) -> tuple[str, str]:
        asked.append((problem, dtype))
        return "implicit_gemm", "the tile is 6 x 32"

    module = types.ModuleType("maxconv._explain")
    module.explain_choice = explain_choice  # type: ignore[attr-defined] # made here
    monkeypatch.setitem(sys.modules, "maxconv._explain", module)
    return asked


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert cli.main(["doctor", "--json", *arguments]) == 0
    loaded: dict[str, object] = json.loads(capsys.readouterr().out)
    return loaded


def test_the_commands() -> None:
    assert set(cli.COMMANDS) == {"demo", "bench", "build", "doctor", "inspect", "tune"}
    finished = run("--help")
    assert finished.returncode == 0
    for name, command in cli.COMMANDS.items():
        assert name in finished.stdout
        assert command.help in finished.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    assert cli.COMMANDS[name].help in capsys.readouterr().out


def test_the_version() -> None:
    finished = run("--version")
    assert (finished.returncode, finished.stdout) == (0, f"maxconv {__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["cure"], ["doctor", "--cure"]])
def test_a_wrong_command_line_exits_with_2(arguments: list[str]) -> None:
    finished = run(*arguments)
    assert finished.returncode == 2
    assert "usage: maxconv" in finished.stderr


def test_a_command_that_is_not_used_is_not_imported() -> None:
    program = (
        "import sys, maxconv._cli as c; c.main(['doctor', '--list']); "
        "sys.exit(any(f'maxconv.{name}' in sys.modules for name in ('_demo', 'bench')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    module = types.SimpleNamespace(add_arguments=add_arguments)
    monkeypatch.setattr(importlib, "import_module", lambda _: module)
    assert cli.main(["bench"]) == 1
    told = capsys.readouterr().err
    assert told == "maxconv bench: matplotlib is not installed; pip install 'maxconv[bench]'\n"
    with pytest.raises(ModuleNotFoundError):
        cli.main(["--debug", "bench"])


def test_an_error_is_one_line_unless_debug_is_asked_for() -> None:
    finished = run("doctor", "--problem", "resnet")
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert finished.stderr.startswith("maxconv doctor: problem: 'resnet' is not a named problem")
    assert finished.stderr.count("\n") == 1
    debugged = run("--debug", "doctor", "--problem", "resnet")
    assert debugged.returncode == 1
    assert "Traceback" in debugged.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    # A pipe that nobody reads any more, as `maxconv doctor | head -0` leaves it.
    reader, writer = os.pipe()
    os.close(reader)
    finished = subprocess.run(
        [sys.executable, "-m", "maxconv", "doctor", "--list"],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (finished.returncode, finished.stderr) == (1, b"")


def test_an_interrupt_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_doctor_reports_what_is_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MAXCONV_CACHE_DIR", str(tmp_path))
    # A package that takes no time to compile; test_library.py compiles the kernels.
    package = tmp_path / "operations"
    package.mkdir()
    (package / "__init__.mojo").write_text("comptime ONE = 1\n")
    monkeypatch.setattr(library, "OPERATIONS", package)
    made = report(capsys)
    assert set(made) == {"versions", "cpu", "gpus", "cache"}
    versions = made["versions"]
    assert isinstance(versions, dict)
    assert versions["maxconv"] == __version__
    assert versions["python"] == platform.python_version()
    assert versions["numpy"] == np.__version__
    assert versions["max"].startswith("26.7.")
    assert versions["mojo"].startswith("1.2.")
    cpu = made["cpu"]
    assert isinstance(cpu, dict)
    assert cpu["model"]
    assert 1 <= cpu["usable_threads"] <= cpu["threads"]
    assert cpu["features"]
    cache = made["cache"]
    assert isinstance(cache, dict)
    assert cache["directory"] == str(tmp_path / "maxconv")
    assert cache["compiled"] is False
    library.library_path()
    after = report(capsys)["cache"]
    assert isinstance(after, dict)
    assert (after["compiled"], after["entries"]) == (True, 1)


def test_doctor_reports_the_features_that_the_system_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    cpuinfo = "processor : 0\nmodel name : A CPU\nflags : fpu avx2 amx_tile ht\n\nprocessor : 1\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: cpuinfo)
    assert machine.cpu_model() == "A CPU"
    assert machine.cpu_features() == ("avx2", "amx_tile")


def test_doctor_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"machdep.cpu.brand_string": "Apple M4", "hw.optional.arm.FEAT_I8MM": "1"}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(machine, "_sysctl", lambda name: answers.get(name, ""))
    assert machine.cpu_model() == "Apple M4"
    assert machine.cpu_features() == ("asimd", "i8mm")


def test_doctor_asks_the_kernels_about_a_written_problem(
    explain: list[tuple[ConvProblem, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--conv", "2x56x48x64:32x3x5", "--stride", "2", "--dilation", "1x2"]
    arguments += ["--padding", "0x1x2x3", "--groups", "4", "--dtype", "bfloat16"]
    made = report(capsys, *arguments)["problem"]
    problem, dtype = explain[0]
    assert str(problem) == "2x56x48x64 -> 32 3x5 s2x2 p0:1x2:3 d1x2 g4"
    assert dtype == "bfloat16"
    assert made == {
        "name": "2x56x48x64:32x3x5",
        "convolution": str(problem),
        "dtype": "bfloat16",
        "layout": "NHWC",
        "target": "cpu",
        "multiprocessors": None,
        "output_shape": [2, 28, 23, 32],
        "gemm": {"m": 2 * 28 * 23, "n": 8, "k": 3 * 5 * 16, "groups": 4},
        "flops": 2 * 2 * 28 * 23 * 32 * 3 * 5 * 16,
        "bytes": 2 * (2 * 56 * 48 * 64 + 32 * 3 * 5 * 16 + 2 * 28 * 23 * 32),
        "kernel": "implicit_gemm",
        "reason": "the tile is 6 x 32",
    }


def test_doctor_writes_the_same_for_people(
    explain: list[tuple[ConvProblem, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--problem", "resnet50.conv2_3x3"]) == 0
    lines = dict(
        line.split(maxsplit=1)
        for line in capsys.readouterr().out.splitlines()
        if not line.startswith(" ")
    )
    assert len(explain) == 1
    assert lines["maxconv"] == __version__
    assert lines["problem"].startswith("resnet50.conv2_3x3: 1x56x56x64 -> 64")
    assert lines["target"] == "this machine's cpu"
    assert lines["kernel"] == "implicit_gemm"
    assert lines["why"] == "the tile is 6 x 32"


def test_doctor_lists_the_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert cli.main(["doctor", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [line.split()[0] for line in lines] == [row["name"] for row in rows]
    assert {"name": "resnet50.stem", "family": "resnet50"}.items() <= rows[0].items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--conv", "1x56x56x64"], "conv: '1x56x56x64' is not written"),
        (["--conv", "1x56x56x64:64x3x3", "--stride", "0"], "stride: (0, 0) has a non-positive"),
        (["--conv", "1x56x56x64:64x3x3", "--stride", "q"], "stride: 'q' is not written"),
        (["--conv", "1x56x56x64:64x3x3", "--padding", "1x1"], "padding: (1, 1) has 2 entries"),
    ],
)
def test_doctor_names_a_bad_argument(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"maxconv doctor: {message}")
