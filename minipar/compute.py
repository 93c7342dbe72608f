"""The account of compute: FLOPs of a step and of a run, how well they use the hardware, and how long they take.

Idea    A product of [m, k] and [k, n] is 2 m k n FLOPs. A GPT's forward is a few of them for each token: 24 D^2 in a
        block, 4 T D more for attention, 2 D V for the words at the end. Backward is twice the forward, once for the
        inputs' gradients and once for the weights'. All else is small beside that. What a step must compute (MFU)
        and what it does compute (HFU) differ by what is computed again to save memory.
Legend  B rows of the global batch, T sequence, D hidden, L layers, V vocabulary.
Source  Narayanan et al. 2021, 'Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM';
        Korthikanti et al. 2022, 'Reducing Activation Recomputation in Large Transformer Models'.
Read    `stability.py` for what failures take; `ledger.py`, which has these under its own name.
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
        raise ValueError(
            f"mfu={mfu}, goodput={goodput} and waiting={waiting} are shares: choose from 0 to 1, and waiting below 1"
        )
    return flops / cluster_flops / mfu / (1 - waiting) / goodput


def token_flops(
    parameters: float,
    *,
    layers: int = 0,
    width: int = 0,
    sequence: int = 0,
    recomputed: float = 0.0,
    recomputed_attention: float = 0.0,
) -> float:
    """FLOPs of training a model of any shape on one token: 6 N, and 12 L W T for attention of `width` W = heads x
    size of a head. Computed again are a share of the forward, `recomputed`, and of attention's forward alone.

    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    positive(parameters=parameters)
    if not (0 <= recomputed <= 1 and 0 <= recomputed_attention <= 1):
        raise ValueError(f"recomputed={recomputed} and {recomputed_attention} are shares: choose from 0 to 1")
    attention = 4.0 * layers * width * sequence  # forward
    return (6.0 + 2.0 * recomputed) * parameters + (3.0 + recomputed_attention) * attention


def petaflop_days(flops: float) -> float:
    """FLOPs in petaFLOP/s-days: 1e15 FLOP/s for a day, 8.64e19. The unit of Brown et al. 2020, table D.1."""
    positive(flops=flops)
    return flops / (1e15 * DAY)


def tokens_per_second(*, global_batch: float, sequence: float, step_seconds: float) -> float:
    """What a run takes in: the rows of a step times their tokens, over its time."""
    positive(global_batch=global_batch, sequence=sequence, step_seconds=step_seconds)
    return global_batch * sequence / step_seconds


def token_days(tokens: float, tokens_per_second: float) -> float:
    """Days in which a run takes in so many tokens."""
    positive(tokens=tokens, tokens_per_second=tokens_per_second)
    return tokens / tokens_per_second / DAY


def gpu_hours(seconds: float, gpus: float) -> float:
    """Hours of all GPUs together: what is paid for."""
    positive(seconds=seconds, gpus=gpus)
    return seconds * gpus / 3600.0


def energy_mwh(gpu_hours: float, watts: float, overhead: float = 1.1) -> float:
    """Megawatt-hours of a run; `overhead` is what cooling and the rest of the building add (PUE). Source: Touvron et
    al. 2023, section 6, whose 1.1 this is."""
    positive(gpu_hours=gpu_hours, watts=watts, overhead=overhead)
    return gpu_hours * watts * overhead / 1e6


def carbon_tonnes(energy_mwh: float, tonnes_per_mwh: float = 0.385) -> float:
    """Tonnes of CO2-equivalent; 0.385 for each MWh is the average of the United States. Source: Touvron et al. 2023."""
    positive(energy_mwh=energy_mwh, tonnes_per_mwh=tonnes_per_mwh)
    return energy_mwh * tonnes_per_mwh
