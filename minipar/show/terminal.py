"""A timeline in text, for 80 columns.

    1F1B, 3 stages, 4 micro-batches: idle 50 % of busy time
    rank 0  F0-F1-F2-............B0----F3-B1----...B2----...B3----
    rank 1  ...F0-F1-......B0----F2-B1----F3-B2----...B3----......
    rank 2  ......F0-B0----F1-B1----F2-B2----F3-B3----............

Idea    Time runs to the right, a column for each so many seconds: enough columns for the shortest action to carry its
        name. What does not fit in one line is folded into several. Where that would be too many lines, the columns
        become coarser, and each says only which kind of action filled most of it: then the text says so.
Read    `timelines.py` for the same in colour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from textwrap import wrap

from minipar.facts import Kind, Span, Timeline
from minipar.show import reading, units, words

COLUMNS = 80
MOST_LINES = 60  # of a folded timeline


@dataclass(frozen=True)
class Cell:
    """A piece of a row: its text, and what is done there (None is idle)."""

    text: str
    kind: Kind | None


@dataclass(frozen=True)
class Chart:
    """Rows of cells, in one fold or several, and how to read them."""

    folds: list[list[list[Cell]]]  # by fold, by rank
    starts: list[float]  # the second at which each fold begins
    scale: str


def chart(timeline: Timeline, columns: int = COLUMNS) -> Chart:
    """The rows of a timeline that begins at second 0."""
    room = max(columns - len(labels(timeline.ranks)[0]), 10)
    chunks = reading.chunks(timeline)
    longest = max(len(_name(span, timeline.ranks, chunks)) for span in timeline.spans)
    shortest = min(span.seconds for span in timeline.spans if span.seconds > 0)
    needed = ceil(timeline.duration / shortest * longest - 1e-9)
    spare = (longest + 1) / longest
    if needed * spare <= room:  # a blank behind each name is easier to read
        needed = ceil(needed * spare)
    folds = ceil(needed / room)
    if folds * (timeline.ranks + 1) > MOST_LINES:
        return _coarse(timeline, room)
    width = needed if folds == 1 else _fold_width(room, needed, needed * shortest / timeline.duration)
    seconds = timeline.duration / needed
    rows = [list(_row(timeline, rank, needed, chunks)) for rank in range(timeline.ranks)]
    starts = list(range(0, needed, width))
    return Chart(
        [[_cut(row, start, start + width) for row in rows] for start in starts],
        [start * seconds for start in starts],
        f"a column is {units.time(seconds, units.unit_for(timeline.duration))}"
        + (f"; folded into {len(starts)} parts" if len(starts) > 1 else ""),
    )


def text(timeline: Timeline, name: str = "", columns: int = COLUMNS) -> str:
    """The whole drawing: title, rows, and below them what it costs. No line is longer than `columns`."""
    return "\n".join("".join(cell.text for cell in line) for line in lines(timeline, name, columns))


def lines(timeline: Timeline, name: str = "", columns: int = COLUMNS) -> list[list[Cell]]:
    """The lines of `text`, in cells, so that each can have its colour."""
    shown = reading.timeline_of(timeline)
    drawn = chart(shown, columns)
    found = [[Cell(line, None)] for line in wrap(words.headline(shown, name), columns)]
    for start, rows in zip(drawn.starts, drawn.folds, strict=True):
        if len(drawn.folds) > 1:
            found += [[], [Cell(f"from {units.time(start, units.unit_for(shown.duration))}", None)]]
        found += [[Cell(label, None), *row] for label, row in zip(labels(shown.ranks), rows, strict=True)]
    return [*found, [], *([Cell(line, None)] for line in summary(shown, drawn.scale, columns))]


def summary(timeline: Timeline, scale: str, columns: int = COLUMNS) -> list[str]:
    """What stands below the rows."""
    idle = [units.share(reading.idle_share(timeline, rank)) for rank in range(timeline.ranks)]
    held = list(map(units.plain, timeline.peak_activations()))
    chunks = reading.chunks(timeline)
    plural = "" if max(map(float, held)) == 1 else "es"
    each = "" if chunks == 1 else f", each on one of the rank's {chunks} stages"
    lines = {
        "step": f"{units.time(timeline.duration)}; {scale}; . is idle",
        "bubble": f"idle {units.share(timeline.bubble)} of busy time{by_rank(idle)}",
        "held": f"at most {max(held, key=float)} micro-batch{plural}{by_rank(held)}{each}",
    }
    return [
        line
        for word, said in lines.items()
        for line in wrap(said, columns, initial_indent=f"{word:6}  ", subsequent_indent=" " * 8)
    ]


def by_rank(values: list[str]) -> str:
    """The values of all ranks, unless they are alike."""
    return f" (by rank {', '.join(values)})" if len(set(values)) > 1 else ""


def labels(ranks: int) -> list[str]:
    """What stands before the rows, all of one width."""
    width = len(f"rank {ranks - 1}")
    return [f"{f'rank {rank}':{width}}  " for rank in range(ranks)]


def _name(span: Span, ranks: int, chunks: int) -> str:
    """ "F3", and with several stages on a rank "F3.1"."""
    return str(span.action) if chunks == 1 else f"{span.action}.{span.stage // ranks}"


def _row(timeline: Timeline, rank: int, columns: int, chunks: int) -> Iterator[Cell]:
    """One rank's cells, `columns` wide together."""
    at = 0
    per_second = columns / timeline.duration
    for span in timeline.by_rank(rank):
        start, end = round(span.start * per_second), round(span.end * per_second)
        if start > at:
            yield Cell("." * (start - at), None)
        width = end - max(start, at)
        if width > 0:
            name = _name(span, timeline.ranks, chunks)
            yield Cell(name.ljust(width, "-")[:width] if len(name) <= width else span.kind.value * width, span.kind)
        at = max(at, end)
    if at < columns:
        yield Cell("." * (columns - at), None)


def _fold_width(room: int, needed: int, action: float) -> int:
    """The columns of a fold: folds are alike, and if possible no action of `action` columns is cut."""
    fitting = int(room / action + 1e-9) * action
    if action > room or abs(fitting - round(fitting)) > 1e-6:
        return ceil(needed / ceil(needed / room))
    folds = ceil(needed / fitting)
    return min(round(fitting), ceil(ceil(needed / folds / action - 1e-9) * action - 1e-9))


def _cut(row: list[Cell], start: int, end: int) -> list[Cell]:
    """The columns from `start` to `end` of a row."""
    found, at = [], 0
    for cell in row:
        piece = cell.text[max(start - at, 0) : max(end - at, 0)]
        if piece:
            found.append(Cell(piece, cell.kind))
        at += len(cell.text)
    return found


def _coarse(timeline: Timeline, room: int) -> Chart:
    """One line for each rank, a letter for each column: what the rank did for most of its time."""
    seconds = timeline.duration / room
    rows = []
    for rank in range(timeline.ranks):
        shares: list[dict[Kind | None, float]] = [{None: seconds} for _ in range(room)]
        for span in timeline.by_rank(rank):
            first, last = int(span.start / seconds), min(int(span.end / seconds), room - 1)
            for column in range(first, last + 1):
                part = min(span.end, (column + 1) * seconds) - max(span.start, column * seconds)
                shares[column][span.kind] = shares[column].get(span.kind, 0.0) + part
                shares[column][None] -= part
        kinds = [max(share, key=lambda kind: share[kind]) for share in shares]
        rows.append([Cell(kind.value if kind else ".", kind) for kind in kinds])
    long = units.time(seconds, units.unit_for(timeline.duration))
    return Chart([rows], [0.0], f"too long for numbers: a column is {long} and shows what filled most of it")
