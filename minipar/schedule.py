"""A pipeline schedule is data: for each rank, the plain list of what it computes, in order.

Idea    An action is the forward (F), the backward (B) or the weight gradient (W) of one micro-batch on one stage. A
        schedule says in which order each rank takes its actions, and nothing else: no times (`simulate.py` finds
        them), no messages (`order.py` derives them: who talks to whom follows from who needs what). The executor
        `pp.py`, the simulator and the drawings all read this list, so a schedule that you type runs in all three.
Source  GPipe: Huang et al. 2019, arXiv:1811.06965. 1F1B: Narayanan et al. 2021, arXiv:2006.09503 (PipeDream-Flush).
        Interleaved: Narayanan et al. 2021, arXiv:2104.04473. Zero bubble: Qi et al. 2024, arXiv:2401.10241.
Cost    For p ranks, m micro-batches, v stages on each rank, and F = B = W:
                       idle / busy     micro-batches whose activations rank r holds at once
          naive        p-1             1
          gpipe        (p-1) / m       m
          1f1b         (p-1) / m       min(m, p-r)
          interleaved  (p-1) / (v m)   min(v m, (v-1) p + 2 (p-r) - 1), each on 1/v of the rank's layers (v > 1)
          zb-h1        (p-1) / (3 m)   min(m, p)                     (with m >= p; else the bubble is larger)
          zb-h2        0, once full    min(m, 2p-1)                  (with m >= 2p-1)
Read    `model.py` before (what is cut into stages), `simulate.py` and `pp.py` after.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from minipar.facts import Action as Action
from minipar.facts import Kind as Kind
from minipar.order import Compute as Compute
from minipar.order import Receive as Receive
from minipar.order import Schedule as Schedule
from minipar.order import ScheduleError as ScheduleError
from minipar.order import Send as Send
from minipar.order import deadlock as deadlock
from minipar.order import draw as draw
from minipar.order import messages as messages
from minipar.order import validate as validate
from minipar.order import walk as walk

# The schedules. All but the last are one pattern: what differs is how many forwards come before the first backward.


def naive(stages: int, micro_batches: int) -> Schedule:
    """One micro-batch goes all the way forward and back before the next: only one rank ever works.

    rank 0  F0 .  .  .  .  B0 F1 .  .  .  .  B1
    rank 1  .  F0 .  .  B0 .  .  F1 .  .  B1 .
    rank 2  .  .  F0 B0 .  .  .  .  F1 B1 .  .
    """
    return _one_stage_each("naive", stages, micro_batches, warmup=[0] * stages)


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards: every rank must keep the activations of all micro-batches.

    rank 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    rank 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
    rank 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
    """
    return _one_stage_each("gpipe", stages, micro_batches, warmup=[micro_batches] * stages)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Warm up, then alternate, then drain: GPipe's bubble, but stage s holds at most `stages - s` activations.

    rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """
    return _one_stage_each("1f1b", stages, micro_batches, warmup=[stages - s - 1 for s in range(stages)])


def interleaved(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B on `stages` ranks that hold `chunks` stages each: the pipeline fills in steps of 1/chunks the size, so the
    bubble shrinks by that factor, for `chunks` times the messages. F1.0 is micro-batch 1 on the rank's first chunk.

        rank 0  F0.0 F1.0 F0.1 F1.1 .    B0.1 .    B1.1 B0.0 B1.0
        rank 1  .    F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0 .

    Micro-batches advance in rounds of `stages`, as in Megatron-LM: `ValueError` unless their number is a multiple.
    """
    _check(stages=stages, micro_batches=micro_batches, chunks=chunks)
    if chunks == 1:
        return replace(one_f_one_b(stages, micro_batches), name="interleaved")
    if micro_batches % stages:
        down, up = micro_batches // stages * stages, -(-micro_batches // stages) * stages
        choices = f"{down} or {up}" if down else f"{up}"
        raise ValueError(
            f"interleaved: {micro_batches} micro-batches do not fill rounds of {stages} ranks: "
            f"choose {choices} micro-batches, or the schedule 1f1b"
        )
    rounds = [range(first, first + stages) for first in range(0, micro_batches, stages)]
    rows = []
    for rank in range(stages):
        own = range(rank, stages * chunks, stages)
        forwards = [Action(Kind.FORWARD, s, m) for turn in rounds for s in own for m in turn]
        backwards = [Action(Kind.BACKWARD, s, m) for turn in rounds for s in reversed(own) for m in turn]
        # Until its last chunk gets its first micro-batch, and then until that gradient has come back from below.
        rows.append(_alternate(forwards, backwards, warmup=(chunks - 1) * stages + 2 * (stages - rank - 1)))
    return Schedule("interleaved", stages, stages * chunks, micro_batches, tuple(rows))


def zb_h1(stages: int, micro_batches: int) -> Schedule:
    """1F1B with the weight gradients postponed into its bubbles. Nobody waits for W, so rank r may owe r of them; as
    it holds r activations fewer than rank 0, no rank holds more than `stages`.

        rank 0  F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
        rank 1  .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        rank 2  .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """
    return _weights_later("zb-h1", one_f_one_b(stages, micro_batches), delay=1)


def zb_h2(stages: int, micro_batches: int) -> Schedule:
    """Twice as many forwards first, and twice as many weight gradients owed: once the pipeline is full, no rank ever
    waits, and each begins its step as much later as it ends later. The price is memory: `2 stages - 1` micro-batches.

        rank 0  F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4 .  .
        rank 1  .  F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4 .
        rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4
    """
    warmup = [2 * (stages - 1 - s) for s in range(stages)]
    return _weights_later("zb-h2", _one_stage_each("1f1b", stages, micro_batches, warmup), delay=2)


def _weights_later(name: str, plain: Schedule, delay: int) -> Schedule:
    """The same order with weight gradients of their own: rank r may owe `delay * r` of them."""
    rows = []
    for rank, actions in enumerate(plain.actions):
        row, owed = list[Action](), deque[Action]()
        for action in actions:
            row.append(action)
            if action.kind is Kind.BACKWARD:
                owed.append(replace(action, kind=Kind.WEIGHT))
            if len(owed) > delay * rank:
                row.append(owed.popleft())
        rows.append((*row, *owed))
    return replace(plain, name=name, actions=tuple(rows))


NAMES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
}


def by_name(name: str, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The schedule that the command line calls `name`, on `stages` ranks."""
    if name not in NAMES:
        raise ValueError(f"unknown schedule {name!r}: choose from {', '.join(NAMES)}")
    if name == "interleaved":
        return interleaved(stages, micro_batches, chunks)
    if chunks != 1:
        raise ValueError(f"schedule {name} has one stage on each rank, not {chunks} chunks: choose interleaved")
    return NAMES[name](stages, micro_batches)


def _one_stage_each(name: str, stages: int, micro_batches: int, warmup: Sequence[int]) -> Schedule:
    _check(stages=stages, micro_batches=micro_batches)
    rows = []
    for stage in range(stages):
        forwards = [Action(Kind.FORWARD, stage, m) for m in range(micro_batches)]
        backwards = [Action(Kind.BACKWARD, stage, m) for m in range(micro_batches)]
        rows.append(_alternate(forwards, backwards, warmup[stage]))
    return Schedule(name, stages, stages, micro_batches, tuple(rows))


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    pairs = list(zip(forwards[warmup:], backwards, strict=False))
    return (*forwards[:warmup], *chain(*pairs), *backwards[len(pairs) :])


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"a schedule with {name}={number}: choose {name} from 1 up")


def in_flight(schedule: Schedule) -> list[int]:
    """For each rank, the most micro-batches (on one stage each) whose activations it holds at once.

    Activations live from F to B, or to W on a stage that has it. Counted from the order alone.
    """
    peaks = []
    for row in schedule.actions:
        held = peak = 0
        for action in row:
            last = Kind.WEIGHT if action.stage in schedule.splits_backward else Kind.BACKWARD
            held += (action.kind is Kind.FORWARD) - (action.kind is last)
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def parse(text: str, name: str = "typed") -> Schedule:
    """The schedule that a grid shows: a row for each rank, cells like F0, B0, W0 between blanks.

    F0.1 is micro-batch 0 on the rank's chunk 1. "." and "-" are idle and mean nothing: order alone counts. A row may
    begin with "rank 0", "stage 0" or "0:"; text after # is ignored. Raises `ScheduleError` naming row and cell.
    """
    lines = [line for raw in text.splitlines() if (line := raw.partition("#")[0].strip())]
    rows: dict[int, list[tuple[Kind, int, int]]] = {}
    faults = [] if lines else ["there is no row: write one for each rank, such as 'rank 0  F0 F1 B0 B1'"]
    for number, line in enumerate(lines):
        label = re.match(r"(?:rank|stage)\s*(\d+)\s*:?|(\d+)\s*:", line, re.IGNORECASE)
        rank = int(label[1] or label[2]) if label else number
        if rank >= len(lines) or rank in rows:
            faults.append(f"row {number + 1} stands for rank {rank}: label the rows rank 0 to rank {len(lines) - 1}")
        rows[rank] = []
        for place, cell in enumerate(line[label.end() if label else 0 :].split()):
            found = re.fullmatch(r"([FBW])(\d{1,4})(?:\.(\d{1,2}))?", cell)
            if found:
                rows[rank].append((Kind(found[1]), int(found[2]), int(found[3] or 0)))
            elif not set(cell) <= set(".-"):
                faults.append(
                    f"row {number + 1} (rank {rank}), cell {place + 1}: {cell!r} is not an action: write F, B or W and "
                    "the micro-batch, such as F0 (F0.1 on chunk 1), or . for idle"
                )
    if faults:
        raise ScheduleError("this grid is not a schedule", faults)
    ranks, cells = len(rows), list(chain(*rows.values()))
    return Schedule(
        name,
        ranks,
        stages=ranks * max((chunk + 1 for _, _, chunk in cells), default=1),
        micro_batches=max((m + 1 for _, m, _ in cells), default=0),
        actions=tuple(tuple(Action(k, c * ranks + r, m) for k, m, c in rows[r]) for r in range(ranks)),
    )
