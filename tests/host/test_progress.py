"""What progress shows on a terminal, and what elsewhere."""

import itertools
import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest

from maxconv._progress import progress


def on_a_terminal(body: str, columns: int = 80, encoding: str = "utf-8") -> str:
    """Returns what a program that uses ``progress`` writes to a terminal on its stderr."""
    leader, follower = pty.openpty()
    program = "import time\nfrom maxconv._progress import progress\n" + textwrap.dedent(body)
    environment = {**os.environ, "COLUMNS": str(columns), "PYTHONIOENCODING": encoding}
    with subprocess.Popen(
        [sys.executable, "-c", program], stderr=follower, stdout=subprocess.PIPE, env=environment
    ) as process:
        os.close(follower)
        written = b""
        # The terminal's end is an OSError on Linux, and an empty read elsewhere.
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:
                break
            if not part:
                break
            written += part
        assert process.stdout is not None
        assert process.stdout.read() == b""
    os.close(leader)
    return written.decode(encoding)


def visible(written: str) -> str:
    """Returns what stays on the screen: a carriage return and an erasure undo a line."""
    lines = written.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rsplit("\r\x1b[K", 1)[-1] for line in lines)


def test_slow_work_spins_and_leaves_its_time() -> None:
    written = on_a_terminal("with progress('compiling a graph'): time.sleep(1.3)")
    assert re.search("[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏] compiling a graph 0 s", written)
    assert re.search("[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏] compiling a graph 1 s", written)
    assert re.fullmatch(r"compiling a graph: \d+\.\d s\n", visible(written))


def test_quick_work_shows_nothing() -> None:
    assert on_a_terminal("with progress('compiling'): pass") == ""


def test_failed_work_says_so() -> None:
    written = on_a_terminal(
        """
        try:
            with progress('compiling'):
                time.sleep(0.7)
                raise ValueError
        except ValueError:
            pass
        """
    )
    assert re.fullmatch(r"compiling: \d+\.\d s, failed\n", visible(written))


def test_the_innermost_task_is_drawn() -> None:
    written = on_a_terminal(
        """
        with progress('outer'):
            time.sleep(0.7)
            with progress('inner'):
                time.sleep(0.9)
            time.sleep(0.3)
        """
    )
    drawn = re.findall(r"(outer|inner) \d+ s", written)
    assert [task for task, _ in itertools.groupby(drawn)] == ["outer", "inner", "outer"]
    assert re.fullmatch(r"inner: \d+\.\d s\nouter: \d+\.\d s\n", visible(written))


def test_a_line_never_wraps() -> None:
    written = on_a_terminal(f"with progress({'x' * 200!r}): time.sleep(0.8)", columns=40)
    drawn = [part for part in written.split("\r\x1b[K") if "\n" not in part]
    assert max(map(len, drawn)) == 39


def test_a_terminal_without_unicode_gets_ascii() -> None:
    written = on_a_terminal("with progress('compiling'): time.sleep(0.8)", encoding="ascii")
    assert re.search(r"[|/\\-] compiling 0 s", written)


def test_elsewhere_one_line_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("compiling"):
        assert capsys.readouterr() == ("", "compiling ...\n")
    with progress("compiling", announce=False):
        pass
    assert capsys.readouterr() == ("", "")
