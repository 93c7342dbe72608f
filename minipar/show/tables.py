"""A small table of what cells have measured, in a page and in plain text.

Idea    Numbers stand at the right, words at the left; the plain text is as good as the page.
Read    `charts.py` for numbers that want a curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from minipar.show import units

CELL = "padding:4px 14px;border-bottom:1px solid #e1e4e8;"


@dataclass(frozen=True)
class Table:
    """Rows of words and numbers under a title that states what they show."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[bool]

    def _repr_html_(self) -> str:
        side = ["text-align:right" if number else "text-align:left" for number in self.numeric]
        cells = lambda tag, row: "".join(
            f'<{tag} style="{CELL}{align}">{escape(text)}</{tag}>' for text, align in zip(row, side, strict=True)
        )
        style = "border-collapse:collapse;font:14px system-ui,sans-serif;font-variant-numeric:tabular-nums"
        caption = "text-align:left;font-weight:600;font-size:15px;padding:6px 14px;caption-side:top"
        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        return (
            f'<div style="overflow-x:auto"><table style="{style}"><caption style="{caption}">{escape(self.title)}'
            f"</caption><thead><tr>{cells('th', self.columns)}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def __repr__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        place = lambda row: "  ".join(
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(row, widths, self.numeric, strict=True)
        ).rstrip()
        return "\n".join([self.title, *map(place, lines)])


def table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """A row for each mapping; the columns are the keys of the first one. Numbers are shortened to three digits, texts
    stay. Raises `ValueError` without rows, or for rows of different keys."""
    if not rows:
        raise ValueError("a table needs at least one row")
    columns = list(rows[0])
    if any(list(row) != columns for row in rows):
        raise ValueError(f"every row of a table needs the same keys, in the same order: {', '.join(columns)}")
    numeric = [all(isinstance(row[name], int | float) for row in rows) for name in columns]
    return Table(title, columns, [[_said(row[name]) for name in columns] for row in rows], numeric)


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return units.plain(value) if isinstance(value, float) else str(value)
