"""Parameters laid end to end, in buckets: what data parallel and ZeRO both stand on.

Idea    One message for many small tensors is cheaper than many messages. A `Flat` lays the parameters of a bucket end
        to end in one buffer; `bucket_plan` says which go together; `LaunchOrder` launches bucket 0, 1, 2 ... each as
        soon as its gradients are there, and never out of order: ranks that sent their buckets in different orders
        would add up gradients of different parameters, without any error.

            parameters   a.weight   a.bias  b.weight  pad
            buffer     [ 0 1 2 3 4 | 5 6  |  7 8 9  |  - ]      2 ranks: rank 0 owns 0-4, rank 1 owns 5-9 and the pad
            pieces       rank 0: a.weight[0:4]...               a piece is the part of a parameter that a rank owns

Read    `dp.py` and `zero.py`, which use it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minipar.comm import Group


@dataclass(frozen=True)
class Piece:
    """A run of elements of a parameter, flattened, from `start` on, and their gradient after the ranks have combined
    it (1-dimensional, a view: scaling it scales the gradient that the optimizer sees)."""

    parameter: nn.Parameter
    start: int
    gradient: Tensor


@dataclass(frozen=True)
class Kept:
    """A run of elements of a parameter, flattened, from `start` on, and what this rank keeps of it from step to step:
    its "weight" and the optimizer's states, as 1-dimensional views by name."""

    parameter: nn.Parameter
    start: int
    values: dict[str, Tensor]


Write = Callable[[Tensor, bool], object]  # (place, fresh): write a gradient there, or add it to what is there


def takes_gradients(parameter: Tensor) -> bool:
    """Whether data parallel (or ZeRO) wants this parameter's gradient written into its bucket without autograd."""
    return hasattr(parameter, "take_gradient")


def write_gradient(parameter: Tensor, write: Write) -> None:
    """Let a layer write its weight's gradient into the bucket: a matrix product that adds to what is there spares a
    copy and, from the second micro-batch on, a sum. Source: 'gradient accumulation fusion' of Megatron-LM."""
    parameter.take_gradient(write)  # type: ignore[attr-defined]


def uses(parameter: Tensor) -> int:
    """How many times a micro-batch uses the parameter: twice where embeddings are tied on one rank. Each use brings a
    gradient of its own."""
    return getattr(parameter, "uses", 1)


def optimizer_values(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The optimizer's states of a parameter that have a value for each element, flattened views by name."""
    states = optimizer.state.get(parameter, {}).items()
    return {
        name: s.view(-1) for name, s in states if isinstance(s, Tensor) and s.numel() == parameter.numel() and s.dim()
    }


def bucket_plan(sizes: Sequence[int], limit: int, alone: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Which parameters share a bucket: runs of neighbours, filled from the last parameter to the first, since that is
    the order in which backward finishes them. A bucket is closed when the next parameter would take it past `limit`
    (in the unit of `sizes`); where `alone` is given, parameters with different keys never share one.

    >>> bucket_plan([5, 4, 3, 2], limit=6)
    [[3, 2], [1], [0]]
    """
    plan: list[list[int]] = []
    filled = 0
    for index in reversed(range(len(sizes))):
        same = not plan or alone is None or alone[plan[-1][-1]] == alone[index]
        if not plan or not same or filled + sizes[index] > limit:
            plan.append([])
            filled = 0
        plan[-1].append(index)
        filled += sizes[index]
    return plan


class Flat:
    """The places of some parameters in one buffer, whose length is padded to divide among `ranks`."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: int = 1) -> None:
        self.parameters, self.ranks = list(parameters), ranks
        self.offsets = [0]
        for parameter in self.parameters:
            self.offsets.append(self.offsets[-1] + parameter.numel())
        self.share = -(-self.offsets[-1] // ranks)
        self.numel = self.share * ranks

    def buffer(self, group: Group | None = None) -> Tensor:
        """A new buffer of zeros, `[numel]`; with a group, one that its ranks share where they can."""
        like = self.parameters[0]
        if group is not None:
            return group.buffer(self.numel, like.dtype, like.device)
        return torch.zeros(self.numel, dtype=like.dtype, device=like.device)

    def view(self, buffer: Tensor, index: int) -> Tensor:
        """The place of one parameter in the buffer, in the parameter's shape."""
        return buffer[self.offsets[index] : self.offsets[index + 1]].view(self.parameters[index].shape)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Each parameter's place in the buffer, in the parameter's shape."""
        return [
            buffer[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(self.offsets, self.parameters, strict=False)
        ]

    def adopt(self, group: Group, tag: str, *, shared: bool = False) -> Tensor:
        """Move the parameters into a buffer, each to its place, with the values of the group's first rank."""
        buffer = self.buffer(group if shared else None)
        for parameter, view in zip(self.parameters, self.views(buffer), strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        group.broadcast(buffer, tag=tag)
        return buffer

    def pieces(self, rank: int, gradient: Tensor) -> list[Piece]:
        """What `rank`'s share of the buffer holds; `gradient` is that share, `[share]`."""
        first, last = rank * self.share, (rank + 1) * self.share
        pieces = []
        for start, parameter in zip(self.offsets, self.parameters, strict=False):
            begin, end = max(start, first), min(start + parameter.numel(), last)
            if begin < end:
                pieces.append(Piece(parameter, begin - start, gradient[begin - first : end - first]))
        return pieces


class LaunchOrder:
    """Calls `launch(bucket)` for bucket 0, 1, 2 ... as their gradients arrive, always in that order.

    `counts[bucket]` gradients arrive for each micro-batch. Either the bucket is launched once a step, after all
    micro-batches (`rounds=1`), or once for every micro-batch.
    """

    def __init__(self, counts: Sequence[int], launch: Callable[[int], None]) -> None:
        self.counts, self.launch = counts, launch
        self.start(micro_batches=0, rounds=0)

    def start(self, *, micro_batches: int, rounds: int = 1) -> None:
        self.rounds, self.round, self.next = rounds if self.counts else 0, 0, 0
        self.needed = [count * micro_batches // max(rounds, 1) for count in self.counts]
        self.seen = [0] * len(self.counts)

    def arrived(self, bucket: int) -> None:
        """One more gradient of this bucket is there."""
        self.seen[bucket] += 1
        self._advance()

    def finish(self) -> None:
        """Launch what is left: parameters that took no part in a micro-batch have no gradient to wait for."""
        self._advance(all_there=True)

    def _advance(self, all_there: bool = False) -> None:
        while self.round < self.rounds and (
            all_there or self.seen[self.next] >= (self.round + 1) * self.needed[self.next]
        ):
            bucket, self.next = self.next, self.next + 1
            if self.next == len(self.counts):
                self.next, self.round = 0, self.round + 1
            self.launch(bucket)
