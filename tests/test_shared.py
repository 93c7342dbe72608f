"""Memory that ranks share: the same results as through messages, again and again, and nothing left behind."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch

import minipar
from minipar import link, shared
from minipar.comm import DIRECT_BYTES, Group
from minipar.mesh import Mesh, plan

cloudpickle.register_pickle_by_value(sys.modules[__name__])
LARGE = DIRECT_BYTES // 4 + 7  # values of an all_reduce that is no single exchange; odd


def contribution(rank: int, turn: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float64) * (rank + 1) + turn


def fill(group: Group, numel: int, turn: int, buffer: torch.Tensor) -> torch.Tensor:
    return buffer.copy_(contribution(group.rank, turn, numel))


def all_operations(group: Group, turns: int) -> bool:
    """Whether each collective of a shared buffer has the result that follows from what the ranks put in."""
    n = group.size
    numel = LARGE // n * n
    odd, even, whole = (group.buffer(size, torch.float64) for size in (LARGE, numel, numel))
    ours = shared.neighbours(odd, group)
    assert n == 1 or (ours is not None and len(ours.others) == n - 1)
    right = True
    for turn in range(turns):
        wanted = torch.stack([contribution(rank, turn, LARGE) for rank in range(n)])
        for op, value in (("sum", wanted.sum(0)), ("mean", wanted.mean(0)), ("max", wanted.amax(0))):
            right &= torch.allclose(group.all_reduce(fill(group, LARGE, turn, odd), op), value)
        own = slice(group.rank * (numel // n), (group.rank + 1) * (numel // n))
        share = wanted[:, :numel].sum(0)[own]
        into = torch.empty(numel // n, dtype=torch.float64)
        right &= torch.allclose(group.reduce_scatter(fill(group, numel, turn, even), into=into), share)
        mine = fill(group, numel, turn, even).chunk(n)[group.rank]
        right &= torch.allclose(group.reduce_scatter(even, into=mine), share)
        pieces = torch.cat([contribution(r, turn, numel).chunk(n)[r] for r in range(n)])
        place = whole.zero_().chunk(n)[group.rank].copy_(pieces[own])
        right &= torch.equal(group.all_gather(place, into=whole), pieces)
    return right


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_collectives_of_shared_memory_are_right_every_time(ranks: int) -> None:
    assert minipar.run(all_operations, ranks, 12) == [True] * ranks


def several_at_once(group: Group) -> bool:
    buffers = [group.buffer(LARGE) for _ in range(3)]
    for turn in range(10):
        for place, buffer in enumerate(buffers):
            buffer.fill_(group.rank + place + turn)
        pending = [group.all_reduce(buffer, async_op=True) for buffer in buffers]
        small = group.all_reduce(torch.tensor([1.0]))  # another message meanwhile
        values = [one.wait()[-1].item() for one in pending]
        if (
            values != [sum(range(group.size)) + group.size * (place + turn) for place in range(3)]
            or small != group.size
        ):
            return False
    return True


def test_several_are_on_their_way_at_once() -> None:
    assert minipar.run(several_at_once, 3) == [True] * 3


def counted(group: Group) -> list[tuple[str, int]]:
    buffer = group.buffer(LARGE // group.size * group.size)
    group.all_reduce(buffer)
    group.reduce_scatter(buffer)
    group.all_gather(buffer.chunk(group.size)[group.rank], into=buffer)
    return [(message.op, message.bytes) for message in group.wire.messages]


def test_they_are_counted_as_messages_are() -> None:
    size = LARGE // 2 * 2 * 4
    assert minipar.run(counted, 2)[1] == [("all_reduce", size), ("reduce_scatter", size), ("all_gather", size // 2)]


def without_shared_memory(group: Group) -> tuple[bool, float]:
    if group.rank == 1:  # one rank alone lacks it
        del os.memfd_create
    buffer = group.buffer(LARGE).fill_(group.rank + 1)
    return shared.neighbours(buffer, group) is None, group.all_reduce(buffer)[0].item()


def test_where_a_rank_has_no_shared_memory_messages_take_its_place() -> None:
    assert minipar.run(without_shared_memory, 3) == [(True, 6.0)] * 3


def over_a_slow_link(group: Group) -> tuple[float, float]:
    from time import perf_counter

    buffer = group.buffer(250_000).fill_(1.0)
    with link.through(group, link.Network(2, group.size, link.Link(10e6, 0.0))):
        start = perf_counter()
        return group.all_reduce(buffer)[-1].item(), perf_counter() - start


def test_a_slow_link_is_not_passed_by() -> None:
    for value, seconds in minipar.run(over_a_slow_link, 2):
        assert value == 2.0 and seconds > 0.09  # 1 MB through 10 MB/s


def mapped(group: Group) -> tuple[int, int]:
    def count() -> int:
        with open("/proc/self/maps") as maps:
            return sum("memfd:minipar" in line for line in maps)

    buffer = group.buffer(LARGE)
    while_used = count()
    del buffer
    return while_used, count()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")
def test_the_memory_is_given_back_with_the_buffer() -> None:
    assert minipar.run(mapped, 2) == [(2, 0)] * 2


def other_sizes(group: Group) -> None:
    group.buffer(LARGE + group.rank)


def test_ranks_that_ask_for_other_sizes_are_told() -> None:
    with pytest.raises(minipar.RankError, match="buffer of 16391 float32 on rank 0 and 16392 float32 on rank 1"):
        minipar.run(other_sizes, 2)


def what_is_no_buffer(mesh: Mesh) -> list[float]:
    """Copies, slices, other shapes and other groups: sums of 1 on rank 0, 2 on rank 1 and so on."""
    buffer = mesh.dp.buffer(LARGE).fill_(mesh.rank + 1.0)
    copied, sliced, saved = copy.deepcopy(buffer), buffer[:], pickle.loads(pickle.dumps(buffer))
    sums = [mesh.dp.all_reduce(tensor)[0].item() for tensor in (copied, saved)]
    sums += [mesh.tp.all_reduce(buffer.clone())[0].item(), mesh.dp.all_reduce(sliced)[0].item()]
    buffer.fill_(mesh.rank + 1.0)
    sums.append(mesh.tp.all_reduce(buffer)[0].item())  # another group than that which shares it
    sums.append(mesh.world.all_reduce(buffer.fill_(mesh.rank + 1.0))[-1].item())
    sums.append(mesh.dp.all_reduce(buffer.fill_(mesh.rank + 1.0).unsqueeze_(0))[0, -1].item())
    buffer.data = torch.full((LARGE,), mesh.rank + 1.0)
    return [*sums, mesh.dp.all_reduce(buffer)[-1].item()]


def test_only_the_buffer_itself_is_added_up_in_place() -> None:
    for rank, sums in enumerate(minipar.run(what_is_no_buffer, plan(dp=2, tp=2))):
        dp, tp = (4.0, 6.0)[rank % 2], (3.0, 7.0)[rank // 2]
        assert sums == [dp, dp, tp, dp, tp, 10.0, dp, dp]


def saved_bytes(group: Group) -> int:
    return len(pickle.dumps(group.buffer(LARGE)))


def test_a_buffer_travels_without_its_neighbours() -> None:
    assert all(size < 4 * LARGE + 1000 for size in minipar.run(saved_bytes, 3))


def in_other_order(group: Group) -> None:
    one, two = group.buffer(LARGE), group.buffer(LARGE)
    group.all_reduce(one if group.rank else two)


def test_ranks_that_call_with_different_buffers_are_told() -> None:
    with pytest.raises(minipar.RankError, match="do not call with the same buffer"):
        minipar.run(in_other_order, 2)


def somebody_elses_file(group: Group, path: str) -> tuple[bool, float]:
    """Rank 1 names a file that is not the one that it shares: as the same number in another namespace would be."""
    if group.rank == 1:
        with open(path, "r+b") as file:
            number = file.fileno()
            real = shared._name
            shared._name = lambda own: (f"/proc/{os.getpid()}/fd/{number}", *real(own)[1:])  # type: ignore[index]
            buffer = group.buffer(LARGE)
            shared._name = real
    else:
        buffer = group.buffer(LARGE)
    return shared.neighbours(buffer, group) is None, group.all_reduce(buffer.fill_(1.0))[0].item()


def test_no_other_file_is_opened_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("Dear all")
    assert minipar.run(somebody_elses_file, 2, str(tmp_path / "letter")) == [(True, 2.0)] * 2
    assert (tmp_path / "letter").read_text() == "Dear all"


@pytest.mark.parametrize("numel", [-1, "a", 1 << 60, 2.5])
def test_a_buffer_of_no_size_is_refused(numel: object) -> None:
    with pytest.raises(minipar.RankError, match="give a whole number from 0"):
        minipar.run(lambda group: group.buffer(numel), 2)
