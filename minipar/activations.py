"""The account of activations: what a GPT in mixed precision keeps from forward to backward, by formula.

Idea    A block keeps for each token what its backward will need: 34 D bytes in 2-byte values (with dropout masks of 1),
        and the H scores against each of T tokens, 5 H T bytes. Tensor parallel shares what lies inside attention and
        MLP, sequence parallel the rest; recomputing the scores drops the second term, recomputing the block all but
        its input. A pipeline's stage keeps that for every micro-batch that is in flight on it.
Legend  b rows of a micro-batch, T sequence, D hidden, H heads, t tensor-parallel ranks.
Source  Korthikanti et al. 2022, 'Reducing Activation Recomputation in Large Transformer Models', section 4, table 2.
Read    `ledger.kept_activation_bytes` for minipar's own engine, which keeps no scores and no masks.
"""

from __future__ import annotations

from minipar import schedule as schedules
from minipar.compute import checked_recompute, positive


def layer_activation_bytes(
    *,
    hidden: int,
    heads: int,
    sequence: int,
    micro_batch: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes on a rank of one block and micro-batch, in 2-byte values.

    Outside of the split layers 10 b T D (1/t of it by sequence), inside 24 b T D / t, scores 5 b H T^2 / t;
    "selective" drops the scores, "full" keeps the block's input alone, 2 b T D (1/t of it by sequence).
    """
    positive(hidden=hidden, heads=heads, sequence=sequence, micro_batch=micro_batch, tp=tp)
    values = float(micro_batch) * sequence * hidden
    outside = tp if sequence_parallel else 1
    if checked_recompute(recompute) == "full":
        return 2 * values / outside
    scores = 5.0 * heads * sequence / hidden if recompute == "none" else 0.0
    return values * (10 / outside + 24 / tp + scores / tp)


def activation_bytes(
    *,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    micro_batch: int,
    tp: int = 1,
    pp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    schedule: str = "1f1b",
    micro_batches: int = 1,
    stage: int = 0,
    chunks: int = 1,
    vocab: int = 0,
) -> float:
    """Bytes that the rank of a stage holds at most: its layers' share, times the micro-batches in flight there.

    How many are in flight follows from the schedule's order. With `vocab`, the last stage also keeps the last
    LayerNorm's input, the projection's input and the logits in 4 bytes, `4 b T D (1 + V/D) / t`, of one micro-batch;
    the first keeps the embedding's dropout mask, `b T D`. Raises `ValueError` for sizes that don't fit together.
    """
    positive(layers=layers, pp=pp, micro_batches=micro_batches, chunks=chunks)
    if layers % (pp * chunks):
        raise ValueError(
            f"{layers} layers do not divide into {pp} stages of {chunks} chunks: choose a multiple of {pp * chunks}"
        )
    if not 0 <= stage < pp:
        raise ValueError(f"stage {stage} of {pp}: choose from 0 to {pp - 1}")
    block = layer_activation_bytes(
        hidden=hidden, heads=heads, sequence=sequence, micro_batch=micro_batch, tp=tp,
        sequence_parallel=sequence_parallel, recompute=recompute,
    )  # fmt: skip
    flying = schedules.in_flight(schedules.by_name(schedule, pp, micro_batches, chunks))[stage]
    total = block * layers / (pp * chunks) * flying
    values, outside = float(micro_batch) * sequence * hidden, tp if sequence_parallel else 1
    if vocab and stage == 0:
        total += values / outside * -(-flying // chunks)
    if vocab and stage == pp - 1:
        total += 4 * values * (1 + vocab / hidden) / tp
    return total
