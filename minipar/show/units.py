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
    """ "1 stage", "4 stages"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def several(words: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
