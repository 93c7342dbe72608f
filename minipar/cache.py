"""Work that is done once: results kept in files that are whole or absent.

Idea    A result is written beside its place and then renamed, so that a process killed in the middle leaves nothing
        that another could mistake for a result; and a checksum stands in front, so that a damaged file is made anew.
        A lock lets one process work while those that want the same wait. The kernel opens it when its holder ends,
        however it ends: a lock file with a process number in it would stay behind.

            first line   name, bytes of the header, bytes of all that follows, their checksum
            header       any JSON
            arrays       one behind the other; mapped into memory when loaded, not read

Cost    One pass over the file for the checksum, about a second per gigabyte.
Read    `corpus.py`, which keeps its tokens here.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Kept = tuple[Any, list[NDArray[Any]]]  # a header that JSON can hold, and arrays of one type


def cache_folder() -> Path:
    """$MINIPAR_CACHE, else $XDG_CACHE_HOME/minipar, else ~/.cache/minipar."""
    if own := os.environ.get("MINIPAR_CACHE"):
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "minipar"


def temporary_folder() -> Path:
    """This user's own folder among the temporary files."""
    folder = Path(tempfile.gettempdir()) / f"minipar-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(folder)
        if status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode):
            return folder
    own = Path(tempfile.mkdtemp(prefix="minipar-"))  # someone else was there first
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return own


def cached(name: str, build: Callable[[], Kept], folder: Path | None = None) -> Kept:
    """What `build` returns, from the file `name` in the cache if it is there and sound.

    Where the cache cannot be used, a temporary folder takes its place, and one line on stderr says so.
    """
    try:
        return load_or_build((folder or cache_folder()) / name, build)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        instead = temporary_folder()
        os.environ["MINIPAR_CACHE"] = str(instead)  # ranks look there at once, and say nothing
        print(f"minipar: cannot use the cache ({error}): using {instead}", file=sys.stderr)
    return load_or_build(instead / name, build)


def load_or_build(file: Path, build: Callable[[], Kept]) -> Kept:
    """What the file holds; when it is missing or damaged, what `build` makes. Raises OSError if it cannot be kept."""
    found = load(file)
    if found is not None:
        return found
    with locked(file):
        found = load(file)  # another process may have made it while this one waited
        if found is None:
            built = build()
            store(file, built)
            found = load(file) or built
    return found


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """One process at a time may be in here for this file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        with suppress(OSError):  # a network disk without locks: then several work, and the last one's file stays
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):  # a child forked meanwhile has the file open, too
                fcntl.flock(lock, fcntl.LOCK_UN)


def store(file: Path, kept: Kept) -> None:
    """Write beside, then rename: whoever opens `file` sees all of it or nothing."""
    header, arrays = kept
    text = json.dumps({"header": header, "lengths": [len(a) for a in arrays], "dtype": arrays[0].dtype.str}).encode()
    text += b" " * (-len(text) % 64)  # so that the arrays are aligned
    body = text + b"".join(array.tobytes() for array in arrays)
    for leftover in file.parent.glob(f"{file.stem}-*.tmp"):  # of a process that was killed here
        leftover.unlink(missing_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f"{file.stem}-", suffix=".tmp", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(f"minipar {len(text):15d} {len(body):15d} {zlib.crc32(body):15d}".ljust(63).encode() + b"\n")
            out.write(body)
        os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def load(file: Path) -> Kept | None:
    """What was stored, its arrays mapped and not read; None when there is no such file, or it is damaged."""
    try:
        content = np.memmap(file, np.uint8, mode="r")
        mark, *numbers = bytes(content[:64]).split()
        start, length, checksum = map(int, numbers)
    except (OSError, ValueError):
        return None
    body = content[64:]
    if mark != b"minipar" or len(body) != length or zlib.crc32(body.data) != checksum:
        return None
    index = json.loads(bytes(body[:start]))
    ends = np.cumsum(index["lengths"]).tolist()
    return index["header"], np.split(body[start:].view(index["dtype"]), ends[:-1])
