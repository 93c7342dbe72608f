"""Real ranks, from wherever Python runs: a script, a notebook cell, a test, or torchrun.

    >>> import minipar, torch
    >>> def share(group):
    ...     return group.all_reduce(torch.tensor(float(group.rank)))
    >>> minipar.run(share, 4)
    [tensor(6.), tensor(6.), tensor(6.), tensor(6.)]

Idea    Each rank is a process of its own, forked from a server that has torch imported. The function travels to it by
        value, so it may come from a notebook cell or a script without `if __name__ == "__main__"`. `run` uses fresh
        ranks, a `World` keeps them. Whatever goes wrong on the ranks comes back as one readable `RankError`, and no
        process is left behind. Under torchrun the ranks exist already: then the same calls use them.
Cost    About 0.1 s for 8 ranks once the server is warm; 20 MB of memory for each rank, and what its model takes.
Read    `server.py`, `rank.py` and `watch.py` (how), `comm.py` after (what a rank does with its group).
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import psutil  # type: ignore[import-untyped]

from minipar import carry, memory, server
from minipar.board import Board
from minipar.faults import RankError
from minipar.notice import Notice, in_notebook
from minipar.output import Output
from minipar.server import Member, warm

if TYPE_CHECKING:
    from minipar.mesh import Mesh

__all__ = ["RankError", "World", "run", "warm"]

Result = TypeVar("Result")
RANK_BYTES = 60e6 if server.FORKS else 350e6  # private memory of a rank with a small model


def run(
    fn: Callable[..., Result],
    ranks: int | Mesh,
    *args: Any,
    timeout: float | None = 60.0,
    backend: str = "",
    check: bool = False,
    **kwargs: Any,
) -> list[Result]:
    """Call `fn(group, *args, **kwargs)` on each of `ranks` fresh ranks; what they return, in their order.

    `ranks` is a number, and `fn` gets the `Group` of all ranks; or a `Mesh`, and `fn` gets that mesh, joined.
    `timeout` is in seconds, None for no limit; ranks that wait for each other are noticed in at most 10 s anyway.
    `backend` is "gloo", "nccl", or "" for what the machine has. With `check` on, ranks that make different calls are
    told so. Raises `RankError` when a rank raises, dies or is stuck.
    """
    with World(ranks, timeout=timeout, backend=backend, check=check) as world:
        return world.run(fn, *args, **kwargs)


class World:
    """Ranks that are kept from one call to the next, with whatever they store in `group.state`.

    >>> with World(4) as world:
    ...     world.run(build)
    ...     world.run(train, steps=10)

    `timeout` (seconds, None for no limit) applies to each call. `fold` shows lines that ranks print alike once; it is
    on in notebooks. `on_output(stream, text)` gets what is printed, instead of `sys.stdout` and `sys.stderr`. A
    failure ends the ranks and closes the world.
    """

    def __init__(
        self,
        ranks: int | Mesh,
        *,
        backend: str = "",
        check: bool = False,
        timeout: float | None = 60.0,
        fold: bool | None = None,
        on_output: Callable[[str, str], None] | None = None,
    ) -> None:
        self.size = count(ranks)
        check_timeout(timeout)
        self.timeout = timeout
        self._fold = in_notebook() if fold is None else fold
        self._print = on_output or print_here
        self._here = adopt(ranks, backend, check) if under_torchrun() else None
        self.closed = False
        if self._here is None:
            self._start(ranks, backend, check)

    def _start(self, ranks: int | Mesh, backend: str, check: bool) -> None:
        check_memory(self.size)
        server.warm()  # first, so that the server imports torch while we do
        import torch

        from minipar import comm, rank

        backend = comm.choose_backend(self.size, backend)
        seat = rank.Seat(
            rank=0,
            size=self.size,
            directory=Path(tempfile.mkdtemp(prefix="minipar-world-")),
            backend=backend,
            check=check,
            plan=None if isinstance(ranks, int) else carry.dumps(ranks).tobytes(),
            environ=dict(os.environ),
            dtype=torch.get_default_dtype(),
        )
        self._directory, self._owner = seat.directory, os.getpid()
        self._ready: set[int] = set()
        self._members: list[Member] = []
        self._forgotten = weakref.finalize(self, clear_up, self._members, seat.directory, self._owner, 0.0)
        try:
            self._board = Board.create(seat.directory, self.size)
            seats = [replace(seat, rank=number) for number in range(self.size)]
            server.start(rank.main, seats, self._members)
        except BaseException:
            self._end(patience=0.0)
            raise

    def run(self, fn: Callable[..., Result], *args: Any, **kwargs: Any) -> list[Result]:
        """Call `fn(group_or_mesh, *args, **kwargs)` on every rank; what they return, in their order."""
        return self.call(fn, args, kwargs, timeout=self.timeout)

    def call(
        self,
        fn: Callable[..., Result],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None,
        only: Collection[int] | None = None,
        keep: bool = False,
    ) -> list[Result]:
        """As `run`, on the ranks in `only` (default: all), with a timeout of its own.

        With `keep`, the world outlives exceptions if every rank has reported back, and so is still in step.
        """
        check_timeout(timeout)
        if self.closed:
            raise RuntimeError("this world is closed, its ranks have ended: make a new minipar.World")
        if self._here is not None:
            group = getattr(self._here, "world", self._here)
            return list(group.gather_objects(fn(self._here, *args, **kwargs or {})))
        from minipar.watch import Watch

        order = pack(fn, args, kwargs or {})
        ranks = range(self.size) if only is None else sorted(only)
        output = Output(ranks, self._print, fold=self._fold)
        watch = Watch(self._members, ranks, board=self._board, output=output, ready=self._ready, timeout=timeout)
        speaks = self._print is print_here and in_notebook()
        notice = Notice(f"{len(ranks)} rank{'s' * (len(ranks) > 1)} at work", active=speaks)
        try:
            watch.give(order)
            return watch.collect(notice.tick)
        except BaseException:
            if not (keep and watch.in_step):
                self._end(patience=0.0)
            raise
        finally:
            notice.close()
            output.finish()

    def close(self) -> None:
        """End the ranks. Closing twice is fine."""
        self._end(patience=1.0)

    def _end(self, patience: float) -> None:
        self.closed = True
        if self._here is None and self._forgotten.detach():
            clear_up(self._members, self._directory, self._owner, patience)
            if hasattr(self, "_board"):  # else there was no time to make it
                self._board.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end(patience=1.0 if kind is None else 0.0)


def clear_up(members: Sequence[Member], directory: Path, owner: int, patience: float) -> None:
    """End the ranks and remove their directory; in the process that started them only, not in a fork of it."""
    if os.getpid() == owner:
        server.end(members, patience)
        shutil.rmtree(directory, ignore_errors=True)


# What is checked, and what is sent.


def count(ranks: int | Mesh) -> int:
    """How many ranks a number or a mesh asks for."""
    size = ranks if isinstance(ranks, int) else getattr(ranks, "size", None)
    if not isinstance(size, int) or isinstance(ranks, bool) or size < 1:
        raise ValueError(f"ranks={ranks!r} is not a number of ranks: choose a whole number from 1, or a minipar.Mesh")
    return size


def check_timeout(timeout: float | None) -> None:
    """Raise `ValueError` for a timeout that is no length of time."""
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout={timeout}: give seconds, more than 0, or None for no limit")


def check_memory(ranks: int) -> None:
    """Raise `ValueError` if this machine cannot hold so many ranks."""
    free = psutil.virtual_memory().available
    if ranks * RANK_BYTES > free:
        raise ValueError(
            f"{ranks} ranks need about {ranks * RANK_BYTES / 1e9:.1f} GB and {free / 1e9:.1f} GB of memory are free: "
            f"choose at most {max(1, int(free // RANK_BYTES))} ranks, or close other programs"
        )


def pack(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> memoryview:
    """The order for the ranks: the call by value, and the source of notebook cells, for their tracebacks."""
    try:
        return carry.dumps((fn, args, kwargs, carry.cell_sources()))
    except Exception as error:
        name = getattr(fn, "__name__", repr(fn))
        raise TypeError(
            f"{name} or its arguments cannot be sent to the ranks ({type(error).__name__}: {error}): "
            "make what cannot be copied on the ranks, inside the function"
        ) from error


def print_here(stream: str, text: str) -> None:
    """Print what ranks print: in a notebook, that is in the cell."""
    file = getattr(sys, stream)
    try:
        file.write(text)
    except UnicodeEncodeError:  # a terminal that knows fewer characters than the ranks
        file.write(text.encode(file.encoding, "replace").decode(file.encoding))
    file.flush()


# Ranks that exist already.


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun, or something like it, has started."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


def adopt(ranks: int | Mesh, backend: str, check: bool) -> Any:
    """This process as one of torchrun's ranks: the group of all, or the mesh, with fresh state."""
    from minipar import comm

    asked, size = count(ranks), int(os.environ["WORLD_SIZE"])
    if asked != size:
        raise ValueError(f"{asked} ranks are asked for, and torchrun has started {size}: make the two equal")
    group = comm.current_world()
    if group is None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        backend = comm.choose_backend(local, backend)
        group = comm.connect(int(os.environ["RANK"]), size, backend=backend, local_rank=int(os.environ["LOCAL_RANK"]))
        atexit.register(comm.disconnect)
        end_with_torchrun()
        memory.keep_freed()
    group.wire.messages.clear()
    group.wire.state = SimpleNamespace()
    group.wire.check = check
    return group if isinstance(ranks, int) else ranks.on(group)


def end_with_torchrun() -> None:
    """From now on, end this process within a second of its parent's end: torchrun, when killed, leaves its ranks."""
    name = "watch torchrun"
    if all(thread.name != name for thread in threading.enumerate()):
        threading.Thread(target=end_with, args=(os.getppid(),), name=name, daemon=True).start()


def end_with(parent: int) -> None:
    """Wait until the parent is another one, and end."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
