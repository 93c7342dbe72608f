"""Exercise 22: an overflow that one rank sees is one for all ranks of the world."""

from typing import Any

import torch
from torch import Tensor

from minipar.grade.judging import Case, Draw, Judge, Outcome, calls_of, same

TITLE, MINUTES, LESSON = "All step, or nobody", 25, 7
CHECKS = {
    "if one rank overflows, no rank steps": 4,
    "a good step divides by the scale, in float32": 3,
    "the scale is halved and doubled": 3,
    "one small message to the world": 2,
}
HINTS = [
    "torch.isfinite(gradient).all() sees inf and NaN. What must be known is whether that holds on every rank.",
    "A flag as a tensor of one number, 1.0 for an overflow: groups.world.all_reduce(flag, 'max'). The dp, pp or tp "
    "group alone is not enough.",
    "Turn the gradient into float32 before you divide by the scale: in float16 small values would vanish, which is "
    "what the scale is there to prevent.",
    "Overflow: return weight, scale / 2, 0. Else good + 1; if that is the window, scale * 2 and 0.",
]


def harness(student, groups, weight, gradients, scale, window, lr):  # type: ignore[no-untyped-def]
    good, steps = 0, []
    for gradient in gradients:
        before = weight.clone()
        weight, scale, good = student.step(before, gradient.clone(), scale, good, window, lr, groups)
        steps.append({"weight": weight.clone(), "scale": float(scale), "good": int(good)})
    return steps


def cases(draw: Draw) -> list[Case]:
    return [_case(draw, *shape) for shape in ((1, 2, 2), (3, 1, 1), (1, draw.choice([3, 5]), 1), (1, 1, 3))]


def _case(draw: Draw, dp: int, pp: int, tp: int) -> Case:
    size, window, steps, scale = dp * pp * tp, draw.integer(2, 3), 7, 2.0 ** draw.integer(14, 16)
    inputs: list[dict[str, Any]] = []
    for _ in range(size):
        length = draw.integer(4, 8)  # parts differ in size; gradients vanish in float16 without the scale
        gradients = [(draw.normal(length) * 0.04).half() for _ in range(steps)]
        weight = (draw.normal(length) * 0.01).float()
        inputs.append({"weight": weight, "gradients": gradients, "scale": scale, "window": window, "lr": 2.0**15})
    for when, what in ((window + 1, "inf"), (5, draw.choice(["inf", "-inf"])), (6, "nan")):
        gradient = inputs[draw.integer(0, size - 1)]["gradients"][when]
        gradient[draw.integer(0, len(gradient) - 1)] = float(what)
    ranks = torch.arange(size).reshape(dp, pp, tp)
    axes = enumerate(("dp", "pp", "tp"))
    groups = {name: ranks.movedim(n, -1).reshape(-1, ranks.shape[n]).tolist() for n, name in axes}
    return Case(inputs, groups, f"dp {dp}, pp {pp}, tp {tp}, window {window}")


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    right, found = _run(case), outcome.values
    likely = _likely(case)
    judge.equal(
        "if one rank overflows, no rank steps",
        _stepped(case, found),
        _stepped(case, right),
        {advice: _stepped(case, run) for advice, run in likely.items()},
        what=f"whether the weight has changed, step by step ({case.about}),",
    )
    weights = lambda run: [[step["weight"] for step in mine] for mine in run]
    judge.equal(
        "a good step divides by the scale, in float32",
        weights(found),
        weights(right),
        {
            "the gradient is still multiplied by the scale: divide by it before the step": weights(
                _run(case, divides=False)
            ),
            "the gradient was divided by the scale in float16, where small values vanish: make it float32 first": (
                weights(_run(case, half=True))
            ),
            **{advice: weights(run) for advice, run in likely.items()},
        },
        what="the list of weights",
    )
    _judge_scale(case, found, right, judge, likely)
    _judge_messages(case, outcome, judge)


def _likely(case: Case) -> dict[str, list[list[dict[str, Any]]]]:
    """What ranks would do that ask too few others, or miss an overflow."""
    small = ", ".join(axis for axis, groups in case.groups.items() if len(groups[0]) == 1)
    return {
        f"each rank decides for itself (or asks a group that has one rank here: {small}), and the model is torn: agree "
        "over groups.world first": _run(case, "alone"),
        "ranks agree within tp only: another stage or replica steps all the same. Agree over groups.world": _run(
            case, "tp"
        ),
        "ranks agree within pp only: another slice steps all the same. Agree over groups.world": _run(case, "pp"),
        "ranks agree within dp only: other parts of the model step all the same. Agree over groups.world": _run(
            case, "dp"
        ),
        "NaN passes for a good gradient: torch.isfinite is False for it, a comparison with inf is not": _run(
            case, nan=True
        ),
        "nobody ever skips: a gradient with inf goes into the weights": _run(case, "nobody"),
    }


def _stepped(case: Case, run: Any) -> list[list[bool]]:
    """Whether the weight has changed, by rank and step."""
    starts = [inputs["weight"] for inputs in case.inputs]
    before = [[start, *(step["weight"] for step in mine)] for start, mine in zip(starts, run, strict=True)]
    return [
        [not same(step["weight"], old) for old, step in zip(olds, mine, strict=False)]
        for olds, mine in zip(before, run, strict=True)
    ]


def _judge_scale(case: Case, found: Any, right: Any, judge: Judge, likely: dict[str, Any]) -> None:
    scales = lambda run: [[[step["scale"], step["good"]] for step in mine] for mine in run]
    judge.equal(
        "the scale is halved and doubled",
        scales(found),
        scales(right),
        {
            "the scale is doubled one step too late: when the window's last good step is done, it is time": scales(
                _run(case, late=1)
            ),
            "good steps go on counting after a doubling: begin again from 0": scales(_run(case, restarts=False)),
            "good steps go on counting after an overflow: begin again from 0": scales(_run(case, forgives=True)),
            "the scale is never doubled": scales(_run(case, late=99)),
            "the scale is not halved after an overflow": scales(_run(case, factor=1.0)),
            **{advice: scales(run) for advice, run in likely.items()},
        },
        what="the list of [scale, good]",
    )


def _judge_messages(case: Case, outcome: Outcome, judge: Judge) -> None:
    for rank in range(case.size):
        calls = calls_of(outcome, rank)
        steps = len(case.inputs[rank]["gradients"])
        large = [call for call in calls if call.bytes > 8]
        judge.that(
            "one small message to the world",
            not large and len(calls) <= 3 * steps,
            f"rank {rank} calls {large[0]}: one number says it all"
            if large
            else f"rank {rank} sends {len(calls)} messages in {steps} steps: one a step is enough",
        )


def _run(
    case: Case,
    agree: str = "world",
    *,
    nan: bool = False,
    divides: bool = True,
    half: bool = False,
    late: int = 0,
    restarts: bool = True,
    forgives: bool = False,
    factor: float = 0.5,
) -> list[list[dict[str, Any]]]:
    """Weight, scale and good after each step, by rank; with mistakes."""
    size = case.size
    together = {
        "world": [list(range(size))] * size, "alone": [[rank] for rank in range(size)], "nobody": [[]] * size,
        **{axis: [next(g for g in case.groups[axis] if rank in g) for rank in range(size)] for axis in case.groups},
    }[agree]  # fmt: skip
    runs = []
    for rank, inputs in enumerate(case.inputs):
        weight, scale, good, steps = inputs["weight"], inputs["scale"], 0, []
        for number, gradient in enumerate(inputs["gradients"]):
            if any(_overflows(case.inputs[other]["gradients"][number], nan) for other in together[rank]):
                scale, good = scale * factor, good if forgives else 0
            else:
                wide = (gradient / scale).float() if half else gradient.float() / (scale if divides else 1.0)
                weight, good = weight - inputs["lr"] * wide, good + 1
                if good >= inputs["window"] + late:
                    scale, good = scale * 2, 0 if restarts else good
            steps.append({"weight": weight, "scale": scale, "good": good})
        runs.append(steps)
    return runs


def _overflows(gradient: Tensor, nan_passes: bool) -> bool:
    return bool(torch.isinf(gradient).any()) if nan_passes else not torch.isfinite(gradient).all()
