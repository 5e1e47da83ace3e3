"""The benchmark of a GPU in types of 8 bits, with fake programs in the place of the kernels'."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tests.bench_gpu import by_key, fake
from tests.bench_records import SCHEMA
from tests.documents import ROOT

from maxconv import _cli as cli
from maxconv._dtypes import FLOAT8, FLOAT8_WIDE, INT8
from maxconv._problems import NamedProblem, find_problem, network_problems, parse_problem
from maxconv.bench import command, environment, networks
from maxconv.bench.device import GPU, LIMITS, TOLERANCE
from maxconv.bench.entrant import BARE, BFLOAT16, FUSED, WORKS, Key, Mismatch
from maxconv.bench.gpu import build as building
from maxconv.bench.gpu import clock as clocks
from maxconv.bench.gpu import run
from maxconv.bench.gpu.clock import OnHost
from maxconv.bench.gpu.narrow import IN_BLOCKS, PROGRAM_BFLOAT16
from maxconv.bench.gpu.operands import Operands, filled, set_count
from maxconv.bench.gpu.operands import command as line
from maxconv.bench.gpu.program import PROGRAM
from maxconv.bench.gpu.samples import COUNT, Samples, sampled
from maxconv.bench.measure import _tolerance
from maxconv.bench.record import Result, load

pytestmark = pytest.mark.usefixtures("few_sets")

QUICK = dataclasses.replace(GPU.many, pause_s=0, longest_pause_s=0, rounds=2, calls=1, slow_s=1e9)

#: Of every rank; more elements than are compared in the third.
PROBLEMS = [
    NamedProblem("two", parse_problem("2x5x4x8:12x3x3", padding=1)),
    NamedProblem("one", parse_problem("2x31x8:12x3", stride=2, dilation=2, padding=2)),
    NamedProblem("large", parse_problem("2x20x20x4:24x2x3", stride=(2, 1), padding=(1, 1, 0, 0))),
    NamedProblem("three", parse_problem("1x3x4x5x4:6x2x3x2", padding=(1, 1, 0, 0, 1, 1))),
    find_problem("odd.groups_uneven"),
]


def folder(path: Path, narrow: str = "int8", wide: str = "") -> Path:
    """Makes a folder with a program of int8 and one of bfloat16."""
    fake(path, wide)
    (path / PROGRAM).rename(path / PROGRAM_BFLOAT16)
    return fake(path, narrow)


def measure(path: Path, problems: list[NamedProblem], **changes: Any) -> list[Result]:
    arguments: dict[str, Any] = {
        "contenders": [*GPU.narrow_works],
        "works": WORKS,
        "many": True,
        **changes,
    }
    contenders, works = arguments.pop("contenders"), arguments.pop("works")
    return run.measure_problems(
        problems,
        "int8",
        QUICK,
        contenders,
        works,
        folder=path,
        clock=OnHost(),
        keep=lambda _: None,
        **arguments,
    )


@pytest.mark.parametrize("named", PROBLEMS, ids=lambda named: named.name)
def test_samples_are_those_of_the_whole(named: NamedProblem) -> None:
    made = sampled(named, "bfloat16", WORKS, device="cpu")
    whole = Operands(named, "bfloat16", OnHost()).references()
    for work in WORKS:
        assert len(made[work].values) <= COUNT
        assert Samples.of(whole[work], made[work].step).error(made[work], 1e-5) < 1e-5


def test_int8_is_measured_beside_bfloat16(tmp_path: Path) -> None:
    results = measure(folder(tmp_path), PROBLEMS)
    for named, result in zip(PROBLEMS, results, strict=True):
        entries = by_key(result)
        assert set(entries) == {
            *(Key("maxconv", work) for work in WORKS),
            *(Key("maxconv", work, IN_BLOCKS) for work in WORKS),
            *(Key(BFLOAT16, work) for work in WORKS),
        }
        blocks = named.name in ("two", "one", "large")
        for key, entry in entries.items():
            if key.variant and not blocks:
                assert entry.missing == "dp4a takes multiples of 4 channels"
                continue
            assert entry.kernel is not None
            assert entry.call is None
            assert entry.error is not None
            exact = key.contender == "maxconv" and key.work == BARE
            assert entry.error <= (0 if exact else 2.0**-7)
        assert result.nbytes == named.problem.nbytes("int8", "bfloat16")
        assert result.advantage() == pytest.approx(1)


def test_some_of_the_contenders(tmp_path: Path) -> None:
    (result,) = measure(folder(tmp_path), PROBLEMS[:1], contenders=["maxconv"], works=[FUSED])
    assert set(by_key(result)) == {Key("maxconv", FUSED), Key("maxconv", FUSED, IN_BLOCKS)}
    (result,) = measure(folder(tmp_path), PROBLEMS[:1], contenders=[BFLOAT16])
    assert set(by_key(result)) == {Key(BFLOAT16, work) for work in WORKS}


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / PROGRAM_BFLOAT16).unlink()
    (result,) = measure(path, PROBLEMS[:1])
    reason = by_key(result)[Key(BFLOAT16)].missing or ""
    assert reason.startswith("not here: ")
    assert PROGRAM_BFLOAT16 in reason
    assert by_key(result)[Key("maxconv")].kernel is not None


def test_a_wrong_output(tmp_path: Path) -> None:
    path = folder(tmp_path, wide="wrong")
    with pytest.raises(Mismatch, match="two: bfloat16: the output is off by"):
        measure(path, PROBLEMS[:1], many=False)
    (result,) = measure(path, PROBLEMS[:1])
    assert (by_key(result)[Key(BFLOAT16)].missing or "").startswith("wrong result: ")


def test_the_tolerances() -> None:
    assert _tolerance(Key("maxconv"), INT8) == 0
    assert _tolerance(Key("maxconv", BARE, IN_BLOCKS), INT8) == 0
    assert _tolerance(Key("maxconv", FUSED), INT8) == 2.0**-6
    for dtype in (INT8, FLOAT8, FLOAT8_WIDE):
        assert _tolerance(Key(BFLOAT16), dtype) == 2.0**-6
    # The longest sum of a problem, in the additions of 32 products.
    longest = max(named.problem.gemm.k for named in network_problems())
    assert int(longest) / 32 * 2.0**-14 < TOLERANCE[FLOAT8] == TOLERANCE[FLOAT8_WIDE]


def test_operands_of_8_bits() -> None:
    made = filled(50_000, 3, dtype=INT8, device="cpu")
    whole = filled(50_000, 3, exponent=0, dtype="float32", device="cpu")
    assert made.dtype == torch.int8
    assert torch.equal(made.float(), (whole / 4).floor())
    named = PROBLEMS[0]
    words = line(named, INT8).split()
    # 72 products: a scale of 2^-10 for their variance, of 2^-3 for their number.
    assert words[23:] == ["2", "-7", "0", "-13"]
    assert line(named, FLOAT8).split()[23:] == ["2", "-7", "-7", "-3"]
    assert set_count(named, INT8) == 2
    for dtype in (INT8, FLOAT8, FLOAT8_WIDE):
        values = sampled(named, dtype, WORKS, device="cpu")
        assert 0.3 < float(values[BARE].values.std()) < 2


def test_the_limit_of_8_bits() -> None:
    limits = LIMITS["NVIDIA H200"]
    assert limits.seconds(1e12, 1, INT8) == limits.seconds(1e12, 1) / 2
    assert limits.seconds(1, 1e9, FLOAT8) == limits.seconds(1, 1e9)


# From the command line.


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of `--build --dtype int8`."""
    made: list[tuple[str, ...]] = []

    def build_program(path: Path, *asked: str) -> None:
        made.append(asked)
        folder(path)

    monkeypatch.setattr(building, "build_program", build_program)
    monkeypatch.setattr(building, "_build_graphs", lambda *_: pytest.fail("there is no graph"))
    monkeypatch.setattr(run, "check_gpu", lambda: None)
    monkeypatch.setattr(clocks, "Cuda", OnHost)
    monkeypatch.setattr(
        run, "this_machine", lambda: dataclasses.replace(environment.machine(), gpu="NVIDIA H200")
    )
    clone = environment.Checkout(ROOT, "0" * 40, False)
    monkeypatch.setattr(command, "checkout", lambda: clone)
    path = tmp_path / "built"
    where = ["bench", "--device", "gpu", "--dtype", "int8", "--build", str(path)]
    assert cli.main(where) == 0
    assert made == [("sm_90a", "int8"), ("sm_90a", "bfloat16", PROGRAM_BFLOAT16)]
    return path


def test_a_run_of_networks_in_int8(
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "network_problems", lambda *_: PROBLEMS[:2])
    made = tmp_path / "made.json"
    where = ["bench", "--device", "gpu", "--problems", "networks", "--dtype", "int8"]
    assert cli.main([*where, "--from", str(built), "--json", str(made)]) == 0
    jsonschema.validate(json.loads(made.read_text(encoding="utf-8")), SCHEMA)
    record = load(made)
    assert record.command == (
        "python -m maxconv bench --device gpu --problems networks --dtype int8"
    )
    assert (record.dtype, record.tolerance) == ("int8", 2.0**-6)
    printed = capsys.readouterr().out
    assert "Times as fast as maxconv in bfloat16" in printed
    ways = next(rows for title, _, rows, _ in networks.tables(record) if IN_BLOCKS in str(rows))
    assert [row[:3] for row in ways] == [
        [IN_BLOCKS, "bare", "2"],
        [IN_BLOCKS, "fused", "2"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contenders", "torch"], "contenders: 'torch' is not one; maxconv, bfloat16 are allow"),
        (["--models"], "dtype: 'int8' on a gpu: bfloat16, float16 are allowed"),
    ],
)
def test_what_8_bits_do_not_take(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--device", "gpu", "--dtype", "int8", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert cli.main(["bench", "--device", "gpu", "--contenders", "bfloat16"]) == 1
    assert "contenders: 'bfloat16' is not one; maxconv, torch," in capsys.readouterr().err


def test_int8_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--dtype", "int8"]) == 1
    assert "dtype: 'int8' on a cpu: float32, bfloat16, float16, uint8 are allowed" in (
        capsys.readouterr().err
    )
