"""Measured over predicted: what the ranks did, above what the simulator said that they would.

Idea    Both are timelines of the same actions, so the eye compares box with box, and subtraction does the rest: how
        much longer the step took, how much more of it was idle, and how much longer each kind of action took. What
        the simulator cannot know (shared cores, a slow message) is what is left.
Read    `timelines.py` before.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from minipar.facts import Kind, Timeline
from minipar.show import reading, units, words
from minipar.show.axis import TimeScale, draw_axis, draw_grid
from minipar.show.drawing import Drawing
from minipar.show.lanes import Lane, check_size, draw_boxes, draw_idle
from minipar.show.legend import draw_legend
from minipar.show.palette import INK, MUTED, WORDS
from minipar.show.svg import BOLD, Sheet, text_width
from minipar.show.timelines import LEFT, MARGIN, draw_title, new_sheet, picture

RIGHT = 132


def overlay(
    measured: Timeline, predicted: Timeline, name: str = "", *, title: str = "", width: float = 1000
) -> Drawing:
    """For each rank what was measured, tall, over what was predicted, thin; with the difference in words.

    Both begin at second 0. Raises `ValueError` for timelines of different ranks.
    """
    if measured.ranks != predicted.ranks:
        raise ValueError(
            f"measured on {measured.ranks} ranks, predicted for {predicted.ranks}: simulate the same schedule"
        )
    seen, expected = reading.timeline_of(measured), reading.timeline_of(predicted)
    check_size(seen, expected)
    title = title or words.measured_over_predicted(seen, expected, name)
    sheet, scale = new_sheet(width, max(seen.duration, expected.duration), RIGHT)
    top = draw_title(sheet, title)
    sheet.text(MARGIN, top + 4, by_kind(seen, expected), 12, MUTED)
    top = draw_legend(sheet, [seen, expected], MARGIN, top + 16) + 28
    tall, thin = (24, 11) if seen.ranks <= 8 else (14, 7)
    pitch = tall + thin + 12
    upper = [Lane(top + rank * pitch, tall) for rank in range(seen.ranks)]
    lower = [Lane(lane.y + tall + 1, thin) for lane in upper]
    bottom = lower[-1].y + thin
    draw_grid(sheet, scale, top, bottom + 8)
    _draw_ends(sheet, seen, expected, scale, top, bottom)
    for timeline, lanes in ((seen, upper), (expected, lower)):
        draw_idle(sheet, timeline, lanes, scale)
        draw_boxes(sheet, timeline, lanes, scale)
    _draw_margins(sheet, seen, expected, scale, upper, lower)
    sheet.height = draw_axis(sheet, scale, bottom + 8) + MARGIN / 2
    said = f"{title}. {by_kind(seen, expected)}. Measured: {words.describe(seen)} Predicted: {words.describe(expected)}"
    return Drawing(sheet.svg(title, said), title, said)


def report_picture(timelines: Sequence[Timeline], title: str = "") -> Drawing:
    """The picture of `minipar train --picture`: the measured timeline, over the predicted one if there are two."""
    if len(timelines) == 1:
        one = reading.timeline_of(timelines[0])
        return picture(one, title=f"{title}: {words.headline(one)}" if title else "").drawing()
    if len(timelines) != 2:
        raise ValueError(f"{len(timelines)} timelines: give the measured one, and if there is one the predicted")
    return overlay(timelines[0], timelines[1], title)


def by_kind(measured: Timeline, predicted: Timeline) -> str:
    """How long each kind of action took on average: "forward 1.05 s on average (+5 %), backward ..."."""
    unit = units.unit_for(max(measured.duration, predicted.duration))
    said = []
    for kind in Kind:
        seen = [span.seconds for span in measured.spans if span.kind is kind]
        expected = [span.seconds for span in predicted.spans if span.kind is kind]
        if seen and expected:
            change = words.difference(fmean(seen), fmean(expected))
            said.append(f"{WORDS[kind]} {units.time(fmean(seen), unit)} ({change})")
    return f"On average: {', '.join(said)}"


def _draw_ends(sheet: Sheet, seen: Timeline, expected: Timeline, scale: TimeScale, top: float, bottom: float) -> None:
    """A line at each end of the step, behind the lanes, with its time."""
    ends = sorted([(expected.duration, "predicted", "3 3"), (seen.duration, "measured", "")])
    labels = [f"{word} {units.time(second, scale.unit)}" for second, word, _ in ends]
    apart = scale.x(ends[1][0]) - scale.x(ends[0][0])
    fits = apart > text_width(labels[1], 11) + 12
    for place, ((second, _, dash), label) in enumerate(zip(ends, labels, strict=True)):
        raised = 0 if place == 0 or fits else 13
        sheet.line(scale.x(second), top - 5 - raised, scale.x(second), bottom + 8, INK, 1.5, dash)
        sheet.text(scale.x(second) - 4, top - 6 - raised, label, 11, INK, "end")


def _draw_margins(
    sheet: Sheet, seen: Timeline, expected: Timeline, scale: TimeScale, upper: list[Lane], lower: list[Lane]
) -> None:
    """The names of the rows at their left, their idle shares at their right."""
    sheet.text(scale.right + 12, upper[0].y - 6, "idle / busy", 11, MUTED)
    for rank, (tall, thin) in enumerate(zip(upper, lower, strict=True)):
        middle = tall.y + tall.height / 2 + 4
        sheet.text(LEFT - 10, middle, f"rank {rank}", 12, INK, "end", BOLD)
        sheet.text(scale.right + 12, middle, f"{units.share(reading.idle_share(seen, rank))} measured", 11, INK)
        if thin.height >= 9:
            sheet.text(LEFT - 10, thin.y + thin.height - 1.5, "predicted", 10, MUTED, "end")
            share = units.share(reading.idle_share(expected, rank))
            sheet.text(scale.right + 12, thin.y + thin.height - 1.5, f"{share} predicted", 10, MUTED)
