"""Numbers as people read them: with a unit, and with no more digits than they carry.

Idea    All pictures and tables say the same number the same way, so that it is recognised: three significant digits, no
        exponent, the unit that makes it handy.
Read    `words.py`, which makes sentences of them.
"""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    """A unit of time, and how many of them are in a second."""

    name: str
    word: str
    per_second: float


UNITS = (Unit("s", "seconds", 1.0), Unit("ms", "milliseconds", 1e3), Unit("µs", "microseconds", 1e6))
DAY, YEAR = 86_400.0, 365.25 * 86_400.0  # seconds
LONGER = (
    Unit("years", "years", 1 / YEAR),
    Unit("days", "days", 1 / DAY),
    Unit("h", "hours", 1 / 3600),
    Unit("min", "minutes", 1 / 60),
)


def unit_for(seconds: float) -> Unit:
    """The unit in which a time of this length is a handy number: at least 1 of them."""
    return next((unit for unit in UNITS if seconds * unit.per_second >= 0.9995), UNITS[0])


def plain(value: float) -> str:
    """Three significant digits without an exponent, and no zeros behind the point: 33, 37.5, 0.125, 1,234."""
    if value == 0:
        return "0"
    digits = 2
    size = abs(value)
    while digits > 0 and size >= 10 ** (3 - digits):
        digits -= 1
    while digits < 6 and size < 10 ** (2 - digits):
        digits += 1
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def time(seconds: float, unit: Unit | None = None) -> str:
    """A time with its unit: "33 s", "1.25 ms"."""
    unit = unit or unit_for(abs(seconds))
    return f"{plain(seconds * unit.per_second)} {unit.name}"


def duration(seconds: float) -> str:
    """A time of any length: 1.2 ms, 52 s, 3.4 h, 12 days, 5.1 years."""
    return time(seconds, duration_unit(seconds))


def duration_unit(seconds: float) -> Unit:
    """The unit of `duration`: from two minutes, hours, days or years on, it counts in these."""
    return next((unit for unit in LONGER if seconds * unit.per_second >= 1.9995), unit_for(seconds))


def amount(number: float) -> str:
    """Parameters or tokens: 7B, 1.5T."""
    for name, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return plain(number / size) + name
    return plain(number)


def share(part: float) -> str:
    """A share in percent, to a tenth: "37.5 %"."""
    return f"{100 * part:.1f}".removesuffix(".0") + " %"


def size(count: float) -> str:
    """Bytes, with a unit: 1 kB is 1000 bytes."""
    for name in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{plain(count)} {name}"
        count /= 1000
    return f"{plain(count)} TB"


def count(number: int, noun: str) -> str:
    """ "1 stage", "4 stages", "4 batches"."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def several(words: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
