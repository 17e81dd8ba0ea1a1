"""A bar chart as SVG, from the tables the drain printed: no library, and legible on a light and on a dark page."""

from __future__ import annotations

import re
from html import escape

BAR, GAP, LEFT, WIDE, TOP = 18, 6, 210, 420, 34
COLOURS = {"bare": "#8a8f98", "celery_idem": "#2f7ed8", "": "#d98a2b"}
"""By how a name begins; the last is everybody else's."""


def shares(printed: str) -> str:
    """One group of bars per scene: tasks per second as a share of bare Celery."""
    groups = [(title, _rows(body)) for title, body in re.findall(r"\*\*(.+?)\*\*\n\n[^|*]*((?:\|.*\n?)+)", printed)]
    return bars("Tasks per second, as a share of bare Celery", [(title, rows) for title, rows in groups if rows])


def _rows(lines: str) -> list[tuple[str, float]]:
    cells = [
        [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
        for line in lines.splitlines()
    ]
    if "of bare" not in cells[0]:
        return []
    column = cells[0].index("of bare")
    return [(row[0], float(row[column])) for row in cells[2:] if row[column][:1].isdigit()]


def bars(title: str, groups: list[tuple[str, list[tuple[str, float]]]]) -> str:
    """The chart; every group has a title and named values, 1 is the whole width but for a margin."""
    most = max([1.0, *(value for _, rows in groups for _, value in rows)])
    parts, y = [], TOP
    if not groups:
        y += BAR
        parts.append(f'<text x="8" y="{y}">Not run yet: make bench</text>')
    for name, rows in groups:
        y += BAR
        parts.append(f'<text x="8" y="{y}" font-weight="bold">{escape(name)}</text>')
        y += GAP
        for label, value in rows:
            colour = next(shade for start, shade in COLOURS.items() if label.startswith(start))
            width = WIDE * value / most
            middle = y + BAR - 5
            parts.append(f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{escape(label)}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + width + 6:.1f}" y="{middle}">{value:.2f}</text>')
            y += BAR + GAP // 3
        y += GAP
    one = LEFT + WIDE / most
    parts.append(f'<line x1="{one:.1f}" y1="{TOP}" x2="{one:.1f}" y2="{y}" stroke="#8a8f98" stroke-dasharray="3 3"/>')
    size = f'width="{LEFT + WIDE + 60}" height="{y + 10}" viewBox="0 0 {LEFT + WIDE + 60} {y + 10}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12" fill="#5b6470">\n'
        f"<title>{escape(title)}</title>\n"
        f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
