"""A training job: what `minipar train` does on ranks, step after step.

Idea    The launcher prepares the text once, then every rank builds its part of the model, reads its rows of each
        batch by the number of the step, and trains. Nothing about the data is sent between ranks. At the end each
        rank hands in its facts, and rank 0 makes the report.
Read    `train.py` before; `report.py` after.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from minipar import before, comm, corpus, faults, inject, link, memory, replay, report, trace
from minipar.before import FULL_SPEED
from minipar.facts import Footprint
from minipar.launch import World, under_torchrun
from minipar.mesh import Mesh
from minipar.report import RankFacts
from minipar.train import Engine, StepResult, TrainConfig, check, learning_rate

if TYPE_CHECKING:
    from minipar import checkpoint

KEPT_STEPS = 5  # spans and messages are kept for the last few steps only
EVENT = "\x1eminipar "  # marks the lines with which rank 0 tells the launcher of its progress

OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Job:
    """A run: how the model is trained, on what, and what is said meanwhile."""

    config: TrainConfig
    mesh: Mesh
    data: str | None = None
    backend: str = ""
    save: str | None = None  # a folder for checkpoints
    save_every: int = 0  # steps; 0: at the end only
    resume: str | None = None  # a folder with checkpoints
    trace: bool = False  # keep the messages of the last steps
    network: link.Network | None = None  # the nodes to which the ranks are dealt, and the slow link between them
    keep: int = 2  # checkpoints
    save_aside: bool = False  # while training goes on
    log: bool = False  # tell of each step what every rank saw of it
    inject: tuple[inject.Fault, ...] = ()
    restarts: int = 0  # how often to go on from the last checkpoint when a rank is lost
    rollback: float = 0.0  # go back when the loss is so many times what it was; 0: never
    init: str | None = None  # a file of weights to begin with


@dataclass
class Outcome:
    """What is left of a run: the report, and every rank's own facts, in their order."""

    report: dict[str, Any]
    facts: list[RankFacts]


def run(job: Job, on_event: OnEvent) -> Outcome | None:
    """Train, on fresh ranks or on torchrun's, and report; None on torchrun's ranks but the first.

    `on_event` is called with what happens: {"event": "corpus", ...}, {"event": "step", "step": 3, "loss": ...}.
    Raises `ValueError`, before any rank is started, for a job that cannot run.
    """
    started = time.time()
    check(job.config, job.mesh.shape)
    inject.check(job.inject, steps=job.config.steps, ranks=job.mesh.size, saves=bool(job.save and job.save_every))
    before.check_network(job)
    comm.choose_backend(int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else job.mesh.size, job.backend)
    if not under_torchrun():
        before.check_memory(job)
        before.check_folders(job)
    prepared = corpus.prepare(job.data, vocab=job.config.model.vocab)
    batches_of(job, prepared)  # raises for a text that is too short
    before.check_text(job, prepared)
    on_event({"event": "corpus", "statistics": str(prepared.statistics)})
    if under_torchrun():
        with World(job.mesh, backend=job.backend) as world:
            found = world.call(_train_under_torchrun, (job, started, on_event), timeout=None)
        return found[0] if os.environ["RANK"] == "0" else None
    return run_again(job, started, on_event)


def run_again(job: Job, started: float, on_event: OnEvent) -> Outcome | None:
    """Run on fresh ranks, and again from the last whole checkpoint when a rank is lost, as often as is allowed."""
    reached = 0

    def hear(event: dict[str, Any]) -> None:
        nonlocal reached
        reached = event["step"] + 1 if event["event"] == "step" else reached
        on_event(event)

    for left in range(job.restarts, -1, -1):
        try:
            return run_once(job, started, hear)
        except faults.RankError as error:
            if not left or all(failure.kind == "raised" for failure in error.failures):
                raise  # what was raised will be raised again
            job = next_attempt(job, error, reached, on_event)
    raise AssertionError


def next_attempt(job: Job, error: faults.RankError, reached: int, on_event: OnEvent) -> Job:
    """The job from where it can go on; what was made to go wrong once, up to the step that it had `reached`, does not
    go wrong again."""
    from minipar import checkpoint

    assert job.save is not None
    saved, damaged = checkpoint.find_whole(job.save)
    if saved is None and job.resume:
        saved = checkpoint.find(job.resume)
    reason = str(error).splitlines()[0]
    on_event({"event": "restart", "reason": reason, "step": saved.step if saved else 0, "damaged": damaged})
    ahead = tuple(fault for fault in job.inject if fault.step > reached)
    return replace(job, resume=str(saved.path) if saved else None, inject=ahead)


def run_once(job: Job, started: float, on_event: OnEvent) -> Outcome | None:
    """One attempt, on fresh ranks."""
    hear = lambda stream, text: _hear(stream, text, on_event)
    with World(job.mesh, backend=job.backend, on_output=hear) as world:
        found = world.call(_train_and_print, (job, started), timeout=None)
    return found[0]


def batches_of(job: Job, prepared: corpus.Corpus) -> corpus.Batches:
    """The run's batches; every rank, of any topology, sees the same."""
    config = job.config
    return corpus.Batches(
        prepared.train, sequence=config.model.sequence, global_batch=config.global_batch, seed=config.seed
    )


# On each rank.


def _train_and_print(mesh: Mesh, job: Job, started: float) -> Outcome | None:
    return _train_and_tell(mesh, job, started, lambda event: print(EVENT + json.dumps(event), flush=True))


def _train_under_torchrun(mesh: Mesh, job: Job, started: float, on_event: OnEvent) -> Outcome | None:
    """torchrun restarts whole commands: from the second time on, go on from the last whole checkpoint."""
    from minipar import checkpoint

    if job.save and mesh.world.wire.attempts:
        saved, _ = checkpoint.find_whole(job.save)
        job = replace(job, resume=str(saved.path) if saved else job.resume, inject=())
    before.check_folders(job)
    return _train_and_tell(mesh, job, started, on_event)


def _hear(stream: str, text: str, on_event: OnEvent) -> None:
    """Lines of a rank, one or many: events, or something to print."""
    printed = []
    for line in text.split("\n"):  # and not splitlines: the mark of an event counts there as the end of a line
        before, marker, event = line.partition(EVENT)
        said = _event(event) if marker else None
        if said is None:
            printed.append(line)
            continue
        on_event(said)
        if before.partition("] ")[2]:  # printed without an end of line, just before
            printed.append(before)
    rest = "\n".join(printed)
    if rest:
        file = getattr(sys, stream)
        file.write(rest)
        file.flush()


def _event(text: str) -> dict[str, Any] | None:
    """What was told; None for something else that was printed, or half an event of a rank that was killed."""
    try:
        event = json.loads(text)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _train_and_tell(mesh: Mesh, job: Job, started: float, tell: OnEvent) -> Outcome | None:
    """Train on this rank; on rank 0 tell of each step, and return the report."""
    say = tell if mesh.world.rank == 0 else lambda event: None
    facts = train(mesh, job, started, say)
    if job.mesh.size > int(os.environ.get("LOCAL_WORLD_SIZE", job.mesh.size)):  # machines have clocks of their own
        facts = trace.on_clock(facts, trace.clock_offset(mesh.world))
    everyone = mesh.world.gather_objects(facts)
    if mesh.world.rank != 0:
        return None
    made = report.make(job.config, mesh, everyone, mesh.world.backend)
    if job.network:
        made["network"] = report.network(job.network, mesh, everyone, FULL_SPEED)
    return Outcome(made, everyone)


def train(mesh: Mesh, job: Job, started: float, say: OnEvent) -> report.RankFacts:
    """All steps on this rank, and what it saw."""
    config, wire = job.config, mesh.world.wire
    prepared = corpus.prepare(job.data, vocab=config.model.vocab)
    if under_torchrun():
        check_same_text(mesh, prepared)
    batches = batches_of(job, prepared)
    engine = Engine(mesh, config)
    begin = bring_weights(job, engine)
    saver = saver_of(job, mesh, prepared)
    rows = config.global_batch // mesh.dp.size
    first = mesh.dp.rank * rows
    wire.messages.clear()
    meter = trace.ActivationMeter(engine.parameters().values())
    facts = report.RankFacts([], [], [], time.time() - started, [], [], [], {}, Footprint(), 0, 0)
    started_as = {"begin": begin, "steps": config.steps, "attempts": mesh.world.wire.attempts}
    say({"event": "start", "seconds": facts.startup_seconds, **started_as})
    for step in range(begin, config.steps):
        if job.network and step in (begin, begin + FULL_SPEED):
            held_back = job.network.link if step > begin else link.UNHINDERED
            link.put_in(mesh.world, replace(job.network, link=held_back))
        start = perf_counter()
        inject.before_step(job.inject, engine, step)
        with meter if step == begin else nullcontext():
            result = engine.step(batches.rows(step, first, first + rows))
        facts.step_seconds.append(perf_counter() - start)
        if job.network and FULL_SPEED // 2 <= step - begin < FULL_SPEED:
            facts.full_speed.append(replay.Step(start, start + facts.step_seconds[-1], list(wire.messages)))
        facts.skipped_steps += [step] * result.skipped
        waited = sum(message.waited for message in wire.messages)
        _collect(facts, result, engine, wire, job.trace)
        say(step_event(job, facts, result, mesh, step, waited))
        if job.rollback and report.has_jumped(facts.losses, job.rollback):
            say({"event": "rollback", **go_back(saver, engine, facts, step)})
        elif saver and (step + 1 == config.steps or (job.save_every and (step + 1) % job.save_every == 0)):
            save(job, saver, engine, facts)
        wire.messages.clear()
    wire.line = None
    held = engine.replicas.held_bytes()
    facts.footprint = trace.footprint(held, engine.optimizer, meter.peak)
    facts.buffers = held.get("buffers", 0)
    facts.peak_bytes = memory.peak_bytes()
    return facts


def bring_weights(job: Job, engine: Engine) -> int:
    """The weights with which to begin, if the job names any; at which step the run is."""
    from minipar import checkpoint, exchange

    if job.resume:
        checkpoint.load(engine, checkpoint.find(job.resume))
    elif job.init:
        exchange.read_into(engine, job.init)
    return engine.step_number


def saver_of(job: Job, mesh: Mesh, prepared: corpus.Corpus) -> checkpoint.Saver | None:
    """What writes the job's checkpoints, with what is needed to read the text again with which it was trained."""
    from minipar import checkpoint

    if not job.save:
        return None
    data = None if job.data is None else os.path.abspath(job.data)
    texts = {"tokenizer.json": prepared.tokenizer.json}
    return checkpoint.Saver(mesh, job.save, keep=job.keep, texts=texts, data=data, aside=job.save_aside)


def save(job: Job, saver: checkpoint.Saver, engine: Engine, facts: report.RankFacts) -> None:
    """A checkpoint, and how long the run stood still for it."""
    start = perf_counter()
    saver.save(engine)
    if engine.step_number == job.config.steps:
        saver.finish()
    facts.save_seconds.append(perf_counter() - start)
    if any(fault.kind == "corrupt-checkpoint" for fault in job.inject):
        saver.finish()
        inject.after_save(saver.folder, engine.mesh.rank, len(facts.save_seconds))


def step_event(
    job: Job, facts: report.RankFacts, result: StepResult, mesh: Mesh, step: int, waited: float
) -> dict[str, Any]:
    """What is told of a step; with a log, also what each rank saw of it, for which all of them are asked."""
    config, seconds = job.config, facts.step_seconds[-1]
    event = {"event": "step", "step": step, "loss": result.loss, "norm": result.gradient_norm}
    event |= {"skipped": result.skipped, "loss_scale": result.loss_scale, "lr": learning_rate(config, step)}
    event |= {"seconds": seconds, "tokens": config.global_batch * config.model.sequence}
    if job.log:
        own = {"seconds": seconds, "busy": seconds - waited, "memory": memory.peak_bytes()}
        event["ranks"] = mesh.world.gather_objects(own)
        event["bytes"] = {f"{group} {op}": v.bytes for (group, op), v in facts.traffic[-1].volumes.items()}
        event |= {"flops": report.flops(config, "none"), "world_size": mesh.size}
    return event


def go_back(saver: checkpoint.Saver | None, engine: Engine, facts: report.RankFacts, step: int) -> dict[str, Any]:
    """Bring weights and optimizer back to before the loss jumped; the data that led there is not seen again."""
    from minipar import checkpoint

    assert saver is not None
    saver.finish()
    saved, _ = checkpoint.find_whole(saver.folder, before=step)
    told = {"step": step, "loss": facts.losses[-1], "to": saved.step if saved else None}
    if saved is not None:
        checkpoint.load(engine, saved)
        engine.step_number = step + 1
    facts.rollbacks.append(step)
    return told


def check_same_text(mesh: Mesh, prepared: corpus.Corpus) -> None:
    """Raise `ValueError` if the machines of a run have different text, or another version of Python's own library."""
    tokens = mesh.world.gather_objects(zlib.crc32(prepared.train.data))
    if len(set(tokens)) > 1:
        names = mesh.world.gather_objects(f"{platform.node()}: {prepared.statistics.name}")
        raise ValueError(
            f"the machines do not read the same text ({', '.join(sorted(set(names)))}): give --data the same files on "
            "each of them"
        )


def _collect(facts: report.RankFacts, result: StepResult, engine: Engine, wire: comm.Wire, keep_messages: bool) -> None:
    """Move the step's messages and spans into the facts, and forget older ones."""
    facts.losses.append(result.loss)
    facts.gradient_norms.append(result.gradient_norm)
    facts.loss_scales.append(result.loss_scale)
    facts.traffic.append(trace.traffic(wire.messages))
    for group, seconds in trace.waited(wire.messages).items():
        facts.waited[group] = facts.waited.get(group, 0.0) + seconds
    facts.spans.append(list(engine.pipeline.spans))
    if keep_messages:
        facts.messages.append(list(wire.messages))
    wire.messages.clear()
    engine.pipeline.spans.clear()
    del facts.traffic[:-KEPT_STEPS], facts.spans[:-KEPT_STEPS], facts.messages[:-KEPT_STEPS]
