"""Reads the repository's documents: fenced blocks, the commands in them, headings and links."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

_IGNORED = {"build", "dist", "node_modules", "venv"}
_FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
_NOT_RUN = re.compile(r"^<!-- not run: (?P<reason>\S.*?) -->$")
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
_HTML = re.compile(r"(?:src|href)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, its text, and why it is not run, if so.

    ``line`` is that of the block's first line of text, counted from 1.
    """

    path: Path
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """Returns the Markdown files of the repository, without what tools and environments made."""

    def belongs(path: Path) -> bool:
        folders = path.relative_to(ROOT).parts[:-1]
        return not any(part in _IGNORED or part.startswith(".") for part in folders)

    return sorted(path for path in ROOT.rglob("*.md") if belongs(path))


def blocks(path: Path) -> list[Block]:
    """Returns the fenced blocks of a document in order."""
    found: list[Block] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    above, number = "", 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            above = lines[number].strip() or above
            number += 1
            continue
        fence = opening["fence"]
        closing = re.compile(rf"^ {{0,3}}{re.escape(fence[0])}{{{len(fence)},}}\s*$")
        end = next(
            (i for i in range(number + 1, len(lines)) if closing.match(lines[i])), len(lines)
        )
        marker = _NOT_RUN.match(above)
        found.append(
            Block(
                path,
                number + 2,
                opening["language"],
                textwrap.dedent("\n".join(lines[number + 1 : end]) + "\n"),
                marker["reason"] if marker else None,
            )
        )
        above, number = "", end + 1
    return found


def commands(block: Block) -> list[list[str]]:
    """Returns the commands of a shell block as words; in a ``console`` block those after ``$``."""
    text = block.text.replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [command for line in lines for command in _split(line)]


def _split(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word in ("&&", "||", "|", ";"):
            # What is only set for one command is no command.
            while words and re.match(r"^[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words
            words = []
        else:
            words.append(word)


def shell_blocks(path: Path) -> list[Block]:
    """Returns the blocks of a document that are run in a shell."""
    return [
        block
        for block in blocks(path)
        if block.language in ("sh", "bash", "shell", "console") and block.not_run is None
    ]


def anchors(path: Path) -> set[str]:
    """Returns the anchors that GitHub gives a document's headings."""
    lines = _without_blocks(path).splitlines()
    headings = [match[1] for line in lines if (match := re.match(r"#{1,6}\s+(.*?)\s*#*$", line))]
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def links(path: Path) -> list[str]:
    """Returns the targets of a document's links and pictures."""
    text = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "code", _without_blocks(path))
    return [target for pattern in (_LINK, _REFERENCE, _HTML) for target in pattern.findall(text)]


def _without_blocks(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    for block in blocks(path):
        # From the line of the opening fence to that of the closing one.
        for number in range(block.line - 2, block.line + block.text.count("\n")):
            if number < len(lines):
                lines[number] = ""
    return "\n".join(lines)
