"""How far a learner is: the best mark of each exercise, kept in one small file of this user.

Idea    The file is a convenience. When it is gone, learning begins anew; when it is damaged, it is set aside and named;
        when it cannot be written, grading goes on without it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minipar.files import write_whole


@dataclass
class Entry:
    """Of one exercise: the best mark from 0 to 100, how often it was tried, how many hints were read."""

    score: int = 0
    tries: int = 0
    hints: int = 0


def place() -> Path:
    """The file, where the system keeps what belongs to a user."""
    if named := os.environ.get("MINIPAR_PROGRESS"):
        return Path(named)
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
    return Path(home) / "minipar" / "progress.json"


def load() -> dict[str, Entry]:
    """What is known, by exercise."""
    path = place()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = "{}" if not path.exists() else ""
    try:
        return {str(name): _entry(facts) for name, facts in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, KeyError):
        _set_aside(path)
        return {}


def _entry(facts: dict[str, Any]) -> Entry:
    numbers = {name: int(facts[name]) for name in ("score", "tries", "hints")}
    if not 0 <= numbers["score"] <= 100:
        raise ValueError
    return Entry(**numbers)


def _set_aside(path: Path) -> None:
    aside = path.with_suffix(".damaged.json")
    try:
        os.replace(path, aside)
    except OSError:
        aside = path
    print(f"minipar: {path} was damaged and is now {aside.name}: progress begins anew", file=sys.stderr)


def save(known: dict[str, Entry]) -> None:
    """Keep it, if that is possible."""
    path = place()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(str(path), json.dumps({name: asdict(entry) for name, entry in known.items()}, indent=1) + "\n")
    except (OSError, ValueError) as error:
        print(f"minipar: your progress could not be kept ({error})", file=sys.stderr)


def note(name: str, score: int) -> None:
    """A try with this mark."""
    known = load()
    entry = known.setdefault(name, Entry())
    entry.tries += 1
    entry.score = max(entry.score, score)
    save(known)
