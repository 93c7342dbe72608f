"""Charts, tables, steppers and collectives: their numbers in picture and words, and what they refuse."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from minipar import show
from minipar.facts import Kind, Span
from minipar.message import Message
from minipar.show.palette import RANKS


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_a_chart_says_its_title_axes_and_numbers_in_picture_and_words() -> None:
    drawing = show.lines([1, 2, 4], {"gpipe": [3.0, 1.5, None], "1f1b": [3, 1, 0.5]}, title="Message & title",
                         across="micro-batches", up="idle in %", powers="x", level={"goal": 1.0})  # fmt: skip
    assert {"Message & title", "micro-batches", "idle in %", "gpipe", "1f1b", "goal"} <= set(texts(drawing.svg))
    assert "gpipe: 1: 3, 2: 1.5, 4: none; 1f1b: 1: 3, 2: 1, 4: 0.5" in drawing.description
    root = ElementTree.fromstring(drawing.svg)
    assert root.get("role") == "img" and root.get("aria-label") == "Message & title"
    assert re.fullmatch(r"\d+", root.get("width") or "") and "<metadata" not in drawing.svg


def test_bars_have_a_name_and_a_number_each() -> None:
    drawing = show.bars({"dp": 1200, "tp": 3.5}, title="Bytes", along="kB in a step", level={"limit": 900})
    assert {"dp", "tp", "1,200", "3.5", "kB in a step", "limit"} <= set(texts(drawing.svg))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: show.lines([1, 2], {"a": [1]}, title="", across="", up=""), "1 values for 2 places"),
        (lambda: show.bars({}, title="", along=""), "nothing to draw"),
        (lambda: show.table([], ""), "at least one row"),
        (lambda: show.table([{"a": 1}, {"b": 1}], ""), "the same keys"),
        (lambda: show.steps([]), "at least one"),
        (lambda: show.collective("all_sum"), "choose from broadcast"),
        (lambda: show.collective("all_reduce", 9), "room for 2 to 8"),
        (lambda: show.ring([[[1, 2]], [[1, 2]]]), r"history\[rank\]\[step\]\[piece\]"),
        (lambda: show.messages({"rank 0": ([], [])}), "no spans"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_a_line(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as told:
        call()
    assert "\n" not in str(told.value)


def test_a_table_is_as_good_in_plain_text() -> None:
    rows = [{"cut": "dp", "bytes": 12345, "share": 0.51234}, {"cut": "<tp>", "bytes": 7, "share": 1.0}]
    table = show.table(rows, "T")
    assert repr(table).splitlines() == ["T", "cut    bytes  share", "dp    12,345  0.512", "<tp>       7      1"]
    assert "&lt;tp&gt;" in table._repr_html_() and 'text-align:right">12,345' in table._repr_html_()


# Collectives.


def ring(values: list[list[float]]) -> list[list[list[float]]]:
    """What a ring does, by one process: an independent statement of it."""
    n = len(values)
    held = [list(row) for row in values]
    history = [[list(row)] for row in held]
    for step in range(2 * (n - 1)):
        before = [list(row) for row in held]
        for rank in range(n):
            left = (rank - 1) % n
            piece = (left - step) % n if step < n - 1 else (left + 1 - (step - n + 1)) % n
            held[rank][piece] = before[left][piece] + (before[rank][piece] if step < n - 1 else 0)
        for rank in range(n):
            history[rank].append(list(held[rank]))
    return history


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_ring_is_drawn_step_by_step_and_ends_with_the_sum_everywhere(ranks: int) -> None:
    values = [[float(10**rank * (piece + 1)) for piece in range(ranks)] for rank in range(ranks)]
    drawing = show.ring(ring(values))
    total = [sum(row[piece] for row in values) for piece in range(ranks)]
    last = drawing.svg
    shown = [text for text in texts(last) if re.fullmatch(r"[\d,]+", text)]
    assert shown == [f"{value:,.0f}" for _ in range(ranks) for value in total]
    assert drawing.html.count("<figure>") == 2 * (ranks - 1) + 1
    assert all(last.count(f'fill="{colour}"') >= ranks * ranks for colour in RANKS[:ranks])  # each cell has all colours


@pytest.mark.parametrize("op", ["broadcast", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_a_collective_says_who_ends_with_what(op: str) -> None:
    drawing = show.collective(op, 3)
    assert drawing.title.startswith(f"{op}: ") and drawing.description.count("ends with") == 3
    if op == "reduce_scatter":
        assert "Rank 2 ends with pieces 2: sums of all ranks." in drawing.description


# Messages.


def message(launched: float, finished: float, waited: float, tag: str = "dp.grad bucket 0") -> Message:
    return Message("all_reduce", "dp", tag, 1000, launched, None, waited, finished)


def test_messages_lie_below_their_work_and_what_was_waited_for_is_dark() -> None:
    spans = [Span(0, 10.0, 11.0, Kind.FORWARD, 0, 0), Span(0, 11.0, 13.0, Kind.BACKWARD, 0, 0)]
    sent = [message(11.5, 13.5, 0.5), message(12.0, 13.0, 0.0, "dp.grad bucket 1")]
    drawing = show.messages({"rank 0": (spans, [*sent, Message("all_reduce", "world", "", 8, 10.0)])})
    assert drawing.title == "2 messages, on their way for 3 s; waited for 500 ms"
    assert "grad bucket 0, 1 kB, from 1.5 s to 3.5 s, waited for 500 ms" in drawing.description
    assert {"grad bucket 0", "grad bucket 1", "rank 0"} <= set(texts(drawing.svg))
    assert show.messages({"r": (spans, sent)}, groups=["tp"]).title == "No messages in this step"
