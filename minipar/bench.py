"""minipar beside what a user would pick instead, measured so that the machine's moods cancel.

Idea    Two times taken one after the other compare the machine's moods as much as the programs. So both are built in
        the same ranks and take steps in turn, minipar, peer, minipar, peer, a barrier before each; a step takes as
        long as its slowest rank. Each pair gives a ratio, and the median of the ratios is the answer. First of all,
        both must compute the same losses: a faster way to compute something else is no answer at all.

            every rank   A B   A B   A B ...        A minipar, B peer, one pair after another
            ratio        A/B   A/B   A/B            -> median

Cost    Some four minutes on two cores. Nothing is sent but what the two sides send, and barriers between steps.
Source  Georges et al. 2007, 'Statistically Rigorous Java Performance Evaluation', for medians of interleaved runs.
Read    `peers.py` before: what minipar is compared with.

Everything runs on the CPU with one thread a rank. Memory is measured in ranks of its own, where the other side has
never been. Parallel efficiency is against one process on one core with the whole batch, timed among the pairs.
"""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median, quantiles
from textwrap import wrap
from time import perf_counter, process_time
from typing import Any

import torch
from psutil import cpu_count, cpu_times  # type: ignore[import-untyped]

from minipar import catalogue, launch, memory, peers, planner
from minipar.batches import Batch, RandomBatches
from minipar.comm import Message, Wire, describe
from minipar.facts import Span
from minipar.files import as_json, check_writable, write_whole
from minipar.layout import Cluster, Job
from minipar.mesh import Mesh
from minipar.model import GPTConfig
from minipar.peers import WORKS, Work
from minipar.train import Engine, TrainConfig

SAME = 1e-4  # how far, relatively, the losses of both sides may lie apart
CHECKED = 3  # steps whose losses are compared: the second and third depend on gradients and updates as well
ALONE_EVERY = 3  # pairs between two steps of the one process
START_RANKS, START_GOAL = 8, 0.25  # seconds
RECORDING_GOAL = 0.02  # of a step
PLAN_GOAL = 2.0  # seconds
BUSY = 0.1  # share of the cores that other programs may take before it is mentioned
IDLE = {"idle", "iowait", "guest", "guest_nice"}  # what psutil counts that is no computing, or is counted already
MODEL = GPTConfig(layers=8, hidden=256, heads=8, vocab=4096, sequence=128)


@dataclass(frozen=True)
class Settings:
    """What is trained, and for how long. A pipeline cuts the batch into `micro_batches`, the others do not."""

    model: GPTConfig = MODEL
    batch: int = 8
    micro_batches: int = 8
    pairs: int = 15

    def config(self, work: Work) -> TrainConfig:
        return TrainConfig(
            model=self.model,
            global_batch=self.batch,
            micro_batches=self.micro_batches if work.pp > 1 else 1,
            schedule=work.schedule,
            zero=work.zero,
            warmup=0,
            clip=0.0,
        )

    def batches(self) -> RandomBatches:
        return RandomBatches(vocab=self.model.vocab, sequence=self.model.sequence, global_batch=self.batch)

    def tiny(self) -> Settings:
        """The same works over a model of next to no size, to have everything imported and set up."""
        heads = self.model.heads
        return replace(self, model=GPTConfig(layers=4, hidden=4 * heads, heads=heads, vocab=64, sequence=8))


# On ranks.


@dataclass
class Meter:
    """Seconds so far: by the clock, of this process's computing, and of the whole machine's."""

    wall: float = field(default_factory=perf_counter)
    own: float = field(default_factory=process_time)
    machine: float = field(default_factory=lambda: sum(v for k, v in cpu_times()._asdict().items() if k not in IDLE))

    def since(self) -> Meter:
        """What was added from then until now."""
        now = Meter()
        return Meter(now.wall - self.wall, now.own - self.own, now.machine - self.machine)


@dataclass
class Laps:
    """What one rank saw: losses of the first steps, seconds of the others, and what minipar recorded in a step."""

    losses: list[float] = field(default_factory=list)
    peer_losses: list[float | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peer_seconds: list[float] = field(default_factory=list)
    alone_seconds: dict[int, float] = field(default_factory=dict)  # by pair
    meter: Meter = field(default_factory=lambda: Meter(1.0, 0.0, 0.0))  # over all pairs
    records: int = 0
    recording_seconds: float = 0.0
    missing: str = ""


def rows_of(batches: RandomBatches, step: int, mesh: Mesh) -> Batch:
    """This rank's rows of a global batch."""
    rows = batches.global_batch // mesh.dp.size
    return batches.rows(step, mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows)


def race(mesh: Mesh, work: Work, settings: Settings) -> Laps:
    """Build both sides on this rank, compare their first losses, then let them take steps in turn."""
    laps, config, batches = Laps(), settings.config(work), settings.batches()
    try:
        theirs = work.build(mesh, config)
    except (ImportError, AttributeError, TypeError) as error:
        return Laps(missing=f"torch {torch.__version__} lacks it: {error}")
    engine = Engine(mesh, config)
    ours = lambda batch: engine.step(batch).loss
    alone: peers.Step = peers.single(config) if mesh.rank == 0 else lambda batch: None
    for step in range(CHECKED):
        batch = rows_of(batches, step, mesh)
        laps.losses.append(ours(batch))
        loss = theirs(batch)
        laps.peer_losses.append(None if loss is None else float(loss))
        alone(batches[step])
    gc.collect()
    meter = Meter()
    for pair in range(settings.pairs):
        step, batch, whole = CHECKED + pair, rows_of(batches, CHECKED + pair, mesh), batches[CHECKED + pair]
        laps.seconds.append(timed(mesh, ours, batch))
        laps.peer_seconds.append(timed(mesh, theirs, batch))
        if pair % ALONE_EVERY == 0:
            laps.alone_seconds[pair] = timed(mesh, alone, whole)
        mesh.world.wire.messages.clear()
        engine.pipeline.spans.clear()
    laps.meter = meter.since()
    measure_recording(mesh, engine, lambda: ours(rows_of(batches, step, mesh)), laps)
    return laps


def timed(mesh: Mesh, step: Callable[[Batch], object], batch: Batch) -> float:
    """Seconds of a step that all ranks begin together."""
    mesh.world.barrier()
    start = perf_counter()
    step(batch)
    return perf_counter() - start


def measure_recording(mesh: Mesh, engine: Engine, step: Callable[[], object], laps: Laps) -> None:
    """What it costs to record the messages and spans of a step: everything that is done for the record, done again
    without the messages and the computing. The record can't be switched off, so there is no step without it."""
    messages, spans = mesh.world.wire.messages, engine.pipeline.spans
    messages.clear()
    spans.clear()
    step()
    laps.records = len(messages) + len(spans)
    laps.recording_seconds = median(record_again(mesh.world.wire, list(messages), list(spans)) for _ in range(20))


def record_again(wire: Wire, messages: Sequence[Message], spans: Sequence[Span]) -> float:
    """Seconds to record these."""
    kept: list[Message | Span] = []
    start = perf_counter()
    for old in messages:
        message = Message(old.op, old.group, old.tag, old.bytes, perf_counter(), old.peer)
        kept.append(message)
        wire.waiting(describe(message))
        wire.waiting("")
        message.finished = perf_counter()
        message.waited += message.finished - message.launched
    for span in spans:
        kept.append(Span(span.rank, perf_counter(), perf_counter(), span.kind, span.stage, span.micro_batch))
    return perf_counter() - start


def peak_bytes(mesh: Mesh, work: Work, settings: Settings, ours: bool) -> int:
    """By how many bytes this rank's memory grows, at its peak, when one side is built and takes three steps."""

    def train(settings: Settings) -> None:
        config, batches = settings.config(work), settings.batches()
        step = Engine(mesh, config).step if ours else work.build(mesh, config)
        for number in range(3):
            step(rows_of(batches, number, mesh))

    train(settings.tiny())
    gc.collect()
    before = memory.peak_bytes(reset=True)
    train(settings)
    return memory.peak_bytes() - before


def first_message(group: Any) -> float:
    """When this rank has its first answer from all others, on the clock that all processes share."""
    group.all_reduce(torch.ones(1))
    return perf_counter()


# From outside.


@dataclass
class Bench:
    """The rows of the table; what was left out, and why; seconds until 8 warm ranks have talked, if that was asked."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    start_seconds: float | None = None
    plan_seconds: float | None = None


def run_bench(
    settings: Settings | None = None,
    works: Sequence[Work] = WORKS,
    *,
    show: Callable[[str], None] = lambda text: None,
    start: bool = True,
) -> Bench:
    """Run the comparisons, and `show` each line of the table as soon as it is known."""
    settings, bench = settings or Settings(), Bench()
    show(heading(settings))
    for work in works:
        name = f"{work.name} on {work.ranks} ranks"
        row = compare(work, settings)
        if isinstance(row, str):
            bench.skipped[name] = row
            show(f"{work.name:<9}{work.ranks:>5}  skipped: {row}")
        else:
            bench.rows.append(row)
            show(line(row))
    if start:
        bench.start_seconds, bench.plan_seconds = start_seconds(), plan_seconds()
    show(notes(bench))
    return bench


def compare(work: Work, settings: Settings) -> dict[str, Any] | str:
    """One row; or why there is none."""
    with launch.World(work.mesh, backend="gloo", timeout=None) as world:
        laps = world.run(race, work, settings)
    if laps[0].missing:
        return laps[0].missing
    difference = loss_difference(laps)
    if not difference <= SAME:
        return f"computes another loss: relative difference {difference:.1g}"
    peaks = []
    for ours in (True, False):
        with launch.World(work.mesh, backend="gloo", timeout=None) as world:
            peaks.append(max(world.run(peak_bytes, work, settings, ours)) / 1e6)
    return {**figures(work, laps), "loss_difference": difference, "peak_mb": peaks[0], "peer_peak_mb": peaks[1]}


def loss_difference(laps: Sequence[Laps]) -> float:
    """The largest relative difference of the first losses; the peer's are the means over the ranks that see one."""
    by_step = zip(*(lap.peer_losses for lap in laps), strict=True)
    theirs = [mean(loss for loss in losses if loss is not None) for losses in by_step]
    return max(abs(a - b) / abs(b) for a, b in zip(laps[0].losses, theirs, strict=True))


def figures(work: Work, laps: Sequence[Laps]) -> dict[str, Any]:
    """Medians over the pairs; a step takes as long as its slowest rank."""
    ours = [max(seconds) for seconds in zip(*(lap.seconds for lap in laps), strict=True)]
    theirs = [max(seconds) for seconds in zip(*(lap.peer_seconds for lap in laps), strict=True)]
    alone = laps[0].alone_seconds
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "work": work.name,
        "peer": work.peer,
        "ranks": work.ranks,
        "ratio": median(ratios),
        "goal": work.goal,
        "met": median(ratios) <= work.goal,
        "milliseconds": 1e3 * median(ours),
        "peer_milliseconds": 1e3 * median(theirs),
        "ratio_quartiles": [low, high],
        "pairs": len(ratios),
        "efficiency": median(seconds / (work.ranks * ours[pair]) for pair, seconds in alone.items()),
        "single_milliseconds": 1e3 * median(alone.values()),
        "records_per_step": max(lap.records for lap in laps),
        "others_share": others_share([lap.meter for lap in laps]),
        "recording_share": max(lap.recording_seconds for lap in laps) / median(ours),
    }


def others_share(meters: Sequence[Meter]) -> float:
    """The share of the cores' time that went to other programs than the ranks."""
    rest = meters[0].machine - sum(meter.own for meter in meters)
    return float(max(0.0, rest / (cpu_count() * meters[0].wall)))


def start_seconds(times: int = 5) -> float:
    """From the call of `minipar.run` to the first answer that 8 ranks give each other, when the server is warm."""
    launch.run(first_message, START_RANKS, backend="gloo")
    seconds = []
    for _ in range(times):
        start = perf_counter()
        seconds.append(max(launch.run(first_message, START_RANKS, backend="gloo")) - start)
    return median(seconds)


def plan_seconds() -> float:
    """How long it takes to try the layouts of 405 billion parameters on 16,384 GPUs."""
    gpu = catalogue.gpu("h100")
    cluster = Cluster(gpu, 16_384, 8, catalogue.link(gpu.inside), catalogue.link(gpu.outside))
    start = perf_counter()
    planner.choose(Job(catalogue.model("llama3-405b"), 8192, 2048), cluster)
    return perf_counter() - start


# Shown.


def heading(settings: Settings) -> str:
    """What is measured, and the head of the table."""
    model = settings.model
    return (
        f"minipar beside torch {torch.__version__}, {cpu_count()} cores, one thread a rank, steps in turn.\n"
        f"GPT of {model.layers} layers, hidden {model.hidden}, vocabulary {model.vocab}; batch {settings.batch} x "
        f"{model.sequence}, AdamW, float32.\n"
        f"Medians of {settings.pairs} pairs; ratio = minipar / peer; efficiency against one process.\n\n"
        "work     ranks  minipar ms  peer ms  ratio  goal        peak MB  peer efficiency"
    )


def line(row: dict[str, Any]) -> str:
    """A row of the table, 80 columns."""
    return (
        f"{row['work']:<9}{row['ranks']:>5}{row['milliseconds']:>12.1f}{row['peer_milliseconds']:>9.1f}"
        f"{row['ratio']:>7.3f}{row['goal']:>6.2f}  {'ok' if row['met'] else 'short':<5}"
        f"{row['peak_mb']:>8.0f}{row['peer_peak_mb']:>6.0f}{row['efficiency']:>11.0%}"
    )


def notes(bench: Bench) -> str:
    """What stands below the table."""
    lines = [""]
    names: dict[str, str] = {row["work"]: row["peer"] for row in bench.rows}
    lines += [f"{work:<9}against {peer}" for work, peer in names.items()]
    if bench.rows:
        worst = max(row["loss_difference"] for row in bench.rows)
        share, others = (max(row[key] for row in bench.rows) for key in ("recording_share", "others_share"))
        lines += [
            f"Before timing, both sides gave the same losses for {CHECKED} steps, to {worst:.0e} relative",
            f"(allowed: {SAME:.0e}). minipar also counts tokens and computes the gradient's norm.",
            f"Recording messages and spans takes {share:.2%} of a step at most (goal {RECORDING_GOAL:.0%}): all that",
            "is done for the record, timed by itself, since it cannot be switched off.",
        ]
        if others > BUSY:
            lines.append(f"Other programs took up to {others:.0%} of the cores meanwhile: all this is less certain.")
    if bench.start_seconds is not None:
        word = "ok" if bench.start_seconds <= START_GOAL else "short"
        lines.append(
            f"{START_RANKS} warm ranks have talked {bench.start_seconds:.2f} s after the call "
            f"(goal {START_GOAL:.2f} s): {word}."
        )
    if bench.plan_seconds is not None:
        word = "ok" if bench.plan_seconds <= PLAN_GOAL else "short"
        lines.append(f"A plan for 16,384 GPUs takes {bench.plan_seconds:.2f} s (goal {PLAN_GOAL:.2f} s): {word}.")
    short = [f"{row['work']} on {row['ranks']} ranks" for row in bench.rows if not row["met"]]
    lines += wrap(f"Short of the goal: {', '.join(short)}.", 80) if short else []
    return "\n".join(lines)


def chosen(only: str | None) -> list[Work]:
    """The works that are named in "dp,tp,pp gpipe", each by its name or by its first word."""
    if only is None:
        return list(WORKS)
    asked = [name.strip().replace("-", " ") for name in only.split(",")]
    known = {name for work in WORKS for name in (work.name, work.name.split()[0])}
    for name in asked:
        if name not in known:
            raise ValueError(f"unknown work {name!r}: choose from {', '.join(sorted(known))}")
    return [work for work in WORKS if work.name in asked or work.name.split()[0] in asked]


def command(options: Namespace) -> int:
    """`minipar bench`: `options` has `only`, `pairs`, `report` and `json`."""
    if launch.under_torchrun():
        raise ValueError("minipar bench starts ranks of its own: call it without torchrun")
    check_writable(options.report)
    settings = replace(Settings(), pairs=options.pairs or Settings.pairs)
    show: Callable[[str], None] = (lambda text: None) if options.json else lambda text: print(text, flush=True)
    bench = run_bench(settings, chosen(options.only), show=show)
    if options.report:
        write_whole(options.report, as_json(bench.rows, indent=1))
    if options.json:
        print(as_json(bench.rows, indent=1), end="")
    return 0
