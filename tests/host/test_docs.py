"""Links, commands and programs of the documents work; the README is short and quotes one record."""

import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tomli
from tests.documents import ROOT, Block, anchors, blocks, commands, documents, links, shell_blocks

import ptxemu.cli
from maxconv import _cli as cli
from maxconv import _library as library
from maxconv._fields import CPU_KERNELS, GPU_KERNELS, Kernel

README = ROOT / "README.md"
DOCUMENTS = documents()
EXTRAS = set(tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
TASKS = set(tomli.loads((ROOT / "pixi.toml").read_text())["tasks"])

# Runs programs one after the other in one namespace, with the lines of the document they are from.
RUNNER = """
import json, sys
namespace = {"__name__": "__main__"}
for source, line, name in json.load(sys.stdin):
    print(f"{name}:{line}", file=sys.stderr, flush=True)
    exec(compile("\\n" * (line - 1) + source, name, "exec"), namespace)
"""


def test_the_documents_are_there() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in DOCUMENTS}
    top = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/protocol.md"}
    topics = {"benchmarks", "cpu", "gpu", "graphs", "mojo", "ptxemu", "pytorch", "quantization"}
    topics.add("tuning")
    assert names >= top | {f"docs/{topic}.md" for topic in topics}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(path: Path) -> None:
    broken = []
    for target in links(path):
        if re.match(r"^[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        lost = anchor and file.suffix == ".md" and file.exists() and anchor not in anchors(file)
        if not file.exists() or lost or not file.is_relative_to(ROOT):
            broken.append(target)
    assert not broken


def test_the_readme_is_short() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) >= 120]


def _rows(text: str) -> list[list[str]]:
    """The rows of Markdown tables, without their first columns' emphasis."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


#: What the README calls the work and the contenders of the record that its table is from.
HEADLINES = {
    ("the convolution alone", "torch (cuDNN)"): ("times as fast as torch, 2-D", "bare"),
    ("with bias, SiLU and a residual", "torch.compile"): (
        "times as fast as torch.compile, 2-D",
        "fused",
    ),
    ("with bias, SiLU and a residual", "cuDNN's fastest fused plan"): (
        "times as fast as cudnn, 2-D",
        "fused",
    ),
    ("depthwise 3x3", "torch (cuDNN)"): ("times as fast as torch, 2-D depthwise", "bare"),
    ("depthwise 3x3 with bias, SiLU and a residual", "torch.compile"): (
        "times as fast as torch.compile, 2-D depthwise",
        "fused",
    ),
}


def test_the_readmes_figures_are_those_of_one_record() -> None:
    text = README.read_text(encoding="utf-8")
    [picture] = [target for target in links(README) if target.endswith(".png")]
    record = json.loads((ROOT / picture).with_suffix(".json").read_text(encoding="utf-8"))
    assert not record["modified"]
    assert f"commit `{record['commit'][:10]}`" in text
    assert record["command"] in [
        " ".join(words) for block in shell_blocks(README) for words in commands(block)
    ]
    summary = {
        (row["what"], row["work"]): row for row in record["summary"] if row["figure"] == "kernel"
    }
    table = {(row[0], row[1]): row[2:] for row in _rows(text) if (row[0], row[1]) in HEADLINES}
    assert table.keys() == HEADLINES.keys()
    for headline, cells in table.items():
        row = summary[HEADLINES[headline]]
        figures = [f"{row['geometric_mean']:.2f}x", f"{row['worst']:.2f}x", str(row["problems"])]
        assert cells == figures, headline
    costs = [row for (what, _), row in summary.items() if what.startswith("times the time of")]
    assert len(costs) == 2
    for row in costs:
        assert f"{row['geometric_mean']:.2f}x" in text
        assert f"{row['worst']:.2f}x" in text


def test_the_readme_names_every_kernel() -> None:
    rows = [row for row in _rows(README.read_text(encoding="utf-8")) if len(row) == 3]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert named == {kernel.name.lower() for kernel in Kernel if kernel is not Kernel.AUTO}


@pytest.mark.parametrize(
    ("document", "kernels"), [("docs/gpu.md", GPU_KERNELS), ("docs/cpu.md", CPU_KERNELS)]
)
def test_the_tables_of_kernels_are_the_registries(document: str, kernels: Sequence[Kernel]) -> None:
    """Each in the order in which they are asked."""
    rows = _rows((ROOT / document).read_text(encoding="utf-8"))
    named = [match[1] for row in rows if (match := re.fullmatch(r"`(\w+)`", row[0]))]
    assert named == [kernel.name.lower() for kernel in kernels]


#: Folders of the root that a command may name.
FOLDERS = ("operations", "library", "graphs", "python", "tests", "benchmarks")


def _paths_exist(words: Sequence[str]) -> str | None:
    """Checks the words that name a path; returns what is wrong."""
    for word in words:
        name = word.partition("::")[0]
        is_path = "/" in name or name in FOLDERS
        if not name.startswith("-") and is_path and not (ROOT / name).exists():
            return f"{name} does not exist"
    return None


def _command_line(words: Sequence[str]) -> str | None:
    """Parses arguments of `maxconv`, without running them."""
    names = [word for word in words if word in cli.COMMANDS]
    try:
        cli.build_parser(names[:1]).parse_args(list(words))
    except SystemExit as end:
        # --help and --version end with 0.
        return "maxconv does not take these arguments" if end.code else None
    return None


def _ptxemu(words: Sequence[str]) -> str | None:
    """Parses arguments of `ptxemu`, without running them."""
    try:
        ptxemu.cli.build_parser().parse_args(list(words))
    except SystemExit as end:
        return "ptxemu does not take these arguments" if end.code else None
    return None


def _pip(words: Sequence[str]) -> str | None:
    if not words or words[0] != "install":
        return "only `pip install` is known"
    for word in words[1:]:
        if word.startswith("-"):
            continue
        match = re.fullmatch(r"(?:\.|maxconv)(?:\[([\w,]+)\])?", word)
        if match is None:
            return f"{word} is not this package"
        if unknown := set((match[1] or "").split(",")) - EXTRAS - {""}:
            return f"pyproject.toml has no extra {', '.join(sorted(unknown))}"
    return None


def _pixi(words: Sequence[str]) -> str | None:
    known = words and (words[0] in ("install", "shell"))
    if known or (len(words) > 1 and words[0] == "run" and words[1] in TASKS):
        if len(words) > 2 and words[1] in cli.COMMANDS:
            return _command_line(words[1:])
        return _paths_exist(words[2:])
    return "pixi.toml has no such task"


@functools.cache
def _help_fails(script: str) -> str | None:
    """What a script says instead of what it takes, or None; one imports MAX's own models first."""
    command = [sys.executable, str(ROOT / script), "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stderr if ended.returncode else None


def _python(words: Sequence[str]) -> str | None:
    if words[0] != "-m":
        # A script says what it takes, so it at least starts.
        if wrong := _paths_exist(words[:1]) or (ROOT / words[0]).suffix != ".py":
            return f"{words[0]} is no script ({wrong})"
        return _help_fails(words[0]) or _paths_exist(words[1:])
    module, arguments = words[1], words[2:]
    if module == "maxconv":
        return _command_line(arguments)
    if module == "ptxemu":
        return _ptxemu(arguments)
    if module == "pip":
        return _pip(arguments)
    if importlib.util.find_spec(module) is None:
        return f"there is no module {module}"
    return _paths_exist(arguments)


def _script(name: str) -> Callable[[Sequence[str]], str | None]:
    def check(words: Sequence[str]) -> str | None:
        return _paths_exist([name, *words])

    return check


def _one_of(*allowed: str) -> Callable[[Sequence[str]], str | None]:
    def check(words: Sequence[str]) -> str | None:
        if words and words[0] in allowed:
            return _paths_exist(words[1:])
        return f"{' or '.join(allowed)} is known"

    return check


def _folder(words: Sequence[str]) -> str | None:
    """A clone's folder is the repository's name."""
    return None if words == ["maxconv"] else _paths_exist(words)


KNOWN: dict[str, Callable[[Sequence[str]], str | None]] = {
    "maxconv": _command_line,
    "ptxemu": _ptxemu,
    "pip": _pip,
    "pixi": _pixi,
    "python": _python,
    "python3": _python,
    "ruff": _one_of("check", "format"),
    "mojo": _one_of("format", "precompile"),
    "mypy": _paths_exist,
    "git": lambda words: None if words[:1] == ["clone"] else "only `git clone` is known",
    "cd": _folder,
    # An environment that the reader made a line above.
    "source": lambda words: None if words == [".venv/bin/activate"] else "not the environment",
    ".ci/run": _script(".ci/run"),
    ".ci/check": _script(".ci/check"),
    "tests/gpu/run": _one_of("build", "check", "time"),
}


def mistakes(block: Block) -> list[str]:
    """Returns what is wrong with the commands of a block."""
    found = []
    for words in commands(block):
        check = KNOWN.get(words[0])
        wrong = check(words[1:]) if check else f"{words[0]} is no command that the tests know"
        if wrong:
            found.append(f"{block}: `{' '.join(words)}`: {wrong}")
    return found


@pytest.mark.parametrize(
    "block", [block for path in DOCUMENTS for block in shell_blocks(path)], ids=str
)
def test_every_command_is_one_that_works(block: Block) -> None:
    assert commands(block)
    assert not mistakes(block)


def _programs(*languages: str) -> list[Block]:
    """The programs of the documents that run, in the order of the documents."""
    found = [block for path in DOCUMENTS for block in blocks(path)]
    return [b for b in found if b.language in languages and b.not_run is None]


def test_every_document_has_its_programs() -> None:
    """A program that no reader could run, or a block without a language, hides in no document."""
    languages = {block.language for path in DOCUMENTS for block in blocks(path)}
    assert languages <= {"python", "mojo", "sh", "console", "json", "diff", ""}
    run = {block.path.name for block in _programs("python", "mojo")}
    assert run >= {
        "README.md",
        "graphs.md",
        "pytorch.md",
        "mojo.md",
        "ptxemu.md",
        "quantization.md",
    }


@pytest.mark.extended
def test_the_documents_programs_run(tmp_path: Path) -> None:
    run = _programs("python", "py")
    assert run
    stdin = json.dumps([[block.text, block.line, block.path.name] for block in run])
    ended = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=stdin,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_the_documents_mojo_compiles(tmp_path: Path) -> None:
    run = _programs("mojo")
    assert run
    package = tmp_path / "documents"
    package.mkdir()
    (package / "__init__.mojo").touch()
    for number, block in enumerate(run):
        (package / f"block_{number}.mojo").write_text(block.text)
    made = str(tmp_path / "documents.mojoc")
    include = str(library.OPERATIONS.parent)
    ended = library.run_mojo("precompile", str(package), "-I", include, "-o", made)
    assert ended.returncode == 0, ended.stderr


SAMPLE = """# A title, with `code`

<!-- not run: it needs a GPU -->
```python
import nothing
```

Text, and [a link](other.md#part-2), ![a picture](<a.png> "title"), `[no](link.md)`.

~~~console
$ pip install '.[test]' && python -m pytest
output
$ cd maxconv
~~~
[ref]: https://example.org/x
<img src="b.png">

```sh
A=1 python -m maxconv demo \\
    --sigma 25  # a comment
```
```
# no heading
```
"""


def test_the_reader_of_documents(tmp_path: Path) -> None:
    path = tmp_path / "sample.md"
    path.write_text(SAMPLE)
    first, console, shell, plain = blocks(path)
    assert (first.language, first.not_run, first.text) == (
        "python",
        "it needs a GPU",
        "import nothing\n",
    )
    assert SAMPLE.splitlines()[first.line - 1] == "import nothing"
    assert (console.not_run, plain.language) == (None, "")
    assert commands(console) == [
        ["pip", "install", ".[test]"],
        ["python", "-m", "pytest"],
        ["cd", "maxconv"],
    ]
    assert commands(shell) == [["python", "-m", "maxconv", "demo", "--sigma", "25"]]
    assert links(path) == ["other.md#part-2", "a.png", "https://example.org/x", "b.png"]
    assert anchors(path) == {"a-title-with-code"}


@pytest.mark.parametrize(
    "command",
    [
        "pip install '.[tests]'",
        "pip install leftpad",
        "pixi run tests",
        "python -m maxconv doctor --cure",
        "maxconv cure",
        "python -m ptxemu ring.ptx --cure",
        "python -m pytest tests/nowhere",
        "python graphs/nowhere.py",
        "pixi run demo --cure",
        "python -m maxconv_nowhere",
        "mojo format nowhere/operations",
        ".ci/nowhere",
        "rm -rf build",
    ],
)
def test_a_command_that_does_not_work_is_noticed(command: str) -> None:
    assert mistakes(Block(README, 1, "sh", command, None))


@pytest.mark.parametrize(
    "command",
    [
        "git clone https://example.org/maxconv && cd maxconv",
        "pip install -e '.[test,demo]'",
        "pixi run test",
        "pixi install",
        "maxconv doctor --conv 1x56x56x64:64x3x3 --stride 2",
        "python -m maxconv --help",
        "ptxemu ring.ptx --config ring.json --seed 1 2",
        "python -m pytest tests/host/test_docs.py::test_the_documents_are_there",
        "mojo format operations",
        ".ci/check",
    ],
)
def test_a_command_that_works_is_known(command: str) -> None:
    assert not mistakes(Block(README, 1, "sh", command, None))
