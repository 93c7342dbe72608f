"""Mixed precision: near to one process in 64 bits on every topology, and steps that all ranks skip together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import cloudpickle
import pytest
import torch

import minipar
from minipar import ledger, report, trace, verify
from minipar.batches import RandomBatches
from minipar.mesh import Mesh, plan
from minipar.model import GPTConfig
from minipar.precision import LossScale, MasterOptimizer
from minipar.train import Engine, TrainConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = GPTConfig(layers=4, hidden=32, heads=4, vocab=101, sequence=16)
CONFIG = TrainConfig(model=MODEL, global_batch=8, micro_batches=4, lr=2e-3, warmup=0, precision="bf16")


def rows_of(mesh: Mesh, config: TrainConfig, step: int) -> Any:
    batches = RandomBatches(vocab=config.model.vocab, sequence=config.model.sequence, global_batch=config.global_batch)
    rows = config.global_batch // mesh.dp.size
    return batches.rows(step, mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows)


def train(mesh: Mesh, config: TrainConfig, steps: int) -> tuple[list[float], list[float]]:
    engine = Engine(mesh, config)
    done = [engine.step(rows_of(mesh, config, 0)) for _ in range(steps)]
    return [one.loss for one in done], [one.gradient_norm for one in done]


TOPOLOGIES: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "one rank": (plan(), {}),
    "dp 2": (plan(dp=2), {}),
    "dp 3": (plan(dp=3), {"global_batch": 9, "micro_batches": 3}),
    "tp 2": (plan(tp=2), {}),
    "tp 2 by sequence": (plan(tp=2), {"sequence_parallel": True}),
    "pp 2, 1f1b": (plan(pp=2), {}),
    "pp 2, zb-h1, tied": (plan(pp=2), {"schedule": "zb-h1", "model": replace(MODEL, tied=True)}),
    "dp 2, zero 1": (plan(dp=2), {"zero": 1}),
    "dp 2, zero 2": (plan(dp=2), {"zero": 2}),
    "dp 2, zero 3": (plan(dp=2), {"zero": 3}),
    "dp 2, tp 2, zero 1": (plan(dp=2, tp=2), {"zero": 1}),
    "dp 2, pp 2, zero 3, interleaved": (plan(dp=2, pp=2), {"zero": 3, "schedule": "interleaved", "chunks": 2}),
}


@cache
def alone(model: GPTConfig, global_batch: int, steps: int) -> tuple[list[float], list[float]]:
    """One process in 64 bits."""
    config = replace(CONFIG, model=model, global_batch=global_batch, micro_batches=1, precision="fp64")
    losses, norms = minipar.run(train, plan(), config, steps)[0]
    return losses, norms


@pytest.mark.parametrize(("mesh", "changes"), TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_a_topology_learns_as_one_process_in_64_bits_does(mesh: Mesh, changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    true_losses, true_norms = alone(config.model, config.global_batch, 5)
    with minipar.World(mesh) as world:
        for precision, room in (("bf16", 5e-3), ("fp16", 1e-3)):  # 8 and 11 bits of a number
            losses, norms = world.run(train, replace(config, precision=precision), 5)[0]
            assert losses == pytest.approx(true_losses, rel=room)
            assert norms[0] == pytest.approx(true_norms[0], rel=room)
            assert losses[-1] < losses[0] - 0.05


def small_steps(mesh: Mesh, config: TrainConfig) -> tuple[list[float], list[float]]:
    """The first weights of a layer after each of some steps that are far too small for 16 bits."""
    engine = Engine(mesh, replace(config, lr=1e-6))
    weight = next(p for name, p in engine.parameters().items() if name.endswith("up.weight"))
    start = weight.detach().float().clone()
    for _ in range(20):
        engine.step(rows_of(mesh, config, 0))
    change = (engine.optimizer.state[weight]["weight"] - start).abs().mean().item()
    return [change], [(weight.detach().float() - engine.optimizer.state[weight]["weight"]).abs().max().item()]


def test_masters_remember_steps_that_16_bits_would_lose() -> None:
    """20 steps of Adam, 1e-6 each; weights are about 0.02, between which and the next number of 8 bits lie 6e-5."""
    (change,), (rounding,) = minipar.run(small_steps, plan(), CONFIG)[0]
    assert 1e-5 < change < 3e-5
    assert rounding <= 0.1 * 2**-8


def test_a_master_optimizer_takes_the_steps_of_the_plain_one_in_32_bits() -> None:
    torch.manual_seed(0)
    first, gradients = torch.randn(50), [torch.randn(50).bfloat16() for _ in range(4)]
    low, wide = torch.nn.Parameter(first.bfloat16()), torch.nn.Parameter(first.bfloat16().float())
    adam = lambda groups: torch.optim.AdamW(groups, lr=0.1)
    mixed, plain = MasterOptimizer(adam, [{"params": [low]}]), adam([wide])
    mixed.factor = 0.25
    for gradient in gradients:
        low.grad, wide.grad = gradient, gradient.float() / 4
        mixed.step()
        plain.step()
    assert torch.equal(mixed.state[low]["weight"], wide.data) and torch.equal(low.data, wide.data.bfloat16())


def held(mesh: Mesh, config: TrainConfig) -> tuple[int, int, int, int]:
    engine = Engine(mesh, config)
    engine.step(rows_of(mesh, config, 0))
    print_ = trace.footprint(engine.replicas.held_bytes(), engine.optimizer, 0)
    return print_.parameters, print_.gradients, print_.optimizer, sum(p.numel() for p in engine.parameters().values())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_parameter_takes_16_bytes_of_which_zero_shares_what_the_ledger_says(zero: int) -> None:
    config = replace(CONFIG, zero=zero, model=replace(MODEL, hidden=64))
    shape = report.shape_of(config, plan(dp=2))
    state = ledger.model_state_bytes(ledger.rank_parameters(shape, 0), dp=2, zero=zero)
    for weights, gradients, optimizer, _ in minipar.run(held, plan(dp=2), config):
        assert weights == pytest.approx(state.weights, rel=0.01)
        assert gradients == pytest.approx(state.gradients, rel=0.01)
        assert optimizer == pytest.approx(state.optimizer, rel=0.01)


# Overflow.


def spoil_backward(engine: Engine, value: float) -> None:
    """This rank's next backward finds `value` in the gradient that it is given."""
    pipeline = engine.pipeline
    real = pipeline._backward

    def backward(action: Any, gradient: Any) -> None:
        vars(pipeline).pop("_backward")
        scale, pipeline.scale = pipeline.scale, value
        real(action, None if gradient is None else torch.full_like(gradient, value))
        pipeline.scale = scale

    vars(pipeline)["_backward"] = backward


def spoil_norm(engine: Engine, value: float) -> None:
    """This rank finds `value` in the gradient of a LayerNorm that other ranks of tensor parallel have as well."""
    finish = engine.replicas.finish

    def finish_and_spoil() -> None:
        vars(engine.replicas).pop("finish")
        finish()
        next(p for p in engine.replicas.pieces() if p.parameter.dim() == 1).gradient[0] = value

    vars(engine.replicas)["finish"] = finish_and_spoil


Spoil = Callable[[Engine, float], None]


def spoiled(mesh: Mesh, config: TrainConfig, spoil: Spoil, rank: int, value: float) -> list[tuple[Any, ...]]:
    """Four steps, in the second of which something is wrong with one rank; whether it changed any weight."""
    engine, answer = Engine(mesh, config), []
    for step in range(4):
        if step == 1 and mesh.rank == rank:
            spoil(engine, value)
        before = [p.detach().clone() for p in engine.parameters().values()] if config.zero < 3 else []
        result = engine.step(rows_of(mesh, config, 0))
        same = all(torch.equal(a, b) for a, b in zip(before, engine.parameters().values(), strict=False))
        answer.append((result.skipped, result.loss_scale, result.loss, engine.updates, same))
    return answer


SPOILED: list[tuple[Mesh, dict[str, Any], Spoil]] = [
    (plan(dp=2), {}, spoil_backward),
    (plan(tp=2), {}, spoil_backward),
    (plan(tp=2), {}, spoil_norm),
    (plan(pp=2), {}, spoil_backward),
    (plan(pp=2), {}, spoil_norm),
    (plan(dp=2), {"zero": 2}, spoil_backward),
    (plan(dp=2), {"zero": 3}, spoil_norm),
    (plan(dp=2, pp=2, tp=2), {"zero": 1}, spoil_backward),
    (plan(dp=2, pp=2, tp=2), {"zero": 1}, spoil_norm),
]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize(("mesh", "changes", "spoil"), SPOILED, ids=str)
def test_one_ranks_overflow_skips_the_step_on_all(
    mesh: Mesh, changes: dict[str, Any], spoil: Spoil, value: float
) -> None:
    config = replace(CONFIG, precision="fp16", scale_window=2, loss_scale=1024, **changes)
    for rank in {0, mesh.size - 1}:
        for steps in minipar.run(spoiled, mesh, config, spoil, rank, value):
            assert [skipped for skipped, *_ in steps] == [False, True, False, False]
            assert [scale for _, scale, *_ in steps] == [1024, 1024, 512, 512]
            assert [updates for *_, updates, _ in steps] == [1, 1, 2, 3]
            assert steps[1][-1] is True  # no weight has changed
            assert all(loss == loss for _, _, loss, *_ in steps)


def test_a_scale_that_is_too_large_comes_down_by_itself_and_goes_up_again() -> None:
    scale = LossScale.for_precision("fp16", first=2.0**24, window=3)
    for overflow in (True, True, False, False, False, False):
        scale.update(overflow)
    assert scale.value == 2.0**23 and scale.good == 1
    assert LossScale.for_precision("bf16").value == 1.0
    still = LossScale.for_precision("bf16")
    still.update(True)
    assert still.value == 1.0


def test_a_loss_scale_that_overflows_is_found_out_by_training() -> None:
    config = replace(CONFIG, precision="fp16", loss_scale=2.0**24)
    losses, norms = minipar.run(train, plan(dp=2), config, 12)[0]
    finite = [norm == norm for norm in norms]
    assert not any(finite[:6]) and sum(finite) >= 5 and losses[-1] < losses[0]


# What verify says of 64 bits stays true.


def test_sums_of_16_bit_numbers_are_rounded_once() -> None:
    """256 and seven times 1: in 8 bits 256 + 1 is 256 again; 263 rounds to 264, which 8 bits can say."""

    def total(group: Any) -> tuple[float, float, float, float]:
        value = 256.0 if group.rank == 0 else 1.0
        many = torch.full((70_000,), value, dtype=torch.bfloat16)
        shared = group.buffer(70_000, torch.bfloat16).fill_(value)
        few = torch.full((3,), value, dtype=torch.bfloat16)
        scattered = torch.full((16,), value, dtype=torch.bfloat16)
        sums = [group.all_reduce(tensor)[0].item() for tensor in (many, shared, few)]
        return (*sums, group.reduce_scatter(scattered)[0].item())

    assert minipar.run(total, 8) == [(264.0,) * 4] * 8


def test_verify_still_compares_in_64_bits() -> None:
    assert all(case.config.precision == "fp64" for case in verify.cases(1))
