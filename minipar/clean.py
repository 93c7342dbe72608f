"""From files to clean documents: find, read, decode, normalise, filter.

Idea    Raw text contradicts its own encoding, carries control characters, and is partly written by machines. Each step
        hands on less or cleaner text, and counts what it took away, so that the account adds up in the end.

            files -> decode -> normalise    -> filter
                     utf-8?    one newline,    too short? too long?
                     declared? no controls,    generated? a table?
                     repaired  NFC

Source  The filters: Rae et al. 2021 (Gopher), appendix A, cut down to what needs no language.
Cost    One pass over the text, about 0.1 seconds per megabyte on one core.
Read    `dedup.py` after: what documents have in common with each other.

Order comes from hashes of file names alone, so the same files give the same documents, however the disk lists them.
"""

from __future__ import annotations

import codecs
import os
import platform
import re
import stat
import sysconfig
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

SHORTEST, LONGEST = 64, 1_000_000  # characters of a document
LEAST_LETTERS = 0.4  # share of letters among the visible characters, below which a document is a table
MOST_BROKEN = 0.01  # share of the characters that may be undecodable
REASONS = ("unreadable", "binary", "undecodable", "too short", "too long", "generated", "table")

NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
BYTE_ORDER_MARKS = (  # utf-32 first: its little-endian mark starts with that of utf-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
COOKIE = re.compile(rb"""^[ \t\f]*(?:#|<\?xml).*?coding[:=][ \t]*["']?([-\w.]+)""", re.MULTILINE)  # PEP 263, and XML
NEWLINE = re.compile("\r\n?|\x85|\u2028|\u2029")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ud800-\udfff]")
GENERATED = re.compile(
    r"auto-?generated|automatically generated|@generated|do not (?:edit|modify)|generated (?:by|from) \S*\.\w+", re.I
)


class CorpusError(ValueError):
    """Data or numbers that no corpus can be made of. The message is one line: what is wrong, and the way out."""


@dataclass(frozen=True)
class Source:
    """Files that were found but not yet read: (path below root, bytes, time of change in nanoseconds), sorted.

    The time is ctime: it also moves when only the permissions of a file change, and nobody can set it back.
    """

    name: str
    root: Path
    files: tuple[tuple[str, int, int], ...]
    unreadable: int


def find(data: str | Path | None = None) -> Source:
    """The files of `data`: a file, a folder and all below it, or None for this Python's own standard library.

    Hidden files, devices and pipes are skipped; links are followed, but no folder is entered twice. Raises
    `CorpusError` when there is nothing to read.
    """
    if data is None:
        root, name = Path(sysconfig.get_paths()["stdlib"]), f"Python {platform.python_version()} standard library"
    else:
        root, name = Path(data), Path(data).name or str(data)
    try:
        if data == "":
            raise FileNotFoundError
        root = root.expanduser()
        status = os.stat(root)
    except (FileNotFoundError, NotADirectoryError, ValueError, RuntimeError):
        raise CorpusError(f"data {str(data)!r} does not exist: give a file or folder of text") from None
    except OSError as error:
        raise CorpusError(f"data {str(root)!r} cannot be read ({error.strerror}): check its permissions") from None
    if stat.S_ISREG(status.st_mode):
        return Source(name, root, (("", status.st_size, status.st_ctime_ns),), 0)
    if not stat.S_ISDIR(status.st_mode):
        raise CorpusError(f"data {str(root)!r} is neither a file nor a folder: give a file or folder of text")
    files, unreadable = walk(root, skip=NOT_THE_LIBRARY if data is None else frozenset())
    if not files:
        why = "cannot be read: check its permissions" if unreadable else "holds no files: put text files in it"
        raise CorpusError(f"data {str(root)!r} {why}, or give another file or folder")
    return Source(name, root, tuple(sorted(files)), unreadable)


def walk(root: Path, *, skip: frozenset[str]) -> tuple[list[tuple[str, int, int]], int]:
    """Every regular file below `root` that is not hidden, and how many files and folders could not be looked at."""
    files: list[tuple[str, int, int]] = []
    failures: list[OSError] = []
    entered: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=failures.append):
        here = os.path.realpath(folder)
        if here in entered:  # a link back to where we have been
            folders.clear()
            continue
        entered.add(here)
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in skip)
        for name in names:
            if name[0] == ".":
                continue
            path = os.path.join(folder, name)
            try:
                status = os.stat(path)
            except OSError as error:
                failures.append(error)
                continue
            if stat.S_ISREG(status.st_mode):
                files.append((os.path.relpath(path, root), status.st_size, status.st_ctime_ns))
    return files, len(failures)


def read(source: Source, *, limit_bytes: int | None, seed: int, counts: Counter[str]) -> Iterator[str]:
    """The decoded text of the files, in an order drawn from `seed` and their names, until `limit_bytes` are read.

    One file is one document, unless it is the only one: then it is cut at blank lines (and at the limit). What cannot
    be read or decoded is counted, not raised.
    """
    counts["unreadable"] += source.unreadable
    alone = len(source.files) == 1
    for name, _, _ in sorted(source.files, key=lambda file: draw(os.fsencode(file[0]), seed)):
        if limit_bytes is not None and counts["bytes read"] >= limit_bytes:
            return
        try:
            raw = read_bytes(source.root / name, limit_bytes if alone else None)
        except OSError:
            counts["unreadable"] += 1
            continue
        text, how = decode(raw)
        counts[how] += 1
        if text is None:
            continue
        counts["bytes read"] += len(raw)
        documents = paragraphs(text) if alone else [text]
        counts["documents"] += len(documents)
        yield from documents


def read_bytes(path: Path, limit: int | None) -> bytes:
    """What the file holds; of a longer one, the whole lines among its first `limit` bytes."""
    with open(path, "rb") as file:
        raw = file.read(-1 if limit is None else limit + 1)
    if limit is None or len(raw) <= limit:
        return raw
    return raw[: raw.rfind(b"\n", 0, limit) + 1] or raw[:limit]


def draw(text: bytes, seed: int) -> float:
    """A number in [0, 1) that depends on text and seed only: the same in every process and on every machine."""
    return int.from_bytes(blake2b(text, digest_size=6, key=str(seed).encode()[:64]).digest(), "big") / 2**48


def decode(raw: bytes) -> tuple[str | None, str]:
    """The text of `raw` and how it was found: "utf-8", "declared" or "repaired"; or None and why not.

    utf-8 first, then what a byte order mark or a coding cookie declares; at last utf-8 with U+FFFD in place of what is
    broken, if that is little.
    """
    mark = next((encoding for bom, encoding in BYTE_ORDER_MARKS if raw.startswith(bom)), None)
    if mark is None and b"\0" in raw[:8192]:
        return None, "binary"
    cookie = COOKIE.search(b"\n".join(raw.split(b"\n", 2)[:2]))
    declared = mark or (cookie[1].decode("ascii", "replace") if cookie else None)
    for encoding, how in (("utf-8", "utf-8"), (declared, "declared")):
        try:
            if encoding is not None:
                return raw.decode(encoding), how
        except (ValueError, LookupError, Warning):  # a codec may only warn of what is broken
            continue
    text = raw.decode(mark or "utf-8", "replace")
    if text.count("\ufffd") > MOST_BROKEN * len(text):
        return None, "undecodable"
    return text, "repaired"


def paragraphs(text: str) -> list[str]:
    """One long text as documents, cut at blank lines, or at a line or a word where there are none.

    A document has 4,096 characters or a little more. Of a short text they are shorter (but 256 at least), so that
    there are ten or more to hold some out from.
    """
    size = max(256, min(4096, len(text) // 20))
    documents, start = [], 0
    while len(text) - start > 2 * size:
        window = text[start + size : start + 2 * size].replace("\r\n", " \n").replace("\r", "\n")
        cut = next((at for mark in ("\n\n", "\n \n", "\n", " ") if (at := window.find(mark)) >= 0), size)
        documents.append(text[start : start + size + cut])
        start += size + cut
    return [*documents, text[start:]]


def normalise(text: str, counts: Counter[str]) -> str:
    """One kind of newline, no control characters, Unicode's composed form (NFC), no blanks at the ends of lines."""
    text, removed = CONTROL.subn("", NEWLINE.sub("\n", text))
    counts["control characters"] += removed
    return "\n".join(map(str.rstrip, unicodedata.normalize("NFC", text).split("\n"))).strip("\n")


def reason_to_drop(text: str) -> str | None:
    """Why a model should not be trained on this text, or None."""
    if len(text) < SHORTEST:
        return "too short"
    if len(text) > LONGEST:
        return "too long"
    if GENERATED.search("\n".join(text[:1000].split("\n", 5)[:5])):
        return "generated"
    visible = "".join(text.split())
    if sum(map(str.isalpha, visible)) < LEAST_LETTERS * len(visible):
        return "table"
    return None


def clean(texts: Iterable[str], counts: Counter[str]) -> list[str]:
    """The texts, normalised, without those that `reason_to_drop` names."""
    kept = []
    for raw in texts:
        text = normalise(raw, counts)
        reason = reason_to_drop(text)
        if reason is None:
            kept.append(text)
        else:
            counts[reason] += 1
    return kept
