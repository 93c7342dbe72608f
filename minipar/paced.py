"""Stages that sleep: a pipeline schedule on real ranks, in which an action takes exactly as long as it should.

Idea    Ranks that compute share the cores of a laptop, and then a measured bubble says more about the laptop than
        about the schedule. Ranks that sleep share nothing. So here the executor, the messages and the clocks are
        those of training, and only the computing is a sleep: what is measured is the schedule itself.

            simulate(schedule, forward=0.01, ...)      what will happen
            paced.measure(schedule, forward=0.01, ...) what does happen, on a rank for each row of the schedule

Cost    The time of three steps. A sleep ends some 0.1 ms late, so actions of less than a few ms are not well kept.
Read    `pp.py` before: the executor that runs this; `simulate.py` for the prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter, sleep
from typing import Any, cast

import torch
from torch import Tensor, nn

from minipar import launch, trace
from minipar.costs import Cost, seconds_of
from minipar.facts import Action, Kind, Span, Timeline
from minipar.mesh import Mesh, plan
from minipar.model import GPT, Draw
from minipar.order import Schedule
from minipar.pp import MicroBatch, Pipeline
from minipar.tp import Postpone

LATE = 2e-4  # seconds: by about so much a sleep ends late
STEPS = 3  # of which the one of median length is told


class Stage(nn.Module):
    """A pipeline stage that sleeps for `seconds(action)`; it has one weight, whose gradient may be postponed."""

    def __init__(self, number: int, schedule: Schedule, seconds: Callable[[Action], float]) -> None:
        super().__init__()
        self.number, self.seconds, self.draw = number, seconds, Draw()
        self.head = "the loss" if number == schedule.stages - 1 else None
        self.splits = number in schedule.splits_backward
        self.postpone: Postpone | None = None
        self.weight = nn.Parameter(torch.zeros(1, 1, 1))
        self.weight.take_gradient = lambda write: write(self.weight, True)  # type: ignore[attr-defined]

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        y: Tensor = _Sleep.apply(x if x.is_floating_point() else self.weight, self)
        return y if targets is None else y.sum()


class _Sleep(torch.autograd.Function):
    """The identity, after a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: Stage) -> Tensor:
        (micro_batch,) = stage.draw.samples
        ctx.stage, ctx.micro_batch, ctx.postpone = stage, micro_batch, stage.postpone
        _sleep(stage.seconds(Action(Kind.FORWARD, stage.number, micro_batch)))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        stage, micro_batch = ctx.stage, ctx.micro_batch
        _sleep(stage.seconds(Action(Kind.BACKWARD, stage.number, micro_batch)))
        if stage.splits:
            weight = Action(Kind.WEIGHT, stage.number, micro_batch)
            ctx.postpone(stage.weight, lambda place, fresh: _sleep(stage.seconds(weight)))
        return grad, None


def _sleep(seconds: float) -> None:
    end = perf_counter() + seconds
    while (left := end - perf_counter()) > 0:
        sleep(max(0.0, left - LATE))  # and the rest awake


def measure(
    schedule: Schedule, forward: Cost = 0.01, backward: Cost = 0.01, weight: Cost = 0.01, *, steps: int = STEPS
) -> Timeline:
    """One step of the schedule on real ranks, in seconds from its start: of several `steps` the median one.

    Costs are as `simulate` takes them, in seconds for one micro-batch on one stage. Raises `ValueError` for costs that
    don't fit the schedule, `ScheduleError` for a schedule that cannot run, `RankError` if a rank fails.
    """
    schedule.validate()
    seconds_of(schedule, forward, backward, weight)
    with launch.World(plan(pp=schedule.ranks), backend="gloo", timeout=None) as world:
        by_rank = world.run(_steps, schedule, (forward, backward, weight), steps)
    timelines = [trace.timeline(rows) for rows in zip(*by_rank, strict=True)]
    median = sorted(timelines, key=lambda step: step.duration)[len(timelines) // 2]
    start = min((span.start for span in median.spans), default=0.0)
    spans = (replace(span, start=span.start - start, end=span.end - start) for span in median.spans)
    return Timeline(tuple(spans), median.ranks)


def _steps(mesh: Mesh, schedule: Schedule, costs: tuple[Cost, Cost, Cost], steps: int) -> list[list[Span]]:
    """On a rank: its spans of each step, on the first rank's clock."""
    seconds, group = seconds_of(schedule, *costs), mesh.pp
    mine = range(group.rank, schedule.stages, schedule.ranks)
    stages = {number: cast(GPT, Stage(number, schedule, seconds)) for number in mine}
    pipeline = Pipeline(stages, schedule, group, dtype=torch.float32, device="cpu")
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    micro_batches = [MicroBatch(nothing, nothing, [number]) for number in range(schedule.micro_batches)]
    offset = trace.clock_offset(mesh.world)
    answer = []
    for _ in range(steps):
        mesh.world.barrier()
        pipeline.spans.clear()
        pipeline.run(micro_batches, (1, 1, 1))
        answer.append([replace(span, start=span.start + offset, end=span.end + offset) for span in pipeline.spans])
    return answer
