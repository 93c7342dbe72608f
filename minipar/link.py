"""A slow link between machines, on one laptop: real messages, held back as long as the link would need for them.

Idea    Ranks are dealt to nodes. A message to a rank of the same node goes at once; one to another node first waits
        for the node's outgoing line, which all ranks of the node share and which passes on one message after another:
        bytes / bandwidth each. It arrives `latency` later. Only then is it really sent. So everything that waits for
        it waits as it would on such a network, and what overlaps with computing still does.

            node 0   rank 0 --\\                         /--> rank 2   node 1
                               >== line: 1 Gbit/s ======<
                     rank 1 --/     one after another    \\--> rank 3

Cost    A thread in each rank, asleep but for the moments of sending.
Source  The alpha-beta model of a message, latency + bytes / bandwidth: Hockney 1994, 'The communication challenge for
        MPP'. Checked against two network namespaces joined by a throttled veth pair in `tests/test_link.py`.
Read    `comm.py` after, which sends through it; `replay.py` for the prediction.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from minipar.comm import Group
    from minipar.message import Background

FORM = "such as 1gbit, 200mbit or 10gbit:50us (with a latency)"
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
BEAT = 1.0  # seconds: so often a line says that it still holds a message
LATENCY = 50e-6  # seconds: what a message takes between two machines of a rack, if nothing else is said


@dataclass(frozen=True)
class Link:
    """`bandwidth` in bytes a second, in each direction; `latency` in seconds."""

    bandwidth: float
    latency: float = LATENCY

    def __str__(self) -> str:
        bits = 8 * self.bandwidth
        unit = next(unit for unit in reversed(BITS) if bits >= BITS[unit] or unit == "kbit")
        return f"{bits / BITS[unit]:g}{unit}" + ("" if self.latency == LATENCY else f":{1e6 * self.latency:g}us")


UNHINDERED = Link(inf, 0.0)  # what is sent across nodes goes the same way, and is not held back


def parse(text: str) -> Link:
    """'1gbit', '200mbit:100us'. Raises `ValueError`, one line, for anything else."""
    number = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(rf"{number}\s*([kmg]bit)(?:/s)?(?::{number}\s*(us|ms|s))?", text.strip().lower())
    if not found or not float(found[1]):
        raise ValueError(f"link {text!r} is no speed: give one {FORM}")
    latency = float(found[3]) * SECONDS[found[4]] if found[3] else LATENCY
    return Link(float(found[1]) * BITS[found[2]] / 8, latency)


@dataclass(frozen=True)
class Network:
    """`ranks` dealt to `nodes` in equal runs, neighbours together, and the link between any two nodes."""

    nodes: int
    ranks: int
    link: Link

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks % self.nodes:
            choices = ", ".join(str(n) for n in range(2, self.ranks + 1) if self.ranks % n == 0)
            raise ValueError(f"{self.ranks} ranks cannot be dealt to {self.nodes} nodes: choose nodes from {choices}")

    def node(self, rank: int) -> int:
        """The node of a rank of the world."""
        return rank // (self.ranks // self.nodes)


def asked_network(nodes: int | None, text: str | None, ranks: int) -> Network | None:
    """The network that a command's --nodes and --link ask for, if any. Raises `ValueError` for half a network."""
    if nodes is None and text is None:
        return None
    if nodes is None or text is None:
        raise ValueError("--nodes and --link go together, such as --nodes 2 --link 1gbit: give both, or neither")
    return Network(nodes, ranks, parse(text))


class Held:
    """A message that waits for its turn: `wait()` returns when it has been sent."""

    def __init__(self, at: float, post: Callable[[], Any]) -> None:
        self.at, self._post, self._sent = at, post, threading.Event()
        self._work: Any = None
        self._error: BaseException | None = None

    def send(self) -> None:
        """Send it now."""
        try:
            self._work = self._post()
        except BaseException as error:
            self._error = error
        self._sent.set()

    def wait(self) -> None:
        """Block until it is sent; raise what went wrong."""
        self._sent.wait()
        if self._error is not None:
            raise self._error
        self._work.wait()


class Line:
    """The outgoing line of a node, as one of its ranks uses it. In a file in `folder` the ranks of a node note until
    when its line is taken."""

    def __init__(self, network: Network, rank: int, folder: Path, alive: Callable[[], None] = lambda: None) -> None:
        self.network, self.node, self._alive = network, network.node(rank), alive
        self._board = os.fdopen(os.open(folder / f"line-{network.nodes}", os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        self._board.truncate(8 * network.nodes)
        self._taken = mmap.mmap(self._board.fileno(), 8 * network.nodes)
        self._queue: SimpleQueue[Held | None] = SimpleQueue()
        threading.Thread(target=self._send, name="line", daemon=True).start()

    def crosses(self, rank: int) -> bool:
        """Whether a rank of the world is on another node."""
        return self.network.node(rank) != self.node

    def send(self, size: int, post: Callable[[], Any]) -> Any:
        """Have `post` send a message of so many bytes when the link would have brought it to the other side."""
        if self.network.link == UNHINDERED:
            return post()
        held = Held(self._reserve(size) + self.network.link.latency, post)
        self._queue.put(held)
        return held

    def close(self) -> None:
        """No more messages will come."""
        self._queue.put(None)

    def _reserve(self, size: int) -> float:
        """When the line has passed on this message, after all that were given to it before, by whichever rank."""
        place = 8 * self.node
        fcntl.flock(self._board, fcntl.LOCK_EX)
        try:
            (taken,) = struct.unpack_from("d", self._taken, place)
            end: float = max(perf_counter(), taken) + size / self.network.link.bandwidth
            struct.pack_into("d", self._taken, place, end)
        finally:
            fcntl.flock(self._board, fcntl.LOCK_UN)
        return end

    def _send(self) -> None:
        while (held := self._queue.get()) is not None:
            while (early := held.at - perf_counter()) > 0:
                sleep(min(early, BEAT))
                self._alive()
            held.send()


def put_in(group: Group, network: Network) -> Line:
    """From now on, this rank's messages to other nodes go through the network's link. All ranks of the world call it,
    with nothing on its way; `group` is the world, or any group of it.

    Raises `ValueError` for ranks that are not all of one machine: those have a network.
    """
    wire = group.wire
    if wire.folder is None:
        raise ValueError("only messages between ranks of one machine are slowed down: torchrun's have a network")
    if wire.line is not None:
        wire.line.close()
    wire.line = Line(network, wire.number, wire.folder, alive=lambda: wire.waiting(None))
    return wire.line


def all_reduce(group: Group, whole: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Background:
    """An all_reduce of messages that a slow link can hold back: each rank adds up one share, and sends the sum."""
    import torch  # not at the top: the command line reads speeds without it

    from minipar.message import Background, combined

    shares = whole.detach().view(-1).tensor_split(group.size)
    mine = shares[group.rank]
    arrived = [mine if rank == group.rank else torch.empty_like(mine) for rank in range(group.size)]
    first, second = group.next_tag(), group.next_tag()
    works = group.exchange(shares, arrived, first)

    def add_and_send() -> None:
        for work in works:
            work.wait()
        mine.copy_(combined(combine, arrived))
        for work in group.exchange([mine] * group.size, shares, second):
            work.wait()

    return Background(add_and_send)


@contextmanager
def through(group: Group, network: Network) -> Iterator[None]:
    """Within `with`, as `put_in`."""
    line = put_in(group, network)
    try:
        yield
    finally:
        group.wire.line = None
        line.close()
