"""Exercise 26: the layout that fits and sends the least."""

from collections.abc import Iterator
from typing import Any

from minipar.grade.judging import Case, Draw, Judge, Outcome

TITLE, MINUTES, LESSON = "Which layout?", 35, 8
WHOLE, NODE, FULL, FITS = "degrees that can be", "tp stays inside a node", "the pipeline is full", "it fits into memory"
NOTHING, LEAST = "None if nothing fits, and only then", "nothing that fits sends less"
LOWEST = "the lowest stage of ZeRO"
CHECKS = {WHOLE: 2, NODE: 2, FULL: 1, FITS: 2, NOTHING: 1, LEAST: 4, LOWEST: 2}
HINTS = [
    "Write two functions first, one for memory and one for what is sent, of (dp, tp, pp, zero). Try them by hand.",
    "Loop over tp that divides per_node and pp that divides layers; dp = gpus / (tp * pp) if that is whole. Then zero.",
    "Drop what breaks a rule; of the rest take min by (sent, zero). If there is no rest: None.",
    "min(found, key=lambda one: (sent(one), one['zero']), default=None), where found is the list of layouts that fit.",
]
SKIPS = {
    "memory": "memory is not looked at",
    "node": "tp reaches across nodes",
    "bubble": "the idle time of the pipeline is not looked at",
    "optimizer": "ZeRO 1 and 2 share nothing here",
}


def harness(student, group, jobs):  # type: ignore[no-untyped-def]
    return [student.choose_layout(**job) for job in jobs]


def cases(draw: Draw) -> list[Case]:
    """One job at least in which each rule decides, one of each kind of answer, and one for which nothing fits."""
    wanted = {*SKIPS, "sent", "zero 0", "zero 1", "zero 3", "tp", "pp", "none"}
    jobs: list[dict[str, Any]] = []
    for _ in range(5000):
        job = _job(draw)
        met = wanted & _shows(job)
        if met and _clear(job):
            jobs.append(job)
            wanted -= met
        if not wanted:
            break
    return [Case([{"jobs": jobs}])]


def _job(draw: Draw) -> dict[str, Any]:
    per_node = draw.choice([4, 8])
    return {
        "layers": draw.choice([24, 32, 36, 48, 60, 80]),
        "hidden": draw.choice([1536, 2048, 3072, 4096, 6144, 8192, 12288]),
        "sequence": draw.choice([1024, 2048, 4096]),
        "rows": draw.choice([32, 48, 64, 96, 256, 1024, 2048]),
        "gpus": per_node * draw.choice([1, 2, 3, 4, 8, 16, 32]),
        "per_node": per_node,
        "memory": draw.choice([24e9, 40e9, 80e9]),
    }


def _shows(job: dict[str, Any]) -> set[str]:
    """What a job is good for: the rules without which another layout would win, and what kind of layout wins."""
    best = _best(job)
    shown = {rule for rule in SKIPS if _best(job, skip=rule) != best}
    if best is None:
        return {"none"}
    first = min(_layouts(job), key=lambda one: (one["tp"], one["pp"], one["zero"]))
    return shown | {
        f"zero {best['zero']}",
        *(axis for axis in ("tp", "pp") if best[axis] > 1),
        *(["sent"] if first["dp"] != best["dp"] else []),
    }


def _clear(job: dict[str, Any]) -> bool:
    """Whether the best layout is so by more than rounding."""
    best = _best(job)
    if best is None:
        return True
    least = _sent(job, best)
    rivals = [one for one in _layouts(job) if _sent(job, one) < least * (1 + 1e-6)]
    return len({(one["dp"], one["tp"], one["pp"]) for one in rivals}) == 1


def _held(job: dict[str, Any], one: dict[str, int], skip: str = "") -> float:
    shares = [one["zero"] >= stage and not (skip == "optimizer" and one["zero"] < 3) for stage in (1, 2, 3)]
    each = sum(size / (one["dp"] if shared else 1) for size, shared in zip((12, 2, 2), shares, strict=True))
    return 12 * job["layers"] * job["hidden"] ** 2 / (one["tp"] * one["pp"]) * each


def _sent(job: dict[str, Any], one: dict[str, int]) -> float:
    dp, tp, pp = one["dp"], one["tp"], one["pp"]
    weights = 2 * 12 * job["layers"] * job["hidden"] ** 2 / (tp * pp)
    rows = 2 * job["hidden"] * job["sequence"] * job["rows"] / dp
    slices = 4 * job["layers"] / pp * 2 * (tp - 1) / tp * rows
    return weights * (dp - 1) / dp * (3 if one["zero"] == 3 else 2) + slices + (2 * rows if pp > 1 else 0)


def _layouts(job: dict[str, Any], skip: str = "") -> Iterator[dict[str, int]]:
    """All that are allowed; without one rule, if so asked."""
    gpus = job["gpus"]
    for tp in [n for n in range(1, gpus + 1) if (gpus if skip == "node" else job["per_node"]) % n == 0]:
        for pp in [n for n in range(1, job["layers"] + 1) if job["layers"] % n == 0]:
            dp, odd = divmod(gpus, tp * pp)
            if odd or job["rows"] % dp or (skip != "bubble" and (pp - 1) * dp * 10 > job["rows"]):
                continue
            for zero in range(4):
                one = {"dp": dp, "tp": tp, "pp": pp, "zero": zero}
                if skip == "memory" or _held(job, one, skip) <= job["memory"]:
                    yield one


def _best(job: dict[str, Any], skip: str = "") -> dict[str, int] | None:
    return min(_layouts(job, skip), key=lambda one: (_sent(job, one), one["zero"]), default=None)


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    for job, found in zip(case.inputs[0]["jobs"], outcome.values[0], strict=True):
        best = _best(job)
        told = ", ".join(f"{name}={value:,.0f}" for name, value in job.items())
        judge.that(
            NOTHING,
            (found is None) == (best is None),
            f"for {told} there is a layout that fits, {best}, and the answer is None"
            if found is None
            else f"for {told} nothing fits, and the answer is {_short(found)}: return None",
        )
        for name in CHECKS:
            judge.that(name, True, "")
        if best is None:
            continue
        if found is not None and _possible(job, found, told, judge):
            _judge_layout(job, found, best, f"for {told} the answer is {_short(found)}", judge)
        else:
            for name in CHECKS:
                judge.that(name, False, f"not judged, since for {told} there is no layout to judge")


def _possible(job: dict[str, Any], found: Any, told: str, judge: Judge) -> bool:
    names = ("dp", "tp", "pp", "zero")
    if type(found) is not dict or set(found) != set(names) or any(type(value) is not int for value in found.values()):
        return judge.that(WHOLE, False, f"a layout is a dict of whole dp, tp, pp and zero: got {_short(found)}")
    dp, tp, pp, zero = (found[name] for name in names)
    why = ""
    if min(dp, tp, pp) < 1 or dp * tp * pp != job["gpus"]:
        why = f"dp * tp * pp is {dp * tp * pp}, and there are {job['gpus']} GPUs"
    elif job["layers"] % pp:
        why = f"{pp} stages do not divide {job['layers']} layers"
    elif job["rows"] % dp:
        why = f"{dp} replicas do not divide {job['rows']} rows"
    elif zero not in range(4):
        why = f"ZeRO has no stage {zero}"
    return judge.that(WHOLE, not why, f"for {told} the answer is {_short(found)}: {why}")


def _judge_layout(job: dict[str, Any], found: dict[str, int], best: dict[str, int], said: str, judge: Judge) -> None:
    node = judge.that(
        NODE,
        job["per_node"] % found["tp"] == 0,
        f"{said}: a tp group of {found['tp']} does not fit into nodes of {job['per_node']}, so it would talk over the "
        "slow links",
    )
    idle = (found["pp"] - 1) * found["dp"] / job["rows"]
    full = judge.that(
        FULL,
        (found["pp"] - 1) * found["dp"] * 10 <= job["rows"],
        f"{said}: {found['pp']} stages with {job['rows'] // found['dp']} micro-batches each stand idle for {idle:.0%} "
        "of their work, and 10% is allowed",
    )
    held = _held(job, found)
    fits = judge.that(
        FITS,
        held <= job["memory"],
        f"{said}: it holds {held / 1e9:.1f} GB on a GPU of {job['memory'] / 1e9:.0f} GB",
    )
    if not (node and full and fits):
        return
    sent, least = _sent(job, found), _sent(job, best)
    why = "compare all that fit by the bytes that a GPU sends"
    if found == _best(job, "optimizer"):
        why = "in stages 1 and 2 the optimizer is divided by dp, so more layouts fit"
    right = judge.that(
        LEAST,
        sent <= least * (1 + 1e-9),
        f"{said}, which sends {sent / 1e9:.2f} GB a step; {best} fits and sends {least / 1e9:.2f} GB: {why}",
    )
    if right:
        judge.that(
            LOWEST,
            found["zero"] == best["zero"],
            f"{said}: stage {best['zero']} fits as well and sends as much, and is simpler",
        )


def _short(value: Any) -> str:
    return repr(value)[:60]
