"""One case of an exercise: start ranks, carry their messages, gather what they hand back, and clear away.

Idea    The grader's own loop, over the ranks' sockets. It ends in one of few ways, each with its plain words: every
        rank has handed back something; one has raised or ended; all of them wait for each other; calls do not match;
        time is over. Whatever happens, every process that came of it is ended.
Read    `switch.py` and `nursery.py` before.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from torch import Tensor

from minipar.grade import frames
from minipar.grade.nurse import Nursery as Nursery
from minipar.grade.nurse import end_below, lives
from minipar.grade.switch import Call, Mismatch, Switch

SECONDS = 10.0  # of a case
MOST_CALLS, MOST_PRINTED = 5_000, 20_000


@dataclass(frozen=True)
class Case:
    """What an answer is tried on: how many ranks, in which groups, and what each is given. `groups` names lists of
    ranks of the world; "world" alone is handed over as one group, several as an object with a group for each name."""

    inputs: Sequence[Mapping[str, Any]]  # by rank
    groups: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    about: str = ""

    @property
    def size(self) -> int:
        return len(self.inputs)


@dataclass
class Outcome:
    """What came of it: what each rank handed back, or why not; every call; and what was printed."""

    values: list[Any] = field(default_factory=list)
    failure: str = ""
    kind: str = ""  # "raised", "unwritten", "ended", "stuck", "mismatch", "time", "calls"
    calls: list[Call] = field(default_factory=list)
    printed: str = ""


class Trial:
    """The loop over the ranks of one case."""

    def __init__(self, nursery: Nursery, source: str, harness: str, case: Case, seconds: float = SECONDS) -> None:
        self._nursery, self._case, self._ends = nursery, case, monotonic()
        self._seconds = seconds
        self._outcome = Outcome(values=[None] * case.size)
        groups = {"world": [list(range(case.size))], **case.groups}
        self._switch = Switch(groups, self._answer, calls=self._outcome.calls)
        self._lines: dict[int, socket.socket] = {}
        self._processes: dict[int, int] = {}
        self._stacks: dict[int, int] = {}
        self._leaving: dict[int, bytearray] = {}
        self._done: set[int] = set()
        self._select = selectors.DefaultSelector()
        self._task = {"groups": groups, "source": source, "harness": harness}

    def _start(self, rank: int) -> None:
        self._lines[rank], its = socket.socketpair()
        printed, prints = os.pipe()
        self._select.register(self._lines[rank], selectors.EVENT_READ, (rank, frames.Reader()))
        self._select.register(printed, selectors.EVENT_READ, (rank, None))
        self._stacks[rank] = os.memfd_create("stack") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)
        try:
            self._processes[rank] = self._nursery.fork(its.fileno(), prints, self._stacks[rank])
        finally:
            its.close()
            os.close(prints)
        self._leaving[rank] = bytearray()
        folder = tempfile.mkdtemp(prefix=f"rank-{rank}-", dir=self._nursery.folder)
        task = {**self._task, "rank": rank, "folder": folder, "inputs": dict(self._case.inputs[rank])}
        self._lines[rank].settimeout(self._seconds)
        frames.send(self._lines[rank], task)
        self._lines[rank].setblocking(False)

    def run(self) -> Outcome:
        """Start the ranks, and carry their messages until it is over."""
        try:
            for rank in range(self._case.size):
                self._start(rank)
            self._ends = monotonic() + self._seconds
            while len(self._done) < self._case.size and not self._outcome.failure:
                self._step()
        finally:
            self._clear()
        return self._outcome

    def _step(self) -> None:
        left = self._ends - monotonic()
        if left <= 0:
            return self._fail("time", f"not finished after {self._seconds:g} s: {self._where()}")
        for key, events in self._select.select(min(left, 0.5)):
            rank, reader = key.data
            if reader is None:
                self._read_printed(key.fd)
                continue
            if events & selectors.EVENT_WRITE:
                self._pass_on(rank)
            if events & selectors.EVENT_READ:
                self._read(rank, reader)
            if self._outcome.failure:
                return
        alive = [rank for rank in range(self._case.size) if rank not in self._done]
        if stuck := self._switch.stuck(alive):
            finished = [str(rank) for rank in sorted(self._done)]
            more = f"; rank {', '.join(finished)} had finished and answers nobody" if finished else ""
            self._fail("stuck", f"deadlock: {stuck}{more}")

    def _read(self, rank: int, reader: frames.Reader) -> None:
        try:
            piece = self._lines[rank].recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._bury(rank)
            return
        try:
            for said in reader.feed(piece):
                self._hear(rank, said)
        except Mismatch as error:
            self._fail("mismatch", str(error))
        except Exception as error:  # whatever a forged frame, or a collective of odd tensors, may lead to
            self._fail("ended", f"rank {rank} sent something that is no message ({str(error)[:160]})")

    def _hear(self, rank: int, said: Any) -> None:
        if not isinstance(said, dict) or not isinstance(said.get("id"), int):
            raise ValueError("no frame of ours")
        if said["id"] != -1:
            if len(self._outcome.calls) >= MOST_CALLS:
                return self._fail("calls", f"more than {MOST_CALLS:,} messages: that cannot be meant")
            return self._switch.hear(rank, said)
        if "error" in said:
            where = f" at line {said['line']}" if said.get("line") else ""
            unwritten = said.get("kind") == "NotImplementedError"
            return self._fail("unwritten" if unwritten else "raised", f"rank {rank} raised{where}: {said['error']}")
        self._outcome.values[rank] = said["value"]
        self._done.add(rank)

    def _bury(self, rank: int) -> None:
        """Its socket is closed: fine if it has handed back, else it has ended in some other way."""
        self._select.unregister(self._lines[rank])
        if rank in self._done:
            return
        status = self._ended(rank)
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        why = " (it had used up its memory, perhaps)" if status in (-signal.SIGKILL, -signal.SIGSEGV) else ""
        self._fail("ended", f"the process of rank {rank} {how} before it had returned anything{why}")

    def _ended(self, rank: int) -> int:
        """End a rank's process and all that came of it; how it had ended, or -9."""
        process = self._processes.pop(rank)
        end_below(process)
        if lives(process):
            os.kill(process, signal.SIGKILL)
        return self._nursery.status(process)

    def _answer(self, rank: int, request: int, value: Tensor) -> None:
        """Put it on its way: a rank that does not read must not hold up the others."""
        self._leaving[rank] += frames.pack({"id": request, "value": value})
        self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        """Send what goes into the socket now, and the rest when there is room."""
        line, leaving = self._lines[rank], self._leaving[rank]
        try:
            del leaving[: line.send(leaving)]
        except BlockingIOError:
            pass
        except OSError:  # its end has been closed, which is noticed when it is read
            leaving.clear()
        with suppress(KeyError):
            key = self._select.get_key(line)
            self._select.modify(line, selectors.EVENT_READ | (selectors.EVENT_WRITE if leaving else 0), key.data)

    def _read_printed(self, descriptor: int) -> None:
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            self._select.unregister(descriptor)
            os.close(descriptor)
        elif len(self._outcome.printed) < MOST_PRINTED:
            self._outcome.printed += printable(piece.decode(errors="replace"))[:MOST_PRINTED]

    def _where(self) -> str:
        """For each rank that has not finished the line of the answer at which it is."""
        late = [rank for rank in range(self._case.size) if rank not in self._done]
        for rank in late:
            with suppress(ProcessLookupError, KeyError):
                os.kill(self._processes[rank], signal.SIGUSR1)
        ends = monotonic() + 0.5
        while monotonic() < ends and any(os.fstat(self._stacks[rank]).st_size == 0 for rank in late):
            os.sched_yield()
        said = {rank: os.pread(self._stacks[rank], 1 << 16, 0) for rank in late}
        lines = {rank: re.search(rb'File "answer", line (\d+)', text) for rank, text in said.items()}
        return ", ".join(f"rank {rank} is at line {int(found[1]) if found else '?'}" for rank, found in lines.items())

    def _fail(self, kind: str, why: str) -> None:
        if not self._outcome.failure:
            self._outcome.kind, self._outcome.failure = kind, printable(why)

    def _clear(self) -> None:
        for rank in list(self._processes):
            with suppress(EOFError, OSError):
                self._ended(rank)
        for key in list(self._select.get_map().values()):
            if key.data[1] is None:
                os.set_blocking(key.fd, False)
                with suppress(BlockingIOError, OSError):
                    self._read_printed(key.fd)
                    os.close(key.fd)
        self._select.close()
        for one in self._lines.values():
            one.close()
        for descriptor in self._stacks.values():
            os.close(descriptor)


def printable(text: str) -> str:
    """Without what a terminal would take for an order, and what no file can hold."""
    plain = text.encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in plain)


def run(nursery: Nursery, source: str, harness: str, case: Case, seconds: float = SECONDS) -> Outcome:
    """Try an answer on one case. `source` is the answer's text; `harness` is the text of a function `harness(student,
    group, **inputs)`, which calls it and returns what is to be judged."""
    try:
        return Trial(nursery, source, harness, case, seconds).run()
    except (EOFError, OSError) as error:
        why = f"the answer has destroyed the process that ran it ({type(error).__name__})"
        return Outcome([None] * case.size, why, "ended")
