"""Collectives are plain arithmetic over what the ranks hold, on 1 to 4 ranks; every call is counted exactly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

import minipar
from minipar.comm import Group, Message, Wire, choose_backend, describe
from minipar.mesh import plan

# The functions below go to the ranks by value, so that no rank has to import this file and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = [1, 2, 3, 4]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


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


def held(rank: int, shape: tuple[int, ...] = (3, 5), dtype: torch.dtype = torch.float64) -> Tensor:
    """What a rank holds: other numbers on each, and small whole ones, so that every dtype's sums are exact."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return ((numbers * 7 + rank * 5) % 11 - 3).to(dtype)


def everyone(size: int, shape: tuple[int, ...] = (3, 5), dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.stack([held(rank, shape, dtype) for rank in range(size)])


def noise(rank: int, shape: tuple[int, ...] = (12, 7), dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers whose sum depends on the order of adding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def finished(answer: Any, async_op: bool) -> Tensor:
    result: Tensor = answer.wait() if async_op else answer
    return result


# Collectives against plain arithmetic.


def reduce_all(group: Group) -> dict[tuple[str, torch.dtype, bool], Tensor]:
    results = {}
    for dtype in DTYPES:
        for op in ("sum", "mean", "max", "min"):
            for async_op in (False, True):
                if op != "mean" or dtype.is_floating_point:
                    tensor = held(group.rank, dtype=dtype)
                    answer = finished(group.all_reduce(tensor, op, async_op=async_op), async_op)
                    assert answer is tensor, "all_reduce works in place"
                    results[op, dtype, async_op] = tensor
    return results


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_combines_what_all_ranks_hold_in_every_dtype(worlds: Worlds, size: int) -> None:
    for results in worlds.run(size, reduce_all):
        assert len(results) == 2 * (4 * len(DTYPES) - 1)
        for (op, dtype, _), got in results.items():
            tensors = everyone(size, dtype=torch.float64)
            want = {
                "sum": tensors.sum(0),
                "mean": tensors.sum(0) / size,
                "max": tensors.amax(0),
                "min": tensors.amin(0),
            }
            assert torch.equal(got, want[op].to(dtype)), (op, dtype)


def gather_all(group: Group) -> dict[tuple[torch.dtype, bool], Tensor]:
    return {
        (dtype, async_op): finished(group.all_gather(held(group.rank, dtype=dtype), async_op=async_op), async_op)
        for dtype in DTYPES
        for async_op in (False, True)
    }


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_lays_the_shards_end_to_end(worlds: Worlds, size: int) -> None:
    for results in worlds.run(size, gather_all):
        for (dtype, _), got in results.items():
            assert torch.equal(got, torch.cat([held(rank, dtype=dtype) for rank in range(size)])), dtype


def scatter_all(group: Group) -> dict[tuple[torch.dtype, bool], tuple[Tensor, Tensor]]:
    results = {}
    for dtype in DTYPES:
        for async_op in (False, True):
            tensor = held(group.rank, (2 * group.size, 5), dtype)
            results[dtype, async_op] = finished(group.reduce_scatter(tensor, async_op=async_op), async_op), tensor
    return results


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_keeps_a_share_of_the_sum_and_leaves_its_input_alone(worlds: Worlds, size: int) -> None:
    for rank, results in enumerate(worlds.run(size, scatter_all)):
        for (dtype, _), (got, given) in results.items():
            total = everyone(size, (2 * size, 5)).sum(0).to(dtype)
            assert torch.equal(got, total[2 * rank : 2 * rank + 2]), dtype
            assert torch.equal(given, held(rank, (2 * size, 5), dtype)), dtype


def exchange_all(group: Group) -> dict[tuple[torch.dtype, bool], Tensor]:
    return {
        (dtype, async_op): finished(
            group.all_to_all(held(group.rank, (2 * group.size, 3), dtype), async_op=async_op), async_op
        )
        for dtype in DTYPES
        for async_op in (False, True)
    }


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_gives_the_jth_share_of_rank_i_to_rank_j(worlds: Worlds, size: int) -> None:
    for rank, results in enumerate(worlds.run(size, exchange_all)):
        for (dtype, _), got in results.items():
            shares = [held(other, (2 * size, 3), dtype)[2 * rank : 2 * rank + 2] for other in range(size)]
            assert torch.equal(got, torch.cat(shares)), dtype


def broadcast_all(group: Group) -> dict[tuple[int, torch.dtype, bool], Tensor]:
    results = {}
    for source in range(group.size):
        for dtype in DTYPES:
            for async_op in (False, True):
                tensor = held(group.rank, dtype=dtype)
                answer = finished(group.broadcast(tensor, source, async_op=async_op), async_op)
                assert answer is tensor, "broadcast works in place"
                results[source, dtype, async_op] = tensor
    return results


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_gives_every_rank_what_the_source_holds(worlds: Worlds, size: int) -> None:
    for results in worlds.run(size, broadcast_all):
        for (source, dtype, _), got in results.items():
            assert torch.equal(got, held(source, dtype=dtype)), (source, dtype)


@pytest.mark.parametrize("size", SIZES)
def test_objects_are_gathered_in_the_order_of_ranks(worlds: Worlds, size: int) -> None:
    answers = worlds.run(size, lambda group: group.gather_objects({"rank": group.rank}))
    assert answers == [[{"rank": rank} for rank in range(size)]] * size


# Tensors that are not contiguous, buffers to fill, odd shapes.


def not_contiguous(group: Group) -> dict[str, Tensor]:
    turned = lambda rows: held(group.rank, (3, rows)).t()  # [rows, 3], column by column in memory
    reduced, told = turned(5), turned(5)
    group.all_reduce(reduced)
    group.broadcast(told, group.size - 1)
    return {
        "all_reduce": reduced,
        "broadcast": told,
        "mean": group.all_reduce(turned(5), "mean"),
        "all_gather": group.all_gather(turned(5)),
        "reduce_scatter": group.reduce_scatter(turned(2 * group.size)),
        "all_to_all": group.all_to_all(turned(2 * group.size)),
    }


@pytest.mark.parametrize("size", SIZES)
def test_a_transposed_tensor_is_combined_as_its_values_say(worlds: Worlds, size: int) -> None:
    for rank, got in enumerate(worlds.run(size, not_contiguous)):
        small = torch.stack([held(r, (3, 5)).t() for r in range(size)])
        large = torch.stack([held(r, (3, 2 * size)).t() for r in range(size)])
        mine = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(got["all_reduce"], small.sum(0))
        assert torch.equal(got["mean"], small.sum(0) / size)
        assert torch.equal(got["broadcast"], small[-1])
        assert torch.equal(got["all_gather"], torch.cat(list(small)))
        assert torch.equal(got["reduce_scatter"], large.sum(0)[mine])
        assert torch.equal(got["all_to_all"], torch.cat([large[r][mine] for r in range(size)]))


def fill_buffers(group: Group) -> dict[str, Tensor]:
    fresh = torch.full((3 * group.size, 5), 77.0, dtype=torch.float64)
    group.all_gather(held(group.rank), into=fresh)
    own = torch.full((3 * group.size, 5), 77.0, dtype=torch.float64)
    mine = own.chunk(group.size)[group.rank]
    mine.copy_(held(group.rank))
    group.all_gather(mine, into=own)
    shape = (2 * group.size, 5)
    apart = torch.full((2, 5), 77.0, dtype=torch.float64)
    group.reduce_scatter(held(group.rank, shape), into=apart)
    buffer = held(group.rank, shape)
    group.reduce_scatter(buffer, into=buffer.chunk(group.size)[group.rank])
    later = held(group.rank, shape)
    group.reduce_scatter(later, into=later.chunk(group.size)[group.rank], async_op=True).wait()
    return {"gather": fresh, "gather own": own, "scatter": apart, "scatter own": buffer, "scatter own later": later}


@pytest.mark.parametrize("size", SIZES)
def test_results_land_in_the_buffer_given_even_where_it_is_this_ranks_own_share(worlds: Worlds, size: int) -> None:
    for rank, got in enumerate(worlds.run(size, fill_buffers)):
        shards = torch.cat([held(r) for r in range(size)])
        total = everyone(size, (2 * size, 5)).sum(0)
        mine = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(got["gather"], shards)
        assert torch.equal(got["gather own"], shards)
        assert torch.equal(got["scatter"], total[mine])
        for name in ("scatter own", "scatter own later"):
            want = held(rank, (2 * size, 5))
            want[mine] = total[mine]
            assert torch.equal(got[name], want), name


def odd_shapes(group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        group.all_reduce(torch.tensor(float(group.rank + 1))),
        group.all_reduce(torch.empty(0, 3)),
        group.all_gather(torch.empty(0, 3)),
        group.reduce_scatter(torch.empty(0, 3)),
    )


@pytest.mark.parametrize("size", SIZES)
def test_scalars_can_be_reduced_and_empty_tensors_do_no_harm(worlds: Worlds, size: int) -> None:
    for total, *empties in worlds.run(size, odd_shapes):
        assert total == size * (size + 1) / 2
        assert [tuple(empty.shape) for empty in empties] == [(0, 3)] * 3


# The order of adding.


def add_noise(group: Group, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    reduced = group.all_reduce(noise(group.rank, dtype=dtype))
    return reduced, group.all_gather(group.reduce_scatter(noise(group.rank, dtype=dtype)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sums_have_the_same_bits_on_every_rank(worlds: Worlds, size: int, dtype: torch.dtype) -> None:
    (reduced, scattered), *others = worlds.run(size, add_noise, dtype)
    for other_reduced, other_scattered in others:
        assert torch.equal(other_reduced, reduced)
        assert torch.equal(other_scattered, scattered)


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_adds_in_the_order_of_the_ranks(worlds: Worlds, size: int) -> None:
    want = noise(0)
    for rank in range(1, size):
        want = want + noise(rank)
    for _, scattered in worlds.run(size, add_noise, torch.float32):
        assert torch.equal(scattered, want)


# Point to point.


def relay(group: Group) -> list[Tensor]:
    """Each rank sends three messages to the next one, the shapes all different."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    shapes = [(4,), (2, 3), (1, 1, 5)]
    leaving = [group.send(held(group.rank, shape) + i, after, async_op=True) for i, shape in enumerate(shapes)]
    buffers = [torch.empty(shape, dtype=torch.float64) for shape in shapes]
    arriving = [group.recv(buffer, before, async_op=True) for buffer in buffers]
    for pending in reversed(arriving):  # waited for in another order than received
        pending.wait()
    for pending in leaving:
        pending.wait()
    return buffers


@pytest.mark.parametrize("size", [2, 3, 4])
def test_messages_between_two_ranks_arrive_in_the_order_sent(worlds: Worlds, size: int) -> None:
    for rank, got in enumerate(worlds.run(size, relay)):
        for i, tensor in enumerate(got):
            assert torch.equal(tensor, held((rank - 1) % size, tuple(tensor.shape)) + i)


def send_amid_collectives(group: Group) -> tuple[Tensor, Tensor]:
    """A message that is under way while the same two ranks exchange shards is not mistaken for one."""
    shard = held(group.rank, (4,))
    peer = 1 - group.rank
    leaving = group.send(shard + 100, peer, async_op=True)
    gathering = group.all_gather(shard, async_op=True)
    arrived = group.recv(torch.empty(4, dtype=torch.float64), peer)
    leaving.wait()
    return arrived, gathering.wait()


def test_sends_and_collectives_of_equal_size_do_not_mix(worlds: Worlds) -> None:
    for rank, (arrived, gathered) in enumerate(worlds.run(2, send_amid_collectives)):
        assert torch.equal(arrived, held(1 - rank, (4,)) + 100)
        assert torch.equal(gathered, torch.cat([held(0, (4,)), held(1, (4,))]))


def send_dtypes(group: Group) -> list[Tensor]:
    if group.rank == 0:
        for dtype in DTYPES:
            group.send(held(0, (3, 2), dtype).t(), 1)
        return []
    return [group.recv(torch.empty((2, 3), dtype=dtype), 0) for dtype in DTYPES]


def test_every_dtype_can_be_sent_and_a_transposed_tensor_as_its_values_say(worlds: Worlds) -> None:
    for got, dtype in zip(worlds.run(2, send_dtypes)[1], DTYPES, strict=True):
        assert torch.equal(got, held(0, (3, 2), dtype).t())


def wait_twice(group: Group) -> bool:
    pending = group.all_reduce(held(group.rank), "mean", async_op=True)
    return torch.equal(pending.wait().clone(), pending.wait())


@pytest.mark.parametrize("size", [1, 3])
def test_waiting_twice_gives_the_same_result(worlds: Worlds, size: int) -> None:
    assert worlds.run(size, wait_twice) == [True] * size


# What is counted.


def one_of_each(group: Group) -> list[Message]:
    group.wire.messages.clear()
    n = group.size
    group.all_reduce(torch.zeros(5, 3), tag="a")
    group.all_gather(torch.zeros(7, dtype=torch.float64), tag="b", async_op=True).wait()
    group.reduce_scatter(torch.zeros(2 * n, 3, dtype=torch.bfloat16), tag="c")
    group.all_to_all(torch.zeros(n, dtype=torch.int64), tag="d")
    group.broadcast(torch.zeros(3, dtype=torch.float16), tag="e")
    group.barrier()
    if n > 1:
        leaving = group.send(torch.zeros(4, 3), (group.rank + 1) % n, tag="f", async_op=True)
        group.recv(torch.zeros(4, 3), (group.rank - 1) % n, tag="g")
        leaving.wait()
    return list(group.wire.messages)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_call_is_counted_once_with_its_payload_tag_and_peer(worlds: Worlds, size: int) -> None:
    for rank, messages in enumerate(worlds.run(size, one_of_each)):
        assert [(m.op, m.group, m.tag, m.bytes, m.peer) for m in messages] == [
            ("all_reduce", "world", "a", 5 * 3 * 4, None),
            ("all_gather", "world", "b", 7 * 8, None),
            ("reduce_scatter", "world", "c", 2 * size * 3 * 2, None),
            ("all_to_all", "world", "d", size * 8, None),
            ("broadcast", "world", "e", 3 * 2, None),
            ("barrier", "world", "", 0, None),
            ("send", "world", "f", 4 * 3 * 4, (rank + 1) % size),
            ("recv", "world", "g", 0, (rank - 1) % size),
        ]
        assert all(m.launched <= m.finished and 0 <= m.waited <= m.finished - m.launched for m in messages)


def test_a_group_of_one_sends_nothing_and_records_nothing(worlds: Worlds) -> None:
    assert worlds.run(1, one_of_each) == [[]]


def late(group: Group) -> Message:
    """Rank 1 comes a quarter of a second late; rank 0 launches, computes for a tenth, and then waits for the rest."""
    from time import sleep

    group.barrier()
    sleep(0.25 if group.rank else 0.0)
    pending = group.all_reduce(torch.zeros(3), async_op=True)
    sleep(0.0 if group.rank else 0.1)
    pending.wait()
    return group.wire.messages[-1]


def test_only_the_exposed_part_of_a_message_counts_as_waiting(worlds: Worlds) -> None:
    message = worlds.run(2, late)[0]
    assert message.finished - message.launched > 0.2
    assert 0.08 < message.waited < message.finished - message.launched - 0.08


def groups_of_a_mesh(mesh: Any) -> tuple[list[tuple[str, str]], int]:
    mesh.world.wire.messages.clear()
    for group in (mesh.dp, mesh.tp, mesh.pp, mesh.world):
        group.all_reduce(torch.zeros(1))
    return [(m.group, m.op) for m in mesh.world.wire.messages], len(mesh.dp.wire.messages)


def test_all_groups_of_a_rank_share_one_record_and_messages_name_their_group() -> None:
    seen = minipar.run(groups_of_a_mesh, plan(dp=2, tp=2))
    assert seen == [([("dp", "all_reduce"), ("tp", "all_reduce"), ("world", "all_reduce")], 3)] * 4


def two_groups_over_the_same_ranks(mesh: Any) -> list[float]:
    """Rank 0 speaks first in the world, rank 1 first in the pipeline: each group has an order of its own."""
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    world, axis = mesh.world, mesh.pp
    sums = {}
    for group in (world, axis) if mesh.rank == 0 else (axis, world):
        sums[group.name] = group.all_reduce(torch.tensor(1.0 if group is world else 10.0), async_op=True)
    if mesh.rank == 0:
        pending = [world.send(one, 1, async_op=True), axis.send(two, 1, async_op=True)]
    else:
        pending = [group.recv(torch.zeros(()), 0, async_op=True) for group in (axis, world)][::-1]
    return [float(answer.wait()) for answer in (*pending, sums["world"], sums["pp"])]


def test_messages_of_two_groups_over_the_same_ranks_do_not_mix() -> None:
    assert minipar.run(two_groups_over_the_same_ranks, plan(pp=2)) == [[1.0, 2.0, 2.0, 20.0]] * 2


def test_a_message_describes_itself_for_people() -> None:
    assert describe(Message("all_reduce", "dp", "dp.grad bucket 3", 4096, 0.0)) == (
        "all_reduce of 4096 bytes in dp (dp.grad bucket 3)"
    )
    assert describe(Message("send", "pp", "", 8, 0.0, peer=2)) == "send of 8 bytes to rank 2 in pp"
    assert describe(Message("recv", "pp", "", 0, 0.0, peer=1)) == "recv from rank 1 in pp"


# Ranks that do not make the same call.


def swapped(group: Group) -> list[Tensor]:
    a, b = torch.full((2,), 1.0), torch.full((2,), 10.0)
    for name, tensor in [("a", a), ("b", b)] if group.rank == 0 else [("b", b), ("a", a)]:
        group.all_reduce(tensor, tag=f"sum of {name}")
    return [a, b]


def test_without_check_swapped_collectives_add_up_different_tensors_without_an_error(worlds: Worlds) -> None:
    for a, b in worlds.run(2, swapped):
        assert torch.equal(a, torch.full((2,), 11.0))  # 2 if the ranks had agreed
        assert torch.equal(b, torch.full((2,), 11.0))  # 20


def other_size(group: Group) -> None:
    group.all_reduce(torch.zeros(3 + group.rank), tag="loss")


def other_dtype(group: Group) -> None:
    group.all_gather(torch.zeros(4, dtype=torch.float32 if group.rank else torch.int32))


def other_operation(group: Group) -> None:
    group.all_reduce(torch.zeros(4)) if group.rank else group.broadcast(torch.zeros(4))


def other_reduction(group: Group) -> None:
    group.all_reduce(torch.ones(4), "sum" if group.rank else "max")


def other_source(group: Group) -> None:
    group.broadcast(torch.ones(4), group.rank)


def ring(group: Group) -> float:
    """Everybody receives first, and then sends."""
    arriving = torch.empty(3)
    pending = group.recv(arriving, (group.rank - 1) % group.size, async_op=True)
    group.send(torch.full((3,), float(group.rank)), (group.rank + 1) % group.size)
    return float(pending.wait().sum())


@pytest.mark.parametrize("check", [False, True])
def test_a_receive_may_be_launched_before_the_send(check: bool) -> None:
    assert minipar.run(ring, 4, check=check, timeout=20) == [9.0, 0.0, 3.0, 6.0]


def other_message_size(group: Group) -> None:
    group.send(torch.zeros(6), 1, tag="x") if group.rank == 0 else group.recv(torch.zeros(4), 0, tag="x")


def other_message_dtype(group: Group) -> None:
    group.send(torch.zeros(4), 1) if group.rank == 0 else group.recv(torch.zeros(4, dtype=torch.int32), 0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            swapped,
            ["rank 0 calls all_reduce of 2 float32 (sum of a)", "rank 1 calls all_reduce of 2 float32 (sum of b)"],
        ),
        (other_size, ["rank 0 calls all_reduce of 3 float32 (loss)", "rank 1 calls all_reduce of 4 float32 (loss)"]),
        (other_dtype, ["rank 0 calls all_gather of 4 int32", "rank 1 calls all_gather of 4 float32"]),
        (other_operation, ["rank 0 calls broadcast from 0 of 4", "rank 1 calls all_reduce of 4"]),
        (other_reduction, ["rank 0 calls all_reduce max", "rank 1 calls all_reduce"]),
        (other_source, ["rank 0 calls broadcast from 0", "rank 1 calls broadcast from 1"]),
        (other_message_size, ["recv", "rank 0 sent 6 float32", "the buffer here has 4 float32"]),
        (other_message_dtype, ["rank 0 sent 4 float32", "the buffer here has 4 int32"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_with_check_ranks_that_differ_are_told_so_before_any_harm(wrong: Callable[..., Any], words: list[str]) -> None:
    with pytest.raises(minipar.RankError) as caught:
        minipar.run(wrong, 2, check=True)
    assert "ValueError" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def everything_right(group: Group) -> int:
    one_of_each(group)
    relay(group)
    reduce_all(group)
    return len(group.wire.messages)


def test_with_check_calls_that_agree_give_the_same_results_and_count_the_same(worlds: Worlds) -> None:
    assert minipar.run(everything_right, 3, check=True) == worlds.run(3, everything_right)
    checked = minipar.run(relay, 3, check=True)
    for with_check, without in zip(checked, worlds.run(3, relay), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(with_check, without, strict=True))


# Errors name the way out. They are raised before anything is sent, so two pretended ranks will do.


def pretended(size: int = 2) -> Group:
    return Group(None, "tp", range(size), 0, Wire())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda g: g.all_reduce(torch.zeros(1), "product"), "no operation 'product': choose from sum, mean, max, min"),
        (lambda g: g.all_reduce(torch.zeros(1, dtype=torch.int64), "mean"), "mean.*int64.*convert"),
        (lambda g: g.reduce_scatter(torch.zeros(5, 3)), r"\(5, 3\) over 2 ranks.*must divide; pad it to 6"),
        (lambda g: g.all_to_all(torch.zeros(5, 3)), r"\(5, 3\) over 2 ranks.*must divide"),
        (lambda g: g.all_gather(torch.tensor(1.0)), r"all_gather.*dimension 0.*reshape\(1\)"),
        (lambda g: g.reduce_scatter(torch.tensor(1.0)), r"reduce_scatter.*dimension 0.*reshape\(1\)"),
        (lambda g: g.all_to_all(torch.tensor(1.0)), r"all_to_all.*dimension 0.*reshape\(1\)"),
        (lambda g: g.all_gather(torch.zeros(1, 3), into=torch.zeros(4, 3)), r"into.*\(4, 3\).*\(2, 3\)"),
        (lambda g: g.reduce_scatter(torch.zeros(4), into=torch.zeros(1)), r"into.*\(1,\).*\(2,\)"),
        (lambda g: g.recv(torch.zeros(2, 3).t(), 1), "contiguous.*fresh torch.empty"),
        (lambda g: g.send(torch.zeros(1), 2), "cannot send to rank 2: the group tp has ranks 0 to 1"),
        (lambda g: g.recv(torch.zeros(1), -1), "cannot recv from rank -1: the group tp has ranks 0 to 1"),
        (lambda g: g.send(torch.zeros(1), 0), "rank 0 cannot send to itself"),
        (lambda g: g.broadcast(torch.zeros(1), 2), "cannot broadcast from rank 2: the group tp has ranks 0 to 1"),
    ],
)
def test_errors_name_the_way_out(call: Callable[[Group], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(pretended())


@pytest.mark.parametrize("size", [1, 2])
def test_a_mean_of_whole_numbers_is_refused_at_every_size(size: int) -> None:
    with pytest.raises(ValueError, match="mean"):
        pretended(size).all_reduce(torch.zeros(1, dtype=torch.int64), "mean")


def test_backends_are_chosen_by_name_or_by_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINIPAR_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_backend(4) == "gloo"
    with pytest.raises(ValueError, match="unknown backend 'mpi': choose gloo"):
        choose_backend(2, "mpi")
    with pytest.raises(ValueError, match="a GPU for each of 2 ranks, and there are 0: use gloo"):
        choose_backend(2, "nccl")
