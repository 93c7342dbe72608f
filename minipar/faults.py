"""What goes wrong on ranks, told as one readable error.

Idea    When one rank fails, all others fail a moment later, because the one they talk to is gone. The learner should
        read the cause, once, with the line of their own code: not eight tracebacks that blame the connection.
        A rank that raised tells its own story; for one that died or is stuck, the board says what it waited for, and
        the signal handler of `faulthandler` where in the code it stands.
Read    `rank.py` (which reports failures) and `watch.py` (which collects them) before.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from minipar.board import Post
from minipar.output import name_ranks

HERE = str(Path(__file__).parent) + os.sep
STANDARD = sysconfig.get_path("stdlib") + os.sep
INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
PLUMBING = {"launch.py", "watch.py", "server.py", "rank.py", "cells.py", "comm.py"}
CONNECTION = re.compile(
    r"Connection (closed|reset|refused|aborted)|Broken pipe|Socket (closed|Timeout)|socketPollConnect|"
    r"(Read|Write|Send|Recv) (error|timeout)|failed to connect|remote process exited",
    re.IGNORECASE,
)
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    `kind` is "raised" (an exception in the learner's code), "disconnected" (an exception because another rank was
    gone), "died" (its process ended) or "stuck". `text` says it in one line, without the rank; `detail` is the
    traceback of an exception, from the learner's own frames. `refusal` is what a `Refusal` says.
    """

    rank: int
    kind: Literal["raised", "disconnected", "died", "stuck"]
    text: str
    detail: str = ""
    refusal: str = ""


class Refusal(ValueError):
    """Something outside of the program is not as it must be: one line says all, and a traceback would say nothing."""


class RankError(RuntimeError):
    """Ranks have failed. `rank` is the one to blame, as far as can be told; `failures` has all that is known."""

    def __init__(self, message: str, failures: Sequence[Failure] = ()) -> None:
        super().__init__(message)
        self.failures = list(failures)
        self.rank = cause(failures).rank if failures else -1

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message alone, because the frames of the launcher explain nothing."""
        return [f"RankError: {self}"]


def cause(failures: Sequence[Failure]) -> Failure:
    """The first failure that does not merely follow from another."""
    return next((failure for failure in failures if failure.kind != "disconnected"), failures[0])


# An exception, described on the rank that raised it.


def describe_exception(rank: int, error: BaseException) -> Failure:
    """The failure of a rank whose code raised `error`, with the frames of the learner's code."""
    story = traceback.TracebackException.from_exception(error, compact=True)
    headline = "".join(story.format_exception_only()).strip()
    link: traceback.TracebackException | None = story
    while link is not None:
        link.stack = trim(link.stack)
        link = link.__cause__ or link.__context__
    detail = "".join(story.format()).rstrip().removesuffix(headline).rstrip() if story.stack else ""
    kind: Literal["disconnected", "raised"] = "disconnected" if lost_peer(error) else "raised"
    return Failure(rank, kind, f"raised {headline}", detail, str(error) if isinstance(error, Refusal) else "")


def trim(stack: traceback.StackSummary) -> traceback.StackSummary:
    """The frames that a learner wrote or reads: not the launcher's, torch's or the standard library's."""
    frames = [frame for frame in stack if is_users(frame.filename) or is_lesson(frame.filename)]
    return traceback.StackSummary.from_list(frames or [f for f in stack if not f.filename.startswith(HERE)])


def is_users(filename: str) -> bool:
    """Whether the file belongs to whoever uses minipar."""
    return not filename.startswith((HERE, STANDARD, "<frozen ", "<string>")) and not INSTALLED.search(filename)


def is_lesson(filename: str) -> bool:
    """Whether the file is one of minipar's, and not one of those that merely carry the call to the rank."""
    return filename.startswith(HERE) and os.path.basename(filename) not in PLUMBING


def lost_peer(error: BaseException | None) -> bool:
    """Whether `error` says, or was raised because, the connection to another rank broke."""
    while error is not None:
        if isinstance(error, RuntimeError) and CONNECTION.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


# A death or a standstill, described by the launcher.


def describe_death(rank: int, code: int | None, post: Post) -> Failure:
    """The failure of a rank whose process ended with exit code `code` (negative: the signal that killed it).

    The code is None when the rank is alive, but the server that forked it is not, and so cannot tell of it.
    """
    if code is None:
        return Failure(rank, "died", "lost the server that forks ranks: somebody killed it")
    text = f"was killed by signal {-code} ({signal_name(-code)})" if code < 0 else f"exited with code {code}"
    when = f" {'while it waited for' if post.waiting else 'after'} {post.text}" if post.text else ""
    return Failure(rank, "died", text + when)


def signal_name(number: int) -> str:
    """9 -> "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def describe_stuck(rank: int, post: Post, stack: str, *, stopped: bool = False) -> Failure:
    """The failure of a rank that does not end, from the board and from what faulthandler wrote."""
    if stopped:
        return Failure(rank, "stuck", "has been stopped, by a signal or a debugger, so the others wait for it")
    place = where(stack)
    doing = f"waits for {post.text}" if post.waiting else "is computing"
    return Failure(rank, "stuck", doing + (f", at {place}" if place else ""))


def where(stack: str) -> str:
    """'script.py:12 in f: group.recv(x, 1)': the innermost frame of the learner's code in faulthandler's text."""
    frames = [(unescape(file), int(line), name) for file, line, name in FRAME.findall(stack)]  # innermost first
    named = [f for f in frames if is_users(f[0])] or [f for f in frames if is_lesson(f[0])] or frames
    if not named:
        return ""
    file, line, name = named[0]
    source = linecache.getline(file, line).strip()
    place = f"{short_name(file)}:{line}" + ("" if name == "<module>" else f" in {name}")
    return place + (f": {source}" if source else "")


def unescape(name: str) -> str:
    """Undo faulthandler's escapes (it writes ASCII only)."""
    return re.sub(r"\\(?:x(..)|u(.{4})|U(.{8}))", lambda match: chr(int(match[match.lastindex or 0], 16)), name)


def short_name(filename: str) -> str:
    """A cell by its number, a file by its path from the working directory if it lies there."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(filename)
    if number is not None:
        return f"In[{number}]"
    inside = filename.startswith(os.getcwd() + os.sep)
    return os.path.relpath(filename) if inside else filename


# The one error that the caller sees.


def report_failures(failures: Sequence[Failure], posts: Mapping[int, Post]) -> RankError:
    """The error for ranks that raised or died: the first cause, then what else is known."""
    first = cause(failures)
    alike = [failure.rank for failure in failures if (failure.kind, failure.text) == (first.kind, first.text)]
    told = first.text.replace("was ", "were ", 1) if len(alike) > 1 and first.kind == "died" else first.text
    lines = [f"{name_ranks(alike)} {told}"]
    if first.detail:
        lines.append(name_cells(first.detail))
    for failure in failures:
        if failure.rank not in alike and failure.kind != "disconnected":
            lines.append(f"  rank {failure.rank} {failure.text}".replace("\n", "\n  "))
    if first.kind == "died":
        dead = {failure.rank for failure in failures if failure.kind == "died"}
        alive = {rank: post for rank, post in posts.items() if rank not in dead and post.text}
        lines += [f"  rank {r} {'waited for' if p.waiting else 'had done'} {p.text}" for r, p in alive.items()]
        lines += hints(first.text)
    return RankError("\n".join(lines), failures)


def hints(text: str) -> list[str]:
    """What usually lies behind a death."""
    if "SIGABRT" in text:
        return ["gloo aborts a rank when the sizes in one call differ: run with check=True, and the call is named"]
    if "SIGKILL" in text:
        return ["often that is the system, when memory runs out"]
    return []


def name_cells(detail: str) -> str:
    """The traceback with notebook cells named as the notebook numbers them."""
    return re.sub(r'File "([^"]+)"', lambda m: f'File "{short_name(m[1])}"', detail)


def report_stuck(headline: str, failures: Sequence[Failure], others: Mapping[int, str]) -> RankError:
    """The error for ranks that do not end: what each one waits for, and where; `others` have ended or take no part."""
    texts = {failure.rank: failure.text for failure in failures} | dict(others)
    lines = [f"  rank {rank} {text}" for rank, text in sorted(texts.items())]
    return RankError("\n".join([f"{headline}:", *lines, *advice(failures, others)]), failures)


def advice(failures: Sequence[Failure], others: Mapping[int, str]) -> list[str]:
    """What the commonest deadlocks want."""
    waits = [failure.text.removeprefix("waits for ").split(", at ")[0] for failure in failures]
    if all(wait.startswith("send ") for wait in waits):
        return ["ranks that all send first wait for ever: let one receive first, or send with async_op=True"]
    if all(" from rank " not in wait and " to rank " not in wait for wait in waits) and len(set(waits)) > 1:
        return ["these calls do not belong together: run with check=True, and the first that differs is named"]
    if others and "is computing" not in waits:
        return ["a rank that has finished answers nobody: every rank of a group must make the same calls"]
    return []
