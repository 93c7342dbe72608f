"""What one rank does from its first moment: take its place, join the others, carry out orders until the end.

Idea    A rank is a process that the fork server made. It takes over the launcher's environment, sends what it prints
        into pipes, and watches the launcher: if that dies, so does the rank, even in the middle of a message. Then
        it joins the world and waits for orders. An order is a function and its arguments, in a file, as cloudpickle
        wrote them; the answer is the value that it returned, or how it failed.
Read    `server.py` before (which forks), `watch.py` after (which reads the answers).
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import linecache
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from minipar import carry, comm, faults, memory
from minipar.board import Board
from minipar.server import FAILURE, READY, VALUE

JOINING = "the other ranks to join"


@dataclass(frozen=True)
class Seat:
    """All that a rank must know before it can join. `plan` is a pickled `Mesh`, or None for the world alone."""

    rank: int
    size: int
    directory: Path
    backend: str
    check: bool
    plan: bytes | None
    environ: dict[str, str]
    dtype: torch.dtype


def main(seat: Seat, connection: Connection, printed: Mapping[str, Connection]) -> None:
    """The life of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher gets Ctrl-C, and ends its ranks
    watch_launcher(seat.directory)
    redirect(printed)
    board = Board(seat.directory)
    settle(seat, board)
    waiting = board.writer(seat.rank)
    try:
        waiting(JOINING)
        wire = comm.Wire(waiting=waiting, check=seat.check, number=seat.rank, folder=seat.directory)
        place = join(seat, str(board.store), wire)
        waiting("")
        board.forget(seat.rank)
        connection.send_bytes(READY)
    except BaseException as error:
        connection.send_bytes(FAILURE + pickle.dumps(faults.describe_exception(seat.rank, error)))
        return
    with suppress(EOFError, OSError):  # the launcher has closed the connection, or is gone
        while connection.recv_bytes():
            waiting("")
            answer = carry_out(seat.rank, place, board.order)
            flush()
            connection.send_bytes(answer)
            del answer
            gc.collect()  # models have hooks that lead back to them: their memory would wait for the collector
    if seat.backend == "nccl":  # gloo needs no farewell, and would take 60 ms over it
        comm.disconnect()


def watch_launcher(directory: Path) -> None:
    """End this process when the launcher ends, however it ends, and clear away what it can no longer clear."""
    launcher = multiprocessing.parent_process()

    def watch() -> None:
        if launcher is not None:
            wait([launcher.sentinel])
            shutil.rmtree(directory, ignore_errors=True)
            os._exit(1)

    threading.Thread(target=watch, name="watch launcher", daemon=True).start()


def redirect(printed: Mapping[str, Connection]) -> None:
    """Send this process's output, that of C++ too, into the launcher's pipes, and each line as soon as it is whole."""
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(printed[stream].fileno(), descriptor)
        printed[stream].close()
        raw = io.FileIO(descriptor, "w", closefd=False)
        text = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="replace", line_buffering=True)
        setattr(sys, stream, text)


def flush() -> None:
    """Hand over all output that still sits in a buffer of Python or C."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    with suppress(Exception):
        ctypes.CDLL(None).fflush(None)


def settle(seat: Seat, board: Board) -> None:
    """Take over the launcher's environment: the server's own dates from when it started."""
    os.environ.clear()
    os.environ.update(seat.environ)
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    os.environ.setdefault("MKL_NUM_THREADS", threads)
    torch.set_num_threads(int(threads.split(",")[0]) if threads[:1].isdigit() else 1)
    torch.set_default_dtype(seat.dtype)
    memory.keep_freed()
    if hasattr(faulthandler, "register"):
        stack = os.open(board.stack(seat.rank), os.O_CREAT | os.O_WRONLY, 0o600)
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)


def join(seat: Seat, store: str, wire: comm.Wire) -> Any:
    """Join the world: the first argument of every function that this rank will be given, a group or a mesh."""
    group = comm.connect(seat.rank, seat.size, backend=seat.backend, store=store, wire=wire)
    return group if seat.plan is None else pickle.loads(seat.plan).on(group)


def carry_out(rank: int, place: Any, order: Path) -> bytes | memoryview:
    """Read the order, run it, and pack the value or the failure."""
    try:
        function, args, kwargs, cells = pickle.loads(order.read_bytes())
        linecache.cache.update(cells)
        value = function(place, *args, **kwargs)
    except BaseException as error:
        return FAILURE + pickle.dumps(faults.describe_exception(rank, error))
    try:
        return carry.dumps(value, prefix=VALUE)
    except BaseException as error:
        text = f"returned a {type(value).__name__} that cannot be sent back ({type(error).__name__}: {error})"
        return FAILURE + pickle.dumps(faults.Failure(rank, "raised", f"{text}: return numbers, tensors or containers"))
