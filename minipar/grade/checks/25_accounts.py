"""Exercise 25: FLOPs, days, bytes and MFU by formulas."""

from collections.abc import Mapping
from typing import Any

from minipar.grade.judging import Case, Draw, Judge, Outcome, same

TITLE, MINUTES, LESSON = "The accounts of a run", 15, 8
CHECKS = {"training_flops": 2, "training_days": 2, "bytes_per_parameter": 3, "all_reduce_bytes": 2, "mfu": 2}
HINTS = [
    "Write the unit behind each number, and see whether what is left over is the unit that you want.",
    "6 N D. A day has 86,400 seconds; one TFLOP/s is 1e12 FLOP/s; and GPUs reach their peak times the MFU.",
    "Bytes of a parameter: 2 + 2 + 12; from stage 1 on the 12 is over dp, from stage 2 a 2, in stage 3 both.",
    "All-reduce: 2 (N-1)/N of the buffer's bytes. MFU: 6 N times tokens a second, over gpus * peak * 1e12.",
]


def harness(student, group, **asked):  # type: ignore[no-untyped-def]
    return {
        "training_flops": [student.training_flops(*one) for one in asked["training_flops"]],
        "training_days": [student.training_days(*one) for one in asked["training_days"]],
        "bytes_per_parameter": [student.bytes_per_parameter(*one) for one in asked["bytes_per_parameter"]],
        "all_reduce_bytes": [student.all_reduce_bytes(*one) for one in asked["all_reduce_bytes"]],
        "mfu": [student.mfu(*one) for one in asked["mfu"]],
    }


def cases(draw: Draw) -> list[Case]:
    models = [(draw.integer(1, 700) * 1e9, draw.integer(1, 20) * 1e12) for _ in range(4)]
    clusters = [(draw.integer(1, 3000) * 8, draw.choice([312.0, 989.0, 2250.0])) for _ in range(4)]
    both = list(zip(models, clusters, strict=True))
    asked: dict[str, list[list[Any]]] = {
        "training_flops": [list(model) for model in models],
        "training_days": [[*model, *cluster, draw.integer(20, 60) / 100] for model, cluster in both],
        "bytes_per_parameter": [[zero, draw.integer(3, 64)] for zero in (0, 1, 2, 3)] + [[3, 1]],
        "all_reduce_bytes": [[draw.integer(1, 99) * 960, draw.choice([2, 4]), ranks] for ranks in (1, 2, 3, 8, 5)],
        "mfu": [[model[0], draw.integer(10, 90) * 1e4, *cluster] for model, cluster in both],
    }
    return [Case([asked])]


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    for name in CHECKS:
        asked, found = case.inputs[0][name], outcome.values[0][name]
        right = [RIGHT[name](*one) for one in asked]
        if all(map(same, found, right)):
            judge.that(name, True, "")
            continue
        said = (advice for advice, wrong in MISTAKES[name].items() if all(map(same, found, [wrong(*a) for a in asked])))
        place = next(place for place, pair in enumerate(zip(found, right, strict=True)) if not same(*pair))
        call = f"{name}({', '.join(f'{number:g}' for number in asked[place])})"
        example = f"{call} is {right[place]:.6g}, and not {_told(found[place])}"
        judge.that(name, False, f"{example}: {next(said, 'look at its line in the table, unit by unit')}")


def _told(value: Any) -> str:
    return f"{value:.6g}" if type(value) in (int, float) else repr(value)[:40]


def _bytes(zero: int, dp: int) -> float:
    return 2 / (dp if zero > 2 else 1) + 2 / (dp if zero > 1 else 1) + 12 / (dp if zero > 0 else 1)


RIGHT: Mapping[str, Any] = {
    "training_flops": lambda n, d: 6.0 * n * d,
    "training_days": lambda n, d, gpus, peak, share: 6.0 * n * d / (gpus * peak * 1e12 * share) / 86400,
    "bytes_per_parameter": _bytes,
    "all_reduce_bytes": lambda n, each, ranks: 2.0 * (ranks - 1) / ranks * n * each,
    "mfu": lambda n, speed, gpus, peak: 6.0 * n * speed / (gpus * peak * 1e12),
}
MISTAKES: Mapping[str, Mapping[str, Any]] = {
    "training_flops": {
        "this is forward alone, 2 N D: backward takes twice as much again": lambda n, d: 2.0 * n * d,
        "this is backward alone, 4 N D: forward is another 2 N D": lambda n, d: 4.0 * n * d,
        "8 N D is with forward computed twice: without recomputation it is 6 N D": lambda n, d: 8.0 * n * d,
    },
    "training_days": {
        "these are seconds: a day has 86,400": lambda *a: RIGHT["training_days"](*a) * 86400,
        "these are hours: divide by 24 more": lambda *a: RIGHT["training_days"](*a) * 24,
        "the MFU is left out: GPUs do not reach their peak": lambda *a: RIGHT["training_days"](*a) * a[4],
        "the MFU is on the wrong side: the less of the peak is used, the longer it takes": (
            lambda *a: RIGHT["training_days"](*a) * a[4] ** 2
        ),
        "the number of GPUs is left out": lambda *a: RIGHT["training_days"](*a) * a[2],
        "a TFLOP/s is 1e12 FLOP/s": lambda *a: RIGHT["training_days"](*a) * 1e12,
        "a TFLOP/s is 1e12 FLOP/s, not 1e9": lambda *a: RIGHT["training_days"](*a) * 1e3,
    },
    "bytes_per_parameter": {
        "the 12 bytes of the optimizer are m, v and the 32-bit master weight: the master is left out": (
            lambda zero, dp: _bytes(zero, dp) - 4 / (dp if zero else 1)
        ),
        "each stage shares only one thing here: stage 2 shares the optimizer and gradients, stage 3 all three": (
            lambda zero, dp: 16 - {0: 0, 1: 12, 2: 2, 3: 2}[zero] * (1 - 1 / dp)
        ),
        "the stages are one off: stage 0 shares nothing, stage 1 the optimizer": (
            lambda zero, dp: _bytes(min(3, zero + 1), dp)
        ),
        "stage 1 shares the optimizer, and stage 2 gradients; here it is the other way round": (
            lambda zero, dp: _bytes(zero, dp) if zero != 1 else 14 + 2 / dp
        ),
        "everything is shared in every stage: only stage 3 shares it all": lambda zero, dp: 16 / dp,
        "nothing is shared: in stage 1 the optimizer's 12 bytes become 12 / dp": lambda zero, dp: 16,
    },
    "all_reduce_bytes": {
        "this is a reduce_scatter, half of it: an all-reduce is one, and then an all_gather": (
            lambda *a: RIGHT["all_reduce_bytes"](*a) / 2
        ),
        "2 times the buffer holds for very many ranks only: it is 2 (N-1)/N": lambda n, each, ranks: 2.0 * n * each,
        "these are numbers, not bytes": lambda *a: RIGHT["all_reduce_bytes"](*a) / a[1],
        "this is what all ranks send together: divide by them": lambda *a: RIGHT["all_reduce_bytes"](*a) * a[2],
        "this is everyone sending all of it to everyone: in a ring pieces of 1/N travel": (
            lambda n, each, ranks: 1.0 * (ranks - 1) * n * each
        ),
    },
    "mfu": {
        "it is in percent: a share goes from 0 to 1": lambda *a: RIGHT["mfu"](*a) * 100,
        "the number of GPUs is left out: the tokens are those of all of them": lambda *a: RIGHT["mfu"](*a) * a[2],
        "this counts forward alone: 6 N for each token, not 2 N": lambda *a: RIGHT["mfu"](*a) / 3,
        "8 N for each token would be what is computed with recomputation (HFU): MFU counts 6 N": (
            lambda *a: RIGHT["mfu"](*a) * 8 / 6
        ),
        "a TFLOP/s is 1e12 FLOP/s": lambda *a: RIGHT["mfu"](*a) * 1e12,
        "this is its inverse: what is used stands above, the peak below": lambda *a: 1 / RIGHT["mfu"](*a),
    },
}
