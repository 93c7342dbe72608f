"""Lanes: a row for each rank, a box for each action, and hatching where the rank stands idle.

Idea    A box is as long as its action. It carries the number of the micro-batch while there is room for it: upright,
        or on its side where the box is narrow; after that colour and pattern speak alone. Where a rank has several
        stages, the boxes of later ones are a little darker and carry a line at the bottom for each.
Cost    About ten microseconds an action.
Read    `reading.py` before; `timelines.py`, which makes pictures of lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from minipar.facts import Kind, Span, Timeline
from minipar.show import palette, reading, units
from minipar.show.axis import TimeScale
from minipar.show.palette import HATCH, IDLE, INK, MUTED
from minipar.show.svg import BOLD, Sheet, hatching, text_width

MOST_BOXES = 20_000
TIPS = 1_500  # with more boxes than this, none has a text of its own under the mouse


@dataclass(frozen=True)
class Lane:
    """Where a rank is drawn: its boxes lie from y to y + height."""

    y: float
    height: float


def check_size(*timelines: Timeline) -> None:
    """Raise `ValueError` for more boxes than a page can show."""
    boxes = sum(len(timeline.spans) for timeline in timelines)
    if boxes > MOST_BOXES:
        raise ValueError(
            f"{boxes:,} actions are too many for one drawing: draw at most {MOST_BOXES:,}, with fewer micro-batches"
        )


def lane_height(ranks: int) -> float:
    """The more ranks, the thinner their lanes."""
    return next(height for most, height in ((8, 28), (16, 21), (32, 13), (10**9, 8)) if ranks <= most)


def place(ranks: int, top: float, height: float, gap: float = 5) -> list[Lane]:
    """Lanes below each other."""
    gap = gap if height > 12 else 2
    return [Lane(top + rank * (height + gap), height) for rank in range(ranks)]


def draw_idle(sheet: Sheet, timeline: Timeline, lanes: list[Lane], scale: TimeScale) -> None:
    """The bubble: hatched, and with its seconds where they fit."""
    lines, words = [], []
    sheet.write('<g class="idle">')
    for rank, lane in enumerate(lanes):
        for start, end in reading.gaps(timeline, rank):
            x, width = scale.x(start), scale.x(end) - scale.x(start)
            if width < 0.5:
                continue
            sheet.rect(x, lane.y, width, lane.height, IDLE, tip=f"rank {rank} idle for {units.time(end - start)}")
            lines.append(hatching(x, lane.y, width, lane.height))
            label = f"idle {units.time(end - start, scale.unit)}"
            if width > text_width(label, 11) + 14 and lane.height >= 16:
                words.append((x + width / 2, lane.y + lane.height / 2 + 4, label))
    sheet.path("".join(lines), HATCH)
    sheet.write("</g>")
    for x, y, label in words:
        half = text_width(label, 11) / 2
        sheet.rect(x - half, y - 10, 2 * half, 13, IDLE)
        sheet.text(x, y, label, 11, MUTED, "middle")


def draw_boxes(
    sheet: Sheet, timeline: Timeline, lanes: list[Lane], scale: TimeScale, tips: bool = True, letters: bool = False
) -> None:
    """All actions, those of one kind together."""
    chunks, ranks = reading.chunks(timeline), timeline.ranks
    tips = tips and len(timeline.spans) <= TIPS
    raised = min(4.0, 1.4 * (chunks - 1))  # numbers, above the lines
    shrink = min(1.0, 0.1 * _narrowest(timeline, scale))
    for kind in Kind:
        spans = [span for span in timeline.spans if span.kind is kind]
        if not spans:
            continue
        sheet.write(f'<g class="{palette.WORDS[kind].split()[0]}">')
        fills = [palette.fill(kind, chunk, chunks) for chunk in range(chunks)]
        for span in spans:
            lane, x = lanes[span.rank], scale.x(span.start)
            width = max(scale.x(span.end) - x - shrink, 0.2)
            sheet.rect(x, lane.y, width, lane.height, fills[span.stage // ranks], tip=_tip(span) if tips else "")
        sheet.write("</g>")
        ink = palette.ink_on(fills[0])
        if kind is Kind.WEIGHT:
            _draw_stripes(sheet, spans, lanes, scale, shrink)
        if chunks > 1:
            _draw_chunk_lines(sheet, spans, lanes, scale, ranks, ink)
        _draw_numbers(sheet, spans, [Lane(lane.y - raised, lane.height) for lane in lanes], scale, ink, letters)


def _narrowest(timeline: Timeline, scale: TimeScale) -> float:
    return scale.x(min(span.seconds for span in timeline.spans)) - scale.left


def _tip(span: Span) -> str:
    return (
        f"rank {span.rank}, stage {span.stage}: {palette.WORDS[span.kind]} of micro-batch {span.micro_batch}, "
        f"{units.time(span.seconds)} from {units.time(span.start)}"
    )


def _draw_stripes(sheet: Sheet, spans: Iterable[Span], lanes: list[Lane], scale: TimeScale, shrink: float) -> None:
    """Weight gradients are striped: lines that lean the other way than those of idle time."""
    marks = []
    for span in spans:
        lane, left, right = lanes[span.rank], scale.x(span.start), scale.x(span.end) - shrink
        for edge in (lane.y, lane.y + lane.height - 4):
            x = left + 2
            while x + 2 <= right:
                marks.append(f"M{x:.1f} {edge:.1f}l2 4")
                x += 4
    sheet.path("".join(marks), "#ffffff", 1.2, more=' class="stripes"')


def _draw_chunk_lines(
    sheet: Sheet, spans: Iterable[Span], lanes: list[Lane], scale: TimeScale, ranks: int, ink: str
) -> None:
    """A line at the bottom of the box for each stage of the rank that comes before this one."""
    marks = []
    for span in spans:
        lane = lanes[span.rank]
        left, right = scale.x(span.start), scale.x(span.end)
        inset = min(3.0, (right - left) / 6)
        for line in range(span.stage // ranks):
            y = lane.y + lane.height - 2.5 - 2.5 * line
            marks.append(f"M{left + inset:.1f} {y:.1f}H{right - inset - 0.5:.1f}")
    sheet.path("".join(marks), ink, 1.2, more=' class="chunks"')


def _draw_numbers(
    sheet: Sheet, spans: Sequence[Span], lanes: list[Lane], scale: TimeScale, ink: str, letters: bool
) -> None:
    """The micro-batch in each box, if there is room: across, else on its side, else not at all."""
    sheet.write(f'<g class="number" fill="{ink}" text-anchor="middle">')
    longest = max(len(str(span.micro_batch)) for span in spans) + letters
    for span in spans:
        lane, x = lanes[span.rank], scale.x(span.start)
        width = scale.x(span.end) - x
        text = f"{span.kind.value}{span.micro_batch}" if letters else str(span.micro_batch)
        middle, centre = x + width / 2, lane.y + lane.height / 2
        font = min(12.0, lane.height - 3, 1.72 * (width - 1.2) / longest)
        if font >= 7:
            sheet.write(f'<text x="{middle:.1f}" y="{centre + 0.36 * font:.1f}" font-size="{font:.1f}">{text}</text>')
            continue
        font = min(9.0, width + 1.2, 1.72 * (lane.height - 4) / longest)
        if font >= 7:
            y, across = centre, middle + 0.36 * font
            sheet.write(
                f'<text x="{across:.1f}" y="{y:.1f}" font-size="{font:.1f}" '
                f'transform="rotate(-90 {across:.1f} {y:.1f})">{text}</text>'
            )
    sheet.write("</g>")


def draw_labels(sheet: Sheet, timeline: Timeline, lanes: list[Lane], right: float) -> None:
    """At the left of each lane the rank, and below it its stages."""
    chunks, ranks = reading.chunks(timeline), timeline.ranks
    for rank, lane in enumerate(lanes):
        own = [str(rank + chunk * ranks) for chunk in range(chunks)]
        shown = ", ".join(own) if chunks < 4 else f"{own[0]}, {own[1]}..{own[-1]}"
        stages = f"stage{'s' if chunks > 1 else ''} {shown}"
        middle = lane.y + lane.height / 2
        if lane.height >= 24:
            sheet.text(right, middle - 1, f"rank {rank}", 12, INK, "end", BOLD)
            sheet.text(right, middle + 12, stages, 10, MUTED, "end")
        elif lane.height >= 12 or rank % 4 == 0:
            sheet.text(right, middle + 3.5, f"rank {rank}", min(11.0, lane.height + 2), INK, "end")


def draw_phases(sheet: Sheet, timeline: Timeline, lanes: list[Lane], scale: TimeScale) -> bool:
    """Under each lane of a 1F1B a line: dotted while it warms up, solid in steady state, dashed as it cools down."""
    phases = reading.phases(timeline)
    if not phases or lanes[0].height < 12:
        return False
    sheet.write('<g class="phases">')
    for lane, phase in zip(lanes, phases, strict=True):
        y = lane.y + lane.height + 3
        marks = (phase.begin, phase.steady, phase.cooling, phase.end)
        for (start, end), dash in zip(pairwise(marks), PHASES.values(), strict=True):
            if end > start:
                sheet.line(scale.x(start) + 1, y, scale.x(end) - 2, y, MUTED, 1.8, dash)
    sheet.write("</g>")
    marks = (phases[0].begin, phases[0].steady, phases[0].cooling, phases[0].end)
    for word, (start, end) in zip(PHASES, pairwise(marks), strict=True):
        if scale.x(end) - scale.x(start) > text_width(word, 11) + 4:
            sheet.text((scale.x(start) + scale.x(end)) / 2, lanes[0].y - 5, word, 11, MUTED, "middle")
    return True


PHASES = {"warm-up": "1.8 3", "steady": "", "cool-down": "7 3.5"}
