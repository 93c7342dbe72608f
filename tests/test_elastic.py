"""Ranks that are started again meet each other, and nobody who is dead."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist  # noqa: TID251 -- its store only

from minipar import elastic


def attempt(store: dist.Store, size: int, *, seed: int = 0) -> set[tuple[str, int]]:
    """All ranks meet, in any order: what each of them was told."""
    pauses = random.Random(seed)
    waits = [pauses.uniform(0, 0.2) for _ in range(size)]

    def one(rank: int) -> tuple[str, int]:
        time.sleep(waits[rank])
        return elastic.meet(store, rank, size)

    with ThreadPoolExecutor(size) as ranks:
        return set(ranks.map(one, range(size)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_attempt_meets_at_a_place_of_its_own(size: int) -> None:
    store = dist.HashStore()
    told = [attempt(store, size, seed=seed) for seed in range(4)]
    assert all(len(one) == 1 for one in told)  # all ranks of an attempt were told the same
    places, attempts = zip(*(one.pop() for one in told), strict=True)
    assert len(set(places)) == 4 and attempts == (0, 1, 2, 3)


def test_notes_of_the_dead_bring_nobody_to_the_wrong_place() -> None:
    """A rank that was lost before the others came, and a rank 0 that was lost with its invitation out."""
    store = dist.HashStore()
    for rank in (1, 2):
        store.set(f"minipar/note/{rank}", '["dead", 0]')
    store.set("minipar/place", '["minipar/grave", 0, ["another"]]')
    told = attempt(store, 3, seed=1)
    assert len(told) == 1 and "grave" not in next(iter(told))[0]


def test_one_machine_that_counts_a_restart_counts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert {attempts for _, attempts in attempt(dist.HashStore(), 2)} == {2}
