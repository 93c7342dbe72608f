"""Two widgets over the accounts: a budget of a run, and a planner of its layout.

Idea    As the explorer does: controls above one picture, which is replaced and never stacked, and one line where
        something cannot be. The numbers are those of `minipar ledger` and `minipar plan`: nothing is computed here.
Cost    A budget takes a few milliseconds. A plan of some thousand layouts takes a tenth of a second, so the planner
        waits until a slider is let go; what was planned once is kept.
Read    `widgets.py` before; `plans.py` and `memories.py` for the pictures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import Any

from minipar import catalogue, compute, stability
from minipar.layout import Cluster, Job
from minipar.ledger import model_state_bytes
from minipar.planner import choose
from minipar.show import units
from minipar.show.memories import memory
from minipar.show.plans import WIDTH, plan_picture
from minipar.show.widgets import library, live

PER_NODE = 8
WAITING, SAVE, RESTART = 0.02, 60.0, 600.0  # for data, as a share of time; seconds of a checkpoint and of a restart
PARAMETERS = [digit * 10.0**power for power in range(8, 12) for digit in (1, 2, 3, 5, 7)] + [1e12]
TOKENS = [digit * 10.0**power for power in range(9, 14) for digit in (1, 2, 3, 5, 7)] + [1e14]


@dataclass(frozen=True)
class Budget:
    """What the controls of `budget` say."""

    parameters: float = 7e9
    tokens: float = 1e12
    gpu: str = "h100"
    gpus: int = 64
    mfu: float = 0.4
    zero: int = 0


@dataclass(frozen=True)
class Wish:
    """What the controls of `planner` say."""

    model: str = "llama2-70b"
    gpu: str = "h100"
    gpus: int = 64
    sequence: int = 4096
    global_batch: int = 1024


def budget(
    parameters: float = 7e9, tokens: float = 1e12, gpu: str = "h100", gpus: int = 64, mfu: float = 0.4, zero: int = 0
) -> Any:
    """A widget for notebooks: does a model of so many parameters fit, all GPUs being replicas, and how long does it
    train? Model states under the four stages of ZeRO beside a GPU's memory; FLOPs, the ideal and the honest time.

    The arguments are where it begins. Raises `ImportError`, in one line, where ipywidgets is not installed, and
    `ValueError` for an unknown GPU.
    """
    widgets = library("budget")
    look = _look(widgets)
    controls = {
        "parameters": _among(widgets, "parameters", PARAMETERS, parameters),
        "tokens": _among(widgets, "tokens", TOKENS, tokens),
        "gpu": _named(widgets, "GPU", catalogue.GPUS, catalogue.gpu(gpu).name),
        "gpus": _among(widgets, "GPUs", [2**n for n in range(17)], gpus),
        "mfu": widgets.FloatSlider(mfu, min=0.05, max=0.8, step=0.01, readout_format=".0%", description="MFU", **look),
        "zero": widgets.Dropdown(options=[0, 1, 2, 3], value=zero, description="ZeRO stage", **look),
    }
    return live(widgets, controls, lambda **values: budget_html(Budget(**values)), 1000)


def planner(
    model: str = "llama2-70b", gpu: str = "h100", gpus: int = 64, sequence: int = 4096, global_batch: int = 1024
) -> Any:
    """A widget for notebooks: the fastest layouts of a model of the catalogue on so many GPUs, 8 in a node, and what
    their steps and their memory consist of.

    The arguments are where it begins. Raises as `budget` does.
    """
    widgets = library("planner")
    controls = {
        "model": _named(widgets, "model", catalogue.MODELS, catalogue.model(model).name),
        "gpu": _named(widgets, "GPU", catalogue.GPUS, catalogue.gpu(gpu).name),
        "gpus": _among(widgets, "GPUs", [2**n for n in range(11)], gpus, at_once=False),
        "sequence": _among(widgets, "sequence", [2**n for n in range(9, 18)], sequence, at_once=False),
        "global_batch": _among(widgets, "global batch", [2**n for n in range(3, 14)], global_batch, at_once=False),
    }
    return live(widgets, controls, lambda **values: plan_svg(Wish(**values)), WIDTH)


# What is shown.


@lru_cache(maxsize=64)
def budget_html(choice: Budget) -> str:
    """Memory bars, and three lines below them."""
    gpu, gpus = catalogue.gpu(choice.gpu), choice.gpus
    states = {zero: model_state_bytes(choice.parameters, gpus, zero=zero) for zero in range(4)}
    held, limit = states[choice.zero].total, gpu.memory_bytes
    where = f"each of {gpus:,} GPUs" if gpus > 1 else "the one GPU"
    fits = f"within its {units.size(limit)}" if held <= limit else f"more than its {units.size(limit)}"
    title = f"ZeRO {choice.zero}: {units.size(held)} of model state on {where}, {fits}"
    names = {zero: f"ZeRO {zero}" + (" (chosen)" if zero == choice.zero else "") for zero in states}
    bars = memory({names[zero]: state for zero, state in states.items()}, limit_bytes=limit, title=title)
    style = "margin:2px 16px;font:14px system-ui,sans-serif;color:#1f2328"
    lines = "".join(f'<p style="{style}">{escape(line)}</p>' for line in budget_lines(choice))
    return f"{bars.svg}<div>{lines}</div>"


def budget_lines(choice: Budget) -> list[str]:
    """FLOPs, the textbook's time, the honest one."""
    gpu, gpus = catalogue.gpu(choice.gpu), choice.gpus
    flops, peak = compute.training_flops(choice.parameters, choice.tokens), gpus * gpu.peak_flops
    kept = goodput(gpus)
    ideal = compute.run_seconds(flops, peak)
    honest = compute.run_seconds(flops, peak, mfu=choice.mfu, waiting=WAITING, goodput=kept)
    hours = compute.gpu_hours(honest, gpus)
    return [
        f"FLOPs: 6 x {units.amount(choice.parameters)} x {units.amount(choice.tokens)} tokens = {flops:.3g}",
        f"Ideal time: {units.duration(ideal)}, all of {peak:.3g} FLOP/s, all the time",
        f"Honest time: {units.duration(honest)}, {units.amount(hours)} GPU hours: MFU {units.share(choice.mfu)}, "
        f"{units.share(WAITING)} waiting for data, {units.share(kept)} of the steps count in spite of failures",
    ]


def goodput(gpus: int) -> float:
    """The share of time that counts, with the best interval between checkpoints, if GPUs fail as Llama 3's did."""
    apart = stability.failure_seconds(gpus)
    interval = stability.checkpoint_interval(save_seconds=SAVE, failure_seconds=apart)
    return stability.exact_goodput(interval=interval, save_seconds=SAVE, failure_seconds=apart, restart_seconds=RESTART)


@lru_cache(maxsize=64)
def plan_svg(wish: Wish) -> str:
    """The picture of a plan. Raises `ValueError`, one line, for what cannot be."""
    gpu, model = catalogue.gpu(wish.gpu), catalogue.model(wish.model)
    if wish.gpus > PER_NODE and wish.gpus % PER_NODE:
        raise ValueError(f"{wish.gpus:,} GPUs are no whole nodes of {PER_NODE}: choose a multiple of {PER_NODE}")
    links = catalogue.link(gpu.inside), catalogue.link(gpu.outside)
    cluster = Cluster(gpu, wish.gpus, min(PER_NODE, wish.gpus), *links)
    return plan_picture(choose(Job(model, wish.sequence, wish.global_batch), cluster)).svg


# Controls.


def _look(widgets: Any) -> dict[str, Any]:
    return {"style": {"description_width": "110px"}, "layout": widgets.Layout(width="336px")}


def _among(widgets: Any, text: str, steps: Iterable[float], begin: float, at_once: bool = True) -> Any:
    """A slider over these numbers, among which is the one where it begins."""
    compute.positive(**{text: begin})
    options = [(units.amount(step) if step >= 1e6 else f"{step:,}", step) for step in sorted({*steps, begin})]
    return widgets.SelectionSlider(
        options=options, value=begin, description=text, continuous_update=at_once, **_look(widgets)
    )


def _named(widgets: Any, text: str, names: Iterable[str], begin: str) -> Any:
    return widgets.Dropdown(options=list(names), value=begin, description=text, **_look(widgets))
