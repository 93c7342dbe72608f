"""What a step would take on slower links: its messages again, by the alpha-beta model, and nothing run.

Idea    A step at full speed leaves behind, on each rank, when it launched each message, when it began to wait for it
        and how long it waited. Take the waiting out, and the rank's own work is left. Put the work back, and let the
        messages take as long as the link makes them: latency + bytes / bandwidth, one after another through the line
        that the ranks of a node share. Every overlap is found where it is: a rank waits only for what has not come.

            rank 0   work | launch a | work ..... | wait for a |------| work
            rank 1   work ....... | launch a | work | wait for a |----| work
                                             \\ a arrives: latency + bytes / bandwidth after both have launched it

Source  Hockney 1994 for the model of a message; which messages a collective is made of: `comm.py`.
Cost    A pass over the messages of a step, some microseconds each.
Read    `link.py` before: the same link, for real messages.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

from minipar.comm import DIRECT_BYTES
from minipar.link import Network
from minipar.message import Message

WAITED = 50e-6  # seconds: who waited longer saw the message arrive


@dataclass
class Step:
    """One rank's step: from `begin` to `end`, with its messages, in `time.perf_counter()` seconds."""

    begin: float
    end: float
    messages: list[Message]


def predict(steps: Sequence[Step], groups: Callable[[int, str], Sequence[int]], network: Network) -> float:
    """Seconds that the step would take over the network; `groups(rank, name)` are the world ranks of its group.

    `steps` are one step of each rank, at full speed. Raises `ValueError` if some rank would wait for ever.
    """
    return _Replay(steps, _calls(steps, groups), network).run()


@dataclass(eq=False)
class _Call:
    """The same call on all its ranks: a collective, or a send with its receive."""

    op: str
    ranks: tuple[int, ...]
    bytes: int = 0
    own: list[Message] = field(default_factory=list)
    missing: dict[tuple[int, int], int] = field(default_factory=dict)  # by rank and round: what has yet to arrive
    done: dict[int, float] = field(default_factory=dict)
    begun: float = 0.0  # when the last rank launched it

    def rounds(self) -> list[float]:
        """The bytes that a rank sends to each other rank, round by round."""
        match self.op:
            case "reduce_scatter" | "all_to_all":
                return [self.bytes / len(self.ranks)]
            case "all_reduce" if self.bytes > DIRECT_BYTES:
                return [self.bytes / len(self.ranks)] * 2
            case _:
                return [self.bytes]

    def arrived(self, rank: int, number: int) -> bool:
        """One more message of a round has arrived, or the rank's own have gone: whether that was the last."""
        whole = 1 if self.op == "send" else len(self.ranks)
        self.missing[rank, number] = self.missing.get((rank, number), whole) - 1
        return not self.missing[rank, number]

    def own_cost(self) -> float:
        """What it took at full speed, from its last launch to its end, as the median rank saw it that waited for it."""
        last = max(message.launched for message in self.own)
        ends = [message.finished - last for message in self.own if message.waited > WAITED]
        return max(0.0, median(ends)) if ends else 0.0


class _Replay:
    """The ranks' work and messages, played again in the order of virtual time."""

    def __init__(self, steps: Sequence[Step], calls: Sequence[dict[int, _Call]], network: Network) -> None:
        self.network = network
        self.taken = defaultdict[int, float](float)  # until when the line of a node is taken
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.scripts = [_script(step, mine) for step, mine in zip(steps, calls, strict=True)]
        self.waiting: dict[int, _Call] = {}
        self.end = 0.0

    def run(self) -> float:
        for rank in range(len(self.scripts)):
            self.at(0.0, self.go_on, rank)
        while self.events:
            second, _, what, about = heapq.heappop(self.events)
            what(second, *about)
        if any(self.scripts):
            stuck = next(rank for rank, script in enumerate(self.scripts) if script)
            raise ValueError(f"the messages are not those of a whole step: rank {stuck} would wait for ever")
        return self.end

    def at(self, second: float, what: Callable[..., None], *about: Any) -> None:
        heapq.heappush(self.events, (second, len(self.scripts) + next(_numbers), what, about))

    def go_on(self, now: float, rank: int) -> None:
        """A rank works until it launches its next message, or has to wait for one."""
        script = self.scripts[rank]
        work, waits, call = script.pop()
        if call is None:
            self.end = max(self.end, now + work)
        else:
            self.at(now + work, self.wait if waits else self.begin, rank, call)

    def begin(self, now: float, rank: int, call: _Call) -> None:
        call.begun = max(call.begun, now)
        if call.op != "send" or rank == call.ranks[0]:
            self.launch(now, rank, call, 0)
        self.at(now, self.go_on, rank)

    def wait(self, now: float, rank: int, call: _Call) -> None:
        if rank in call.done:
            self.at(max(now, call.done[rank]), self.go_on, rank)
        else:
            self.waiting[rank] = call

    def pieces(self, call: _Call) -> int:
        """How many messages a node's line passes on in a round. What the ranks do with the first is done while the
        last is on its way."""
        crossing = defaultdict[int, int](int)
        for rank in call.ranks[:1] if call.op == "send" else call.ranks:
            crossing[self.network.node(rank)] += sum(
                self.network.node(other) != self.network.node(rank) for other in call.ranks
            )
        return max(1, *crossing.values())

    def launch(self, now: float, rank: int, call: _Call, number: int) -> None:
        """A round of a rank: its messages to all others, one after another through its node's line."""
        node, sent = self.network.node(rank), now
        for other in call.ranks[1:] if call.op == "send" else [other for other in call.ranks if other != rank]:
            arrives = now
            if self.network.node(other) != node:
                seconds = call.rounds()[number] / self.network.link.bandwidth
                self.taken[node] = max(self.taken[node], now) + seconds
                arrives = self.taken[node] + self.network.link.latency
            sent = max(sent, arrives)
            self.at(arrives, self.arrive, other, call, number)
        self.at(sent, self.arrive, rank, call, number)

    def arrive(self, now: float, rank: int, call: _Call, number: int) -> None:
        if not call.arrived(rank, number):
            return
        if call.op != "send" and number + 1 < len(call.rounds()):
            self.launch(now, rank, call, number + 1)
            return
        own = call.own_cost()
        call.done[rank] = max(call.begun + own, now + own / self.pieces(call))
        if self.waiting.get(rank) is call:
            del self.waiting[rank]
            self.at(call.done[rank], self.go_on, rank)


_numbers = count()


def _script(step: Step, calls: dict[int, _Call]) -> list[tuple[float, bool, _Call | None]]:
    """What a rank does, from the last to the first: seconds of work, then a launch or a wait; at the end only work."""
    events = [(message.launched, False, message) for message in step.messages]
    events += [(message.finished - message.waited, True, message) for message in step.messages]
    events.sort(key=lambda event: event[:2])
    script: list[tuple[float, bool, _Call | None]] = []
    now = step.begin
    for second, waits, message in events:
        script.append((max(0.0, second - now), waits, calls[id(message)]))
        now = max(now, message.finished if waits else second)
    script.append((max(0.0, step.end - now), False, None))
    return script[::-1]


def _calls(steps: Sequence[Step], groups: Callable[[int, str], Sequence[int]]) -> list[dict[int, _Call]]:
    """For each rank: the call to which each of its messages belongs, by the message's id. The k-th collective of a
    group is the same on all of its ranks; so is the k-th message from one rank to another."""
    seen: dict[object, _Call] = {}
    answer = []
    for rank, step in enumerate(steps):
        counts = defaultdict[object, int](int)
        mine = dict[int, _Call]()
        for message in step.messages:
            members, op = tuple(groups(rank, message.group)), message.op
            if message.peer is not None:
                ends = (rank, members[message.peer])
                members, op = (ends if op == "send" else ends[::-1]), "send"
            key = (message.group, op == "send", members)
            counts[key] += 1
            call = seen.setdefault((key, counts[key]), _Call(op, members))
            call.bytes = max(call.bytes, message.bytes)
            call.own.append(message)
            mine[id(message)] = call
        answer.append(mine)
    return answer
