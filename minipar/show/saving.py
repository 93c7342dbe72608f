"""Pictures in files: whole, or not written at all.

Idea    What is wrong with a name is said before the picture is made. The file is written beside its place and renamed.
Read    `minipar/files.py`, which does the same for text.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from minipar.files import check_writable, written_in_place

Writers = Mapping[str, Callable[[], bytes]]


def save(path: str | os.PathLike[str], writers: Writers) -> None:
    """Write the file with the writer for its ending. Raises `ValueError`, before any work, if there is none."""
    ending = Path(path).suffix.lower()
    if ending not in writers:
        raise ValueError(f"cannot save {os.fspath(path)!r}: choose a name that ends in {' or '.join(writers)}")
    check_writable(os.fspath(path))
    write_bytes(os.fspath(path), writers[ending]())


def write_bytes(path: str, data: bytes) -> None:
    """The whole file or nothing; to a device or a pipe, such as /dev/stdout, as it is."""
    if written_in_place(path):
        with open(path, "wb") as stream:
            stream.write(data)
        return
    target = Path(os.path.realpath(path))
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".minipar-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
