"""Who has what before and after a collective, and a ring that adds up, step by step.

Idea    A row is a rank, a cell is a piece of a buffer, a colour is the rank where a piece comes from: so a copy is a
        colour that appears in another row, and a sum is a cell with several colours. The same picture serves the
        collectives and the steps of a ring on real ranks.
Source  The collectives are MPI's. Ring: Patarasuk and Yuan 2009, 'Bandwidth optimal all-reduce algorithms'.
Read    `minipar/comm.py`, which runs them; `stepper.py`, which plays the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minipar.show import units
from minipar.show.drawing import Drawing
from minipar.show.palette import ACCENT, GRID, INK, MUTED, RANKS, ink_on
from minipar.show.stepper import Steps, steps
from minipar.show.svg import BOLD, HALO, Sheet, arrow_head
from minipar.show.timelines import draw_title

Cell = frozenset[int]  # the ranks whose values are in it; empty: nothing is there
Buffers = list[list[Cell]]  # by rank, by piece
LETTERS = "abcdefgh"
CELL, TALL, LEFT = 62, 30, 84


def _own(ranks: int) -> Buffers:
    return [[frozenset({rank})] * ranks for rank in range(ranks)]


def _piece(ranks: int) -> Buffers:
    return [[frozenset({rank}) if piece == rank else frozenset() for piece in range(ranks)] for rank in range(ranks)]


def _every(ranks: int) -> Cell:
    return frozenset(range(ranks))


OPERATIONS: dict[str, tuple[str, Callable[[int], Buffers], Callable[[int], Buffers]]] = {
    "broadcast": (
        "rank 0's buffer, on every rank",
        lambda n: [[frozenset({0} if rank == 0 else ()) for _ in range(n)] for rank in range(n)],
        lambda n: [[frozenset({0})] * n] * n,
    ),
    "all_reduce": ("the sum of all buffers, on every rank", _own, lambda n: [[_every(n)] * n] * n),
    "reduce_scatter": (
        "the sum of all buffers, a piece on each rank",
        _own,
        lambda n: [[_every(n) if piece == rank else frozenset() for piece in range(n)] for rank in range(n)],
    ),
    "all_gather": ("every rank's piece, on every rank", _piece, lambda n: [[frozenset({i}) for i in range(n)]] * n),
    "all_to_all": (
        "piece r of every rank, on rank r",
        _own,
        lambda n: [[frozenset({i}) for i in range(n)]] * n,
    ),
}


def collective(op: str, ranks: int = 4) -> Drawing:
    """Who has what before and after: `op` is broadcast, all_reduce, reduce_scatter, all_gather or all_to_all.

    Raises `ValueError`, one line, for another operation, or for a number of ranks that has no room.
    """
    if op not in OPERATIONS:
        raise ValueError(f"no picture of {op!r}: choose from {', '.join(OPERATIONS)}")
    if not 2 <= ranks <= 8:
        raise ValueError(f"{ranks} ranks: the picture has room for 2 to 8")
    meaning, before, after = OPERATIONS[op]
    title = f"{op}: {meaning}"
    name = (lambda rank, piece: LETTERS[rank]) if op == "all_to_all" else None  # from the same place of other rows
    width = 2 * (LEFT + CELL * ranks) + 90
    sheet = Sheet(width)
    top = draw_title(sheet, title) + 18
    middle = LEFT + CELL * ranks + 45
    for left, buffers, heading, label in (
        (LEFT, before(ranks), "before", None),
        (middle + LEFT, after(ranks), "after", name),
    ):
        sheet.text(left, top - 6, heading, 11, MUTED)
        for rank, row in enumerate(buffers):
            _draw_row(sheet, row, rank, left, top + rank * (TALL + 8), label)
    y = top + ranks * (TALL + 8) / 2 - 4
    sheet.line(middle - 26, y, middle + 2, y, INK, 2)
    sheet.path(arrow_head(middle + 10, y, 1, 0, 10), fill=INK)
    sheet.height = top + ranks * (TALL + 8) + 8
    words = " ".join(f"Rank {rank} ends with {_in_words(row)}." for rank, row in enumerate(after(ranks)))
    return Drawing(sheet.svg(title, words), title, words)


def _in_words(row: Sequence[Cell]) -> str:
    whole = max((len(cell) for cell in row), default=0)
    held = [str(piece) for piece, cell in enumerate(row) if cell]
    kind = "sums of all ranks" if whole > 1 else f"values of rank {', '.join(str(next(iter(c))) for c in row if c)}"
    return f"pieces {', '.join(held)}: {kind}"


def _draw_row(
    sheet: Sheet,
    row: Sequence[Cell],
    rank: int,
    left: float,
    y: float,
    label: Callable[[int, int], str] | None = None,
    texts: Sequence[str] | None = None,
) -> None:
    """The buffer of one rank, a cell for each piece, striped by the ranks whose values are in it."""
    sheet.text(left - 12, y + 20, f"rank {rank}", 12, INK, "end", BOLD)
    for piece, cell in enumerate(row):
        x = left + piece * CELL
        members = sorted(cell)
        for place, member in enumerate(members):
            part = (CELL - 4) / len(members)
            sheet.rect(x + place * part, y, part, TALL, RANKS[member])
        sheet.rect(x, y, CELL - 4, TALL, "none", f' stroke="{INK if cell else GRID}" stroke-width="1"')
        if not cell:
            continue
        text = texts[piece] if texts else label(rank, piece) if label else LETTERS[piece]
        summed = len(members) > 1
        ink, halo = (INK, HALO) if summed else (ink_on(RANKS[members[0]]), "")
        sheet.text(x + (CELL - 4) / 2, y + 19, text, 12, ink, "middle", halo)


# A ring.


def ring(history: Sequence[Sequence[Sequence[float]]], *, title: str = "") -> Steps:
    """A ring all-reduce as it happened: `history[rank][step]` is the buffer of a rank after so many steps, a number for
    each piece, `2 (ranks - 1) + 1` of them; rank r sends piece r first. Raises `ValueError` for anything else."""
    ranks = len(history)
    expected = 2 * (ranks - 1) + 1
    if not 2 <= ranks <= 8 or any(len(rows) != expected or any(len(row) != ranks for row in rows) for rows in history):
        raise ValueError(
            f"a ring of {ranks} ranks has {ranks} pieces on each, before the first and after each of its "
            f"{expected - 1} steps: give history[rank][step][piece] of 2 to 8 ranks"
        )
    held: Buffers = _own(ranks)
    frames = [_ring_frame([list(rows[0]) for rows in history], held, None, "")]
    captions = [f"Before: each rank has its own {ranks} pieces."]
    for step in range(expected - 1):
        adds = step < ranks - 1
        sent = [(rank - step) % ranks if adds else (rank + 1 - (step - ranks + 1)) % ranks for rank in range(ranks)]
        held = _pass_on(held, sent, adds)
        verb = "adds it to its own" if adds else "puts it in the place of its own"
        caption = f"Step {step + 1} of {expected - 1}: each rank sends one piece to the next, which {verb}."
        frames.append(_ring_frame([list(rows[step + 1]) for rows in history], held, sent, caption))
        captions.append(caption)
    return steps(frames, captions, title=title or f"Ring all-reduce on {ranks} ranks: {expected - 1} steps")


def _pass_on(held: Buffers, sent: Sequence[int], adds: bool) -> Buffers:
    """What each rank has after all have sent one piece to their right."""
    ranks, after = len(held), [list(row) for row in held]
    for rank in range(ranks):
        piece, to = sent[rank], (rank + 1) % ranks
        after[to][piece] = (held[to][piece] | held[rank][piece]) if adds else held[rank][piece]
    return after


def _ring_frame(values: list[list[float]], held: Buffers, sent: Sequence[int] | None, caption: str) -> Drawing:
    ranks = len(values)
    sheet = Sheet(LEFT + CELL * ranks + 90)
    top = 14.0
    for rank, row in enumerate(values):
        y = top + rank * (TALL + 18)
        _draw_row(sheet, held[rank], rank, LEFT, y, texts=[units.plain(value) for value in row])
        if sent is None:
            continue
        source, to = (rank - 1) % ranks, rank
        piece = sent[source]
        x = LEFT + piece * CELL + (CELL - 4) / 2
        sheet.rect(LEFT + piece * CELL - 2, y - 2, CELL, TALL + 4, "none", f' stroke="{ACCENT}" stroke-width="3"')
        if to > source:
            sheet.line(x, y - 15, x, y - 7, ACCENT, 2.5)
            sheet.path(arrow_head(x, y - 2, 0, 1, 8), fill=ACCENT)
        else:
            sheet.text(LEFT + CELL * ranks + 4, y + 20, f"from rank {source}", 11, MUTED)
    sheet.height = top + ranks * (TALL + 18)
    title = caption or "Before the first step"
    words = " ".join(f"Rank {rank}: {', '.join(map(units.plain, row))}." for rank, row in enumerate(values))
    return Drawing(sheet.svg(title, words), title, words)
