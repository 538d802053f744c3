"""The Markdown pages of this repository: their code, links and headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SHELL = ("", "sh", "bash", "shell", "console")
_ASSIGNMENT = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True, slots=True)
class Page:
    """One page: its prose without fenced blocks, and the blocks that a shell or Python could read."""

    path: Path
    prose: str
    shell: tuple[str, ...]
    python: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Page:
        """The page at a path."""
        text = path.read_text()
        fences = _FENCE.findall(text)
        shell = tuple(block for language, block in fences if language in _SHELL)
        python = tuple(block for language, block in fences if language == "python")
        return cls(path, _FENCE.sub("", text), shell, python)

    @property
    def code(self) -> list[str]:
        """What stands between backticks, line breaks as spaces."""
        return [" ".join(text.split()) for text in _INLINE.findall(self.prose)]

    @property
    def links(self) -> list[str]:
        """Targets of links."""
        return _LINK.findall(_INLINE.sub("", self.prose))

    @property
    def anchors(self) -> set[str]:
        """What `#fragments` may name, as GitHub makes them of headings."""
        titles = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    def commands(self) -> Iterator[list[str]]:
        """All command lines, in blocks and inline, as words; variables set before them are left out."""
        yield from self.block_commands()
        for text in self.code:
            yield from _commands(text)

    def block_commands(self) -> Iterator[list[str]]:
        """Those in blocks, which a reader copies."""
        for text in self.shell:
            yield from _commands(text)


def _commands(text: str) -> Iterator[list[str]]:
    for line in text.replace("\\\n", " ").splitlines():
        if words := _words(line):
            yield words


def _words(line: str) -> list[str]:
    """The words of one command; none if it is no command of ours, or no shell reads it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # an apostrophe of prose
        return []
    while words and _ASSIGNMENT.match(words[0]):
        words.pop(0)
    ends = [i for i, word in enumerate(words) if set(word) <= set(";&|<>")]
    words = words[: ends[0]] if ends else words
    return words if words[:1] in (["paceline"], ["python"], ["make"], ["pytest"], ["pip"]) else []
