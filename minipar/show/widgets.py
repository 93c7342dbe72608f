"""The explorer: move a slider, and see the bubble shrink.

Idea    One widget holds the picture, and only its value is replaced: nothing flickers, and no second figure is ever
        stacked below the first. A combination that cannot be is said in one line where the picture stands, which
        keeps its place. What was drawn once is kept, so that going back and forth costs nothing.
Cost    For 8 stages and 32 micro-batches some 30 ms from slider to picture: simulation and drawing, nothing else.
Read    `timelines.py` before, `minipar/schedule.py` for the schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import Any

from minipar import schedule as schedules
from minipar.show import reading
from minipar.show.timelines import picture
from minipar.simulate import simulate

WIDTH = 1040  # fixed, so that nothing jumps while a slider moves


@dataclass(frozen=True)
class Choice:
    """What the controls say. `ratio` is the time of a whole backward (both gradients) over that of a forward."""

    schedule: str = "1f1b"
    stages: int = 4
    micro_batches: int = 8
    chunks: int = 2
    ratio: float = 2.0
    send: float = 0.0


@lru_cache(maxsize=64)
def drawn(choice: Choice) -> str:
    """The picture of a choice, as SVG. Raises `ValueError` for one that cannot be."""
    chunks = choice.chunks if choice.schedule == "interleaved" else 1
    order = schedules.by_name(choice.schedule, choice.stages, choice.micro_batches, chunks)
    one, half = 1 / order.chunks, choice.ratio / 2 / order.chunks
    timeline = simulate(order, one, half, half, choice.send)
    return picture(timeline, reading.NAMES[choice.schedule], width=WIDTH).drawing().svg


def explorer(
    schedule: str = "1f1b",
    stages: int = 4,
    micro_batches: int = 8,
    chunks: int = 2,
    ratio: float = 2.0,
    send: float = 0.0,
    *,
    most_stages: int = 16,
    most_micro_batches: int = 64,
) -> Any:
    """A widget for notebooks: schedule, stages, micro-batches, chunks, backward / forward and send time.

    The arguments are where it begins. Raises `ImportError`, in one line, where ipywidgets is not installed.
    """
    widgets = library("explorer")
    begin = Choice(schedule, stages, micro_batches, chunks, ratio, send)
    controls = _controls(widgets, begin, most_stages, most_micro_batches)

    def answer(**values: Any) -> str:
        controls["chunks"].disabled = values["schedule"] != "interleaved"
        return drawn(Choice(**values))

    return live(widgets, controls, answer, WIDTH)


def _controls(widgets: Any, begin: Choice, most_stages: int, most_micro_batches: int) -> dict[str, Any]:
    """A control for each field of a choice."""
    look = {"style": {"description_width": "130px"}, "layout": widgets.Layout(width="336px")}
    names = [(reading.NAMES[name], name) for name in schedules.NAMES]
    whole = lambda value, most, text: widgets.IntSlider(value, 1, most, description=text, **look)
    part = lambda value, low, high, step, text: widgets.FloatSlider(
        value, min=low, max=high, step=step, description=text, **look
    )
    return {
        "schedule": widgets.Dropdown(options=names, value=begin.schedule, description="schedule", **look),
        "stages": whole(begin.stages, most_stages, "stages"),
        "micro_batches": whole(begin.micro_batches, most_micro_batches, "micro-batches"),
        "chunks": whole(begin.chunks, 4, "chunks"),
        "ratio": part(begin.ratio, 0.5, 4.0, 0.25, "backward : forward"),
        "send": part(begin.send, 0.0, 2.0, 0.05, "send time in s"),
    }


# What all widgets share.


def library(name: str) -> Any:
    """ipywidgets. Raises `ImportError`, in one line, where it is not installed."""
    try:
        import ipywidgets  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError(f"show.{name}() needs ipywidgets: pip install ipywidgets, then restart the kernel") from None
    return ipywidgets


def live(widgets: Any, controls: Mapping[str, Any], answer: Callable[..., str], width: float) -> Any:
    """Controls above one picture, which is what `answer` makes of their values, as HTML, whenever one of them moves.

    Where it raises `ValueError`, this is said over the last picture.
    """
    canvas = widgets.HTML(layout=widgets.Layout(width="100%", max_width=f"{width}px"))
    last = ""

    def redraw(change: Any = None) -> None:
        nonlocal last
        try:
            last = value = answer(**{name: control.value for name, control in controls.items()})
        except ValueError as error:
            value = _with_fault(last, " ".join(str(error).split()))
        if canvas.value != value:
            canvas.value = value

    for control in controls.values():
        control.observe(redraw, names="value")
    redraw()
    box = widgets.HBox(list(controls.values()), layout=widgets.Layout(flex_flow="row wrap", max_width="1080px"))
    note = '<p style="font:13px system-ui,sans-serif">In JupyterLab this picture has sliders.</p>'
    return with_page(widgets, [box, canvas], canvas.value + note)


def with_page(widgets: Any, children: Sequence[Any], html: str, **options: Any) -> Any:
    """The widgets below each other; where there is no kernel, `html` in their place."""

    class Live(widgets.VBox):  # type: ignore[misc]
        def _repr_mimebundle_(self, **more: Any) -> Any:
            data = super()._repr_mimebundle_(**more)
            return {**data, "text/html": html} if isinstance(data, dict) else data

    return Live(children, **options)


def _with_fault(before: str, fault: str) -> str:
    """The last picture, faint, with the reason why there is no new one."""
    faint = f'<div aria-hidden="true" style="opacity:.18">{before}</div>' if before else ""
    say = (
        '<div role="alert" style="position:absolute;top:0;left:0;right:0;padding:12px 16px;background:#fff;'
        'border-left:5px solid #8a3ffc;color:#1f2328;font:600 14px system-ui,sans-serif">'
        f"{escape(fault)}</div>"
    )
    return f'<div style="position:relative;min-height:60px">{faint}{say}</div>'
