"""Every topology against one process; random ones too; and known-wrong implementations, all of which must be caught."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

import minipar
from minipar import dp, flat, model, pp, split, tp, train, verify, zero
from minipar.batches import IGNORED
from minipar.facts import Traffic
from minipar.mesh import Mesh, plan
from minipar.split import Split
from minipar.train import TrainConfig
from minipar.verify import TOLERANCE, Case, Observed, Part, RankRun

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("one_thread")


# The topologies of `minipar verify`.

CASES = list(verify.cases())


def ranks_of(case: Case) -> int:
    return plan(**case.degrees).size


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if ranks_of(case) > 4 else (), id=str(case)) for case in CASES]
)
def test_a_topology_has_the_losses_gradients_weights_and_bytes_that_it_should(case: Case) -> None:
    worst, where = verify.compare(case)
    assert worst <= TOLERANCE, where


def test_the_topologies_are_each_cut_alone_in_pairs_and_all_together() -> None:
    seen = {tuple(axis for axis, degree in case.degrees.items() if degree > 1) for case in CASES}
    assert {(), ("dp",), ("pp",), ("tp",), ("dp", "pp"), ("dp", "tp"), ("dp", "pp", "tp")} <= seen
    assert {case.config.zero for case in CASES if case.degrees["dp"] > 1} == {0, 1, 2, 3}
    assert {case.config.schedule for case in CASES} >= {"gpipe", "1f1b", "zb-h1", "interleaved"}
    assert all(ranks_of(case) <= 4 for case in verify.cases(4))


# Topologies at random.


# One random source for each draw, not a draw of hypothesis for each option: it would spend half of the examples on
# neighbours of those before. So there is nothing to shrink, and the failing case is printed whole.
random_topologies = settings(
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
    report_multiple_bugs=False,
)
chances = st.randoms(use_true_random=True)


def compare_random(chance: random.Random, ranks: int) -> None:
    """Two of them side by side: while the ranks of one wait for each other, those of the other compute."""
    cases = [verify.draw(chance.choice, ranks) for _ in range(2)]
    note(repr(cases))
    with ThreadPoolExecutor(2) as pool:
        for case, (worst, where) in zip(cases, pool.map(verify.compare, cases), strict=True):
            assert worst <= TOLERANCE, (case, where)


@pytest.mark.slow
@settings(random_topologies, max_examples=40)
@given(chances)
def test_any_topology_of_up_to_4_ranks_equals_one_process_after_20_steps(chance: random.Random) -> None:
    compare_random(chance, 4)


@pytest.mark.slow
@settings(random_topologies, max_examples=10)
@given(chances)
def test_any_topology_of_up_to_8_ranks_equals_one_process_after_20_steps(chance: random.Random) -> None:
    compare_random(chance, 8)


# Known-wrong implementations. Each is a patch that a rank applies to itself before it trains.

BASE = replace(
    verify.SMALL,
    model=replace(verify.SMALL.model, layers=3, hidden=12, vocab=11, sequence=4),
    global_batch=8,
    bucket_bytes=1000,
)


def wrong(*, tied: bool = False, dropout: float = 0.0, kv_heads: int = 0, **changes: Any) -> Case:
    """Two steps on a small model: the topology on which the mistake should show."""
    degrees = {axis: changes.pop(axis, 1) for axis in ("dp", "pp", "tp")}
    small = replace(BASE.model, tied=tied, dropout=dropout, kv_heads=kv_heads)
    return Case(degrees, replace(BASE, model=small, **changes), steps=2)


def f_forgotten(mesh: Mesh) -> None:
    tp.Whole.enter_backward = lambda self, grad: minipar.comm.Pending(self.group.wire, None, [], lambda: grad)  # type: ignore[method-assign]


def g_forgotten(mesh: Mesh) -> None:
    tp.Whole.leave = lambda self, x: x  # type: ignore[method-assign]


def g_doubled_backward(mesh: Mesh) -> None:
    tp.Whole.leave_backward = lambda self, grad: self.group.all_reduce(grad.clone())  # type: ignore[method-assign]


def row_bias_on_every_rank(mesh: Mesh) -> None:
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.postpone = layer, layer.postpone
        return layer.border.leave(torch.nn.functional.linear(x, weight, bias))

    tp._RowLinear.forward = staticmethod(forward)  # type: ignore[method-assign]


def padding_in_the_softmax(mesh: Mesh) -> None:
    real = tp.cross_entropy
    tp.cross_entropy = lambda logits, targets, words, group: real(logits, targets, logits.shape[1], group)


def sum_of_the_softmax_local(mesh: Mesh) -> None:
    skip_message("tp.loss sums")


def skip_message(tag: str) -> None:
    """The all_reduces with this tag leave each rank with its own."""
    real = minipar.comm.Group.all_reduce

    def all_reduce(self: Any, tensor: Tensor, op: Any = "sum", **options: Any) -> Any:
        if options.get("tag") != tag:
            return real(self, tensor, op, **options)
        return self._done(tensor, options.get("async_op", False))

    minipar.comm.Group.all_reduce = all_reduce  # type: ignore[method-assign]


def fused_rows_cut_without_blocks(mesh: Mesh) -> None:
    real = tp.ColumnLinear.__init__
    tp.ColumnLinear.__init__ = lambda self, whole, border, blocks=None: real(self, whole, border)  # type: ignore[method-assign]


def sequence_joined_in_the_wrong_order(mesh: Mesh) -> None:
    tp._ranks_to_sequence = lambda x, ranks: x.reshape(x.shape[0] // ranks, -1, x.shape[-1])


def slices_not_summed(mesh: Mesh) -> None:
    train.Engine._sum_slices = lambda self: None  # type: ignore[method-assign]


def last_norms_slice_not_summed(mesh: Mesh) -> None:
    real = tp.SplitHead.__init__

    def init(self: Any, whole: Any, border: Any) -> None:
        real(self, whole, border)
        self.norm.weight.sees_a_slice = self.norm.bias.sees_a_slice = False

    tp.SplitHead.__init__ = init  # type: ignore[method-assign]


def tied_gradients_not_exchanged(mesh: Mesh) -> None:
    train.Engine._sum_tied = lambda self: None  # type: ignore[method-assign]


def tied_gradients_counted_twice(mesh: Mesh) -> None:
    real = train.Engine._sum_tied

    def twice(self: Any) -> None:
        real(self)
        for piece in self._tied_pieces():
            piece.gradient.mul_(2)

    train.Engine._sum_tied = twice  # type: ignore[method-assign]


def averaged_over_ranks_instead_of_tokens(mesh: Mesh) -> None:
    """Each rank divides by the tokens of its own rows, and the ranks' gradients are averaged."""
    real, run = dp.DataParallel.__init__, pp.Pipeline.run
    count, measure = train.Engine._count, train.Engine._measure

    def by_own_tokens(self: Any, micro_batches: Any, shape: Any, scale: float) -> Tensor:
        own = sum(int((rows.targets != IGNORED).sum()) for rows in micro_batches)
        return run(self, micro_batches, shape, 1.0 / max(own, 1))

    def as_if_all_were_learned(self: Any, tokens: Tensor) -> Any:
        self.learned = count(self, tokens)
        return count(self, torch.full_like(tokens, every(self) // self.mesh.dp.size))

    def with_the_right_loss(self: Any, loss: Tensor) -> Any:
        return measure(self, loss * every(self) / self.learned.wait())

    every = lambda self: self.config.global_batch * self.config.model.sequence
    dp.DataParallel.__init__ = lambda self, *args, **options: real(self, *args, op="mean", **options)  # type: ignore[method-assign]
    pp.Pipeline.run, train.Engine._count = by_own_tokens, as_if_all_were_learned  # type: ignore[method-assign]
    train.Engine._measure = with_the_right_loss  # type: ignore[method-assign]


def averaged_over_micro_batches_instead_of_tokens(mesh: Mesh) -> None:
    real = pp.Pipeline._backward

    def backward(self: Any, action: Any, gradient: Any) -> None:
        counts = [int((rows.targets >= 0).sum()) for rows in self.micro_batches]
        plain = self.scale
        self.scale = plain * sum(counts) / len(counts) / max(1, counts[action.micro_batch])
        real(self, action, gradient)
        self.scale = plain

    pp.Pipeline._backward = backward  # type: ignore[method-assign]


def scaled_backward(factor: Callable[[Any, int], float]) -> None:
    real = pp.Pipeline._backward

    def backward(self: Any, action: Any, gradient: Any) -> None:
        plain = self.scale
        self.scale = plain * factor(self, action.micro_batch)
        real(self, action, gradient)
        self.scale = plain

    pp.Pipeline._backward = backward  # type: ignore[method-assign]


def micro_batchs_gradient_lost(mesh: Mesh) -> None:
    scaled_backward(lambda pipeline, micro_batch: float(micro_batch != 1))


def micro_batchs_gradient_doubled(mesh: Mesh) -> None:
    scaled_backward(lambda pipeline, micro_batch: 1.0 + (micro_batch == 1))


def gradient_as_often_too_large_as_there_are_micro_batches(mesh: Mesh) -> None:
    scaled_backward(lambda pipeline, micro_batch: len(pipeline.micro_batches))


def postponed_weight_gradients_dropped(mesh: Mesh) -> None:
    real = pp.Pipeline._postpone_for

    def postpone(self: Any, module: Any, action: Any) -> None:
        real(self, module, action)
        if action.micro_batch == 1 and action.stage in self.schedule.splits_backward:
            self._postponed[action.stage, action.micro_batch] = []

    pp.Pipeline._postpone_for = postpone  # type: ignore[method-assign]


def layers_dropped(mesh: Mesh) -> None:
    train.split_layers = lambda config, stages: [
        range(stage * (config.layers // stages), (stage + 1) * (config.layers // stages)) for stage in range(stages)
    ]


def norm_counts_replicas(mesh: Mesh) -> None:
    train.Engine._counts = lambda self, piece: True  # type: ignore[method-assign]


def norm_counts_tied_twice(mesh: Mesh) -> None:
    def counts(self: Any, piece: Any) -> bool:
        split_or_first = split.split_of(piece.parameter) is not None or self.mesh.tp.rank == 0
        return split_or_first and (self.config.zero > 0 or self.mesh.dp.rank == 0)

    train.Engine._counts = counts  # type: ignore[method-assign]


def norm_of_the_first_shards_only(mesh: Mesh) -> None:
    real = train.Engine._counts
    train.Engine._counts = lambda self, piece: real(self, piece) and self.mesh.tp.rank == 0  # type: ignore[method-assign]


def shard_of_another_rank(mesh: Mesh) -> None:
    real = zero.Shard.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        if self.keep:
            self.mine = self.full.chunk(self.group.size)[(self.group.rank + 1) % self.group.size]

    zero.Shard.__init__ = init  # type: ignore[method-assign]


def new_parameters_not_published(mesh: Mesh) -> None:
    zero.Shard.publish = lambda self: minipar.comm.Pending(self.group.wire, None, [], lambda: self.full)  # type: ignore[method-assign]


def last_micro_batch_only(mesh: Mesh) -> None:
    """ZeRO 2 forgets to add to what earlier micro-batches have brought."""

    def settle(self: Any, in_flight: int) -> None:
        while len(self._pending) > in_flight:
            bucket, pending, buffer = self._pending.pop(0)
            self._gradients[bucket].copy_(pending.wait())
            self._spare.append(buffer)

    zero.Zero._settle = settle  # type: ignore[method-assign]


def buckets_out_of_order(mesh: Mesh) -> None:
    """Rank 1 sends two buckets of equal size in each other's turn."""
    real = dp.DataParallel._launch
    flat.LaunchOrder.arrived = lambda self, bucket: None  # type: ignore[method-assign]

    def launch(self: Any, bucket: int) -> None:
        sizes = [buffer.numel() for buffer in self.buffers]
        pair = next(([i, j] for i in range(len(sizes)) for j in range(i) if sizes[i] == sizes[j]), [0, 0])
        if self.group.rank == 1 and bucket in pair:
            bucket = sum(pair) - bucket
        real(self, bucket)

    dp.DataParallel._launch = launch  # type: ignore[method-assign]


def gradients_not_summed(mesh: Mesh) -> None:
    real = dp.DataParallel._launch
    dp.DataParallel._launch = lambda self, bucket: None if bucket == 1 else real(self, bucket)  # type: ignore[method-assign]


def mask_drawn_by_row_instead_of_sample(mesh: Mesh) -> None:
    real = model.Dropout._mask
    model.Dropout._mask = lambda self, sample, shape: real(self, sample % 4, shape)  # type: ignore[method-assign]


def first_weights_drawn_by_rank(mesh: Mesh) -> None:
    real = model.initial_weight
    model.initial_weight = lambda name, shape, config, seed: real(name, shape, config, seed + mesh.pp.rank)


def biases_decay(mesh: Mesh) -> None:
    real = dp.DataParallel.__init__

    def init(self: Any, groups: Any, *args: Any, **options: Any) -> None:
        real(self, [{**group, "weight_decay": 0.1} for group in groups], *args, **options)

    dp.DataParallel.__init__ = init  # type: ignore[method-assign]


def learning_rate_one_step_late(mesh: Mesh) -> None:
    real = train.learning_rate
    train.learning_rate = lambda config, step: real(config, max(0, step - 1))


MUTANTS: list[tuple[Callable[[Mesh], None], Case]] = [
    (f_forgotten, wrong(tp=2)),
    (g_forgotten, wrong(tp=2)),
    (g_doubled_backward, wrong(tp=2)),
    (row_bias_on_every_rank, wrong(tp=2)),
    (padding_in_the_softmax, wrong(tp=2)),
    (sum_of_the_softmax_local, wrong(tp=2)),
    (fused_rows_cut_without_blocks, wrong(tp=2)),
    (sequence_joined_in_the_wrong_order, wrong(tp=2, sequence_parallel=True)),
    (slices_not_summed, wrong(tp=2, sequence_parallel=True)),
    (last_norms_slice_not_summed, wrong(tp=2, sequence_parallel=True)),
    (tied_gradients_not_exchanged, wrong(pp=2, tied=True)),
    (tied_gradients_counted_twice, wrong(pp=2, tied=True)),
    (averaged_over_ranks_instead_of_tokens, wrong(dp=2)),
    (averaged_over_micro_batches_instead_of_tokens, wrong(pp=2)),
    (micro_batchs_gradient_lost, wrong(pp=2)),
    (micro_batchs_gradient_doubled, wrong(pp=2)),
    (gradient_as_often_too_large_as_there_are_micro_batches, wrong(pp=2)),
    (postponed_weight_gradients_dropped, wrong(pp=2, schedule="zb-h1")),
    (layers_dropped, wrong(pp=2)),
    (norm_counts_replicas, wrong(dp=2)),
    (norm_counts_replicas, wrong(tp=2)),
    (norm_counts_tied_twice, wrong(pp=2, tied=True)),
    (norm_of_the_first_shards_only, wrong(tp=2)),
    (shard_of_another_rank, wrong(dp=2, zero=1)),
    (new_parameters_not_published, wrong(dp=2, zero=2)),
    (last_micro_batch_only, wrong(dp=2, zero=2)),
    (buckets_out_of_order, wrong(dp=2, bucket_bytes=1)),
    (gradients_not_summed, wrong(dp=2)),
    (mask_drawn_by_row_instead_of_sample, wrong(dp=2, dropout=0.2)),
    (first_weights_drawn_by_rank, wrong(pp=2)),
    (biases_decay, wrong(dp=2)),
    (learning_rate_one_step_late, wrong(dp=2)),
]


def spoiled(spoil: Callable[[Mesh], None]) -> Callable[..., RankRun]:
    """`verify.train_and_part` on ranks that first spoil themselves."""

    def train_and_part(mesh: Mesh, config: TrainConfig, batches: Any, steps: int) -> RankRun:
        spoil(mesh)
        return verify.train_and_part(mesh, config, batches, steps)

    return train_and_part


def what_differs(spoil: Callable[[Mesh], None], case: Case, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, str]]:
    with monkeypatch.context() as patch:
        patch.setattr(verify, "train_and_part", spoiled(spoil))
        return verify.differences(case)


def test_every_known_wrong_implementation_is_caught_by_numbers_and_not_by_bytes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    survivors, table = [], []
    for spoil, case in MUTANTS:
        try:
            found = what_differs(spoil, case, monkeypatch)
        except minipar.RankError as error:
            found = [(float("inf"), str(error).splitlines()[0])]
        seen = [(worst, where) for worst, where in found if worst > TOLERANCE]
        table.append(f"{spoil.__name__} ({case}): " + " | ".join(f"{worst:.1e} {where}" for worst, where in seen))
        if all(where.startswith("bytes differ") for _, where in seen):
            survivors.append(table[-1])
    print("\n".join(table))
    assert survivors == []


@pytest.mark.parametrize("case", {repr(case): case for _, case in MUTANTS}.values(), ids=str)
def test_the_right_implementation_passes_where_the_wrong_ones_are_caught(case: Case) -> None:
    worst, where = verify.compare(case)
    assert worst <= TOLERANCE, where


def one_message_too_many(mesh: Mesh) -> None:
    """Rank 0 and its neighbour exchange something that changes nothing."""
    real = train.Engine._sum_slices

    def sum_slices(self: Any) -> None:
        real(self)
        self.mesh.tp.all_reduce(torch.zeros(4, dtype=torch.float64))

    train.Engine._sum_slices = sum_slices  # type: ignore[method-assign]


def test_a_message_that_changes_no_number_is_seen_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    (worst, where), (numbers, _) = what_differs(one_message_too_many, wrong(tp=2), monkeypatch)
    assert worst == float("inf") and numbers <= TOLERANCE
    match = re.match(r"bytes differ: rank 0 tp all_reduce (\d+) counted, (\d+) predicted; rank 1 tp all_reduce", where)
    assert match and int(match[1]) == int(match[2]) + 4 * 8


# How differences are found.


def run_of(weights: dict[str, float], *, loss: float = 1.0, split: Split | None = None, start: int = 0) -> RankRun:
    """A rank that holds parameters of two equal values and the same gradient."""
    made = {
        name: Part((2,), split, torch.full((2,), value), [(start, torch.full((2 - start,), value))])
        for name, value in weights.items()
    }
    return RankRun([(loss, 1.0)], made, Traffic({}))


def unequal(mesh: Mesh, runs: Sequence[RankRun], tied: bool = False) -> list[str]:
    return verify.together(mesh, runs, tied).unequal


def test_ranks_that_hold_other_bits_of_what_they_share_are_named() -> None:
    one, other = run_of({"a": 1.0, "b": 2.0}), run_of({"a": 1.0, "b": 2.0 + 1e-6})
    assert unequal(plan(dp=2), [one, one]) == []
    assert unequal(plan(dp=2), [one, other]) == ["b over dp", "gradient of b over dp"]
    assert unequal(plan(tp=2), [one, other]) == ["b over tp"]
    assert unequal(plan(pp=2), [run_of({"a": 1.0}), run_of({"b": 3.0})]) == []
    assert unequal(plan(dp=2), [one, run_of({"a": 1.0, "b": 2.0}, loss=1.1)]) == ["losses of rank 1"]
    copies = [run_of({"embedding.word.weight": 1.0}), run_of({"head.output.weight": 1.5})]
    assert unequal(plan(pp=2), copies, tied=True) == ["tied embedding over pp"]


def test_pieces_that_lie_on_different_ranks_are_put_together() -> None:
    halves = [run_of({"a": 1.0}, split=Split(0, rank, 2, (3,))) for rank in range(2)]
    seen = verify.together(plan(tp=2), halves)
    assert seen.weights["a"].tolist() == [1.0, 1.0, 1.0] and seen.unequal == []  # three values and one of padding


def test_a_gradient_that_no_rank_holds_is_an_infinite_difference() -> None:
    seen = verify.together(plan(dp=1), [run_of({"a": 1.0}, start=1)])
    assert bool(seen.gradients["a"].isnan().any())
    truth = Observed([1.0], [1.0], {"a": torch.ones(2)}, {"a": torch.ones(2)})
    assert verify.worst_difference(seen, truth) == (float("inf"), "gradients of a")


def observed(gradient: Sequence[float], weight: Sequence[float], loss: float = 1.0) -> Observed:
    return Observed([loss], [1.0], {"a": torch.tensor(gradient)}, {"a": torch.tensor(weight)})


def test_differences_are_relative_to_the_largest_value_and_the_worst_is_named() -> None:
    truth = observed([1.0, 100.0], [1.0, 2.0])
    assert verify.worst_difference(truth, truth) == (0.0, "weights of a")
    assert verify.worst_difference(observed([2.0, 100.0], [1.0, 2.0]), truth) == (pytest.approx(0.01), "gradients of a")
    assert verify.worst_difference(observed([1.0, 100.0], [1.0, 3.0]), truth) == (pytest.approx(0.5), "weights of a")
    assert verify.worst_difference(observed([1.0, 100.0], [1.0, 2.0], loss=1.25), truth) == (0.25, "losses of step 0")
    assert verify.worst_difference(observed([float("nan"), 1.0], [1.0, 2.0]), truth)[0] == float("inf")
    nothing = Observed([1.0], [1.0], {"a": torch.zeros(2)}, {})
    assert verify.worst_difference(nothing, truth) == (float("inf"), "weights: ['a'] on one side only")


def test_a_loss_that_is_not_a_number_is_an_infinite_difference() -> None:
    truth = observed([1.0], [1.0])
    assert verify.worst_difference(observed([1.0], [1.0], loss=float("nan")), truth)[0] == float("inf")
