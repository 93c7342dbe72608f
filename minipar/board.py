"""The board: what each rank is waiting for, kept where it can be read even when the rank is dead.

Idea    A small file, mapped into the memory of the launcher and of every rank, with one fixed slot for each rank.
        Before a rank may block on a message it writes the message into its slot, and afterwards that it goes on.
        The launcher reads the slots: when nobody's slot changes any more, the ranks are stuck, and the slots say why.
Cost    A write is one `struct.pack_into` of 256 bytes: about a microsecond, no system call, no lock.
Read    `comm.py` before (`Wire.waiting` is what writes here), `watch.py` after (which reads it).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

HEADER = struct.Struct("<qd?")  # number of writes, time of the last, whether the rank waits
SLOT = struct.Struct(HEADER.format + "239s")  # the same, and the text


@dataclass(frozen=True)
class Post:
    """What a slot says: the message `text` for which the rank waits, or if not `waiting`, the last one it waited for.

    It does so since `since` (monotonic seconds); `count` grows with every write, so an unchanged count means that the
    rank has neither come nor gone.
    """

    count: int
    since: float
    waiting: bool
    text: str


class Board:
    """The slots of all ranks, and the other files that launcher and ranks share: all in one private `directory`."""

    def __init__(self, directory: Path) -> None:
        self.order = directory / "order"  # the call that the ranks are to make, pickled
        self.store = directory / "store"  # where the ranks find each other
        self._directory = directory
        with open(directory / "board", "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    @classmethod
    def create(cls, directory: Path, ranks: int) -> Board:
        """A new board, every slot empty."""
        (directory / "board").write_bytes(bytes(SLOT.size * ranks))
        return cls(directory)

    def stack(self, rank: int) -> Path:
        """The file into which `rank` writes where it stands in its code, when it is asked."""
        return self._directory / f"stack-{rank}"

    def writer(self, rank: int) -> Callable[[str | None], None]:
        """The function with which `rank` says what it waits for, "" when it goes on, or None when it waits on, but for
        something that is on its way: for `comm.Wire`."""
        wait, go_on, board, offset = SLOT.pack_into, HEADER.pack_into, self._map, rank * SLOT.size
        still = struct.Struct("<q").pack_into
        count = 0

        def waiting(text: str | None) -> None:
            nonlocal count
            count += 1
            if text is None:
                still(board, offset, count)
            elif text:
                wait(board, offset, count, monotonic(), True, text.encode())  # a text that is too long is cut
            else:
                go_on(board, offset, count, monotonic(), False)

        return waiting

    def forget(self, rank: int) -> None:
        """Remove the text of `rank`."""
        start = rank * SLOT.size
        self._map[start + HEADER.size : start + SLOT.size] = bytes(SLOT.size - HEADER.size)

    def close(self) -> None:
        """Let go of the file: nobody reads here any more."""
        self._map.close()

    def read(self, rank: int) -> Post:
        """What `rank` wrote last."""
        count, since, waiting, text = SLOT.unpack_from(self._map, rank * SLOT.size)
        return Post(count, since, waiting, text.rstrip(b"\0").decode(errors="ignore"))
