"""One way to lay a model out on a cluster: what each GPU holds, and how long a step takes, by arithmetic.

Idea    A step is a sum of waits, each of which one cut lengthens and another shortens: computing (matrix products, and
        what only moves memory), tensor parallel's messages in each layer, the pipeline's bubble and its borders, data
        parallel's messages as far as no computing hides them, the optimizer. Memory is a sum as well: weights,
        gradients, optimizer, activations in flight, logits. Closed formulas for each, so that thousands of layouts
        are judged in a second.
Legend  b rows of a micro-batch, T sequence, D hidden, m micro-batches, p stages, v chunks, t tensor-parallel ranks.
Source  Roofline: Williams et al. 2009. Bubbles: `schedule.py`. Messages: `collectives.py`. Bytes kept:
        `architecture.py`. `EFFICIENCY` is the one number that was fitted: see below.
Read    `plan.py`, which tries many and says why one wins.

Ranks are laid out tensor parallel first, then the pipeline, then the replicas: neighbours share a node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from minipar.architecture import Architecture
from minipar.catalogue import Gpu, Link
from minipar.collectives import collective_seconds
from minipar.compute import positive

EFFICIENCY = 0.62  # of the peak, for matrix products of these sizes. Fitted once to all rows of Megatron-LM's table 1
# (A100) and Llama 3's table 4 (H100) together, none of which it misses by more than 25 %: `tests/test_plan.py`.
PER_VALUE = 2  # bytes of a weight, gradient or activation on its way
STATES = {"weights": 2.0, "gradients": 2.0, "optimizer": 12.0}  # bytes of a parameter: see `ledger.model_state_bytes`


@dataclass(frozen=True)
class Cluster:
    """`gpus` of a kind, `per_node` in each machine; `inside` joins those of a machine, `outside` each to the others."""

    gpu: Gpu
    gpus: int
    per_node: int
    inside: Link
    outside: Link

    def __post_init__(self) -> None:
        positive(gpus=self.gpus, gpus_per_node=self.per_node)

    def link(self, ranks: int, stride: int) -> Link:
        """What a ring of `ranks`, `stride` apart, goes through. Across nodes, the rings that run side by side share the
        adapters of a node: one for each GPU."""
        if ranks * stride <= self.per_node or ranks == 1:
            return self.inside
        rings = min(stride, self.per_node)
        shared = self.outside.bandwidth * self.per_node / rings
        return replace(self.outside, bandwidth=min(shared, self.inside.bandwidth) if rings < self.per_node else shared)


@dataclass(frozen=True)
class Job:
    """What is to be trained: rows of `sequence` tokens, `global_batch` of them in a step. With `flash`, attention keeps
    no scores and computes them again in its backward; without, it writes them to memory."""

    model: Architecture
    sequence: int
    global_batch: int
    flash: bool = True

    def __post_init__(self) -> None:
        positive(sequence=self.sequence, global_batch=self.global_batch)


@dataclass(frozen=True)
class Layout:
    """Degrees, and what else is chosen."""

    dp: int
    tp: int
    pp: int
    zero: int = 0
    micro_batch: int = 1
    recompute: str = "none"
    schedule: str = "1f1b"
    chunks: int = 1

    def __str__(self) -> str:
        parts = [f"dp={self.dp} tp={self.tp} pp={self.pp} zero={self.zero}", f"micro-batch {self.micro_batch}"]
        if self.pp > 1:
            parts.append(self.schedule + (f" of {self.chunks} chunks" if self.chunks > 1 else ""))
        return ", ".join([*parts, f"recompute {self.recompute}"])


@dataclass(frozen=True)
class Estimate:
    """A layout, judged: seconds and bytes by account. `memory` is of the fullest rank; the sum of `seconds` is the
    step's time."""

    layout: Layout
    seconds: dict[str, float]
    memory: dict[str, float]

    @cached_property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @cached_property
    def bytes(self) -> float:
        return sum(self.memory.values())


def micro_batches(job: Job, layout: Layout) -> int:
    """How many each replica runs."""
    return job.global_batch // (layout.dp * layout.micro_batch)


def layers_of(job: Job, layout: Layout) -> int:
    """Blocks on the fullest rank."""
    return -(-job.model.layers // (layout.pp * layout.chunks)) * layout.chunks


def estimate(job: Job, cluster: Cluster, layout: Layout, efficiency: float = EFFICIENCY) -> Estimate:
    """What the layout costs. It must fit: `plan.faults` says whether it does."""
    return Estimate(layout, step_seconds(job, cluster, layout, efficiency), memory_bytes(job, layout))


# Memory.


def rank_parameters(job: Job, layout: Layout) -> float:
    """Parameters of the fullest rank, before ZeRO: its blocks, and the words where they are used."""
    model = job.model
    words = model.vocab * model.hidden * (2 if layout.pp == 1 and not model.tied else 1)
    rest = model.positions * model.hidden + model.hidden * (1 if model.rms else 2) + model.more
    return (layers_of(job, layout) * model.block_parameters + words + rest) / layout.tp


def flying(layout: Layout, m: int, stage: int) -> float:
    """Micro-batches of all of a rank's layers that it keeps at most; see the table in `schedule.py`."""
    p, v = layout.pp, layout.chunks
    match layout.schedule:
        case "gpipe":
            return m
        case "zb-h1":
            return min(m, p)
        case "interleaved" if v > 1:
            return min(v * m, (v - 1) * p + 2 * (p - stage) - 1) / v
        case _:
            return min(m, p - stage)


def memory_bytes(job: Job, layout: Layout) -> dict[str, float]:
    """Bytes of the fullest rank by account. It is the first stage, which keeps the most micro-batches, or the last,
    which keeps fewer but has the logits."""
    own, zero, dp = rank_parameters(job, layout), layout.zero, layout.dp
    shares = {"weights": dp if zero >= 3 else 1, "gradients": dp if zero >= 2 else 1, "optimizer": dp if zero else 1}
    states = {account: each * own / shares[account] for account, each in STATES.items()}
    stages = [_activations(job, layout, stage) for stage in {0, layout.pp - 1}]
    block = job.model.block_parameters / layout.tp * PER_VALUE
    buffers = block * {0: 0, 1: 0, 2: 1, 3: 3}[zero] if dp > 1 else 0.0  # gradients on their way; two gathered blocks
    return {**states, "activations": max(stages), "buffers": buffers}


def _activations(job: Job, layout: Layout, stage: int) -> float:
    model, tp = job.model, layout.tp
    tokens = layout.micro_batch * job.sequence
    by_sequence = tp > 1
    how = "selective" if job.flash and layout.recompute == "none" else layout.recompute
    each = model.block_bytes(job.sequence, tp=tp, sequence_parallel=by_sequence, recompute=how)
    kept = each * layers_of(job, layout) * flying(layout, micro_batches(job, layout), stage)
    if layout.recompute == "full":  # one block at a time is there whole
        inside = "selective" if job.flash else "none"
        kept += model.block_bytes(job.sequence, tp=tp, sequence_parallel=by_sequence, recompute=inside)
    elif layout.recompute == "selective" and not job.flash:
        kept += 4.0 * model.heads * job.sequence / tp
    if stage == layout.pp - 1:
        kept += 4.0 * (model.hidden + model.vocab) / tp  # the projection's input, and logits in 4 bytes
    return kept * tokens


# Time.


def block_seconds(job: Job, cluster: Cluster, layout: Layout, efficiency: float) -> tuple[float, float, float]:
    """Seconds of a block and a micro-batch: forward, gradient of the input (with what is computed again), gradient of
    the weights; without messages. Products run at the peak times `efficiency`; the rest is as fast as memory: what is
    kept is written once and read once in each of forward and the two halves of backward."""
    model, T = job.model, job.sequence
    tokens = layout.micro_batch * T
    matrices, attention = 2.0 * model.block_matrices, 4.0 * T * model.hidden
    speed = cluster.gpu.peak_flops * efficiency * layout.tp
    plain = model.block_bytes(T, tp=layout.tp, sequence_parallel=layout.tp > 1, recompute="none")
    moved = plain - (4.0 * model.heads * T / layout.tp if job.flash else 0.0)
    pass_seconds = 2 * moved * tokens / cluster.gpu.memory_bandwidth
    again = {
        "none": attention / 2 if job.flash else 0.0,
        "selective": attention,
        "full": matrices + attention,
    }[layout.recompute]
    forward = tokens * (matrices + attention) / speed + pass_seconds
    backward = tokens * (matrices + 2 * attention + again) / speed + pass_seconds
    backward += pass_seconds if layout.recompute == "full" else 0.0
    return forward, backward, tokens * matrices / speed + pass_seconds


def step_seconds(job: Job, cluster: Cluster, layout: Layout, efficiency: float = EFFICIENCY) -> dict[str, float]:
    """Seconds of a step by what they are spent on, on the slowest rank."""
    m, layers, model = micro_batches(job, layout), layers_of(job, layout), job.model
    tokens = layout.micro_batch * job.sequence
    forward, backward, weight = block_seconds(job, cluster, layout, efficiency)
    words = tokens * model.word_flops() / (cluster.gpu.peak_flops * efficiency * layout.tp)
    reduce = collective_seconds("all_reduce", tokens * model.hidden * PER_VALUE, layout.tp, cluster.link(layout.tp, 1))
    split = layers * reduce * (6 if layout.recompute == "full" else 4)
    computing = layers * (forward + backward + weight)
    f, b, w = layers * (forward + 2 * reduce), layers * backward + split - layers * 2 * reduce, layers * weight
    if layout.tp > cluster.per_node:  # its messages take the adapters that data parallel's would hide behind them
        replicas = _replica_seconds(job, cluster, layout, m, layers * forward, layers * (backward + weight))
    else:
        replicas = _replica_seconds(job, cluster, layout, m, f, b + w)
    return {
        "computing": m * (computing + words),
        "tensor parallel": m * split,
        "bubble": _bubble_seconds(layout, f, b, w),
        "pipeline borders": _border_seconds(job, cluster, layout, m),
        "data parallel": replicas,
        "optimizer": _optimizer_seconds(job, cluster, layout),
    }


def _bubble_seconds(layout: Layout, f: float, b: float, w: float) -> float:
    """Idle time of each rank: `(p-1)(F+B+W)`, over v with chunks, less W twice where W fills the gaps (ZB-H1)."""
    idle = f + b - w if layout.schedule == "zb-h1" else f + b + w
    return (layout.pp - 1) * idle / layout.chunks


def _border_seconds(job: Job, cluster: Cluster, layout: Layout, m: int) -> float:
    """What messages between stages add to the longest path: once down and up, and in 1F1B, which waits for each
    gradient before it goes on, for most micro-batches. The counts are exact for equal stages: `tests/test_plan.py`."""
    p, v = layout.pp, layout.chunks
    if p == 1:
        return 0.0
    link = cluster.inside if p * layout.tp <= cluster.per_node else cluster.outside
    size = layout.micro_batch * job.sequence * job.model.hidden * PER_VALUE / layout.tp
    hop = link.latency + size / link.bandwidth
    return hops(layout.schedule, p, m, v) * hop


def hops(schedule: str, p: int, m: int, v: int = 1) -> float:
    """How many times the time of one message between stages lengthens a step."""
    match schedule:
        case "zb-h1":
            return 4 * (p - 1)
        case "1f1b":
            return 2 * (p - 2) + 2 * m * (p - 1) / p if m >= p > 1 else 2 * (p - 1)
        case "interleaved":
            return 2 * (p * v - 1) if v > 1 else hops("1f1b", p, m)
        case _:
            return 2 * (p - 1)


def replica_messages(job: Job, layout: Layout) -> list[tuple[str, float, int]]:
    """Data parallel's messages of a step: operation, payload of all blocks together, how often."""
    size, dp, m = rank_parameters(job, layout) * PER_VALUE, layout.dp, micro_batches(job, layout)
    if dp == 1:
        return []
    match layout.zero:
        case 0:
            return [("all_reduce", size, 1)]
        case 1:
            return [("reduce_scatter", size, 1), ("all_gather", size / dp, 1)]
        case 2:
            return [("reduce_scatter", size, m), ("all_gather", size / dp, 1)]
        case _:
            return [("reduce_scatter", size, m), ("all_gather", size / dp, 2 * m)]


def _replica_seconds(job: Job, cluster: Cluster, layout: Layout, m: int, f: float, backward: float) -> float:
    """Data parallel's messages, one for each block, as far as they are waited for. Gradients travel during the last
    backward (from stage 2 on, during every one); stage 3's weights during the forward and the backward before which
    they are needed."""
    dp, zero = layout.dp, layout.zero
    if dp == 1:
        return 0.0
    link, blocks = cluster.link(dp, layout.tp * layout.pp), layers_of(job, layout)
    size = rank_parameters(job, layout) * PER_VALUE / blocks
    scatter = blocks * collective_seconds("reduce_scatter", size, dp, link)
    gather = blocks * collective_seconds("all_gather", size / dp, dp, link)
    match zero:
        case 0:
            return max(0.0, scatter + gather - backward)
        case 1:
            return max(0.0, scatter - backward) + gather
        case 2:
            return m * max(0.0, scatter - backward) + gather
        case _:
            return m * (max(0.0, gather - f) + max(0.0, gather + scatter - backward))


def _optimizer_seconds(job: Job, cluster: Cluster, layout: Layout) -> float:
    """Adam reads weights, gradients and states and writes them: some 30 bytes a parameter."""
    own = rank_parameters(job, layout) / (layout.dp if layout.zero else 1)
    return 30.0 * own / cluster.gpu.memory_bandwidth


def model_tflops(job: Job, cluster: Cluster, seconds: float, recompute: str = "none") -> float:
    """1e12 FLOP/s of each GPU, for a step of so many seconds: what a paper prints. Some count what is recomputed."""
    flops = job.global_batch * job.sequence * job.model.token_flops(job.sequence, recompute)
    return flops / seconds / cluster.gpus / 1e12
