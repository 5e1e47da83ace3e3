"""The benchmark of a GPU, run from a folder: with torch's CPU for the GPU, and a fake program."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tests.bench_gpu import by_key, fake
from tests.bench_records import SCHEMA
from tests.documents import ROOT
from torch import Tensor

from maxconv import _cli as cli
from maxconv import _library as library
from maxconv._problems import NamedProblem, find_problem, load_families, parse_problem
from maxconv.bench import command, environment
from maxconv.bench.device import GPU, LAUNCHES, ROTATED_NBYTES
from maxconv.bench.entrant import BARE, CONTENDERS, FUSED, WORKS, Key, Mismatch
from maxconv.bench.gpu import build as building
from maxconv.bench.gpu import graphs, operands, peers_torch, run
from maxconv.bench.gpu.clock import GraphRun, LaunchRun, OnHost, distance, input_sets
from maxconv.bench.gpu.operands import Operands, filled
from maxconv.bench.gpu.program import LIBRARIES, PROGRAM, Program, ProgramError
from maxconv.bench.record import Result, load

pytestmark = pytest.mark.usefixtures("few_sets")

QUICK = dataclasses.replace(GPU.full, pause_s=0, longest_pause_s=0, rounds=2, calls=1, slow_s=1e9)

NAME = "odd.groups_uneven"

#: Small, of every rank; the first of a shape that the graphs take.
PROBLEMS = [
    NamedProblem("graphs", parse_problem("2x5x4x6:8x3x3", padding=1)),
    NamedProblem("one", parse_problem("2x31x8:12x3", stride=2, dilation=2, padding=2)),
    NamedProblem("three", parse_problem("1x3x4x5x4:6x2x3x2", padding=(1, 1, 0, 0, 1, 1))),
    find_problem(NAME),
]


def measure(
    folder: Path,
    problems: list[NamedProblem] = PROBLEMS[:1],
    contenders: tuple[str, ...] = ("maxconv", "torch"),
    works: tuple[str, ...] = WORKS,
) -> list[Result]:
    kept: list[int] = []
    made = run.measure_problems(
        problems,
        "bfloat16",
        QUICK,
        contenders,
        works,
        folder=folder,
        clock=OnHost(),
        keep=lambda results: kept.append(len(results)),
    )
    assert kept == list(range(1, len(problems) + 1))
    return made


# The whole run.


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    folder = tmp_path_factory.mktemp("dry")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "input_sets", lambda _: 2)
        # What it generates needs a compiler; what it returns is held to the reference.
        patch.setattr(torch, "compile", lambda function: function)
        return measure(fake(folder / "built"), PROBLEMS, CONTENDERS)


def test_every_contender_is_measured_or_has_a_reason(dry_run: list[Result]) -> None:
    assert [result.name for result in dry_run] == [named.name for named in PROBLEMS]
    expected = {Key(name, work) for name, works in GPU.works.items() for work in works}
    for result in dry_run:
        entries = by_key(result)
        assert expected <= set(entries)
        timed = {key for key, entry in entries.items() if entry.missing is None}
        for key in (*(Key(name, work) for name in ("maxconv", "torch") for work in WORKS),):
            assert key in timed
            entry = entries[key]
            assert entry.kernel is not None
            assert entry.call is not None
            assert entry.kernel.samples == entry.call.samples == QUICK.rounds
            assert entry.error is not None
            assert entry.error < 2**-6
        # There is no cuDNN and no GPU for MAX on this machine, and the record says so.
        assert (entries[Key("cudnn", FUSED)].missing or "").startswith("not here: ")
        for kind in graphs.GRAPHS.values():
            assert (entries[kind.key].missing or "").startswith("not here: ")


def test_the_programs_times_are_of_one_launch(dry_run: list[Result]) -> None:
    entry = by_key(dry_run[0])[Key("maxconv", FUSED)]
    assert entry.kernel is not None
    assert entry.call is not None
    assert entry.kernel.median_s == pytest.approx(1e-6)
    assert entry.call.median_s == pytest.approx(3e-6)
    assert dry_run[0].convolutions == LAUNCHES


def test_only_what_is_wanted_is_measured(tmp_path: Path) -> None:
    (result,) = measure(tmp_path / "nothing", contenders=("torch",), works=(BARE,))
    assert set(by_key(result)) == {Key("torch")}
    (result,) = measure(fake(tmp_path / "built"), contenders=("maxconv",), works=(FUSED,))
    assert {key.contender for key in by_key(result)} == {"maxconv"}
    assert {key.work for key in by_key(result)} == {FUSED}


def test_a_wrong_output_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match=r"graphs: maxconv: the output is off by 0\."):
        measure(fake(tmp_path / "built", "wrong"))


@pytest.mark.parametrize(
    ("fault", "missing"),
    [
        ("no-gpu", {BARE: "not here: no GPU", FUSED: "not here: no GPU"}),
        ("refuses", {BARE: "no kernel takes it", FUSED: "no kernel takes it"}),
        ("refuses-fused", {BARE: None, FUSED: "no residual"}),
    ],
)
def test_what_the_program_cannot_has_a_reason(
    fault: str, missing: dict[str, str | None], tmp_path: Path
) -> None:
    (result,) = measure(fake(tmp_path / "built", fault))
    entries = by_key(result)
    assert {work: entries[Key("maxconv", work)].missing for work in WORKS} == missing
    assert all(entries[Key("torch", work)].kernel for work in WORKS)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    (result,) = measure(tmp_path, contenders=("maxconv",), works=(BARE,))
    reason = by_key(result)[Key("maxconv")].missing or ""
    assert reason.startswith("not here: ")
    assert PROGRAM in reason


def test_a_program_that_dies_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="the program ended with 1: a bad address"):
        measure(fake(tmp_path / "built", "dies"))


def test_a_program_that_hangs_is_ended(tmp_path: Path) -> None:
    folder = fake(tmp_path, "hangs")
    with Program([str(folder / PROGRAM)], folder / LIBRARIES, timeout_s=20) as program:
        assert program.about == {"device": "a fake"}
        entrants, missing = program.entrants(PROBLEMS[0], "bfloat16")
        assert missing == {}
        program._timeout_s = 0.2
        with pytest.raises(ProgramError, match="the program ended with -9: it said nothing"):
            _, (_, replay) = list(entrants[Key("maxconv")].runs())
            replay.burst(1)


# From the command line, without a GPU.


def bench(folder: Path, *further: str) -> int:
    where = ["--device", "gpu", "--problems", NAME, "--contenders", "maxconv", "torch"]
    return cli.main(["bench", *where, "--rounds", "2", "--from", str(folder), *further])


def test_a_run_from_a_folder(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made.json"
    assert bench(built, "--json", str(made)) == 0
    jsonschema.validate(json.loads(made.read_text(encoding="utf-8")), SCHEMA)
    record = load(made)
    assert (record.commit, record.modified, record.device) == ("0" * 40, False, "gpu")
    assert record.machine.gpu == "NVIDIA H999"
    assert record.protocol.rounds == 2
    assert record.command == (
        f"python -m maxconv bench --device gpu --problems {NAME} --contenders maxconv torch "
        "--rounds 2"
    )
    printed = capsys.readouterr().out
    assert "NVIDIA H999, driver unknown, bfloat16" in printed
    row = next(line for line in printed.splitlines() if line.startswith(NAME))
    assert re.split(r"\s{2,}", row)[1:4] == ["2x7x6x12 -> 18 3x3 p1x1 g6", "1.0", "1.0-1.0"]
    assert not list(tmp_path.glob("*.partial.json"))


def test_what_a_run_leaves_that_does_not_end_well(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(built, "wrong")
    made = tmp_path / "made.json"
    assert bench(built, "--json", str(made)) == 1
    assert list(tmp_path.glob("*.json")) == []
    fake(built)
    wrong = dataclasses.replace(PROBLEMS[0], name="second")

    def select(*_: object, **__: object) -> list[NamedProblem]:
        return [find_problem(NAME), wrong]

    def entrants(self: Program, named: NamedProblem, *further: Any) -> Any:
        if named is wrong:
            raise ProgramError("it broke")
        return real(self, named, *further)

    real = Program.entrants
    monkeypatch.setattr(command, "select", select)
    monkeypatch.setattr(Program, "entrants", entrants)
    with pytest.raises(ProgramError, match="it broke"):
        bench(built, "--json", str(made))
    assert not made.exists()
    partial = load(tmp_path / "made.partial.json")
    assert [result.name for result in partial.results] == [NAME]


# Folders that were built.


def test_a_folder_is_of_the_sources_that_run(
    built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(building, "source_digest", lambda: "others")
    assert bench(built) == 1
    assert "was built from other sources than those that run, at commit 0000" in (
        capsys.readouterr().err
    )


def test_a_folder_of_modified_files(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = built / building.MANIFEST
    manifest.write_text(manifest.read_text().replace('"modified": false', '"modified": true'))
    kept = ("--json", str(tmp_path / "made.json"))
    assert bench(built, *kept) == 1
    assert "was built from files that differ from its commit" in capsys.readouterr().err
    assert bench(built, *kept, "--modified") == 0
    assert load(tmp_path / "made.json").modified


def test_a_folder_of_another_type(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(built, "--dtype", "float16") == 1
    assert "dtype: 'float16', but" in capsys.readouterr().err


def test_building_again_and_not_over_other_files(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ["bench", "--device", "gpu", "--build"]
    assert cli.main([*again, str(built)]) == 0
    assert "sm_90a, bfloat16, 2 files, 0.0 MB" in capsys.readouterr().out
    (built / building.MANIFEST).write_text('{"format": 0}')
    assert bench(built) == 1
    assert "build.json is not of format 1; build it again" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    assert cli.main([*again, str(other)]) == 1
    assert "holds other files; a new or an empty folder is allowed" in capsys.readouterr().err
    assert (other / "thesis.tex").exists()


def test_a_machine_without_max_runs_what_was_built(built: Path, tmp_path: Path) -> None:
    # MAX and Mojo cannot be imported, as on a machine that has torch and a folder alone.
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] in ('max', 'mojo', 'matplotlib'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from maxconv import _cli as cli\n"
        "from maxconv.bench.gpu import clock, operands, run\n"
        "from maxconv.bench.environment import machine\n"
        "clock.Cuda, run.check_gpu, run.this_machine = clock.OnHost, lambda: None, machine\n"
        "operands.input_sets = lambda _: 2\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    made = tmp_path / "made.json"
    asked = ["--problems", NAME, "--rounds", "1", "--work", "bare", "--json", str(made)]
    where = ["bench", "--device", "gpu", "--from", str(built)]
    ended = subprocess.run(
        [sys.executable, "-c", program, *where, *asked],
        env=environment.child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    record = load(made)
    entries = by_key(record.results[0])
    assert entries[Key("maxconv")].kernel is not None
    assert entries[Key("max")].missing == "not here: No module named 'max'"
    assert "Without max" in ended.stdout


# Operands, clocks, contenders.


def test_the_programs_numbers() -> None:
    strided = find_problem("odd.conv1d")
    words = operands.command(strided, "bfloat16").split()
    assert words[:5] == ["problem", "2", "6", "10", "1"]
    axes = ["1 1 23", "1 1 5", "1 1 2", "1 1 2", "0 0 3", "0 0 1"]
    assert " ".join(words[5:23]) == " ".join(axes)
    # 30 products: a filter of 2 ** -2.5 of the activation's size, rounded.
    assert words[23:] == ["2", "-7", "-9"]


def test_values_are_random_and_exact() -> None:
    made = filled(50_000, 3, dtype="float32", device="cpu") * 2**7
    assert torch.equal(made, made.round())
    assert float(made.abs().max()) < 510
    assert abs(float(made.mean())) < 3
    assert float(made.std()) == pytest.approx(147.8, rel=0.02)
    other = filled(50_000, 4, dtype="float32", device="cpu")
    assert abs(float(torch.corrcoef(torch.stack([made, other]))[0, 1])) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_the_programs_values_are_those_of_the_operands(dtype: str, tmp_path: Path) -> None:
    source, program = ROOT / "tests" / "mojo" / "bench_values.mojo", tmp_path / "values"
    folders = [ROOT, Path(operands.__file__).parent]
    include = [word for folder in folders for word in ("-I", str(folder))]
    define = ("-D", f"dtype={dtype}")
    built = library.run_mojo("build", *include, *define, str(source), "-o", str(program))
    assert built.returncode == 0, built.stderr
    indices = [0, 1, 2, 255, 4096, 70_000, 99_999]
    for seed, exponent in ((0, -7), (1, -13), (127, 2)):
        command = [str(program), *map(str, (seed, exponent, *indices))]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        made = filled(100_000, seed, exponent=exponent, dtype=dtype, device="cpu")
        expected = made.float()[indices].tolist()
        assert [np.float32(word) for word in ended.stdout.split()] == expected


def test_outputs_are_about_one() -> None:
    made = Operands(find_problem("odd.deep_reduction"), "bfloat16", OnHost())
    assert made.sets == len(made.x) == len(made.residual) == 2
    references = made.references()
    assert 0.5 < float(references[BARE].std()) < 3
    assert distance(made.convolve(0), references[BARE], 2**-6) < 2**-7
    assert distance(made.fuse(0), references[FUSED], 2**-6) < 2**-6
    with pytest.raises(Mismatch):
        distance(made.convolve(1), references[BARE], 2**-6)


@pytest.mark.parametrize("bad", [float("nan"), 2.0])
def test_the_check_of_an_output(bad: float) -> None:
    expected = torch.ones(2, 3)
    assert distance(expected, expected, 1e-4) == 0
    with pytest.raises(Mismatch, match="is allowed"):
        distance(torch.tensor([[1.0, bad, 1], [1, 1, 1]]), expected, 1e-4)
    with pytest.raises(Mismatch, match=r"the output is \(3, 2\), not \(2, 3\)"):
        distance(expected.T, expected, 1e-4)


def test_operands_exceed_the_cache() -> None:
    for nbytes in (1, 1 << 20, 100 << 20, 1 << 30):
        sets = input_sets(nbytes)
        assert 1 <= sets <= LAUNCHES
        assert sets == LAUNCHES or sets * nbytes > ROTATED_NBYTES


def test_padding_that_torch_does_not_take() -> None:
    with pytest.raises(ValueError, match=r"odd\.conv1d: padding \(3,\) before and \(1,\) after"):
        Operands(find_problem("odd.conv1d"), "bfloat16", OnHost())


def test_launches_take_the_sets_in_turn() -> None:
    launched: list[int] = []

    def launch(index: int) -> Tensor:
        launched.append(index)
        return torch.full((1, 1, 1), float(index))

    one_by_one = LaunchRun(OnHost(), launch, 3)
    (seconds,) = one_by_one.burst(2)
    assert launched == [index % 3 for index in range(LAUNCHES)] * 2
    assert seconds > 0
    launched.clear()
    graph = GraphRun(OnHost(), launch, 3)
    # Each set once before the capture: what is done only once must not be captured.
    assert launched == [0, 1, 2]
    launched.clear()
    graph.burst(2)
    assert np.bincount(launched).max() - np.bincount(launched).min() <= 2
    assert len(launched) == 2 * LAUNCHES
    # The last launch is of the first set, and what it wrote is what is checked.
    assert launched[-1] == 0
    assert graph.error(torch.zeros(1, 1, 1), 1e-4) == 0
    with pytest.raises(Mismatch, match="is allowed, also without a graph"):
        graph.error(torch.ones(1, 1, 1), 1e-4)
    launched.clear()
    GraphRun(OnHost(), launch, 3, 8).burst(1)
    assert launched[3:] == [index % 3 for index in reversed(range(8))]


def test_an_output_that_is_wrong_in_a_graph_alone() -> None:
    replayed = False

    def replay() -> None:
        nonlocal replayed
        replayed = True

    class Broken(OnHost):
        def capture(self, enqueue: Callable[[], Any]) -> Callable[[], None]:
            enqueue()
            return replay

    kept = torch.ones(1, 1, 1)
    launches = iter([kept] * (LAUNCHES + 1))
    graph = GraphRun(Broken(), lambda _: next(launches, torch.zeros(1, 1, 1)), 1)
    with pytest.raises(Mismatch, match="is allowed, and without a graph it is right"):
        graph.error(torch.zeros(1, 1, 1), 1e-4)
    assert replayed


class Costs(OnHost):
    """A clock that counts what launches say they cost."""

    spent = 0.0

    def elapsed(self, run: Callable[[], None], times: int) -> float:
        before = self.spent
        super().elapsed(run, times)
        return self.spent - before


class FakeCudnn:
    """A cuDNN whose second of three plans is the fastest, and whose third does not run."""

    def __init__(self, plans: int = 3) -> None:
        self.plans = plans

    def __call__(self, operands: Operands, swish: bool) -> FakeCudnn:
        if swish:
            raise RuntimeError("no swish")
        self.operands, self.count = operands, self.plans
        return self

    def launch(self, plan: int) -> Any:
        if plan == 2:
            raise RuntimeError("no workspace")

        def run(index: int) -> Tensor:
            clock = self.operands.clock
            assert isinstance(clock, Costs)
            clock.spent += (8.0, 2.0)[plan]
            return self.operands.fuse(index)

        return run


def test_the_fastest_plan_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_torch, "_CudnnPlans", FakeCudnn())
    made = Operands(PROBLEMS[0], "bfloat16", Costs())
    entrant = peers_torch.MAKERS[Key("cudnn", FUSED)](made)
    assert entrant is not None
    assert entrant.note == "the fastest of 3 plans"
    assert entrant.kernel is not None
    assert entrant.kernel.burst(3) == [2.0 * LAUNCHES]
    monkeypatch.setattr(peers_torch, "_CudnnPlans", FakeCudnn(plans=0))
    with pytest.raises(RuntimeError, match="none of 0 plans runs: no swish"):
        peers_torch.MAKERS[Key("cudnn", FUSED)](made)


def test_the_graphs_take_most_of_the_list() -> None:
    named = [entry for family in load_families("gpu").values() for entry in family]
    taken = [entry.name for entry in named if graphs.takes(entry.problem)]
    assert len(taken) == 10
    assert not graphs.takes(find_problem("odd.groups_wide").problem)
    assert not graphs.takes(find_problem("odd.asymmetric_padding").problem)


def test_a_graphs_inputs() -> None:
    shapes = {name: kind.shapes() for name, kind in graphs.GRAPHS.items()}
    x = ("n", "h", "w", "c")
    assert shapes["maxconv"] == [x, ("k", 3, 3, "c")]
    assert shapes["max_rscf"] == [x, (3, 3, "c", "k")]
    assert shapes["max_fused"] == [x, ("k", "c", 3, 3), ("k",), ("n", "h", "w", "k")]


# What is built, for real.


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_the_program_is_built(dtype: str, tmp_path: Path) -> None:
    ptx = importlib.import_module("tests.ptx")
    building.build_program(tmp_path, "sm_90a", dtype)
    kernels = ptx.held(tmp_path / PROGRAM)
    assert kernels
    assert all(".target sm_90a" in kernel for kernel in kernels)
    needed = subprocess.run(
        ["ldd", str(tmp_path / PROGRAM)],
        env={"LD_LIBRARY_PATH": str(tmp_path / LIBRARIES), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "not found" not in needed
    assert needed.count(str(tmp_path / LIBRARIES)) >= 2
    if not torch.cuda.is_available():
        with pytest.raises(ProgramError, match=r"libnvidia-ml|no GPU|CUDA"):
            Program([str(tmp_path / PROGRAM)], tmp_path / LIBRARIES)


@pytest.mark.extended
def test_the_graphs_are_built(tmp_path: Path) -> None:
    building._build_graphs(tmp_path / graphs.FOLDER, "sm_90a", "bfloat16", list(graphs.GRAPHS))
    files = {path.name for path in (tmp_path / graphs.FOLDER).iterdir()}
    assert files == {f"{name}.mef" for name in graphs.GRAPHS}
    assert b"maxconv_nvidia_sm90" in (tmp_path / graphs.FOLDER / "maxconv.mef").read_bytes()


@pytest.mark.parametrize(("machine", "portable"), [("x86_64", True), ("aarch64", False)])
def test_the_program_is_built_for_the_cpu_of_another_machine(
    machine: str, portable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run_mojo(*arguments: str) -> subprocess.CompletedProcess[str]:
        asked.extend(arguments)
        return subprocess.CompletedProcess(arguments, 1, "", "no compiler")

    monkeypatch.setattr(library, "run_mojo", run_mojo)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(library.LibraryError, match="no compiler"):
        building.build_program(tmp_path, "sm_90a", "bfloat16")
    assert ("--target-cpu x86-64-v3" in " ".join(asked)) == portable
