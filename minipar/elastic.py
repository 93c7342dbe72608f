"""Ranks that torchrun starts again, and how they meet without mistaking the dead for the living.

Idea    torchrun restarts all ranks when one is lost, and its store of addresses outlives them. What the lost ranks
        have left there is still to be read, and torch reads it: the new ranks then call the dead (pytorch issue
        135712). So each rank first leaves a note that nobody could have left before; rank 0 reads all notes, and
        names a place of its own for this attempt. A rank goes there only if its own note was among those read.
        torchrun's own count of restarts is kept by each machine for itself, so it cannot be the name of that place.
Read    `comm.py` after, which joins the world at that place.
"""

from __future__ import annotations

import json
import os
import uuid
from time import sleep
from typing import Any

PAUSE = 0.05  # seconds between looks at the notes


def meet(store: Any, rank: int, size: int) -> tuple[str, int]:
    """A prefix for `store`'s keys that all ranks of this attempt have, and no earlier one had; and how many attempts
    there were before."""
    note = json.dumps([uuid.uuid4().hex, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))])
    if rank == 0:
        return _invite(store, note, size)
    store.set(f"minipar/note/{rank}", note)
    while True:
        place, attempts, notes = json.loads(store.get("minipar/place"))  # waits until there is one
        if note in notes:
            store.set(f"{place}/{rank}", "here")
            return place, attempts
        sleep(PAUSE)


def _invite(store: Any, note: str, size: int) -> tuple[str, int]:
    """Rank 0: name the place to whoever has left a note, also to one who leaves it later, until all are there."""
    place, earlier = f"minipar/{json.loads(note)[0]}", store.add("minipar/attempts", 1) - 1
    while True:
        notes = [note, *(store.get(f"minipar/note/{rank}").decode() for rank in range(1, size))]
        attempts = max(earlier, *(json.loads(note)[1] for note in notes))
        store.set("minipar/place", json.dumps([place, attempts, notes]))
        if size == 1 or store.check([f"{place}/{rank}" for rank in range(1, size)]):
            return place, attempts
        sleep(PAUSE)
