"""Small matrices: multiplied in plain Python, and drawn with their numbers.

Idea    The numbers in the picture are computed, not made up: whoever doubts that the pieces add up can check them.
Read    `cuts.py`, whose pictures these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, sqrt

from minipar.show.palette import INK, MUTED, PAPER, ink_on
from minipar.show.svg import Sheet, text_width

Matrix = Sequence[Sequence[float]]
Fill = Callable[[int, int], str]  # the colour of row i, column j

MOST = 12  # rows or columns that are drawn
CELL, FONT = 26, 12


def checked(name: str, matrix: Matrix) -> Matrix:
    """The matrix, if it is one that can be drawn; else `ValueError`."""
    widths = {len(row) for row in matrix}
    if len(widths) != 1 or 0 in widths:
        raise ValueError(f"{name} is no matrix: give a list of rows, all of one length")
    if len(matrix) > MOST or max(widths) > MOST:
        raise ValueError(f"{name} has {len(matrix)} x {max(widths)} numbers: a picture has room for {MOST} x {MOST}")
    return matrix


def multiply(a: Matrix, b: Matrix) -> list[list[float]]:
    """a b. Raises `ValueError` if they don't fit."""
    if len(a[0]) != len(b):
        raise ValueError(f"{len(a)} x {len(a[0])} times {len(b)} x {len(b[0])}: the inner sizes must be equal")
    return [[sum(x * row[j] for x, row in zip(line, b, strict=True)) for j in range(len(b[0]))] for line in a]


def add(*parts: Matrix) -> list[list[float]]:
    """The sum of matrices of one size."""
    return [[sum(values) for values in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)]


def beside(*parts: Matrix) -> list[list[float]]:
    """The parts side by side."""
    return [[value for row in rows for value in row] for rows in zip(*parts, strict=True)]


def columns_of(matrix: Matrix, start: int, end: int) -> list[list[float]]:
    """The columns from `start` up to `end`."""
    return [list(row[start:end]) for row in matrix]


def attention(q: Matrix, k: Matrix) -> list[list[float]]:
    """softmax(q k^T / sqrt(width)), in which no row looks at later ones."""
    scores = multiply(q, list(zip(*k, strict=True)))
    weights = []
    for i, row in enumerate(scores):
        raised = [exp(score / sqrt(len(q[0]))) if j <= i else 0.0 for j, score in enumerate(row)]
        weights.append([value / sum(raised) for value in raised])
    return weights


def number(value: float) -> str:
    """At most three figures: 4, -0.5, 1.25."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def cell_width(*matrices: Matrix) -> float:
    """Wide enough for every number in them."""
    return max(CELL, *(text_width(number(value), FONT) + 8 for matrix in matrices for row in matrix for value in row))


def draw_matrix(sheet: Sheet, matrix: Matrix, x: float, y: float, name: str, fill: Fill, cell: float) -> float:
    """The matrix with its top left at (x, y) and its name above; returns where it ends at the right."""
    width, height = cell * len(matrix[0]), CELL * len(matrix)
    sheet.text(x + width / 2, y - 8, name, 11, MUTED, "middle")
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            colour = fill(i, j)
            sheet.rect(x + j * cell, y + i * CELL, cell, CELL, colour, f' stroke="{PAPER}" stroke-width="1"')
            middle = x + (j + 0.5) * cell
            sheet.text(middle, y + (i + 0.5) * CELL + 4.2, number(value), FONT, ink_on(colour), "middle")
    for edge, inward in ((x - 3, 4), (x + width + 3, -4)):
        sheet.path(f"M{edge + inward:.1f} {y - 2:.1f}H{edge:.1f}V{y + height + 2:.1f}H{edge + inward:.1f}", INK, 1.4)
    return x + width


def draw_sign(sheet: Sheet, sign: str, x: float, y: float, height: float) -> float:
    """A sign between two matrices; returns where the next begins."""
    width = sign_width(sign)
    sheet.text(x + width / 2, y + height / 2 + 6, sign, 18, INK, "middle")
    return x + width


def sign_width(sign: str) -> float:
    """The room between two matrices with this sign between them."""
    return 34 + text_width(sign, 18)
