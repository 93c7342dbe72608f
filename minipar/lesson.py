"""What the lessons call: a training run in a notebook cell, with everything it leaves behind.

    run = lesson.train(dp=2, pp=2, steps=10)
    run.losses; run.report["communication"]; show.overlay(*run.timelines()); show.messages({"rank 0": run.rank(0)})

Idea    `minipar train` in a cell: the same job on the same real ranks, on a model small enough for a laptop, on real
        text. A bar shows how far it is, the stop button ends it and its ranks, and what is left is the report, the log
        and every rank's spans and messages, for the drawings.
Read    `job.py`, which this calls; `show/`, which draws what it returns.
"""

from __future__ import annotations

import email
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from statistics import median
from typing import Any

from minipar import inject, job, link, metrics
from minipar import report as reports
from minipar.facts import Span, Timeline, Traffic
from minipar.guess import guess as guess
from minipar.guess import reveal as reveal
from minipar.guess import score as score
from minipar.mesh import Mesh, plan
from minipar.message import Message
from minipar.model import GPTConfig
from minipar.notice import Notice
from minipar.train import TrainConfig

TEXT = os.path.dirname(email.__file__)  # some 300 kB of Python's own library: enough to learn from in a minute
SMALL: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 512, "sequence": 64}
SHORT: dict[str, Any] = {"steps": 10, "global_batch": 16, "micro_batches": 4, "lr": 2e-3, "warmup": 5}
DEGREES = ("dp", "pp", "tp")
KEEPING = ("save", "save_every", "save_aside", "resume", "keep", "restarts", "rollback", "init", "data", "backend")


@dataclass
class Run:
    """A training run that is over. `log` has its steps as `metrics.read` gives them, also those of attempts that were
    lost; `report` is what `minipar train --report` writes."""

    config: TrainConfig
    mesh: Mesh
    report: dict[str, Any]
    log: list[dict[str, Any]]
    facts: list[reports.RankFacts]

    @property
    def losses(self) -> list[float]:
        """Of every step of the last attempt: what was before a restart is in the `log`."""
        return self.report["losses"]

    @property
    def seconds(self) -> float:
        """A step's, the median."""
        return median(self.report["step_seconds"])

    def timelines(self) -> list[Timeline]:
        """The last step of the first pipeline, as measured, and as simulated from the times of its actions."""
        return reports.compared(self.config, self.mesh, self.facts)

    def rank(self, number: int) -> tuple[list[Span], list[Message]]:
        """The spans and messages of a rank in the last step: what `show.messages` draws."""
        return self.facts[number].spans[-1], self.facts[number].messages[-1]

    def traffic(self, number: int = 0) -> Traffic:
        """What a rank sent in the last step: calls and bytes by (group, operation)."""
        return self.facts[number].traffic[-1]

    def bytes(self, group: str, number: int = 0) -> int:
        """Payload bytes that a rank handed to the calls of a group in the last step."""
        return sum(volume.bytes for (name, _), volume in self.traffic(number).volumes.items() if name == group)

    def calls(self, group: str, op: str, number: int = 0) -> int:
        """How many calls of an operation a rank made in the last step."""
        return self.traffic(number)[group, op].calls

    def held(self, number: int = 0) -> dict[str, int]:
        """Measured bytes of a rank by account: parameters, gradients, optimizer, activations (their peak). What ZeRO
        needs for a while is in `report["memory"]`, as `buffers`."""
        row = self.report["memory"][number]
        states = {name: row[name] for name in ("parameters", "gradients", "optimizer")}
        return {**states, "activations": row["activations_peak"]}


def train(*, faults: Sequence[str] = (), nodes: int = 0, over: str = "", quiet: bool = False, **options: Any) -> Run:
    """Train on real ranks, and return what happened.

    `options` are the degrees `dp`, `pp`, `tp`; the fields of `GPTConfig` (layers, hidden, heads, vocab, sequence, ...)
    and of `TrainConfig` (steps, zero, schedule, micro_batches, precision, recompute, seed, ...); and save, save_every,
    resume, restarts, rollback, data as in `minipar train`. `faults` are as for --inject; `nodes` and `over` put a slow
    link between nodes, as --nodes and --link do. Raises `ValueError`, one line, for what cannot be.
    """
    work = make_job(options, faults, nodes, over)
    log: list[dict[str, Any]] = []
    degrees = " x ".join(f"{axis} {work.mesh.shape[axis]}" for axis in DEGREES if work.mesh.shape[axis] > 1)
    notice = Notice(f"training on {degrees or 'one rank'}")

    def hear(event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            notice.share = (event["step"] + 1) / work.config.steps
            log.append(metrics.line_of(dict(event)))
        elif event["event"] == "restart":
            log.append(dict(event))
            _say(quiet, f"{event['reason']}: starting again from step {event['step']}", *event["damaged"])
        elif event["event"] == "rollback":
            log.append(dict(event))
            to = "nowhere to go back to" if event["to"] is None else f"back to the weights of step {event['to']}"
            _say(quiet, f"step {event['step']}: the loss is {event['loss']:.2f}, {to}")
        notice.tick()

    try:
        outcome = job.run(work, hear)
    finally:
        notice.close()
    assert outcome is not None
    return Run(work.config, work.mesh, outcome.report, metrics.marked(log), outcome.facts)


def make_job(options: Mapping[str, Any], faults: Sequence[str], nodes: int, over: str) -> job.Job:
    """The job that the options of `train` describe. Raises `ValueError` for an option that there is not."""
    model_names = {field.name for field in fields(GPTConfig)}
    train_names = {field.name for field in fields(TrainConfig)} - {"model"}
    known = {*DEGREES, *model_names, *train_names, *KEEPING}
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            advice = f"do you mean {near[0]}?" if near else "see help(lesson.train)"
            raise ValueError(f"there is no option {name!r}: {advice}")
    given = {**SMALL, **SHORT, **options}
    model = GPTConfig(**{name: given[name] for name in model_names & given.keys()})
    config = TrainConfig(model=model, **{name: given[name] for name in train_names & given.keys()})
    mesh = plan(**{axis: given[axis] for axis in DEGREES if axis in given})
    kept = {"data": TEXT, **{name: given[name] for name in KEEPING if name in given}}
    network = link.Network(nodes or 2, mesh.size, link.parse(over)) if over else None
    wrong = tuple(inject.parse(text) for text in faults)
    return job.Job(config, mesh, trace=True, log=True, inject=wrong, network=network, **kept)


def _say(quiet: bool, *lines: str) -> None:
    if not quiet:
        print("\n".join(lines))
