"""``maxconv build``, and which of the cache's libraries a machine takes."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from maxconv import _build, _library, _library_files
from maxconv._cli import main as cli_main
from maxconv._fields import Kernel
from maxconv._library_files import CPU_LEVELS, Family, host_file

FLOAT32 = Family("float32", "float32", "float32", scaled=False)
BFLOAT16 = Family("bfloat16", "bfloat16", "bfloat16", scaled=False)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAXCONV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "maxconv"


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What the compiler, which writes its arguments, was called with."""
    made: list[tuple[str, ...]] = []

    def run_mojo(*arguments: str) -> subprocess.CompletedProcess[str]:
        made.append(arguments)
        Path(arguments[-1]).write_text(" ".join(arguments))
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(_library, "run_mojo", run_mojo)
    return made


def defines(arguments: tuple[str, ...]) -> set[str]:
    return {value for option, value in pairwise(arguments) if option == "-D"}


def test_a_cpu_and_a_level(commands: list[tuple[str, ...]], cache: Path) -> None:
    command = ["build", "--target", "host", "--target", "x86-64-v3", "--dtype", "float32"]
    assert cli_main(command) == 0
    kernels, host, level = commands
    assert kernels[0] == "precompile"
    assert "--target-cpu" not in host and "x86-64-v3" in level
    assert defines(host) == defines(level)
    types = {"dtype=float32", "bias=float32", "output=float32", "scaled=False"}
    assert defines(host) == types | {"depth_to_space=False"}
    assert cli_main(command) == 0
    assert len(commands) == 3
    assert len(list(cache.glob("*/libmaxconv_host.*"))) == 2
    assert cli_main(["build", "--dtype", "float32", "--upsample"]) == 0
    assert defines(commands[3]) == types | {"depth_to_space=True"}


def test_every_kernel_of_a_gpu(
    commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Family, int]] = []

    def chooser(family: Family) -> SimpleNamespace:
        def kernels(capability: int) -> list[Kernel]:
            asked.append((family, capability))
            return [Kernel.SM90, Kernel.DEPTHWISE]

        return SimpleNamespace(kernels=kernels)

    monkeypatch.setattr(_build, "chooser", chooser)
    options = ["--dtype", "float8_e4m3fn", "--output", "bfloat16", "--scaled"]
    assert cli_main(["build", "--target", "sm_90a", *options]) == 0
    assert asked == [(Family("float8_e4m3fn", "float32", "bfloat16", scaled=True), 90)]
    built = {name: arguments for arguments in commands for name in defines(arguments)}
    for kernel in (Kernel.SM90, Kernel.DEPTHWISE):
        arguments = built[f"kernel={int(kernel)}"]
        assert arguments[arguments.index("--target-accelerator") + 1] == "sm_90a"
        assert {"dtype=float8_e4m3fn", "output=bfloat16", "scaled=True"} < defines(arguments)
    # What is computed beside convolutions has the type that these store.
    roots = {Path(arguments[-3]).name: arguments for arguments in commands}
    for root in ("mean.mojo", "group_norm.mojo"):
        assert "dtype=bfloat16" in defines(roots[root]), roots


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--target", "host", "--dtype", "float8_e5m2", "--output", "float32"],
            "--dtype: float8_e5m2 is for GPU",
        ),
        (
            ["--target", "sm_90a", "--dtype", "float8_e4m3fn"],
            "--output: it must be given with floa",
        ),
        (
            ["--target", "sm_90a", "--dtype", "int8", "--output", "float16", "--upsample"],
            "--upsample: it is not supported with",
        ),
    ],
)
def test_mistakes_are_told_before_anything_is_compiled(
    options: list[str],
    message: str,
    commands: list[tuple[str, ...]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli_main(["build", *options]) == 1
    assert capsys.readouterr().err.startswith(f"maxconv build: {message}")
    assert not commands


@pytest.mark.parametrize("machine", [(), ("x86-64-v3",), ("x86-64-v3", "x86-64-v4")])
def test_a_machine_takes_its_own_library_or_the_best_of_its_levels(
    machine: tuple[str, ...], commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "flags : " + " ".join(CPU_LEVELS[level] for level in machine)
    monkeypatch.setattr(_library_files, "_processor", lambda: (flags,))
    levels = {level: host_file(FLOAT32, level) for level in CPU_LEVELS}
    commands.clear()
    taken = host_file(FLOAT32)
    if machine:
        assert taken == levels[machine[-1]]
        assert not commands
    else:
        assert taken not in levels.values()
        assert len(commands) == 1


def test_a_library_is_told_of_this_cpu(
    commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_build, "known_features", lambda: 5)
    options = ["--target", "host", "--target", "x86-64-v3"]
    assert cli_main(["build", *options, "--dtype", "bfloat16", "float32"]) == 0
    told = [defines(arguments) & {"features=5"} for arguments in commands[1:]]
    # Another machine's CPU is not known, and float32 asks for nothing.
    assert sorted(map(len, told)) == [0, 0, 0, 1]
    of = next(arguments for arguments, found in zip(commands[1:], told, strict=True) if found)
    assert "dtype=bfloat16" in of and "--target-cpu" not in of
    monkeypatch.setattr(_build, "known_features", lambda: None)
    commands.clear()
    assert cli_main(["build", "--dtype", "float16"]) == 0
    assert [defines(arguments) & {"features=5"} for arguments in commands] == [set()]


def test_a_library_of_all_kernels_serves_whoever_dispatches(
    commands: list[tuple[str, ...]],
) -> None:
    narrow = host_file(BFLOAT16, features=5)
    whole = host_file(BFLOAT16)
    assert whole != narrow
    assert host_file(BFLOAT16, features=5) == narrow
    commands.clear()
    assert host_file(BFLOAT16, features=6) == whole
    assert not commands


def test_a_full_cache_is_enough_without_a_compiler(
    cache: Path, commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = host_file(FLOAT32)

    def no_compiler() -> str:
        raise _library.LibraryError("the Mojo compiler is missing")

    monkeypatch.setattr(_library, "mojo_version", no_compiler)
    for path in (cache, *cache.iterdir()):
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        assert host_file(FLOAT32) == built
        with pytest.raises(_library.LibraryError, match=r"compiler is missing|cannot be writt"):
            host_file(FLOAT32._replace(bias="bfloat16"))
    finally:
        for path in (cache, *cache.iterdir()):
            path.chmod(0o700)
