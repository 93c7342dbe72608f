"""What a schedule will do, given what its actions cost: a timeline without a single rank.

Idea    An action starts when its rank is free and all that it needs is there, and that is all there is to it. So one
        walk over the actions, in any order that respects their needs, finds every start and end. The bubble, the
        peak of the activations and the critical path are then read off, as they are from a measured timeline.
Source  What it must agree with. 1F1B's (p-1)/m and interleaved's (p-1)/(v m): Narayanan et al. 2021,
        arXiv:2104.04473. Zero bubble H1's (p-1)/(3 m): Qi et al. 2024, arXiv:2401.10241.
Cost    A few microseconds for each action: 64 stages with 512 micro-batches in less than a second.
Read    `schedule.py` before; `trace.py` for what really happened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from minipar.costs import Cost, seconds_of
from minipar.facts import Action, Span, Timeline
from minipar.order import Schedule, goes_to, walk


def simulate(
    schedule: Schedule,
    forward: Cost = 1.0,
    backward: Cost = 1.0,
    weight: Cost = 1.0,
    send: float | Callable[[int, int], float] = 0.0,
    *,
    bytes_per_message: float = 0,
    bandwidth: float = inf,
) -> Timeline:
    """The timeline of one step, in seconds from its start.

    `forward`, `backward` (gradient of the input) and `weight` (gradient of the weights) are the seconds of one
    micro-batch on one stage: a number, one number for each stage, or a function of (stage, micro_batch). Where the
    schedule has no W actions, B takes `backward + weight`, so that every schedule does the same work. With v chunks,
    a rank holds v stages and each costs this much: give 1/v of the numbers to compare schedules of the same model.

    A message from one rank to another goes through their link, `bytes_per_message / bandwidth` seconds, after those
    sent before it, and arrives `send` seconds later: a number, or a function of the two ranks (from, to). Neither
    rank is busy meanwhile. Raises `ScheduleError` for a schedule that cannot run.
    """
    seconds, arrival = seconds_of(schedule, forward, backward, weight), _arrival(send, bytes_per_message, bandwidth)
    ranks = schedule.ranks
    latest: list[Span | None] = [None] * ranks
    done: dict[Action, _Done] = {}
    for action, inputs in walk(schedule):
        rank, to = action.stage % ranks, goes_to(action, schedule.stages) % ranks
        awaited = latest[rank]
        start = awaited.end if awaited else 0.0
        for need in inputs:
            if need.stage % ranks != rank and (result := done[need]).arrives > start:
                start, awaited = result.arrives, result.span
        span = Span(rank, start, start + seconds(action), action.kind, action.stage, action.micro_batch)
        done[action] = _Done(span, awaited, span.end if to == rank else arrival(rank, to, span.end))
        latest[rank] = span
    if len(done) < max(schedule.size, sum(map(len, schedule.actions))):
        schedule.validate()
    return Timeline(tuple(one.span for one in done.values()), ranks, _critical_path(done))


class _Done(NamedTuple):
    """An action that ended, the span for which it had to wait, and when its result is where it is needed."""

    span: Span
    awaited: Span | None
    arrives: float


def _critical_path(done: dict[Action, _Done]) -> tuple[Span, ...]:
    """From the span that ends last, back along what each had to wait for."""
    path = list[Span]()
    span = max((one.span for one in done.values()), key=lambda span: span.end, default=None)
    while span:
        path.append(span)
        span = done[span.action].awaited
    return tuple(reversed(path))


def _arrival(
    send: float | Callable[[int, int], float], bytes_per_message: float, bandwidth: float
) -> Callable[[int, int, float], float]:
    """When the next message from one rank to another arrives, if it is ready at a given second."""
    if bandwidth <= 0:
        raise ValueError(f"bandwidth={bandwidth}: give bytes a second, more than 0")
    free = defaultdict[tuple[int, int], float](float)  # when the link has passed on all it was given

    def arrival(source: int, to: int, ready: float) -> float:
        free[source, to] = max(free[source, to], ready) + bytes_per_message / bandwidth
        return free[source, to] + (send(source, to) if callable(send) else send)

    return arrival
