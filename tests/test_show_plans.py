"""The pictures of the ledger: plans, rooflines, and the widgets over budgets and plans."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest

from minipar import catalogue, reasons, show
from minipar.architecture import Architecture
from minipar.catalogue import Gpu, Link
from minipar.layout import Cluster, Estimate, Job, Layout
from minipar.planner import Plan, choose
from minipar.show import accounts, palette, plans, rooflines, units
from minipar.show.drawing import Drawing
from minipar.show.svg import text_width

SVG = "{http://www.w3.org/2000/svg}"


def cluster(gpu: str = "h100", gpus: int = 64, per_node: int = 8) -> Cluster:
    kind = catalogue.gpu(gpu)
    return Cluster(kind, gpus, per_node, catalogue.link(kind.inside), catalogue.link(kind.outside))


def job(model: str = "llama2-70b", sequence: int = 4096, global_batch: int = 1024) -> Job:
    return Job(catalogue.model(model), sequence, global_batch)


FIRST = Estimate(
    Layout(8, 4, 2, zero=1, micro_batch=2, schedule="interleaved", chunks=3),
    {"computing": 20.0, "tensor parallel": 6.0, "bubble": 4.0, "pipeline borders": 1.0, "data parallel": 3.0,
     "optimizer": 2.0},
    {"weights": 6e9, "gradients": 6e9, "optimizer": 10e9, "activations": 30e9, "buffers": 4e9},
)  # fmt: skip
SECOND = Estimate(
    Layout(64, 1, 1, zero=3, recompute="full"),
    {"computing": 30.0, "tensor parallel": 0.0, "bubble": 0.0, "pipeline borders": 0.0, "data parallel": 9.0,
     "optimizer": 1.0},
    {"weights": 2e9, "gradients": 2e9, "optimizer": 12e9, "activations": 50e9, "buffers": 12e9},
)  # fmt: skip


def plan_of(*ranked: Estimate) -> Plan:
    return Plan(job(), cluster(), ranked, 100, 10, ranked[0])


def parsed(drawing: Drawing) -> ET.Element:
    return ET.fromstring(drawing.svg)


def number(element: ET.Element, key: str) -> float:
    return float(element.attrib[key])


def texts(drawing: Drawing) -> dict[str, ET.Element]:
    return {text.text or "": text for text in parsed(drawing).iter(f"{SVG}text")}


def box(text: ET.Element) -> tuple[float, float, float, float]:
    """Left, top, right, bottom, a little less than what the text takes."""
    font = number(text, "font-size")
    width = 0.88 * text_width(text.text or "", font) * (1.05 if "font-weight" in text.attrib else 1)
    x, y = number(text, "x"), number(text, "y")
    left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor", "start")] * width
    return left, y - 0.75 * font, left + width, y + 0.1 * font


def assert_readable(drawing: Drawing) -> None:
    """No text leaves the sheet, and no two that lie level cover each other."""
    root = parsed(drawing)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    level = [text for text in root.iter(f"{SVG}text") if "transform" not in text.attrib]
    for text in level:
        left, top, right, bottom = box(text)
        assert left >= 0 and top >= 0 and right <= width and bottom <= height, text.text
    for one, other in combinations(level, 2):
        a, b = box(one), box(other)
        assert not (a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]), (one.text, other.text)


def pieces(drawing: Drawing) -> dict[str, ET.Element]:
    """The rectangles of the bars, by what the mouse says of them."""
    found = {}
    for rect in parsed(drawing).iter(f"{SVG}rect"):
        tip = rect.find(f"{SVG}title")
        if tip is not None:
            found[tip.text or ""] = rect
    return found


# Plans.


def test_pieces_of_a_bar_are_as_long_as_their_seconds_and_bytes() -> None:
    found = pieces(show.plan_picture(plan_of(FIRST, SECOND)))
    assert len(found) == 6 + 5 + 3 + 5  # what is 0 is not drawn
    for accounts_of, per in (("seconds", 20.0), ("memory", 6e9)):
        wide = []
        for estimate in (FIRST, SECOND):
            for account, value in getattr(estimate, accounts_of).items():
                said = units.duration(value) if accounts_of == "seconds" else units.size(value)
                if value:
                    piece = found[f"{plans.degrees(estimate.layout)}: {account} {said}"]
                    wide.append((number(piece, "width") + 1) / value * per)  # a pixel is left between two
        assert max(wide) - min(wide) < 0.02 * per


def test_a_piece_begins_where_the_one_before_it_ends() -> None:
    found = pieces(show.plan_picture(plan_of(FIRST, SECOND)))
    row = [piece for tip, piece in found.items() if tip.startswith("dp 8 x tp 4 x pp 2, ZeRO 1")]
    for bar in (row[:6], row[6:]):
        for one, following in pairwise(bar):
            assert number(one, "x") + number(one, "width") + 1 == pytest.approx(number(following, "x"), abs=0.2)
            assert number(one, "y") == number(following, "y")


def test_the_dashed_line_is_at_the_size_of_a_gpu() -> None:
    drawing = show.plan_picture(plan_of(FIRST, SECOND))
    marks = texts(drawing)
    zero, sixty = number(marks["0 GB"], "x"), number(marks["60 GB"], "x")
    dashed = [line for line in parsed(drawing).iter(f"{SVG}line") if line.get("stroke-dasharray")]
    assert len(dashed) == 1
    assert number(dashed[0], "x1") == pytest.approx(zero + (sixty - zero) * 80 / 60, abs=0.2)
    assert "a GPU has 80 GB" in marks


def test_totals_are_written_behind_the_bars_and_cover_no_piece() -> None:
    drawing = show.plan_picture(plan_of(FIRST, SECOND))
    for total in ("36 s", "40 s", "56 GB", "78 GB"):
        left, top, _, bottom = box(texts(drawing)[total])
        row = [p for p in pieces(drawing).values() if number(p, "y") < bottom and top < number(p, "y") + 24]
        assert len(row) in (8, 11)
        near = [p for p in row if number(p, "x") < left and (total.endswith("GB") or number(p, "x") < plans.MIDDLE)]
        assert max(number(p, "x") + number(p, "width") for p in near) < left


def test_the_title_of_a_plan_says_who_wins_and_by_how_much() -> None:
    assert show.plan_picture(plan_of(FIRST, SECOND)).title == (
        "dp 8 x tp 4 x pp 2, ZeRO 1 takes 36 s a step; the next 40 s"
    )
    equal = replace(SECOND, seconds={**SECOND.seconds, "computing": 26.0})
    assert show.plan_picture(plan_of(FIRST, equal)).title.endswith("the next as long, and holds 22 GB more")
    alone = Estimate(Layout(1, 1, 1), {"computing": 3.0}, {"weights": 1e9})
    assert show.plan_picture(plan_of(alone)).title == "One GPU takes 3 s a step: the only degrees that fit"


def test_a_plan_is_said_in_words_row_by_row() -> None:
    said = show.plan_picture(plan_of(FIRST, SECOND)).description
    assert (
        "dp 8 x tp 4 x pp 2, ZeRO 1, micro-batch 2, interleaved of 3 chunks: 36 s a step (computing 20 s, tensor "
        "parallel 6 s, bubble 4 s, pipeline borders 1 s, data parallel 3 s, optimizer 2 s); 56 GB (weights 6 GB, "
        "gradients 6 GB, optimizer 10 GB, activations 30 GB, buffers 4 GB)."
    ) in said
    assert "dp 64 x tp 1 x pp 1, ZeRO 3, micro-batch 1, recompute full: 40 s a step (computing 30 s, data" in said
    assert said.endswith("A GPU has 80 GB.")


def test_rows_are_named_and_accounts_of_nothing_are_not_in_the_legend() -> None:
    both, one = texts(show.plan_picture(plan_of(FIRST, SECOND))), texts(show.plan_picture(plan_of(SECOND)))
    assert {"dp 8 x tp 4 x pp 2, ZeRO 1", "micro-batch 2, interleaved of 3 chunks", "bubble", "buffers"} <= set(both)
    assert "bubble" not in one and {"computing", "data parallel", "weights"} <= set(one)
    assert len(pieces(show.plan_picture(plan_of(FIRST, SECOND), top=1))) == 11


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "sequence", "batch"),
    [
        ("llama2-70b", "h100", 64, 4096, 1024),
        ("megatron-1t", "v100", 4096, 2048, 4096),  # minutes
        ("gpt2", "b200", 1, 1024, 8),  # milliseconds, one row
    ],
)
def test_every_text_of_a_plan_has_its_place(model: str, gpu: str, gpus: int, sequence: int, batch: int) -> None:
    plan = choose(job(model, sequence, batch), cluster(gpu, gpus, min(8, gpus)))
    drawing = show.plan_picture(plan, top=8)
    assert_readable(drawing)
    assert units.duration(plan.best.step_seconds) in drawing.title
    for found in plan.ranked[:8]:
        assert found.bytes <= plan.cluster.gpu.memory_bytes
        assert plans.degrees(found.layout) in texts(drawing)


def test_a_plan_in_minutes_counts_its_axis_in_minutes() -> None:
    slow = replace(FIRST, seconds={account: 60 * value for account, value in FIRST.seconds.items()})
    said = texts(show.plan_picture(plan_of(slow)))
    assert {"36 min", "20 min", "0 min", "10 min", "time of a step in minutes"} <= set(said)


def test_no_plan_has_no_picture_and_says_why_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"nothing fits: .* take more GPUs") as error:
        show.plan_picture(choose(job(), cluster(gpus=1, per_node=1)))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="top=0 is no number of layouts"):
        show.plan_picture(plan_of(FIRST), top=0)


def test_accounts_that_can_be_neighbours_differ_in_greyscale() -> None:
    """L*, of 100. Any two accounts of seconds touch when those between them are 0; those of memory are always all."""
    for one, other in combinations(plans.SECONDS.values(), 2):
        assert abs(palette.lightness(one) - palette.lightness(other)) > 12, (one, other)
    for one, other in pairwise(plans.BYTES.values()):
        assert abs(palette.lightness(one) - palette.lightness(other)) >= 15, (one, other)
    for ground in (*plans.SECONDS.values(), *plans.BYTES.values()):
        assert palette.contrast(palette.ink_on(ground), ground) >= 4.5


# Rooflines: numbers by hand.

TOY = Architecture("toy", 4, 1024, 8, 1000)  # a block: 12 * 2^20 matrix values
TOY_JOB = Job(TOY, 1024, 64)
SMALL = Cluster(Gpu("toy", 100e12, 80e9, 1e12, "in", "out", ""), 16, 4, Link("in", 50e9, 0), Link("out", 5e9, 0))


def named(layout: Layout, kind: str) -> dict[str, rooflines.Point]:
    return {p.name: p for p in rooflines.intensities(TOY_JOB, SMALL, layout) if p.kind == kind}


def test_products_read_two_matrices_and_write_one() -> None:
    """With M = T = D = 2^10, in units of 2^20 values: [1, 1] x [1, 3] is 3 * 2^31 FLOPs over 2 * (1 + 3 + 3) * 2^20."""
    whole = {name: p.intensity for name, p in named(Layout(16, 1, 1), "product").items()}
    assert whole == {
        "queries, keys, values, tp 1": pytest.approx(1024 * 3 / 7),
        "attention's output, tp 1": pytest.approx(1024 * 1 / 3),
        "into the MLP, tp 1": pytest.approx(1024 * 4 / 9),
        "out of the MLP, tp 1": pytest.approx(1024 * 4 / 9),
    }
    halves = named(Layout(8, 2, 1), "product")
    assert halves["queries, keys, values, tp 2"].intensity == pytest.approx(1024 * 1.5 / 4)
    assert halves["attention's output, tp 2"].intensity == pytest.approx(1024 * 0.5 / 2)


def test_tensor_parallel_has_fewer_flops_for_a_byte_with_each_rank() -> None:
    """A token: 3 * (24 D^2 + 4 T D) = 84 * 2^20 FLOPs over t ranks; 4 * 2 (t-1)/t * 2 D bytes: 5376 / (t-1)."""
    for t in (2, 4, 8):
        point = named(Layout(16 // t, t, 1), "tensor parallel")[f"tp {t}"]
        assert point.intensity == pytest.approx(5376 / (t - 1))
        assert point.bandwidth == (50e9 if t <= 4 else 20e9)  # across nodes a ring has the adapters of four GPUs


def test_data_parallel_has_more_flops_for_a_byte_with_each_token() -> None:
    parameters = 4 * (12 * 2**20 + 13 * 1024) + 1000 * 1024 + 2 * 1024
    flops = 4 * 84 * 2**20 + 6 * 1024 * 1000  # of a token
    point = named(Layout(2, 4, 2), "data parallel")["dp 2"]
    assert point.intensity == pytest.approx(32 * 1024 * flops / (2 * 0.5 * 2 * parameters))
    larger = rooflines.data_parallel(replace(TOY_JOB, global_batch=128), SMALL, Layout(2, 4, 2))
    assert larger.intensity == pytest.approx(2 * point.intensity)
    assert rooflines.data_parallel(TOY_JOB, SMALL, Layout(16, 1, 1)).intensity < point.intensity


def test_a_border_of_a_pipeline_is_crossed_once_for_the_layers_of_a_rank() -> None:
    """Two blocks of 84 * 2^20 FLOPs a token, over 2 D values forward and as many bytes backward."""
    assert named(Layout(8, 1, 2), "pipeline")["pp 2"].intensity == pytest.approx(2 * 84 * 2**20 / 4096)
    assert named(Layout(4, 2, 2), "pipeline")["pp 2"].intensity == pytest.approx(2 * 84 * 2**20 / 4096)


def test_no_cut_has_no_messages() -> None:
    assert {p.kind for p in rooflines.intensities(TOY_JOB, SMALL, Layout(1, 1, 1))} == {"product"}


def test_the_roof_is_flat_from_where_the_slope_meets_it() -> None:
    assert rooflines.attainable(100e12, 50e9, 1000) == 50e12
    assert rooflines.attainable(100e12, 50e9, 2000) == rooflines.attainable(100e12, 50e9, 1e9) == 100e12
    assert [roof.ridge(100e12) for roof in rooflines.roofs(SMALL)] == [100, 2000, 20_000]
    assert len(rooflines.roofs(replace(SMALL, gpus=4))) == 2  # one node: there is no outside


def test_the_title_says_which_link_is_enough() -> None:
    """Llama 2 70B at tp 8: 3 * (2 * 855.6e6 + 4 * 4096 * 8192) = 5.536e9 FLOPs over 7 * 16 * 8192 bytes is 6034; times
    50 GB/s, of 989.4e12: 30.5 %."""
    assert show.roofline(job(), cluster()).title == (
        "Tensor parallel of 8 can reach 100 % of the peak inside a node, 30.5 % across nodes; "
        "data parallel of 8 can reach 100 % across nodes"
    )
    assert show.roofline(job(), cluster(gpus=8), [Layout(1, 8, 1)]).title == (
        "Tensor parallel of 8 can reach 100 % of the peak"
    )
    alone = show.roofline(job(), cluster(gpus=1, per_node=1), [Layout(1, 1, 1)])
    assert alone.title == "Memory lets the leanest product reach 100 % of the peak"


def marks(drawing: Drawing) -> dict[str, tuple[float, float]]:
    """Centres of the marks, by what the mouse says of them."""
    found = {}
    for path in parsed(drawing).iter(f"{SVG}path"):
        tip = path.find(f"{SVG}title")
        if tip is not None:
            start = re.match(r"M([-\d.]+) ([-\d.]+)", path.attrib["d"])
            assert start is not None
            aside = {"tensor-parallel": (5.5, 0), "data-parallel": (0, 7), "product": (4.5, 4.5), "pipeline": (0, 6.5)}
            dx, dy = aside[path.attrib["class"]]
            found[tip.text or ""] = (float(start[1]) + dx, float(start[2]) + dy)
    return found


def test_marks_lie_where_the_axes_say() -> None:
    """Both axes are logarithms: tp 4 of the toy has 1792 FLOPs a byte, 89.6 TFLOP/s inside and 8.96 outside."""
    drawing = show.roofline(TOY_JOB, SMALL, [Layout(4, 4, 1)])
    said, found = texts(drawing), marks(drawing)
    one, ten = number(said["1k"], "x"), number(said["10k"], "x")
    high, low = number(said["100 TFLOP/s"], "y") - 4, number(said["10 TFLOP/s"], "y") - 4
    inside = found["tp 4: 1.79k FLOPs a byte, at most 89.6 % of the peak"]
    apart = found["tp 4, each rank in another node: 9 %"]
    assert inside[0] == apart[0] == pytest.approx(one + (ten - one) * 0.25334, abs=0.2)  # log10(1.792)
    assert inside[1] == pytest.approx(high + (low - high) * 0.04769, abs=0.2)  # -log10(0.896)
    assert apart[1] == pytest.approx(low + (low - high) * 0.04769, abs=0.2)


def test_only_messages_that_lose_by_it_have_a_hollow_mark() -> None:
    hollow = [tip for tip in marks(show.roofline(job(), cluster())) if "another node" in tip]
    assert sorted(hollow) == [
        f"tp {t}, each rank in another node: {s} %" for t, s in ((16, 14.2), (4, 71.2), (8, 30.5))
    ]


def test_a_roofline_is_said_in_words() -> None:
    drawing = show.roofline(job(), cluster())
    for said in (
        "A GPU computes at most 989 TFLOP/s.",
        "inside a node, nvlink4, 450 GB/s: enough from 2.2k FLOPs a byte.",
        "between nodes, ndr, 50 GB/s: enough from 19.8k FLOPs a byte.",
        "tp 8: 6.03k FLOPs a byte, at most 100 % of the peak, 30.5 % with each rank in another node.",
        "out of the MLP, tp 2: ",
        "pp 4: 3.38M FLOPs a byte, at most 100 % of the peak.",
    ):
        assert said in drawing.description


@pytest.mark.parametrize(
    ("model", "gpu", "gpus"),
    [("llama2-70b", "h100", 64), ("gpt2", "rtx3090", 16), ("megatron-1t", "a100", 1024), ("llama3-8b", "b200", 8)],
)
def test_every_text_of_a_roofline_has_its_place(model: str, gpu: str, gpus: int) -> None:
    drawing = show.roofline(job(model, 1024), cluster(gpu, gpus))
    assert_readable(drawing)
    for tip in marks(drawing):
        name = tip.partition(":")[0].partition(",")[0]
        if re.match(r"(tp|dp|pp) \d", name):
            assert any(text.startswith(name) for text in texts(drawing)), name


def test_what_has_no_usual_layout_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="give layouts=") as error:
        show.roofline(job(global_batch=1), cluster(gpus=63, per_node=8))
    assert "\n" not in str(error.value)


def test_shapes_tell_the_points_apart_without_colour() -> None:
    assert len(set(rooflines.SHAPES.values())) == len(rooflines.SHAPES) == len(set(rooflines.COLOURS.values()))
    assert len({roof.dash for roof in rooflines.roofs(cluster())}) == 3


def test_a_name_of_show_stays_a_function() -> None:
    """A file of the same name would take its place once it is imported."""
    for _ in range(2):
        for name in ("roofline", "plan_picture", "budget", "planner"):
            assert callable(getattr(show, name)) and name in show.__all__


# Widgets.


@pytest.fixture
def budget() -> Any:
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
    accounts.budget_html.cache_clear()
    return show.budget(parameters=7e9, tokens=1e12, gpu="h100", gpus=64, mfu=0.4)


@pytest.fixture
def planner() -> Any:
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
    accounts.plan_svg.cache_clear()
    return show.planner("llama3-8b", gpus=8, global_batch=64)


def controls(widget: Any) -> dict[str, Any]:
    return {control.description: control for control in widget.children[0].children}


def test_a_budget_shows_the_four_stages_of_zero_and_says_which_fit(budget: Any) -> None:
    """16 bytes x 7e9 = 112 GB; stage 3 shares them among 64."""
    picture = budget.children[1]
    assert "ZeRO 0: 112 GB of model state on each of 64 GPUs, more than its 80 GB" in picture.value
    controls(budget)["ZeRO stage"].value = 3
    assert "ZeRO 3: 1.75 GB of model state on each of 64 GPUs, within its 80 GB" in picture.value
    assert "ZeRO 3 (chosen)" in picture.value and "ZeRO 0 (chosen)" not in picture.value
    assert picture.value.count("<svg") == 1 and budget.children[1] is picture


def test_a_budget_tells_the_ideal_from_the_honest_time(budget: Any) -> None:
    """4.2e22 FLOPs, by 64 x 989.4e12 FLOP/s, are 663,289 s = 7.68 days; by 0.4, by 0.98: 19.6 days and more."""
    picture = budget.children[1]
    assert "FLOPs: 6 x 7B x 1T tokens = 4.2e+22" in picture.value
    assert "Ideal time: 7.68 days" in picture.value and "Honest time: 19.7 days" in picture.value
    controls(budget)["MFU"].value = 0.8
    assert "Ideal time: 7.68 days" in picture.value and "Honest time: 9.86 days" in picture.value
    controls(budget)["tokens"].value = 1e11
    assert "Ideal time: 18.4 h" in picture.value


def test_a_slider_has_the_number_where_it_begins() -> None:
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
    widget = show.budget(parameters=6.7e9, gpus=48)
    assert controls(widget)["parameters"].value == 6.7e9 and controls(widget)["GPUs"].value == 48
    assert "each of 48 GPUs" in widget.children[1].value
    with pytest.raises(ValueError, match="unknown GPU 'h10'"):
        show.budget(gpu="h10")
    with pytest.raises(ValueError, match="unknown model"):
        show.planner("llama9")


def test_the_planner_shows_the_plan_of_its_controls(planner: Any) -> None:
    picture = planner.children[1]
    for control, value in (("GPUs", 16), ("GPU", "a100"), ("sequence", 2048), ("model", "llama2-7b")):
        before = picture.value
        controls(planner)[control].value = value
        assert picture.value != before and picture.value.count("<svg") == 1
    expected = choose(job("llama2-7b", 2048, 64), cluster("a100", 16))
    assert picture.value == show.plan_picture(expected).svg


def test_the_planner_says_in_place_what_cannot_be(planner: Any) -> None:
    picture = planner.children[1]
    for model in ("megatron-1t", "bloom-176b"):
        controls(planner)["model"].value = model
        assert "nothing fits" in picture.value
        assert picture.value.count('role="alert"') == 1 and picture.value.count("<svg") == 1
        assert ET.fromstring(picture.value) is not None
    controls(planner)["model"].value = "gpt2"
    assert "alert" not in picture.value and picture.value.startswith("<svg")
    assert "no whole nodes of 8" in show.planner("llama3-8b", gpus=12).children[1].value


def test_a_plan_waits_until_the_slider_is_let_go(planner: Any) -> None:
    sliders = [control for control in controls(planner).values() if hasattr(control, "continuous_update")]
    assert len(sliders) == 3 and not any(slider.continuous_update for slider in sliders)


@pytest.mark.parametrize("name", ["budget", "planner"])
def test_widgets_without_ipywidgets_say_so_in_one_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match=rf"show.{name}\(\) needs ipywidgets: pip install ipywidgets"):
        getattr(show, name)()


# Units.


def test_long_times_and_large_amounts_are_said_in_their_units() -> None:
    said = {0.0012: "1.2 ms", 52: "52 s", 119: "119 s", 120: "2 min", 12_240: "3.4 h", 12 * 86_400: "12 days"}
    assert {seconds: units.duration(seconds) for seconds in said} == said
    assert units.duration(5.1 * 365.25 * 86_400) == "5.1 years"
    assert [units.amount(n) for n in (12, 7e9, 1.5e12, 19_788)] == ["12", "7B", "1.5T", "19.8k"]
    assert reasons.amount is units.amount and reasons.duration is units.duration
