"""Replicas start equal, add up their gradients in buckets, in a fixed order, while backward still runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from time import perf_counter, sleep
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

import minipar
from minipar.dp import DataParallel

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIGHT = {"rtol": 1e-12, "atol": 1e-13}
SIZES = [1, 2, 3, 4]


class Worlds:
    """A world of each size, started when first used, and again after a failure has ended it."""

    def __init__(self) -> None:
        self.open: dict[int, minipar.World] = {}

    def run(self, ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if ranks not in self.open or self.open[ranks].closed:
            self.open[ranks] = minipar.World(ranks)
        return self.open[ranks].run(fn, *args)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    for world in worlds.open.values():
        world.close()


def small_model(seed: int = 0) -> nn.Sequential:
    """11 words, width 5, 7 inside: 55 + 42 + 40 + 15 values."""
    torch.manual_seed(seed)
    layers = [nn.Embedding(11, 5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 3, bias=False)]
    return nn.Sequential(*layers).double()


def rows_of(step: int = 0, rows: int = 12) -> Tensor:
    return torch.randint(11, (rows, 2), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """A sum over rows, other for each."""
    return (model(rows) ** 2 * (1 + rows.unsqueeze(-1))).sum()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def in_one_process(step: int = 0) -> dict[str, Tensor | None]:
    model = small_model()
    loss_of(model, rows_of(step)).backward()
    return gradients(model)


def check(got: dict[str, Tensor | None], want: dict[str, Tensor | None], factor: float = 1.0) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        expected = torch.zeros_like(got[name]) if gradient is None else gradient * factor  # type: ignore[arg-type]
        torch.testing.assert_close(got[name], expected, msg=lambda text, n=name: f"{n}: {text}", **TIGHT)


# The start.


def start_apart(group: Any) -> tuple[list[Tensor], list[Tensor]]:
    model = small_model(seed=group.rank)
    model[1].weight.requires_grad_(False)  # frozen, but it too must be the same
    model[3].weight.data = model[3].weight.data.t().contiguous().t()  # not contiguous
    before = [p.detach().clone() for p in model.parameters()]
    DataParallel(model.parameters(), group)
    return before, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("size", SIZES)
def test_every_replica_starts_from_the_first_ones_weights(worlds: Worlds, size: int) -> None:
    answers = worlds.run(size, start_apart)
    first = answers[0][0]
    for before, after in answers:
        assert all(torch.equal(a, b) for a, b in zip(after, first, strict=True))
        if size > 1 and before is not first:
            assert not torch.equal(before[0], first[0])


# Gradients.


def train_steps(group: Any, bucket_bytes: int, op: str, micro_batches: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The gradients of two steps, and the tags of the messages."""
    model = small_model()
    replicas = DataParallel(model.parameters(), group, bucket_bytes=bucket_bytes, op=op)  # type: ignore[arg-type]
    group.wire.messages.clear()
    seen = []
    for step in range(2):
        replicas.start(micro_batches)
        for rows in rows_of(step).chunk(group.size)[group.rank].chunk(micro_batches):
            loss_of(model, rows).backward()
        replicas.finish()
        seen.append(gradients(model))
    return seen, [f"{m.op} {m.group} {m.tag}" for m in group.wire.messages]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, 6), (450, 3), (8 << 20, 1)])
@pytest.mark.parametrize("size", SIZES)
def test_each_gradient_is_that_of_the_whole_batch_for_any_buckets_and_micro_batches(
    worlds: Worlds, size: int, bucket_bytes: int, buckets: int, micro_batches: int
) -> None:
    for seen, messages in worlds.run(size, train_steps, bucket_bytes, "sum", micro_batches):
        for step in range(2):
            check(seen[step], in_one_process(step))
        once = [f"all_reduce world dp.grad bucket {bucket}" for bucket in range(buckets)]
        assert messages == (once * 2 if size > 1 else [])


@pytest.mark.parametrize("size", [1, 4])
def test_the_mean_is_the_sum_over_the_number_of_ranks(worlds: Worlds, size: int) -> None:
    for seen, _ in worlds.run(size, train_steps, 400, "mean", 1):
        check(seen[0], in_one_process(), 1 / size)


def message_bytes(group: Any) -> int:
    train_steps(group, 400, "sum", 1)
    return sum(m.bytes for m in group.wire.messages)


def test_each_gradient_travels_once_a_step_without_any_padding(worlds: Worlds) -> None:
    values = sum(p.numel() for p in small_model().parameters())
    assert worlds.run(3, message_bytes) == [2 * 8 * values] * 3


def accumulate(group: Any) -> tuple[dict[str, Any], int]:
    """The first two micro-batches without a message, the third with."""
    model = small_model()
    replicas = DataParallel(model.parameters(), group)
    group.wire.messages.clear()
    parts = rows_of().chunk(group.size)[group.rank].chunk(3)
    replicas.start()
    with replicas.no_sync():
        for rows in parts[:2]:
            loss_of(model, rows).backward()
    assert not group.wire.messages
    loss_of(model, parts[2]).backward()
    sent = len(group.wire.messages)
    replicas.finish()
    assert len(group.wire.messages) == sent
    return gradients(model), sent


@pytest.mark.parametrize("size", [1, 2, 4])
def test_accumulating_without_sync_equals_one_big_batch_and_one_message(worlds: Worlds, size: int) -> None:
    for got, sent in worlds.run(size, accumulate):
        check(got, in_one_process())
        assert sent == (size > 1)


class Branches(nn.Module):
    """Two layers of which a step may use either."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor, names: str) -> Tensor:
        return torch.stack([getattr(self, name)(x).sum() for name in names]).sum()


def use_branches(group: Any, by_rank: list[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """The gradients, the order in which they came, and the order of the messages."""
    model, came = Branches(), list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: came.append(name))
    replicas = DataParallel(model.parameters(), group, bucket_bytes=1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)  # left from whatever was before
    group.wire.messages.clear()
    replicas.start()
    model(torch.full((2, 5), 1.0 + group.rank).double(), by_rank[group.rank]).backward()
    replicas.finish()
    return gradients(model), came, [m.tag for m in group.wire.messages]


def branches_in_one_process(by_rank: list[str]) -> dict[str, Tensor | None]:
    model = Branches()
    for rank, names in enumerate(by_rank):
        model(torch.full((2, 5), 1.0 + rank).double(), names).backward()
    return gradients(model)


@pytest.mark.parametrize("by_rank", [["a", "a"], ["a", "b"], ["ab", "b"]], ids=str)
def test_a_parameter_without_a_gradient_on_some_or_all_ranks_counts_as_zero_there(
    worlds: Worlds, by_rank: list[str]
) -> None:
    for got, _, tags in worlds.run(2, use_branches, by_rank):
        check(got, branches_in_one_process(by_rank))
        assert tags == [f"dp.grad bucket {bucket}" for bucket in range(4)]


def test_buckets_go_in_the_same_order_on_ranks_whose_gradients_come_in_different_orders(worlds: Worlds) -> None:
    (first, came, tags), (second, came_there, tags_there) = worlds.run(2, use_branches, ["ab", "ba"])
    assert came != came_there and sorted(came) == sorted(came_there)
    assert tags == tags_there == [f"dp.grad bucket {bucket}" for bucket in range(4)]
    check(first, branches_in_one_process(["ab", "ba"]))
    check(second, branches_in_one_process(["ab", "ba"]))


def freeze(group: Any) -> tuple[dict[str, Any], int]:
    model = small_model()
    model[0].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    replicas = DataParallel(model.parameters(), group)
    group.wire.messages.clear()
    replicas.start()
    loss_of(model, rows_of().chunk(group.size)[group.rank]).backward()
    replicas.finish()
    return gradients(model), sum(m.bytes for m in group.wire.messages)


@pytest.mark.parametrize("size", [1, 3])
def test_frozen_parameters_have_no_gradient_and_send_nothing(worlds: Worlds, size: int) -> None:
    want = in_one_process()
    for got, sent in worlds.run(size, freeze):
        assert got.pop("0.weight") is None and got.pop("3.bias") is None
        check(got, {name: gradient for name, gradient in want.items() if name in got})
        assert sent == (size > 1) * 8 * sum(g.numel() for g in got.values() if g is not None)


def all_frozen(group: Any) -> int:
    model = small_model().requires_grad_(False)
    replicas = DataParallel(model.parameters(), group)
    replicas.start()
    replicas.finish()
    return len(replicas.pieces())


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_that_is_frozen_altogether_is_no_error(worlds: Worlds, size: int) -> None:
    assert worlds.run(size, all_frozen) == [0] * size


def two_dtypes(group: Any) -> dict[str, Any]:
    model = small_model()
    model[4].float()
    replicas = DataParallel(model.parameters(), group)
    replicas.start()
    rows = rows_of().chunk(group.size)[group.rank]
    (model[4](model[:4](rows).float()) ** 2).double().sum().backward()
    replicas.finish()
    return gradients(model)


def test_parameters_of_different_dtypes_keep_to_buckets_of_their_own(worlds: Worlds) -> None:
    model = small_model()
    model[4].float()
    (model[4](model[:4](rows_of()).float()) ** 2).double().sum().backward()
    for got in worlds.run(2, two_dtypes):
        for name, want in gradients(model).items():
            torch.testing.assert_close(got[name], want, rtol=1e-5, atol=1e-5)
        assert got["4.weight"].dtype == torch.float32 and got["3.weight"].dtype == torch.float64


# Pieces and options.


def scale_pieces(group: Any) -> tuple[dict[str, Any], int]:
    model = small_model()
    replicas = DataParallel(model.parameters(), group)
    replicas.start()
    loss_of(model, rows_of().chunk(group.size)[group.rank]).backward()
    replicas.finish()
    for piece in replicas.pieces():
        piece.gradient.mul_(0.5)
    return gradients(model), sum(len(piece.gradient) for piece in replicas.pieces())


def test_scaling_the_pieces_scales_what_the_optimizer_sees(worlds: Worlds) -> None:
    for got, values in worlds.run(2, scale_pieces):
        check(got, in_one_process(), 0.5)
        assert values == sum(p.numel() for p in small_model().parameters())


def with_options(group: Any) -> list[Tensor]:
    model = small_model()
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    replicas = DataParallel(
        model.parameters(),
        group,
        parameter_groups=[{"params": weights, "weight_decay": 0.5}, {"params": biases}],
        bucket_bytes=200,
    )
    optimizer = torch.optim.SGD(replicas.parameter_groups(), lr=0.01, momentum=0.9)
    for step in range(3):
        replicas.start()
        loss_of(model, rows_of(step).chunk(group.size)[group.rank]).backward()
        replicas.finish()
        replicas.step(optimizer)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_steps_with_parameter_groups_equal_one_process_and_replicas_stay_bit_identical(
    worlds: Worlds, size: int
) -> None:
    model = small_model()
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.SGD([{"params": weights, "weight_decay": 0.5}, {"params": biases}], lr=0.01, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rows_of(step)).backward()
        optimizer.step()
    first, *others = worlds.run(size, with_options)
    for got, want in zip(first, model.parameters(), strict=True):
        torch.testing.assert_close(got, want.detach(), **TIGHT)
    assert all(torch.equal(a, b) for other in others for a, b in zip(other, first, strict=True))


def held(group: Any) -> dict[str, int]:
    return DataParallel(small_model().parameters(), group).held_bytes()


def test_each_replica_holds_all_parameters_and_all_gradients(worlds: Worlds) -> None:
    size = 8 * sum(p.numel() for p in small_model().parameters())
    assert worlds.run(2, held) == [{"parameters": size, "gradients": size}] * 2


# Overlap.


class Slow(torch.autograd.Function):
    """The same tensor; its backward takes 0.3 s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        sleep(0.3)
        return grad


def slow_first_layer(group: Any) -> list[tuple[str, float]]:
    """For each message, how long before the end of backward it was launched."""
    torch.manual_seed(0)
    first, second, third = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
    model = nn.Sequential(first, second, third)
    replicas = DataParallel(model.parameters(), group, bucket_bytes=120)  # a bucket for each layer
    group.wire.messages.clear()
    replicas.start()
    third(second(Slow.apply(first(torch.ones(2, 5))))).sum().backward()
    end = perf_counter()
    replicas.finish()
    return [(m.tag, end - m.launched) for m in group.wire.messages]


def test_full_buckets_are_on_their_way_while_backward_still_runs(worlds: Worlds) -> None:
    for launched in worlds.run(2, slow_first_layer):
        assert [tag for tag, _ in launched] == [f"dp.grad bucket {bucket}" for bucket in range(3)]
        assert launched[0][1] > 0.29 and launched[1][1] > 0.29  # before the slow layer, not after it
        assert launched[2][1] < 0.29
