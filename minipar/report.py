"""What a run did, beside what was predicted: as data for programs, and as a table for people.

Idea    Each rank hands in its facts; the report lays them beside the ledger's and the simulator's predictions. Bytes
        must agree exactly. Memory agrees up to padding and Adam's step counters. The bubble is measured with real
        computation on shared cores, so there the difference is information, not an error.
Read    `trace.py` and `ledger.py`, the two sides of each comparison.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from math import isfinite
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from minipar import ledger, pp, replay, trace
from minipar import schedule as schedules
from minipar.comm import Message
from minipar.facts import Action, Footprint, Kind, Span, Timeline, Traffic
from minipar.link import Network
from minipar.mesh import Mesh
from minipar.precision import ACCOUNTS, DTYPES
from minipar.simulate import simulate
from minipar.train import TrainConfig, micro_batches_of


@dataclass
class RankFacts:
    """What one rank saw. `traffic` and `spans` are of the last few steps; `waited` is seconds by group."""

    losses: list[float]
    gradient_norms: list[float]
    step_seconds: list[float]
    startup_seconds: float
    traffic: list[Traffic]
    spans: list[list[Span]]
    messages: list[list[Message]]  # kept only for a trace
    waited: dict[str, float]
    footprint: Footprint
    buffers: int
    peak_bytes: int
    full_speed: list[replay.Step] = field(default_factory=list)  # the last steps before a slow link
    loss_scales: list[float] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)
    rollbacks: list[int] = field(default_factory=list)
    save_seconds: list[float] = field(default_factory=list)  # for which the run stood still, at each checkpoint


def shape_of(config: TrainConfig, mesh: Mesh) -> ledger.Shape:
    """The run as the ledger needs it."""
    model, degrees = config.model, mesh.shape
    stages = degrees["pp"] * config.chunks
    return ledger.Shape(
        hidden=model.hidden,
        heads=model.heads,
        vocab=model.vocab,
        sequence=model.sequence,
        stage_layers=tuple(len(layers) for layers in pp.split_layers(model, stages)),
        kv_heads=model.kv_heads,
        tied=model.tied,
        global_batch=config.global_batch,
        micro_batches=micro_batches_of(config, degrees["dp"]),
        zero=config.zero,
        sequence_parallel=config.sequence_parallel,
        value_bytes=DTYPES[config.precision].itemsize,
        recompute=config.recompute,
        bucket_bytes=config.bucket_bytes,
        **degrees,
    )


def make(config: TrainConfig, mesh: Mesh, facts: Sequence[RankFacts], backend: str) -> dict[str, Any]:
    """The report of a run, from the facts of all ranks in their order: what `--report` writes."""
    shape, model = shape_of(config, mesh), config.model
    seconds = [max(steps) for steps in zip(*(rank.step_seconds for rank in facts), strict=True)]
    tokens = config.global_batch * model.sequence
    return {
        "mesh": {axis: mesh.shape[axis] for axis in ("pp", "dp", "tp")},
        "world_size": mesh.size,
        "backend": backend,
        "parameters": ledger.parameters(
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            vocab=model.vocab,
            sequence=model.sequence,
            kv_heads=model.kv_heads,
            tied=model.tied,
        ),
        "tokens_per_step": tokens,
        "losses": facts[0].losses,
        "grad_norms": facts[0].gradient_norms,
        "loss_scales": facts[0].loss_scales,
        "skipped_steps": facts[0].skipped_steps,
        "rollbacks": facts[0].rollbacks,
        "save_seconds": facts[0].save_seconds,
        "step_seconds": seconds,
        "tokens_per_second": tokens / median(seconds) if seconds else 0.0,
        "flops_per_step": flops(config, "none"),
        "computed_flops_per_step": flops(config, config.recompute),
        "startup_seconds": max(rank.startup_seconds for rank in facts),
        "bubble": bubble(config, mesh, facts),
        "communication": communication(shape, mesh, facts),
        "memory": memory(config, shape, mesh, facts),
        "waiting_seconds": {
            group: mean(rank.waited.get(group, 0.0) for rank in facts)
            for group in sorted({group for rank in facts for group in rank.waited})
        },
        "micro_batches": shape.micro_batches,
        "stage_layers": list(shape.stage_layers),
        "config": asdict(config),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def flops(config: TrainConfig, recompute: str) -> float:
    """FLOPs of a step over the global batch, of the model or with what is computed again."""
    model = config.model
    return ledger.step_flops(
        layers=model.layers,
        hidden=model.hidden,
        vocab=model.vocab,
        sequence=model.sequence,
        global_batch=config.global_batch,
        recompute=recompute,
    )


def has_jumped(losses: Sequence[float], factor: float) -> bool:
    """Whether the last loss is not finite, or `factor` times the median of the eight before it (of four at least)."""
    *before, last = losses[-9:]
    if not isfinite(last):
        return True
    return len(before) >= 4 and last > factor * median(before)


def timelines(mesh: Mesh, facts: Sequence[RankFacts], step: int = -1) -> list[Timeline]:
    """What the ranks of each pipeline did in one step, on one clock; `step` counts among the last few."""
    return [
        trace.timeline(
            [
                [Span(place, s.start, s.end, s.kind, s.stage, s.micro_batch) for s in facts[rank].spans[step]]
                for place, rank in enumerate(ranks)
            ]
        )
        for ranks in mesh.groups("pp")
    ]


def bubble(config: TrainConfig, mesh: Mesh, facts: Sequence[RankFacts]) -> dict[str, float]:
    """Idle time over busy time of the pipelines: as measured; as simulated with the seconds that each stage took; and
    for equal stages. The median over the last steps, the mean over the pipelines."""
    order = schedules.by_name(
        config.schedule, mesh.shape["pp"], micro_batches_of(config, mesh.shape["dp"]), config.chunks
    )
    measured, predicted = [], []
    for step in range(len(facts[0].spans)):
        seen = timelines(mesh, facts, step)
        measured.append(mean(timeline.bubble for timeline in seen))
        predicted.append(mean(_simulated(order, timeline).bubble for timeline in seen))
    ideal = simulate(order, forward=1.0, backward=1.0, weight=1.0).bubble
    return {"measured": median(measured), "predicted": median(predicted), "ideal": ideal}


def compared(config: TrainConfig, mesh: Mesh, facts: Sequence[RankFacts]) -> list[Timeline]:
    """The last step of the first pipeline, as measured, and as simulated from the times of its actions."""
    order = schedules.by_name(
        config.schedule, mesh.shape["pp"], micro_batches_of(config, mesh.shape["dp"]), config.chunks
    )
    seen = timelines(mesh, facts)[0]
    return [seen, _simulated(order, seen)]


def _simulated(order: schedules.Schedule, seen: Timeline) -> Timeline:
    """The schedule with each action as long as it really took."""
    took = {span.action: span.seconds for span in seen.spans}
    cost = lambda kind: lambda stage, micro_batch: took.get(Action(kind, stage, micro_batch), 0.0)
    return simulate(order, forward=cost(Kind.FORWARD), backward=cost(Kind.BACKWARD), weight=cost(Kind.WEIGHT))


def communication(shape: ledger.Shape, mesh: Mesh, facts: Sequence[RankFacts]) -> list[dict[str, Any]]:
    """A row for each group and operation: calls and payload bytes of a step, beside the ledger's bytes. `by_rank`
    has all ranks; the row itself shows the one where count and prediction differ most, or else that sends most."""
    measured, predicted = [], []
    for rank, fact in enumerate(facts):
        place = mesh.coordinates(rank)
        measured.append(fact.traffic[-1])
        predicted.append(ledger.communication_bytes(shape, dp_rank=place["dp"], pp_rank=place["pp"]))
    rows = []
    for key in sorted({key for t in measured for key in t.volumes} | {key for p in predicted for key in p}):
        by_rank = [
            {"rank": rank, "bytes": seen[key].bytes, "predicted": expected.get(key, 0)}
            for rank, (seen, expected) in enumerate(zip(measured, predicted, strict=True))
        ]
        shown = max(by_rank, key=lambda row: (abs(row["bytes"] - row["predicted"]), row["bytes"]))
        rows.append(
            {
                "group": key[0],
                "op": key[1],
                "calls_per_step": measured[shown["rank"]][key].calls,
                "bytes_per_step": shown["bytes"],
                "predicted_bytes_per_step": shown["predicted"],
                "rank": shown["rank"],
                "by_rank": by_rank,
            }
        )
    return rows


def memory(config: TrainConfig, shape: ledger.Shape, mesh: Mesh, facts: Sequence[RankFacts]) -> list[dict[str, Any]]:
    """A row for each rank: bytes of parameters, gradients, optimizer and the peak of activations, with predictions."""
    order = schedules.by_name(config.schedule, shape.pp, shape.micro_batches, config.chunks)
    rows = []
    for rank, fact in enumerate(facts):
        pp_rank = mesh.coordinates(rank)["pp"]
        state = ledger.model_state_bytes(
            ledger.rank_parameters(shape, pp_rank), dp=shape.dp, zero=shape.zero, precision=ACCOUNTS[config.precision]
        )
        rows.append(
            {
                "rank": rank,
                "parameters": fact.footprint.parameters,
                "gradients": fact.footprint.gradients,
                "optimizer": fact.footprint.optimizer,
                "activations_peak": fact.footprint.activations,
                "buffers": fact.buffers,
                "process_peak": fact.peak_bytes,
                "predicted": {
                    "parameters": state.weights,
                    "gradients": state.gradients,
                    "optimizer": state.optimizer,
                    "activations_peak": ledger.peak_activation_bytes(shape, order, pp_rank),
                },
            }
        )
    return rows


def network(slow: Network, mesh: Mesh, facts: Sequence[RankFacts], steps: int) -> dict[str, Any]:
    """A step over the slow link, measured and predicted, after so many `steps` at full speed. The prediction knows
    nothing of the link but its latency and bandwidth: see `replay.py`."""
    seconds = [max(taken) for taken in zip(*(rank.step_seconds for rank in facts), strict=True)]
    full = list(zip(*(rank.full_speed for rank in facts), strict=True))
    return {
        "nodes": slow.nodes,
        "link": str(slow.link),
        "bytes_per_second": slow.link.bandwidth,
        "latency_seconds": slow.link.latency,
        "steps_at_full_speed": steps,
        "full_speed_step_seconds": median(max(one.end - one.begin for one in step) for step in full),
        "measured_step_seconds": median(seconds[steps:]),
        "predicted_step_seconds": median(replay.predict(step, cache(mesh.members), slow) for step in full),
    }


# For people.


def human(size: float) -> str:
    """Bytes, with a unit: 1 kB is 1000 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def steps(some: Sequence[Any]) -> str:
    """ "1 step", "4 steps"."""
    return f"{len(some)} step{'s' * (len(some) != 1)}"


def show(report: dict[str, Any], console: Console) -> None:
    """The closing tables of `minipar train`, in at most 80 columns."""
    mesh, bubble = report["mesh"], report["bubble"]
    first, last = report["losses"][0], report["losses"][-1]
    console.print(
        f"loss {first:.3f} -> {last:.3f} in {steps(report['losses'])} of {report['tokens_per_step']:,} tokens, "
        f"{report['tokens_per_second']:,.0f} tokens/s"
    )
    console.print(
        f"dp {mesh['dp']} x pp {mesh['pp']} x tp {mesh['tp']} on {report['world_size']} {report['backend']} ranks, "
        f"{report['parameters']:,} parameters, layers by stage {report['stage_layers']}"
    )
    config = report["config"]
    if config["precision"] != "fp32" or config["recompute"] != "none" or report["skipped_steps"]:
        again = report["computed_flops_per_step"] / report["flops_per_step"] - 1
        skipped = f"{steps(report['skipped_steps'])} skipped, for gradients that were not finite"
        console.print(
            f"precision {config['precision']}; recompute {config['recompute']}"
            + (f" ({again:.0%} more FLOPs)" if again else "")
            + (f"; {skipped}" if report["skipped_steps"] else "")
        )
    if report["rollbacks"]:
        console.print(f"went back after {steps(report['rollbacks'])}, whose loss had jumped")
    if mesh["pp"] > 1:
        console.print(
            f"bubble {bubble['measured']:.0%} of busy time; from the stages' own times {bubble['predicted']:.0%}, "
            f"with equal stages {bubble['ideal']:.0%}"
        )
    if "network" in report:
        net = report["network"]
        full, measured, predicted = (net[f"{key}_step_seconds"] for key in ("full_speed", "measured", "predicted"))
        console.print(
            f"{net['nodes']} nodes joined by {net['link']}: a step takes {1e3 * measured:.0f} ms, predicted "
            f"{1e3 * predicted:.0f} ms ({predicted / measured - 1:+.0%});\n"
            f"the first {net['steps_at_full_speed']} steps, at full speed, {1e3 * full:.0f} ms"
        )
    console.print()
    _show_messages(report, console)
    _show_memory(report, console)


def _show_messages(report: dict[str, Any], console: Console) -> None:
    table = Table(title="Messages of one step (one rank's payload)", title_justify="left", box=None, pad_edge=False)
    for name in ("group", "operation", "calls", "bytes", "predicted", ""):
        table.add_column(name, justify="left" if name in ("group", "operation", "") else "right")
    for row in report["communication"]:
        same = row["bytes_per_step"] == row["predicted_bytes_per_step"]
        table.add_row(
            row["group"],
            row["op"],
            str(row["calls_per_step"]),
            f"{row['bytes_per_step']:,}",
            f"{row['predicted_bytes_per_step']:,}",
            "equal" if same else f"differ on rank {row['rank']}",
        )
    if report["communication"]:
        console.print(table)
        console.print()


def _show_memory(report: dict[str, Any], console: Console) -> None:
    accounts = ("parameters", "gradients", "optimizer", "activations_peak")
    table = Table(title="Memory by rank: measured / predicted", title_justify="left", box=None, pad_edge=False)
    table.add_column("ranks")
    for account in accounts:
        table.add_column(account.replace("_", " "), justify="right")
    alike: dict[tuple[str, ...], list[int]] = {}
    for row in report["memory"]:
        cells = tuple(f"{human(row[a])} / {human(row['predicted'][a])}" for a in accounts)
        alike.setdefault(cells, []).append(row["rank"])
    for cells, ranks in alike.items():
        table.add_row(",".join(map(str, ranks)), *cells)
    console.print(table)
    if report["config"]["model"]["dropout"]:
        console.print("Predicted activations are those without dropout: its masks and attention's scores come on top.")
