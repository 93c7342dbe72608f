"""A plan as a picture: what the best layouts spend a step on, and what they hold.

Idea    Two sums for each layout, side by side: its waits, which say why it is slower than the best, and its bytes,
        which say why it must be as it is. A dashed line is what a GPU has: no bar crosses it, or the layout would not
        be here, and the room that is left is what another cut could have used.
Read    `minipar/planner.py`, which ranks them; `memories.py` for the memory of any ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import floor, log10

from minipar.layout import Estimate, Layout
from minipar.planner import Plan
from minipar.show import units
from minipar.show.drawing import Drawing
from minipar.show.palette import ACCOUNTS, GRID, HATCH, IDLE, INK, MUTED, ink_on
from minipar.show.svg import BOLD, Sheet, hatching, text_width
from minipar.show.timelines import MARGIN, draw_title

WIDTH, ROW, TALL = 1100, 46, 24
LEFT, MIDDLE, RIGHT = 236, 626, 1020  # where the bars of seconds begin, those of bytes, and where these may end
BEHIND = 72  # room for a total
GB = units.Unit("GB", "gigabytes", 1e-9)

# Lightness of seconds differs by 12 at least between any two: an account of 0 makes neighbours of those beside it. The
# optimizer has one colour in both panels; computing, which nobody wants to be rid of, is grey; a bubble is hatched as
# idle time is everywhere.
SECONDS = {
    "computing": "#4a5058",
    "tensor parallel": "#5babcb",
    "bubble": IDLE,
    "pipeline borders": "#132e29",
    "data parallel": "#aa5c24",
    "optimizer": ACCOUNTS["optimizer"],
}
BYTES = {
    "weights": ACCOUNTS["parameters"],
    "gradients": ACCOUNTS["gradients"],
    "optimizer": ACCOUNTS["optimizer"],
    "activations": ACCOUNTS["activations"],
    "buffers": "#dccbe4",
}
HATCHED = {"bubble": HATCH, "gradients": "#ffffff"}


@dataclass(frozen=True)
class Panel:
    """One of the two sums: its colours, where it lies, how a value is said, and what the axis counts."""

    colours: Mapping[str, str]
    left: float
    right: float
    most: float
    said: Callable[[float], str]
    unit: units.Unit  # in which the marks of the axis are round
    axis: str

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * value / self.most

    def marks(self) -> list[float]:
        """Round numbers, at most seven."""
        most = self.most * self.unit.per_second
        power = 10.0 ** floor(log10(most / 5))
        step = next(s * power for s in (1, 2, 5, 10) if most / (s * power) <= 6)
        return [step * i / self.unit.per_second for i in range(int(most / step + 1e-9) + 1)]


def plan_picture(plan: Plan, top: int = 5) -> Drawing:
    """The `top` layouts of a plan: seconds of a step and bytes of the fullest GPU, by account.

    Raises `ValueError`, one line, if nothing fits, or for a `top` below 1.

        show.plan_picture(choose(job, cluster)).save("plan.svg")
    """
    if top < 1:
        raise ValueError(f"top={top} is no number of layouts: choose at least 1")
    best, limit = plan.best, plan.cluster.gpu.memory_bytes
    shown = plan.ranked[:top]
    title, words = headline(plan), f"{in_words(shown)} A GPU has {units.size(limit)}."
    sheet = Sheet(WIDTH)
    y = draw_title(sheet, title)
    longest = max(found.step_seconds for found in shown)
    unit = units.duration_unit(longest)
    axis = f"time of a step in {unit.word}"
    seconds = Panel(SECONDS, LEFT, MIDDLE - BEHIND - 24, longest, units.duration, unit, axis)
    most = max(limit, *(found.bytes for found in shown))
    size = Panel(BYTES, MIDDLE, RIGHT, most, units.size, GB, "bytes of the fullest GPU")
    y = max(
        _draw_heading(sheet, seconds, "Time of a step", y, {n for found in shown for n in _some(found.seconds)}),
        _draw_heading(sheet, size, "Memory of the fullest GPU", y, {n for found in shown for n in _some(found.memory)}),
    )
    top_y, bottom = y + 22, y + 22 + ROW * len(shown)
    for panel in (seconds, size):
        _draw_axis(sheet, panel, top_y, bottom)
    for number, found in enumerate(shown):
        _draw_row(sheet, found, found is best, seconds, size, top_y + ROW * number + (ROW - TALL) / 2)
    _draw_limit(sheet, size, limit, top_y, bottom)
    sheet.height = bottom + 44
    return Drawing(sheet.svg(title, words), title, words)


# In words.


def degrees(layout: Layout, every: bool = True) -> str:
    """ "dp 32 x tp 2 x pp 1, ZeRO 3"; without `every`, degrees of 1 are left out."""
    parts = [(name, getattr(layout, name)) for name in ("dp", "tp", "pp")]
    kept = [f"{name} {n}" for name, n in parts if every or n > 1]
    return f"{' x '.join(kept)}, ZeRO {layout.zero}" if kept else "One GPU"


def details(layout: Layout) -> str:
    """What else was chosen: "micro-batch 1, interleaved of 5 chunks"."""
    parts = [f"micro-batch {layout.micro_batch}"]
    if layout.pp > 1:
        parts.append(layout.schedule + (f" of {layout.chunks} chunks" if layout.chunks > 1 else ""))
    if layout.recompute != "none":
        parts.append(f"recompute {layout.recompute}")
    return ", ".join(parts)


def headline(plan: Plan) -> str:
    """The message: who wins, and by how much."""
    best, rest = plan.best, plan.ranked[1:]
    took = units.duration(best.step_seconds)
    said = f"{degrees(best.layout, every=False)} takes {took} a step"
    if not rest:
        return f"{said}: the only degrees that fit"
    following = units.duration(rest[0].step_seconds)
    more = units.size(rest[0].bytes - best.bytes)
    return f"{said}; the next {f'as long, and holds {more} more' if following == took else following}"


def in_words(shown: tuple[Estimate, ...]) -> str:
    """Every row as a sentence."""
    said = []
    for found in shown:
        waits = [f"{account} {units.duration(value)}" for account, value in _some(found.seconds).items()]
        held = [f"{account} {units.size(value)}" for account, value in _some(found.memory).items()]
        said.append(
            f"{degrees(found.layout)}, {details(found.layout)}: {units.duration(found.step_seconds)} a step "
            f"({', '.join(waits)}); {units.size(found.bytes)} ({', '.join(held)})."
        )
    return " ".join(said)


def _some(sums: Mapping[str, float]) -> dict[str, float]:
    """The accounts that are not 0."""
    return {account: value for account, value in sums.items() if value > 0}


# On the sheet.


def _draw_heading(sheet: Sheet, panel: Panel, name: str, y: float, shown: set[str]) -> float:
    """Name and legend of a panel; returns where the next thing may begin."""
    sheet.text(panel.left, y + 12, name, 13, INK, more=BOLD)
    x, y, end = panel.left, y + 24, (MIDDLE - 16 if panel.left < MIDDLE else WIDTH - MARGIN)
    for account in (account for account in panel.colours if account in shown):
        width = 26 + text_width(account, 11)
        if x + width > end:
            x, y = panel.left, y + 20
        _draw_piece(sheet, panel.colours[account], account, x, y, 20, 12)
        sheet.text(x + 26, y + 10, account, 11, MUTED)
        x += width + 16
    return y + 20


def _draw_piece(
    sheet: Sheet, colour: str, account: str, x: float, y: float, width: float, height: float, tip: str = ""
) -> None:
    """One account of a bar."""
    sheet.rect(x, y, width, height, colour, tip=tip)
    if account in HATCHED:
        faint = ' stroke-opacity="0.55"' if account == "gradients" else ""
        sheet.path(hatching(x, y, width, height, 7), HATCHED[account], 1, more=faint)
    if colour == IDLE:
        sheet.rect(x + 0.5, y + 0.5, max(width - 1, 0), height - 1, "none", f' stroke="{HATCH}"')


def _draw_row(sheet: Sheet, found: Estimate, best: bool, seconds: Panel, size: Panel, y: float) -> None:
    """A layout: its name, its two bars, their totals."""
    who = degrees(found.layout)
    sheet.text(MARGIN, y + 10, who, 12, INK, more=BOLD if best else "")
    sheet.text(MARGIN, y + 25, details(found.layout), 10, MUTED)
    end = _draw_bar(sheet, seconds, found.seconds, who, y)
    sheet.text(end + 8, y + TALL / 2 + 4, seconds.said(found.step_seconds), 12, INK, more=BOLD)
    _draw_bar(sheet, size, found.memory, who, y)
    # Behind the panel and not behind the bar, whose end is where the dashed line is.
    sheet.text(size.right + 8, y + TALL / 2 + 4, size.said(found.bytes), 12, INK, more=BOLD)


def _draw_bar(sheet: Sheet, panel: Panel, sums: Mapping[str, float], who: str, y: float) -> float:
    """The accounts in a row, with their values where there is room; returns where the bar ends."""
    before = 0.0
    for account, value in _some(sums).items():
        x, width = panel.x(before), panel.x(value) - panel.left
        colour, said = panel.colours[account], panel.said(value)
        gap = 1 if width > 2 else 0
        _draw_piece(sheet, colour, account, x, y, width - gap, TALL, f"{who}: {account} {said}")
        wide = text_width(said, 11)
        if wide + 8 < width:
            if account in HATCHED:
                sheet.rect(x + width / 2 - wide / 2 - 2, y + 5, wide + 4, TALL - 10, colour)
            sheet.text(x + width / 2, y + TALL / 2 + 4, said, 11, ink_on(colour), "middle")
        before += value
    return panel.x(before)


def _draw_axis(sheet: Sheet, panel: Panel, top: float, bottom: float) -> None:
    """Marks at round numbers."""
    for mark in panel.marks():
        x = panel.x(mark)
        sheet.line(x, top, x, bottom, GRID)
        sheet.line(x, bottom, x, bottom + 4, INK)
        sheet.text(x, bottom + 16, units.time(mark, panel.unit), 11, MUTED, "middle")
    sheet.line(panel.left, bottom, panel.right, bottom, INK)
    sheet.text((panel.left + panel.right) / 2, bottom + 32, panel.axis, 11, MUTED, "middle")


def _draw_limit(sheet: Sheet, panel: Panel, limit: float, top: float, bottom: float) -> None:
    """What a GPU has."""
    x = panel.x(limit)
    sheet.line(x, top - 4, x, bottom, INK, 1.8, "6 3")
    sheet.text(x, top - 8, f"a GPU has {units.size(limit)}", 11, INK, "end")
