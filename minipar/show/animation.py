"""A timeline that plays: step by step what each rank does, and the messages that travel between them.

Idea    The picture of `timelines.py`, under a veil that a playhead pulls away. Time runs to the right and the playhead
        moves with it, so a message on its way is a dot on the playhead that moves from one lane to the next.
Cost    The picture, and 4 kB of JavaScript.
Read    `player.py` for what runs in the browser.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape

from minipar.facts import Timeline
from minipar.order import Schedule, goes_to
from minipar.show import reading, units
from minipar.show.drawing import Drawing, page
from minipar.show.palette import ACCENT, PAPER
from minipar.show.player import SCRIPT, STYLE
from minipar.show.timelines import Picture, picture
from minipar.simulate import simulate

LASTS = 12.0  # seconds that a step plays
JUMPS = 60  # at most so many presses of an arrow key from one end to the other


@dataclass(frozen=True, repr=False)
class Animation(Drawing):
    """A drawing that also plays: `html` has its controls; `svg` is the still picture."""

    html: str

    def _repr_html_(self) -> str:
        return self.html

    def to_html(self) -> bytes:
        """A page that plays."""
        return page(self.title, self.html).encode()


def animate(
    work: Timeline | Schedule,
    name: str = "",
    *,
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    send: float = 0.0,
    title: str = "",
    memory: bool = True,
    autoplay: bool = True,
) -> Animation:
    """A step that plays, pauses and can be pulled to any moment: with its buttons, the space bar and the arrow keys.

    `work` is a schedule, which is simulated with these costs in seconds (of all layers of a rank), or a timeline. A
    message takes `send` seconds, and is then seen as a dot between the lanes. It starts to play when it is first seen,
    unless `autoplay` is off or the reader's system asks for less motion.
    """
    if isinstance(work, Schedule):
        v = work.chunks
        shown = simulate(work, forward / v, backward / v, weight / v, send)
    else:
        shown = reading.timeline_of(work)
    drawn = picture(shown, reading.name_of(work, name), title, memory)
    still = drawn.drawing()
    return Animation(still.svg, still.title, still.description, _html(drawn, shown, send, autoplay))


def _html(drawn: Picture, shown: Timeline, send: float, autoplay: bool) -> str:
    """The picture with what moves over it, and the controls."""
    _draw_moving_parts(drawn, shown)
    data = escape(json.dumps(_data(drawn, shown, send, autoplay), separators=(",", ":")), quote=True)
    label = escape(f"Animation: {drawn.title}", quote=True)
    step = _jump(shown)
    return (
        f'<div class="minipar-player" role="group" aria-label="{label}" data-lm-suppress-shortcuts="true" '
        f'style="max-width:{drawn.sheet.width:g}px" '
        f'data-step="{data}"><style>{STYLE}</style>{drawn.sheet.svg(drawn.title, drawn.description)}'
        '<div class="controls" hidden><button type="button">Play</button>'
        f'<input type="range" min="0" max="{shown.duration:g}" step="{step / 100:g}" value="{shown.duration:g}" '
        'aria-label="Moment of the step"><output aria-live="off"></output>'
        '<label>speed <select><option value="0.25">1/4</option><option value="0.5">1/2</option>'
        '<option value="1" selected>1</option><option value="2">2</option><option value="4">4</option></select></label>'
        f'</div><p class="now"></p><script>{SCRIPT}</script></div>'
    )


def _draw_moving_parts(drawn: Picture, shown: Timeline) -> None:
    """The veil, the outlines, the playhead and a place for the dots: as they are when the step is done."""
    top, height = drawn.lanes[0].y - 4, drawn.bottom - drawn.lanes[0].y + 4
    right = drawn.scale.right
    drawn.sheet.write(
        f'<rect class="veil" x="{right:g}" y="{top:g}" width="0" height="{height:g}" fill="{PAPER}" '
        'fill-opacity="0.86"/>'
    )
    for lane in drawn.lanes:
        drawn.sheet.write(
            f'<rect class="current" style="display:none" x="0" y="{lane.y - 1:g}" width="0" '
            f'height="{lane.height + 2:g}" fill="none" stroke="{ACCENT}" stroke-width="2.5"/>'
        )
    drawn.sheet.write(
        f'<line class="playhead" x1="{right:g}" x2="{right:g}" y1="{top:g}" y2="{top + height:g}" stroke="{ACCENT}" '
        'stroke-width="2"/><g class="dots"></g>'
    )


def _jump(shown: Timeline) -> float:
    """How far an arrow key moves: an action, or more when there are many."""
    return max(min(span.seconds for span in shown.spans), shown.duration / JUMPS)


def _data(drawn: Picture, shown: Timeline, send: float, autoplay: bool) -> dict[str, object]:
    """What the player needs to know."""
    unit = units.unit_for(shown.duration)
    place = 9  # digits: enough for nanoseconds
    rows = [
        [(round(s.start, place), round(s.end, place), f"{s.action}") for s in shown.by_rank(rank)]
        for rank in range(shown.ranks)
    ]
    return {
        "seconds": shown.duration,
        "unit": unit.name,
        "per_second": unit.per_second,
        "lasts": LASTS,
        "jump": _jump(shown),
        "left": drawn.scale.left,
        "right": drawn.scale.right,
        "rows": rows,
        "messages": messages(drawn, shown, send),
        "autoplay": autoplay,
    }


def messages(drawn: Picture, shown: Timeline, send: float) -> list[tuple[float, float, float, float]]:
    """(sent at, arrives at, from y, to y) of each result that goes to another rank; none if they take no time."""
    if send <= 0:
        return []
    stages, ranks = reading.stages(shown), shown.ranks
    middle = [lane.y + lane.height / 2 for lane in drawn.lanes]
    found = []
    for span in shown.spans:
        to = goes_to(span.action, stages) % ranks
        if to != span.rank:
            found.append((span.end, span.end + send, middle[span.rank], middle[to]))
    return found
