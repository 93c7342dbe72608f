"""The launcher's one loop: it prints what ranks print, collects their answers, and notices when none will come.

Idea    Everything that can happen is something to wait for: bytes in a pipe, an answer on a connection, the end of a
        process. One `wait` covers them all, so no thread is needed, nothing fills up while nobody reads, and Ctrl-C
        works. Between events the board is read: ranks that all wait for a message, and have done so for seconds
        without any of them using the processor, will wait for ever.
Read    `board.py`, `output.py` and `faults.py` before; `launch.py` after.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from time import monotonic, sleep
from typing import Any

import psutil  # type: ignore[import-untyped]

from minipar import faults
from minipar.board import Board
from minipar.faults import Failure, RankError
from minipar.output import HOLD, Output, name_ranks
from minipar.server import FAILURE, GO, READY, VALUE, Member

PAUSE = 0.1  # seconds between looks at the board
START = 120.0  # seconds in which a rank must have joined
QUIET = 10.0  # seconds without any change after which ranks that all wait are stuck
GRACE = 2.0  # seconds after the first failure in which the others may report theirs
SETTLED = 0.5  # seconds without any change after which, once one has failed, the others will not report
BUSY = 0.05  # share of one core above which waiting ranks are moving data, and not stuck


class Watch:
    """One call on `ranks`, from the order to the last answer.

    `ready` is the set of ranks that have joined the world; it outlives the call. `timeout` is in seconds, from when
    all of `ranks` are ready.
    """

    def __init__(
        self,
        members: Sequence[Member],
        ranks: Collection[int],
        *,
        board: Board,
        output: Output,
        ready: set[int],
        timeout: float | None,
    ) -> None:
        self._members = {member.rank: member for member in members}
        self._pending = set(ranks)
        self._failures: list[Failure] = []
        self._answers: dict[int, memoryview] = {}
        self._board, self._output, self._ready, self._timeout = board, output, ready, timeout
        self._started = self._failed = monotonic()
        self._seen: object = None  # the board, when it last changed
        self._changed = monotonic()
        self._worked: float | None = None  # processor seconds of the ranks, half a window after that
        self._events: dict[Any, Callable[[], None]] = {}
        for member in members:
            self._events[member.connection] = partial(self._hear, member.rank)
            self._events[member.process.sentinel] = partial(self._bury, member.rank)
            for stream in member.printed:
                self._events[member.printed[stream]] = partial(self._read, member.rank, stream)

    def give(self, order: memoryview) -> None:
        """Let the ranks begin. The order goes through a file: a pipe could fill up while a rank cannot read."""
        self._board.order.write_bytes(order)
        for rank in self._pending:
            with suppress(OSError):  # a rank that is dead already is noticed in `collect`
                self._members[rank].connection.send_bytes(GO)

    def collect(self, tick: Callable[[], None] = lambda: None) -> list[Any]:
        """The values that the ranks returned, in their order; raises `RankError` if one failed or none will come.
        `tick` is called some times a second meanwhile."""
        while self._pending and not self._given_up():
            tick()
            self._step(HOLD / 4 if self._output.holding() else PAUSE)
        self._drain()
        values = [] if self._failures else [self._value(rank) for rank in sorted(self._answers)]
        if self._failures:
            posts = {rank: self._board.read(rank) for rank in self._members}
            raise faults.report_failures(self._failures, posts)
        return values

    @property
    def in_step(self) -> bool:
        """Whether every rank has reported back, and none has lost the others."""
        return not self._pending and all(failure.kind == "raised" for failure in self._failures)

    # Events.

    def _step(self, seconds: float) -> bool:
        """Wait for events and handle them; whether there were any."""
        happened = wait(list(self._events), seconds)
        for handle in happened:
            if handle in self._events:  # an event before it may have removed it
                self._events[handle]()
        self._output.release(monotonic())
        return bool(happened)

    def _read(self, rank: int, stream: str) -> None:
        """Take a piece of what the rank has printed."""
        pipe = self._members[rank].printed[stream]
        data = os.read(pipe.fileno(), 1 << 16)
        if data:
            self._output.feed(stream, rank, data, monotonic())
        else:
            del self._events[pipe]

    def _hear(self, rank: int) -> None:
        """Take what the rank says: that it is ready, its value, or its failure."""
        connection = self._members[rank].connection
        try:
            said = memoryview(connection.recv_bytes())
        except (EOFError, OSError):
            del self._events[connection]  # how its process ends will say why
            return
        kind, content = said[:1], said[1:]
        if kind == READY:
            self._ready.add(rank)
            self._started = monotonic()
        elif kind == VALUE:
            self._answers[rank] = content
            self._pending.discard(rank)
        elif kind == FAILURE:
            self._fail(pickle.loads(content))

    def _bury(self, rank: int) -> None:
        """The rank's process has ended: that is a failure, unless all have answered."""
        member = self._members[rank]
        while member.connection in self._events and member.connection.poll():
            self._hear(rank)
        self._events.pop(member.connection, None)
        del self._events[member.process.sentinel]
        if self._pending and all(failure.rank != rank for failure in self._failures):
            member.process.join()
            code = None if psutil.pid_exists(member.process.pid) else member.process.exitcode
            self._fail(faults.describe_death(rank, code, self._board.read(rank)))

    def _fail(self, failure: Failure) -> None:
        if not self._failures:
            self._failed = monotonic()
        self._failures.append(failure)
        self._pending.discard(failure.rank)

    def _drain(self) -> None:
        """Print what was printed before the answers; not for ever, if something prints on."""
        end = monotonic() + 1.0
        for member in self._members.values():
            self._events.pop(member.connection, None)
            self._events.pop(member.process.sentinel, None)
        while self._events and monotonic() < end and self._step(0.0):
            pass
        self._output.finish()

    def _value(self, rank: int) -> Any:
        try:
            return pickle.loads(self._answers[rank])
        except Exception as error:
            text = f"returned something that cannot be read here ({type(error).__name__}: {error})"
            self._fail(Failure(rank, "raised", text))

    # Standstill.

    def _given_up(self) -> bool:
        """Whether to wait no longer because a rank has failed; raises `RankError` if the ranks are stuck."""
        now = monotonic()
        quiet = self._quiet(now)
        if self._failures:
            return quiet >= SETTLED or now - self._failed >= GRACE
        passed, ready = now - self._started, self._ready >= self._pending
        late = ready and self._timeout is not None and passed >= self._timeout
        if quiet >= self._window() - PAUSE or (late and quiet >= self._window() / 2):
            whom = "all ranks are" if len(self._pending) == len(self._members) else self._name_pending()
            raise self._stuck(f"{whom} stuck")
        if late:
            raise self._stuck(f"no end after {self._timeout:g} s (timeout={self._timeout:g})")
        if not ready and passed >= START:
            raise self._stuck(f"no start after {START:g} s")
        return False

    def _name_pending(self) -> str:
        return f"{name_ranks(self._pending)} {'is' if len(self._pending) == 1 else 'are'}"

    def _quiet(self, now: float) -> float:
        """For how many seconds all pending ranks have waited for a message, and nothing has changed."""
        posts = [self._board.read(rank) for rank in sorted(self._pending)]
        if posts != self._seen or not all(post.waiting for post in posts):
            self._seen, self._changed, self._worked = posts, now, None
        quiet, window = now - self._changed, self._window()
        if quiet >= window / 2 and self._worked is None:
            self._worked = self._processor_seconds()
        if quiet < window - PAUSE or self._processor_seconds() - (self._worked or 0) < BUSY * window / 2:
            return quiet
        self._changed, self._worked = now, None  # a long message is under way
        return 0.0

    def _window(self) -> float:
        """How many quiet seconds mean a standstill: fewer for the impatient, once the ranks have joined."""
        return min(self._timeout or QUIET, QUIET) if self._ready >= self._pending else QUIET

    def _processor_seconds(self) -> float:
        total = 0.0
        for rank in self._pending:
            with suppress(psutil.Error):
                times = psutil.Process(self._members[rank].process.pid).cpu_times()
                total += times.user + times.system
        return total

    def _stopped(self, rank: int) -> bool:
        with suppress(psutil.Error):
            return bool(psutil.Process(self._members[rank].process.pid).status() == psutil.STATUS_STOPPED)
        return False

    def _stuck(self, headline: str) -> RankError:
        """The error for the pending ranks: ask each where it stands, and read the board."""
        asleep = {rank for rank in self._pending if self._stopped(rank)}
        headline = f"{name_ranks(asleep)} {'does' if len(asleep) == 1 else 'do'} not go on" if asleep else headline
        for rank in self._pending:
            process = self._members[rank].process
            if process.is_alive() and hasattr(signal, "SIGUSR1"):
                os.kill(process.pid, signal.SIGUSR1)
        sleep(0.3)
        self._drain()
        for rank in sorted(self._pending):
            path = self._board.stack(rank)
            stack = path.read_text() if path.exists() else ""
            stopped = rank in asleep
            self._failures.append(faults.describe_stuck(rank, self._board.read(rank), stack, stopped=stopped))
        others = self._members.keys() - self._pending
        told = {rank: "has finished" if rank in self._answers else "takes no part" for rank in others}
        return faults.report_stuck(headline, self._failures, told)
