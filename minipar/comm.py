"""Every message between ranks goes through this file, and is counted here.

Idea    A `Group` is a set of ranks that talk: its methods are the collectives (`all_reduce`, `all_gather`,
        `reduce_scatter`, `broadcast`, `all_to_all`) and `send`/`recv`. Each call leaves one `Message` behind: what
        was sent, in which group, why (`tag`), how many bytes, when it was launched and how long its rank then
        stood waiting. No barrier and no synchronisation is added, so counting does not change what is counted.
Cost    One small record per call. A group of one rank sends nothing and records nothing.
Source  Ring and pairwise collectives: Thakur, Rabenseifner and Gropp 2005, 'Optimization of Collective
        Communication Operations in MPICH'.
Read    `launch.py` before (where ranks come from), `mesh.py` after (which groups there are).

What gloo lacks is made good here, once: it has no average, and its reduce-scatter is an all-reduce of everything
with the rest thrown away. On gloo, `all_gather` and `reduce_scatter` are therefore pairwise exchanges: each rank
sends (n-1)/n of the buffer instead of twice that. A small all_reduce, where rounds count and not bytes, is an exchange
of everything (8 ranks on 2 cores: 4 ms in place of 19), and a large `buffer` is not sent at all: see `shared.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minipar import elastic, link, shared
from minipar.message import HALF, Announced, check_rows, combined, header_of
from minipar.message import Message as Message
from minipar.message import Pending as Pending
from minipar.message import Wire as Wire
from minipar.message import describe as describe

Reduction = Literal["sum", "mean", "max", "min"]
DIRECT_BYTES = 64 << 10  # up to here, an all_reduce on gloo is one exchange
FOREVER = timedelta(days=30)  # the launcher, not gloo, decides when a world is stuck


class Group:
    """Ranks that talk to each other, as one of them sees it.

    `name` is "world", "dp", "tp" or "pp"; `rank` counts within the group, from 0 to `size` - 1; `ranks` are the same
    ranks' numbers in the world. `state` is a namespace that lives as long as the rank does.
    """

    def __init__(self, handle: dist.ProcessGroup | None, name: str, ranks: Sequence[int], rank: int, wire: Wire):
        self.handle, self.name, self.ranks, self.rank, self.wire = handle, name, list(ranks), rank, wire
        self._sequence = 0
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"Group({self.name}, rank {self.rank} of {self.size})"

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def state(self) -> SimpleNamespace:
        return self.wire.state

    @property
    def backend(self) -> str:
        """ "gloo" (CPU) or "nccl" (GPU)."""
        return str(dist.get_backend(self.handle))

    @property
    def slow(self) -> bool:
        """Whether some of its messages go through a slow link (see `link.py`)."""
        return self.wire.line is not None and any(map(self.wire.line.crosses, self.ranks))

    def buffer(self, numel: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Tensor:
        """Zeros, `[numel]`, which the other ranks see where all are on one machine: collectives of the whole of it then
        spare most of the copying. Every rank of the group calls it, with the same size."""
        if not (isinstance(numel, int) and 0 <= numel < 1 << 48):
            raise ValueError(f"a buffer of {numel!r} values: give a whole number from 0 that fits into memory")
        if self.size > 1 and self.wire.folder is not None and self.backend == "gloo":
            return shared.buffer(self, numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    # Collectives: every rank of the group calls them, in the same order.

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, tag: str = "", async_op: bool = False) -> Any:
        """Combine `tensor` over the group, in place, on every rank: any shape, the same on each.

        Returns the tensor, or with `async_op` a `Pending` whose `wait()` returns it. Beware of "max" and "min" on
        gloo: a NaN may be lost, depending on the rank that holds it; agree on flags of 0 and 1 instead.
        """
        if op not in ("sum", "mean", "max", "min"):
            raise ValueError(f"all_reduce has no operation {op!r}: choose from sum, mean, max, min")
        if op == "mean" and not tensor.is_floating_point():
            raise ValueError(f"the mean of {tensor.dtype} values need not be one: convert them, with tensor.double()")
        if self.size == 1:
            return self._done(tensor, async_op)
        message = self._launch("all_reduce", tensor, tag, how="" if op == "sum" else f" {op}")
        whole, combine = tensor if tensor.is_contiguous() else tensor.contiguous(), _COMBINE.get(op, torch.add)
        if self.backend == "gloo" and message.bytes <= DIRECT_BYTES:
            arrived = [whole if rank == self.rank else torch.empty_like(whole) for rank in range(self.size)]
            works = self.exchange([whole] * self.size, arrived)
        elif (ours := shared.neighbours(whole, self)) and not self.slow:
            arrived, works = [whole], [shared.all_reduce(ours, whole, combine)]
        elif self.slow or (self.backend == "gloo" and whole.dtype in HALF):
            arrived, works = [whole], [link.all_reduce(self, whole, combine)]
        else:
            reduce = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op, dist.ReduceOp.SUM)
            arrived, works = [whole], [dist.all_reduce(whole, op=reduce, group=self.handle, async_op=True)]

        def finish() -> Tensor:
            total = combined(combine, arrived)  # in their order: the same bits on each rank
            total = total.div_(self.size) if op == "mean" else total
            return tensor if total is tensor else tensor.copy_(total)

        return self._answer(message, works, finish, async_op)

    def all_gather(self, tensor: Tensor, *, into: Tensor | None = None, tag: str = "", async_op: bool = False) -> Any:
        """Lay the shards of all ranks end to end along dimension 0: `[n, ...] -> [size*n, ...]`, on every rank.

        `into` is a buffer for the result; this rank's shard may already lie in its place there.
        """
        check_rows(tensor, "all_gather", 1)
        out = self._buffer(tensor, (self.size * tensor.shape[0], *tensor.shape[1:]), into)
        mine = out.chunk(self.size)[self.rank] if self.size > 1 else out
        if mine.data_ptr() != tensor.data_ptr():
            mine.copy_(tensor)
        if self.size == 1:
            return self._done(out, async_op)
        message = self._launch("all_gather", tensor, tag)
        if (ours := shared.neighbours(out, self)) and not self.slow:
            works = [shared.all_gather(ours, out)]
        elif self.backend == "gloo":
            works = self.exchange([mine] * self.size, out.chunk(self.size))
        else:
            works = [_all_gather_single(out, mine.contiguous(), group=self.handle, async_op=True)]
        return self._answer(message, works, lambda: out, async_op)

    def reduce_scatter(
        self, tensor: Tensor, *, into: Tensor | None = None, tag: str = "", async_op: bool = False
    ) -> Any:
        """Sum over the ranks and keep this rank's share of dimension 0: `[size*n, ...] -> [n, ...]`.

        `into` is a buffer for the result; it may be this rank's own share of `tensor`.
        """
        check_rows(tensor, "reduce_scatter", self.size)
        out = self._buffer(tensor, (tensor.shape[0] // self.size, *tensor.shape[1:]), into)
        if self.size == 1:
            return self._done(out if out.data_ptr() == tensor.data_ptr() else out.copy_(tensor), async_op)
        message = self._launch("reduce_scatter", tensor, tag)
        if self.backend != "gloo":
            work = _reduce_scatter_single(out, tensor.contiguous(), group=self.handle, async_op=True)
            return self._answer(message, [work], lambda: out, async_op)
        if (ours := shared.neighbours(tensor, self)) and not self.slow:
            return self._answer(message, [shared.reduce_scatter(ours, tensor, out)], lambda: out, async_op)
        chunks = tensor.contiguous().chunk(self.size)
        arrived = [chunks[r] if r == self.rank else torch.empty_like(chunks[r]) for r in range(self.size)]
        works = self.exchange(chunks, arrived)

        def finish() -> Tensor:
            # In the order of the ranks, so that the sum does not depend on who computes it. `out` is written last: it
            # may be this rank's own share, which is yet to be added.
            if out.dtype in HALF:
                return out.copy_(combined(torch.add, arrived))
            *most, last = arrived
            total = most[0]
            for share in most[1:]:
                total = torch.add(total, share, out=arrived[1 if self.rank == 0 else 0])
            return torch.add(total, last, out=out)

        return self._answer(message, works, finish, async_op)

    def all_to_all(self, tensor: Tensor, *, tag: str = "", async_op: bool = False) -> Any:
        """Rank i's j-th share of dimension 0 goes to rank j: `[size*n, ...] -> [size*n, ...]`."""
        check_rows(tensor, "all_to_all", self.size)
        out = self._buffer(tensor, tensor.shape, None)
        if self.size == 1:
            return self._done(out.copy_(tensor), async_op)
        message = self._launch("all_to_all", tensor, tag)
        work = dist.all_to_all_single(out, tensor.contiguous(), group=self.handle, async_op=True)
        return self._answer(message, [work], lambda: out, async_op)

    def broadcast(self, tensor: Tensor, source: int = 0, *, tag: str = "", async_op: bool = False) -> Any:
        """Give every rank the tensor of rank `source` of this group, in place."""
        self._member(source, "broadcast from")
        if self.size == 1:
            return self._done(tensor, async_op)
        message = self._launch("broadcast", tensor, tag, how=f" from {source}")
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        work = dist.broadcast(whole, src=self.ranks[source], group=self.handle, async_op=True)
        return self._answer(message, [work], lambda: tensor if whole is tensor else tensor.copy_(whole), async_op)

    def barrier(self) -> None:
        """Return when every rank of the group has called it."""
        if self.size > 1:
            message = self._launch("barrier", torch.empty(0), "")
            self._answer(message, [dist.barrier(group=self.handle, async_op=True)], lambda: torch.empty(0), False)

    # Point to point. Messages from one rank to another arrive in the order in which they were sent.

    def send(self, tensor: Tensor, to: int, *, tag: str = "", async_op: bool = False) -> Any:
        """Send to rank `to` of this group, which must call `recv` with the same shape and dtype.

        Blocks until the buffer may be used again, on gloo often until the other side receives: two ranks that both
        send first wait for each other for ever.
        """
        self._member(to, "send to")
        message = self._launch("send", tensor, tag, peer=to)
        whole = tensor.contiguous()
        number = self._sent[to] = self._sent.get(to, 0) + 1
        works = [dist.isend(header_of(whole), self.ranks[to], self.handle, 2 * number)] if self.wire.check else []
        works.append(self._isend(whole, to, 2 * number + 1))
        return self._answer(message, works, lambda: whole, async_op)

    def recv(self, tensor: Tensor, source: int, *, tag: str = "", async_op: bool = False) -> Any:
        """Receive into `tensor`, in place, what rank `source` of this group sends next."""
        self._member(source, "recv from")
        if not tensor.is_contiguous():
            raise ValueError("recv needs a contiguous tensor: call it with a fresh torch.empty(shape)")
        message = self._launch("recv", tensor, tag, peer=source)
        message.bytes = 0
        number = self._received[source] = self._received.get(source, 0) + 1
        take: Any = lambda: dist.irecv(tensor, self.ranks[source], self.handle, 2 * number + 1)
        if self.wire.check:
            header = torch.empty_like(header_of(tensor))
            first = dist.irecv(header, self.ranks[source], self.handle, 2 * number)
            work: Any = Announced(first, header, tensor, take, f"{describe(message)}: rank {source}")
        else:
            work = take()
        return self._answer(message, [work], lambda: tensor, async_op)

    def gather_objects(self, value: Any) -> list[Any]:
        """The picklable `value` of every rank, in the order of ranks, on every rank: for reports, not for training."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self.wire.waiting(f"gather_objects in {self.name}")
        dist.all_gather_object(values, value, group=self.handle)
        self.wire.waiting("")
        return values

    # How a call is counted and answered.

    def _member(self, rank: int, verb: str) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"cannot {verb} rank {rank}: the group {self.name} has ranks 0 to {self.size - 1}")
        if rank == self.rank and verb != "broadcast from":
            raise ValueError(f"rank {rank} cannot {verb} itself")

    def _buffer(self, tensor: Tensor, shape: Sequence[int], into: Tensor | None) -> Tensor:
        """Where the result goes: `into`, if it has the right shape, or a new tensor like `tensor`."""
        if into is not None and into.shape != tuple(shape):
            raise ValueError(f"into= has shape {tuple(into.shape)}, but the result has {tuple(shape)}")
        return tensor.new_empty(tuple(shape)) if into is None else into

    def _launch(self, op: str, tensor: Tensor, tag: str, peer: int | None = None, how: str = "") -> Message:
        message = Message(op, self.name, tag, tensor.numel() * tensor.element_size(), perf_counter(), peer)
        self.wire.messages.append(message)
        self.wire.waiting(describe(message))  # already now: mismatched calls may abort the process in the next line
        if self.wire.check and peer is None:
            self._agree(message, tensor, how)
        return message

    def _answer(self, message: Message, works: Sequence[Any], finish: Callable[[], Tensor], async_op: bool) -> Any:
        pending = Pending(self.wire, message, works, finish)
        if not async_op:
            return pending.wait()
        self.wire.waiting("")
        return pending

    def _done(self, tensor: Tensor, async_op: bool) -> Any:
        return Pending(self.wire, None, [], lambda: tensor) if async_op else tensor

    def exchange(self, out: Sequence[Tensor], into: Sequence[Tensor], tag: int | None = None) -> list[Any]:
        """Send `out[r]` to each other rank r and receive `into[r]` from it, nearest neighbour first."""
        tag = self.next_tag() if tag is None else tag
        works = []
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            works.append(dist.irecv(into[source], self.ranks[source], self.handle, tag))
            works.append(self._isend(out[to], to, tag))
        return works

    def next_tag(self) -> int:
        """A tag for an exchange, the same on each rank that has made the same calls."""
        self._sequence += 1
        return (1 << 30) + self._sequence % (1 << 29)  # apart from the tags of send and recv

    def _isend(self, tensor: Tensor, to: int, tag: int) -> Any:
        line, rank, tensor = self.wire.line, self.ranks[to], tensor.detach()  # another thread may send it
        if line is not None and line.crosses(rank):
            return line.send(tensor.nbytes, lambda: dist.isend(tensor, rank, self.handle, tag))
        return dist.isend(tensor, rank, self.handle, tag)

    def _agree(self, message: Message, tensor: Tensor, how: str) -> None:
        """Raise unless every rank of the group makes the same call now; `how` says more of the operation."""
        kind = "shared " * bool(shared.neighbours(tensor, self)) + str(tensor.dtype).removeprefix("torch.")
        mine = f"{message.op}{how} of {tensor.numel()} {kind}{f' ({message.tag})' if message.tag else ''}"
        self.wire.waiting(describe(message))
        calls: list[Any] = [None] * self.size
        dist.all_gather_object(calls, mine, group=self.handle)
        if any(call != mine for call in calls):
            lines = "; ".join(f"rank {rank} calls {call}" for rank, call in enumerate(calls))
            raise ValueError(f"the ranks of {self.name} do not make the same call: {lines}")


_COMBINE = {"max": torch.maximum, "min": torch.minimum}  # any other operation adds


# torch renamed these two; either name will do.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def choose_backend(ranks: int, asked: str = "") -> str:
    """ "nccl" when every one of `ranks` local ranks has a GPU of its own, else "gloo"; `asked`, or the environment
    variable MINIPAR_BACKEND, overrides. Raises `ValueError` for a backend that this machine lacks."""
    backend = asked or os.environ.get("MINIPAR_BACKEND", "")
    gpus = torch.cuda.device_count()
    if not backend:
        return "nccl" if dist.is_nccl_available() and 0 < ranks <= gpus else "gloo"
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"unknown backend {backend!r}: choose gloo (CPU) or nccl (one GPU for each rank)")
    if backend == "nccl" and not (dist.is_nccl_available() and ranks <= gpus):
        raise ValueError(f"backend nccl needs a GPU for each of {ranks} ranks, and there are {gpus}: use gloo")
    return backend


def connect(
    rank: int, size: int, *, backend: str, store: str | None = None, wire: Wire | None = None, local_rank: int = -1
) -> Group:
    """Join the world of `size` ranks as `rank`, and return it as a group.

    `store` is a file path at which ranks of one machine meet, without any port; without it they meet as torchrun's
    environment variables say. Ranks of one machine talk over loopback only.
    """
    if store is not None or os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if backend == "nccl":
        torch.cuda.set_device(rank if local_rank < 0 else local_rank)
    wire = wire or Wire()
    if store is not None:
        meeting: Any = dist.FileStore(store, size)  # type: ignore[attr-defined]
    else:
        meeting, rank, size = next(dist.rendezvous("env://", rank, size, timeout=FOREVER))  # type: ignore[attr-defined]
        place, wire.attempts = elastic.meet(meeting, rank, size)
        meeting = dist.PrefixStore(place, meeting)  # type: ignore[attr-defined]
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=FOREVER, store=meeting)
    _worlds.append(Group(dist.group.WORLD, "world", range(size), rank, wire))
    return _worlds[-1]


def twin(group: Group) -> Group:
    """Another group of all ranks, on the processor, whose messages are not counted with `group`'s: for a thread."""
    handle = dist.new_group(backend="gloo", timeout=FOREVER)
    return Group(handle, group.name, group.ranks, group.rank, Wire())


def disconnect() -> None:
    """Leave the world."""
    _worlds.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


_worlds: list[Group] = []  # as torch.distributed, a process is in one world at most


def current_world() -> Group | None:
    """The world that this process has joined as a rank, if any."""
    return _worlds[-1] if _worlds else None


def device_mesh(shape: Sequence[int], names: Sequence[str], device_type: str) -> DeviceMesh:
    """torch's DeviceMesh over all ranks of the world; the last dimension changes fastest."""
    return init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(names))


def mesh_group(mesh: DeviceMesh, name: str, wire: Wire) -> Group:
    """The group of this rank along dimension `name` of the mesh."""
    handle = mesh.get_group(name)
    if handle is dist.group.WORLD and mesh.size() > 1:
        # An axis that spans all ranks gets the world's own group from torch: messages of the two would mix.
        handle = dist.new_group(timeout=FOREVER)
    return Group(handle, name, dist.get_process_group_ranks(handle), mesh.get_local_rank(name), wire)
