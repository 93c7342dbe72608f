"""What the drawings read off a timeline, predicted or measured: its stages, its gaps, its phases.

Idea    A timeline is spans and nothing else, so everything here is found by looking: how many stages a rank has, when
        it stands idle, and whether it goes through the three phases of 1F1B.
Read    `minipar/facts.py` before; `lanes.py` after.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minipar.facts import Kind, Timeline
from minipar.order import Schedule
from minipar.simulate import simulate

NAMES = {"1f1b": "1F1B", "gpipe": "GPipe", "naive": "Naive", "interleaved": "Interleaved 1F1B"}
NAMES |= {"zb-h1": "ZB-H1", "zb-h2": "ZB-H2"}


def begun(timeline: Timeline) -> Timeline:
    """The same timeline with its first action at second 0: measured ones begin when their clock says so."""
    start = min((span.start for span in timeline.spans), default=0.0)
    if not start:
        return timeline
    move = lambda spans: tuple(replace(span, start=span.start - start, end=span.end - start) for span in spans)
    return Timeline(move(timeline.spans), timeline.ranks, move(timeline.critical_path))


def timeline_of(work: Timeline | Schedule) -> Timeline:
    """A timeline as it is, from second 0; a schedule as it runs when F = B = W = one second for a rank's layers."""
    if isinstance(work, Schedule):
        return simulate(work, *[1 / work.chunks] * 3)
    if not isinstance(work, Timeline):
        raise ValueError(f"{work!r} is no timeline: give one, or a schedule, such as minipar.schedule.gpipe(4, 8)")
    if work.duration <= 0:
        raise ValueError("a timeline of no length: there is nothing to draw. Give its actions some seconds")
    return begun(work)


def name_of(work: Timeline | Schedule, name: str = "") -> str:
    """What a title calls the work."""
    return name or (NAMES.get(work.name, work.name) if isinstance(work, Schedule) else "")


def stages(timeline: Timeline) -> int:
    """How many stages the pipeline has."""
    return max(span.stage for span in timeline.spans) + 1


def micro_batches(timeline: Timeline) -> int:
    """How many micro-batches a step has."""
    return max(span.micro_batch for span in timeline.spans) + 1


def chunks(timeline: Timeline) -> int:
    """Stages on each rank."""
    return -(-stages(timeline) // timeline.ranks)


def splits_backward(timeline: Timeline) -> bool:
    """Whether weight gradients are actions of their own."""
    return any(span.kind is Kind.WEIGHT for span in timeline.spans)


def gaps(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """When the rank stands idle, from the start of the step to its end. For a timeline that begins at second 0."""
    found, free = list[tuple[float, float]](), 0.0
    for span in timeline.by_rank(rank):
        if span.start > free:
            found.append((free, span.start))
        free = max(free, span.end)
    return [*found, (free, timeline.duration)] if timeline.duration > free else found


def busy(timeline: Timeline, rank: int) -> float:
    """Seconds of work of one rank."""
    return sum(span.seconds for span in timeline.by_rank(rank))


def idle_share(timeline: Timeline, rank: int) -> float:
    """Idle time over busy time of one rank; 0 for one that has nothing to do."""
    work = busy(timeline, rank)
    return (timeline.duration - work) / work if work else 0.0


@dataclass(frozen=True)
class Phases:
    """When a rank's steady state begins and ends: warm-up is before it, cool-down after it."""

    begin: float
    steady: float
    cooling: float
    end: float


def phases(timeline: Timeline) -> list[Phases] | None:
    """The phases of each rank if this is a 1F1B (some rank warms up, some rank then alternates); else None.

    Warm-up lasts until the forward that is followed by the first backward, steady state until the backward (and
    weight gradient) that follows the last forward.
    """
    found, warms, alternates = [], False, False
    for rank in range(timeline.ranks):
        row = timeline.by_rank(rank)
        first = next((i for i, span in enumerate(row) if span.kind is not Kind.FORWARD), len(row))
        last = max((i for i, span in enumerate(row) if span.kind is Kind.FORWARD), default=-1)
        if last < 0 or first == len(row):
            return None
        start = max(first - 1, 0)
        stop = max(last, first)
        while stop + 1 < len(row) and row[stop].kind is Kind.FORWARD:
            stop += 1
        alternates |= sum(span.kind is Kind.FORWARD for span in row[start : stop + 1]) > 1
        warms |= start > 0
        found.append(Phases(row[0].start, row[start].start, row[stop].end, row[-1].end))
    return found if warms and alternates else None


def held(timeline: Timeline, activation_bytes: float | None = None) -> list[list[tuple[float, float]]]:
    """For each rank, (second, held from then on): the last value of each second, in order."""
    curves = []
    for rank in range(timeline.ranks):
        points: dict[float, float] = {}
        for second, value in sorted(timeline.activations(rank, activation_bytes or 1), key=lambda point: point[0]):
            points[second] = value
        curves.append(list(points.items()))
    return curves
