"""`minipar plan`: the layout of a model on a cluster, and why.

    minipar plan --params 70e9 --gpus 64 --gpu h100 --sequence 4096 --global-batch 1024
    minipar plan --model megatron-1t --gpus 3072 --gpu a100 --sequence 2048 --global-batch 3072 --why tp=16

Read    `planner.py` for how it is found, `reasons.py` for what is said.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.table import Table

from minipar import reasons, sizes
from minipar.arguments import number
from minipar.catalogue import Link
from minipar.files import as_json, check_writable, write_whole
from minipar.layout import EFFICIENCY, Estimate, Layout, micro_batches, model_tflops
from minipar.planner import Plan, choose
from minipar.show import terminal, units

FORM = "tp=16 or tp=16,pp=4 or zero=0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minipar plan`."""
    sizes.add_model(parser)
    sizes.add_cluster(parser, gpu="h100", gpus=64)
    sizes.add_job(parser, sequence=4096, global_batch=1024)
    output = parser.add_argument_group("what is told")
    output.add_argument("--why", action="append", metavar="WHAT", help=f"why another layout loses: {FORM}")
    output.add_argument("--with", dest="wanted", metavar="WHAT", help="only layouts that have this, such as tp=8,pp=4")
    output.add_argument("--top", type=number(1, high=1000), default=5, help="how many to list (default 5)")
    output.add_argument("--json", action="store_true", help="print the plan as JSON, and nothing else")
    output.add_argument("--picture", metavar="FILE", help="draw memory and time of the best: .svg or .png")


def command(options: argparse.Namespace) -> int:
    """`minipar plan`: 0, or `ValueError` for what cannot be."""
    check_writable(options.picture)
    if options.picture:
        from minipar.show import saving

        saving.check_ending(options.picture)
    job, cluster = sizes.job_of(options), sizes.cluster_of(options)
    plan = choose(job, cluster, asked(options.wanted) if options.wanted is not None else {})
    best = plan.best
    others = [(text, choose(job, cluster, asked(text))) for text in options.why or []]
    if options.picture:
        from minipar.show.plans import plan_picture

        write_whole(options.picture, saved(plan_picture(plan, options.top), options.picture))
    if options.json:
        print(as_json(facts(plan, options, others), indent=1), end="")
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else terminal.COLUMNS)
    show(console, plan, options)
    for text, other in others:
        console.print(f"\nWhy not {text}?", markup=False)
        say(console, reasons.why_not(plan, other, text), bullet="")
    if options.tokens:
        say(console, [run_length(plan, best, options.tokens)], bullet="\n")
    if options.picture:
        console.print(f"written: {options.picture}", markup=False, soft_wrap=True)
    return 0


def saved(drawing: Any, path: str) -> Any:
    """The picture as its file's ending wants it."""
    return drawing.to_png() if path.endswith(".png") else drawing.to_svg()


def asked(text: str) -> dict[str, Any]:
    """'tp=16,zero=1' as a mapping. Raises `ValueError`, one line, for anything else."""
    wanted: dict[str, Any] = {}
    for part in text.replace(" ", ",").split(","):
        name, sign, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not part.strip():
            continue
        if not sign or not value.strip():
            raise ValueError(f"{text!r} is no choice: write {FORM}")
        wanted[name] = int(value) if value.strip().lstrip("-").isdigit() else value.strip()
    if not wanted:
        raise ValueError(f"{text!r} chooses nothing: write {FORM}")
    return wanted


# What is answered.


def show(console: Console, plan: Plan, options: argparse.Namespace) -> None:
    """The winner, its accounts, its reasons, and the runners-up."""
    job, cluster, best = plan.job, plan.cluster, plan.best
    say(console, [sizes.described(job.model)], bullet="")
    nodes = -(-cluster.gpus // cluster.per_node)
    machine = (
        f"{cluster.gpus:,} {cluster.gpu.name.upper()} in {units.count(nodes, 'node')}: {linked(cluster.inside)} inside"
        + (f", {linked(cluster.outside)} outside" if nodes > 1 else "")
    )
    say(console, [machine, f"{job.global_batch:,} rows of {job.sequence:,} tokens a step"], bullet="")
    console.print(
        f"\n{best.layout}\n{micro_batches(job, best.layout):,} micro-batches; "
        f"of {plan.tried:,} layouts {plan.fitting:,} fit, and none is faster\n",
        markup=False,
    )
    console.print(accounts(plan, best))
    console.print("\nWhy", markup=False)
    say(console, [*reasons.bottlenecks(plan), *reasons.cuts(plan)])
    console.print("\nWhat the log should show", markup=False)
    say(console, reasons.signals(plan))
    if len(plan.ranked) > 1:
        console.print("\nThe best of other degrees", markup=False)
        console.print(ranking(plan, options.top))
    say(console, [assumptions()], bullet="\n")


def linked(link: Link) -> str:
    """'nvlink4 (450 GB/s)'; a link that was given by its rate has it for a name."""
    return f"{link.name} ({units.size(link.bandwidth)}/s)"


def say(console: Console, lines: list[str], bullet: str = "- ") -> None:
    """Sentences, wrapped to the width."""
    hang = " " * len(bullet) if bullet.strip() else ""
    for line in lines:
        inset = line[: len(line) - len(line.lstrip())]
        glued = line.strip().replace(" %", "\u00a0%")  # a percent sign stays with its number
        for text in wrap(glued, console.width, initial_indent=bullet.lstrip("\n") + inset,
                         subsequent_indent=hang + inset):  # fmt: skip
            console.print(("\n" if bullet == "\n" and text.startswith(line[:4]) else "") + text, markup=False)


def accounts(plan: Plan, best: Estimate) -> Table:
    """Seconds and bytes of the winner."""
    table = Table(box=None, pad_edge=False)
    for heading in ("time of a step", "", "share", "", "memory of the fullest GPU", ""):
        table.add_column(
            heading, justify="left" if heading in ("time of a step", "memory of the fullest GPU") else "right"
        )
    times = [(name, s, units.share(s / best.step_seconds)) for name, s in best.seconds.items()]
    times.append(("in all", best.step_seconds, ""))
    bytes_of = [*best.memory.items(), (f"of {units.size(plan.cluster.gpu.memory_bytes)}", best.bytes)]
    for row in range(max(len(times), len(bytes_of))):
        left = (times[row][0], reasons.duration(times[row][1]), times[row][2]) if row < len(times) else ("", "", "")
        right = (bytes_of[row][0], units.size(bytes_of[row][1])) if row < len(bytes_of) else ("", "")
        table.add_row(*left, "  ", *right)
    return table


def ranking(plan: Plan, top: int) -> Table:
    """The best layout of each product of degrees, fastest first."""
    table = Table(box=None, pad_edge=False)
    for heading in ("dp", "tp", "pp", "zero", "rows", "schedule", "recompute", "step", "TFLOP/s", "memory"):
        table.add_column(heading, justify="left" if heading in ("schedule", "recompute") else "right")
    for found in plan.ranked[:top]:
        layout: Layout = found.layout
        chunks = f" x{layout.chunks}" if layout.chunks > 1 else ""
        table.add_row(
            *(str(n) for n in (layout.dp, layout.tp, layout.pp, layout.zero, layout.micro_batch)),
            layout.schedule + chunks if layout.pp > 1 else "-",
            layout.recompute,
            reasons.duration(found.step_seconds),
            f"{model_tflops(plan.job, plan.cluster, found.step_seconds):.0f}",
            units.size(found.bytes),
        )
    return table


def assumptions() -> str:
    """What all of this rests on."""
    return (
        f"Predicted, not measured: products run at {EFFICIENCY:.0%} of the peak, links at their full rate, and "
        "messages hide behind computing where they can. TFLOP/s count nothing that is computed again."
    )


def run_length(plan: Plan, best: Estimate, tokens: float) -> str:
    """How long the run takes."""
    steps = -(-tokens // (plan.job.global_batch * plan.job.sequence))
    return (
        f"{reasons.amount(tokens)} tokens are {steps:,.0f} steps: {reasons.duration(steps * best.step_seconds)}, if "
        "nothing fails (minipar ledger says what does)"
    )


def facts(plan: Plan, options: argparse.Namespace, others: list[tuple[str, Plan]]) -> dict[str, Any]:
    """The plan for programs: seconds, bytes."""
    return {
        "model": {**asdict(plan.job.model), "parameters": plan.job.model.parameters},
        "gpus": plan.cluster.gpus,
        "gpu": plan.cluster.gpu.name,
        "tried": plan.tried,
        "fitting": plan.fitting,
        "best": listed(plan, plan.best),
        "ranked": [listed(plan, found) for found in plan.ranked[: options.top]],
        "reasons": reasons.cuts(plan),
        "why": {text: reasons.why_not(plan, other, text) for text, other in others},
    }


def listed(plan: Plan, found: Estimate) -> dict[str, Any]:
    """A layout and its accounts."""
    return {
        **asdict(found.layout),
        "micro_batches": micro_batches(plan.job, found.layout),
        "step_seconds": found.step_seconds,
        "seconds": found.seconds,
        "bytes": found.bytes,
        "memory": found.memory,
        "tflops_per_gpu": model_tflops(plan.job, plan.cluster, found.step_seconds),
    }
