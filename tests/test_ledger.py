"""The accounts reproduce what papers publish, and what the engine counts and holds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest

import minipar
from minipar import ledger, report, trace
from minipar import schedule as schedules
from minipar.batches import RandomBatches
from minipar.facts import Traffic
from minipar.mesh import Mesh, plan
from minipar.model import GPTConfig
from minipar.train import Engine, TrainConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Parameters.

# Narayanan et al. 2021, 'Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM', table 1:
# billions of parameters, heads, hidden, layers; sequence 2048, vocabulary 51200.
MEGATRON = [
    (1.7, 24, 2304, 24),
    (3.6, 32, 3072, 30),
    (7.5, 32, 4096, 36),
    (39.1, 64, 8192, 48),
    (76.1, 80, 10240, 60),
    (310.1, 128, 16384, 96),
    (1008.0, 160, 25600, 128),
]


@pytest.mark.parametrize(("billions", "heads", "hidden", "layers"), MEGATRON)
def test_the_parameters_are_those_of_the_megatron_paper(billions: float, heads: int, hidden: int, layers: int) -> None:
    count = ledger.parameters(layers=layers, hidden=hidden, heads=heads, vocab=51200, sequence=2048)
    assert round(count / 1e9, 1) == billions


def test_the_parameters_follow_the_papers_formula_up_to_the_last_layer_norm() -> None:
    layers, hidden, vocab, sequence = 7, 20, 11, 6
    formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + sequence) / (12 * layers * hidden))
    count = ledger.parameters(layers=layers, hidden=hidden, heads=4, vocab=vocab, sequence=sequence)
    assert count == pytest.approx(formula + 2 * hidden, rel=1e-12)


def test_an_untied_projection_and_grouped_heads_change_the_count_by_their_matrices() -> None:
    count = lambda **options: ledger.parameters(layers=3, hidden=20, heads=4, vocab=11, sequence=6, **options)
    assert count(tied=False) - count() == 11 * 20
    assert count() - count(kv_heads=1) == 3 * 2 * (3 * 5) * (20 + 1)  # 3 of 4 heads of width 5, keys and values


# Model states.

# Rajbhandari et al. 2020, 'ZeRO: Memory Optimizations Toward Training Trillion Parameter Models', table 1: billions of
# parameters, data-parallel ranks, GB a rank in stages 1, 2 and 3 (mixed precision Adam; 1 GB is 1e9 bytes).
ZERO = [
    (7.5, 1, ("120", "120", "120")),
    (7.5, 4, ("52.5", "41.3", "30")),
    (7.5, 16, ("35.6", "21.6", "7.5")),
    (7.5, 64, ("31.4", "16.6", "1.88")),
    (7.5, 256, ("30.4", "15.4", "0.47")),
    (7.5, 1024, ("30.1", "15.1", "0.12")),
    (128, 1, ("2048", "2048", "2048")),
    (128, 4, ("896", "704", "512")),
    (128, 16, ("608", "368", "128")),
    (128, 64, ("536", "284", "32")),
    (128, 256, ("518", "263", "8")),
    (128, 1024, ("513", "257", "2")),
]


@pytest.mark.parametrize(("billions", "dp", "published"), ZERO)
def test_model_states_are_those_of_the_zero_paper(billions: float, dp: int, published: Sequence[str]) -> None:
    for zero, figure in enumerate(published, 1):
        total = ledger.model_state_bytes(billions * 1e9, dp=dp, zero=zero).total / 1e9
        last_digit = 10.0 ** -len(figure.partition(".")[2])  # the paper rounds some figures and cuts others
        assert abs(total - float(figure)) < last_digit


def test_without_zero_each_rank_holds_sixteen_bytes_a_parameter_whatever_dp_is() -> None:
    state = ledger.model_state_bytes(1000, dp=8)
    assert (state.weights, state.gradients, state.optimizer, state.total) == (2000, 2000, 12000, 16000)
    assert state["optimizer"] == 12000


def test_tensor_and_pipeline_parallel_share_everything() -> None:
    assert ledger.model_state_bytes(1000, tp=2, pp=5).total == 1600
    assert ledger.model_state_bytes(1000, dp=2, tp=2, pp=5, zero=3).total == 800


@pytest.mark.parametrize(("precision", "total"), [("mixed", 16), ("fp32", 16), ("fp64", 32)])
def test_each_precision_has_its_bytes_a_parameter(precision: str, total: int) -> None:
    assert ledger.model_state_bytes(1, precision=precision).total == total


def test_what_does_not_exist_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="unknown precision 'fp4': choose from mixed, fp32, fp64"):
        ledger.model_state_bytes(1, precision="fp4")
    with pytest.raises(ValueError, match=r"ZeRO has no stage 5: choose 0 \(off\), 1, 2 or 3"):
        ledger.model_state_bytes(1, zero=5)


# Messages: by closed formulas, then against what the engine counts.

SHAPE = ledger.Shape(hidden=20, heads=4, vocab=11, sequence=8, stage_layers=(3,), global_batch=4, micro_batches=2)
P = ledger.parameters(layers=3, hidden=20, heads=4, vocab=11, sequence=8, tied=False)
BTD = 8 * 20 * 4  # bytes of [T, D], in float32


def test_one_rank_sends_nothing() -> None:
    assert ledger.communication_bytes(SHAPE) == {}


def test_data_parallel_sends_each_gradient_once_however_many_ranks_and_micro_batches() -> None:
    for dp in (2, 4):
        sent = ledger.communication_bytes(replace(SHAPE, dp=dp, micro_batches=4 // dp))
        assert sent == {("dp", "all_reduce"): 4 * P, ("world", "all_reduce"): 4 * 8}


def padded(zero: int, dp: int) -> int:
    """The values of all buckets: with ZeRO 3 the embedding's, three blocks' and the head's."""
    block = (P - (8 + 11 + 2) * 20 - 11 * 20) // 3
    buckets = [(8 + 11) * 20, block, block, block, 11 * 20 + 2 * 20] if zero == 3 else [P]
    return sum(-(-bucket // dp) * dp for bucket in buckets)


@pytest.mark.parametrize(("zero", "scatters", "gathers"), [(1, 1, 1), (2, 2, 1), (3, 2, 4)])
def test_zero_scatters_gradients_and_gathers_parameters_as_often_as_its_docstring_says(
    zero: int, scatters: int, gathers: int
) -> None:
    sent = ledger.communication_bytes(replace(SHAPE, dp=3, global_batch=6, zero=zero))  # 2 micro-batches
    values = padded(zero, 3)
    assert sent["dp", "reduce_scatter"] == 4 * values * scatters
    assert sent["dp", "all_gather"] == 4 * (values // 3) * gathers


def test_zero_3_moves_one_and_a_half_times_the_bytes_of_data_parallel_at_one_micro_batch() -> None:
    """Through each link: an all_reduce moves 2 (n-1)/n of its bytes; a scatter (n-1)/n; a gather n-1 shares."""
    shape, n = replace(SHAPE, dp=4, micro_batches=1), 4
    plain, zero = ledger.communication_bytes(shape), ledger.communication_bytes(replace(shape, zero=3))
    moved = zero["dp", "reduce_scatter"] * (n - 1) / n + zero["dp", "all_gather"] * (n - 1)
    assert moved / ((plain["dp", "all_reduce"] - 8) * 2 * (n - 1) / n) == pytest.approx(1.5, rel=0.01)


def test_tensor_parallel_reduces_four_activations_a_layer_two_at_the_ends_and_three_numbers_a_token() -> None:
    sent = ledger.communication_bytes(replace(SHAPE, tp=2))  # 2 micro-batches of 2 rows
    assert sent["tp", "all_reduce"] == 2 * ((4 * 3 + 2) * 2 * BTD + 3 * 2 * 8 * 4)


def test_by_sequence_the_pairs_of_gather_and_scatter_take_the_place_of_the_all_reduces() -> None:
    sent = ledger.communication_bytes(replace(SHAPE, tp=2, sequence_parallel=True))
    borders = 2 * 3  # each layer is entered twice and left twice; the embedding is left, the head entered
    assert sent["tp", "reduce_scatter"] == 2 * (2 * borders + 2) * 2 * BTD
    assert sent["tp", "all_gather"] == 2 * (2 * (borders + 1) + borders + 1) * 2 * BTD // 2  # entered: again backward


def test_a_pipeline_sends_an_activation_down_and_a_gradient_up_each_border() -> None:
    shape = replace(SHAPE, pp=3, stage_layers=(1, 1, 1))
    sent = [ledger.communication_bytes(shape, pp_rank=rank)["pp", "send"] for rank in range(3)]
    assert sent == [2 * 2 * BTD, 2 * 2 * 2 * BTD, 2 * 2 * BTD]  # micro-batches, rows; the middle one sends both ways


def test_tied_embeddings_are_exchanged_between_the_first_stage_and_the_last() -> None:
    shape = replace(SHAPE, pp=3, stage_layers=(1, 1, 1), tied=True)
    apart = replace(shape, tied=False)
    for rank, extra in ((0, 4 * 11 * 20), (1, 0), (2, 4 * 11 * 20)):
        both = [ledger.communication_bytes(s, pp_rank=rank)["pp", "send"] for s in (shape, apart)]
        assert both[0] - both[1] == extra


MODEL = GPTConfig(layers=5, hidden=20, heads=4, vocab=11, sequence=8)
CONFIG = TrainConfig(model=MODEL, global_batch=8, micro_batches=2, bucket_bytes=4000)
TIED = replace(CONFIG, model=replace(MODEL, tied=True, kv_heads=2, vocab=5))


def step_on(mesh: Any, config: TrainConfig) -> tuple[Traffic, int]:
    """What a rank sends in one step, and the most that autograd keeps in it."""
    engine = Engine(mesh, config)
    batches = RandomBatches(vocab=config.model.vocab, sequence=8, global_batch=config.global_batch)
    rows = config.global_batch // mesh.dp.size
    mesh.world.wire.messages.clear()
    with trace.ActivationMeter(engine.parameters().values()) as meter:
        engine.step(batches.rows(0, mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows))
    assert meter.now == 0
    return trace.traffic(mesh.world.wire.messages), meter.peak


RUNS: dict[str, tuple[Mesh, TrainConfig]] = {
    "one rank": (plan(), CONFIG),
    "dp 3, unequal pieces": (plan(dp=3), replace(CONFIG, global_batch=6)),
    "tp 2, five words, tied": (plan(tp=2), TIED),
    "tp 4": (plan(tp=4), CONFIG),
    "tp 2 by sequence, tied": (plan(tp=2), replace(TIED, sequence_parallel=True)),
    "pp 4, 1f1b": (plan(pp=4), replace(CONFIG, micro_batches=8)),
    "pp 2, gpipe": (plan(pp=2), replace(CONFIG, schedule="gpipe", micro_batches=4)),
    "pp 2, zb-h1": (plan(pp=2), replace(CONFIG, schedule="zb-h1", micro_batches=4)),
    "pp 2, interleaved, tied": (plan(pp=2), replace(TIED, schedule="interleaved", chunks=2)),
    "dp 2, pp 2, zero 2, tied": (plan(dp=2, pp=2), replace(TIED, zero=2)),
    "bf16": (plan(), replace(CONFIG, precision="bf16")),
    "tp 2, grouped, bf16, recompute full": (plan(tp=2), replace(TIED, precision="bf16", recompute="full")),
    "pp 2, zb-h1, recompute full": (plan(pp=2), replace(CONFIG, schedule="zb-h1", micro_batches=4, recompute="full")),
    "tp 2 by sequence, recompute full": (plan(tp=2), replace(CONFIG, sequence_parallel=True, recompute="full")),
    "pp 2, recompute selective": (plan(pp=2), replace(CONFIG, micro_batches=4, recompute="selective")),
    "tp 2, grouped, recompute selective, fp16": (plan(tp=2), replace(TIED, precision="fp16", recompute="selective")),
    "dp 2, zero 3, recompute full": (plan(dp=2), replace(CONFIG, zero=3, recompute="full")),
    "dp 2, tp 2, zero 3, tied, by sequence": (plan(dp=2, tp=2), replace(TIED, zero=3, sequence_parallel=True)),
}


@pytest.mark.parametrize(("mesh", "config"), RUNS.values(), ids=RUNS)
def test_a_step_sends_exactly_the_predicted_bytes_and_keeps_exactly_the_predicted_activations(
    mesh: Mesh, config: TrainConfig
) -> None:
    shape = report.shape_of(config, mesh)
    order = schedules.by_name(config.schedule, mesh.shape["pp"], shape.micro_batches, config.chunks)
    for rank, (traffic, kept) in enumerate(minipar.run(step_on, mesh, config)):
        place = mesh.coordinates(rank)
        counted = {key: volume.bytes for key, volume in traffic.volumes.items()}
        assert counted == ledger.communication_bytes(shape, dp_rank=place["dp"], pp_rank=place["pp"])
        predicted = ledger.peak_activation_bytes(shape, order, place["pp"])
        assert kept == predicted
