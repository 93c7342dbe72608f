"""The layout of a model on a cluster: against published runs, against the simulator, and against every other layout."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from minipar import ledger, planner, reasons
from minipar import schedule as schedules
from minipar.architecture import Architecture, of_size
from minipar.catalogue import GPUS, LINKS, MODELS, Link, gpu, link, model
from minipar.layout import (
    Cluster,
    Estimate,
    Job,
    Layout,
    estimate,
    flying,
    hops,
    layers_of,
    memory_bytes,
    micro_batches,
    model_tflops,
    rank_parameters,
    step_seconds,
)
from minipar.simulate import simulate

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "figures" / "published.json").read_text())


def cluster(name: str, gpus: int, per_node: int = 8) -> Cluster:
    found = gpu(name)
    return Cluster(found, gpus, per_node, link(found.inside), link(found.outside))


def gpt(row: dict[str, Any]) -> Architecture:
    return Architecture("row", row["layers"], row["hidden"], row["heads"], 51200, positions=2048)


# Published runs, all with the one efficiency that stands in layout.py.


def predicted(job: Job, machines: Cluster, wanted: dict[str, Any]) -> Estimate:
    """The published degrees, with whatever else makes them fastest: `best` raises if they do not fit."""
    return planner.choose(job, machines, wanted).best


@pytest.mark.parametrize("row", PUBLISHED["megatron_sc21_table_1"]["rows"], ids=lambda row: row["parameters_billion"])
def test_megatrons_layouts_fit_and_are_as_fast_as_printed_within_a_quarter(row: dict[str, Any]) -> None:
    machines, job = cluster("a100", row["gpus"]), Job(gpt(row), 2048, row["global_batch"], flash=False)
    found = predicted(job, machines, {"tp": row["tp"], "pp": row["pp"], "recompute": "full", "zero": 0})
    assert found.bytes <= 80e9
    tflops = model_tflops(job, machines, found.step_seconds, "full")
    assert tflops == pytest.approx(row["tflops_per_gpu"], rel=0.25)


@pytest.mark.parametrize("row", PUBLISHED["korthikanti_2022"]["rows"], ids=lambda row: row["parameters_billion"])
def test_steps_with_selective_recomputation_take_as_long_as_printed_within_a_quarter(row: dict[str, Any]) -> None:
    machines, job = cluster("a100", row["gpus"]), Job(gpt(row), 2048, row["global_batch"], flash=False)
    wanted = {"tp": row["tp"], "pp": row["pp"], "recompute": "selective", "zero": 0}
    wanted |= {"schedule": "interleaved", "chunks": row["chunks_per_stage"]} if row["chunks_per_stage"] > 1 else {}
    assert predicted(job, machines, wanted).step_seconds == pytest.approx(row["iteration_seconds"], rel=0.25)


@pytest.mark.parametrize("row", PUBLISHED["llama3_table_4"]["rows"], ids=lambda row: row["gpus"])
def test_llamas_layouts_fit_and_are_as_fast_as_printed_within_a_quarter(row: dict[str, Any]) -> None:
    """16 million tokens a step: 2,048 rows (the paper's table 4)."""
    machines, job = cluster("h100", row["gpus"]), Job(model("llama3-405b"), row["sequence"], 2048)
    found = predicted(job, machines, {"tp": row["tp"], "pp": row["pp"], "dp": row["dp"]})
    assert model_tflops(job, machines, found.step_seconds) == pytest.approx(row["tflops_per_gpu"], rel=0.25)


def test_tensor_parallel_is_best_when_it_fills_a_node() -> None:
    """Narayanan et al. 2021, section 5.4.1 and its takeaway: 162 billion parameters on 64 A100 in nodes of 8."""
    job = Job(Architecture("162B", 32, 20480, 128, 51200, positions=2048), 2048, 128, flash=False)
    speed = {}
    for tp in (2, 4, 8, 16, 32):
        layout = Layout(1, tp, 64 // tp, recompute="full")
        speed[tp] = model_tflops(job, cluster("a100", 64), estimate(job, cluster("a100", 64), layout).step_seconds)
    assert max(speed, key=lambda tp: speed[tp]) == 8
    assert speed[32] < speed[16] < speed[8] and speed[2] < speed[4] < speed[8]


# The closed formulas, against the schedules and the simulator.


SHAPES = [(p, m) for p in (2, 3, 4, 8) for m in (p, 2 * p, 4 * p, 8 * p)]
KINDS = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4)]


@pytest.mark.parametrize(("name", "chunks"), KINDS)
@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_as_many_micro_batches_are_in_flight_as_the_schedule_keeps(name: str, chunks: int, p: int, m: int) -> None:
    counted = schedules.in_flight(schedules.by_name(name, p, m, chunks))
    layout = Layout(1, 1, p, schedule=name, chunks=chunks)
    assert [flying(layout, m, stage) * chunks for stage in range(p)] == counted


FILLED = [(*kind, *shape) for kind in KINDS for shape in SHAPES if kind[0] != "zb-h1" or shape[1] >= 2 * shape[0]]


@pytest.mark.parametrize(("name", "chunks", "p", "m"), FILLED)
def test_bubble_and_borders_lengthen_a_step_as_the_simulator_says(name: str, chunks: int, p: int, m: int) -> None:
    order = schedules.by_name(name, p, m, chunks)
    each, send = 1 / chunks, 0.01
    without, with_messages = (simulate(order, each, each, each, delay).duration for delay in (0.0, send))
    idle = {"zb-h1": 1.0}.get(name, 3.0) * (p - 1) / chunks
    assert without == pytest.approx(3 * m + idle)
    assert with_messages - without == pytest.approx(send * hops(name, p, m, chunks))


SMALL = Job(Architecture("small", 8, 1024, 16, 32000, positions=512), 512, 64)


def test_a_steps_time_is_that_of_its_parts() -> None:
    """By hand: 2 stages of 4 blocks, 2 slices, 2 replicas, on links of which only the bandwidth counts."""
    fast = Cluster(replace(gpu("a100"), memory_bandwidth=1e30), 8, 8, Link("in", 1e9, 0.0), Link("out", 1e9, 0.0))
    layout = Layout(2, 2, 2, micro_batch=4)
    found = step_seconds(SMALL, fast, layout, efficiency=0.5)
    m, tokens, D = 8, 4 * 512, 1024
    token = 6 * 12 * D * D + 12 * 512 * D + 2 * 512 * D  # scores again, once, in the backward
    words = 6 * D * 32000
    speed = 312e12 * 0.5 * 2
    assert found["computing"] == pytest.approx(m * tokens * (4 * token + words) / speed)
    assert found["tensor parallel"] == pytest.approx(m * 4 * 4 * (tokens * D * 2) / 1e9)  # ring: 2 x 1/2 of the buffer
    stage = tokens * 4 * token / speed + 4 * 4 * tokens * D * 2 / 1e9
    assert found["bubble"] == pytest.approx(stage)
    assert found["pipeline borders"] == pytest.approx(hops("1f1b", 2, m) * tokens * D * 2 / 2 / 1e9)
    backward = stage - tokens * 4 * (2 * 12 * D * D + 4 * 512 * D) / speed - 4 * 2 * tokens * D * 2 / 1e9
    gradients = rank_parameters(SMALL, layout) * 2 / 1e9  # ring over 2: once round
    assert found["data parallel"] == pytest.approx(max(0.0, gradients - backward))


def test_messages_hide_behind_computing_as_far_as_there_is_any() -> None:
    slow = replace(cluster("a100", 8, per_node=1), outside=Link("slow", 1e8, 0.0))
    waits = [step_seconds(SMALL, slow, Layout(8, 1, 1, zero, micro_batch=2))["data parallel"] for zero in range(4)]
    gradients = 2 * rank_parameters(SMALL, Layout(8, 1, 1)) * 7 / 8 / 1e8
    assert 0.9 * 2 * gradients < waits[0] <= 2 * gradients and waits[1] == pytest.approx(waits[0], rel=0.01)
    assert waits[2] == pytest.approx(5 * gradients, rel=0.05)  # 4 micro-batches, and the new weights
    assert waits[3] == pytest.approx(12 * gradients, rel=0.05)


# Memory, against the ledger.


@pytest.mark.parametrize(("dp", "tp", "pp", "zero"), list(product((1, 4), (1, 2), (1, 2), (0, 1, 2, 3))))
def test_states_are_the_ledgers(dp: int, tp: int, pp: int, zero: int) -> None:
    layout = Layout(dp, tp, pp, zero)
    held = memory_bytes(SMALL, layout)
    state = ledger.model_state_bytes(tp * pp * rank_parameters(SMALL, layout), dp, tp, pp, zero)
    for account in ("weights", "gradients", "optimizer"):
        assert held[account] == pytest.approx(state[account])


def test_parameters_are_the_ledgers_and_the_model_cards() -> None:
    for name, shape in MODELS.items():
        if name.startswith(("gpt", "megatron")):
            sizes = {"layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads, "vocab": shape.vocab}
            assert shape.parameters == ledger.parameters(**sizes, sequence=shape.positions)
    printed = {"llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192}
    printed |= {"llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800}
    printed |= {"gpt2": 124_439_808, "gpt2-xl": 1_557_611_200}
    assert {name: model(name).parameters for name in printed} == printed


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("tp", "by_sequence"), [(1, False), (8, False), (8, True)])
def test_a_gpt_keeps_what_korthikanti_says_less_its_dropout_masks(tp: int, by_sequence: bool, recompute: str) -> None:
    T, D, H = 2048, 12288, 96
    how = {"tp": tp, "sequence_parallel": by_sequence, "recompute": recompute}
    with_masks = ledger.layer_activation_bytes(hidden=D, heads=H, sequence=T, micro_batch=1, **how) / T
    masks = {"none": 2 * D / (tp if by_sequence else 1) + H * T / tp, "full": 0.0}.get(
        recompute, 2 * D / (tp if by_sequence else 1)
    )
    assert model("gpt3-175b").block_bytes(T, **how) == pytest.approx(with_masks - masks)


def test_flops_are_the_ledgers() -> None:
    shape = model("megatron-39b")
    for recompute in ("none", "full"):
        step = ledger.step_flops(
            layers=48, hidden=8192, vocab=51200, sequence=2048, global_batch=1536, recompute=recompute
        )
        assert 1536 * 2048 * shape.token_flops(2048, recompute) == pytest.approx(step)


def test_the_fullest_stage_is_the_first_for_its_activations_or_the_last_for_its_logits() -> None:
    wide = replace(SMALL.model, vocab=1_000_000)
    few, many = (memory_bytes(replace(SMALL, model=wide, global_batch=rows), Layout(1, 1, 4)) for rows in (1, 64))
    logits = 512 * 4 * (1024 + 1_000_000)
    own = 2 * wide.block_bytes(512, recompute="selective") * 512
    assert few["activations"] == pytest.approx(own + logits)
    assert many["activations"] == pytest.approx(max(4 * own, own + logits))


# Links.


def test_a_group_uses_the_link_between_its_ranks() -> None:
    machines = cluster("h100", 64)
    assert machines.link(8, 1) == machines.inside == LINKS["nvlink4"]
    assert machines.link(2, 4) == machines.inside
    assert machines.link(8, 8) == machines.outside == LINKS["ndr"]  # each rank has an adapter to itself
    assert machines.link(16, 1).bandwidth == 8 * 50e9  # one ring through two nodes has all eight
    assert machines.link(4, 4).bandwidth == 2 * 50e9
    assert machines.link(16, 1).latency == machines.outside.latency
    assert cluster("b200", 64).link(16, 1).bandwidth == 8 * 50e9


# The choice.


def all_layouts(job: Job, machines: Cluster) -> list[Layout]:
    """Written again, without any thought of speed."""
    found = []
    for dp, tp, pp in product(range(1, machines.gpus + 1), repeat=3):
        if dp * tp * pp != machines.gpus or job.global_batch % dp or job.model.heads % tp or pp > job.model.layers:
            continue
        for rows, zero, recompute, (schedule, chunks) in product(
            (1, 2, 4, 8, 16), range(4), ("none", "full"), [(n, 1) for n in ("1f1b", "zb-h1", "gpipe")] +
            [("interleaved", v) for v in range(2, 9)],
        ):  # fmt: skip
            m, odd = divmod(job.global_batch // dp, rows)
            deep = schedule != "interleaved" or (pp > 1 and pp * chunks <= job.model.layers and m % pp == 0)
            if not odd and deep and (pp > 1 or schedule == "1f1b") and (dp > 1 or not zero):
                found.append(Layout(dp, tp, pp, zero, rows, recompute, schedule, chunks))
    return found


@pytest.mark.parametrize("name", ["a100", "rtx4090", "v100"])
def test_no_layout_that_fits_is_faster_than_the_one_chosen(name: str) -> None:
    job, machines = Job(of_size(2e9), 1024, 96), cluster(name, 12, per_node=4)
    plan = planner.choose(job, machines)
    everything = all_layouts(job, machines)
    fitting = [layout for layout in everything if sum(memory_bytes(job, layout).values()) <= gpu(name).memory_bytes]
    assert plan.tried == len(everything) and plan.fitting == len(fitting) > 0
    fastest = min(estimate(job, machines, layout).step_seconds for layout in fitting)
    assert plan.best.step_seconds == pytest.approx(fastest, rel=2e-3)
    assert plan.best.bytes <= gpu(name).memory_bytes
    ranked = [float(f"{found.step_seconds:.3g}") for found in plan.ranked]
    assert ranked == sorted(ranked)


@pytest.mark.parametrize("wanted", [{"tp": 4}, {"zero": 3}, {"pp": 2, "schedule": "interleaved"}, {"micro_batch": 3},
                                    {"recompute": "full", "dp": 3}, {"chunks": 2}])  # fmt: skip
def test_what_is_wanted_is_there_in_every_layout(wanted: dict[str, Any]) -> None:
    job, machines = Job(of_size(2e9), 1024, 96), cluster("a100", 12, per_node=4)
    found = list(planner.layouts(job, machines, wanted))
    assert found
    for layout, (name, value) in product(found, wanted.items()):
        assert getattr(layout, name) == value
        assert (
            layout.dp * layout.tp * layout.pp == 12
            and micro_batches(job, layout) * layout.micro_batch * layout.dp == 96
        )
        assert layers_of(job, layout) * layout.pp >= job.model.layers


def test_the_two_published_sizes_of_the_question_are_laid_out_by_the_rule() -> None:
    """The most frequent messages stay inside a node; replicas without redundancy are outermost."""
    for job, machines in (
        (Job(of_size(70e9), 4096, 1024), cluster("h100", 64)),
        (Job(model("megatron-1t"), 2048, 3072), cluster("a100", 3072)),
    ):
        plan = planner.choose(job, machines)
        best = plan.best.layout
        assert 1 < best.tp <= 8 and best.dp > 1 and best.zero > 0
        assert plan.best.seconds["tensor parallel"] > plan.best.seconds["data parallel"]
        across = planner.choose(job, machines, {"tp": 16})
        said = " ".join(reasons.why_not(plan, across, "tp=16"))
        assert "spans 2 nodes" in said and "loses" in said
        assert across.best.step_seconds > plan.best.step_seconds


@pytest.mark.parametrize("parameters", [1e6, 1e8, 1.3e9, 7e9, 70e9, 175e9, 405e9, 1e12, 1e13])
def test_the_usual_shape_has_about_the_size_that_was_asked_for(parameters: float) -> None:
    shape = of_size(parameters)
    if parameters >= 1e7:
        assert shape.parameters == pytest.approx(parameters, rel=0.03)
    if parameters >= 1e9:
        assert 40 < shape.hidden / shape.layers < 200 and shape.heads % 8 == 0 and shape.hidden == 128 * shape.heads


def test_reasons_name_each_cut_and_only_those_that_are_made() -> None:
    plan = planner.choose(Job(model("megatron-1t"), 2048, 3072), cluster("a100", 3072), {"zero": 1, "pp": 16})
    cuts = reasons.cuts(plan)
    best = plan.best.layout
    assert [line.partition(" ")[0] for line in cuts[:4]] == [f"tp={best.tp}", "pp=16", f"dp={best.dp}", "ZeRO"]
    alone = planner.choose(Job(MODELS["gpt2"], 1024, 64), cluster("a100", 1))
    assert reasons.cuts(alone) == []
    assert "fits" in reasons.bottlenecks(alone)[1] and "does not fit" in reasons.bottlenecks(plan)[1]


def test_where_nothing_fits_the_account_that_is_over_is_named() -> None:
    plan = planner.choose(Job(of_size(7e9), 2048, 512), cluster("rtx4090", 1))
    with pytest.raises(
        ValueError, match=r"nothing fits: .* of 24 GB, most of it optimizer \(8\d\.\d GB\): take more GPUs"
    ):
        _ = plan.best


def test_gpus_have_links_of_the_catalogue_and_a_source() -> None:
    for found in GPUS.values():
        assert found.inside in LINKS and found.outside in LINKS and found.source
        assert link(found.inside).bandwidth > link(found.outside).bandwidth
