"""The layout that the accounts suggest: try them all, drop what does not fit, rank the rest by the time of a step.

Idea    Degrees that multiply to the GPUs, ZeRO's stages, schedules, sizes of a micro-batch, recomputation: some ten
        thousand combinations, each judged by closed formulas in `layout.py`. The fastest that fits wins. `compare`
        says why another loses: it lays the two sums of waits side by side.
Cost    Some ten microseconds for each layout.
Read    `layout.py` before; `reasons.py`, which puts the answer into words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from minipar.compute import RECOMPUTE
from minipar.layout import Cluster, Estimate, Job, Layout, estimate, memory_bytes, micro_batches

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "gpipe")
LARGEST_MICRO_BATCH = 16
LARGEST_TP = 64
MOST_CHUNKS = 8


@dataclass(frozen=True)
class Plan:
    """`ranked`: the best layout of each (dp, tp, pp), fastest first; empty if none fits. `tried` and `fitting` count
    all layouts; `nearest` is the one that holds the least."""

    job: Job
    cluster: Cluster
    ranked: tuple[Estimate, ...]
    tried: int
    fitting: int
    nearest: Estimate | None

    @property
    def best(self) -> Estimate:
        """The winner. Raises `ValueError`, one line, if nothing fits."""
        if self.ranked:
            return self.ranked[0]
        raise ValueError(nothing_fits(self))


def choose(job: Job, cluster: Cluster, wanted: Mapping[str, Any] | None = None) -> Plan:
    """Judge every layout, or only those that have what is `wanted`, such as `{"tp": 16, "zero": 1}`.

    Raises `ValueError`, one line, for what is wanted but cannot be: an unknown name, or degrees that don't divide.
    """
    wanted = dict(wanted or {})
    check_wanted(job, cluster, wanted)
    best: dict[tuple[int, int, int], Estimate] = {}
    tried = fitting = 0
    least: tuple[float, Layout] | None = None
    for layout in layouts(job, cluster, wanted):
        tried += 1
        held = sum(memory_bytes(job, layout).values())
        if least is None or held < least[0]:
            least = held, layout
        if held > cluster.gpu.memory_bytes:
            continue
        fitting += 1
        found, key = estimate(job, cluster, layout), (layout.dp, layout.tp, layout.pp)
        if key not in best or _order(found) < _order(best[key]):
            best[key] = found
    ranked = tuple(sorted(best.values(), key=_order))
    return Plan(job, cluster, ranked, tried, fitting, estimate(job, cluster, least[1]) if least else None)


def _order(found: Estimate) -> tuple[float, float]:
    """Faster first; of two that take the same time, to a thousandth, the one that holds less."""
    return float(f"{found.step_seconds:.3g}"), found.bytes


def layouts(job: Job, cluster: Cluster, wanted: Mapping[str, Any]) -> Iterator[Layout]:
    """Every layout of the model on the cluster's GPUs that has what is wanted, whether it fits or not."""
    model = job.model
    for tp in _asked(wanted, "tp", [t for t in divisors(cluster.gpus) if t <= LARGEST_TP]):
        if model.heads % tp or cluster.gpus % tp:
            continue
        for pp in _asked(wanted, "pp", divisors(cluster.gpus // tp)):
            dp, odd = divmod(cluster.gpus, tp * pp)
            if odd or pp > model.layers or job.global_batch % dp or wanted.get("dp", dp) != dp:
                continue
            for rows in _asked(wanted, "micro_batch", [1, 2, 4, 8, LARGEST_MICRO_BATCH]):
                if job.global_batch // dp % rows == 0:
                    yield from _with_options(job, Layout(dp, tp, pp, micro_batch=rows), wanted)


def _with_options(job: Job, base: Layout, wanted: Mapping[str, Any]) -> Iterator[Layout]:
    """What is left to choose once degrees and micro-batch are: schedule, recomputation, ZeRO."""
    degrees = (base.dp, base.tp, base.pp)
    for schedule, chunks in _schedules(job, base, wanted):
        for recompute in _asked(wanted, "recompute", ["none", "full"] if job.flash else list(RECOMPUTE)):
            for zero in _asked(wanted, "zero", [0, 1, 2, 3] if base.dp > 1 else [0]):
                yield Layout(*degrees, zero, base.micro_batch, recompute, schedule, chunks)


def _schedules(job: Job, base: Layout, wanted: Mapping[str, Any]) -> list[tuple[str, int]]:
    m, p = micro_batches(job, base), base.pp
    found = []
    for name in _asked(wanted, "schedule", list(SCHEDULES)):
        if name == "interleaved":
            deep = [v for v in range(2, MOST_CHUNKS + 1) if p * v <= job.model.layers]
            found += [(name, v) for v in _asked(wanted, "chunks", deep) if p > 1 and v in deep and m % p == 0]
        elif wanted.get("chunks", 1) == 1 and (p > 1 or name == "1f1b" or wanted.get("schedule") == name):
            found.append((name, 1))
    return found


def _asked(wanted: Mapping[str, Any], name: str, choices: list[Any]) -> list[Any]:
    return [wanted[name]] if name in wanted else choices


@lru_cache(maxsize=1024)
def divisors(number: int) -> list[int]:
    """All whole numbers that divide `number`, smallest first."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def check_wanted(job: Job, cluster: Cluster, wanted: Mapping[str, Any]) -> None:
    """Raise `ValueError`, one line, where what is wanted leaves no layout at all."""
    known = {field.name for field in fields(Layout)}
    for name, value in wanted.items():
        if name not in known:
            raise ValueError(f"a layout has no {name!r}: choose from {', '.join(sorted(known))}")
        whole = isinstance(value, int) and value >= (0 if name == "zero" else 1)
        if name not in ("recompute", "schedule") and not whole:
            raise ValueError(f"{name}={value!r}: give a whole number from {0 if name == 'zero' else 1}")
    choices = {"recompute": RECOMPUTE, "schedule": SCHEDULES, "zero": (0, 1, 2, 3)}
    for name, allowed in choices.items():
        if name in wanted and wanted[name] not in allowed:
            raise ValueError(f"{name}={wanted[name]!r}: choose from {', '.join(map(str, allowed))}")
    asked = 1
    for name in ("dp", "tp", "pp"):
        asked *= wanted.get(name, 1)
    if cluster.gpus % asked:
        degrees = " x ".join(f"{name}={wanted[name]}" for name in ("dp", "tp", "pp") if name in wanted)
        raise ValueError(
            f"{degrees} does not divide {cluster.gpus:,} GPUs: choose from {_short(divisors(cluster.gpus))}"
        )
    if job.model.heads % wanted.get("tp", 1):
        raise ValueError(
            f"tp={wanted['tp']} does not divide {job.model.heads} heads: "
            f"choose from {_short(divisors(job.model.heads))}"
        )
    if wanted.get("pp", 1) > job.model.layers:
        raise ValueError(f"pp={wanted['pp']} is more stages than {job.model.layers} layers: choose at most that many")
    if next(layouts(job, cluster, wanted), None) is None:
        said = " ".join(f"{name}={value}" for name, value in wanted.items()) or "this"
        raise ValueError(
            f"no layout of {cluster.gpus:,} GPUs has {said}: a global batch of {job.global_batch:,} rows must divide "
            "among the replicas and into micro-batches (for interleaved, a multiple of pp of them); change one of them"
        )


def _short(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")


def nothing_fits(plan: Plan) -> str:
    """What is over, in one line, and what would help."""
    near, limit = plan.nearest, plan.cluster.gpu.memory_bytes
    if near is None:
        return "there is no layout: the global batch does not divide among any replicas"
    over = max(near.memory, key=lambda account: near.memory[account])
    return (
        f"nothing fits: of {plan.tried:,} layouts, the one that holds least ({near.layout}) needs "
        f"{near.bytes / 1e9:,.1f} GB of {limit / 1e9:,.0f} GB, most of it {over} ({near.memory[over] / 1e9:,.1f} GB): "
        "take more GPUs, larger ones, or a smaller model or sequence"
    )


def compare(plan: Plan, other: Estimate) -> list[tuple[str, float]]:
    """By how many seconds the other layout is slower than the best, by account, the largest loss first."""
    best = plan.best.seconds
    return sorted(
        ((account, seconds - best[account]) for account, seconds in other.seconds.items()), key=lambda pair: -pair[1]
    )
