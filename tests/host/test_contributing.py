"""What CONTRIBUTING.md says of the tree, the way of a call and the recipes is what is there."""

import re
import subprocess
from pathlib import Path

import pytest
from tests.documents import ROOT, Block, blocks

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
TEXT = CONTRIBUTING.read_text(encoding="utf-8")

#: Folders in which every folder is named, down to two levels.
NAMED = ("operations", "python")
MOST_HOPS = 10
MOST_FILES = 3


def section(title: str) -> str:
    """The text below a heading, up to the next one of its level."""
    level = len(title) - len(title.lstrip("#"))
    _, _, rest = TEXT.partition(f"\n{title}\n")
    assert rest, f"no heading {title!r}"
    return re.split(rf"\n#{{1,{level}}} ", rest)[0]


def folders() -> set[str]:
    """The folders that git tracks files in, with those above them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    files = [path for line in listed.stdout.splitlines() if (path := Path(line)).parent.name]
    present = [path for path in files if (ROOT / path).exists()]
    return {parent.as_posix() for path in present for parent in path.parents} - {"."}


def tree() -> list[str]:
    """The folders of the tree."""
    [block] = re.findall(r"```\n(.*?)```", section("## The tree"), re.DOTALL)
    return re.findall(r"^(\S+)/ ", block, re.MULTILINE)


def ways() -> list[list[str]]:
    """The lists of hops, each hop its text on one line."""
    text = re.sub(r"\n +", " ", section("## From a call to the launch"))
    hops = [(int(n), hop) for n, hop in re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE)]
    found: list[list[str]] = []
    for number, hop in hops:
        if number == 1:
            found.append([])
        found[-1].append(hop)
        assert number == len(found[-1])
    return found


def diffs() -> list[Block]:
    """The diffs of the recipes."""
    return [block for block in blocks(CONTRIBUTING) if block.language == "diff"]


def added(block: Block) -> dict[str, list[str]]:
    """The lines that a diff adds, by file."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in block.text.splitlines():
        if line.startswith("+++ b/"):
            lines = found.setdefault(line.removeprefix("+++ b/"), [])
        elif line.startswith("+"):
            lines.append(line[1:])
    return found


def test_the_tree_is_that_of_the_repository() -> None:
    named = tree()
    assert len(set(named)) == len(named)
    there = folders()
    assert set(named) <= there
    deep = {f for f in there if f.split("/")[0] in NAMED and 1 < len(f.split("/")) <= 3}
    assert deep <= set(named)
    tops = {folder for folder in there if "/" not in folder and not folder.startswith(".")}
    assert tops <= {name.split("/")[0] for name in named}


def test_a_call_takes_few_hops_and_no_file_twice() -> None:
    assert len(ways()) == 2
    for hops in ways():
        assert 5 < len(hops) <= MOST_HOPS
        files = []
        for hop in hops:
            first, *names = re.findall(r"`([^`]+)`", hop)
            assert (ROOT / first).is_file(), first
            source = (ROOT / first).read_text(encoding="utf-8")
            for name in names:
                if re.fullmatch(r"\w+", name):
                    assert re.search(rf"\b{name}\b", source), f"{first} has no {name}"
            files.append(first)
        assert len(set(files)) == len(files)


def test_modules_named_on_the_way_are_there() -> None:
    named = re.findall(
        r"[\w/]+\.mojo", re.sub(r"`[^`]*`", "", section("## From a call to the launch"))
    )
    assert named
    for name in named:
        places = [ROOT / "operations" / name, ROOT / "operations/nvidia/sm90/gemm" / name]
        assert any(place.is_file() for place in places), name


def test_every_recipe_has_the_diff_of_a_real_one() -> None:
    recipes = re.findall(r"^### (.*)$", section("## Recipes"), re.MULTILINE)
    assert recipes == [
        "A kernel for a GPU",
        "A target",
        "An epilogue step",
        "A dtype on one generation",
        "A problem",
    ]
    for recipe in recipes:
        assert "```diff" in section(f"### {recipe}")
    assert len(diffs()) == len(recipes)


@pytest.mark.parametrize("block", diffs(), ids=str)
def test_a_recipe_touches_few_files_and_its_lines_are_there(block: Block) -> None:
    files = added(block)
    assert 1 <= len(files) <= MOST_FILES
    assert len(block.text.splitlines()) <= 24
    for name, lines in files.items():
        source = (ROOT / name).read_text(encoding="utf-8").splitlines()
        assert lines
        assert not [line for line in lines if line not in source], name
        # What is numbered above a diff is what the diff touches.
        assert f"{name}" in TEXT or Path(name).name in TEXT
