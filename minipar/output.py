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
HELD = 1000  # lines of one rank that may wait
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
            for start in range(0, len(texts), HELD):
                for text in texts[start : start + HELD]:
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
        self._held: dict[int, Counter[str]] = {rank: Counter() for rank in ranks}  # what is in the queues

    def hold(self, rank: int, text: str, now: float) -> None:
        self._queues[rank].append((now, text))
        self._held[rank][text] += 1

    def holding(self) -> bool:
        return any(self._queues.values())

    def release(self, now: float) -> Iterator[str]:
        """The lines whose time has come, with their prefix, in an order that keeps each rank's own."""
        while waiting := {rank: queue[0] for rank, queue in self._queues.items() if queue}:
            arrived, text = min(waiting.values())
            alike = [rank for rank, line in waiting.items() if line[1] == text]
            full = any(len(queue) > HELD for queue in self._queues.values())
            if not (full or len(alike) == len(self._queues) or now - arrived >= HOLD):
                return
            for rank, line in waiting.items():
                if rank not in alike and self._held[rank][text]:
                    # This rank has printed the line too, behind others: those come first.
                    text = line[1]
                    break
            yield self._show([rank for rank, line in waiting.items() if line[1] == text], text)

    def _show(self, ranks: list[int], text: str) -> str:
        for rank in ranks:
            self._queues[rank].popleft()
            self._held[rank][text] -= 1
            if not self._held[rank][text]:
                del self._held[rank][text]
        return f"[{name_ranks(ranks)}] {text}\n"
