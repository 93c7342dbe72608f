"""How a matrix product is cut over ranks: by columns, by rows, by heads; with real numbers.

Idea    Cut W by columns, and every rank needs all of x and makes some columns of y: the pieces stand beside each other,
        and no rank has to wait. Cut W by rows, and every rank needs only its columns of x and makes a y of full size
        that is not yet the sum: the pieces must be added, which is an all-reduce. So columns first, then rows, and
        there is one sum for two products. Heads are columns of the projections that never need each other.
Source  Shoeybi et al. 2019, arXiv:1909.08053, section 3.
Read    `minipar/tp.py`, which does this on real ranks; `matrices.py` for the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minipar.show import units
from minipar.show.drawing import Drawing
from minipar.show.matrices import (
    CELL,
    Fill,
    Matrix,
    add,
    attention,
    beside,
    cell_width,
    checked,
    columns_of,
    draw_matrix,
    draw_sign,
    multiply,
    sign_width,
)
from minipar.show.palette import INK, MUTED, RANKS
from minipar.show.svg import BOLD, TIMES, Sheet, text_width
from minipar.show.timelines import MARGIN, draw_title

X = [[1, 2, 0, 1], [0, 1, 3, 2]]
W = [[1, 0, 2, 1], [0, 1, 1, 0], [2, 1, 0, 1], [1, 0, 1, 2]]
TOKENS = [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]]
QUERIES = [[1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
KEYS = [[0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]]
VALUES = [[1, 2, 0, 1], [0, 1, 2, 0], [2, 0, 1, 1], [1, 1, 0, 2]]
SHARED = "#eceef1"  # what every rank has, and what is nobody's alone

LEFT = 132  # room for "rank 0, head 0"


@dataclass(frozen=True)
class Term:
    """A matrix of an equation, and the sign behind it."""

    matrix: Matrix
    name: str
    fill: Fill
    sign: str = ""


@dataclass(frozen=True)
class Line:
    """An equation, with who computes it and what there is to say of it."""

    who: str
    terms: Sequence[Term]
    note: str = ""


def columns(W: Matrix = W, x: Matrix = X, ranks: int = 2, *, title: str = "") -> Drawing:
    """y = x W with the columns of W on different ranks. Matrices are lists of rows.

    Raises `ValueError` when the columns cannot be shared, or are too many to draw.
    """
    shares = _shares(W, x, ranks, len(checked("W", W)[0]), "columns of W")
    owner = lambda i, j: RANKS[next(r for r, (start, end) in enumerate(shares) if start <= j < end)]
    whole = multiply(x, W)
    pieces = [multiply(x, columns_of(W, *share)) for share in shares]
    lines = [Line("One process", [Term(x, "x", _shared, TIMES), Term(W, "W", owner, "="), Term(whole, "y", owner)])]
    for rank, (share, piece) in enumerate(zip(shares, pieces, strict=True)):
        own, span = _own(rank), _span(share)
        terms = [
            Term(x, "x, all of it", _shared, TIMES),
            Term(columns_of(W, *share), f"W, columns {span}", own, "="),
            Term(piece, f"y, columns {span}", own),
        ]
        lines.append(Line(f"rank {rank}", terms))
    together = [Term(piece, f"of rank {rank}", _own(rank), "|") for rank, piece in enumerate(pieces)]
    note = "beside each other: no sum, and until somebody needs all of y, no message"
    lines.append(Line("Together", [*_closed(together), Term(beside(*pieces), "y", owner)], note))
    title = title or f"Cut by columns: each rank makes {_share(shares, 'column')} of y, and nothing is summed"
    return _picture(title, lines)


def rows(W: Matrix = W, x: Matrix = X, ranks: int = 2, *, title: str = "") -> Drawing:
    """y = x W with the rows of W, and so the columns of x, on different ranks. Otherwise as `columns`."""
    shares = _shares(W, x, ranks, len(checked("W", W)), "rows of W")
    part = lambda k: RANKS[next(r for r, (start, end) in enumerate(shares) if start <= k < end)]
    whole = multiply(x, W)
    pieces = [multiply(columns_of(x, *share), W[slice(*share)]) for share in shares]
    first = [
        Term(x, "x", lambda i, j: part(j), TIMES),
        Term(W, "W", lambda i, j: part(i), "="),
        Term(whole, "y", _shared),
    ]
    lines = [Line("One process", first)]
    for rank, (share, piece) in enumerate(zip(shares, pieces, strict=True)):
        own, span = _own(rank), _span(share)
        terms = [
            Term(columns_of(x, *share), f"x, columns {span}", own, TIMES),
            Term(W[slice(*share)], f"W, rows {span}", own, "="),
            Term(piece, "a part of the sum", own),
        ]
        lines.append(Line(f"rank {rank}", terms))
    together = [Term(piece, f"of rank {rank}", _own(rank), "+") for rank, piece in enumerate(pieces)]
    note = "the sum is an all-reduce: every rank gets all of y"
    lines.append(Line("Together", [*_closed(together), Term(add(*pieces), "y", _shared)], note))
    title = title or "Cut by rows: each rank makes a y of full size that must be summed"
    return _picture(title, lines)


def heads(
    x: Matrix = TOKENS,
    queries: Matrix = QUERIES,
    keys: Matrix = KEYS,
    values: Matrix = VALUES,
    heads: int = 2,
    ranks: int = 2,
    *,
    title: str = "",
) -> Drawing:
    """Causal attention with its heads on different ranks: every head from its own columns of the three projections.

    `x` is (tokens, hidden), the projections are (hidden, hidden). Raises `ValueError` as `columns` does.
    """
    width = len(checked("queries", queries)[0])
    if heads < 1 or width % heads:
        raise ValueError(f"{width} columns are no {heads} heads of one width: choose heads from {_divisors(width)}")
    shares = _shares(queries, x, ranks, heads, "heads")
    size, lines, outputs, owners = width // heads, list[Line](), list[Matrix](), list[int]()
    for rank, share in enumerate(shares):
        for head in range(*share):
            cut = (head * size, (head + 1) * size)
            q, k, v = (multiply(x, columns_of(checked("projection", p), *cut)) for p in (queries, keys, values))
            weights, own = attention(q, k), _own(rank)
            outputs.append(multiply(weights, v))
            owners.append(rank)
            terms = [
                Term(q, "q", own, ""),
                Term(k, "k", own, ""),
                Term(v, "v", own, "→"),
                Term(weights, "who looks at whom", own, f"{TIMES} v ="),
                Term(outputs[-1], f"out of head {head}", own),
            ]
            lines.append(Line(f"rank {rank}, head {head}", terms))
    together = [Term(out, f"head {head}", _own(owners[head]), "|") for head, out in enumerate(outputs)]
    owner = lambda i, j: RANKS[owners[j // size]]
    note = "beside each other: cut like columns, so a projection cut by rows can follow"
    lines.append(Line("Together", [*_closed(together), Term(beside(*outputs), "all heads", owner)], note))
    title = title or f"Cut by heads: each rank attends with {_share(shares, 'head')} of its own"
    return _picture(title, lines)


# The parts.


def _shared(row: int, column: int) -> str:
    return SHARED


def _own(rank: int) -> Fill:
    return lambda row, column: RANKS[rank]


def _closed(terms: list[Term]) -> list[Term]:
    """The terms, with an equals sign behind the last."""
    return [*terms[:-1], Term(terms[-1].matrix, terms[-1].name, terms[-1].fill, "=")]


def _span(share: tuple[int, int]) -> str:
    start, end = share
    return f"{start} to {end - 1}" if end - start > 2 else ", ".join(map(str, range(start, end)))


def _share(shares: list[tuple[int, int]], noun: str) -> str:
    return units.count(shares[0][1] - shares[0][0], noun)


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def _shares(weights: Matrix, x: Matrix, ranks: int, parts: int, what: str) -> list[tuple[int, int]]:
    """(start, end) of each rank's share of `parts`. Raises `ValueError` when they cannot be shared evenly."""
    if not 1 <= ranks <= len(RANKS):
        raise ValueError(f"ranks={ranks}: a picture has room for 1 to {len(RANKS)}")
    if parts % ranks:
        raise ValueError(f"{parts} {what} cannot be shared by {ranks} ranks: choose ranks from {_divisors(parts)}")
    if len(checked("x", x)[0]) != len(weights):
        raise ValueError(f"x has {len(x[0])} columns, the matrix {len(weights)} rows: they must be as many")
    size = parts // ranks
    return [(rank * size, (rank + 1) * size) for rank in range(ranks)]


def _picture(title: str, lines: Sequence[Line]) -> Drawing:
    """The equations below each other."""
    widths = [_line_width(line) for line in lines]
    sheet = Sheet(max(740, LEFT + max(widths) + MARGIN))
    y = draw_title(sheet, title) + 26
    for number, line in enumerate(lines):
        if number == len(lines) - 1:
            sheet.line(MARGIN, y - 22, sheet.width - MARGIN, y - 22, MUTED, 0.8)
            y += 14
        y = _draw_line(sheet, line, y) + 40
    sheet.height = y - 24
    said = " ".join(_in_words(line) for line in lines)
    return Drawing(sheet.svg(title, said), title, said)


def _line_width(line: Line) -> float:
    cell = cell_width(*(term.matrix for term in line.terms))
    return max(sum(len(t.matrix[0]) * cell + sign_width(t.sign) for t in line.terms), text_width(line.note, 12))


def _draw_line(sheet: Sheet, line: Line, y: float) -> float:
    """An equation from the left, its terms centred on one line; returns where it ends."""
    height = CELL * max(len(term.matrix) for term in line.terms)
    cell = cell_width(*(term.matrix for term in line.terms))
    sheet.text(MARGIN, y + height / 2 + 4, line.who, 13, INK, more=BOLD)
    x: float = LEFT
    for term in line.terms:
        top = y + (height - CELL * len(term.matrix)) / 2
        x = draw_matrix(sheet, term.matrix, x, top, term.name, term.fill, cell)
        x = draw_sign(sheet, term.sign, x, y, height)
    if line.note:
        sheet.text(LEFT, y + height + 22, line.note, 12, MUTED)
        return y + height + 22
    return y + height


def _in_words(line: Line) -> str:
    """An equation in words, with its numbers."""
    said = []
    for term in line.terms:
        numbers = "; ".join(" ".join(f"{value:g}" for value in map(lambda v: round(v, 2), row)) for row in term.matrix)
        said.append(f"{term.name} ({numbers}) {term.sign}".strip())
    return f"{line.who}: {' '.join(said)}.{f' {line.note.capitalize()}.' if line.note else ''}"
