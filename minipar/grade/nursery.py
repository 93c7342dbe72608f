"""Where an answer's processes come from, and what they may not do.

Idea    A process with torch in it, started in a clean environment, forks a rank whenever it is asked: in milliseconds.
        What a rank inherits is closed or limited before the answer is read: no file but in its folder, no network, no
        other program, so much memory, so many files. A hook of the interpreter that cannot be taken out again refuses
        what is not allowed. That stops answers written in Python, by mistake or for fun; code that attacks the
        interpreter itself needs the hardened mode, whose walls are the kernel's.
Read    `ranks.py` before; `trial.py`, which asks for ranks.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch

from minipar.grade import frames, ranks

MEMORY = 3 << 30  # bytes of address space above what a rank begins with
FILE_BYTES, FILES = 16 << 20, 64
OWN = os.path.realpath(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FORBIDDEN = {
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"),
    *("socket.__new__", "socket.connect", "socket.bind", "socket.getaddrinfo", "os.kill", "os.killpg"),
    *("ctypes.dlopen", "ctypes.dlsym", "gc.get_objects", "gc.get_referrers", "gc.get_referents"),
    *("os.putenv", "os.unsetenv", "signal.pthread_kill", "sys.addaudithook"),
}
PLACES = {"open": (0,), "os.remove": (0,), "os.rename": (0, 1), "os.mkdir": (0,), "os.rmdir": (0,), "os.chown": (0,),
          "os.truncate": (0,), "os.chmod": (0,), "os.utime": (0,), "os.link": (0, 1), "os.symlink": (0, 1),
          "os.listdir": (0,), "os.scandir": (0,)}  # fmt: skip
READABLE = [os.path.realpath(path) + os.sep for path in {sys.prefix, sys.base_prefix, os.path.dirname(torch.__file__)}]
READABLE += ["/usr/lib/", "/lib/", "/usr/share/zoneinfo/", "/dev/null", "/dev/urandom"]
READS = {"os.listdir", "os.scandir"}
MODULES = {
    *("minipar", "subprocess", "_posixsubprocess", "_posixshmem", "sqlite3", "_sqlite3", "cffi", "socket"),
    *("multiprocessing", "ctypes", "psutil", "http", "urllib", "asyncio"),
}


def serve(control: socket.socket) -> None:
    """Fork a rank for each pair of file descriptors that comes, and say its number; "wait N" says how N ended."""
    torch.set_num_threads(1)
    warm()
    control.sendall(b"0\n")
    while True:
        said, descriptors, _, _ = socket.recv_fds(control, 64, 8)
        if not said:
            os._exit(0)
        if said == b"fork":
            child = os.fork()
            if child == 0:
                with suppress(BaseException):
                    live(descriptors, control)
                os._exit(0)
            for descriptor in descriptors:
                os.close(descriptor)
            control.sendall(b"%d\n" % child)
        else:
            _, status = os.waitpid(int(said.split()[1]), 0)
            control.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def warm() -> None:
    """What torch imports only when it is first used, before the door is closed to imports."""
    import torch.utils.checkpoint

    x = torch.ones(2, 2, requires_grad=True)
    (x * 2).backward(torch.ones(2, 2))
    torch.autograd.grad(x * 2, x, torch.ones(2, 2))
    torch.nn.functional.scaled_dot_product_attention(x, x, x).sum().backward()
    torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    torch.optim.AdamW([x], lr=0.1).step()


def live(descriptors: Sequence[int], control: socket.socket) -> None:
    """The life of a rank: take its task, run the answer, hand back what it returned. Of the descriptors that it has
    inherited it keeps three: its line to the switch, where it prints, and where its stack is written if it is late."""
    os.setpgid(0, 0)
    control.detach()
    line, printed, stack = (os.dup2(descriptor, 1000 + n) for n, descriptor in enumerate(descriptors))
    os.closerange(3, 1000)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    connection = socket.socket(fileno=line)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    task = frames.receive(connection)
    os.chdir(task["folder"])
    limit()
    found = outcome(task, ranks.Line(connection))
    with suppress(BaseException):  # what the answer may have put in their place
        sys.stdout.flush()
        sys.stderr.flush()
    frames.send(connection, {"id": -1, **found})


def limit() -> None:
    """From now on: so much memory, so many files, and no longer ones."""
    with open("/proc/self/statm") as file:
        begun = int(file.read().split()[0]) * resource.getpagesize()
    for what, most in (
        (resource.RLIMIT_AS, begun + MEMORY),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, 1003 + FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def outcome(task: dict[str, Any], line: ranks.Line) -> dict[str, Any]:
    """What the answer returned on this rank, or what it raised and where."""
    groups = SimpleNamespace(
        **{
            name: ranks.Group(line, name, members, members.index(task["rank"]))
            for name, some in task["groups"].items()
            for members in some
            if task["rank"] in members
        }
    )
    place = groups.world if set(task["groups"]) == {"world"} else groups
    trusted: dict[str, Any] = {"torch": torch}
    exec(compile(task["harness"], "harness", "exec"), trusted)
    shut_out(task["folder"])
    answer: dict[str, Any] = {"__name__": "answer"}
    try:
        exec(compile(task["source"], "answer", "exec", dont_inherit=True), answer)
        value = trusted["harness"](Answer(answer), place, **task["inputs"])
        frames.pack(value)
    except BaseException as error:
        return {"error": _told(error), "kind": type(error).__name__, "line": _line_of(error)}
    return {"value": value}


class Answer:
    """What an answer's file defines."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"your file defines no {name}")


def _told(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception_only(error)).strip()
    except BaseException:  # an error may be made so that it cannot be shown
        text = type(error).__name__
    return text[-500:]


def _line_of(error: BaseException) -> int:
    """The last line of the answer that was on the way to the error."""
    if isinstance(error, SyntaxError) and error.filename == "answer":
        return error.lineno or 0
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "answer"]
    return (lines[-1] or 0) if lines else 0


def shut_out(folder: str) -> None:
    """From now on this process is the answer's: what the grader has brought along cannot be imported, and a hook
    refuses what is not allowed."""
    for name in [name for name in sys.modules if name.split(".")[0] in MODULES]:
        del sys.modules[name]
    for home, name in ((os, "pidfd_open"), (signal, "pidfd_send_signal")):
        if hasattr(home, name):  # no event tells of them
            delattr(home, name)
    sys.addaudithook(_hook(os.path.realpath(folder) + os.sep))


def _hook(inside: str) -> Callable[[str, tuple[Any, ...]], None]:
    """What it uses is bound here, so that names which an answer changes later change nothing of it."""
    real, fspath, is_folder, is_a = os.path.realpath, os.fsdecode, os.path.isdir, isinstance
    paths = (str, bytes, os.PathLike)
    forbidden, places, modules, reads = frozenset(FORBIDDEN), dict(PLACES), frozenset(MODULES), frozenset(READS)
    readable, own, separator, refuse, text = tuple(READABLE), OWN + os.sep, os.sep, PermissionError, str
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def check(event: str, path: str, mode: Any, flags: Any) -> None:
        writes = {*mode} & {*"wax+"} if is_a(mode, text) else flags & writing
        only_reads = event in reads or (event == "open" and not writes)
        if not (path + separator).startswith(inside):
            if (path + separator).startswith(own) or (only_reads and not path.startswith(readable)):
                raise refuse("an answer may not read this")
            if not only_reads:
                raise refuse("an answer may write into its own folder only")
        if event == "open" and mode is None and is_folder(path):
            raise refuse("an answer may not open folders")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in forbidden or event.startswith(("ctypes.", "socket.")):
            raise refuse(f"an answer may not do this: {event}")
        if event == "import" and arguments[0].split(".")[0] in modules:
            raise refuse(f"an answer may not import {arguments[0]}")
        for place in places.get(event, ()):
            if is_a(arguments[place], paths):
                mode, flags = arguments[1:3] if event == "open" else (None, 0)
                check(event, real(fspath(arguments[place])), mode, flags)

    return hook


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
