"""Exercise 17: ZeRO stage 1, in which each rank keeps Adam's moments of its piece."""

import torch
from torch import Tensor

from minipar.grade.judging import Case, Draw, Judge, Outcome, bytes_of

TITLE, MINUTES, LESSON = "ZeRO stage 1: share the optimizer's state", 30, 5
CHECKS = {
    "parameters are those of Adam on one rank": 4,
    "a rank's state is one piece long": 2,
    "a rank has the moments of its own piece": 2,
    "no more bytes than all-reduce and all-gather": 2,
}
HINTS = [
    "Pad first: append zeros until the length divides by group.size. Each rank's piece then has ceil(n / N) numbers.",
    "torch.nn.functional.pad(flat, (0, missing)) pads, .chunk(N)[rank] is a piece, [:n] takes the padding off again.",
    "g = group.reduce_scatter(padded gradient) / group.size; update m, v and your piece of the parameters with g; then "
    "group.all_gather(piece)[:n].",
    "Keep the number of the step in the state: state = {'m': zeros, 'v': zeros, 't': 0} when it is None, and t + 1 "
    "before it is used.",
]


def harness(student, group, parameters, gradients, lr, eps):  # type: ignore[no-untyped-def]
    state, after, kept, length = None, [], 0, len(parameters)
    for gradient in gradients:
        before = parameters[:length].clone()
        parameters, state = student.zero1_step(before, gradient.clone(), state, lr, eps, group)
        after.append(parameters.detach().clone())
        kept = max(kept, sum(value.numel() for value in state.values() if isinstance(value, torch.Tensor)))
    return {"parameters": after, "m": state["m"], "v": state["v"], "kept": kept}


def cases(draw: Draw) -> list[Case]:
    some = []
    for size, spare in ((2, 1), (3, draw.integer(1, 2)), (5, draw.integer(1, 3)), (draw.choice([2, 4]), 0)):
        length, steps = size * draw.integer(2, 5) - spare, 3
        start, lr, eps = draw.normal(length), draw.integer(1, 9) / 20, draw.integer(2, 9) / 4
        inputs = [
            {"parameters": start, "gradients": [draw.normal(length) for _ in range(steps)], "lr": lr, "eps": eps}
            for _ in range(size)
        ]
        some.append(Case(inputs, about=f"{size} ranks, {length} parameters"))
    return some


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    size, first = case.size, case.inputs[0]
    means = [torch.stack(one).mean(0) for one in zip(*(inputs["gradients"] for inputs in case.inputs), strict=True)]
    length, share = len(first["parameters"]), -(-len(first["parameters"]) // size)
    right, m, v = _adam(first, means)
    judge.equal(
        "parameters are those of Adam on one rank",
        [one["parameters"] for one in outcome.values],
        [right] * size,
        _mistakes(case, means, right),
        what=f"the parameters after each step ({case.about})",
    )
    kept = max(one["kept"] for one in outcome.values)
    judge.that(
        "a rank's state is one piece long",
        all(one["kept"] <= 2 * share + 2 for one in outcome.values),  # and perhaps the step, as a tensor
        f"a rank keeps {kept} numbers for {length} parameters on {size} ranks: with m and v of its piece alone it "
        f"would keep {2 * share}"
        + (": all of m and v, as in plain data parallel" if kept in (2 * length, 2 * share * size) else ""),
    )
    cut = lambda whole: torch.nn.functional.pad(whole, (0, share * size - length)).chunk(size)
    pieces = [[a, b] for a, b in zip(cut(m), cut(v), strict=True)]
    own = [_adam(inputs, inputs["gradients"]) for inputs in case.inputs]
    judge.equal(
        "a rank has the moments of its own piece",
        [[one["m"], one["v"]] for one in outcome.values],
        pieces,
        {
            "each rank has the moments of all parameters, not of its piece": [[m, v]] * size,
            "each rank has the moments of the first piece: take piece group.rank": [pieces[0]] * size,
            "rank r has the moments of the next rank's piece": pieces[1:] + pieces[:1],
            "these are moments of this rank's own gradient: take the mean over the ranks first": [
                [cut(a)[rank], cut(b)[rank]] for rank, (_, a, b) in enumerate(own)
            ],
        },
        what="the moments",
    )
    _judge_bytes(3 * (size - 1) * share * 8 * len(means), outcome, judge)


def _judge_bytes(most: int, outcome: Outcome, judge: Judge) -> None:
    for rank in range(len(outcome.values)):
        sent = bytes_of(outcome, rank)
        judge.that(
            "no more bytes than all-reduce and all-gather",
            sent <= most,
            f"rank {rank} sends {sent} bytes, and {most} are enough: reduce_scatter the gradient (or all_reduce it), "
            "all_gather updated pieces of parameters, and nothing else. Moments are never sent",
        )


def _adam(inputs, gradients, *, corrects=True, forgets=False):  # type: ignore[no-untyped-def]
    """Parameters after each step, and the moments in the end; with mistakes."""
    p, after = inputs["parameters"], []
    m = v = torch.zeros_like(p)
    for number, g in enumerate(gradients, start=1):
        if forgets:
            m, v, number = torch.zeros_like(p), torch.zeros_like(p), 1
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        a, b = (1 - 0.9**number, 1 - 0.999**number) if corrects else (1, 1)
        p = p - inputs["lr"] * (m / a) / ((v / b).sqrt() + inputs["eps"])
        after.append(p)
    return after, m, v


def _mistakes(case: Case, means: list[Tensor], right: list[Tensor]) -> dict[str, list[list[Tensor]]]:
    """What each of the usual mistakes makes of the parameters, by rank."""
    size, first = case.size, case.inputs[0]
    length = len(first["parameters"])
    padded = -(-length // size) * size
    share = padded // size
    place = torch.arange(length) // share
    locals_ = [_adam(inputs, inputs["gradients"])[0] for inputs in case.inputs]
    mixed = [torch.stack([one[step] for one in locals_]) for step in range(len(means))]
    return {
        "the gradients are summed, not averaged: each rank's is a mean over its own rows, so take the mean": [
            _adam(first, [mean * size for mean in means])[0]
        ]
        * size,
        f"the mean is divided by the {size} ranks once more": [_adam(first, [mean / size for mean in means])[0]] * size,
        "each rank goes by its own gradient, and the replicas drift apart: reduce the gradients first": locals_,
        "each piece goes by the gradient of its own rank alone: reduce_scatter the gradients, do not just cut them": [
            [one.gather(0, place[None])[0] for one in mixed]
        ]
        * size,
        "each rank has updated its own piece, and has not told the others: all_gather the pieces": [
            [torch.where(place == rank, one, first["parameters"]) for one in right] for rank in range(size)
        ],
        "the padding is still there: cut the parameters to their old length": [
            [torch.nn.functional.pad(one, (0, padded - length)) for one in right]
        ]
        * size,
        "the correction of the moments, 1 - 0.9^t and 1 - 0.999^t, is missing": [_adam(first, means, corrects=False)[0]]
        * size,
        "the moments begin anew in each step: take them from the state, and hand them back": [
            _adam(first, means, forgets=True)[0]
        ]
        * size,
        "this is the same on all ranks, and it is the start: nothing was updated": [[first["parameters"]] * len(means)]
        * size,
    }
