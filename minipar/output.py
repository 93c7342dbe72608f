"""What ranks print: whole lines, each with the rank that printed it, and equal lines folded into one.

Idea    Bytes arrive from each rank in pieces. Cut them into lines and put `[rank 3] ` in front, so that ranks never
        mix within a line. In a notebook, lines that ranks print alike are shown once: `[ranks 0-3] loss 2.31`. For
        that a line is held for up to a tenth of a second, until its twins from the other ranks have come.
Cost    At most `HELD` lines and one unfinished line of at most `LONGEST` bytes for each rank, however much they print.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator

STREAMS = ("stdout", "stderr")
HOLD = 0.1  # seconds that a line waits for its twins
HELD = 100  # lines of one rank that may wait
LONGEST = 1 << 20  # bytes after which an unfinished line is shown as it is


def name_ranks(ranks: Collection[int]) -> str:
    """[3] -> 'rank 3', [0, 1, 2, 3] -> 'ranks 0-3', [0, 2] -> 'ranks 0,2'."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    pieces = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ",".join(pieces)


def fold(texts: dict[int, str]) -> str:
    """The texts of ranks, line by line behind their rank's name, equal texts once."""
    alike: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        alike.setdefault(text, []).append(rank)
    return "".join(f"[{name_ranks(ranks)}] {line}\n" for text, ranks in alike.items() for line in text.split("\n"))


class Output:
    """The printed lines of `ranks`, handed to `write(stream, text)` as soon as they may be shown."""

    def __init__(self, ranks: Collection[int], write: Callable[[str, str], None], *, fold: bool) -> None:
        self._write = write
        self._rest: dict[tuple[str, int], bytes] = {}
        self._folds = {stream: Fold(ranks) for stream in STREAMS} if fold else {}

    def feed(self, stream: str, rank: int, data: bytes, now: float) -> None:
        """Take what `rank` has printed, and show the lines that are complete."""
        *lines, rest = (self._rest.get((stream, rank), b"") + data).split(b"\n")
        if len(rest) > LONGEST:
            lines, rest = [*lines, rest], b""
        self._rest[stream, rank] = rest
        self._take(stream, rank, lines, now)

    def release(self, now: float) -> None:
        """Show the held lines that have waited long enough, or need not wait."""
        for stream, held in self._folds.items():
            text = "".join(held.release(now))
            if text:
                self._write(stream, text)

    def holding(self) -> bool:
        """Whether lines wait to be shown."""
        return any(held.holding() for held in self._folds.values())

    def finish(self) -> None:
        """Show everything, unfinished lines too."""
        for (stream, rank), rest in self._rest.items():
            if rest:
                self._take(stream, rank, [rest], 0.0)
        self._rest.clear()
        self.release(float("inf"))

    def _take(self, stream: str, rank: int, lines: list[bytes], now: float) -> None:
        texts = [_visible(line) for line in lines]
        if self._folds:
            for text in texts:
                self._folds[stream].hold(rank, text, now)
            self.release(now)
        elif texts:
            self._write(stream, "".join(f"[rank {rank}] {text}\n" for text in texts))


def _visible(line: bytes) -> str:
    """The line as text. Of a progress bar, which overwrites itself after each carriage return, the last state."""
    return line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]


class Fold:
    """Lines that wait for their twins, in one queue for each rank."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._queues: dict[int, deque[tuple[float, str]]] = {rank: deque() for rank in sorted(ranks)}
        self._copies: Counter[str] = Counter()

    def hold(self, rank: int, text: str, now: float) -> None:
        self._queues.setdefault(rank, deque()).append((now, text))
        self._copies[text] += 1

    def holding(self) -> bool:
        return any(self._queues.values())

    def release(self, now: float) -> Iterator[str]:
        """The lines whose time has come, with their prefix, in an order that keeps each rank's own."""
        while waiting := {rank: queue[0] for rank, queue in self._queues.items() if queue}:
            oldest = min(waiting, key=lambda rank: waiting[rank][0])
            arrived, text = waiting[oldest]
            alike = self._first_alike(text)
            complete = len(alike) == len(self._queues)
            if not (complete or now - arrived >= HOLD or any(len(queue) > HELD for queue in self._queues.values())):
                return
            if self._copies[text] > len(alike):
                # Another rank has printed this line too, behind other lines: show those first.
                behind = next((r for r in waiting if r not in alike and self._is_held(r, text)), oldest)
                text = waiting[behind][1]
                alike = self._first_alike(text)
            yield self._show(alike, text)

    def _first_alike(self, text: str) -> list[int]:
        return [rank for rank, queue in self._queues.items() if queue and queue[0][1] == text]

    def _is_held(self, rank: int, text: str) -> bool:
        return any(held == text for _, held in self._queues[rank])

    def _show(self, ranks: list[int], text: str) -> str:
        for rank in ranks:
            self._queues[rank].popleft()
        self._copies[text] -= len(ranks)
        if not self._copies[text]:
            del self._copies[text]
        return f"[{name_ranks(ranks)}] {text}\n"
