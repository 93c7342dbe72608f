"""Where rank processes come from: a server that has imported torch once, and forks.

Idea    Importing torch takes seconds, forking a process that has imported it takes ten milliseconds. Python's
        multiprocessing has such a server, `forkserver`; here it is warmed with everything a rank needs. The server
        is a fresh process without threads, so forking it is safe, whatever the caller's own process has running.
        Where there is no forkserver, processes are spawned, which is slow and otherwise the same.
Cost    About 3 s once, then about 10 ms for each rank.
Read    `rank.py` after: what a process does once it is forked.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

from minipar.output import STREAMS

FORKS = "forkserver" in multiprocessing.get_all_start_methods()
GO = b"go"  # an order: what to do is in a file
READY, VALUE, FAILURE = b"r", b"v", b"f"  # an answer begins with one of these
_starting = threading.Lock()


@dataclass(frozen=True)
class Member:
    """The launcher's ends of one rank: its process, the connection for orders and answers, what it prints."""

    rank: int
    process: Any
    connection: Connection
    printed: dict[str, Connection]


def warm() -> None:
    """Start the fork server, unless it runs: it imports torch meanwhile, and the first ranks need not wait as long."""
    if FORKS:
        with _starting:
            _ensure_server()


def start(target: Callable[..., None], seats: Sequence[Any], members: list[Member]) -> None:
    """Fill `members`, one for each seat: a process that calls `target(seat, connection, {stream: where to print})`.

    The list is the caller's, who can end those that run if anything, even Ctrl-C, comes between.
    """
    with _starting, uninterrupted(), _empty_main():
        if FORKS:
            _ensure_server()
        context: Any = multiprocessing.get_context("forkserver" if FORKS else "spawn")
        for rank, seat in enumerate(seats):
            mine, theirs = context.Pipe()
            pipes = {stream: context.Pipe(duplex=False) for stream in STREAMS}
            writers = {stream: writer for stream, (_, writer) in pipes.items()}
            process = context.Process(target=target, args=(seat, theirs, writers), name=f"rank {rank}")
            process.start()
            members.append(Member(rank, process, mine, {stream: reader for stream, (reader, _) in pipes.items()}))
            for handed_over in (theirs, *writers.values()):
                handed_over.close()


def end(members: Sequence[Member], patience: float) -> None:
    """End the processes: let them leave for `patience` seconds, then kill those that are left."""
    with uninterrupted():
        for member in members:
            with suppress(OSError):
                member.connection.close()  # the rank sees it, and leaves
        deadline = monotonic() + patience
        left = {member.process.sentinel: member.process for member in members}
        while left and (seconds := deadline - monotonic()) > 0:
            for sentinel in wait(list(left), seconds):
                del left[sentinel]
        for process in left.values():
            process.kill()
        for member in members:
            member.process.join(5.0)
            for reader in member.printed.values():
                reader.close()
            # Closing the process also closes the pipe by which its rank watches us, so a rank ends even when the
            # server is dead that should have told us of it.
            with suppress(ValueError):
                member.process.close()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C in this thread. Processes started meanwhile inherit that: Ctrl-C reaches the launcher alone,
    which then ends its ranks."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _empty_main() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's script again in each rank.

    It does so to find functions by their names, which is why scripts that use it need `if __name__ == "__main__"`.
    Here functions travel by value, so no rank needs the script; and without the guard, importing it would start
    ranks from ranks. An empty module in its place, while processes start, has no file to import.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _ensure_server() -> None:
    """Start the fork server if it does not run; the caller holds the lock."""
    from multiprocessing import forkserver

    resource_tracker.ensure_running()  # first, for it unblocks Ctrl-C when it starts
    multiprocessing.get_context("forkserver").set_forkserver_preload(["minipar.preload"])
    with uninterrupted(), _server_environment():
        forkserver.ensure_running()


@contextmanager
def _server_environment() -> Iterator[None]:
    """The environment in which the server starts: it must find minipar, and have no threads of its own when it forks.

    Ranks get the caller's environment instead.
    """
    here = Path(__file__).parents[1]
    changes = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    if here.name not in ("site-packages", "dist-packages"):  # where it is found anyway
        changes["PYTHONPATH"] = os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH"))))
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
