"""In the answer's process: the groups that an answer calls, which have the names and meanings of `minipar.comm.Group`.

Idea    A call becomes a frame to the grader's switch, and its result a frame back. So an answer that passes here runs
        on minipar's own groups as it is, on gloo or NCCL; but here nothing that happens in this process can change
        what the switch has seen.
Read    `switch.py`, the other end.
"""

from __future__ import annotations

import sys
from socket import socket
from typing import Any

import torch
from torch import Tensor

from minipar.grade import frames


class Line:
    """This rank's connection to the switch."""

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self._next = 0
        self._arrived: dict[int, Any] = {}

    def ask(self, request: dict[str, Any]) -> int:
        """Send a request; the number by which its answer is known."""
        self._next += 1
        frames.send(self._connection, {"id": self._next, "line": _where(), **request})
        return self._next

    def tell(self, said: dict[str, Any]) -> None:
        """Something that has no answer."""
        frames.send(self._connection, {"id": 0, "line": _where(), **said})

    def answer(self, number: int) -> Any:
        """Wait for the answer to a request."""
        while number not in self._arrived:
            said = frames.receive(self._connection)
            self._arrived[said["id"]] = said["value"]
        return self._arrived.pop(number)


def _where() -> int:
    """The line of the answer's file in which the call stands."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != "answer":
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_lineno if frame else 0


class Pending:
    """An asynchronous message: `wait()` returns its result, and until then its buffer must not be touched."""

    def __init__(self, line: Line, number: int, into: Tensor | None) -> None:
        self._line, self._number, self._into = line, number, into
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._result is None:
            self._line.tell({"wait": self._number})
            self._result = _placed(self._line.answer(self._number), self._into)
        return self._result


def _placed(value: Tensor, into: Tensor | None) -> Tensor:
    """The value, or `into` with the value in it."""
    if into is None:
        return value
    if value.numel():  # of a send, nothing comes back
        into.detach().copy_(value)
    return into


class Group:
    """Ranks that talk to each other, as one of them sees it: `rank` of `size`. Every rank of the group makes the same
    collective calls, in the same order."""

    def __init__(self, line: Line, name: str, ranks: list[int], rank: int) -> None:
        self._line, self.name, self.ranks, self.rank = line, name, ranks, rank

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, tag: str = "", async_op: bool = False) -> Any:
        """The sum ("mean", "max", "min") over the group, in place, on every rank."""
        return self._call("all_reduce", tensor, tag, async_op, into=tensor, how=op)

    def all_gather(self, tensor: Tensor, *, into: Tensor | None = None, tag: str = "", async_op: bool = False) -> Any:
        """Every rank's tensor, one after the other along dimension 0."""
        return self._call("all_gather", tensor, tag, async_op, into=into)

    def reduce_scatter(
        self, tensor: Tensor, *, into: Tensor | None = None, tag: str = "", async_op: bool = False
    ) -> Any:
        """The sum over the group, of which this rank gets its share of dimension 0."""
        return self._call("reduce_scatter", tensor, tag, async_op, into=into, how="sum")

    def all_to_all(self, tensor: Tensor, *, tag: str = "", async_op: bool = False) -> Any:
        """Piece r of dimension 0 goes to rank r; the pieces for this rank, in the order of ranks."""
        return self._call("all_to_all", tensor, tag, async_op)

    def broadcast(self, tensor: Tensor, source: int = 0, *, tag: str = "", async_op: bool = False) -> Any:
        """Rank `source`'s tensor, in place, on every rank."""
        return self._call("broadcast", tensor, tag, async_op, into=tensor, how=str(int(source)))

    def barrier(self) -> None:
        """Return when every rank of the group has called it."""
        self._call("barrier", torch.empty(0), "", False)

    def send(self, tensor: Tensor, to: int, *, tag: str = "", async_op: bool = False) -> Any:
        """Send to rank `to`; blocks until that rank receives."""
        return self._call("send", tensor, tag, async_op, into=tensor, peer=self._peer("send to", to))

    def recv(self, tensor: Tensor, source: int, *, tag: str = "", async_op: bool = False) -> Any:
        """Receive into `tensor`, in place, what rank `source` sends next."""
        if isinstance(tensor, Tensor) and not tensor.is_contiguous():
            raise ValueError("recv needs a contiguous tensor: call it with a fresh torch.empty(shape)")
        return self._call("recv", tensor, tag, async_op, into=tensor, peer=self._peer("recv from", source))

    def _peer(self, verb: str, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(f"cannot {verb} rank {rank}: the group {self.name} has ranks 0 to {self.size - 1}")
        if rank == self.rank:
            raise ValueError(f"rank {rank} cannot {verb} itself")
        return int(rank)

    def _call(
        self,
        op: str,
        tensor: Tensor,
        tag: str,
        async_op: bool,
        *,
        into: Tensor | None = None,
        how: str = "",
        peer: int = -1,
    ) -> Any:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{op} needs a tensor, and got a {type(tensor).__name__}")
        request = {"op": op, "group": self.name, "how": how, "peer": peer, "tag": str(tag), "waits": not async_op}
        number = self._line.ask({**request, "tensor": tensor.detach()})
        return Pending(self._line, number, into) if async_op else _placed(self._line.answer(number), into)
