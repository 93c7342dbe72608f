"""`%%grade 1`: a notebook cell as an answer, and its result as a panel below.

Idea    The cell's text is the answer, exactly as a file would be: it runs on ranks of its own, sees nothing of the
        notebook, and says what it needs to import.
Read    `exercise.py` before.
"""

from __future__ import annotations

import secrets
from html import escape
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from minipar.grade import progress

if TYPE_CHECKING:
    from minipar.grade.exercise import Exercise, Result

DONE, MISSED = "#2b66a8", "#b8860b"


def load(shell: Any) -> None:
    """Register `%%grade` with an IPython shell."""
    shell.register_magic_function(grade_cell, "cell", "grade")


def grade_cell(line: str, cell: str) -> Panel:
    """`%%grade 1`: grade this cell as the answer to an exercise, by number or name."""
    from minipar.grade import exercise, trial

    try:
        one = exercise.find(line.strip())
    except ValueError as error:
        raise UsageError(f"%%grade: {error}") from None
    with trial.Nursery() as nursery:
        result = exercise.grade(one, cell, secrets.randbelow(2**31), nursery)
    progress.note(one.name, result.score)
    return Panel(one, result)


class Panel:
    """The result of an answer, as a notebook shows it."""

    def __init__(self, one: Exercise, result: Result) -> None:
        self.exercise, self.result = one, result

    def __repr__(self) -> str:
        from minipar.grade.command import told

        return told(self.exercise, self.result)

    def _repr_html_(self) -> str:
        result, colour = self.result, DONE if self.result.passed else MISSED
        rows = "".join(_row(check) for check in result.checks)
        printed = ""
        if result.printed:
            shown = escape("\n".join(result.printed.splitlines()[:10]))
            printed = f'It printed:<pre style="margin:2px 0;white-space:pre-wrap">{shown}</pre>'
        title = f"{int(self.exercise.name[:2])}. {escape(self.exercise.title)}"
        bar = (
            f'<div role="meter" aria-valuenow="{result.score}" aria-valuemin="0" aria-valuemax="100" aria-label="mark" '
            f'style="height:8px;background:#e1e4e8;border-radius:4px;margin:8px 0 10px"><div style="height:8px;'
            f'width:{result.score}%;background:{colour};border-radius:4px"></div></div>'
        )
        return (
            f'<section aria-label="{title}" style="font:14px system-ui,sans-serif;border:1px solid #d0d7de;border-left:'
            f'5px solid {colour};border-radius:4px;padding:10px 16px;max-width:760px"><div style="display:flex;'
            f'justify-content:space-between;font-size:16px"><b>{title}</b><b>{result.score} of 100</b></div>{bar}'
            f'<ul style="list-style:none;padding:0;margin:0">{rows}</ul>{printed}</section>'
        )


def _row(check: dict[str, Any]) -> str:
    sign, colour = ("\N{CHECK MARK}", DONE) if check["passed"] else ("\N{BALLOT X}", MISSED)
    said = ""
    if check["message"]:
        said = f'<div style="margin:2px 0 6px 1.6em;color:#57606a">{escape(check["message"])}</div>'
    state = "passed" if check["passed"] else "failed"
    return (
        f'<li style="margin:3px 0"><span aria-label="{state}" style="color:{colour};display:inline-block;width:1.6em">'
        f"{sign}</span>{escape(check['name'])}{said}</li>"
    )
