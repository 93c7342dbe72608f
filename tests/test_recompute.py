"""Recompute: the same numbers to the last bit, less kept, and the forward's work and messages once more."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest
import torch

import minipar
from minipar import model as models
from minipar import pp, recompute, trace
from minipar.batches import RandomBatches
from minipar.facts import Kind
from minipar.mesh import Mesh, plan
from minipar.model import GPTConfig
from minipar.train import Engine, TrainConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = GPTConfig(layers=4, hidden=24, heads=4, kv_heads=2, vocab=29, sequence=12, dropout=0.2)
CONFIG = TrainConfig(model=MODEL, global_batch=8, micro_batches=4, precision="fp64", lr=1e-2, warmup=0)


def train(mesh: Mesh, config: TrainConfig, steps: int) -> tuple[list[tuple[float, float]], dict[str, Any], int, Any]:
    """Losses and norms, weights by name, the most that was kept, and messages by group and operation."""
    engine = Engine(mesh, config)
    model = config.model
    batches = RandomBatches(vocab=model.vocab, sequence=model.sequence, global_batch=config.global_batch)
    rows = config.global_batch // mesh.dp.size
    mesh.world.wire.messages.clear()
    with trace.ActivationMeter(engine.parameters().values()) as meter:
        done = [engine.step(batches.rows(s, mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows)) for s in range(steps)]
    if config.zero == 3:
        engine.replicas.gather()  # type: ignore[union-attr]
    weights = {name: weight.detach().clone() for name, weight in engine.parameters().items()}
    calls = Counter((message.group, message.op) for message in mesh.world.wire.messages)
    return [(one.loss, one.gradient_norm) for one in done], weights, meter.peak, calls


TOPOLOGIES: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "one rank": (plan(), {}),
    "dp 2": (plan(dp=2), {}),
    "tp 2": (plan(tp=2), {}),
    "tp 2 by sequence": (plan(tp=2), {"sequence_parallel": True}),
    "pp 2, 1f1b": (plan(pp=2), {}),
    "pp 2, gpipe": (plan(pp=2), {"schedule": "gpipe"}),
    "pp 2, zb-h1": (plan(pp=2), {"schedule": "zb-h1"}),
    "pp 2, zb-h2": (plan(pp=2), {"schedule": "zb-h2"}),
    "pp 2, interleaved, tied": (
        plan(pp=2),
        {"schedule": "interleaved", "chunks": 2, "model": replace(MODEL, tied=True)},
    ),
    "dp 2, zero 1": (plan(dp=2), {"zero": 1}),
    "dp 2, zero 2": (plan(dp=2), {"zero": 2}),
    "dp 2, zero 3": (plan(dp=2), {"zero": 3}),
    "dp 2, tp 2, zero 3, by sequence": (plan(dp=2, tp=2), {"zero": 3, "sequence_parallel": True}),
    "dp 2, pp 2, zero 2, zb-h1": (plan(dp=2, pp=2), {"zero": 2, "schedule": "zb-h1"}),
}


@pytest.mark.parametrize(("mesh", "changes"), TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_nothing_changes_in_the_numbers_also_with_dropout(mesh: Mesh, changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    with minipar.World(mesh) as world:
        plain, *others = (world.run(train, replace(config, recompute=how), 2) for how in ("none", "selective", "full"))
    for again in others:
        for (steps, weights, kept, _), (steps_again, weights_again, kept_again, _) in zip(plain, again, strict=True):
            assert steps_again == steps
            assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())
            assert kept_again < kept


def test_with_dropout_the_scores_and_masks_are_most_of_what_selective_saves() -> None:
    """A head's scores and mask are [T, T] for each row: with a long sequence, most of all."""
    config = replace(CONFIG, model=replace(MODEL, sequence=96, kv_heads=4))
    (_, _, none, _), (_, _, selective, _), (_, _, full, _) = (
        minipar.run(train, plan(), replace(config, recompute=how), 1)[0] for how in ("none", "selective", "full")
    )
    scores = 4 * 4 * 96 * 96 * 8  # layers, heads, bytes of one [T, T] matrix of 64 bits, of two rows: times 2
    assert none - selective > 2 * scores
    assert full < none / 3


def test_tensor_parallels_forward_messages_are_sent_once_more() -> None:
    for sequence_parallel, op in ((False, "all_reduce"), (True, "reduce_scatter")):
        config = replace(CONFIG, sequence_parallel=sequence_parallel)
        (*_, plain), (*_, again) = (
            minipar.run(train, plan(tp=2), replace(config, recompute=how), 1)[0] for how in ("none", "full")
        )
        assert again["tp", op] - plain["tp", op] == 4 * 4 * 2  # micro-batches, layers, two ends of the split region


def forwards(mesh: Mesh, how: str) -> int:
    calls = 0
    real = models.MLP.forward

    def counted(self: Any, x: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(self, x)

    models.MLP.forward = counted  # type: ignore[method-assign]
    train(mesh, replace(CONFIG, recompute=how), 1)
    return calls


def test_full_recomputation_runs_every_block_twice_and_selective_no_mlp_again() -> None:
    calls = {how: minipar.run(forwards, plan(), how)[0] for how in ("none", "selective", "full")}
    assert calls == {"none": 16, "selective": 16, "full": 32}


# Known-wrong.


def masks_of_another_sample(mesh: Mesh) -> list[tuple[float, float]]:
    """The second forward draws the masks of the samples that came last."""
    real = recompute._Again.forward

    def forward(ctx: Any, x: Any, owner: Any, run: Any, model: Any) -> Any:
        answer = real(ctx, x, owner, run, model)
        ctx.samples = [7 - sample % 8 for sample in ctx.samples]
        return answer

    recompute._Again.forward = staticmethod(forward)  # type: ignore[method-assign]
    return train(mesh, replace(CONFIG, recompute="full"), 2)[0]


def test_masks_of_other_samples_are_seen_in_the_gradient_and_not_in_the_loss() -> None:
    truth = minipar.run(train, plan(), CONFIG, 2)[0][0]
    wrong = minipar.run(masks_of_another_sample, plan())[0]
    assert wrong[0][0] == pytest.approx(truth[0][0]) and wrong[0][1] != pytest.approx(truth[0][1], rel=1e-6)


def postponed(mesh: Mesh, how: str) -> list[int]:
    """How many weight gradients each W action finds in its queue."""
    found: list[int] = []
    real = pp.Pipeline._compute

    def compute(self: Any, action: Any) -> None:
        if action.kind is Kind.WEIGHT:
            found.append(len(self._postponed[action.stage, action.micro_batch]))
        real(self, action)

    pp.Pipeline._compute = compute  # type: ignore[method-assign]
    train(mesh, replace(CONFIG, recompute=how, schedule="zb-h1"), 1)
    return found


def test_each_micro_batchs_weight_gradients_wait_for_their_own_w() -> None:
    by_rank = minipar.run(postponed, plan(pp=2), "full")
    assert by_rank == minipar.run(postponed, plan(pp=2), "none")
    assert all(len(set(counts)) == 1 and len(counts) == 4 for counts in by_rank)
