"""Simple charts of numbers that cells have measured: lines over an axis, and bars.

Idea    A chart states its message in its title, names its axes with their units, and tells its numbers in words too.
        Series differ in lightness, marker and dash.
Source  matplotlib draws them; what moves, and what has boxes by rank, is drawn by the other files here.
Read    `drawing.py` before.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from minipar.show import units
from minipar.show.drawing import Drawing
from minipar.show.palette import GRID, INK, MUTED, PAPER, RANKS

SERIES = ("#2b66a8", "#b8860b", "#6eab93", "#4d3a63")
MARKS, DASHES = ("o", "s", "^", "D"), ("-", "--", ":", "-.")


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    across: str,
    up: str,
    powers: str = "",
    level: Mapping[str, float] | None = None,
) -> Drawing:
    """Curves over `x`, by name. `across` and `up` name the axes, with units; `powers` is "x", "y" or "xy" for axes that
    count by powers; `level` draws named dotted lines. Raises `ValueError` for a curve that is not as long as `x`."""
    for name, values in series.items():
        if len(values) != len(x):
            raise ValueError(f"curve {name!r} has {len(values)} values for {len(x)} places: give as many")
    figure, axes = _axes(title, across, up)
    looks = zip(cycle(SERIES), cycle(MARKS), cycle(DASHES))
    for (name, values), (colour, mark, dash) in zip(series.items(), looks, strict=False):
        kept = [(a, b) for a, b in zip(x, values, strict=True) if b is not None]
        few = len(kept) <= 24
        axes.plot(*zip(*kept, strict=True), dash, color=colour, marker=mark if few else None, label=name, linewidth=2)
    for name, height in (level or {}).items():
        axes.axhline(height, color=MUTED, linestyle=(0, (1, 3)), linewidth=1.5)
        axes.annotate(name, (1, height), (-4, 4), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="right", color=MUTED, fontsize=9)  # fmt: skip
    if "x" in powers:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(x), [units.amount(value) if value >= 1e4 else units.plain(value) for value in x])
        axes.minorticks_off()
    elif all(float(value).is_integer() for value in x):
        axes.xaxis.get_major_locator().set_params(integer=True)
    if "y" in powers:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter("")
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    told = (f"{name}: " + ", ".join(_said(a, b) for a, b in zip(x, values, strict=True))
            for name, values in series.items())  # fmt: skip
    return _drawing(figure, title, f"{up} over {across}. {'; '.join(told)}.")


def bars(values: Mapping[str, float], *, title: str, along: str, level: Mapping[str, float] | None = None) -> Drawing:
    """A bar for each name; `along` names the axis, with its unit."""
    if not values:
        raise ValueError("there is nothing to draw: give at least one bar")
    figure, axes = _axes(title, along, "", tall=0.9 + 0.42 * len(values))
    names = list(values)[::-1]
    drawn = axes.barh(names, [values[name] for name in names], color=RANKS[1], height=0.62)
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}  # over the lines of levels
    axes.bar_label(drawn, [units.plain(values[name]) for name in names], padding=4, fontsize=9, color=INK, bbox=box)
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)
    for name, place in (level or {}).items():
        axes.axvline(place, color=INK, linestyle=(0, (1, 3)), linewidth=1.5)
        axes.annotate(name, (place, 1), (4, -10), xycoords=("data", "axes fraction"), textcoords="offset points",
                      fontsize=9, color=MUTED)  # fmt: skip
    told = ", ".join(f"{name} {units.plain(value)}" for name, value in values.items())
    return _drawing(figure, title, f"{along}: {told}.")


def _said(place: float, value: float | None) -> str:
    return f"{units.plain(place)}: {'none' if value is None else units.plain(value)}"


def _axes(title: str, across: str, up: str, tall: float = 3.2) -> tuple[Any, Any]:
    """A figure that belongs to no window, and its axes."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # the first time, it tells of its cache
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("charts need matplotlib: pip install matplotlib, then restart the kernel") from None
    figure = Figure(figsize=(7.6, tall + 0.5), layout="constrained")
    axes: Any = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, wrap=True)
    axes.set_xlabel(across, color=MUTED, fontsize=10)
    axes.set_ylabel(up, color=MUTED, fontsize=10)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure, axes


def _drawing(figure: Any, title: str, description: str) -> Drawing:
    """The figure as inline SVG, with its text as text and its words for those who do not see it."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": ["DejaVu Sans", "sans-serif"]}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL).strip()
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    words = description.replace("&", "&amp;").replace("<", "&lt;")
    svg = re.sub(r'(width|height)="([\d.]+)pt"', lambda size: f'{size[1]}="{float(size[2]) * 4 / 3:.0f}"', svg, count=2)
    head = f'<svg role="img" aria-label="{label}" style="max-width:100%;height:auto;display:block;background:#fff"'
    svg = svg.replace("<svg", head, 1).replace(">", f"><title>{label}</title><desc>{words}</desc>", 1)
    return Drawing(svg, title, description)
