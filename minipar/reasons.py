"""A plan in words: which bottleneck each cut answers, what it costs, why its group sits on that link.

Idea    An answer that lands on an account: what is saved, what is paid for it, and which signal of the log shows it.
        Everything said here is read off the plan; no sentence is there that the numbers don't carry.
Read    `planner.py` before; `plan_command.py`, which prints it.
"""

from __future__ import annotations

from minipar.catalogue import Link
from minipar.collectives import ring_bytes
from minipar.layout import (
    PER_VALUE,
    STATES,
    Estimate,
    Layout,
    flying,
    layers_of,
    micro_batches,
    model_tflops,
    rank_parameters,
    replica_messages,
)
from minipar.planner import Plan, compare
from minipar.show import units
from minipar.show.units import amount as amount
from minipar.show.units import duration as duration


def bottlenecks(plan: Plan) -> list[str]:
    """The two reasons for cutting at all, with this model's numbers."""
    job, cluster, parameters = plan.job, plan.cluster, plan.job.model.parameters
    step = job.global_batch * job.sequence * job.model.token_flops(job.sequence)
    alone = step / cluster.gpu.peak_flops
    state = sum(STATES.values()) * parameters
    least = -(-state // cluster.gpu.memory_bytes)
    return [
        f"too slow: a step is {step:.3g} FLOPs, {duration(alone)} of one {cluster.gpu.name} at its peak",
        f"does not fit: 16 bytes x {amount(parameters)} = {units.size(state)} of weights, gradients and optimizer "
        f"states; a GPU holds {units.size(cluster.gpu.memory_bytes)}, so they fill {least:,.0f}"
        if least > 1
        else f"fits: 16 bytes x {amount(parameters)} = {units.size(state)}, and a GPU holds "
        f"{units.size(cluster.gpu.memory_bytes)}: what is left to answer is 'too slow'",
    ]


def cuts(plan: Plan) -> list[str]:
    """For each cut that the winner makes: what it answers, where its messages go, what it costs."""
    best = plan.best
    lines = [
        _tensor(plan, best),
        _pipeline(plan, best),
        _data(plan, best),
        _zero(plan, best.layout),
        _again(plan, best),
    ]
    return [line for line in lines if line]


def share(best: Estimate, account: str) -> str:
    """The share of the step."""
    return units.share(best.seconds[account] / best.step_seconds)


def _where(link: Link, inside: bool) -> str:
    rate = f"{link.name}, {units.size(link.bandwidth)}/s"
    return f"inside a node ({rate})" if inside else f"across nodes ({rate})"


def _tensor(plan: Plan, best: Estimate) -> str:
    job, layout, cluster = plan.job, best.layout, plan.cluster
    if layout.tp == 1:
        return ""
    size = layout.micro_batch * job.sequence * job.model.hidden * PER_VALUE
    times = 6 if layout.recompute == "full" else 4
    inside = layout.tp <= cluster.per_node
    why = "the most frequent messages, so they stay" if inside else "the most frequent messages, and here they go"
    return (
        f"tp={layout.tp} answers 'does not fit': it shares the matrices of each layer, and what is kept of it. Price: "
        f"{times} all_reduces of {units.size(size)} in each layer and micro-batch, "
        f"{share(best, 'tensor parallel')} of the step; {why} {_where(cluster.link(layout.tp, 1), inside)}"
    )


def _pipeline(plan: Plan, best: Estimate) -> str:
    job, layout, cluster = plan.job, best.layout, plan.cluster
    if layout.pp == 1:
        return ""
    m, inside = micro_batches(job, layout), layout.pp * layout.tp <= cluster.per_node
    size = layout.micro_batch * job.sequence * job.model.hidden * PER_VALUE / layout.tp
    chunks = f" x {layout.chunks} chunks" if layout.chunks > 1 else ""
    link = cluster.inside if inside else cluster.outside
    held = units.plain(flying(layout, m, 0))
    return (
        f"pp={layout.pp} answers 'does not fit': {layers_of(job, layout)} of {job.model.layers} layers on each stage"
        f"{chunks}. Price: a bubble of {share(best, 'bubble')} ({layout.schedule}, {units.count(m, 'micro-batch')}"
        f"), and {held} of them in flight on the first stage. Messages of "
        f"{units.size(size)} at a few borders go {_where(link, inside)}: {share(best, 'pipeline borders')}"
    )


def _data(plan: Plan, best: Estimate) -> str:
    job, layout, cluster = plan.job, best.layout, plan.cluster
    if layout.dp == 1:
        return ""
    sent = sum(calls * ring_bytes(op, size, layout.dp) for op, size, calls in replica_messages(job, layout))
    inside = layout.dp * layout.tp * layout.pp <= cluster.per_node
    what = "gradients" if not layout.zero else "gradients and weights"
    often = "once" if layout.zero < 2 else f"for {units.count(micro_batches(job, layout), 'micro-batch')}"
    link = cluster.link(layout.dp, layout.tp * layout.pp)
    hidden = (
        "hidden behind the backward"
        if best.seconds["data parallel"] < 1e-3 * best.step_seconds
        else (f"{share(best, 'data parallel')} of the step is waiting for them")
    )
    return (
        f"dp={layout.dp} answers 'too slow': {layout.dp} replicas, {job.global_batch // layout.dp:,} rows each. Price: "
        f"{units.size(sent)} of {what} a step from each GPU, {often}; messages that can best wait, so they go "
        f"{_where(link, inside)}: {hidden}"
    )


def _zero(plan: Plan, layout: Layout) -> str:
    if not layout.zero:
        return ""
    what = {1: "optimizer states", 2: "optimizer states and gradients", 3: "optimizer states, gradients and weights"}
    own, n = rank_parameters(plan.job, layout), layout.dp
    accounts = ("optimizer", "gradients", "weights")[: layout.zero]
    saved = sum(STATES[account] for account in accounts) * own * (1 - 1 / n)
    price = {
        1: "the same bytes, in two halves",
        2: "gradients are reduced for each micro-batch",
        3: "weights are gathered twice for each micro-batch",
    }
    return (
        f"ZeRO {layout.zero} takes the redundancy out of the replicas: each holds 1/{n} of {what[layout.zero]}, "
        f"{units.size(saved)} less. Price: {price[layout.zero]}"
    )


def _again(plan: Plan, best: Estimate) -> str:
    if best.layout.recompute == "none":
        return ""
    job = plan.job
    more = job.model.token_flops(job.sequence, best.layout.recompute) / job.model.token_flops(job.sequence) - 1
    return f"recompute {best.layout.recompute} keeps less of each layer. Price: {more:.0%} more FLOPs"


def signals(plan: Plan) -> list[str]:
    """What the log of such a run would show first if the plan were wrong."""
    best, job = plan.best, plan.job
    tflops = model_tflops(job, plan.cluster, best.step_seconds)
    mfu = tflops * 1e12 / plan.cluster.gpu.peak_flops
    return [
        f"MFU below {mfu:.0%} (step time above {duration(best.step_seconds)}): compute account",
        f"memory above {units.size(best.bytes)} on the first or last stage: activations, micro-batches in flight",
        "step time that varies: a slow rank, since all others wait for it",
    ]


def why_not(plan: Plan, other: Plan, wanted: str) -> list[str]:
    """Why what was asked for loses against the best; or that it is the best."""
    if not other.ranked:
        near = other.nearest
        assert near is not None
        over = max(near.memory, key=lambda account: near.memory[account])
        return [
            f"{wanted} does not fit: at least {units.size(near.bytes)} of "
            f"{units.size(plan.cluster.gpu.memory_bytes)} ({near.layout}), most of it {over}, "
            f"{units.size(near.memory[over])}"
        ]
    found = other.best
    if found.layout == plan.best.layout:
        return [f"{wanted}: that is the winner"]
    if found.step_seconds < plan.best.step_seconds:
        faster = 1 - found.step_seconds / plan.best.step_seconds
        return [f"{wanted} would be faster by {faster:.1%} ({found.layout}), but --with leaves it out"]
    lines = [
        f"{wanted}: the best is {found.layout}",
        f"it takes {duration(found.step_seconds)}, {found.step_seconds / plan.best.step_seconds - 1:+.1%} against the "
        f"winner, and holds {units.size(found.bytes)}",
    ]
    limit = 0.002 * plan.best.step_seconds
    for account, seconds in compare(plan, found):
        if abs(seconds) > limit:
            word = "loses" if seconds > 0 else "gains"
            lines.append(f"  {word} {duration(abs(seconds))}: {account}{_because(plan, found, account, seconds)}")
    return lines


def _because(plan: Plan, found: Estimate, account: str, seconds: float) -> str:
    layout, best, cluster = found.layout, plan.best.layout, plan.cluster
    if seconds < 0:
        return ""
    match account:
        case "tensor parallel" if layout.tp > cluster.per_node:
            link = cluster.link(layout.tp, 1)
            nodes = -(-layout.tp // cluster.per_node)
            return (
                f", whose group of {layout.tp} spans {nodes} nodes: every all_reduce of every layer goes through the "
                f"network ({units.size(link.bandwidth)}/s, {units.time(link.latency)} a step of the ring)"
            )
        case "tensor parallel":
            return f", whose messages don't shrink while the computing between them is shared by {layout.tp}"
        case "computing" if layout.recompute != best.recompute:
            return f", for recompute {layout.recompute} pays FLOPs for memory"
        case "computing" if layers_of(plan.job, layout) * layout.pp > plan.job.model.layers:
            return f", for {plan.job.model.layers} layers do not divide evenly into {layout.pp * layout.chunks} stages"
        case "computing":
            return ", what is shared by fewer ranks: norms, the words at the end, memory traffic"
        case "bubble":
            m = micro_batches(plan.job, layout)
            return f", {layout.pp} stages with {m:,} micro-batches"
        case "data parallel":
            return f", for ZeRO {layout.zero} over {layout.dp} replicas sends more than computing hides"
        case _:
            return ""
