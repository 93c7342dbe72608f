"""The messages of a rank under the work that hides them: what was sent meanwhile, and what was waited for.

Idea    Above, what the rank computes; below, its messages, each from its launch until it was needed and there. The dark
        end of a message is the time in which its rank could do nothing but wait: what overlap has not hidden.
Source  Overlap of gradient buckets: Li et al. 2020, 'PyTorch Distributed', arXiv:2006.15704.
Read    `minipar/message.py` for what is recorded; `timelines.py` for the boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from minipar.facts import Span, Timeline
from minipar.show import units
from minipar.show.axis import TimeScale, draw_axis, draw_grid
from minipar.show.drawing import Drawing
from minipar.show.lanes import draw_boxes, place
from minipar.show.legend import draw_legend
from minipar.show.palette import INK, MUTED, RANKS, ink_on
from minipar.show.svg import BOLD, Sheet, text_width
from minipar.show.timelines import MARGIN, draw_title, new_sheet

TALL, ROW = 26, 17
SENT, WAITED = RANKS[2], RANKS[3]


class Sent(Protocol):
    """What is read of a message: seconds on the clock of the spans."""

    op: str
    group: str
    tag: str
    bytes: int
    launched: float
    waited: float
    finished: float


def messages(
    ranks: Mapping[str, tuple[Sequence[Span], Sequence[Sent]]], *, title: str = "", groups: Sequence[str] = ()
) -> Drawing:
    """By name of a rank its spans and messages of one step; `groups` chooses messages (default: all but the world's).

    Raises `ValueError` without spans.
    """
    spans = [span for mine, _ in ranks.values() for span in mine]
    if not spans:
        raise ValueError("there are no spans to draw: give the spans and messages of one step of a rank")
    chosen = {
        name: sorted((m for m in sent if (m.group in groups if groups else m.group != "world")), key=_launched)
        for name, (_, sent) in ranks.items()
    }
    begin = min(span.start for span in spans)
    end = max([span.end for span in spans] + [m.finished for sent in chosen.values() for m in sent])
    title = title or _headline(chosen)
    sheet, scale = new_sheet(1000, end - begin, right=24)
    top = draw_title(sheet, title)
    shown = Timeline(tuple(replace(s, start=s.start - begin, end=s.end - begin) for s in spans), 1)
    top = draw_legend(sheet, [shown], MARGIN, top)
    for x, colour, word in ((MARGIN, SENT, "message on its way"), (MARGIN + 170, WAITED, "its rank waits for it")):
        sheet.rect(x, top, 20, 12, colour)
        sheet.text(x + 26, top + 10, word, 11, MUTED)
    top += 26
    for name, (mine, _) in ranks.items():
        moved = tuple(replace(s, start=s.start - begin, end=s.end - begin, rank=0) for s in mine)
        lanes = place(1, top + 4, TALL)
        depth = _draw_messages(sheet, chosen[name], begin, scale, top + TALL + 10, dry=True)
        draw_grid(sheet, scale, top, top + TALL + 10 + ROW * depth)
        draw_boxes(sheet, Timeline(moved, 1), lanes, scale)
        sheet.text(scale.left - 10, top + 4 + TALL / 2 + 4, name, 12, INK, "end", BOLD)
        _draw_messages(sheet, chosen[name], begin, scale, top + TALL + 10)
        top += TALL + 24 + ROW * depth
    sheet.height = draw_axis(sheet, scale, top) + MARGIN / 2
    words = " ".join(_in_words(name, sent, begin) for name, sent in chosen.items())
    return Drawing(sheet.svg(title, words), title, words)


def _launched(message: Sent) -> float:
    return message.launched


def _headline(chosen: Mapping[str, Sequence[Sent]]) -> str:
    on_way = sum(m.finished - m.launched for sent in chosen.values() for m in sent)
    waited = sum(m.waited for sent in chosen.values() for m in sent)
    if not on_way:
        return "No messages in this step"
    count = sum(map(len, chosen.values()))
    return f"{units.count(count, 'message')}, on their way for {units.time(on_way)}; waited for {units.time(waited)}"


def _in_words(name: str, sent: Sequence[Sent], begin: float) -> str:
    each = "; ".join(
        f"{m.tag or m.op}, {units.size(m.bytes)}, from {units.time(m.launched - begin)} to "
        f"{units.time(m.finished - begin)}, waited for {units.time(m.waited)}"
        for m in sent[:12]
    )
    more = f"; and {len(sent) - 12} more" if len(sent) > 12 else ""
    return f"{name}: {each or 'no messages'}{more}."


def _draw_messages(
    sheet: Sheet, sent: Sequence[Sent], begin: float, scale: TimeScale, top: float, dry: bool = False
) -> int:
    """A bar for each message, in as many rows as are on their way at once; how many rows that are."""
    free: list[float] = []
    for message in sent:
        left, right = scale.x(message.launched - begin), scale.x(message.finished - begin)
        row = next((number for number, until in enumerate(free) if until <= left), len(free))
        free[row : row + 1] = [right + 1]
        if dry:
            continue
        y, wait = top + row * ROW, (scale.right - scale.left) * message.waited / scale.seconds
        tip = f"{message.tag or message.op}, {units.size(message.bytes)}, waited for {units.time(message.waited)}"
        sheet.rect(left, y, max(right - left, 1), ROW - 4, SENT, tip=tip)
        sheet.rect(max(right - wait, left), y, max(min(wait, right - left), 0.5), ROW - 4, WAITED)
        text = message.tag.partition(".")[2] or message.tag or message.op
        if right - left - wait > text_width(text, 10) + 6:
            sheet.text(left + 4, y + 10, text, 10, ink_on(SENT))
    return len(free)
