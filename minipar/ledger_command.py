"""`minipar ledger`: the accounts of a model on a cluster.

    minipar ledger --params 7e9 --tokens 1e12 --cluster-flops 1e18
    minipar ledger --model llama3-70b --tokens 15T --gpu h100 --gpus 1024 --tp 8 --zero 1

Idea    Four accounts and communication, each with the textbook's figure and with what real life takes off it: an
        answer lands on one of them, and says which signal of the log belongs to it.
Read    `compute.py`, `data.py`, `stability.py` and `layout.py` for the arithmetic.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from minipar import catalogue, compute, data, quantities, reasons, sizes, stability
from minipar.architecture import Architecture
from minipar.arguments import number
from minipar.collectives import collective_seconds, ring_bytes
from minipar.compute import RECOMPUTE
from minipar.files import as_json
from minipar.layout import PER_VALUE, Cluster, Job, Layout, layers_of, memory_bytes, micro_batches, replica_messages
from minipar.ledger import model_state_bytes
from minipar.planner import SCHEDULES
from minipar.show import terminal, units

SIGNALS = {
    "compute": "MFU, and step time that jitters",
    "memory": "peak memory by account; out of memory",
    "communication": "seconds of a step in which ranks wait for messages",
    "data": "a score on the test set that is too good; duplicates",
    "stability": "gradient norm, loss spikes, overflow and NaN, loss scale, restarts",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minipar ledger`."""
    sizes.add_model(parser)
    sizes.add_cluster(parser, gpu="a100")
    sizes.add_job(parser, sequence=2048, global_batch=1024)
    group = parser.add_argument_group("how the work is cut")
    for name in ("dp", "tp", "pp"):
        group.add_argument(f"--{name}", type=number(1, high=10**6), help="degree")
    group.add_argument("--zero", type=number(0, high=3), default=0, help="ZeRO stage: 0, 1, 2 or 3")
    group.add_argument("--micro-batch", type=number(1, high=10**6), default=1, help="rows (default 1)")
    group.add_argument("--recompute", choices=RECOMPUTE, default="none", help="activations (default none)")
    group.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="default 1f1b")
    group.add_argument("--chunks", type=number(1, high=1000), default=1, help="stages on each rank, for interleaved")
    group = parser.add_argument_group("what real life takes off")
    group.add_argument("--cluster-flops", type=sizes.reads(quantities.speed), help="the peak of all GPUs: 1e18")
    group.add_argument("--mfu", type=share, default=0.4, help="share of the peak that steps reach (default 0.4)")
    group.add_argument("--waiting", type=part, default=0.02, help="share of time for data loading (default 0.02)")
    seconds = sizes.reads(quantities.duration, 1e9)
    group.add_argument("--save", type=seconds, default=60.0, metavar="TIME", help="of a checkpoint (default 60s)")
    group.add_argument("--restart", type=seconds, default=600.0, metavar="TIME", help="after a failure (default 10min)")
    group.add_argument("--failures", type=seconds, metavar="TIME", help="mean time between them (default: Llama 3's)")
    group.add_argument("--unique", type=sizes.reads(quantities.count, 1e18), help="tokens of different text there are")
    parser.add_argument("--json", action="store_true", help="print the accounts as JSON, and nothing else")


def share(text: str) -> float:
    """An argparse type: a share, above 0 and up to 1 (or 100 %)."""
    try:
        value = float(text.rstrip(" %")) / (100 if text.rstrip().endswith("%") else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write 0.4 or 40%") from None
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share: choose above 0 and up to 1, or 100%")
    return value


def part(text: str) -> float:
    """An argparse type: a share from 0 to below 1."""
    if text.strip().rstrip(" %") in ("0", "0.0"):
        return 0.0
    value = share(text)
    if value == 1:
        raise argparse.ArgumentTypeError(f"{text} leaves no time for steps: choose below 1")
    return value


@dataclass
class Account:
    """Lines of an account: what, how much in words, and why; `facts` are the same for programs."""

    name: str
    lines: list[tuple[str, str, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, what: str, value: float, said: str, why: str = "", key: str = "") -> None:
        """One more line."""
        self.lines.append((what, said, why))
        self.facts[key or what.replace(" ", "_").replace(",", "")] = value


@dataclass(frozen=True)
class Asked:
    """What the options say, put together."""

    model: Architecture
    parameters: float
    tokens: float | None
    cluster: Cluster
    cluster_flops: float
    job: Job
    layout: Layout


def command(options: argparse.Namespace) -> int:
    """`minipar ledger`: 0, or `ValueError` for what cannot be."""
    asked = understood(options)
    accounts = [make(asked, options) for make in (compute_account, memory_account, communication_account)]
    accounts += [data_account(asked, options), stability_account(asked, options)]
    if options.json:
        print(as_json({account.name: account.facts for account in accounts}, indent=1), end="")
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else terminal.COLUMNS)
    console.print(sizes.described(asked.model), markup=False)
    console.print(f"{cluster_line(asked)}; {asked.layout}", markup=False)
    for account in accounts:
        console.print(f"\n{account.name.capitalize()}: watch {SIGNALS[account.name]}", markup=False)
        console.print(drawn(account))
    return 0


def understood(options: argparse.Namespace) -> Asked:
    """The options, checked against each other. Raises `ValueError`, one line, for what doesn't fit together."""
    model = sizes.model_of(options, options.sequence)
    gpu = catalogue.gpu(options.gpu)
    degrees = [getattr(options, name) or 1 for name in ("dp", "tp", "pp")]
    if options.gpus and options.cluster_flops and abs(options.cluster_flops / options.gpus / gpu.peak_flops - 1) > 0.05:
        raise ValueError(
            f"{options.gpus:,} {gpu.name.upper()} have {options.gpus * gpu.peak_flops:.3g} FLOP/s and not "
            f"{options.cluster_flops:.3g}: leave out --gpus or --cluster-flops"
        )
    if options.gpus is None:
        least = degrees[0] * degrees[1] * degrees[2]
        options.gpus = max(least, round(options.cluster_flops / gpu.peak_flops)) if options.cluster_flops else least
        options.gpus_per_node = min(options.gpus_per_node, options.gpus)
        if options.gpus > options.gpus_per_node:  # as many whole machines as have at least that peak
            each = max(options.gpus_per_node, least)
            options.gpus = -(-options.gpus // each) * each
    cluster = sizes.cluster_of(options)
    dp, odd = divmod(cluster.gpus, degrees[1] * degrees[2])
    if odd or (options.dp and options.dp != dp):
        raise ValueError(
            f"dp {options.dp or '?'} x tp {degrees[1]} x pp {degrees[2]} is not {cluster.gpus:,} GPUs: choose degrees "
            "that multiply to them, or leave --gpus out"
        )
    if model.heads % degrees[1] or degrees[2] * options.chunks > model.layers:
        raise ValueError(
            f"tp={degrees[1]} must divide {model.heads} heads, and pp x chunks = {degrees[2] * options.chunks} stages "
            f"need as many of the {model.layers} layers: choose other degrees"
        )
    rows = dp * options.micro_batch
    if options.global_batch % rows:
        up = -(-options.global_batch // rows) * rows
        if dp != options.dp and not options.dp:
            options.global_batch = up  # replicas that were not asked for take one more row each
        else:
            raise ValueError(f"a global batch of {options.global_batch:,} rows does not divide among {dp} replicas and "
                             f"micro-batches of {options.micro_batch}: choose {up:,}")  # fmt: skip
    layout = Layout(
        dp, degrees[1], degrees[2], options.zero, options.micro_batch, options.recompute, options.schedule,
        options.chunks,
    )  # fmt: skip
    flops = options.cluster_flops or cluster.gpus * gpu.peak_flops
    return Asked(
        model, options.params or model.parameters, options.tokens, cluster, flops, sizes.job_of(options), layout
    )


def cluster_line(asked: Asked) -> str:
    """What it runs on."""
    gpus = asked.cluster.gpus
    return f"{gpus:,} {asked.cluster.gpu.name.upper()}, {asked.cluster_flops:.4g} FLOP/s at their peak"


# The accounts.


def compute_account(asked: Asked, options: argparse.Namespace) -> Account:
    """FLOPs, the textbook's time, the honest one."""
    account, job = Account("compute"), asked.job
    step = job.global_batch * job.sequence * asked.model.token_flops(job.sequence)
    account.add("a step", step, f"{step:.3g} FLOPs", f"{job.global_batch:,} x {job.sequence:,} tokens", "step_flops")
    if asked.tokens is None:
        return account
    flops = compute.training_flops(asked.parameters, asked.tokens)
    ideal = compute.run_seconds(flops, asked.cluster_flops)
    account.add("the run", flops, f"{flops:.3g} FLOPs", "6 x parameters x tokens", "flops")
    account.add("ideal time", ideal, seconds(ideal), "at the peak, all the time", "ideal_seconds")
    with_mfu = ideal / options.mfu
    account.add("with an MFU", with_mfu, seconds(with_mfu), f"{options.mfu:.0%} of the peak", "mfu_seconds")
    waits = with_mfu / (1 - options.waiting)
    account.add("with waiting", waits, seconds(waits), f"{options.waiting:.0%} for data", "waiting_seconds")
    kept = goodput_of(asked, options)
    honest = compute.run_seconds(flops, asked.cluster_flops, mfu=options.mfu, waiting=options.waiting, goodput=kept)
    why = f"{1 - kept:.1%} for checkpoints, failures, restarts"
    account.add("honest time", honest, seconds(honest), why, "honest_seconds")
    hours = compute.gpu_hours(honest, asked.cluster.gpus)
    account.add("GPU hours", hours, f"{hours:,.0f}", f"{asked.cluster.gpus:,} GPUs", "gpu_hours")
    return account


def memory_account(asked: Asked, options: argparse.Namespace) -> Account:
    """Bytes of a GPU, by ZeRO stage, and the layout's own."""
    account, layout, limit = Account("memory"), asked.layout, asked.cluster.gpu.memory_bytes
    whole = model_state_bytes(asked.parameters).total
    account.add("model state", whole, units.size(whole), "16 bytes a parameter", "state_bytes")
    for zero in range(4):
        state = model_state_bytes(asked.parameters, layout.dp, layout.tp, layout.pp, zero)
        name = "without ZeRO" if not zero else f"ZeRO {zero}"
        why = (
            f"on each GPU: {units.size(state.weights)} + {units.size(state.gradients)} + {units.size(state.optimizer)}"
        )
        account.add(name, state.total, units.size(state.total), why, f"zero{zero}_bytes")
    own = asked.parameters / asked.model.parameters  # as asked, where the usual shape has a few more or less
    states = ("weights", "gradients", "optimizer")
    held = {name: size * (own if name in states else 1) for name, size in memory_bytes(asked.job, layout).items()}
    total = sum(held.values())
    for name in ("activations", "buffers"):
        why = "in flight on the fullest stage, and logits" if name == "activations" else "of gathered or sent pieces"
        account.add(name, held[name], units.size(held[name]), why, f"{name}_bytes")
    most = max(held, key=lambda key: held[key])
    fits = "fits" if total <= limit else f"{units.size(total - limit)} over, most of it {most}"
    account.add("fullest GPU", total, units.size(total), f"of {units.size(limit)}: {fits}", "layout_bytes")
    account.facts["fits"] = total <= limit
    return account


def communication_account(asked: Asked, options: argparse.Namespace) -> Account:
    """Payload and ring bytes of each cut, and their time on its link."""
    account, job, layout, cluster = Account("communication"), asked.job, asked.layout, asked.cluster
    m, size = micro_batches(job, layout), layout.micro_batch * job.sequence * job.model.hidden * PER_VALUE
    times = layers_of(job, layout) * m * (6 if layout.recompute == "full" else 4)
    outer = cluster.link(layout.dp, layout.tp * layout.pp)
    rows = [
        *(("dp", op, payload, calls, layout.dp, outer) for op, payload, calls in replica_messages(job, layout)),
        ("tp", "all_reduce", size, times, layout.tp, cluster.link(layout.tp, 1)),
        ("pp", "send", size / layout.tp, 2 * m * layout.chunks, layout.pp, cluster.link(layout.pp, layout.tp)),
    ]
    for group, op, payload, calls, ranks, link in rows:
        if ranks == 1:
            continue
        sent, took = calls * ring_bytes(op, payload, ranks), calls * collective_seconds(op, payload, ranks, link)
        why = f"{calls:,} x {op} of {units.size(payload)}; {reasons.duration(took)} on {link.name}"
        account.lines.append((f"{group}, a step", units.size(sent), why))
        for name, value in (("bytes", sent), ("payload_bytes", calls * payload), ("seconds", took)):
            account.facts[f"{group}_{name}"] = account.facts.get(f"{group}_{name}", 0.0) + value
    if not account.lines:
        account.lines.append(("none", "", "one GPU: nobody to talk to"))
    return account


def data_account(asked: Asked, options: argparse.Namespace) -> Account:
    """Tokens: how many are best, how many there are."""
    account = Account("data")
    best = data.tokens_needed(asked.parameters)
    account.add("best for its size", best, reasons.amount(best), "20 tokens a parameter", "best_tokens")
    if asked.tokens is not None:
        ratio = asked.tokens / asked.parameters
        account.add("tokens", asked.tokens, reasons.amount(asked.tokens), f"{units.plain(ratio)} a parameter")
        size = data.text_bytes(asked.tokens)
        account.add("text", size, units.size(size), "four bytes a token", "text_bytes")
        if options.unique:
            times, worth = data.epochs(asked.tokens, options.unique), data.tokens_worth(asked.tokens, options.unique)
            account.add("epochs", times, units.plain(times), f"worth {reasons.amount(worth)} fresh tokens")
            account.facts["tokens_worth"] = worth
    return account


def stability_account(asked: Asked, options: argparse.Namespace) -> Account:
    """Failures, checkpoints, what is left."""
    account, apart = Account("stability"), failures_apart(asked, options)
    interval = stability.checkpoint_interval(save_seconds=options.save, failure_seconds=apart)
    kept = goodput_of(asked, options)
    source = "as asked" if options.failures else f"{asked.cluster.gpus:,} GPUs that fail as often as Llama 3's"
    account.add("between failures", apart, reasons.duration(apart), source, "failure_seconds")
    why = f"sqrt(2 x {reasons.duration(options.save)} x {reasons.duration(apart)})"
    account.add("checkpoint every", interval, reasons.duration(interval), why, "checkpoint_interval")
    account.add("goodput", kept, f"{kept:.1%}", f"restarts of {reasons.duration(options.restart)}")
    return account


def failures_apart(asked: Asked, options: argparse.Namespace) -> float:
    """Mean seconds between failures."""
    return float(options.failures or stability.failure_seconds(asked.cluster.gpus))


def goodput_of(asked: Asked, options: argparse.Namespace) -> float:
    """The share of time that counts, with the best interval between checkpoints."""
    apart = failures_apart(asked, options)
    interval = stability.checkpoint_interval(save_seconds=options.save, failure_seconds=apart)
    kept = stability.exact_goodput(
        interval=interval, save_seconds=options.save, failure_seconds=apart, restart_seconds=options.restart
    )
    if kept < 1e-6:
        raise ValueError(
            f"with a failure every {reasons.duration(apart)} and restarts of {reasons.duration(options.restart)} "
            "no run ends: give a longer --failures or a shorter --restart"
        )
    return kept


def seconds(value: float) -> str:
    """42,000 s (11.7 h)."""
    said = reasons.duration(value)
    return f"{value:,.0f} s" if said.endswith(" s") or value < 1 else f"{value:,.0f} s = {said}"


def drawn(account: Account) -> Table:
    """The lines of an account."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for line in account.lines:
        table.add_row(*line)
    return table
