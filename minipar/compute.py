"""The account of compute: FLOPs of a step and of a run, how well they use the hardware, and how long they take.

Idea    A product of [m, k] and [k, n] is 2 m k n FLOPs. A GPT's forward is a few of them for each token: 24 D^2 in a
        block, 4 T D more for attention, 2 D V for the words at the end. Backward is twice the forward, once for the
        inputs' gradients and once for the weights'. All else is small beside that. What a step must compute (MFU)
        and what it does compute (HFU) differ by what is computed again to save memory.
Legend  B rows of the global batch, T sequence, D hidden, L layers, V vocabulary.
Source  Narayanan et al. 2021, 'Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM';
        Korthikanti et al. 2022, 'Reducing Activation Recomputation in Large Transformer Models'.
Read    `ledger.py`, which has the other accounts, and these under its own name.
"""

from __future__ import annotations

from math import isfinite

DAY = 86_400.0  # seconds
RECOMPUTE = ("none", "selective", "full")


def positive(**sizes: float) -> None:
    """Raise `ValueError`, one line, for the first size that is not a finite number above 0."""
    for name, size in sizes.items():
        if not (isinstance(size, (int, float)) and isfinite(size) and size > 0):
            raise ValueError(f"{name}={size!r} is no size: give a finite number above 0")


def checked_recompute(recompute: str) -> str:
    """The name, if it is one of `RECOMPUTE`; else `ValueError`."""
    if recompute not in RECOMPUTE:
        raise ValueError(f"unknown recompute {recompute!r}: choose from {', '.join(RECOMPUTE)}")
    return recompute


def training_flops(parameters: float, tokens: float) -> float:
    """FLOPs of training `parameters` on `tokens`: 6 N D, two for each parameter and token forward, four backward.

    Attention's own products and recomputation are left out. Source: Kaplan et al. 2020, section 2.1.
    """
    positive(parameters=parameters, tokens=tokens)
    return 6.0 * parameters * tokens


def step_flops(
    *, layers: int, hidden: int, vocab: int, sequence: int, global_batch: int, recompute: str = "none"
) -> float:
    """FLOPs of one step over the global batch: `72 B L T D^2 (1 + T/6D + V/12LD)`, every matrix product counted.

    "full" recomputes each block's forward: `96 B L T D^2 (1 + T/6D + V/16LD)`; source: Narayanan et al. 2021,
    equation 3. "selective" recomputes the inside of attention, which that paper's successor counts as
    `72 B L T D^2 (1 + T/3D + V/12LD)`; source: Korthikanti et al. 2022, equations 7 (none) and 8.
    """
    positive(layers=layers, hidden=hidden, vocab=vocab, sequence=sequence, global_batch=global_batch)
    tokens = float(global_batch) * sequence
    matrices, attention = 24.0 * hidden**2, 4.0 * sequence * hidden  # of a block, a token, forward
    words = 2.0 * hidden * vocab
    block = {
        "none": 3 * (matrices + attention),
        "selective": 3 * (matrices + 2 * attention),
        "full": 4 * (matrices + attention),
    }[checked_recompute(recompute)]
    return tokens * (layers * block + 3 * words)


def mfu(*, flops: float, seconds: float, gpus: float, peak_flops: float) -> float:
    """The share of the peak that `flops` of a step make up, which took `seconds` on `gpus` of `peak_flops` each.

    Model FLOPs utilisation with `step_flops(recompute="none")`, hardware FLOPs utilisation (HFU) with what was really
    computed. Source: Chowdhery et al. 2022 (PaLM), section 4.1.
    """
    positive(flops=flops, seconds=seconds, gpus=gpus, peak_flops=peak_flops)
    return flops / (seconds * gpus * peak_flops)


def days(parameters: float, tokens: float, gpus: float, tflops_per_gpu: float) -> float:
    """Days of training with activations recomputed: 8 T P / (n X).

    `tflops_per_gpu` is what each GPU achieves, in 1e12 FLOP/s. Source: Narayanan et al. 2021, section 5.1.
    """
    positive(parameters=parameters, tokens=tokens, gpus=gpus, tflops_per_gpu=tflops_per_gpu)
    return 8.0 * tokens * parameters / (gpus * tflops_per_gpu * 1e12) / DAY


def run_seconds(
    flops: float, cluster_flops: float, *, mfu: float = 1.0, waiting: float = 0.0, goodput: float = 1.0
) -> float:
    """Seconds of a whole run on a cluster of `cluster_flops` FLOP/s at its peak.

    With the defaults the textbook's answer; the honest one divides by what is lost: `mfu`, the share of the peak that
    steps reach; `waiting`, the share of time for data and checkpoints; `goodput`, the share of steps that count,
    since after a failure steps are taken again.
    """
    positive(flops=flops, cluster_flops=cluster_flops, mfu=mfu, goodput=goodput)
    if mfu > 1 or goodput > 1 or not 0 <= waiting < 1:
        raise ValueError(f"mfu={mfu}, goodput={goodput} and waiting={waiting} are shares: choose from 0 to 1")
    return flops / cluster_flops / mfu / (1 - waiting) / goodput


def checkpoint_interval(*, save_seconds: float, failure_seconds: float) -> float:
    """Seconds between checkpoints that lose the least, when one takes `save_seconds` and something fails every
    `failure_seconds` on average: `sqrt(2 s f)`. Source: Young 1974, 'A first order approximation to the optimum
    checkpoint interval'; Daly 2006 for what is left out when s is not small beside f."""
    positive(save_seconds=save_seconds, failure_seconds=failure_seconds)
    return (2.0 * save_seconds * failure_seconds) ** 0.5


def goodput(*, interval: float, save_seconds: float, failure_seconds: float, restart_seconds: float = 0.0) -> float:
    """The share of time in which steps are taken that count: less saving, and for each failure half an interval that
    is lost and a restart. 0 where there is nothing left. Source: Young 1974, Daly 2006, to first order."""
    positive(interval=interval, save_seconds=save_seconds, failure_seconds=failure_seconds)
    if not 0 <= restart_seconds < float("inf"):
        raise ValueError(f"restart_seconds={restart_seconds} is no time: give seconds from 0")
    saving = interval / (interval + save_seconds)
    lost = ((interval + save_seconds) / 2 + restart_seconds) / failure_seconds
    return max(0.0, saving * (1 - lost))
