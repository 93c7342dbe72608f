"""Exercise 21: the norm of the gradient over dp x pp x tp."""

import torch
from torch import Tensor

from minipar.grade.judging import Case, Draw, Judge, Outcome, calls_of

TITLE, MINUTES, LESSON = "The norm of a gradient that nobody has whole", 20, 6
CHECKS = {"each number counts once": 5, "all ranks have the same norm": 2, "only small messages": 3}
SMALL, FEW = 16, 4  # bytes of a message, and messages
HINTS = [
    "Squares can be added across ranks, norms cannot: take the root at the very end.",
    "Which numbers are different on the other ranks of pp? Of tp? Of dp? Sum over a group only what differs in it.",
    "What every tp rank has whole may be added on tp rank 0 alone, or by all of them, divided by tp.",
    "One number: squares of what is cut, plus (on tp rank 0) of what is whole. All-reduce it in tp, then in pp; never "
    "in dp. Then the root.",
]


def harness(student, groups, gradients, cut):  # type: ignore[no-untyped-def]
    return student.gradient_norm(gradients, cut, groups)


def cases(draw: Draw) -> list[Case]:
    shapes = [(1, 2, 3), (3, 1, 2), (2, 3, 1), (1, draw.choice([1, 2]), 2)]
    return [_case(draw, *shape) for shape in shapes]


def _case(draw: Draw, dp: int, pp: int, tp: int) -> Case:
    cut = [True, False, draw.choice([True, False]), False]
    inputs: list[dict[str, object]] = [{} for _ in range(dp * pp * tp)]
    for stage in range(pp):
        sizes = [(draw.integer(2, 5), draw.integer(2, 5)), (draw.integer(2, 6),), (3, 2), (draw.integer(1, 4),)]
        whole = [draw.normal(*size) for size in sizes]
        for slice_ in range(tp):
            mine = [draw.normal(*g.shape) if is_cut else g for g, is_cut in zip(whole, cut, strict=True)]
            for replica in range(dp):
                inputs[(replica * pp + stage) * tp + slice_] = {"gradients": mine, "cut": cut}
    ranks = torch.arange(dp * pp * tp).reshape(dp, pp, tp)
    axes = enumerate(("dp", "pp", "tp"))
    groups = {name: ranks.movedim(n, -1).reshape(-1, ranks.shape[n]).tolist() for n, name in axes}
    return Case(inputs, groups, f"dp {dp}, pp {pp}, tp {tp}")


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    dp, pp, tp = (len(case.groups[axis][0]) for axis in ("dp", "pp", "tp"))
    local = [_squares(inputs["gradients"]) for inputs in case.inputs]  # by rank, everything it has
    once = [
        _squares([g for g, is_cut in zip(inputs["gradients"], inputs["cut"], strict=True) if is_cut or rank % tp == 0])
        for rank, inputs in enumerate(case.inputs)
    ]
    right, ranks = _sum(once[: pp * tp]).sqrt(), range(case.size)
    stage_of = [rank // tp % pp for rank in ranks]
    stages = [_sum(once[stage * tp : (stage + 1) * tp]) for stage in range(pp)]
    slices = [_sum(local[s] for s in range(rank % tp, pp * tp, tp)) for rank in ranks]
    found = outcome.values
    judge.equal(
        "each number counts once",
        found,
        [right] * case.size,
        {
            "what every tp rank has whole is counted once for each of them: add it on one tp rank only": [
                _sum(local[: pp * tp]).sqrt()
            ]
            * case.size,
            "each replica is counted: dp ranks have equal gradients, so do not sum over dp": [right * dp**0.5]
            * case.size,
            "all ranks' squares are added up: parameters that several ranks hold count several times": [
                _sum(local).sqrt()
            ]
            * case.size,
            "this is the norm of a rank's own part: sum the squares over tp and pp": [one.sqrt() for one in local],
            "other stages are missing: each has layers of its own, so sum over pp as well": [
                stages[stage].sqrt() for stage in stage_of
            ],
            "the other slices are missing: what is cut differs on the ranks of tp, so sum over tp as well": [
                one.sqrt() for one in slices
            ],
            "norms were added: add squares, and take the root at the end": [
                _sum(one.sqrt() for one in once[: pp * tp])
            ]
            * case.size,
            "the root is missing: this is the norm's square": [right**2] * case.size,
        },
        what=f"the norm, for {case.about},",
    )
    _judge_behaviour(case, outcome, judge)


def _judge_behaviour(case: Case, outcome: Outcome, judge: Judge) -> None:
    first = outcome.values[0]
    equal = all(type(one) is Tensor and one.shape == first.shape and bool(one == first) for one in outcome.values)
    judge.that(
        "all ranks have the same norm",
        equal,
        "ranks have different norms, so each would clip by another factor, and replicas drift apart: the sums must "
        "reach every rank, so use all_reduce",
    )
    for rank in range(case.size):
        calls = [call for call in calls_of(outcome, rank) if call.ranks > 1]
        large = [call for call in calls if call.bytes > SMALL]
        judge.that(
            "only small messages",
            not large and len(calls) <= FEW,
            f"rank {rank} calls {large[0]}: send the sum of squares, one number, and not the gradients"
            if large
            else f"rank {rank} sends {len(calls)} messages: add up at home first, then one number in tp and one in pp",
        )


def _squares(gradients: list[Tensor]) -> Tensor:
    return torch.stack([(gradient**2).sum() for gradient in gradients]).sum()


def _sum(some) -> Tensor:  # type: ignore[no-untyped-def]
    return torch.stack(list(some)).sum()
