"""The accounts: what a model costs in parameters, memory and messages, by arithmetic alone.

Idea    Everything a run will hold and send follows from a few sizes. The formulas are here, in plain Python, and know
        nothing of the engine: the report of a run lays them beside what was counted, and the two must agree to the
        byte. So a learner can trust them for a cluster that nobody has at home. The other accounts have files of their
        own, and their names here as well: `ledger.days`, `ledger.tokens_needed`, `ledger.goodput`.
Legend  B rows of a micro-batch, T sequence, D hidden, H heads, K key/value heads, V vocabulary.
Source  Each function names its own.
Read    `train.py`, whose steps these are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minipar.activations import activation_bytes as activation_bytes
from minipar.activations import layer_activation_bytes as layer_activation_bytes
from minipar.collectives import collective_seconds as collective_seconds
from minipar.collectives import ring_bytes as ring_bytes
from minipar.compute import carbon_tonnes as carbon_tonnes
from minipar.compute import days as days
from minipar.compute import energy_mwh as energy_mwh
from minipar.compute import gpu_hours as gpu_hours
from minipar.compute import mfu as mfu
from minipar.compute import petaflop_days as petaflop_days
from minipar.compute import run_seconds as run_seconds
from minipar.compute import step_flops as step_flops
from minipar.compute import token_days as token_days
from minipar.compute import token_flops as token_flops
from minipar.compute import tokens_per_second as tokens_per_second
from minipar.compute import training_flops as training_flops
from minipar.data import best_parameters as best_parameters
from minipar.data import best_tokens as best_tokens
from minipar.data import crawled_tokens as crawled_tokens
from minipar.data import epochs as epochs
from minipar.data import text_bytes as text_bytes
from minipar.data import tokens_needed as tokens_needed
from minipar.data import tokens_worth as tokens_worth
from minipar.data import true_score as true_score
from minipar.facts import Kind
from minipar.schedule import Schedule
from minipar.stability import checkpoint_interval as checkpoint_interval
from minipar.stability import exact_goodput as exact_goodput
from minipar.stability import failure_seconds as failure_seconds
from minipar.stability import goodput as goodput
from minipar.stability import loss_scale_limit as loss_scale_limit
from minipar.stability import skipped_share as skipped_share
from minipar.stability import straggler_factor as straggler_factor

# Bytes of a parameter in weights, gradients and optimizer (Adam: two moments, and for mixed precision a master copy).
STATE_BYTES = {"mixed": (2, 2, 12), "fp32": (4, 4, 8), "fp64": (8, 8, 16)}


def parameters(
    *, layers: int, hidden: int, heads: int, vocab: int, sequence: int, kv_heads: int = 0, tied: bool = True
) -> int:
    """Parameters of a GPT: `12 L D^2 + 13 L D + (V + T + 2) D`, and `V D` more when the projection to the vocabulary
    is not tied to the embedding. Grouped key/value heads shrink the attention's share.

    Source: Narayanan et al. 2021, equation 2 (tied), which leaves out the last LayerNorm.
    """
    kv = hidden // heads * (kv_heads or heads)  # width of keys, and of values
    attention = (hidden + 2 * kv) * (hidden + 1) + hidden * (hidden + 1)
    block = attention + 2 * 4 * hidden * hidden + 5 * hidden + 4 * hidden
    return layers * block + (vocab + sequence + 2) * hidden + (0 if tied else vocab * hidden)


@dataclass(frozen=True)
class ModelState:
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def __getitem__(self, account: str) -> float:
        return float(getattr(self, account))


def model_state_bytes(
    parameters: float, dp: int = 1, tp: int = 1, pp: int = 1, zero: int = 0, precision: str = "mixed"
) -> ModelState:
    """Bytes of weights, gradients and Adam's states on each rank, of a model with so many parameters in all.

    tp and pp share everything; ZeRO shares over dp the optimizer's states from stage 1, gradients from 2, weights
    from 3. Mixed precision is 2 + 2 + 12 bytes a parameter. Source: Rajbhandari et al. 2020, section 3 and figure 1.
    """
    if precision not in STATE_BYTES:
        raise ValueError(f"unknown precision {precision!r}: choose from {', '.join(STATE_BYTES)}")
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO has no stage {zero}: choose 0 (off), 1, 2 or 3")
    own = parameters / (tp * pp)
    weight, gradient, optimizer = (size * own for size in STATE_BYTES[precision])
    return ModelState(
        weight / (dp if zero >= 3 else 1), gradient / (dp if zero >= 2 else 1), optimizer / (dp if zero >= 1 else 1)
    )


# Messages of one step of minipar's engine, by group and operation.


@dataclass(frozen=True)
class Shape:
    """A model and the way it is cut, as `communication_bytes` and its parts need it.

    `stage_layers[s]` is the number of layers of stage s; stage s is on pipeline rank s % pp. `value_bytes` is the
    size of a weight, gradient or activation. `bucket_bytes` is where ZeRO closes a bucket (each is padded).
    """

    hidden: int
    heads: int
    vocab: int
    sequence: int
    stage_layers: tuple[int, ...]
    kv_heads: int = 0
    tied: bool = False
    global_batch: int = 1
    micro_batches: int = 1
    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    value_bytes: int = 4
    recompute: str = "none"
    bucket_bytes: int = 8 << 20

    @property
    def stages(self) -> int:
        return len(self.stage_layers)

    @property
    def wide_bytes(self) -> int:
        """Bytes of a value where 16 bits are too few: the loss is computed in 32 at least."""
        return max(4, self.value_bytes)

    @property
    def activation(self) -> int:
        """Bytes of the whole activation [B, T, D] of one micro-batch."""
        rows = self.global_batch // self.dp // self.micro_batches
        return rows * self.sequence * self.hidden * self.value_bytes


@dataclass(frozen=True)
class Weight:
    """One parameter on a rank: how many values; whether sequence parallel leaves its gradient a sum to be made over
    tp; whether it is one copy of embeddings that are tied across stages."""

    values: int
    slice: bool = False
    copy: bool = False


def rank_units(shape: Shape, pp_rank: int) -> list[list[Weight]]:
    """The parameters of a rank, in order, by module: embedding, blocks, head, as far as they are on its stages."""
    D, t = shape.hidden, shape.tp
    head_size = D // shape.heads
    qkv = (shape.heads + 2 * (shape.kv_heads or shape.heads)) * head_size // t
    inner, words = -(-4 * D // t), -(-shape.vocab // t)
    norm = [Weight(D, slice=True), Weight(D, slice=True)]
    attention = [Weight(qkv * D), Weight(qkv), Weight(D * -(-D // t)), Weight(D)]
    mlp = [Weight(inner * D), Weight(inner), Weight(D * inner), Weight(D)]
    copy = shape.tied and shape.pp > 1
    units = []
    for stage in range(pp_rank, shape.stages, shape.pp):
        if stage == 0:
            units.append([Weight(shape.sequence * D, slice=True), Weight(words * D, copy=copy)])
        units += [[*norm, *attention, *norm, *mlp] for _ in range(shape.stage_layers[stage])]
        if stage == shape.stages - 1:
            units.append([*norm, *([] if shape.tied and not copy else [Weight(words * D, copy=copy)])])
    return units


def rank_parameters(shape: Shape, pp_rank: int) -> int:
    """How many values a rank's parameters have; a tied embedding counts on both stages that use it."""
    return sum(weight.values for unit in rank_units(shape, pp_rank) for weight in unit)


def zero_buckets(shape: Shape, pp_rank: int) -> list[list[Weight]]:
    """ZeRO's buckets: from the last parameter on, closed before they would pass `bucket_bytes`; in stage 3, one for
    each module; a copy of a tied embedding has one to itself, so that both copies are cut alike."""
    buckets: list[list[Weight]] = []
    home: object = None
    for number, unit in reversed(list(enumerate(rank_units(shape, pp_rank)))):
        for weight in reversed(unit):
            key = "copy" if weight.copy else number if shape.zero == 3 else "any"
            size = (sum(w.values for w in buckets[-1]) + weight.values) * shape.value_bytes if buckets else 0
            if not buckets or key != home or (shape.zero < 3 and size > shape.bucket_bytes):
                buckets.append([])
            home = key
            buckets[-1].insert(0, weight)
    return buckets


def _share(bucket: Sequence[Weight], dp: int) -> int:
    return -(-sum(weight.values for weight in bucket) // dp)


def _own(bucket: Sequence[Weight], dp: int, rank: int) -> Iterator[tuple[Weight, int]]:
    """Of each parameter in a bucket, how many values lie in this rank's share."""
    share, start = _share(bucket, dp), 0
    for weight in bucket:
        yield weight, max(0, min(start + weight.values, (rank + 1) * share) - max(start, rank * share))
        start += weight.values


Volumes = Counter[tuple[str, str]]


def communication_bytes(shape: Shape, *, dp_rank: int = 0, pp_rank: int = 0) -> dict[tuple[str, str], int]:
    """Payload bytes that one rank hands to the messages of one step: `{("dp", "all_reduce"): bytes, ...}`.

    The payload is what `comm.Message.bytes` counts: an all_reduce's buffer, an all_gather's own shard, a
    reduce_scatter's whole input, what is sent. Groups of one rank send nothing.
    """
    total = Volumes()
    if shape.dp > 1:
        total += _data_parallel(shape, pp_rank)
    if shape.tp > 1:
        total += _tensor_parallel(shape, pp_rank)
        total += _sequence_slices(shape, dp_rank, pp_rank)
    if shape.pp > 1:
        total += _pipeline(shape, dp_rank, pp_rank)
    if shape.dp * shape.tp * shape.pp > 1:
        total["world", "all_reduce"] += 4 * 8  # tokens; loss, squared norm, what is not finite
    return {key: size for key, size in total.items() if size}


def _data_parallel(shape: Shape, pp_rank: int) -> Volumes:
    """Gradients once (stage 2 and 3: for every micro-batch), parameters once (stage 3: for every use). Source:
    Rajbhandari et al. 2020, section 7."""
    total, e, m = Volumes(), shape.value_bytes, shape.micro_batches
    if shape.zero == 0:
        total["dp", "all_reduce"] = rank_parameters(shape, pp_rank) * e
        return total
    shares = sum(_share(bucket, shape.dp) for bucket in zero_buckets(shape, pp_rank)) * e
    total["dp", "reduce_scatter"] = shares * shape.dp * (1 if shape.zero == 1 else m)
    total["dp", "all_gather"] = shares if shape.zero < 3 else 2 * m * shares
    if shape.zero == 3 and shape.tied and shape.pp == 1:  # the head uses the embedding's bucket as well
        total["dp", "all_gather"] += 2 * m * _share(rank_units(shape, pp_rank)[0], shape.dp) * e
    return total


def _tensor_parallel(shape: Shape, pp_rank: int) -> Volumes:
    """A layer enters and leaves the split region twice, forward and backward; the embedding leaves it once, the head
    enters it once. Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4."""
    total, whole = Volumes(), shape.activation
    here = range(pp_rank, shape.stages, shape.pp)
    enters = leaves = 2 * sum(shape.stage_layers[stage] for stage in here)
    again = enters if shape.recompute == "full" else 0  # the blocks' forward, once more
    leaves, enters = leaves + (0 in here), enters + (shape.stages - 1 in here)
    if shape.sequence_parallel:  # forward gather, backward gather again and scatter; leave: scatter, then gather
        total["tp", "all_gather"] = (2 * enters + leaves + again) * whole // shape.tp
        total["tp", "reduce_scatter"] = (enters + leaves + again) * whole
    else:
        total["tp", "all_reduce"] = (enters + leaves + again) * whole
    if shape.stages - 1 in here:  # a maximum, a sum and the right logit for each token
        tokens = shape.global_batch // shape.dp // shape.micro_batches * shape.sequence
        total["tp", "all_reduce"] += 3 * tokens * shape.wide_bytes
    return Volumes({key: size * shape.micro_batches for key, size in total.items()})


def _sequence_slices(shape: Shape, dp_rank: int, pp_rank: int) -> Volumes:
    """Sequence parallel: gradients of what has seen a slice of the sequence only, as far as this rank keeps them."""
    if not shape.sequence_parallel:
        return Volumes()
    if shape.zero:
        own = (pair for bucket in zero_buckets(shape, pp_rank) for pair in _own(bucket, shape.dp, dp_rank))
        values = sum(size for weight, size in own if weight.slice)
    else:
        values = sum(weight.values for unit in rank_units(shape, pp_rank) for weight in unit if weight.slice)
    return Volumes({("tp", "all_reduce"): values * shape.value_bytes})


def _pipeline(shape: Shape, dp_rank: int, pp_rank: int) -> Volumes:
    """An activation down and a gradient up at each border, for each micro-batch; and a tied embedding's gradient
    between the first stage and the last. Source: Huang et al. 2019; Narayanan et al. 2021, section 3.2."""
    here = range(pp_rank, shape.stages, shape.pp)
    borders = sum(stage < shape.stages - 1 for stage in here) + sum(stage > 0 for stage in here)
    message = shape.activation // (shape.tp if shape.sequence_parallel else 1)
    sent = borders * shape.micro_batches * message
    for bucket in zero_buckets(shape, pp_rank):
        for weight, own in _own(bucket, shape.dp, dp_rank) if shape.zero else ((w, w.values) for w in bucket):
            sent += own * shape.value_bytes * weight.copy
    return Volumes({("pp", "send"): sent})


# Activations of minipar's engine: what autograd keeps of one micro-batch until its backward.


def kept_activation_bytes(shape: Shape, stage: int) -> int:
    """Bytes that one micro-batch leaves on a stage between its forward and its backward, without dropout."""
    tokens = shape.global_batch // shape.dp // shape.micro_batches * shape.sequence
    return int(tokens * (shape.stage_layers[stage] * _block(shape) + _ends(shape, stage)))


def _block(shape: Shape, recompute: str | None = None) -> float:
    """Bytes a token of one block.

    It keeps the input and output of each LayerNorm, queries, keys, values and attention's output, and the MLP's
    inside before and after GELU: `(4 + 4 + 8) D` values a token, of which tensor parallel shares all but the first
    four, and sequence parallel those too. Attention is computed in pieces, so there is no [T, T] matrix, but a sum for
    each head, which selective recomputation finds again. Full recomputation keeps the block's input alone.
    Source: Korthikanti et al. 2022, section 4, applied to this model and without dropout masks.
    """
    how, e = shape.recompute if recompute is None else recompute, shape.value_bytes
    outside = shape.tp if shape.sequence_parallel else 1
    D, t, H, kv = shape.hidden, shape.tp, shape.heads, shape.kv_heads or shape.heads
    if how == "full":
        return D / outside * e
    qkv = D + 2 * (D // H) * kv
    repeated = 2 * D if kv != H else 0  # grouped keys and values are repeated for their queries
    scores = 0 if how == "selective" else repeated * e + H * shape.wide_bytes
    return 2 * _norm(shape) * e + ((qkv + D + 2 * 4 * D) * e + scores) / t


def _norm(shape: Shape) -> float:
    """Values a token of a LayerNorm: input, output, mean, deviation."""
    return (2 * shape.hidden + 2) / (shape.tp if shape.sequence_parallel else 1)


def _ends(shape: Shape, stage: int, *, last: bool = True) -> float:
    """Bytes a token of the embedding and (if `last`) of the head, as far as the stage has them."""
    total = 0.0
    if stage == 0:
        total += 8 + 1  # the words' numbers, and whether they are this rank's
    if last and stage == shape.stages - 1:
        softmax = -(-shape.vocab // shape.tp) + 1  # before it is divided by its sum, and that sum
        total += _norm(shape) * shape.value_bytes + softmax * shape.wide_bytes + shape.wide_bytes
        total += 8 + 2  # the targets' numbers, and which of them count
    return total


def peak_activation_bytes(shape: Shape, schedule: Schedule, pp_rank: int) -> int:
    """The most that autograd keeps on a rank at once, in the order of the schedule's actions: what a stage keeps of a
    micro-batch is held from F to B (what W still needs after it is not autograd's, and not counted here). With full
    recomputation, a backward has the inside of one block at a time as well, when the head's part is gone."""
    tokens = shape.global_batch // shape.dp // shape.micro_batches * shape.sequence
    inside = _block(shape, "none") - _block(shape, "full") if shape.recompute == "full" else 0.0
    held = peak = 0
    for action in schedule.actions[pp_rank]:
        kept = kept_activation_bytes(shape, action.stage)
        if action.kind is Kind.BACKWARD:
            gone = _ends(shape, action.stage) - _ends(shape, action.stage, last=False)
            peak = max(peak, int(held + tokens * (inside - gone)))
        held += {Kind.FORWARD: kept, Kind.BACKWARD: -kept, Kind.WEIGHT: 0}[action.kind]
        peak = max(peak, held)
    return peak
