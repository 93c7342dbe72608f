"""Answers for programs: JSON, in files that are whole or not written at all.

Idea    That an answer cannot be written should be known before the run, not after it. And whoever opens the file sees
        all of it or what was there before: it is written beside its place, then renamed. A device or a pipe, such as
        /dev/stdout, must not be replaced by a file, so there the answer is simply written.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any


def as_json(value: Any, indent: int | None = None) -> str:
    """JSON that every program can read: it has no NaN and no infinity, so where a run has diverged it says null."""

    def finite(value: Any) -> Any:
        match value:
            case dict():
                return {key: finite(part) for key, part in value.items()}
            case list() | tuple():
                return [finite(part) for part in value]
            case float() if not isfinite(value):
                return None
        return value

    return json.dumps(finite(value), indent=indent, allow_nan=False) + "\n"


def check_writable(path: str | None) -> None:
    """Raise `ValueError` now, not after the run, if `path` could not be written."""
    if path is None:
        return
    if not path:
        raise ValueError("'' is not the name of a file: name one to write to")
    target = Path(os.path.realpath(path))
    try:
        if target.is_symlink():
            raise OSError(40, "a link that leads back to itself")
        if target.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(13, "no permission")
        if not written_in_place(path):
            with tempfile.TemporaryFile(dir=target.parent):
                pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot write {path!r} ({why}): name a file in a folder that can be written") from None


def check_outputs(inputs: Mapping[str, str | None] | None = None, **paths: str | None) -> None:
    """Raise `ValueError` now if one of the files could not be written, two of them are the same, or one is an input (or
    lies in the folder of a checkpoint, `resume`)."""
    names = {os.path.realpath(path): option for option, path in (inputs or {}).items() if path}
    kept = os.path.realpath((inputs or {}).get("resume") or os.devnull)
    for option, path in paths.items():
        check_writable(path)
        if path is not None and not written_in_place(path):
            other = names.setdefault(os.path.realpath(path), option)
            if other != option:
                raise ValueError(f"--{other} and --{option} both name {path!r}: give each a file of its own")
            if os.path.realpath(path).startswith(kept + os.sep):
                raise ValueError(f"--{option} {path!r} lies in the checkpoint of --resume: name a file elsewhere")


def check_ending(path: str | None, *endings: str) -> None:
    """Raise `ValueError` unless the name ends in one of these, or is that of a device or a pipe."""
    if path and not written_in_place(path) and Path(path).suffix.lower() not in endings:
        raise ValueError(f"{path!r} does not end in {' or '.join(endings)}: what is written there would be misnamed")


def written_in_place(path: str) -> bool:
    """Whether the file must keep its identity: a device or a pipe, such as /dev/stdout."""
    place = Path(os.path.abspath(path))
    return Path("/dev") in place.parents or (place.exists() and not place.is_file())


def write_whole(path: str, content: str | bytes) -> None:
    """The whole file or nothing: a reader never sees half of it. A link stays, and what it points to is written."""
    data = content.encode() if isinstance(content, str) else content
    try:
        _write(path, data)
    except OSError as error:
        raise ValueError(f"cannot write {path!r} ({error.strerror}): make room there, or name another file") from None


def _write(path: str, data: bytes) -> None:
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
