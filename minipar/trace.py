"""What really happened on a rank: its time, its messages, its memory.

Idea    The engine leaves facts behind as it runs: a `Span` for each action, a `Message` for each call to the message
        layer. Here they become the same types that the simulator and the ledger predict, so that the two can be
        subtracted. Memory is measured by looking: the bytes of every tensor that is held, and, for one step, of
        every tensor that autograd keeps for a backward.
Cost    Two clock readings for an action or message. The meter of activations costs some microseconds for each saved
        tensor, so it is on for one step only.
Read    `facts.py` before; `report.py` after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from minipar.comm import Group, Message
from minipar.facts import Footprint, Span, Timeline, Traffic, Volume


def traffic(messages: Iterable[Message]) -> Traffic:
    """Calls and payload bytes by group and operation; receiving is no traffic of its own."""
    calls, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for message in messages:
        if message.op != "recv":
            calls[message.group, message.op] += 1
            sizes[message.group, message.op] += message.bytes
    return Traffic({key: Volume(calls[key], sizes[key]) for key in calls})


def waited(messages: Iterable[Message]) -> dict[str, float]:
    """Seconds in which the rank could do nothing but wait for a message, by group."""
    seconds: dict[str, float] = {}
    for message in messages:
        seconds[message.group] = seconds.get(message.group, 0.0) + message.waited
    return seconds


def timeline(spans_by_rank: Sequence[Sequence[Span]]) -> Timeline:
    """One pipeline's timeline, from the spans of its ranks in the order of the stages."""
    return Timeline(tuple(span for spans in spans_by_rank for span in spans), len(spans_by_rank))


class TimedFacts(Protocol):
    """What has times in it: spans and messages, by step."""

    spans: list[list[Span]]
    messages: list[list[Message]]


Facts = TypeVar("Facts", bound=TimedFacts)


class ActivationMeter:
    """Within `with`, the bytes that autograd keeps for backward: `now`, and at their `peak`. A storage counts once,
    however many operations keep it; parameters don't count."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.now = self.peak = 0
        self._holders: Counter[int] = Counter()
        self._parameters = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor)

    def _keep(self, tensor: Tensor) -> Any:
        return _Kept(tensor, None if tensor.untyped_storage()._cdata in self._parameters else self)

    def changed(self, tensor: Tensor, holders: int) -> None:
        """One holder more (1) or less (-1) of this tensor's storage."""
        storage = tensor.untyped_storage()
        before = self._holders[storage._cdata]
        self._holders[storage._cdata] = before + holders
        if not before or not self._holders[storage._cdata]:
            self.now += int(storage.nbytes()) * holders
            self.peak = max(self.peak, self.now)

    def __enter__(self) -> ActivationMeter:
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._hooks.__exit__(kind, error, tb)


class _Kept:
    """A tensor that autograd keeps; counted until autograd drops it."""

    __slots__ = ("meter", "tensor")

    def __init__(self, tensor: Tensor, meter: ActivationMeter | None) -> None:
        self.tensor, self.meter = tensor, meter
        if meter is not None:
            meter.changed(tensor, 1)

    def __del__(self) -> None:
        if self.meter is not None:
            self.meter.changed(self.tensor, -1)


def footprint(held: dict[str, int], optimizer: torch.optim.Optimizer, activations: int) -> Footprint:
    """The bytes that a rank holds: `held` are those of parameters and gradients."""
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return Footprint(
        parameters=held["parameters"],
        gradients=held["gradients"],
        optimizer=sum(state.numel() * state.element_size() for state in states),
        activations=activations,
    )


def on_clock(facts: Facts, offset: float) -> Facts:
    """A rank's facts with `offset` seconds added to the times of its spans and messages."""
    shift = lambda span: replace(span, start=span.start + offset, end=span.end + offset)
    for message in (message for step in facts.messages for message in step):
        message.launched, message.finished = message.launched + offset, message.finished + offset
    facts.spans = [[shift(span) for span in step] for step in facts.spans]
    return facts


def clock_offset(group: Group, rounds: int = 8) -> float:
    """What to add to this rank's `perf_counter()` to read rank 0's clock; every rank of the group calls it.

    Rank 0 answers each rank in turn; of several round trips the shortest counts, at half of which the answer was
    given. On one machine all processes read one clock, and the offset is its measurement error: some microseconds.
    """
    offset = 0.0
    stamp = torch.zeros(1, dtype=torch.float64)
    for peer in range(1, group.size):
        best = float("inf")
        for _ in range(rounds):
            if group.rank == 0:
                group.recv(stamp, peer, tag="trace.clock")
                group.send(torch.tensor([perf_counter()], dtype=torch.float64), peer, tag="trace.clock")
            elif group.rank == peer:
                asked = perf_counter()
                group.send(stamp, 0, tag="trace.clock")
                group.recv(stamp, 0, tag="trace.clock")
                answered = perf_counter()
                if answered - asked < best:
                    best, offset = answered - asked, stamp.item() - (asked + answered) / 2
    return offset
