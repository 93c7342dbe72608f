"""A step on any mesh is the step of one process: tokens weigh the same, the norm counts each parameter once."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from math import log
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import minipar
from minipar import verify
from minipar.batches import IGNORED, Batch, RandomBatches
from minipar.mesh import plan
from minipar.model import GPTConfig, build
from minipar.train import Engine, TrainConfig, check, learning_rate, micro_batches_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = GPTConfig(layers=3, hidden=12, heads=2, vocab=11, sequence=4)
CONFIG = TrainConfig(model=MODEL, global_batch=4, micro_batches=1, precision="fp64", clip=0.0, warmup=0, lr=0.01)


# The norm of the gradient.


def put(engine: Engine, values: dict[str, list[float]]) -> None:
    """Make the gradient zero but for the first elements of some parameters, as far as this rank keeps them."""
    names = {id(parameter): name for name, parameter in engine.parameters().items()}
    for piece in engine.replicas.pieces():
        piece.gradient.zero_()
        for index, value in enumerate(values.get(names[id(piece.parameter)], [])):
            if piece.start <= index < piece.start + len(piece.gradient):
                piece.gradient[index - piece.start] = value


def norm_of(engine: Engine) -> float:
    nothing = torch.zeros((), dtype=torch.float64)
    return engine._measure(nothing).wait()[1].sqrt().item()


def norm_of_shards(mesh: Any, config: TrainConfig) -> float:
    """A split parameter with 3 on the first tp rank and 4 on the second, and a replicated one with 12."""
    engine = Engine(mesh, config)
    put(engine, {"blocks.0.mlp.up.weight": [3.0 + mesh.tp.rank], "blocks.2.norm1.weight": [12.0]})
    return norm_of(engine)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("pp", "dp"), [(1, 1), (1, 2), (2, 1), (3, 1)])
def test_shards_3_and_4_and_a_replicated_12_have_the_norm_13(pp: int, dp: int, zero: int) -> None:
    norms = minipar.run(norm_of_shards, plan(pp=pp, dp=dp, tp=2), replace(CONFIG, zero=zero))
    assert norms == [13.0] * (2 * pp * dp)


def norm_of_tied(mesh: Any, config: TrainConfig) -> float:
    """Both copies of the tied embedding hold 3 and 4; a norm's gain holds 12."""
    engine = Engine(mesh, config)
    copies = {"embedding.word.weight": [3.0, 4.0], "head.output.weight": [3.0, 4.0]}
    put(engine, copies | {"blocks.1.norm1.bias": [12.0]})
    return norm_of(engine)


@pytest.mark.parametrize(
    ("shape", "zero"), [((2, 1), 0), ((3, 1), 0), ((2, 2), 0), ((2, 2), 1), ((2, 2), 3), ((1, 2), 2)]
)
def test_the_norm_counts_tied_weights_once(shape: tuple[int, int], zero: int) -> None:
    config = replace(CONFIG, model=replace(MODEL, tied=True), zero=zero)
    mesh = plan(pp=shape[0], dp=shape[1])
    assert minipar.run(norm_of_tied, mesh, config) == [13.0] * mesh.size


def clip_to(mesh: Any, config: TrainConfig, values: list[float]) -> list[float]:
    engine = Engine(mesh, config)
    put(engine, {"blocks.0.norm1.weight": values})
    engine._scale_gradients(engine._clipped(norm_of(engine)))
    name = {id(parameter): name for name, parameter in engine.parameters().items()}
    pieces = {name[id(piece.parameter)]: piece.gradient for piece in engine.replicas.pieces()}
    return pieces["blocks.0.norm1.weight"][: len(values)].tolist()


@pytest.mark.parametrize("size", [0.5, 1 - 1e-6, 1 - 1e-7, 1.0, 1 + 1e-7, 3.0])
def test_a_gradient_is_scaled_as_torch_scales_it_just_below_the_limit_too(size: float) -> None:
    values = [0.6 * size, 0.8 * size]
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor(values, dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    for got in minipar.run(clip_to, plan(dp=1), replace(CONFIG, clip=1.0), values):
        assert got == pytest.approx(parameter.grad.tolist(), rel=1e-14)


# Gradients travel during the backward.


def arrived_at_launch(mesh: Any, config: TrainConfig) -> tuple[list[int], list[int]]:
    """How many gradients had arrived when each bucket was launched, and how many each of them waits for."""
    engine = Engine(mesh, config)
    order, arrived = engine.replicas._order, list[int]()
    launch = order.launch

    def launch_and_note(bucket: int) -> None:
        arrived.append(sum(order.seen))
        launch(bucket)

    order.launch = launch_and_note
    rows = RandomBatches(vocab=MODEL.vocab, sequence=MODEL.sequence, global_batch=4).rows(0, 0, 2)
    engine.step(rows)
    return arrived, order.counts


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_buckets_leave_during_the_backward_and_not_after_it(zero: int) -> None:
    """A bucket holds a block's gradients here: it may wait for the few that this block finishes after its last."""
    config = replace(CONFIG, zero=zero, bucket_bytes=8 * 2000)
    for arrived, counts in minipar.run(arrived_at_launch, plan(dp=2), config):
        assert len(counts) >= 4
        for bucket, seen in enumerate(arrived[:-1]):
            assert seen <= sum(counts[: bucket + 1]) + 12, (bucket, arrived, counts)
        assert arrived[0] < sum(counts) / 2


# Tokens.


def batch_with(counts: list[int]) -> Batch:
    """A row for each number: so many of its four targets count."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(MODEL.vocab, (len(counts), 4), generator=generator)
    targets = torch.randint(MODEL.vocab, (len(counts), 4), generator=generator)
    for row, count in enumerate(counts):
        targets[row, count:] = IGNORED
    return Batch(tokens, targets, torch.arange(len(counts)))


def one_step(mesh: Any, config: TrainConfig, batch: Batch) -> tuple[float, float, dict[str, verify.Part]]:
    engine = Engine(mesh, config)
    rows = config.global_batch // mesh.dp.size
    mine = slice(mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows)
    result = engine.step(Batch(batch.tokens[mine], batch.targets[mine], batch.samples[mine]))
    return result.loss, result.gradient_norm, verify.parts(engine)


def gradients_on(mesh: Any, config: TrainConfig, batch: Batch) -> tuple[list[float], dict[str, Tensor]]:
    """The losses that the ranks report, and the raw gradients, whole."""
    answers = minipar.run(one_step, mesh, config, batch)
    runs = [verify.RankRun([(loss, norm)], parts, None) for loss, norm, parts in answers]  # type: ignore[arg-type]
    return [loss for loss, _, _ in answers], verify.together(mesh, runs, config.model.tied).gradients


def mean_in_one_process(batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """torch's own mean over the tokens that count."""
    model = build(MODEL, 0, torch.float64)
    loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


TOKENS = [([1, 3], 1), ([3, 1], 1), ([1, 0, 3, 0], 2), ([0, 0, 1, 3], 2), ([4, 4, 1, 0], 2), ([0, 0, 0, 1], 2)]


@pytest.mark.parametrize("mesh", [plan(dp=2), plan(dp=2, pp=3), plan(dp=2, tp=2)], ids=str)
@pytest.mark.parametrize(("counts", "micro_batches"), TOKENS)
def test_every_token_weighs_the_same_wherever_it_lies(mesh: Any, counts: list[int], micro_batches: int) -> None:
    batch = batch_with(counts)
    want, gradients = mean_in_one_process(batch)
    config = replace(CONFIG, global_batch=len(counts), micro_batches=micro_batches)
    losses, got = gradients_on(mesh, config, batch)
    assert losses == [pytest.approx(want, rel=1e-12)] * mesh.size
    for name, gradient in gradients.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-10, atol=1e-15)


def test_a_mean_over_replicas_would_be_another_loss() -> None:
    """The mistake that the test above is there to see: with 1 and 3 tokens, the mean of means is not the mean."""
    batch = batch_with([1, 3])
    want, _ = mean_in_one_process(batch)
    by_row = [
        mean_in_one_process(Batch(batch.tokens[i : i + 1], batch.targets[i : i + 1], batch.samples[i : i + 1]))[0]
        for i in range(2)
    ]
    assert abs(sum(by_row) / 2 - want) > 1e-3
    assert (by_row[0] + 3 * by_row[1]) / 4 == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("zero", [0, 2])
def test_a_batch_with_nothing_to_learn_costs_nothing_and_harms_nothing(zero: int) -> None:
    losses, gradients = gradients_on(plan(dp=2), replace(CONFIG, zero=zero), batch_with([0, 0, 0, 0]))
    assert losses == [0.0, 0.0]
    assert not any(bool(gradient.any()) for gradient in gradients.values())


def test_an_untrained_model_loses_about_the_logarithm_of_the_vocabulary() -> None:
    losses, _ = gradients_on(plan(dp=2, tp=2), CONFIG, batch_with([4, 4, 4, 4]))
    assert losses[0] == pytest.approx(log(11), rel=0.02)


# Many steps.


def case(*, steps: int = 3, **changes: Any) -> verify.Case:
    degrees = {axis: changes.pop(axis, 1) for axis in ("dp", "pp", "tp")}
    model = {key: changes.pop(key) for key in ("tied", "dropout", "kv_heads") if key in changes}
    return verify.Case(degrees, replace(CONFIG, model=replace(MODEL, **model), **changes), steps=steps)


def equal(one: verify.Case) -> None:
    worst, where = verify.compare(one)
    assert worst <= verify.TOLERANCE, where


@pytest.mark.parametrize(
    "degrees", [{"dp": 2}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}, {"tp": 2, "pp": 2}], ids=str
)
def test_clipping_in_every_step_gives_the_weights_of_torchs_clip_grad_norm(degrees: dict[str, int]) -> None:
    one = case(clip=0.05, **degrees)
    batches = RandomBatches(vocab=11, sequence=4, global_batch=4, ragged=True)
    assert min(verify.reference(one.config, batches, 3).gradient_norms) > 0.05
    equal(one)


@pytest.mark.parametrize(
    "changes",
    [{"dp": 4}, {"dp": 2, "tp": 2, "sequence_parallel": True}, {"dp": 2, "pp": 2, "zero": 3, "schedule": "zb-h1"}],
    ids=str,
)
def test_with_dropout_replicas_are_bit_identical_after_20_steps_and_equal_to_one_process(
    changes: dict[str, Any],
) -> None:
    equal(case(steps=20, lr=1e-3, dropout=0.2, clip=0.5, micro_batches=1, **changes))


@pytest.mark.parametrize("changes", [{"pp": 1}, {"pp": 2}, {"pp": 2, "zero": 1}], ids=str)
def test_tied_embeddings_whose_two_stages_share_a_rank_or_do_not_stay_one(changes: dict[str, Any]) -> None:
    chunks = 3 if changes["pp"] == 1 else 1
    schedule = "interleaved" if chunks > 1 else "1f1b"
    equal(case(tied=True, schedule=schedule, chunks=chunks, micro_batches=2, **changes))


def losses_in(mesh: Any, config: TrainConfig, steps: int) -> list[float]:
    engine = Engine(mesh, config)
    batches = RandomBatches(vocab=11, sequence=4, global_batch=8, ragged=True)
    rows = 8 // mesh.dp.size
    first = mesh.dp.rank * rows
    return [engine.step(batches.rows(step, first, first + rows)).loss for step in range(steps)]


def test_in_float32_ten_steps_stay_within_a_ten_thousandth_of_one_process_in_float64() -> None:
    config = replace(CONFIG, global_batch=8, micro_batches=2, precision="fp32", sequence_parallel=True, zero=1)
    batches = RandomBatches(vocab=11, sequence=4, global_batch=8, ragged=True)
    want = verify.reference(config, batches, 10).losses
    for got in minipar.run(losses_in, plan(dp=2, pp=2, tp=2), config, 10):
        assert got == pytest.approx(want, rel=1e-4)


def names_on(mesh: Any, config: TrainConfig) -> list[str]:
    return list(Engine(mesh, config).parameters())


def test_the_ranks_of_a_pipeline_hold_every_parameter_of_the_model_once() -> None:
    by_rank = minipar.run(names_on, plan(pp=2), replace(CONFIG, schedule="interleaved"))
    names = [name for held in by_rank for name in held]
    assert sorted(names) == sorted(dict(build(MODEL).named_parameters()))


# The learning rate.


def test_the_learning_rate_warms_up_and_stays() -> None:
    config = TrainConfig(lr=1.0, warmup=4)
    assert [learning_rate(config, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(replace(config, warmup=0), 0) == 1.0


def test_the_learning_rate_follows_half_a_cosine_down_to_a_tenth() -> None:
    config = TrainConfig(lr=2.0, warmup=10, decay_steps=30)
    rates = [learning_rate(config, step) for step in range(10, 31)]
    assert rates[0] == pytest.approx(2.0) and rates[10] == pytest.approx(1.1) and rates[20] == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(rates))
    assert learning_rate(config, 1000) == pytest.approx(0.2)
    assert learning_rate(replace(config, decay_steps=5), 1000) == pytest.approx(0.2)


# What cannot be trained.


@pytest.mark.parametrize(
    ("changes", "shape", "texts"),
    [
        (
            {"global_batch": 6},
            (1, 4, 1),
            ["6 rows cannot be shared by dp=4 replicas: choose a multiple of 4, such as 8"],
        ),
        (
            {"global_batch": 6, "micro_batches": 4},
            (1, 1, 1),
            ["6 rows on each replica", "4 micro-batches", "1, 2, 3, 6"],
        ),
        ({}, (4, 1, 1), ["3 layers cannot fill 4 stages: choose at most 3 stages"]),
        ({}, (1, 1, 3), ["2 heads cannot be shared by tp=3 ranks: choose tp from 1, 2"]),
        ({"zero": 4}, (1, 1, 1), ["ZeRO has no stage 4: choose 0 (off), 1, 2 or 3"]),
        ({"precision": "fp8"}, (1, 1, 1), ["unknown precision 'fp8': choose from fp32"]),
        ({"schedule": "2f2b"}, (1, 1, 1), ["unknown schedule '2f2b': choose from"]),
        ({"chunks": 2}, (1, 1, 1), ["schedule 1f1b has one stage on each rank, not 2 chunks: choose interleaved"]),
        ({"lr": 0.0}, (1, 1, 1), ["lr 0: choose a learning rate above 0"]),
        ({"lr": float("nan")}, (1, 1, 1), ["lr nan: choose a learning rate above 0"]),
        ({"clip": -1.0}, (1, 1, 1), ["clip -1: choose a norm above 0"]),
        ({"clip": float("nan")}, (1, 1, 1), ["clip nan: choose a norm above 0"]),
        ({"micro_batches": 0}, (1, 1, 1), ["micro-batches 0: choose a whole number from 1"]),
        ({"steps": 0, "zero": 7}, (5, 1, 3), ["steps 0", "no stage 7", "2 heads", "3 layers"]),  # all that is wrong
    ],
)
def test_numbers_that_do_not_fit_each_other_are_all_named(
    changes: dict[str, Any], shape: tuple[int, int, int], texts: list[str]
) -> None:
    pp, dp, tp = shape
    with pytest.raises(ValueError) as caught:
        check(replace(CONFIG, **changes), {"dp": dp, "pp": pp, "tp": tp})
    assert "\n" not in str(caught.value)
    for text in texts:
        assert text in str(caught.value)


def test_no_replica_runs_more_micro_batches_than_it_has_rows() -> None:
    assert micro_batches_of(TrainConfig(global_batch=8, micro_batches=4), 4) == 2
    assert micro_batches_of(TrainConfig(global_batch=8, micro_batches=4), 1) == 4
