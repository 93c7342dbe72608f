"""What must hold before a job's ranks start: memory, a network that can be slowed, checkpoints, the same text.

Idea    A run that cannot work should say so in its first second, in one line that says what to change, and before it
        has touched a file.
Read    `job.py`, which asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]

from minipar import corpus, ledger, report
from minipar import schedule as schedules
from minipar.launch import RANK_BYTES, under_torchrun
from minipar.precision import ACCOUNTS

if TYPE_CHECKING:
    from minipar.job import Job

FULL_SPEED = 6  # steps before a slow link is put in; the last half of them is what the prediction stands on


def check_text(job: Job, prepared: corpus.Corpus) -> None:
    """Raise `ValueError` if the text is not that with which the checkpoint was trained."""
    from minipar import checkpoint

    if not job.resume:
        return
    saved = checkpoint.find(job.resume)
    tokenizer = saved.path / "tokenizer.json"
    if tokenizer.is_file() and tokenizer.read_text(encoding="utf-8") != prepared.tokenizer.json:
        known = f"--data {saved.data}" if saved.data else "no --data"
        raise ValueError(
            f"{saved.path} was trained on other text, whose tokens mean something else: go on with {known}, or begin "
            "with its weights: minipar export, then --init"
        )


def check_memory(job: Job) -> None:
    """Raise `ValueError` if weights, gradients, optimizer states and activations of the ranks don't fit into memory."""
    shape, config = report.shape_of(job.config, job.mesh), job.config
    order = schedules.by_name(config.schedule, shape.pp, shape.micro_batches, config.chunks)
    need = job.mesh.size * RANK_BYTES
    for stage in range(shape.pp):
        values = ledger.rank_parameters(shape, stage)
        state = ledger.model_state_bytes(values, dp=shape.dp, zero=shape.zero, precision=ACCOUNTS[config.precision])
        need += shape.dp * shape.tp * (state.total + ledger.peak_activation_bytes(shape, order, stage))
    free = psutil.virtual_memory().available
    if need > free:
        raise ValueError(
            f"{job.mesh.size} ranks of this model need about {need / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB "
            "are free: choose a smaller model or batch, more micro-batches, fewer ranks, or a higher --zero"
        )


def check_network(job: Job) -> None:
    """Raise `ValueError` if a slow link is asked for where there can be none, or for too short a time."""
    if job.network is None:
        return
    if under_torchrun():
        raise ValueError("the ranks of torchrun have a network of their own: leave out --nodes and --link")
    if job.backend == "nccl":
        raise ValueError("only messages of gloo are slowed down: leave out --backend nccl, or --nodes and --link")
    begin = 0
    if job.resume:
        from minipar import checkpoint

        begin = checkpoint.find(job.resume).step
    if job.config.steps - begin <= FULL_SPEED:
        raise ValueError(
            f"--steps {job.config.steps} is too short for --link: the first {FULL_SPEED} steps run at full speed, to "
            f"predict the others; choose more than {begin + FULL_SPEED}"
        )


def check_folders(job: Job) -> None:
    """Raise `ValueError` if there is nothing to resume from or to begin with, or nowhere to save to."""
    from minipar import checkpoint, exchange

    if job.init and job.resume:
        raise ValueError("--init and --resume both bring weights: give one of them")
    if job.init:
        exchange.check(job.init, job.config.model)
    if job.resume:
        saved = checkpoint.find(job.resume)
        checkpoint.check(saved, job.config)
        checkpoint.check_whole(saved)
        if saved.step >= job.config.steps:
            raise ValueError(f"{saved.path} is at step {saved.step} already: choose --steps above that to go on")
    if job.save:
        checkpoint.check_place(job.save)
        checkpoint.check_free(job.save, saved.step if job.resume else 0)
