"""Faults made on purpose: what goes wrong in long runs, at a step and on a rank of one's choice.

    minipar train --inject nan@5:rank3 --inject kill@10:rank2 --save run --save-every 4 --restarts 1

Idea    Nobody learns from a log in which all is well. Each fault shows the signal by which it is known, and the remedy
        that is there for it.

            fault                what happens                          signal                        remedy
            nan@5:rank3          rank 3's gradients are not numbers    norm not finite, step skipped skip, on all ranks
            spike@8              one update with 100 x the rate        loss and norm jump            --rollback: go back
            kill@10:rank2        rank 2's process is killed            the run ends, rank 2 named    --restarts
            slow@4:rank1         rank 1 sleeps in step 4               step time; who was busy       find the straggler
            corrupt-checkpoint   the first checkpoint is damaged       its checksum                  the one before it

Source  The signals are those of every training log; how often each kind comes: Llama team 2024, section 3.3.4.
Read    `train.py` before, which knows nothing of this; `job.py` after.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from minipar.train import Engine

FORM = "nan@5:rank3, spike@8, kill@10:rank2, slow@4:rank1 (steps from 0) or corrupt-checkpoint"
WILD = 100.0  # times the learning rate, in a step that spikes
SLEEP = 1.0  # seconds, of a rank that is slow


@dataclass(frozen=True)
class Fault:
    """`step` counts from 0; `rank` is of the world, or None for all."""

    kind: str
    step: int = -1
    rank: int | None = None


def parse(text: str) -> Fault:
    """'kill@10:rank2'. Raises `ValueError`, one line, for anything else."""
    if text == "corrupt-checkpoint":
        return Fault(text)
    found = re.fullmatch(r"(nan|spike|kill|slow)@(\d{1,9})(?::rank(\d{1,6}))?", text.strip())
    if not found:
        raise ValueError(f"fault {text!r}: write {FORM}")
    kind, step, rank = found[1], int(found[2]), None if found[3] is None else int(found[3])
    if (kind == "spike") is (rank is not None):
        what = "is of all ranks: leave out" if kind == "spike" else "is of one rank: add"
        raise ValueError(f"fault {text!r} {what} :rank{rank or 0}")
    return Fault(kind, step, rank)


def check(faults: Sequence[Fault], *, steps: int, ranks: int, saves: bool) -> None:
    """Raise `ValueError`, one line, for a fault that would never come."""
    for fault in faults:
        if fault.step >= steps:
            raise ValueError(f"fault {fault.kind}@{fault.step} never comes: choose a step below {steps}")
        if fault.rank is not None and fault.rank >= ranks:
            raise ValueError(f"fault {fault.kind} on rank {fault.rank}: choose a rank from 0 to {ranks - 1}")
        if fault.kind == "corrupt-checkpoint" and not saves:
            raise ValueError("corrupt-checkpoint needs a checkpoint: add --save FOLDER and --save-every N")


def before_step(faults: Sequence[Fault], engine: Engine, step: int) -> None:
    """What goes wrong with this rank in this step."""
    for fault in faults:
        if fault.step != step or fault.rank not in (None, engine.mesh.rank):
            continue
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "slow":
                sleep(SLEEP)
            case "nan":
                _spoil_backward(engine)
            case "spike":
                _spoil_update(engine)


def after_save(folder: Path, rank: int, saved: int) -> None:
    """corrupt-checkpoint: the first checkpoint of a run loses a byte on the disk."""
    if rank or saved != 1:
        return
    newest = max(path for path in folder.glob("step-*") if path.name[5:].isdigit())
    data = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with open(data, "r+b") as file:
        file.seek(data.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def _spoil_backward(engine: Engine) -> None:
    """The next backward of this rank gives gradients that are no numbers, whichever stage it has."""
    pipeline = engine.pipeline
    real = pipeline._backward

    def backward(action: Any, gradient: Tensor | None) -> None:
        scale = pipeline.scale
        pipeline.scale = float("nan")
        real(action, None if gradient is None else gradient * float("nan"))
        pipeline.scale = scale
        vars(pipeline).pop("_backward", None)

    vars(pipeline)["_backward"] = backward


def _spoil_update(engine: Engine) -> None:
    """The next update is taken with a learning rate that is far too large."""
    replicas = engine.replicas
    real = replicas.step

    def step(optimizer: Any) -> None:
        vars(replicas).pop("step", None)
        for options in optimizer.param_groups:
            options["lr"] *= WILD
        real(optimizer)

    vars(replicas)["step"] = step
