"""The cache of precompiled kernels: what it is keyed by, and what it survives."""

import importlib.metadata
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mojo.run import _mojo_env

from maxconv import _library as library
from maxconv._fields import Op
from maxconv._library import LibraryError, precompiled

ADD_ONE = """
from extensibility import InputTensor, OutputTensor, register


@register("maxconv_test.add_one")
struct AddOne:
    @staticmethod
    def execute[
        target: StaticString
    ](
        output: OutputTensor[dtype=DType.float32, rank=1, ...],
        x: InputTensor[dtype=DType.float32, rank=1, ...],
    ) raises:
        for i in range(x.dim_size(0)):
            output[i] = x[i] + 1
"""
COMPILE = (
    "import sys, pathlib, maxconv._library as l; print(l.precompiled(pathlib.Path(sys.argv[1])))"
)

#: What makes of ``mojo precompile SOURCE -o FILE`` a file that depends on the source.
JOIN = 'find "$2" -name "*.mojo" | sort | xargs cat > "$4"'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Points the cache at an empty folder, and says which one it will make."""
    monkeypatch.setenv("MAXCONV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "maxconv"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    package = tmp_path / "operations"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.mojo").write_text("from .inner.ops import AddOne\n")
    (package / "inner" / "__init__.mojo").touch()
    (package / "inner" / "ops.mojo").write_text(ADD_ONE)
    return package


def replace_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """Puts a shell script before the compiler; each run adds a line to the file that it returns."""
    log, wrapper = folder / "log", folder / "mojo"
    log.touch()
    real = _mojo_env()["MODULAR_MOJO_MAX_DRIVER_PATH"]
    wrapper.write_text(f"#!/bin/sh\necho run >> '{log}'\nreal='{real}'\n{script}\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("MODULAR_MOJO_MAX_DRIVER_PATH", str(wrapper))
    return log


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the compiler by one that joins the files, for tests of what the cache does with it.

    Compiling even one line takes Mojo four seconds. Returns the log of ``replace_compiler``.
    """
    return replace_compiler(monkeypatch, tmp_path, JOIN)


def compiles(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_max_loads_what_was_precompiled(source: Path, cache: Path) -> None:
    from max.graph import KernelLibrary

    path = precompiled(source)
    assert path.parent.parent == cache
    assert "maxconv_test.add_one" in KernelLibrary([path])


def test_the_installed_kernels_compile_and_register_the_op() -> None:
    assert (library.OPERATIONS / "__init__.mojo").is_file()
    assert not library.cache_state().compiled
    kernels = library.kernel_library()
    assert {name for name in kernels if name.startswith("maxconv")} == {op.value for op in Op}
    assert kernels is not library.kernel_library()
    state = library.cache_state()
    assert state.compiled
    assert state.entries == 1
    assert state.size == state.entry.stat().st_size > 0
    assert state.entry == library.library_path()


def test_a_second_call_compiles_nothing(source: Path, fake_compiler: Path) -> None:
    assert precompiled(source) == precompiled(source)
    assert compiles(fake_compiler) == 1


def test_the_name_follows_content_file_names_and_versions(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [library._entry(cache, source)]

    def is_new() -> bool:
        seen.append(library._entry(cache, source))
        return seen[-1] not in seen[:-1]

    assert not is_new()
    (source / "notes.txt").write_text("no Mojo")
    assert not is_new()
    ops = source / "inner" / "ops.mojo"
    ops.write_text(ADD_ONE + "\n")
    assert is_new()
    ops.rename(ops.with_name("moved.mojo"))
    assert is_new()
    (source / "inner" / "empty.mojo").touch()
    assert is_new()
    monkeypatch.setattr(library, "max_version", lambda: "99.1")
    assert is_new()
    monkeypatch.setattr(library, "mojo_version", lambda: "99.2")
    assert is_new()


@pytest.mark.usefixtures("fake_compiler")
def test_an_edit_leaves_the_old_entry_for_those_who_use_it(source: Path) -> None:
    old = precompiled(source)
    content = old.read_bytes()
    (source / "inner" / "ops.mojo").write_text(ADD_ONE.replace("+ 1", "+ 2"))
    assert precompiled(source) != old
    assert old.read_bytes() == content


def test_processes_that_start_together_compile_once(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = replace_compiler(monkeypatch, tmp_path, f"sleep 1\n{JOIN}")
    command = [sys.executable, "-c", COMPILE, str(source)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    answers = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * 4, answers
    assert {output for output, _ in answers} == {f"{precompiled(source)}\n"}
    assert compiles(log) == 1
    assert not list(cache.glob(".staging-*"))


def test_a_killed_writer_leaves_nothing_that_is_taken_for_an_entry(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `mojo precompile SOURCE -o FILE`: half a file, and then it hangs.
    replace_compiler(monkeypatch, tmp_path, 'printf half > "$4"\nsleep 600')
    writer = subprocess.Popen([sys.executable, "-c", COMPILE, str(source)], start_new_session=True)
    deadline = time.monotonic() + 60
    try:
        while not list(cache.glob(".staging-*/*.mojoc")):
            assert time.monotonic() < deadline
            assert writer.poll() is None
            time.sleep(0.05)
    finally:
        os.killpg(writer.pid, signal.SIGKILL)
        writer.wait()
    assert not list(cache.glob("[!.]*/*"))
    monkeypatch.delenv("MODULAR_MOJO_MAX_DRIVER_PATH")
    assert precompiled(source).stat().st_size > len("half")
    assert not list(cache.glob(".staging-*"))


def test_an_edit_while_the_compiler_runs_is_compiled_again(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = source / "inner" / "ops.mojo"
    edit = f"""[ "$(wc -l < '{tmp_path}/log')" = 1 ] && echo '# edited' >> '{ops}'"""
    log = replace_compiler(monkeypatch, tmp_path, f"{edit}\n{JOIN}")
    path = precompiled(source)
    assert "# edited" in ops.read_text()
    assert path == library._entry(cache, source)
    assert compiles(log) == 2
    assert len(list(cache.glob("*/*.mojoc"))) == 1


def test_a_compile_error_shows_what_the_compiler_said(source: Path, cache: Path) -> None:
    (source / "inner" / "ops.mojo").write_text("def broken(:\n")
    with pytest.raises(LibraryError, match="could not compile") as caught:
        precompiled(source)
    assert "ops.mojo:1" in str(caught.value)
    assert "error:" in str(caught.value)
    assert not list(cache.glob("[!.]*/*"))


def test_a_folder_that_is_no_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"no __init__\.mojo"):
        precompiled(tmp_path)


def test_a_missing_compiler_is_told(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODULAR_MOJO_MAX_DRIVER_PATH", "/nowhere/mojo")
    with pytest.raises(LibraryError, match="Mojo compiler is missing"):
        precompiled(source)


def test_the_compiler_is_found_in_an_environment_that_is_not_activated(source: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("PATH", "VIRTUAL_ENV")}
    finished = subprocess.run(
        [sys.executable, "-c", COMPILE, str(source)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert Path(finished.stdout.strip()).is_file()


def test_without_pythons_metadata_the_compiler_says_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = library.mojo_version()

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert library.mojo_version.__wrapped__() == expected


def test_a_read_only_installation_is_only_read(source: Path) -> None:
    def snapshot() -> dict[Path, float]:
        return {path: path.stat().st_mtime for path in (source, *source.rglob("*"))}

    for path in (*source.rglob("*"), source):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)
    before = snapshot()
    try:
        assert precompiled(source).is_file()
        assert snapshot() == before
    finally:
        for path in (source, *source.rglob("*")):
            path.chmod(path.stat().st_mode | stat.S_IWUSR)


@pytest.mark.usefixtures("fake_compiler")
def test_a_read_only_cache_serves_what_it_has(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = precompiled(source)

    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", read_only)
    monkeypatch.setattr(os, "open", read_only)
    assert precompiled(source) == path
    (source / "inner" / "ops.mojo").write_text(ADD_ONE + "\n")
    with pytest.raises(LibraryError, match=r"Read-only file system.*set MAXCONV_CACHE_DIR"):
        precompiled(source)


def test_a_cache_that_cannot_be_made_is_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MAXCONV_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(LibraryError, match=r"cannot be used .*set MAXCONV_CACHE_DIR"):
        precompiled(source)


@pytest.mark.usefixtures("fake_compiler")
def test_the_cache_is_the_users_alone(source: Path, cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o755)
    parent = stat.S_IMODE(cache.parent.stat().st_mode)
    path = precompiled(source)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.parent.stat().st_mode) == parent


def test_a_cache_of_another_user_is_refused(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(cache, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    with pytest.raises(LibraryError, match=r"belongs to user .*set MAXCONV_CACHE_DIR"):
        precompiled(source)
    assert not list(cache.iterdir())


@pytest.mark.usefixtures("fake_compiler")
@pytest.mark.parametrize(("mode", "accepted"), [(0o1777, True), (0o777, False), (0o775, True)])
def test_a_folder_where_others_could_replace_the_cache_is_refused(
    source: Path, cache: Path, mode: int, accepted: bool
) -> None:
    cache.parent.mkdir()
    cache.parent.chmod(mode)
    if accepted:
        assert precompiled(source).is_file()
    else:
        with pytest.raises(LibraryError, match="every user may change"):
            precompiled(source)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert library.cache_dir() == tmp_path / "cache" / "maxconv"
    monkeypatch.setenv("MAXCONV_CACHE_DIR", "")
    assert library.cache_dir() == tmp_path / "xdg" / "maxconv"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert library.cache_dir() == tmp_path / "home" / ".cache" / "maxconv"


def test_looking_at_the_state_makes_nothing(cache: Path) -> None:
    state = library.cache_state()
    assert state.directory == cache
    assert (state.compiled, state.entries, state.size) == (False, 0, 0)
    assert not cache.exists()


@pytest.mark.usefixtures("fake_compiler")
def test_only_what_nobody_uses_is_removed(source: Path) -> None:
    month = 31 * 24 * 3600
    ops = source / "inner" / "ops.mojo"
    paths = []
    for addend in range(2):
        ops.write_text(ADD_ONE.replace("+ 1", f"+ {addend}"))
        paths.append(precompiled(source))
        os.utime(paths[-1], (time.time() - month,) * 2)
    forgotten, used = paths
    assert precompiled(source) == used
    ops.write_text(ADD_ONE)
    precompiled(source)
    assert used.is_file()
    assert not forgotten.parent.exists()


@pytest.mark.usefixtures("fake_compiler")
def test_compiling_is_told_where_it_is_asked_for(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MAXCONV_PROGRESS", raising=False)
    precompiled(source)
    assert capsys.readouterr() == ("", "")
    (source / "inner" / "ops.mojo").write_text(ADD_ONE + "\n")
    monkeypatch.setenv("MAXCONV_PROGRESS", "1")
    precompiled(source)
    assert capsys.readouterr() == ("", "compiling maxconv's Mojo kernels ...\n")
