"""Drawings and widgets over schedules, timelines, meshes, memory, plans and matrices.

    from minipar import show
    show.timeline(timeline, "1F1B")            one step: lanes, bubble, phases, memory
    show.compare([a, b], titles=["GPipe", "ZB-H1"])          several on one time axis
    show.overlay(measured, predicted)          what happened, over what was predicted
    show.animate(schedule, send=0.2)           plays, also in a page without a kernel
    show.explorer()                            sliders, in a notebook
    show.mesh(mesh, traffic)                   which rank is where, and what its links carry
    show.memory(rows)                          bars by rank and account
    show.plan_picture(plan)                    the best layouts: what a step takes, what a GPU holds
    show.roofline(job, cluster)                what computing, memory and links allow
    show.budget(), show.planner()              the accounts of a run, and its layouts, with sliders
    show.columns(W, x), show.rows(W, x), show.heads()        a product cut over ranks, with its numbers

    show.run("run.jsonl", "other.jsonl")       a log, or two: loss, norm, time
    show.collective("all_reduce")              who has what, before and after
    show.ring(history)                         a ring all-reduce, step by step
    show.messages(steps)                       messages under the work that hides them
    show.lines(x, series, ...), show.bars(...), show.table(rows, title)    numbers that cells have measured
    show.steps(drawings)                       one drawing at a time

Idea    All of them return a `Drawing`: it shows itself in a notebook, `save`s itself as .svg, .png or .html, and says
        in words what there is to see. Nothing here knows whether a timeline was predicted or measured.
Cost    No torch and no plotting library: pictures are written as text. A PNG needs resvg-py, a widget ipywidgets.
Read    `palette.py`, `svg.py` and `drawing.py` for the ground; then `timelines.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minipar.show.accounts import budget, planner
    from minipar.show.animation import animate
    from minipar.show.charts import bars, lines
    from minipar.show.collectives import collective, ring
    from minipar.show.cuts import columns, heads, rows
    from minipar.show.drawing import Drawing
    from minipar.show.memories import memory
    from minipar.show.meshes import mesh
    from minipar.show.overlays import overlay, report_picture
    from minipar.show.perfetto import trace_json
    from minipar.show.plans import plan_picture
    from minipar.show.rooflines import roofline
    from minipar.show.runs import run
    from minipar.show.sent import messages
    from minipar.show.stepper import steps
    from minipar.show.tables import table
    from minipar.show.terminal import text
    from minipar.show.timelines import compare, timeline
    from minipar.show.widgets import explorer

__all__ = [
    "Drawing",
    "animate",
    "bars",
    "budget",
    "collective",
    "columns",
    "compare",
    "explorer",
    "heads",
    "lines",
    "memory",
    "mesh",
    "messages",
    "overlay",
    "plan_picture",
    "planner",
    "report_picture",
    "ring",
    "roofline",
    "rows",
    "run",
    "steps",
    "table",
    "text",
    "timeline",
    "trace_json",
]

_HOMES = {
    "accounts": ("budget", "planner"),
    "animation": ("animate",),
    "charts": ("bars", "lines"),
    "collectives": ("collective", "ring"),
    "cuts": ("columns", "heads", "rows"),
    "drawing": ("Drawing",),
    "memories": ("memory",),
    "meshes": ("mesh",),
    "overlays": ("overlay", "report_picture"),
    "perfetto": ("trace_json",),
    "plans": ("plan_picture",),
    "rooflines": ("roofline",),
    "runs": ("run",),
    "sent": ("messages",),
    "stepper": ("steps",),
    "tables": ("table",),
    "terminal": ("text",),
    "timelines": ("compare", "timeline"),
    "widgets": ("explorer",),
}


def __getattr__(name: str) -> Any:
    """Names are imported when they are first asked for."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"minipar.show.{home}"), name)
    raise AttributeError(f"module 'minipar.show' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
