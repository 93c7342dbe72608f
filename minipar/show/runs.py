"""A run as its log tells it, or two of them: loss, gradient norm, time of a step.

Idea    Three curves over the same steps, since one trouble shows in several: a step that is not finite in the norm, a
        loss that jumps after it, a step that took long and the rank that was busy meanwhile. Two runs lie over each
        other, the second dashed.
Read    `minipar/metrics.py`, which writes and reads logs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, log10
from pathlib import Path
from typing import Any

from minipar.facts import Kind
from minipar.show import units
from minipar.show.drawing import Drawing
from minipar.show.palette import FILL, GRID, INK, MUTED
from minipar.show.svg import BOLD, Sheet
from minipar.show.timelines import MARGIN, draw_title

Step = dict[str, Any]
WIDTH, LEFT, RIGHT, TALL, GAP = 1000, 90, 30, 130, 52
COLOURS = FILL[Kind.BACKWARD], FILL[Kind.FORWARD]  # dark, light


@dataclass(frozen=True)
class Curve:
    """What one panel shows: a number of each step, None where there is none; times and norms by powers of ten."""

    name: str
    unit: str
    value: Callable[[Step], float | None]
    powers: bool = False


PANELS = (
    Curve("loss", "", lambda step: step.get("loss")),
    Curve("gradient norm", "", lambda step: step.get("grad_norm"), powers=True),
    Curve("time of a step", "s", lambda step: (step.get("step_seconds") or {}).get("max"), powers=True),
)


@dataclass(frozen=True)
class Mark:
    """What happened in a step, drawn below each curve: a path around 0, 0."""

    key: str
    path: str
    meaning: str
    done: str


MARKS = (
    Mark("skipped", "M-4 -4L4 4M-4 4L4 -4", "skipped: its gradient was not finite", "skipped"),
    Mark("rolled_back", "M4 -5L-4 0L4 5Z", "then back to the weights of a checkpoint", "rolled back"),
    Mark("restarted", "M-5 0L0 -5L5 0L0 5Z", "begun again after a rank was lost", "begun again"),
)


def run(log: Any, other: Any = None, *, names: Sequence[str] = ("", "")) -> Drawing:
    """The curves of a log, and of another over it. A log is the name of a file that `--log` has written, or its steps.

    Raises `ValueError`, one line, for what is no log.
    """
    runs = [_steps(one) for one in (log, other) if one is not None]
    called = [name or _name(one) for name, one in zip(names, (log, other), strict=True)][: len(runs)]
    title = _title(runs, called)
    sheet = Sheet(WIDTH)
    y = _draw_legend(sheet, draw_title(sheet, title), called, runs)
    most = max(step["step"] for steps in runs for step in steps) or 1
    across = lambda number: LEFT + (WIDTH - LEFT - RIGHT) * number / most
    for curve in PANELS:
        y = _draw_panel(sheet, curve, runs, across, y)
    _draw_steps(sheet, most, across, y - GAP + 18)
    sheet.height = y + 16
    said = " ".join(_in_words(steps, name) for steps, name in zip(runs, called, strict=True))
    return Drawing(sheet.svg(title, said), title, said)


def _steps(log: Any) -> list[Step]:
    """The steps of a log; of those that were taken again after a restart, the last."""
    from minipar import metrics

    found = metrics.read(log) if isinstance(log, str | Path) else list(log)
    if not found or not all(isinstance(step, dict) and "step" in step for step in found):
        raise ValueError("this is no log: give the name of a file that --log has written, or what metrics.read returns")
    return list({step["step"]: step for step in found}.values())


def _name(log: Any) -> str:
    return Path(log).stem if isinstance(log, str | Path) else "run"


# In words.


def _title(runs: list[list[Step]], names: list[str]) -> str:
    ends = [next((step["loss"] for step in reversed(steps) if step.get("loss") is not None), None) for steps in runs]
    first = runs[0][0].get("loss")
    told = lambda loss: "nothing finite" if loss is None else units.plain(loss)
    if len(runs) == 2:
        three = zip(names, ends, runs, strict=True)
        each = [f"{name} {told(end)} after {len(steps)} steps" for name, end, steps in three]
        return f"Loss of {', of '.join(each)}"
    times = [(sum(bool(step.get(mark.key)) for step in runs[0]), mark.done) for mark in MARKS]
    more = "".join(f"; {units.count(number, 'step')} {done}" for number, done in times if number)
    return f"The loss goes from {told(first)} to {told(ends[0])} in {units.count(len(runs[0]), 'step')}{more}"


def _in_words(steps: list[Step], name: str) -> str:
    slow = _slowest(steps)
    said = f"{name}: {units.count(len(steps), 'step')}."
    for mark in MARKS:
        when = [str(step["step"]) for step in steps if step.get(mark.key)]
        said += f" {mark.done.capitalize()}: {units.several(when)}." if when else ""
    if slow is not None:
        seconds = units.time(slow["step_seconds"]["max"])
        said += f" Slowest: step {slow['step']}, {seconds}, in which rank {slow['busiest_rank']} was busy longest."
    return said


def _slowest(steps: list[Step]) -> Step | None:
    """The step that took longest, if it is far from the others."""
    timed = sorted((s for s in steps if s.get("step_seconds")), key=lambda step: step["step_seconds"]["max"])
    if not timed:
        return None
    usual = timed[len(timed) // 2]["step_seconds"]["max"]
    return timed[-1] if timed[-1]["step_seconds"]["max"] > 2 * usual else None


# On the sheet.


def _draw_legend(sheet: Sheet, y: float, names: list[str], runs: list[list[Step]]) -> float:
    x: float = LEFT
    for number, name in enumerate(names):
        sheet.line(x, y + 6, x + 26, y + 6, COLOURS[number], 2.4, "7 4" if number else "")
        sheet.text(x + 32, y + 10, name, 11, MUTED)
        x += 60 + 7 * len(name)
    for mark in MARKS:
        if any(step.get(mark.key) for steps in runs for step in steps):
            _draw_mark(sheet, mark, x + 6, y + 6)
            sheet.text(x + 16, y + 10, mark.meaning, 11, MUTED)
            x += 40 + 6.2 * len(mark.meaning)
    return y + 34


def _draw_panel(sheet: Sheet, curve: Curve, runs: list[list[Step]], across: Callable[[int], float], y: float) -> float:
    values = [value for steps in runs for step in steps if (value := _drawn(curve, step)) is not None]
    sheet.text(MARGIN, y - 8, curve.name + (f" in {curve.unit}" if curve.unit else ""), 12, INK, more=BOLD)
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    scale: Callable[[float], float] = log10 if curve.powers and low > 0 else float
    bottom, top = scale(low), scale(high)
    span = (top - bottom) or 1.0
    up = lambda value: y + TALL - (scale(value) - bottom) / span * TALL
    for level in (low, high):
        sheet.line(LEFT, up(level), WIDTH - RIGHT, up(level), GRID)
        sheet.text(LEFT - 8, up(level) + 4, units.plain(level), 11, MUTED, "end")
    for number, steps in enumerate(runs):
        points, pen = [], "M"
        for step in steps:
            value = _drawn(curve, step)
            if value is None:
                pen = "M"
                continue
            points.append(f"{pen}{across(step['step']):.1f} {up(value):.1f}")
            pen = "L"
        sheet.path("".join(points), COLOURS[number], 2, more=' stroke-dasharray="7 4"' if number else "")
        for step in steps:
            for mark in MARKS:
                if step.get(mark.key):
                    _draw_mark(sheet, mark, across(step["step"]), y + TALL + 9)
    return y + TALL + GAP


def _drawn(curve: Curve, step: Step) -> float | None:
    """The number of a step, if it is one: the norm of a skipped step is none."""
    value = curve.value(step)
    if value is None or not isfinite(value) or (step.get("skipped") and curve.name == "gradient norm"):
        return None
    return value


def _draw_steps(sheet: Sheet, most: int, across: Callable[[int], float], y: float) -> None:
    for share in range(5):
        number = round(share * most / 4)
        sheet.text(across(number), y + 12, str(number), 11, MUTED, "middle")
    sheet.text(across(most) / 2 + LEFT / 2, y + 28, "step", 11, MUTED, "middle")


def _draw_mark(sheet: Sheet, mark: Mark, x: float, y: float) -> None:
    sheet.path(mark.path, INK, 1.6, more=f' transform="translate({x:.1f} {y:.1f})"')
