"""Pictures in files: whole, or not written at all.

Idea    What is wrong with a name is said before the picture is made.
Read    `minipar/files.py`, which writes whole files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from minipar.files import check_writable, write_whole
from minipar.show import pixels

Writers = Mapping[str, Callable[[], bytes]]


def save(path: str | os.PathLike[str], writers: Writers) -> None:
    """Write the file with the writer for its ending. Raises `ValueError`, before any work, if there is none."""
    check_ending(path, writers)
    check_writable(os.fspath(path))
    write_whole(os.fspath(path), writers[Path(path).suffix.lower()]())


def check_ending(path: str | os.PathLike[str], endings: Iterable[str] = (".svg", ".png", ".html")) -> None:
    """Raise `ValueError` unless the name ends in one of `endings`."""
    endings = list(endings)
    if Path(path).suffix.lower() not in endings:
        raise ValueError(f"cannot save {os.fspath(path)!r}: choose a name that ends in {' or '.join(endings)}")
    if Path(path).suffix.lower() == ".png":
        pixels.check()
