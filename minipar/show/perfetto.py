"""A run as a trace that chrome://tracing and ui.perfetto.dev open: every action and message of every rank.

Idea    A rank is a process, its computation a thread, and each group another thread with the messages in it. Messages
        that are under way at once lie on several threads, since slices of one thread must not overlap. Arrows lead
        from a send to the receive that took it.
Source  The Trace Event Format (the JSON of chrome://tracing): 'complete' events X with `ts` and `dur` in microseconds,
        metadata M for names, and flows s and f (with bp "e": bound to the slice around them). Perfetto's FAQ: slices of
        a thread that overlap without being nested are dropped.
Read    `minipar/comm.py` for what a message records.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

from minipar.facts import Span
from minipar.show.palette import WORDS

MICROSECONDS = 1e6
BEFORE_END = 0.001  # microseconds by which the head of an arrow lies before the end of its slice

Event = dict[str, Any]
Groups = Mapping[str, Sequence[Sequence[int]]]


class MessageLike(Protocol):
    """What is read of a `minipar.comm.Message`."""

    @property
    def op(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def tag(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def launched(self) -> float: ...
    @property
    def finished(self) -> float: ...
    @property
    def waited(self) -> float: ...
    @property
    def peer(self) -> int | None: ...


def trace_json(
    spans_by_rank: Sequence[Sequence[Span]],
    messages_by_rank: Sequence[Sequence[MessageLike]],
    t0: float = 0.0,
    *,
    groups: Groups | None = None,
) -> str:
    """The trace of all ranks, in the order of the world, as JSON. `t0` is the second that becomes 0.

    A message knows its peer as a rank of its group. With `groups`, such as `{"pp": mesh.groups("pp")}`, that is a rank
    of the world, and arrows are drawn: what one rank sends to another is received in the order sent.
    """
    threads = count(1)  # numbers of threads, no two alike: viewers take 0 for the idle thread of the machine
    events: list[Event] = []
    slices: list[list[Event]] = []  # by rank: its messages
    for rank, messages in enumerate(messages_by_rank):
        thread = next(threads)
        events += [
            _named("process_name", rank, thread, {"name": f"rank {rank}"}),
            _named("process_sort_index", rank, thread, {"sort_index": rank}),
            _named("thread_name", rank, thread, {"name": "compute"}),
        ]
        events += [_action(span, rank, thread, t0) for span in (spans_by_rank[rank] if spans_by_rank else ())]
        names, found = _messages(rank, messages, threads, t0)
        slices.append(found)
        events += [*names, *found]
    events += _arrows(slices, groups or {})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False) + "\n"


def _named(what: str, rank: int, thread: int, details: dict[str, Any]) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": details}


def _slice(name: str, category: str, place: tuple[int, int], start: float, end: float, details: Event) -> Event:
    """From `start` to `end`, on a process and thread. Slices that touch still touch after rounding."""
    begin, close = round(start * MICROSECONDS, 3), round(max(start, end) * MICROSECONDS, 3)
    at = {"ts": begin, "dur": round(close - begin, 3), "pid": place[0], "tid": place[1]}
    return {"ph": "X", "name": name, "cat": category, **at, "args": details}


def _action(span: Span, rank: int, thread: int, t0: float) -> Event:
    word = WORDS[span.kind]
    details = {"kind": word, "stage": span.stage, "micro_batch": span.micro_batch}
    return _slice(str(span.action), word, (rank, thread), span.start - t0, span.end - t0, details)


def _messages(
    rank: int, messages: Sequence[MessageLike], threads: Iterator[int], t0: float
) -> tuple[list[Event], list[Event]]:
    """A rank's messages on a thread for each group, or on several where messages overlap; and the threads' names."""
    names, found = list[Event](), list[Event]()
    lanes = defaultdict[str, list[tuple[float, int]]](list)  # by group: when each of its threads is free
    for message in sorted(messages, key=lambda message: message.launched):
        own = lanes[message.group]
        place = next((i for i, (until, _) in enumerate(own) if until <= message.launched), len(own))
        if place == len(own):
            own.append((0.0, next(threads)))
            name = f"{message.group} messages" + (f" ({place + 1})" if place else "")
            names.append(_named("thread_name", rank, own[place][1], {"name": name}))
        thread, end = own[place][1], max(message.finished, message.launched)
        own[place] = (end, thread)
        details = {
            "operation": message.op,
            "group": message.group,
            "tag": message.tag,
            "bytes": message.bytes,
            "peer": message.peer,
            "waited_seconds": round(message.waited, 9),
        }
        where = (rank, thread)
        found.append(_slice(message.tag or message.op, message.group, where, message.launched - t0, end - t0, details))
    return names, found


def _arrows(slices: Sequence[Sequence[Event]], groups: Groups) -> list[Event]:
    """Flows from the sends to the receives of the same group, pair of ranks and turn."""
    sent, received = (defaultdict[tuple[str, int, int], list[Event]](list) for _ in range(2))
    for rank, events in enumerate(slices):
        for event in events:
            operation, group, peer = (event["args"][key] for key in ("operation", "group", "peer"))
            own = next((ranks for ranks in groups.get(group, ()) if rank in ranks), ())
            if peer is not None and peer < len(own):
                if operation == "send":
                    sent[group, rank, own[peer]].append(event)
                elif operation == "recv":
                    received[group, own[peer], rank].append(event)
    arrows: list[Event] = []
    for key, sends in sent.items():
        for send, receive in zip(sends, received[key], strict=False):
            arrows += _arrow(send, receive, len(arrows))
    return arrows


def _arrow(send: Event, receive: Event, number: int) -> list[Event]:
    """From where a message was sent to where it had arrived; none where the tags say they are two."""
    if send["args"]["tag"] != receive["args"]["tag"]:
        return []
    common = {"name": "message", "cat": "message", "id": number, "bp": "e"}
    arrived = round(receive["ts"] + max(receive["dur"] - BEFORE_END, 0.0), 3)
    return [
        {"ph": "s", **common, "ts": send["ts"], "pid": send["pid"], "tid": send["tid"]},
        {"ph": "f", **common, "ts": arrived, "pid": receive["pid"], "tid": receive["tid"]},
    ]
