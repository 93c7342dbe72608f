"""The account of stability: what fails, what a failure costs, and what the log shows of it.

Idea    With n GPUs something fails n times as often. Each failure throws away what was computed since the last
        checkpoint, and checkpoints cost time as well: between the two lies the best interval. Slow ranks are the
        smaller trouble that never ends: a step takes as long as its slowest rank, so jitter costs more the more ranks
        there are. And 16-bit numbers overflow or vanish, which loss scaling has to catch.

            |--- interval ---|save|--- interval ---|save|----- x failure
                                                    lost:  ^^^^^^ back to here, restart

Source  Young 1974 and Daly 2006 for the interval; Llama team 2024, 'The Llama 3 Herd of Models', section 3.3.4, for how
        often GPUs fail; Micikevicius et al. 2018, 'Mixed Precision Training', for 16-bit numbers.
Read    `compute.py`, whose honest time divides by what is left.
"""

from __future__ import annotations

from math import exp, expm1, log, sqrt

from minipar.compute import positive

# One failure in so many hours of a GPU: 54 days of 16,384 GPUs with 419 unexpected interruptions (Llama 3, table 5).
GPU_FAILURE_HOURS = 54 * 24 * 16_384 / 419
FLOAT16 = {"largest": 65504.0, "smallest": 2.0**-24, "smallest_normal": 2.0**-14}
BFLOAT16 = {"largest": 3.3895313892515355e38, "smallest": 2.0**-133, "smallest_normal": 2.0**-126}


def failure_seconds(gpus: float, gpu_failure_hours: float = GPU_FAILURE_HOURS) -> float:
    """Seconds between failures of a cluster, on average: a GPU's own, shared by all. The default is Llama 3's."""
    positive(gpus=gpus, gpu_failure_hours=gpu_failure_hours)
    return gpu_failure_hours * 3600.0 / gpus


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


def exact_goodput(
    *, interval: float, save_seconds: float, failure_seconds: float, restart_seconds: float = 0.0
) -> float:
    """As `goodput`, where failures come at random and may come again while a run restarts or catches up: also right
    when they are frequent. Source: Daly 2006, equation 20."""
    positive(interval=interval, save_seconds=save_seconds, failure_seconds=failure_seconds)
    failing, restarting = (interval + save_seconds) / failure_seconds, restart_seconds / failure_seconds
    return interval / failure_seconds * exp(-restarting - failing) / -expm1(-failing)


def straggler_factor(ranks: int, jitter: float) -> float:
    """How much longer a step takes than a rank's mean, when ranks' times vary by `jitter` (deviation over mean) and all
    wait for the slowest: about `1 + jitter sqrt(2 ln n)`, the usual estimate of the largest of n normal numbers."""
    positive(ranks=ranks)
    if not 0 <= jitter < 1:
        raise ValueError(f"jitter={jitter} is a share of the step's time: choose from 0 to 1")
    return 1.0 + jitter * sqrt(2 * log(ranks)) if ranks > 1 else 1.0


def loss_scale_limit(largest_gradient: float) -> float:
    """The largest power of two by which a loss can be scaled so that no float16 gradient overflows. Source:
    Micikevicius et al. 2018, section 3.2."""
    positive(largest_gradient=largest_gradient)
    scale = 1.0
    while scale * 2 * largest_gradient <= FLOAT16["largest"]:
        scale *= 2
    while scale * largest_gradient > FLOAT16["largest"]:
        scale /= 2
    return scale


def skipped_share(growth_interval: float = 2000.0) -> float:
    """The share of steps that dynamic loss scaling skips in the long run: it doubles the scale after so many good
    steps, overflows once, halves it: one in `growth_interval + 1`."""
    positive(growth_interval=growth_interval)
    return 1.0 / (growth_interval + 1.0)
