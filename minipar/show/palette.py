"""The colours of all drawings, and how far apart they are for every eye.

Idea    A colour never says anything alone. Forward, backward and weight gradient differ in lightness first (light,
        dark, between), so that they survive a grey printer and every kind of colour blindness; then in hue (amber,
        blue, green: no red anywhere); then in a pattern (weight gradients are striped, idle time is hatched).
Source  Lightness and contrast: WCAG 2.2, 'relative luminance' and 'contrast ratio'; CIE 1976 L* from luminance.
Read    `svg.py` next.
"""

from __future__ import annotations

from functools import lru_cache

from minipar.facts import Kind

INK = "#1f2328"  # text and axes
MUTED = "#57606a"  # text that is not read first
GRID = "#e1e4e8"
PAPER = "#ffffff"
IDLE = "#f7f7f4"
HATCH = "#bcbcb2"
CURVE = "#8895a5"
ACCENT = "#8a3ffc"  # the playhead and the dots of an animation: nothing else is violet

FILL = {Kind.FORWARD: "#f3c160", Kind.BACKWARD: "#2b66a8", Kind.WEIGHT: "#6eab93"}
WORDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "weight gradient"}

# The accounts of memory, and the ranks of a tensor cut: again from dark to light, so that neighbours differ.
ACCOUNTS = {"parameters": "#2b66a8", "gradients": "#6eab93", "optimizer": "#f3c160", "activations": "#4d3a63"}
RANKS = ("#f3c160", "#2b66a8", "#9fcfe8", "#4d3a63", "#dfe3e6", "#6eab93", "#c9a7d8", "#8a5a1c")


def channels(colour: str) -> tuple[float, float, float]:
    """Red, green and blue of "#rrggbb", each from 0 to 1."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def luminance(colour: str) -> float:
    """Relative luminance: 0 for black, 1 for white. What is left of a colour on a grey printer."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def lightness(colour: str) -> float:
    """L*, in which equal steps look equal: 0 for black, 100 for white."""
    y = luminance(colour)
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def contrast(one: str, other: str) -> float:
    """The contrast ratio, from 1 to 21. Text needs 4.5, graphics 3."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@lru_cache(maxsize=256)
def ink_on(fill: str) -> str:
    """Dark or white: whichever is read better on `fill`."""
    return max((INK, PAPER), key=lambda ink: contrast(ink, fill))


@lru_cache(maxsize=256)
def mix(colour: str, other: str, share: float) -> str:
    """`colour` with a share of `other` in it."""
    parts = zip(channels(colour), channels(other), strict=True)
    return "#" + "".join(f"{round(255 * (a + (b - a) * share)):02x}" for a, b in parts)


def fill(kind: Kind, chunk: int = 0, chunks: int = 1) -> str:
    """The colour of a box. Later chunks of a rank are a little darker, and never as dark as the next kind."""
    return mix(FILL[kind], "#000000", 0.1 * chunk / (chunks - 1)) if chunk else FILL[kind]
