"""The documentation as data: its pages, their fenced blocks, headings, links and tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`\n]*)$")
_LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block: its text, the number of its first line in the page, and what its info string says."""

    text: str
    line: int
    tag: str
    title: str | None


@dataclass(frozen=True)
class Link:
    """One link; ``target`` as written."""

    text: str
    target: str
    line: int


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def _parts(self) -> tuple[list[Block], list[tuple[int, str]]]:
        """The blocks, and the numbered lines outside of them."""
        blocks, prose, fence = [], [], None
        for number, line in enumerate(self.path.read_text("utf-8").splitlines(), start=1):
            found = _FENCE.match(line)
            if fence is None and found:
                fence, inside = (found["ticks"], found["info"], number + 1), []
            elif fence is not None and found and found["ticks"].startswith(fence[0]) and not found["info"].strip():
                blocks.append(_block("\n".join(inside) + "\n", fence[2], fence[1]))
                fence = None
            elif fence is not None:
                inside.append(line)
            else:
                prose.append((number, line))
        assert fence is None, f"{self.name}:{fence[2] if fence else 0}: the fenced block is never closed"
        return blocks, prose

    @property
    def blocks(self) -> list[Block]:
        return self._parts[0]

    @property
    def links(self) -> Iterator[Link]:
        for number, line in self._parts[1]:
            for found in _LINK.finditer(line):
                yield Link(found["text"], found["target"], number)

    @property
    def anchors(self) -> set[str]:
        """What its headings are called in links, as GitHub makes it."""
        found: set[str] = set()
        for _, line in self._parts[1]:
            heading = re.match(r"#{1,6} +(.*)", line)
            if heading:
                anchor, again = slug(heading[1]), 0
                while (name := f"{anchor}-{again}" if again else anchor) in found:
                    again += 1
                found.add(name)
        return found

    def rows(self) -> list[list[str]]:
        """The cells of every table row that is no header and no rule; a bar inside a cell is written ``\\|``."""
        lines = [line for _, line in self._parts[1]]
        found = []
        for above, line, below in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
            table = line.startswith("|") and not _is_rule(line) and not _is_rule(below)
            if table and above.startswith("|"):
                found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])])
        return found


def _is_rule(line: str) -> bool:
    return re.fullmatch(r"\|[-| :]+\|", line.strip()) is not None


def _block(text: str, line: int, info: str) -> Block:
    tag, _, rest = info.strip().partition(" ")
    title = re.search(r'title="([^"]+)"', rest)
    return Block(text, line, tag, title[1] if title else None)


def slug(heading: str) -> str:
    """A heading's anchor."""
    plain = _LINK.sub(lambda link: link["text"], heading)
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


PAGES = [Page(path) for path in PATHS]


def page(name: str) -> Page:
    """The page of that name, from the repository's root."""
    return Page(ROOT / name)
