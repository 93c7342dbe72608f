"""In the grader: the process that forks an answer's ranks, from its start to the end of everything that came of it.

Idea    It takes a second or two until torch is imported there; this file imports none, so that the process can be
        started first, and the grader imports its own torch meanwhile.
Read    `nursery.py`, which runs in that process; `trial.py`, which asks it for ranks.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil  # type: ignore[import-untyped]

from minipar.grade import walls


class Nursery:
    """A process that forks ranks for one answer, in a folder of its own. `hidden`: behind the kernel's walls, where
    these folders are not to be seen."""

    def __init__(self, hidden: Sequence[Path] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="minipar-grade-")
        self._control, other = socket.socketpair()
        clean = {"PATH": "/usr/bin:/bin", "HOME": self._folder.name, "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}
        outside = [] if hidden is None else walls.command(self._folder.name, hidden)
        self._process = subprocess.Popen(
            [*outside, sys.executable, "-I", "-m", "minipar.grade.nursery", str(other.fileno())],
            pass_fds=[other.fileno()],
            env=clean,
            cwd=self._folder.name,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        other.close()
        self._control.settimeout(60)  # one that was stopped would never answer
        self._ready = False

    @property
    def folder(self) -> str:
        return self._folder.name

    def fork(self, *descriptors: int) -> int:
        """A new rank's process, which gets these file descriptors."""
        if not self._ready:  # torch is still being imported
            self._line()
            self._ready = True
        socket.send_fds(self._control, [b"fork"], list(descriptors))
        return int(self._line())

    def status(self, process: int) -> int:
        """How a rank's process has ended: its exit code, or less than 0 for a signal."""
        self._control.sendall(b"wait %d" % process)
        return int(self._line())

    def _line(self) -> bytes:
        said = b""
        while not said.endswith(b"\n"):
            piece = self._control.recv(64)
            if not piece:
                raise EOFError("the process that starts ranks has ended")
            said += piece
        return said

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        end_below(self._process.pid)
        self._control.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def end_below(process: int) -> None:
    """End every process that came of this one, until there are none."""
    with suppress(psutil.NoSuchProcess):
        while children := psutil.Process(process).children(recursive=True):
            children = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
            if not children:
                return
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children, timeout=1)


def lives(process: int) -> bool:
    """Whether there is such a process, and not only its remains."""
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
