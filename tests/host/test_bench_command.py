"""``maxconv bench``: its arguments, what it writes, and where it runs; nothing is measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.bench_records import models_record, record
from tests.documents import ROOT

import maxconv
from maxconv import _cli as cli
from maxconv._problems import NamedProblem, load_families, network_problems
from maxconv.bench import command, environment, report
from maxconv.bench.cpu.memory import Memory
from maxconv.bench.device import CPU, DEVICES, GPU, Device
from maxconv.bench.models.catalogue import load_catalogue
from maxconv.bench.models.catalogue import select as select_models
from maxconv.bench.record import SUITES, Functions, Record, load

# The command line.


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_all_problems_that_stand_in_a_family(device: Device) -> None:
    every = [named for members in load_families(device.name).values() for named in members]
    assert command.select(device, [], []) == every


def test_selecting_problems() -> None:
    grouped = command.select(CPU, ["grouped"], ["odd.conv1d", "resnet50.stem", "vae.mid@2"])
    assert [named.name for named in grouped] == [
        "resnet50.stem",
        "resnext.conv2_g32",
        "resnext.conv4_g32",
        "odd.conv1d",
        "vae.mid@2",
    ]
    assert [named.name for named in command.select(CPU, [], ["vae.mid"])] == ["vae.mid"]
    # A problem of the device's own list has that list's family.
    (narrow,) = command.select(GPU, [], ["resnet50.conv2_expand@64"])
    assert narrow.family == "narrow"


def test_a_quick_run_has_one_problem_of_each_family() -> None:
    quick = command.select(CPU, [], [], quick=True)
    assert [named.family for named in quick] == list(load_families("cpu"))
    assert quick[0].name == "resnet50.stem"
    named = command.select(CPU, ["vae"], ["vae.mid"], quick=True)
    assert [entry.name for entry in named] == ["vae.conv_in", "vae.mid"]
    for device in DEVICES.values():
        for protocol in (device.full, device.models):
            assert protocol.quick.rounds < protocol.rounds


def test_selecting_what_networks_convolve() -> None:
    assert command.select(GPU, [], ["networks"]) == network_problems()
    some = command.select(GPU, ["resnet50", "vit_b16"], ["networks"], batches=[8])
    assert some == network_problems(["resnet50", "vit_b16"], [8])
    assert {named.problem.batch for named in some} == {8}
    quick = command.select(GPU, ["resnext50", "vit_b16"], ["networks"], quick=True)
    assert [named.name for named in quick] == ["resnet50.conv1", "vit_b16.conv_proj"]
    assert [named.family for named in quick] == ["resnext50", "vit_b16"]
    # One of them by its name.
    (alone,) = command.select(GPU, [], ["vit_b16.conv_proj@64"])
    assert alone in network_problems(["vit_b16"])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Measures nothing: the record is made up; returns what was to be measured.

    The clone's files are as its commit has them.
    """
    asked = []

    def fake(problems: Sequence[NamedProblem], args: Any) -> Record:
        asked.append(([named.name for named in problems], args.dtype, args.quick))
        return record(command=command.repeat(args))

    monkeypatch.setattr(command, "measure", fake)
    clone = environment.Checkout(ROOT, "0" * 40, False)
    monkeypatch.setattr(command, "checkout", lambda: clone)
    return asked


def test_the_command(
    measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, picture = tmp_path / "made.json", tmp_path / "made.png"
    arguments = ["--problems", "vae.mid", "--dtype", "float16", "--work", "bare", "--rounds", "4"]
    chosen = ["--contenders", "max", "maxconv"]
    outputs = ["--json", str(made), "--plot", str(picture)]
    assert cli.main(["bench", *arguments, *chosen, *outputs]) == 0
    assert measured == [(["vae.mid"], "float16", False)]
    kept = load(made)
    assert kept.command == (
        "python -m maxconv bench --problems vae.mid --dtype float16 --contenders maxconv max "
        "--work bare --rounds 4"
    )
    assert capsys.readouterr().out == f"{report.render_text([kept])}\n{made}\n"
    assert picture.stat().st_size > 1000
    # The command repeats itself.
    again = tmp_path / "again.json"
    assert cli.main([*kept.command.split()[3:], "--json", str(again)]) == 0
    assert load(again) == kept
    capsys.readouterr()
    assert cli.main(["bench", "--report", str(made), "--plot", str(picture)]) == 0
    assert capsys.readouterr().out == report.render_markdown([kept])
    assert len(measured) == 2


def test_out_names_the_record(
    measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--out", str(tmp_path)]) == 0
    path = tmp_path / "2026-07-27-fast-one-float32.json"
    assert load(path) == record()
    assert capsys.readouterr().out.endswith(f"\n{path}\n")
    assert len(measured[0][0]) == len(command.select(CPU, [], []))


@pytest.mark.parametrize(
    "given",
    [
        "--problems networks",
        "--family vit_b16 whisper_large --problems networks --batch 1 64 --quick",
        "--problems vit_b16.conv_proj@64",
        "--family gemm scan --problems heron",
    ],
)
def test_the_command_repeats_networks(given: str, measured: list[Any], tmp_path: Path) -> None:
    made, again = tmp_path / "made.json", tmp_path / "again.json"
    assert cli.main(["bench", *given.split(), "--json", str(made)]) == 0
    kept = load(made)
    assert kept.command == f"python -m maxconv bench {given}"
    assert kept.suite == next((name for name in SUITES if f"--problems {name}" in given), None)
    assert cli.main([*kept.command.split()[3:], "--json", str(again)]) == 0
    assert measured[0] == measured[1]


def test_out_names_a_record_of_networks(measured: list[Any], tmp_path: Path) -> None:
    assert cli.main(["bench", "--problems", "networks", "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [
        "2026-07-27-fast-one-float32-networks.json"
    ]
    assert len(measured[0][0]) == len(network_problems())


def test_a_record_names_a_commit(
    measured: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clone = environment.Checkout(tmp_path, "0" * 40, True)
    monkeypatch.setattr(command, "checkout", lambda: clone)
    kept = ["--json", str(tmp_path / "made.json")]
    assert cli.main(["bench", *kept]) == 1
    assert "modified: files differ from commit 0000000000" in capsys.readouterr().err
    assert measured == []
    assert cli.main(["bench", *kept, "--modified"]) == 0
    # What is not kept may be of any files, and an installed package has no commit.
    assert cli.main(["bench"]) == 0
    monkeypatch.setattr(command, "checkout", lambda: None)
    assert cli.main(["bench", *kept]) == 0
    assert len(measured) == 3


def test_a_report_of_two_commits(
    measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, commit in zip(paths, ("0" * 40, "1" * 40), strict=True):
        path.write_text(record(commit=commit).to_json())
    assert cli.main(["bench", "--report", *map(str, paths)]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("maxconv bench: report: the records are of the commits 0000")
    assert printed.out == ""
    assert cli.main(["bench", "--report", str(paths[0]), str(paths[0])]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": [Memory("vae.mid", 1, 1, 1, 9 << 20)]}, "more memory than allowed: vae.mid"),
        ({"functions": Functions(("vae.mid",), False, 1.0, 1.0)}, "outputs differ from the op's"),
    ],
)
def test_a_run_that_finds_something_wrong(
    changes: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "measure", lambda *_: record(**changes))
    assert cli.main(["bench"]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Summary" in printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family", "resnet"], "family: 'resnet' does not exist; resnet50, vae,"),
        (["--device", "gpu", "--family", "video"], "family: 'video' does not exist; resnet50, vae"),
        (["--problems", "vae.middle"], "problem: 'vae.middle' is not a named problem; near it: va"),
        (["--dtype", "int8"], "dtype: 'int8' on a cpu: float32, bfloat16, float16, uint8"),
        (["--device", "gpu", "--dtype", "float32"], "dtype: 'float32' on a gpu: bfloat16, float16"),
        (["--contenders", "jax"], "contenders: 'jax' is not one; maxconv, torch, torch.compile, m"),
        (["--contenders", "cudnn"], "contenders: 'cudnn' is not one; maxconv, torch,"),
        (["--work", "half"], "work: 'half' is not one; bare, fused are allowed"),
        (["--models", "resnet"], "models: 'resnet' is no model of the list; near it: "),
        (["--models", "sd15_unet"], "models: sd15_unet has no batches for a cpu; give --batch"),
        (["--models", "--batch", "0"], "batch: 0 is not positive; at least 1 is needed"),
        (["--models", "--variants", "jit"], "variants: 'jit' is not one; eager, compile, reduce"),
        (
            ["--models", "--variants", "captured"],
            "variants: 'captured' on a cpu: it replays a CUDA graph; eager, compile, converted, ba",
        ),
        (["--models", "--problems", "vae.mid"], "models: --problems does not go with it, since i"),
        (["--models", "--family", "vae"], "models: --family does not go with it, since it is fo"),
        (["--models", "--plot", "a.png"], "models: --plot does not go with it, since it is for c"),
        (["--models", "--from", "folder"], "models: --from does not go with it, since it is for"),
        (["--variants", "eager"], "variants: it is for --models"),
        (["--batch", "2"], "batch: it is for --models and --problems networks"),
        (["--problems", "vae.mid", "--batch", "2"], "batch: it is for --models and --problems net"),
        (["--problems", "networks", "vae.mid"], "problems: networks stands alone, without other"),
        (["--problems", "networks", "--family", "vae"], "family: 'vae' is no network; resnet50,"),
        (["--problems", "networks", "--batch", "3"], "batch: 3 is no batch of these networks; 1, "),
        (["--problems", "networks", "--variants", "eager"], "variants: it is for --models"),
        (["--problems", "heron", "networks"], "problems: networks stands alone, without other na"),
        (["--problems", "heron", "--batch", "2"], "batch: it is for --models and --problems netw"),
        (["--problems", "heron", "--family", "gem"], "operator: 'gem' is no operator; c1d, c2d,"),
        (
            ["--problems", "networks", "--batch", "8", "--out", "."],
            "out: only a whole run is kept by date and machine, without --quick, --family and "
            "--problems but networks and heron; --json keeps any other",
        ),
        (["--problems", "networks", "--family", "vit_b16", "--out", "."], "out: only a whole run"),
        (["--problems", "networks", "--quick", "--out", "."], "out: only a whole run is kept by"),
        (["--minutes", "1"], "minutes: it is for the convolutions of --device gpu"),
        (["--resume"], "resume: it is for the convolutions of --device gpu"),
        (["--models", "resnet50", "--minutes", "1"], "minutes: it is for the convolutions of"),
        (
            ["--device", "gpu", "--minutes", "1"],
            "minutes, resume: --json or --out keeps what there",
        ),
        (["--device", "gpu", "--resume"], "minutes, resume: --json or --out keeps what there is"),
        (
            ["--device", "gpu", "--minutes", "0", "--json", "a.json"],
            "minutes: 0.0 is not positive; more than 0 is needed",
        ),
        (["--device", "gpu", "--minutes", "nan", "--json", "a.json"], "minutes: nan is not posit"),
        (["--report", "a.json", "--minutes", "1"], "report: --minutes does not go with it"),
        (["--report", "a.json", "--resume"], "report: --resume does not go with it"),
        (["--no-channels-last"], "channels-last: it is for --models"),
        (["--models", "resnet50", "--out", "."], "out: only a whole run is kept by date and mach"),
        (["--models", "--batch", "2", "--out", "."], "out: only a whole run is kept by date and"),
        (["--models", "--quick", "--out", "."], "out: only a whole run is kept by date and mach"),
        (["--report", "a.json", "--models"], "report: --models does not go with it"),
        (["--report", "a.json", "--channels-last"], "report: --channels-last does not go with it"),
        (["--rounds", "0"], "rounds: 0 is not positive; at least 1 is needed"),
        (["--out", ".", "--quick"], "out: only a whole run is kept by date and machine"),
        (["--out", ".", "--problems", "vae.mid"], "out: only a whole run is kept by date and mach"),
        (["--out", "nowhere"], "out: nowhere is no folder"),
        (["--json", "nowhere/a.json"], "json: the folder of nowhere/a.json does not exist"),
        (["--plot", "nowhere/a.png"], "plot: the folder of nowhere/a.png does not exist"),
        (["--plot", "a.txt"], "plot: a.txt does not end with a format"),
        (["--report", "a.json", "--quick"], "report: --quick does not go with it"),
        (["--report", "a.json", "--from", "folder"], "report: --from does not go with it"),
        (["--report", "nowhere.json"], "[Errno 2] No such file or directory: 'nowhere.json'"),
        (["--build", "folder"], "build: it is for --device gpu, not cpu"),
        (["--from", "folder"], "from: it is for --device gpu, not cpu"),
        (["--device", "gpu", "--target", "sm_90a"], "target: it is for --build"),
        (["--device", "gpu", "--build", "a", "--json", "a.json"], "build: --json does not go with"),
        (["--device", "gpu", "--build", "a", "--from", "b"], "build: --from does not go with it"),
        (["--device", "gpu", "--build", "no/where"], "build: the folder of no/where does not exi"),
        (["--device", "gpu", "--from", "."], "from: . has no build.json; a folder of --build is"),
        (
            ["--device", "gpu", "--build", "a", "--problems", "odd.asymmetric_padding"],
            "problems: odd.asymmetric_padding has other padding before than after",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_argument_is_told_before_anything_is_measured(
    arguments: list[str],
    message: str,
    measured: list[Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"maxconv bench: {message}")
    assert measured == []
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_is_not_installed(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    present = {"torchvision"}
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if name in present else None
    )
    variants = ["--variants", "eager", "converted"]
    assert cli.main(["bench", "--models", "resnet50", "repvgg_a2", "hrnet_w18", *variants]) == 1
    assert capsys.readouterr().err == (
        "maxconv bench: models: repvgg_a2, hrnet_w18: timm is not installed; pip install timm, or "
        "pip install 'maxconv[models]' for all\n"
    )
    assert measured == []
    # Those whose library is there can be measured, and all can be listed.
    assert cli.main(["bench", "--models", "resnet50", *variants]) == 0
    capsys.readouterr()
    assert cli.main(["bench", "--list"]) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(listed) == len(load_catalogue().models)
    assert ["resnet50", "torchvision", "cpu", "1,8;", "gpu", "1,64"] in listed
    assert ["smp_unet", "segmentation_models_pytorch", "(not", "installed)", "cpu"] in [
        line[:5] for line in listed
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--models resnet18 resnet50 --batch 3 4", "--models resnet18 resnet50 --batch 3 4"),
        ("--models --variants converted eager", "--models --variants eager converted"),
        ("--models all --no-channels-last", "--models all --no-channels-last"),
        ("--models --channels-last --quick", "--models --channels-last --quick"),
    ],
)
def test_the_command_repeats_models(
    given: str,
    said: str,
    measured: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("maxconv.bench.models.command.check_installed", lambda _: None)
    monkeypatch.setattr("maxconv.bench.models.command.check_backend", lambda _: None)
    made = tmp_path / "made.json"
    assert cli.main(["bench", *given.split(), "--json", str(made)]) == 0
    assert load(made).command == f"python -m maxconv bench {said}"
    # No convolution is measured besides.
    assert [names for names, *_ in measured] == [[]]


def test_models_that_are_selected() -> None:
    listed = load_catalogue()
    default = select_models([], "cpu")
    assert {made.name for made in default} == set(listed.default["cpu"])
    every = select_models(["all"], "gpu")
    assert [made.name for made in every] == [
        name for name, made in listed.models.items() if "gpu" in made.batches
    ]
    # In the order of the list, and a batch of the command line serves any device.
    chosen = select_models(["sd15_unet", "resnet18"], "cpu", [1])
    assert [made.name for made in chosen] == ["resnet18", "sd15_unet"]


def test_a_variant_that_went_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "measure", lambda *_: models_record())
    assert cli.main(["bench"]) == 1
    assert capsys.readouterr().err == "tasnet, batch 1: converted: no such layer\n"


def test_a_gpu_that_is_not_there(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["bench", "--device", "gpu"]) == 1
    assert "device: 'gpu' needs a GPU that torch sees, and there is none" in capsys.readouterr().err
    assert measured == []


# Where it runs.


def test_this_machine() -> None:
    here = environment.machine()
    assert here.cpu
    assert 1 <= environment.usable_threads() <= here.cpus


def test_the_checkout() -> None:
    clone = environment.checkout()
    if clone is None:
        pytest.skip("not a clone, or without git")
    assert clone.root == ROOT
    assert re.fullmatch("[0-9a-f]{40}", clone.commit)


def test_an_installed_package_is_no_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = tmp_path / "site-packages" / "maxconv" / "__init__.py"
    monkeypatch.setattr(maxconv, "__file__", str(installed))
    assert environment.checkout() is None


def test_the_digest_is_of_every_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package, kernels = tmp_path / "python" / "maxconv", tmp_path / "operations"
    for file in (package / "__init__.py", package / "bench" / "a.mojo", kernels / "cpu" / "b.mojo"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    (package / "operations").symlink_to(kernels)
    monkeypatch.setattr(maxconv, "__file__", str(package / "__init__.py"))
    digests = [environment.source_digest()]
    for file in (package / "bench" / "a.mojo", kernels / "cpu" / "b.mojo", package / "c.py"):
        file.write_text("# changed")
        digests.append(environment.source_digest())
    (package / "c.py").rename(package / "d.py")
    digests.append(environment.source_digest())
    assert len(set(digests)) == 5
    # What running it leaves is no source.
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "c.pyc").touch()
    assert environment.source_digest() == digests[-1]


def test_a_child_imports_this_package() -> None:
    first = environment.child_environment()["PYTHONPATH"].split(":")[0]
    assert (Path(first) / "maxconv" / "bench" / "child.py").samefile(
        Path(command.__file__).with_name("child.py")
    )
