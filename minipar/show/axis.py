"""The time axis: seconds to pixels, and ticks at round numbers.

Idea    One scale maps seconds to pixels for everything on a sheet, so lanes, curves and several timelines line up. The
        unit is the one in which the whole step is a handy number.
Read    `lanes.py` and `curve.py`, which draw along it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log10

from minipar.show import units
from minipar.show.palette import GRID, INK, MUTED
from minipar.show.svg import Sheet


@dataclass(frozen=True)
class TimeScale:
    """`seconds` of time, drawn from x = `left` to x = `right`."""

    left: float
    right: float
    seconds: float

    def x(self, second: float) -> float:
        return self.left + (self.right - self.left) * second / self.seconds

    @property
    def unit(self) -> units.Unit:
        return units.unit_for(self.seconds)

    def ticks(self) -> list[tuple[float, str]]:
        """(second, label) of the ticks: at 1, 2 or 5 times a power of ten, at most a dozen."""
        span = self.seconds * self.unit.per_second
        power = 10.0 ** floor(log10(span / 10))
        step = next(s * power for s in (1, 2, 5, 10) if span / (s * power) <= 12)
        marks = [step * i for i in range(int(span / step + 1e-9) + 1)]
        return [(mark / self.unit.per_second, units.plain(round(mark / step) * step)) for mark in marks]


def draw_grid(sheet: Sheet, scale: TimeScale, top: float, bottom: float) -> None:
    """Faint lines behind the data, at the ticks."""
    for second, _ in scale.ticks():
        sheet.line(scale.x(second), top, scale.x(second), bottom, GRID)


def draw_axis(sheet: Sheet, scale: TimeScale, y: float) -> float:
    """The axis at y with its ticks, labels and unit; returns where the next thing may begin."""
    sheet.line(scale.left, y, scale.right, y, INK)
    for second, label in scale.ticks():
        sheet.line(scale.x(second), y, scale.x(second), y + 4, INK)
        sheet.text(scale.x(second), y + 16, label, 11, MUTED, "middle")
    sheet.text((scale.left + scale.right) / 2, y + 32, f"time in {scale.unit.word}", 11, MUTED, "middle")
    return y + 40
