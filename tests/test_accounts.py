"""Data, stability and collectives by arithmetic: against draws at random, against rings played step by step."""

from __future__ import annotations

import math
from math import inf, nan
from random import Random
from statistics import mean

import pytest

from minipar import ledger
from minipar.catalogue import LINKS, Link

# Data.


def test_twenty_tokens_a_parameter_spend_a_budget_best() -> None:
    """Chinchilla: 70 billion parameters on 1.4 trillion tokens for 5.9e23 FLOPs."""
    assert ledger.tokens_needed(70e9) == 1.4e12
    flops = ledger.training_flops(70e9, 1.4e12)
    assert ledger.best_parameters(flops) == pytest.approx(70e9)
    for ratio in (5.0, 100.0):
        parameters = ledger.best_parameters(flops, ratio)
        assert ledger.training_flops(parameters, ratio * parameters) == pytest.approx(flops)


@pytest.mark.parametrize(("epochs", "worth"), [(1, 1.0), (2, 0.98), (4, 0.93), (16, 0.66), (40, 0.38)])
def test_repeated_tokens_are_worth_less_each_time(epochs: int, worth: float) -> None:
    """The sum of what each further epoch adds, `exp(-r / R*)` of fresh text, in small steps."""
    steps, R = 10_000, 15.39
    summed = 1 + sum(math.exp(-(epochs - 1) * (i + 0.5) / steps / R) for i in range(steps)) * (epochs - 1) / steps
    value = ledger.tokens_worth(epochs * 1e9, 1e9)
    assert value / 1e9 == pytest.approx(summed, rel=1e-6)
    assert value / (epochs * 1e9) == pytest.approx(worth, abs=0.005)
    assert ledger.epochs(epochs * 1e9, 1e9) == epochs


def test_more_text_than_is_seen_is_no_repetition() -> None:
    assert ledger.tokens_worth(1e9, 5e9) == 1e9


def test_what_is_thrown_away_must_be_collected_first() -> None:
    need = ledger.crawled_tokens(1e12, kept=0.2, duplicates=0.5)
    assert need == pytest.approx(1e13)
    assert need * (1 - 0.5) * 0.2 == pytest.approx(1e12)


def test_a_score_on_questions_that_were_in_the_text_is_too_good() -> None:
    questions, seen, known = 1000, 200, 0.6
    right = seen + known * (questions - seen)
    assert ledger.true_score(right / questions, contaminated=seen / questions) == pytest.approx(known)
    assert ledger.true_score(0.7, contaminated=0.0) == 0.7


# Stability.


def test_as_many_failures_as_there_are_gpus() -> None:
    """Llama 3: 419 interruptions of 16,384 GPUs in 54 days."""
    apart = ledger.failure_seconds(16_384)
    assert 54 * 86_400 / apart == pytest.approx(419)
    assert ledger.failure_seconds(1) == pytest.approx(16_384 * apart)


def lived(interval: float, save: float, fails: float, restart: float, seconds: float) -> float:
    """The share of useful time of a run in which failures come at random, also while it restarts."""
    draw, now, useful = Random(1), 0.0, 0.0
    failure = draw.expovariate(1 / fails)
    while now < seconds:
        if failure > interval + save:
            failure -= interval + save
            now, useful = now + interval + save, useful + interval
            continue
        now, failure = now + failure, draw.expovariate(1 / fails)
        while failure < restart:
            now, failure = now + failure, draw.expovariate(1 / fails)
        now, failure = now + restart, failure - restart
    return useful / now


@pytest.mark.parametrize("fails", [1200.0, 3600.0, 86_400.0])
def test_goodput_where_failures_are_frequent(fails: float) -> None:
    sizes = {"interval": 600.0, "save_seconds": 60.0, "restart_seconds": 300.0}
    found = ledger.exact_goodput(**sizes, failure_seconds=fails)
    assert found == pytest.approx(lived(600.0, 60.0, fails, 300.0, 20_000 * fails), rel=0.02)
    if fails > 50_000:
        assert found == pytest.approx(ledger.goodput(**sizes, failure_seconds=fails), rel=0.005)


def test_no_run_ends_where_a_restart_takes_longer_than_failures_leave() -> None:
    assert ledger.exact_goodput(interval=600, save_seconds=60, failure_seconds=1, restart_seconds=3600) == 0.0


@pytest.mark.parametrize(("ranks", "jitter"), [(1, 0.1), (64, 0.05), (4096, 0.02)])
def test_all_wait_for_the_slowest(ranks: int, jitter: float) -> None:
    draw = Random(2)
    slowest = mean(max(draw.gauss(1.0, jitter) for _ in range(ranks)) for _ in range(100))
    assert ledger.straggler_factor(ranks, jitter) == pytest.approx(slowest, abs=0.03)


def test_a_loss_scale_as_large_as_float16_allows() -> None:
    for largest in (1e-3, 0.7, 3.0, 65504.0, 1e6):
        scale = ledger.loss_scale_limit(largest)
        assert scale * largest <= 65504 < 2 * scale * largest and math.log2(scale) == int(math.log2(scale))


def test_dynamic_loss_scaling_skips_one_step_in_every_growth_interval() -> None:
    scale, good, skipped, limit = 2.0**10, 0, 0, 2.0**16
    for _ in range(100_000):
        if scale > limit:
            skipped, scale, good = skipped + 1, scale / 2, 0
            continue
        good += 1
        if good == 100:
            scale, good = scale * 2, 0
    assert skipped / 100_000 == pytest.approx(ledger.skipped_share(100), rel=0.02)


# Collectives.


def played_ring(op: str, ranks: int, size: int) -> tuple[int, int]:
    """A ring in which each rank holds `ranks` pieces and passes one on at a time: bytes that a rank sent, and steps."""
    piece, sent, steps = size // ranks, 0, 0
    have = [{rank} if op == "all_gather" else set(range(ranks)) for rank in range(ranks)]
    summed = [[1] * ranks for _ in range(ranks)]  # how many ranks' values are in each piece
    if op in ("all_reduce", "reduce_scatter"):
        for step in range(ranks - 1):
            moved = [(rank, (rank - step) % ranks) for rank in range(ranks)]
            values = [summed[rank][which] for rank, which in moved]
            for (rank, which), value in zip(moved, values, strict=True):
                summed[(rank + 1) % ranks][which] += value
            sent, steps = sent + piece, steps + 1
        assert all(summed[rank][(rank + 1) % ranks] == ranks for rank in range(ranks))
    if op in ("all_reduce", "all_gather"):
        have = [{(rank + (op == "all_reduce")) % ranks} for rank in range(ranks)]
        for step in range(ranks - 1):
            moved = [(rank, (rank + (op == "all_reduce") - step) % ranks) for rank in range(ranks)]
            assert all(which in have[rank] for rank, which in moved)
            for rank, which in moved:
                have[(rank + 1) % ranks].add(which)
            sent, steps = sent + piece, steps + 1
        assert all(len(pieces) == ranks for pieces in have)
    return sent, steps


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_ring_sends_and_steps_as_the_formula_says(op: str, ranks: int) -> None:
    size = 24 * ranks
    sent, steps = played_ring(op, ranks, size)
    payload = size // ranks if op == "all_gather" else size
    assert ledger.ring_bytes(op, payload, ranks) == sent
    seconds = ledger.collective_seconds(op, payload, ranks, Link("slow", 10.0, 0.5))
    assert seconds == pytest.approx(steps * 0.5 + sent / 10)


def test_an_all_reduce_costs_as_much_as_scatter_and_gather_and_at_most_twice_its_buffer() -> None:
    for ranks in (2, 16, 1024):
        both = ledger.ring_bytes("reduce_scatter", 1e9, ranks) + ledger.ring_bytes("all_gather", 1e9 / ranks, ranks)
        assert ledger.ring_bytes("all_reduce", 1e9, ranks) == pytest.approx(both)
        assert 1e9 <= both < 2e9


def test_links_inside_a_node_are_some_times_faster() -> None:
    slow, fast = (ledger.collective_seconds("all_reduce", 1e9, 8, LINKS[name]) for name in ("ndr", "nvlink4"))
    assert slow / fast == pytest.approx(9, rel=0.05)


@pytest.mark.parametrize("value", [0, -1, nan, inf])
def test_what_is_no_size_is_refused_by_name(value: float) -> None:
    for call in (
        lambda: ledger.tokens_needed(value),
        lambda: ledger.best_parameters(value),
        lambda: ledger.tokens_worth(1e9, value),
        lambda: ledger.crawled_tokens(value, kept=0.5, duplicates=0.1),
        lambda: ledger.failure_seconds(value),
        lambda: ledger.loss_scale_limit(value),
        lambda: ledger.exact_goodput(interval=value, save_seconds=1, failure_seconds=1),
        lambda: ledger.ring_bytes("all_reduce", 1.0, value),  # type: ignore[arg-type]
        lambda: ledger.token_days(1e9, value),
        lambda: ledger.petaflop_days(value),
        lambda: ledger.energy_mwh(value, 400),
        lambda: ledger.token_flops(value),
    ):
        with pytest.raises(ValueError, match="is no size: give a finite number above 0"):
            call()


def test_what_is_no_share_is_refused() -> None:
    for call in (
        lambda: ledger.crawled_tokens(1e9, kept=1.5, duplicates=0.1),
        lambda: ledger.crawled_tokens(1e9, kept=0.5, duplicates=1.0),
        lambda: ledger.true_score(1.2, contaminated=0.1),
        lambda: ledger.true_score(0.2, contaminated=1.0),
        lambda: ledger.straggler_factor(8, 1.0),
        lambda: ledger.token_flops(1e9, recomputed=2.0),
    ):
        with pytest.raises(ValueError, match="share"):
            call()
    with pytest.raises(ValueError, match="unknown operation 'reduce': choose from all_reduce"):
        ledger.ring_bytes("reduce", 1.0, 2)
