"""In the grader: carries the messages of an answer's ranks, and sees all of them.

Idea    A collective is complete when every rank of its group has called it; then the switch computes it and answers.
        Since all calls pass here, the record is the truth: operations, bytes, order, tags, and the line of each call.
        And as soon as every rank that is still there waits for something that nobody will do, that is a deadlock; no
        time has to pass for it to be known.
Read    `ranks.py`, the other end; `trial.py`, which starts the ranks and runs this.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")


@dataclass(frozen=True)
class Call:
    """One call of a rank: `number` counts all calls of all ranks in the order in which they came."""

    number: int
    rank: int
    op: str
    group: str
    tag: str
    bytes: int
    waits: bool
    line: int
    peer: int = -1
    ranks: int = 1  # in the group

    def __str__(self) -> str:
        """'all_reduce of 48 bytes in dp (line 12)'."""
        with_whom = f" {'to' if self.op == 'send' else 'from'} rank {self.peer}" if self.peer >= 0 else ""
        return f"{self.op} of {self.bytes} bytes{with_whom} in {self.group} (line {self.line})"


@dataclass
class Asked:
    """A call that has not been answered, with its tensor and the number by which its rank knows it."""

    call: Call
    request: int
    tensor: Tensor
    how: str


class Mismatch(Exception):
    """Ranks of one group did not make the same call: the message names all of them."""


@dataclass
class Switch:
    """`groups` maps a name to lists of ranks; `answer(rank, request, tensor)` sends a result."""

    groups: Mapping[str, Sequence[Sequence[int]]]
    answer: Callable[[int, int, Tensor], None]
    calls: list[Call] = field(default_factory=list)
    waiting: dict[int, Call] = field(default_factory=dict)  # what each rank waits for, if it does

    def __post_init__(self) -> None:
        members = [(name, tuple(ranks)) for name, some in self.groups.items() for ranks in some]
        self._lists = {(name, rank): ranks for name, ranks in members for rank in ranks}
        self._open: dict[tuple[str, tuple[int, ...], int], dict[int, Asked]] = defaultdict(dict)
        self._made: dict[tuple[str, int], int] = defaultdict(int)  # collectives, by group and rank
        self._posted: dict[tuple[str, int, int, str], deque[Asked]] = defaultdict(deque)
        self._asked: dict[tuple[int, int], Call] = {}

    def hear(self, rank: int, said: Mapping[str, Any]) -> None:
        """A frame of a rank. Raises `Mismatch`, and `ValueError` for a frame that no group sends."""
        if "wait" in said:
            call = self._asked.get((rank, int(said["wait"])))
            if call is not None:
                self.waiting[rank] = call
            return
        tensor, op, name = said["tensor"], str(said["op"]), str(said["group"])
        if type(tensor) is not Tensor or (name, rank) not in self._lists:
            raise ValueError(f"rank {rank} sent something that is no call")
        peer = int(said["peer"])
        size = tensor.numel() * tensor.element_size()
        tag, waits, line = str(said["tag"])[:80], bool(said["waits"]), int(said["line"])
        call = Call(len(self.calls), rank, op, name, tag, size, waits, line, peer, len(self._lists[name, rank]))
        self.calls.append(call)
        asked = Asked(call, int(said["id"]), tensor, str(said["how"])[:20])
        self._asked[rank, asked.request] = call
        if call.waits:
            self.waiting[rank] = call
        if op in COLLECTIVES:
            self._collect(asked)
        elif op in ("send", "recv"):
            self._match(asked)
        else:
            raise ValueError(f"rank {rank} called {op!r}, which there is not")

    def _reply(self, asked: Asked, value: Tensor) -> None:
        rank = asked.call.rank
        del self._asked[rank, asked.request]
        if self.waiting.get(rank) is asked.call:
            del self.waiting[rank]
        self.answer(rank, asked.request, value)

    # Collectives.

    def _collect(self, asked: Asked) -> None:
        call, ranks = asked.call, self._lists[asked.call.group, asked.call.rank]
        place = self._made[call.group, call.rank]
        self._made[call.group, call.rank] += 1
        together = self._open[call.group, ranks, place]
        together[call.rank] = asked
        kinds = {(one.call.op, one.how, tuple(one.tensor.shape), one.tensor.dtype) for one in together.values()}
        if len(kinds) > 1:
            lines = "; ".join(f"rank {rank} calls {together[rank].call}" for rank in sorted(together))
            raise Mismatch(f"the ranks of {call.group} do not make the same call: {lines}")
        if len(together) < len(ranks):
            return
        del self._open[call.group, ranks, place]
        inputs = [together[rank].tensor for rank in ranks]
        for rank, value in zip(ranks, carry_out(call.op, asked.how, inputs), strict=True):
            self._reply(together[rank], value)

    # Point to point.

    def _match(self, asked: Asked) -> None:
        """A send and a receive meet when both are there: until then, a send that blocks waits."""
        call, ranks = asked.call, self._lists[asked.call.group, asked.call.rank]
        other = ranks[call.peer]
        source, to = (call.rank, other) if call.op == "send" else (other, call.rank)
        opposite = "recv" if call.op == "send" else "send"
        here, there = (call.group, source, to, call.op), (call.group, source, to, opposite)
        if not self._posted[there]:
            self._posted[here].append(asked)
            return
        partner = self._posted[there].popleft()
        sent, taken = (asked, partner) if call.op == "send" else (partner, asked)
        if sent.tensor.shape != taken.tensor.shape or sent.tensor.dtype != taken.tensor.dtype:
            raise Mismatch(
                f"rank {sent.call.rank} sends {_shape(sent.tensor)} (line {sent.call.line}), but the buffer of rank "
                f"{taken.call.rank} has {_shape(taken.tensor)} (line {taken.call.line})"
            )
        self._reply(sent, torch.empty(0))
        self._reply(taken, sent.tensor)

    # Who waits for whom.

    def stuck(self, alive: Sequence[int]) -> str:
        """If all of these ranks wait, what for; else "". Ranks that are not among them have finished."""
        if not alive or any(rank not in self.waiting for rank in alive):
            return ""
        lines = [f"rank {rank} waits in {self.waiting[rank]} for {self._for_whom(rank)}" for rank in alive]
        return "; ".join(lines)

    def _for_whom(self, rank: int) -> str:
        call = self.waiting[rank]
        if call.op in COLLECTIVES:
            ranks = self._lists[call.group, rank]
            missing = [str(other) for other in ranks if not self._has_called(call, other)]
            return f"rank {' and '.join(missing)}" if missing else "nobody"
        other = self._lists[call.group, rank][call.peer]
        return f"rank {other} to {'receive' if call.op == 'send' else 'send'}"

    def _has_called(self, call: Call, other: int) -> bool:
        ranks = self._lists[call.group, call.rank]
        return any(
            call.rank in together and together[call.rank].call is call and other in together
            for (group, members, _), together in self._open.items()
            if group == call.group and members == ranks
        )


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def carry_out(op: str, how: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """What each rank gets. Raises `Mismatch` for what cannot be: a share of dimension 0 that is not whole."""
    size = len(inputs)
    if op in ("reduce_scatter", "all_to_all") and (not inputs[0].dim() or inputs[0].shape[0] % size):
        raise Mismatch(f"{op} of {_shape(inputs[0])} over {size} ranks: dimension 0 must divide among them")
    if op in ("all_gather",) and not inputs[0].dim():
        raise Mismatch("all_gather of a single number: it needs a dimension 0 to work along, so call reshape(1) first")
    match op:
        case "barrier":
            return [torch.empty(0)] * size
        case "broadcast":
            return [inputs[int(how) % size]] * size
        case "all_gather":
            return [torch.cat(list(inputs))] * size
        case "all_to_all":
            pieces = [one.chunk(size) for one in inputs]
            return [torch.cat([one[rank] for one in pieces]) for rank in range(size)]
        case "all_reduce":
            return [combined(how, inputs)] * size
        case _:
            return list(combined(how, inputs).chunk(size))


def combined(how: str, inputs: Sequence[Tensor]) -> Tensor:
    """The sum, mean, maximum or minimum."""
    stacked = torch.stack(list(inputs))
    match how:
        case "sum":
            return stacked.sum(0, dtype=inputs[0].dtype)
        case "mean" if not inputs[0].is_floating_point():
            raise Mismatch(f"the mean of {_shape(inputs[0])} need not be one: convert it first, with tensor.double()")
        case "mean":
            return stacked.mean(0)
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
    raise Mismatch(f"there is no reduction {how!r}: choose from sum, mean, max, min")
