"""Timelines in words: the title that states the message, and the text alternative that says what there is to see.

Idea    Whoever cannot see the picture should lose nothing but the picture. The same sentences stand under a drawing
        in the terminal.
Read    `reading.py` and `units.py` before.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipar.facts import Timeline
from minipar.show import reading, units


def shape(timeline: Timeline) -> str:
    """ "4 stages, 8 micro-batches"."""
    ranks, chunks = timeline.ranks, reading.chunks(timeline)
    where = units.count(ranks, "stage") if chunks == 1 else f"{units.count(ranks, 'rank')} of {chunks} stages"
    return f"{where}, {units.count(reading.micro_batches(timeline), 'micro-batch')}"


def headline(timeline: Timeline, name: str = "") -> str:
    """ "1F1B, 4 stages, 8 micro-batches: idle 37.5 % of busy time"."""
    return f"{f'{name}, ' if name else ''}{shape(timeline)}: idle {units.share(timeline.bubble)} of busy time"


def peaks(timeline: Timeline, activation_bytes: float | None = None) -> str:
    """The peak of each rank, in order: "4, 3, 2, 1 micro-batches"."""
    found = timeline.peak_activations(activation_bytes or 1)
    if activation_bytes:
        return ", ".join(map(units.size, found))
    each = "" if reading.chunks(timeline) == 1 else ", each on one stage"
    return f"{', '.join(map(units.plain, found))} micro-batches{each}"


def describe(timeline: Timeline, activation_bytes: float | None = None) -> str:
    """The step in sentences: its time, each rank's work, idleness and memory, and the phases of a 1F1B."""
    unit = units.unit_for(timeline.duration)
    said = [f"The step takes {units.time(timeline.duration, unit)} on {units.count(timeline.ranks, 'rank')}."]
    for rank in range(timeline.ranks):
        work = reading.busy(timeline, rank)
        said.append(
            f"Rank {rank} works {units.time(work, unit)} and is idle {units.time(timeline.duration - work, unit)} "
            f"({units.share(reading.idle_share(timeline, rank))} of its busy time)."
        )
    said.append(f"The most that each rank holds for backward, from rank 0: {peaks(timeline, activation_bytes)}.")
    phases = reading.phases(timeline)
    if phases:
        first = phases[0]
        said.append(
            f"Rank 0 warms up until {units.time(first.steady, unit)}, alternates forward and backward until "
            f"{units.time(first.cooling, unit)}, then cools down."
        )
    return " ".join(said)


def difference(value: float, other: float) -> str:
    """How much `value` is above `other`: "+6.4 %"."""
    if not other:
        return "no comparison"
    text = units.share(value / other - 1)
    return text if text.startswith("-") else f"+{text}"


def comparison(timelines: Sequence[Timeline], titles: Sequence[str]) -> str:
    """Which ends first, or, if they take the same time, which holds less."""
    unit = units.unit_for(max(timeline.duration for timeline in timelines))
    times = [units.time(timeline.duration, unit) for timeline in timelines]
    if len(set(times)) > 1:
        best = min(range(len(timelines)), key=lambda i: timelines[i].duration)
        worst = max(range(len(timelines)), key=lambda i: timelines[i].duration)
        saved = 1 - timelines[best].duration / timelines[worst].duration
        return f"{titles[best]} takes {times[best]}, {titles[worst]} {times[worst]}: {units.share(saved)} less"
    held = [units.plain(max(timeline.peak_activations(1 / reading.chunks(timeline)))) for timeline in timelines]
    same = f"{units.several(list(titles))} take the same {times[0]}"
    return f"{same}, but hold up to {units.several(held)} micro-batches" if len(set(held)) > 1 else same


def measured_over_predicted(measured: Timeline, predicted: Timeline, name: str = "") -> str:
    """ "measured 35.1 s, predicted 33 s (+6.4 %); idle / busy 42 % against 37.5 %"."""
    unit = units.unit_for(max(measured.duration, predicted.duration))
    return (
        f"{f'{name}: ' if name else ''}measured {units.time(measured.duration, unit)}, predicted "
        f"{units.time(predicted.duration, unit)} ({difference(measured.duration, predicted.duration)}); "
        f"idle / busy {units.share(measured.bubble)} against {units.share(predicted.bubble)}"
    )
