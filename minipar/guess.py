"""Predict, then run: a question with choices before a result, and the result's own verdict after it.

    guess("bubble", "Which share of the time is idle?", ["a tenth", "a half", "three quarters"])
    ...
    reveal("bubble", "a half", "three ranks of four wait at the start, and three at the end")

Idea    Whoever has committed to an answer reads the result with other eyes. The right choice is worked out by the cell
        that ran, from what it measured: nothing knows it before. The score is kept in the kernel and nowhere else, and
        not to guess costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape, unescape
from typing import Any

from minipar.show import widgets

FONT = "font:15px system-ui,sans-serif"


@dataclass
class Question:
    """A question that was asked, the choice that was made, if any, and whether it was right, once that is known."""

    text: str
    choices: list[str]
    chosen: str | None = None
    right: bool | None = None


_asked: dict[str, Question] = {}  # of this kernel


def guess(key: str, question: str, choices: Sequence[str]) -> Any:
    """A widget that asks; in a page without a kernel, the question alone. Raises `ValueError` for fewer than two
    choices, or for equal ones."""
    if len(choices) < 2 or len(set(choices)) < len(choices):
        raise ValueError(f"question {key!r}: give at least two choices, all different")
    asked = _asked[key] = Question(question, list(choices))
    ipywidgets = widgets.library("guess")
    heading = ipywidgets.HTML(f'<div style="{FONT}"><b>Your guess, before you run on.</b> {escape(question)}</div>')
    radio = ipywidgets.RadioButtons(options=asked.choices, value=None, layout=ipywidgets.Layout(width="auto"))
    said = ipywidgets.HTML()

    def choose(change: dict[str, Any]) -> None:
        asked.chosen = change["new"]
        noted = escape(str(change["new"]))
        said.value = f'<div role="status" style="{FONT}">Noted: {noted}. Now run the next cell.</div>'

    radio.observe(choose, names="value")
    frame = ipywidgets.Layout(border_left="4px solid #8a3ffc", padding="4px 0 4px 14px", margin="6px 0")
    items = "".join(f"<li>{escape(choice)}</li>" for choice in choices)
    page = f'{_frame("#8a3ffc")}<b>Before you read on, guess.</b> {escape(question)}<ul>{items}</ul></div>'
    return widgets.with_page(ipywidgets, [heading, radio, said], page, layout=frame)


def reveal(key: str, right: str, because: str = "") -> Page:
    """What came out, beside what was guessed. Raises `ValueError` for a question that was not asked, or an answer that
    was not among its choices."""
    asked = _asked.get(key)
    if asked is None:
        raise ValueError(f"no question {key!r} was asked: run the cell with guess({key!r}, ...) first")
    if right not in asked.choices:
        raise ValueError(f"{right!r} was none of the choices of {key!r}: {', '.join(map(repr, asked.choices))}")
    why = f", because {escape(because)}" if because else ""
    if asked.chosen is None:
        return Page(f'{_frame("#57606a")}It is <b>{escape(right)}</b>{why}.</div>')
    asked.right = asked.chosen == right
    good, of = score()
    verdict = "You guessed right" if asked.right else f"You guessed {escape(asked.chosen)}"
    colour, sign = ("#2b66a8", "\N{CHECK MARK}") if asked.right else ("#b8860b", "\N{BALLOT X}")
    tail = f'<span style="color:#57606a"> {good} of {of} so far.</span>'
    return Page(f"{_frame(colour)}{sign} {verdict}: it is <b>{escape(right)}</b>{why}.{tail}</div>")


def score() -> tuple[int, int]:
    """Right guesses, and all that were made and revealed."""
    known = [asked.right for asked in _asked.values() if asked.right is not None]
    return sum(known), len(known)


@dataclass(frozen=True)
class Page:
    """A piece of HTML that a notebook shows."""

    html: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        words = re.sub(r"\s+", " ", unescape(re.sub("<[^>]*>", " ", self.html))).strip()
        return re.sub(r" ([,.:])", r"\1", words)


def _frame(colour: str) -> str:
    return f'<div style="{FONT};border-left:4px solid {colour};padding:6px 14px;margin:6px 0">'
