"""What a run writes down, step by step: one line of JSON for each, or TensorBoard's own files.

Idea    The log is where every account is seen first: loss and norm (stability), seconds and MFU (compute), bytes and
        memory. The step's time is nearly the same on all ranks, since they wait for each other; so each also says how
        long it was busy, and the one that was busy longest is the one that the others waited for.
Cost    With a log, one small message between all ranks in each step.
Source  TensorBoard's files are written by its own library.
Read    `job.py`, which tells of each step; `show/runs.py`, which draws a log or two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import FileIO
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from minipar.files import as_json

Event = dict[str, Any]
CURVES = ("loss", "grad_norm", "loss_scale", "lr", "tokens_per_second", "mfu", "memory_bytes")


def line_of(event: Event, *, peak_flops: float = 0.0) -> Event:
    """The facts of a step: what `--log` writes. `peak_flops` is that of each rank, in FLOP/s; without it, no MFU."""
    ranks, seconds = event.get("ranks"), event["seconds"]
    line: Event = {
        "step": event["step"],
        "loss": event["loss"],
        "grad_norm": event["norm"],
        "loss_scale": event["loss_scale"],
        "lr": event["lr"],
        "skipped": event["skipped"],
        "tokens_per_second": event["tokens"] / seconds,
        "bytes": event["bytes"],
    }
    if peak_flops:
        line["mfu"] = event["flops"] / seconds / event["world_size"] / peak_flops
    if ranks:
        busy, taken = [rank["busy"] for rank in ranks], [rank["seconds"] for rank in ranks]
        line["step_seconds"] = {"min": min(taken), "median": median(taken), "max": max(taken)}
        line["busy_seconds"] = {"min": min(busy), "median": median(busy), "max": max(busy)}
        line["busiest_rank"] = busy.index(max(busy))
        line["memory_bytes"] = max(rank["memory"] for rank in ranks)
    return line


class Log:
    """Hears the events of a run and writes its steps; whatever else happens (a restart, going back) is a line as
    well. Each line is there as soon as its step is over. Files are opened when the first rank has started, so that a
    run that is refused touches none; what goes on from a checkpoint adds to a log that is there. When a file can no
    longer be written, `complain` is told, and the run goes on without it."""

    def __init__(
        self,
        path: str | None,
        board: str | None = None,
        *,
        peak_flops: float = 0.0,
        complain: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path, self._folder, self._peak, self._complain = path, board, peak_flops, complain
        self._make_board = _library() if board else None
        self._board: Any = None
        self._file: FileIO | None = None

    def hear(self, event: Event) -> None:
        """An event of `job.run`."""
        try:
            match event["event"]:
                case "start":
                    self._open(event)
                case "step" if self._file is not None or self._board is not None:
                    self._step(line_of(event, peak_flops=self._peak))
                case "restart" | "rollback":
                    self._write(event)
        except OSError as error:
            lost = self._path or self._folder
            self._complain(f"cannot write {lost!r} ({error.strerror}): training goes on without it")
            self.__exit__()
            self._file = self._path = self._board = self._make_board = None

    def _open(self, event: Event) -> None:
        if self._path and self._file is None:
            self._file = open(self._path, "ab" if event["begin"] else "wb", buffering=0)  # noqa: SIM115 -- for the run
            if event.get("attempts"):
                again = "torchrun has started the ranks again"
                self._write({"event": "restart", "reason": again, "step": event["begin"]})
        if self._make_board is not None and self._board is None:
            self._board = self._make_board(self._folder)

    def _step(self, line: Event) -> None:
        self._write(line)
        if self._board is not None:
            for name in CURVES:
                if isinstance(line.get(name), int | float) and isfinite(line[name]):
                    self._board.add_scalar(name, line[name], line["step"])

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        for one in (self._file, self._board):
            with suppress(OSError):
                if one is not None:
                    one.close()

    def _write(self, line: Event) -> None:
        if self._file is not None:
            self._file.write(as_json(line).encode())


def _library() -> Callable[[str | None], Any]:
    """TensorBoard's own. Raises `ValueError`, one line, where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard needs its library: pip install 'minipar[tensorboard]'") from None
    make: Callable[[str | None], Any] = SummaryWriter
    return make


def read(path: str | Path) -> list[Event]:
    """The steps of a log, in their order; one that was cut off while it was written is left out; as `marked`
    gives them. Raises `ValueError`, one line, for a file that is no log."""
    lines: list[Event] = []
    try:
        with open(path, encoding="utf-8") as file:
            texts = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the log {str(path)!r} ({error}): name a file that --log has written") from None
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError:
            if number == len(texts):
                break
            line = None
        if not isinstance(line, dict) or not ("loss" in line or "event" in line):
            raise ValueError(f"{str(path)!r}, line {number}, is no step: name a file that --log has written")
        lines.append(line)
    steps = marked(lines)
    if not steps:
        raise ValueError(f"{str(path)!r} has no steps: name a file that --log has written")
    return steps


def marked(lines: Iterable[Event]) -> list[Event]:
    """The steps among the lines of a log. A step after which the run went back is `rolled_back`, the first after a
    restart is `restarted`."""
    steps: list[Event] = []
    again = False
    for line in lines:
        if "event" not in line:
            steps.append({**line, "restarted": True} if again else line)
            again = False
        elif line["event"] == "rollback" and steps:
            steps[-1]["rolled_back"] = True
        again = again or line.get("event") == "restart"
    return steps
