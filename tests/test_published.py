"""The accounts, against figures that others have printed. `figures/published.json` names the source of each."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from minipar import ledger

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "figures" / "published.json").read_text())
A100 = 1e12 * PUBLISHED["hardware"]["A100"]["bf16_dense_tflops"]
MEGATRON = PUBLISHED["megatron_sc21_table_1"]["rows"]
KORTHIKANTI = PUBLISHED["korthikanti_2022"]["rows"]


def printed(value: float, figure: float) -> bool:
    """Whether a value, rounded or cut off after as many digits as the figure has, is the figure."""
    text = repr(float(figure)).removesuffix(".0")
    last = 10.0 ** -len(text.partition(".")[2])
    return abs(value - figure) <= last / 2 * (1 + 1e-9) or 0 <= value - figure < last


@pytest.mark.parametrize("row", PUBLISHED["zero_table_1"]["rows"], ids=str)
def test_zeros_memory(row: dict[str, Any]) -> None:
    for stage in (1, 2, 3):
        state = ledger.model_state_bytes(1e9 * row["parameters_billion"], dp=row["dp"], zero=stage)
        assert printed(state.total / 1e9, row[f"zero{stage}_gb"]), (stage, state.total)


def test_a_figure_of_another_account_is_not_taken_for_the_printed_one() -> None:
    """Binary gigabytes, gradients in 4 bytes, or a stage too few: what a reader of the table may have in mind."""
    state = ledger.model_state_bytes(7.5e9, dp=64, zero=1)
    assert printed(state.total / 1e9, 31.4)
    assert not printed(state.total / 2**30, 31.4) and not printed((state.total + 2 * 7.5e9) / 1e9, 31.4)
    assert not printed(ledger.model_state_bytes(7.5e9, dp=64).total / 1e9, 31.4)


@pytest.mark.parametrize("row", MEGATRON, ids=lambda row: f"{row['parameters_billion']}B")
def test_megatrons_models(row: dict[str, Any]) -> None:
    sizes = {name: row[name] for name in ("layers", "hidden", "heads")}
    assert printed(ledger.parameters(**sizes, vocab=51200, sequence=2048) / 1e9, row["parameters_billion"])
    assert abs(100 * row["tflops_per_gpu"] * 1e12 / A100 - row["percent_of_peak"]) <= 1
    assert row["tflops_per_gpu"] * row["gpus"] / 1e3 == pytest.approx(row["aggregate_pflops"], rel=0.005)
    flops = ledger.step_flops(
        layers=row["layers"],
        hidden=row["hidden"],
        vocab=51200,
        sequence=2048,
        global_batch=row["global_batch"],
        recompute="full",
    )
    seconds = flops / (row["tflops_per_gpu"] * 1e12 * row["gpus"])
    share = ledger.mfu(flops=flops, seconds=seconds, gpus=row["gpus"], peak_flops=A100)
    assert abs(100 * share - row["percent_of_peak"]) <= 1


@pytest.mark.parametrize("row", PUBLISHED["megatron_sc21_days"]["rows"], ids=str)
def test_days_of_training(row: dict[str, Any]) -> None:
    found = ledger.days(
        1e9 * row["parameters_billion"], 1e9 * row["tokens_billion"], row["gpus"], row["tflops_per_gpu"]
    )
    assert printed(found, row["days"])


@pytest.mark.parametrize("row", KORTHIKANTI, ids=lambda row: f"{row['parameters_billion']}B")
def test_how_well_the_hardware_is_used(row: dict[str, Any]) -> None:
    sizes = {name: row[name] for name in ("layers", "hidden", "global_batch")}
    for recompute, figure in (("none", row["mfu_percent"]), ("selective", row["hfu_percent"])):
        flops = ledger.step_flops(**sizes, vocab=51200, sequence=2048, recompute=recompute)
        share = ledger.mfu(flops=flops, seconds=row["iteration_seconds"], gpus=row["gpus"], peak_flops=A100)
        assert abs(100 * share - figure) <= 0.3, recompute


@pytest.mark.parametrize("row", PUBLISHED["training_flops"], ids=lambda row: row["model"])
def test_flops_of_a_run(row: dict[str, Any]) -> None:
    flops = ledger.training_flops(row["parameters"], row["tokens"])
    assert flops == pytest.approx(row["flops"], rel=0.005)
    if "seconds" in row:
        assert ledger.run_seconds(flops, row["cluster_flops"]) == pytest.approx(row["seconds"])
        honest = ledger.run_seconds(flops, row["cluster_flops"], mfu=0.4, waiting=0.05, goodput=0.9)
        assert honest == pytest.approx(row["seconds"] / 0.4 / 0.95 / 0.9)


@pytest.mark.parametrize("row", PUBLISHED["llama3_table_4"]["rows"], ids=str)
def test_llamas_layouts(row: dict[str, Any]) -> None:
    assert row["tp"] * row["cp"] * row["pp"] * row["dp"] == row["gpus"]
    assert abs(100 * row["tflops_per_gpu"] / 989 - row["mfu_percent"]) <= 1


# Activations: Korthikanti et al. 2022, section 4 and figure 7.

GPT3 = {"hidden": 12288, "heads": 96, "sequence": 2048, "micro_batch": 1}
MT_NLG = {"hidden": 20480, "heads": 128, "sequence": 2048, "micro_batch": 1}


@pytest.mark.parametrize(("model", "scores", "saved"), [(GPT3, 80, 0.70), (MT_NLG, 64, 0.65)])
def test_the_scores_are_most_of_the_activations(model: dict[str, int], scores: float, saved: float) -> None:
    whole, selective = (ledger.layer_activation_bytes(**model, recompute=how) for how in ("none", "selective"))
    assert (whole - selective) / (model["sequence"] * model["hidden"]) == pytest.approx(scores)
    assert (whole - selective) / whole == pytest.approx(saved, abs=0.005)


def test_a_fifth_is_left_by_sequence_parallel_and_selective_recomputation() -> None:
    for model in (GPT3, {"hidden": 6144, "heads": 64, "sequence": 2048, "micro_batch": 4}):
        base = ledger.layer_activation_bytes(**model, tp=8)
        combined = ledger.layer_activation_bytes(**model, tp=8, sequence_parallel=True, recompute="selective")
        full = ledger.layer_activation_bytes(**model, tp=8, recompute="full")
        assert combined / base < 0.20
        assert full / base == pytest.approx(0.10, abs=0.025)
        assert combined == pytest.approx(34 * model["micro_batch"] * model["sequence"] * model["hidden"] / 8)


def test_the_first_stage_of_1f1b_keeps_as_much_as_the_whole_model_and_the_last_a_stage() -> None:
    sizes = {**GPT3, "layers": 96, "tp": 8, "pp": 8, "micro_batches": 64}
    block = ledger.layer_activation_bytes(**GPT3, tp=8)
    assert ledger.activation_bytes(**sizes) == pytest.approx(96 * block)
    assert ledger.activation_bytes(**sizes, stage=7) == pytest.approx(96 / 8 * block)
    assert ledger.activation_bytes(**sizes, schedule="gpipe") == pytest.approx(64 * 96 / 8 * block)
    interleaved = ledger.activation_bytes(**sizes, schedule="interleaved", chunks=3)
    assert interleaved == pytest.approx(96 * block * (1 + 7 / (8 * 3)))  # Korthikanti et al. 2022, section 4.3


def test_logits_and_embedding_are_on_their_stages() -> None:
    sizes = {**GPT3, "layers": 96, "tp": 8, "pp": 8, "micro_batches": 64, "sequence_parallel": True}
    values = 2048 * 12288
    for stage, more in ((0, 8 * values / 8), (3, 0), (7, 4 * values / 8 * (1 + 51200 / 12288))):
        with_words = ledger.activation_bytes(**sizes, stage=stage, vocab=51200)
        assert with_words - ledger.activation_bytes(**sizes, stage=stage) == pytest.approx(more)


# Stability: when to save, and what is left.


@pytest.mark.parametrize(("save", "fails"), [(60.0, 10_800.0), (5.0, 3600.0), (300.0, 86_400.0)])
def test_no_other_interval_between_checkpoints_is_better(save: float, fails: float) -> None:
    best = ledger.checkpoint_interval(save_seconds=save, failure_seconds=fails)
    at = lambda interval: ledger.goodput(interval=interval, save_seconds=save, failure_seconds=fails)
    assert best == pytest.approx((2 * save * fails) ** 0.5)
    assert all(at(best) >= at(best * factor) - 2e-3 for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0))
    assert at(best) > at(best * 4) and at(best) > at(best / 4)


def test_goodput_against_failures_drawn_at_random() -> None:
    """A run of a year: work, save, fail, go back to the last checkpoint, restart."""
    from random import Random

    save, fails, restart, interval = 60.0, 6 * 3600.0, 300.0, 1600.0
    draw, useful, elapsed = Random(0), 0.0, 0.0
    failure = draw.expovariate(1 / fails)
    while elapsed < 365 * 86_400:
        if failure > interval + save:
            failure -= interval + save
            elapsed += interval + save
            useful += interval
        else:
            elapsed += failure + restart
            failure = draw.expovariate(1 / fails)
    found = ledger.goodput(interval=interval, save_seconds=save, failure_seconds=fails, restart_seconds=restart)
    assert found == pytest.approx(useful / elapsed, abs=0.005)


# Sizes that are none.


@pytest.mark.parametrize("size", [0, -1, nan, inf])
def test_absurd_sizes_are_refused_by_name(size: float) -> None:
    for call in (
        lambda: ledger.training_flops(size, 1e12),
        lambda: ledger.days(1e9, 1e9, size, 100),
        lambda: ledger.mfu(flops=1e15, seconds=size, gpus=8, peak_flops=A100),
        lambda: ledger.step_flops(layers=2, hidden=size, vocab=10, sequence=4, global_batch=2),  # type: ignore[arg-type]
        lambda: ledger.layer_activation_bytes(**{**GPT3, "heads": size}),
        lambda: ledger.checkpoint_interval(save_seconds=size, failure_seconds=1.0),
    ):
        with pytest.raises(ValueError, match="is no size: give a finite number above 0"):
            call()


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown recompute 'some': choose from none, selective, full"):
        ledger.step_flops(layers=2, hidden=8, vocab=10, sequence=4, global_batch=2, recompute="some")
    with pytest.raises(ValueError, match="10 layers do not divide into 4 stages"):
        ledger.activation_bytes(**GPT3, layers=10, pp=4)
    with pytest.raises(ValueError, match="stage 4 of 4: choose from 0 to 3"):
        ledger.activation_bytes(**GPT3, layers=8, pp=4, stage=4)
    with pytest.raises(ValueError, match="are shares"):
        ledger.run_seconds(1e20, 1e18, mfu=1.2)
