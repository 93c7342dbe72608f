"""What an action of a schedule costs, in seconds: said once, for the simulator and for stages that sleep.

Idea    F, B and W have a cost each: a number, a number for each stage, or a function of (stage, micro_batch). Where a
        schedule has no W, its B does both, so that every schedule does the same work.
Read    `simulate.py` and `paced.py`, which use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from typing_extensions import assert_never

from minipar.facts import Action, Kind
from minipar.order import Schedule

Cost = float | Sequence[float] | Callable[[int, int], float]


def seconds_of(schedule: Schedule, forward: Cost, backward: Cost, weight: Cost) -> Callable[[Action], float]:
    """How long an action takes. Raises `ValueError` for costs that are negative, or not one for each stage."""
    f, b, w = (
        _per_stage(name, cost, schedule.stages)
        for name, cost in (("forward", forward), ("backward", backward), ("weight", weight))
    )

    def seconds(action: Action) -> float:
        stage, micro_batch = action.stage, action.micro_batch
        match action.kind:
            case Kind.FORWARD:
                return f(stage, micro_batch)
            case Kind.BACKWARD:
                both = stage not in schedule.splits_backward
                return b(stage, micro_batch) + (w(stage, micro_batch) if both else 0.0)
            case Kind.WEIGHT:
                return w(stage, micro_batch)
            case _:
                assert_never(action.kind)

    return seconds


def _per_stage(name: str, cost: Cost, stages: int) -> Callable[[int, int], float]:
    if callable(cost):
        return cost
    costs = list(cost) if isinstance(cost, Iterable) else [cost] * stages
    if len(costs) != stages or not all(0 <= seconds < inf for seconds in costs):
        raise ValueError(f"{name}={cost!r}: give seconds, or a list for the {stages} stages, none negative")
    return lambda stage, micro_batch: costs[stage]
