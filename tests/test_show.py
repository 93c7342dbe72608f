"""Drawings: read back from their SVG, and held against the timelines that they show."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape
from itertools import combinations, pairwise
from pathlib import Path
from textwrap import dedent
from time import process_time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipar import ledger, show
from minipar.facts import Footprint, Kind, Span, Timeline, Traffic, Volume
from minipar.mesh import plan
from minipar.schedule import Schedule, by_name, gpipe, interleaved, naive, one_f_one_b, zb_h1
from minipar.show import animation, lanes, matrices, palette, reading, terminal, units, widgets
from minipar.show.drawing import Drawing
from minipar.show.svg import TIMES, text_width
from minipar.show.timelines import LEFT, RIGHT
from minipar.simulate import simulate

SVG = "{http://www.w3.org/2000/svg}"
SCHEDULES = [
    naive(3, 3),
    gpipe(4, 8),
    one_f_one_b(1, 1),
    one_f_one_b(4, 8),
    zb_h1(4, 8),
    interleaved(4, 8, 2),
    interleaved(2, 4, 4),
    gpipe(8, 32),
    zb_h1(16, 64),
]
names = lambda schedule: f"{schedule.name}-{schedule.ranks}x{schedule.micro_batches}"


def parsed(drawing: Drawing) -> ET.Element:
    return ET.fromstring(drawing.svg)


def size(root: ET.Element) -> tuple[float, float]:
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    return width, height


def rects(root: ET.Element, group: str = "") -> list[dict[str, float]]:
    """The rectangles of the groups with this class, or all; without the paper."""
    where = [g for g in root.iter(f"{SVG}g") if g.get("class") == group] if group else [root]
    found = [rect for place in where for rect in place.iter(f"{SVG}rect") if "x" in rect.attrib]
    return [{key: float(rect.attrib[key]) for key in ("x", "y", "width", "height")} for rect in found]


def texts(root: ET.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def assert_inside(drawing: Drawing) -> None:
    """Every shape and every text lies on the paper. (`test_show_browser.py` measures the texts.)"""
    root = parsed(drawing)
    width, height = size(root)
    for rect in rects(root):
        assert rect["x"] >= -0.1 and rect["x"] + rect["width"] <= width + 0.1, rect
        assert rect["y"] >= -0.1 and rect["y"] + rect["height"] <= height + 0.1, rect
    for line in root.iter(f"{SVG}line"):
        assert all(-0.1 <= float(line.attrib[key]) <= width + 0.1 for key in ("x1", "x2"))
        assert all(-0.1 <= float(line.attrib[key]) <= height + 0.1 for key in ("y1", "y2"))
    for text in root.iter(f"{SVG}text"):
        if "transform" in text.attrib or text.get("text-anchor", "start") != "start":
            continue
        end = float(text.attrib["x"]) + 0.9 * text_width(text.text or "", float(text.attrib["font-size"]))
        assert end <= width, text.text
        assert 0 < float(text.attrib["y"]) <= height


def jittered(schedule: Schedule) -> Timeline:
    """As if it were measured: on another clock, and never quite as expected."""
    cost = lambda kind: lambda stage, micro_batch: 0.01 * (1 + 0.02 * ((7 * stage + 3 * micro_batch + kind) % 9))
    seen = simulate(schedule, cost(0), cost(1), cost(2), send=0.001)
    return Timeline(tuple(replace(s, start=s.start + 99.5, end=s.end + 99.5) for s in seen.spans), seen.ranks)


# One timeline.


@pytest.mark.parametrize("schedule", SCHEDULES, ids=names)
def test_every_action_is_a_box_of_its_length_in_its_lane(schedule: Schedule) -> None:
    timeline = simulate(schedule, 1.0, 1.5, 0.75)
    drawing = show.timeline(timeline)
    root = parsed(drawing)
    assert_inside(drawing)
    width = size(root)[0]
    per_second = (width - LEFT - RIGHT) / timeline.duration
    lane_of: dict[int, float] = {}
    for kind, group in ((Kind.FORWARD, "forward"), (Kind.BACKWARD, "backward"), (Kind.WEIGHT, "weight")):
        spans = [span for span in timeline.spans if span.kind is kind]
        boxes = rects(root, group)
        assert len(boxes) == len(spans)
        for span, box in zip(spans, boxes, strict=True):
            assert box["x"] == pytest.approx(LEFT + span.start * per_second, abs=0.06)
            assert box["width"] == pytest.approx(span.seconds * per_second, abs=1.1)
            assert lane_of.setdefault(span.rank, box["y"]) == box["y"]
    assert [y for _, y in sorted(lane_of.items())] == sorted(lane_of.values())
    assert len(set(lane_of.values())) == timeline.ranks


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s.micro_batches <= 8], ids=names)
def test_the_hatched_area_is_the_bubble(schedule: Schedule) -> None:
    timeline = simulate(schedule)
    root = parsed(show.timeline(timeline))
    per_second = (size(root)[0] - LEFT - RIGHT) / timeline.duration
    hatched = sum(rect["width"] for rect in rects(root, "idle")) / per_second
    assert hatched / timeline.busy == pytest.approx(timeline.bubble, abs=0.01)


def test_the_title_states_the_message() -> None:
    assert show.timeline(one_f_one_b(4, 8)).title == "1F1B, 4 stages, 8 micro-batches: idle 37.5 % of busy time"
    assert show.timeline(zb_h1(4, 8)).title == "ZB-H1, 4 stages, 8 micro-batches: idle 12.5 % of busy time"
    two = show.timeline(interleaved(4, 8, 2)).title
    assert two == "Interleaved 1F1B, 4 ranks of 2 stages, 8 micro-batches: idle 18.8 % of busy time"
    assert show.timeline(simulate(one_f_one_b(1, 1))).title == "1 stage, 1 micro-batch: idle 0 % of busy time"
    assert show.timeline(one_f_one_b(2, 2), title="Mine").title == "Mine"


@settings(max_examples=40, deadline=None)
@given(
    stages=st.integers(1, 6),
    micro_batches=st.integers(1, 9),
    name=st.sampled_from(["naive", "gpipe", "1f1b", "zb-h1"]),
    costs=st.tuples(*[st.floats(0.001, 50)] * 3),
    send=st.floats(0, 5),
)
def test_numbers_in_words_are_those_of_the_timeline(
    stages: int, micro_batches: int, name: str, costs: tuple[float, float, float], send: float
) -> None:
    timeline = simulate(by_name(name, stages, micro_batches), *costs, send)
    drawing = show.timeline(timeline, name)
    assert_inside(drawing)
    said = re.search(r"idle ([\d.]+) % of busy time", drawing.title)
    assert said and float(said[1]) == pytest.approx(100 * timeline.bubble, abs=0.051)
    held = re.search(r"for backward, from rank 0: ([\d, ]+) micro-batches", drawing.description)
    assert held and list(map(int, held[1].split(", "))) == timeline.peak_activations()


def test_the_picture_says_itself_in_words() -> None:
    for drawing in all_kinds():
        root = parsed(drawing)
        assert root.get("role") == "img"
        assert root.get("aria-label") == drawing.title == root.findtext(f"{SVG}title")
        assert root.findtext(f"{SVG}desc") == drawing.description
        assert len(drawing.description) > 60
        assert repr(drawing) == f"{drawing.title}\n{drawing.description}"


def all_kinds() -> list[Drawing]:
    bars = {f"ZeRO {zero}": ledger.model_state_bytes(7e9, dp=8, zero=zero) for zero in range(4)}
    return [
        show.timeline(one_f_one_b(4, 8)),
        show.timeline(jittered(zb_h1(3, 4)), activation_bytes=1e6),
        show.compare([gpipe(4, 8), one_f_one_b(4, 8), zb_h1(4, 8)]),
        show.compare([gpipe(3, 4), interleaved(2, 4, 2)], memory=True),
        show.overlay(jittered(one_f_one_b(4, 8)), simulate(one_f_one_b(4, 8), 0.01, 0.01, 0.01)),
        show.animate(one_f_one_b(3, 4), send=0.5),
        show.mesh(plan(2, 2, 2)),
        show.mesh(plan(4, 16, 8), Traffic({("tp", "all_reduce"): Volume(8, 10**7)})),
        show.memory(bars, limit_bytes=80e9),
        show.columns(),
        show.rows(),
        show.heads(),
    ]


def test_pictures_stand_alone_and_side_by_side() -> None:
    """No ids, references or sources from elsewhere: so they cannot disturb each other on a page."""
    for drawing in all_kinds():
        text = drawing.svg.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r'http|url\(|\bid="|href|<script|<style|@import', text)
        assert "nan" not in text and "inf" not in re.sub(r"[a-z]*inf[a-z]+", "", text)
        assert_inside(drawing)


def test_numbers_stand_in_boxes_while_there_is_room() -> None:
    of_boxes = lambda drawing: [
        text.text
        for group in parsed(drawing).iter(f"{SVG}g")
        if group.get("class") == "number"
        for text in group.iter(f"{SVG}text")
    ]
    assert sorted(of_boxes(show.timeline(one_f_one_b(2, 3)))) == sorted(str(m) for m in range(3)) * 0 + sorted(
        "012" * 4
    )
    assert len(of_boxes(show.timeline(gpipe(8, 32)))) == 8 * 32 * 2
    long = one_f_one_b(8, 200)
    assert len(of_boxes(show.timeline(long))) < 2 * 8 * 200
    for drawing in (show.timeline(gpipe(8, 32)), show.timeline(long)):
        fonts = [float(t.get("font-size", 99)) for t in parsed(drawing).iter(f"{SVG}text")]
        assert min(fonts) >= 7


def test_two_chunks_of_a_rank_are_told_apart() -> None:
    root = parsed(show.timeline(interleaved(2, 4, 2)))
    forward = next(g for g in root.iter(f"{SVG}g") if g.get("class") == "forward")
    assert {rect.get("fill") for rect in forward} == {palette.fill(Kind.FORWARD), palette.fill(Kind.FORWARD, 1, 2)}
    lines = [path for path in root.iter(f"{SVG}path") if path.get("class") == "chunks"]
    assert sum(path.attrib["d"].count("M") for path in lines) == 2 * 2 * 4  # ranks, kinds, micro-batches
    assert "stages 0, 2" in texts(root)


def test_phases_of_1f1b_are_marked_and_those_of_others_are_not() -> None:
    first, *_, last = reading.phases(simulate(one_f_one_b(4, 8))) or []
    assert first == reading.Phases(begin=0, steady=3, cooling=24, end=33)
    assert last == reading.Phases(begin=3, steady=3, cooling=27, end=27)
    assert {"warm-up", "steady", "cool-down"} <= set(texts(parsed(show.timeline(one_f_one_b(4, 8)))))
    assert reading.phases(simulate(zb_h1(4, 8))) and reading.phases(simulate(interleaved(4, 8, 2)))
    for other in (gpipe(4, 8), naive(4, 8), one_f_one_b(1, 8), gpipe(4, 1)):
        assert reading.phases(simulate(other)) is None
        assert "steady" not in texts(parsed(show.timeline(other)))


def test_memory_is_drawn_in_micro_batches_or_in_bytes() -> None:
    counted = texts(parsed(show.timeline(one_f_one_b(4, 8))))
    assert "Held for backward: micro-batches" in counted
    place = counted.index("peak")
    assert [counted[place + 2 * rank + 2] for rank in range(4)] == ["4", "3", "2", "1"]
    weighed = texts(parsed(show.timeline(one_f_one_b(4, 8), activation_bytes=2.5e6)))
    assert "Held for backward: bytes of activations" in weighed and "10 MB" in weighed
    assert "peak" not in texts(parsed(show.timeline(one_f_one_b(4, 8), memory=False)))


def test_a_measured_timeline_is_drawn_from_second_0_in_its_own_unit() -> None:
    timeline = jittered(one_f_one_b(4, 8))
    drawing = show.timeline(timeline)
    assert "time in milliseconds" in texts(parsed(drawing))
    assert min(rect["x"] for rect in rects(parsed(drawing), "forward")) == LEFT
    assert units.time(timeline.duration) in drawing.description


def test_what_cannot_be_drawn_is_refused_in_one_line() -> None:
    nothing = Timeline((), 2)
    still = Timeline((Span(0, 1.0, 1.0, Kind.FORWARD, 0, 0),), 1)
    many = simulate(gpipe(40, 300))
    asked: list[Any] = [
        (lambda: show.timeline(nothing), "nothing to draw"),
        (lambda: show.timeline(still), "nothing to draw"),
        (lambda: show.timeline(many), "24,000 actions"),
        (lambda: show.compare([]), "at least one"),
        (lambda: show.compare([gpipe(2, 2)], titles=["a", "b"]), "2 titles"),
        (lambda: show.overlay(simulate(gpipe(2, 2)), simulate(gpipe(3, 2))), "2 ranks, predicted for 3"),
        (lambda: show.report_picture([]), "0 timelines"),
        (lambda: show.mesh(plan(2, 2, 2), ranks_per_node=0), "at least one rank"),
        (lambda: show.mesh(plan(tp=32)), "tp up to 16"),
        (lambda: show.memory([]), "nothing to draw"),
        (lambda: show.memory(["?"]), "no memory"),
        (lambda: show.memory([Footprint(1)], [Footprint(1)] * 2), "1 entries, 2 predictions"),
        (lambda: show.columns(ranks=3), "choose ranks from 1, 2, 4"),
        (lambda: show.rows([[1, 2], [3]], [[1, 2]]), "no matrix"),
        (lambda: show.columns([[1] * 40] * 2, [[1, 2]]), "room for 12"),
        (lambda: show.heads(heads=3), "choose heads from 1, 2, 4"),
        (lambda: show.columns([[1, 2]], [[1, 2]]), "must be as many"),
        (lambda: show.columns(ranks=0), "room for 1 to 8"),
    ]
    for draw, why in asked:
        with pytest.raises(ValueError, match=re.escape(why)) as error:
            draw()
        assert "\n" not in str(error.value)


# Colours.

# Machado, Oliveira and Fernandes 2009: what is left of linear red, green and blue when one kind of cone is missing.
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    "none": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
}


def lab(colour: str, blindness: str) -> np.ndarray[Any, Any]:
    """CIE L*a*b* of a colour as it is seen."""
    values = np.array(palette.channels(colour))
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(BLINDNESS[blindness]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = to_xyz @ seen / np.array([0.9505, 1, 1.089])
    f = lambda t: t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
    return np.array([116 * f(y) - 16, 500 * (f(x) - f(y)), 200 * (f(y) - f(z))])


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_kinds_differ_in_greyscale(chunks: int) -> None:
    """Lightness, of 100, is 15 apart between any two kinds and idle time; 7 at least where chunks have shades, too."""
    shades = {kind: [palette.fill(kind, c, chunks) for c in range(chunks)] for kind in Kind}
    for one, other in combinations([*shades.values(), [palette.IDLE]], 2):
        for a in one:
            for b in other:
                assert abs(palette.lightness(a) - palette.lightness(b)) >= (15 if chunks == 1 else 7)


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_kinds_and_accounts_differ_for_every_eye(blindness: str) -> None:
    for colours in ([*palette.FILL.values(), palette.IDLE], list(palette.ACCOUNTS.values()), list(palette.RANKS[:4])):
        for one, other in combinations(colours, 2):
            assert np.linalg.norm(lab(one, blindness) - lab(other, blindness)) > 18, (one, other)


def test_text_is_read_on_every_ground() -> None:
    grounds = [palette.fill(kind, c, 4) for kind in Kind for c in range(4)]
    for ground in [*grounds, *palette.ACCOUNTS.values(), *palette.RANKS]:
        assert palette.contrast(palette.ink_on(ground), ground) >= 4.5, ground
    for ink in (palette.INK, palette.MUTED):
        for ground in (palette.PAPER, palette.IDLE, "#eceef1"):
            assert palette.contrast(ink, ground) >= 4.5


def test_lightness_is_that_of_the_standard() -> None:
    assert palette.lightness("#ffffff") == pytest.approx(100)
    assert palette.lightness("#000000") == 0
    assert palette.lightness("#777777") == pytest.approx(lab("#777777", "none")[0], abs=0.01)
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21)


def test_no_kind_relies_on_colour_alone() -> None:
    root = parsed(show.timeline(zb_h1(4, 8)))
    stripes = next(path for path in root.iter(f"{SVG}path") if path.get("class") == "stripes")
    assert stripes.attrib["d"].count("M") > 2 * 4 * 8  # in every weight gradient
    idle = next(g for g in root.iter(f"{SVG}g") if g.get("class") == "idle")
    assert len(list(idle.iter(f"{SVG}path"))) == 1  # hatched


# Several timelines.


def test_compared_timelines_have_one_time_axis() -> None:
    drawing = show.compare([simulate(gpipe(4, 8)), simulate(zb_h1(4, 8))], titles=["GPipe", "ZB-H1"])
    root = parsed(drawing)
    assert_inside(drawing)
    assert drawing.title == "ZB-H1 takes 27 s, GPipe 33 s: 18.2 % less"
    per_second = (size(root)[0] - LEFT - RIGHT) / 33
    boxes = rects(root, "forward")
    assert {round(box["width"] / per_second, 1) for box in boxes} <= {0.9, 1.0}
    ends = [max(rect["x"] + rect["width"] for rect in rects(root, group)) for group in ("backward", "weight")]
    assert ends[0] == pytest.approx(LEFT + 33 * per_second, abs=2)
    assert ends[1] == pytest.approx(LEFT + 27 * per_second, abs=2)


def test_equal_times_are_compared_by_memory() -> None:
    drawing = show.compare([gpipe(4, 8), one_f_one_b(4, 8)])
    assert drawing.title == "GPipe and 1F1B take the same 33 s, but hold up to 8 and 4 micro-batches"
    assert show.compare([gpipe(1, 2), gpipe(1, 2)], ["a", "b"]).title == "a and b take the same 6 s"


def test_measured_over_predicted_writes_the_difference() -> None:
    predicted = simulate(one_f_one_b(4, 8), 0.01, 0.01, 0.01)
    measured = jittered(one_f_one_b(4, 8))
    drawing = show.overlay(measured, predicted, "1F1B")
    assert_inside(drawing)
    said = re.search(r"measured ([\d.]+) ms, predicted ([\d.]+) ms \(([+-][\d.]+) %\)", drawing.title)
    assert said
    assert float(said[1]) == pytest.approx(1000 * measured.duration, rel=5e-3)
    assert float(said[2]) == pytest.approx(330)
    assert float(said[3]) == pytest.approx(100 * (measured.duration / predicted.duration - 1), abs=0.06)
    assert f"idle / busy {units.share(measured.bubble)} against 37.5 %" in drawing.title
    heights = {box["height"] for box in rects(parsed(drawing), "forward")}
    assert len(heights) == 2 and len(rects(parsed(drawing), "forward")) == 2 * 4 * 8


def test_the_picture_of_a_report_is_the_measured_timeline_over_the_predicted() -> None:
    measured, predicted = jittered(gpipe(2, 4)), simulate(gpipe(2, 4), 0.01, 0.01, 0.01)
    assert show.report_picture([measured, predicted], "GPipe").svg == show.overlay(measured, predicted, "GPipe").svg
    assert show.report_picture([measured], "Step 9").title.startswith("Step 9: 2 stages, 4 micro-batches: idle ")


# Text.


def test_the_terminal_shows_1f1b() -> None:
    assert show.text(simulate(one_f_one_b(4, 8)), "1F1B") == (
        "1F1B, 4 stages, 8 micro-batches: idle 37.5 % of busy time\n"
        "rank 0  F0F1F2F3............B0--F4B1--F5B2--F6B3--F7B4--..B5--..B6--..B7--\n"
        "rank 1  ..F0F1F2........B0--F3B1--F4B2--F5B3--F6B4--F7B5--..B6--..B7--....\n"
        "rank 2  ....F0F1....B0--F2B1--F3B2--F4B3--F5B4--F6B5--F7B6--..B7--........\n"
        "rank 3  ......F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--............\n"
        "\n"
        "step    33 s; a column is 0.5 s; . is idle\n"
        "bubble  idle 37.5 % of busy time\n"
        "held    at most 4 micro-batches (by rank 4, 3, 2, 1)"
    )


def test_the_picture_in_the_docstring_is_drawn_by_the_code() -> None:
    assert dedent(terminal.__doc__.split("\n\n")[1]) == show.text(simulate(one_f_one_b(3, 4)), "1F1B").split("\n\n")[0]


def test_a_long_timeline_is_folded_and_a_very_long_one_coarser_and_both_say_so() -> None:
    folded = show.text(simulate(gpipe(8, 32)))
    assert "folded into 5 parts" in folded and folded.count("rank 0") == 5
    assert "F31" in folded and "B31" in folded
    coarse = show.text(simulate(one_f_one_b(16, 128)))
    assert "too long for numbers: a column is 6.04 s and shows what filled" in coarse
    assert coarse.count("rank 0") == 1 and "F1" not in coarse


@settings(max_examples=60, deadline=None)
@given(
    stages=st.integers(1, 12),
    rounds=st.integers(1, 6),
    name=st.sampled_from(["naive", "gpipe", "1f1b", "zb-h1", "interleaved"]),
    costs=st.tuples(*[st.floats(0.01, 9)] * 3),
    columns=st.integers(40, 160),
)
def test_text_fits_its_columns_and_shows_every_action(
    stages: int, rounds: int, name: str, costs: tuple[float, float, float], columns: int
) -> None:
    chunks = 2 if name == "interleaved" else 1
    schedule = by_name(name, stages, stages * rounds, chunks)
    timeline = simulate(schedule, *costs)
    drawn = show.text(timeline, name, columns)
    assert max(map(len, drawn.split("\n"))) <= columns
    chart = terminal.chart(timeline, columns)
    for rank in range(stages):
        row = [cell for fold in chart.folds for cell in fold[rank]]
        kinds = [span.kind for span in timeline.by_rank(rank)]
        if "too long" not in chart.scale and len(chart.folds) == 1:
            assert [cell.kind for cell in row if cell.kind] == kinds
    assert len({sum(len(cell.text) for cell in row) for fold in chart.folds[:1] for row in fold}) == 1


def test_dots_in_the_text_are_the_bubble_where_times_are_whole() -> None:
    for schedule in (gpipe(4, 8), one_f_one_b(4, 8), zb_h1(4, 8), naive(2, 3)):
        timeline = simulate(schedule)
        rows = "".join(cell.text for fold in terminal.chart(timeline).folds for row in fold for cell in row)
        assert rows.count(".") / (len(rows) - rows.count(".")) == pytest.approx(timeline.bubble)


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (33.0, "33"), (37.5, "37.5"), (0.125, "0.125"), (1234.4, "1,234"), (0.0999, "0.0999"), (9.999, "10"),
     (99.96, "100"), (1e-7, "0"), (100, "100"), (2.0, "2"), (-1.5, "-1.5")],
)  # fmt: skip
def test_numbers_have_three_figures(value: float, said: str) -> None:
    assert units.plain(value) == said


def test_units_fit_their_numbers() -> None:
    assert [units.time(s) for s in (33, 0.459, 0.0123, 2e-6)] == ["33 s", "459 ms", "12.3 ms", "2 µs"]
    assert [units.size(b) for b in (0, 999, 1000, 14e9, 1.4e13)] == ["0 B", "999 B", "1 kB", "14 GB", "14 TB"]
    assert units.share(0.375) == "37.5 %" and units.share(0.25) == "25 %"


# Animation.


def test_an_animation_needs_nothing_but_itself() -> None:
    animated = show.animate(one_f_one_b(4, 8), send=0.5)
    html = animated.html
    assert animated._repr_html_() == html
    assert not re.search(r"\bsrc=|<link|@import|fetch\(|import\(|XMLHttp", html)
    assert set(re.findall(r"https?://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg"}
    for control in (
        '<button type="button">',
        'type="range"',
        'aria-label="Moment of the step"',
        "prefers-reduced-motion",
    ):
        assert control in html
    assert html.count("<svg") == 1 and "IntersectionObserver" in html


def player_data(animated: animation.Animation) -> dict[str, Any]:
    found = re.search(r'data-step="([^"]*)"', animated.html)
    assert found
    return json.loads(unescape(found[1]))


def test_an_animation_plays_the_timeline_and_its_messages() -> None:
    schedule = one_f_one_b(3, 4)
    timeline = simulate(schedule, send=0.5)
    data = player_data(show.animate(schedule, send=0.5))
    assert data["seconds"] == timeline.duration and data["autoplay"] is True
    assert [[what for *_, what in row] for row in data["rows"]] == [[str(a) for a in row] for row in schedule.actions]
    assert len(data["messages"]) == 2 * 2 * 4  # both ways over two borders
    for sent, arrived, source, to in data["messages"]:
        assert arrived == pytest.approx(sent + 0.5) and source != to
    assert player_data(show.animate(schedule))["messages"] == []
    assert player_data(show.animate(timeline, send=0.5)) == data
    assert player_data(show.animate(schedule, autoplay=False))["autoplay"] is False


def test_chunks_share_the_cost_of_their_rank() -> None:
    assert (
        player_data(show.animate(interleaved(2, 4, 2)))["seconds"]
        == simulate(interleaved(2, 4, 2), 0.5, 0.5, 0.5).duration
    )


# The explorer.


@pytest.fixture
def explorer() -> Any:
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
    widgets.drawn.cache_clear()
    return show.explorer(stages=4, micro_batches=8)


def controls(explorer: Any) -> dict[str, Any]:
    return {control.description: control for control in explorer.children[0].children}


def test_the_explorer_replaces_its_one_picture(explorer: Any) -> None:
    picture = explorer.children[1]
    assert "idle 37.5 % of busy time" in picture.value and picture.value.count("<svg") == 1
    controls(explorer)["micro-batches"].value = 24
    assert "1F1B, 4 stages, 24 micro-batches: idle 12.5 % of busy time" in picture.value
    assert picture.value.count("<svg") == 1 and len(explorer.children) == 2 and explorer.children[1] is picture
    controls(explorer)["schedule"].value = "zb-h1"
    controls(explorer)["micro-batches"].value = 8
    assert "ZB-H1, 4 stages, 8 micro-batches: idle 12.5 % of busy time" in picture.value


def test_the_explorer_says_in_place_what_cannot_be(explorer: Any) -> None:
    picture = explorer.children[1]
    controls(explorer)["schedule"].value = "interleaved"
    assert "idle 18.8 %" in picture.value
    for micro_batches in (9, 10, 11):
        controls(explorer)["micro-batches"].value = micro_batches
        assert f"interleaved: {micro_batches} micro-batches do not fill rounds of 4 ranks" in picture.value
        assert picture.value.count('role="alert"') == 1 and picture.value.count("<svg") == 1
        assert ET.fromstring(picture.value) is not None
    controls(explorer)["micro-batches"].value = 12
    assert "alert" not in picture.value and "12 micro-batches" in picture.value


def test_the_explorer_offers_chunks_to_interleaved_only(explorer: Any) -> None:
    assert controls(explorer)["chunks"].disabled
    controls(explorer)["schedule"].value = "interleaved"
    assert not controls(explorer)["chunks"].disabled


def test_the_ratio_is_that_of_the_whole_backward_to_the_forward(explorer: Any) -> None:
    controls(explorer)["backward : forward"].value = 3
    order = one_f_one_b(4, 8)
    assert units.time(simulate(order, 1, 1.5, 1.5).duration) in explorer.children[1].value


def test_the_explorer_without_ipywidgets_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match="pip install ipywidgets"):
        show.explorer()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_redrawing_8_stages_and_32_micro_batches_takes_less_than_60_milliseconds(name: str) -> None:
    taken = []
    for _ in range(7):
        widgets.drawn.cache_clear()
        start = process_time()
        widgets.drawn(widgets.Choice(name, 8, 32))
        taken.append(process_time() - start)
    assert min(taken) < 0.06


# Meshes.


def test_the_mesh_shows_ranks_groups_and_nodes() -> None:
    drawing = show.mesh(plan(pp=2, dp=2, tp=2), ranks_per_node=4)
    said = texts(parsed(drawing))
    assert [f"rank {rank}" in said for rank in range(8)] == [True] * 8
    assert {"node 0", "node 1", "stage 0", "stage 1", "replica 0", "replica 1"} <= set(said)
    assert (
        drawing.title.replace(TIMES, "x") == "8 ranks = 2 replicas x 2 stages x 2 slices: tp and pp stay inside a node"
    )
    assert "data parallel (dp), across nodes. 4 groups of ranks 0,4 | 1,5 | 2,6 | 3,7." in drawing.description
    assert "8 ranks on 2 nodes of 4." in drawing.description


def test_links_carry_the_bytes_of_the_traffic() -> None:
    traffic = Traffic({("tp", "all_reduce"): Volume(48, 3_100_000), ("dp", "all_reduce"): Volume(3, 1_640_000)})
    rows = [
        {"group": group, "op": op, "calls_per_step": volume.calls, "bytes_per_step": volume.bytes}
        for (group, op), volume in traffic.volumes.items()
    ]
    drawing = show.mesh(plan(2, 2, 2), traffic)
    assert "65.4 % of the bytes are tensor parallel, inside a node" in drawing.title
    assert "A rank's step: all_reduce 3.1 MB in 48 calls." in drawing.description
    assert show.mesh(plan(2, 2, 2), rows).svg == drawing.svg
    width = {
        group.get("class"): max(
            float(shape.attrib["stroke-width"]) for shape in group if "stroke-width" in shape.attrib
        )
        for group in parsed(drawing).iter(f"{SVG}g")
    }
    assert width["tp"] > width["dp"] > width["pp"]


@settings(max_examples=30, deadline=None)
@given(pp=st.integers(1, 9), dp=st.integers(1, 20), tp=st.integers(1, 16), node=st.integers(1, 16))
def test_meshes_of_all_shapes_fit_their_paper(pp: int, dp: int, tp: int, node: int) -> None:
    mesh = plan(pp, dp, tp)
    drawing = show.mesh(mesh, ranks_per_node=node)
    assert_inside(drawing)
    boxes = [r for r in parsed(drawing).iter(f"{SVG}rect") if r.get("stroke")]
    shown = len(boxes)
    assert shown == mesh.size or f"ranks {shown} to {mesh.size - 1}) lie the same way" in drawing.svg
    places = sorted((float(r.attrib["y"]), float(r.attrib["x"]), float(r.attrib["width"])) for r in boxes)
    assert all(a[0] != b[0] or a[1] + a[2] <= b[1] for a, b in pairwise(places))


# Memory.


def test_zero_stages_are_seen_side_by_side() -> None:
    states = {f"ZeRO {zero}": ledger.model_state_bytes(7e9, dp=8, zero=zero) for zero in range(4)}
    drawing = show.memory(states)
    assert drawing.title == "ZeRO 0 needs 112 GB a rank, ZeRO 3 14 GB"
    said = texts(parsed(drawing))
    assert [name in said for name in states] == [True] * 4
    assert ["112 GB" in said, "38.5 GB" in said, "26.2 GB" in said, "14 GB" in said] == [True] * 4
    over = show.memory(states, limit_bytes=80e9)
    assert "more than the 80 GB of a rank" in over.title and "limit 80 GB" in texts(parsed(over))


def test_predicted_memory_lies_beside_the_measured() -> None:
    row = {"parameters": 100, "gradients": 100, "optimizer": 200, "activations_peak": 600}
    rows = [{"rank": rank, **row, "predicted": {**row, "activations_peak": 500}} for rank in range(2)]
    drawing = show.memory(rows)
    assert (
        "rank 1: parameters 100 B, gradients 100 B, optimizer 200 B and activations 600 B, together 1 kB"
        in drawing.description
    )
    assert "predicted 900 B" in texts(parsed(drawing))
    footprints = [Footprint(100, 100, 200, 600)] * 2
    assert "predicted" not in show.memory(footprints).description
    same = show.memory(footprints, [Footprint(100, 100, 200, 500)] * 2)
    assert "predicted 900 B" in texts(parsed(same))
    groups = show.memory({"before": footprints, "after": footprints})
    assert texts(parsed(groups)).count("rank 0") == 2


def test_many_ranks_that_hold_the_same_are_one_bar() -> None:
    drawing = show.memory([Footprint(100)] * 20 + [Footprint(200)] * 20)
    assert {"rank 0 to 19", "rank 20 to 39"} <= set(texts(parsed(drawing)))


# Cuts.


def drawn_matrices(drawing: Drawing) -> list[float]:
    """The numbers in the cells, in the order of drawing."""
    return [float(text) for text in texts(parsed(drawing)) if re.fullmatch(r"-?[\d.]+", text)]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.sampled_from([1, 2, 4]), rows=st.integers(1, 3))
def test_the_pieces_of_a_cut_make_the_whole(seed: int, ranks: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    x, w = random.integers(-3, 4, (rows, 4)), random.integers(-3, 4, (4, 4))
    for cut in (show.columns, show.rows):
        drawing = cut(w.tolist(), x.tolist(), ranks)
        assert_inside(drawing)
        numbers = drawn_matrices(drawing)
        assert numbers[-x.shape[0] * 4 :] == (x @ w).flatten().tolist()
        pieces = numbers[-x.shape[0] * 4 * (ranks + 1 if cut is show.rows else 2) : -x.shape[0] * 4]
        if cut is show.rows:
            assert np.array(pieces).reshape(ranks, rows, 4).sum(0).tolist() == (x @ w).tolist()
        else:
            blocks = np.array(pieces).reshape(ranks, rows, 4 // ranks)
            assert np.concatenate(list(blocks), axis=1).tolist() == (x @ w).tolist()


def test_heads_are_computed_as_torch_does() -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from minipar.show import cuts

    x, q, k, v = (torch.tensor(m, dtype=torch.float64) for m in (cuts.TOKENS, cuts.QUERIES, cuts.KEYS, cuts.VALUES))
    split = lambda m: (x @ m).reshape(3, 2, 2).transpose(0, 1)
    expected = scaled_dot_product_attention(split(q), split(k), split(v), is_causal=True).transpose(0, 1).reshape(3, 4)
    numbers = drawn_matrices(show.heads())[-12:]
    assert numbers == pytest.approx([round(value, 2) for value in expected.flatten().tolist()], abs=0.0051)


def test_plain_products_agree_with_numpy() -> None:
    a, b = [[1, -2.5], [0, 4], [3, 3]], [[2, 0, 1], [5, 1, -1]]
    assert matrices.multiply(a, b) == (np.array(a) @ np.array(b)).tolist()
    assert matrices.add(a, a) == (2 * np.array(a)).tolist()
    assert matrices.beside(a, a) == np.hstack([a, a]).tolist()
    with pytest.raises(ValueError, match="inner sizes"):
        matrices.multiply(a, a)


# Traces.


def message(op: str, group: str, start: float, end: float, peer: int | None = None, tag: str = "") -> SimpleNamespace:
    return SimpleNamespace(
        op=op, group=group, tag=tag, bytes=64, launched=start, finished=end, waited=0.0, peer=peer
    )  # fmt: skip


def a_trace() -> dict[str, Any]:
    spans = [[Span(0, 5.0, 5.1, Kind.FORWARD, 0, 0)], [Span(1, 5.2, 5.3, Kind.FORWARD, 1, 0)], [], []]
    messages = [
        [message("send", "pp", 5.1, 5.12, 1, "pp.F0 of stage 0"), message("all_reduce", "dp", 5.3, 5.6)],
        [message("recv", "pp", 5.05, 5.15, 0, "pp.F0 of stage 0")],
        [message("send", "pp", 5.0, 5.5, 1, "pp.F0 of stage 0"), message("send", "pp", 5.2, 5.4, 1, "other")],
        [message("recv", "pp", 5.1, 5.55, 0, "pp.F0 of stage 0"), message("recv", "pp", 5.2, 5.56, 0, "another")],
    ]
    return json.loads(show.trace_json(spans, messages, 5.0, groups={"pp": [[0, 1], [2, 3]]}))


def test_a_trace_has_a_process_for_each_rank_and_threads_with_names() -> None:
    events = a_trace()["traceEvents"]
    named = {(e["name"], e["pid"], e["args"].get("name")) for e in events if e["ph"] == "M"}
    assert {("process_name", rank, f"rank {rank}") for rank in range(4)} <= named
    assert ("thread_name", 0, "compute") in named and ("thread_name", 0, "dp messages") in named
    slices = [e for e in events if e["ph"] == "X"]
    first = next(e for e in slices if e["name"] == "F0" and e["pid"] == 0)
    assert (first["ts"], first["dur"], first["args"]["stage"]) == (0.0, 100_000.0, 0)
    sent = next(e for e in slices if e["args"].get("tag") == "pp.F0 of stage 0" and e["pid"] == 0)
    assert sent["args"]["bytes"] == 64 and sent["cat"] == "pp"
    assert all(isinstance(e["pid"], int) and e["tid"] > 0 for e in events)


def test_slices_of_a_thread_never_overlap() -> None:
    """Perfetto drops slices that overlap without being nested."""
    slices = [e for e in a_trace()["traceEvents"] if e["ph"] == "X"]
    threads = {(e["pid"], e["tid"]) for e in slices}
    assert len([t for t in threads if t[0] == 2]) == 2  # two messages under way at once
    for thread in threads:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == thread)
        assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(own))


def test_arrows_lead_from_a_send_to_its_receive() -> None:
    events = a_trace()["traceEvents"]
    starts, ends = ([e for e in events if e["ph"] == ph] for ph in "sf")
    assert [(s["pid"], f["pid"]) for s, f in zip(starts, ends, strict=True)] == [(0, 1), (2, 3)]
    for arrow in (*starts, *ends):
        around = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])]
        assert any(e["ts"] <= arrow["ts"] < e["ts"] + e["dur"] for e in around)
        assert arrow["bp"] == "e" and arrow["cat"] == "message"
    assert all(s["id"] == f["id"] and s["ts"] <= f["ts"] for s, f in zip(starts, ends, strict=True))


def test_touching_actions_still_touch_in_microseconds() -> None:
    spans = simulate(one_f_one_b(2, 20), 1 / 3, 1 / 7, 1 / 11).by_rank(0)
    events = json.loads(show.trace_json([spans], [[]]))["traceEvents"]
    slices = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(slices))


# Files.


def test_pictures_save_themselves(tmp_path: Path) -> None:
    drawing = show.timeline(one_f_one_b(4, 8))
    for ending in ("svg", "png", "html"):
        drawing.save(tmp_path / f"a.{ending}")
    assert ET.parse(tmp_path / "a.svg").getroot().tag == f"{SVG}svg"
    png = (tmp_path / "a.png").read_bytes()
    width, height = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and (width, height) == tuple(2 * round(v) for v in size(parsed(drawing)))
    html = (tmp_path / "a.html").read_text()
    assert html.startswith("<!DOCTYPE html>") and drawing.title in html and 'charset="utf-8"' in html
    show.animate(one_f_one_b(2, 2)).save(tmp_path / "b.html")
    assert "minipar-player" in (tmp_path / "b.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.png", "a.svg", "b.html"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = show.timeline(one_f_one_b(2, 2))
    with pytest.raises(ValueError, match=r"ends in \.svg or \.png or \.html"):
        drawing.save(tmp_path / "a.jpg")
    with pytest.raises(ValueError, match="cannot write"):
        drawing.save(tmp_path / "nowhere" / "a.svg")
    (tmp_path / "old.png").write_text("old")
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ValueError, match="pip install resvg-py"):
        drawing.save(tmp_path / "old.png")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_png_without_any_font_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import resvg_py

    blank = resvg_py.svg_to_bytes('<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>')
    monkeypatch.setattr(resvg_py, "svg_to_bytes", lambda *args, **more: blank)
    with pytest.raises(ValueError, match="needs a font"):
        show.timeline(one_f_one_b(2, 2)).to_png()


def test_drawing_needs_no_torch_and_no_plotting_library() -> None:
    code = (
        "import sys; from minipar import show; from minipar.schedule import one_f_one_b\n"
        "show.timeline(one_f_one_b(2, 2))\n"
        "print(sorted({'torch', 'matplotlib', 'ipywidgets', 'numpy', 'resvg_py'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_lanes_shrink_with_the_number_of_ranks() -> None:
    heights = [lanes.lane_height(ranks) for ranks in (1, 8, 16, 32, 64)]
    assert heights == sorted(heights, reverse=True) and heights[-1] >= 8
    assert_inside(show.timeline(one_f_one_b(64, 32)))
