"""Exercise 6: a linear layer whose outputs are cut over tensor-parallel ranks."""

import torch

from minipar.grade.judging import Case, Draw, Judge, Outcome, calls_of

TITLE, MINUTES, LESSON = "A linear layer cut by columns", 30, 3
CUT, FORWARD = "cut: this rank's slice of the outputs", "forward: a slice of the outputs"
INPUT, OWN = "backward: x has the whole gradient", "backward: weight and bias have those of their slices"
MESSAGES = "no message forward, one all_reduce backward"
CHECKS = {CUT: 1, FORWARD: 2, INPUT: 3, OWN: 2, MESSAGES: 3}
HINTS = [
    "cut: torch keeps the weight as [out, in], so a slice of the outputs is a slice of dimension 0: see `chunk`.",
    "Forward is F.linear(x, weight, bias) with this rank's slices, and x from f: write f first, as a class.",
    "f is a torch.autograd.Function: forward(ctx, x, group) keeps the group in ctx and returns x; backward(ctx, grad) "
    "returns one value for each argument of forward: a gradient for x, None for the group.",
    "backward(ctx, grad): return ctx.group.all_reduce(grad.clone()), None. The clone is there because all_reduce works "
    "in place, and grad is not yours to change. Call it as Enter.apply(x, group).",
]


def harness(student, groups, whole, weight, bias, x, upstream):  # type: ignore[no-untyped-def]
    x, weight, bias = (one.requires_grad_() for one in (x, weight, bias))
    pieces = student.cut(*whole, groups.tp)
    y = student.column_linear(x, weight, bias, groups.tp)
    if isinstance(y, torch.Tensor) and y.requires_grad and y.shape == upstream.shape:
        groups.mark.barrier()
        (y * upstream).sum().backward()
    return {"cut": pieces, "y": y, "x": x.grad, "weight": weight.grad, "bias": bias.grad}


def cases(draw: Draw) -> list[Case]:
    return [_case(draw, size) for size in (2, 3, draw.choice([4, 5]))]


def _case(draw: Draw, size: int) -> Case:
    D, share, T = draw.integer(2, 4), draw.integer(3, 5), draw.integer(2, 3)
    weight, bias, x = draw.normal(size * share, D), draw.normal(size * share), draw.normal(2, T, D)
    upstream = draw.normal(2, T, size * share)
    inputs = [
        {"whole": [weight, bias], "weight": w, "bias": b, "x": x, "upstream": above}
        for w, b, above in zip(weight.chunk(size), bias.chunk(size), upstream.chunk(size, -1), strict=True)
    ]
    # A group of one rank sends nothing: a call in it marks where the backward begins.
    groups = {"tp": [list(range(size))], "mark": [[rank] for rank in range(size)]}
    return Case(inputs, groups, f"{size} ranks, {size * share} outputs of {D} inputs")


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    size, values = case.size, outcome.values
    x, (weight, bias) = case.inputs[0]["x"], case.inputs[0]["whole"]
    weights, biases = weight.chunk(size), bias.chunk(size)
    above = [inputs["upstream"] for inputs in case.inputs]

    judge.equal(
        CUT,
        [value["cut"] for value in values],
        list(map(list, zip(weights, biases, strict=True))),
        {
            "the weight is cut along its second dimension, its inputs: torch keeps it as [out, in], so cut the first": [
                [a, b] for a, b in zip(weight.tensor_split(size, 1), biases, strict=True)
            ],
            "the weight is cut, but the bias is whole: an output's bias goes with it": [[one, bias] for one in weights],
            "rank r takes every N-th output, beginning with r: take outputs that lie together": [
                [weight[rank::size], bias[rank::size]] for rank in range(size)
            ],
        },
        what="the slice",
    )

    y = [x @ a.t() + b for a, b in zip(weights, biases, strict=True)]
    right = judge.equal(
        FORWARD,
        [value["y"] for value in values],
        y,
        {
            "every rank has all outputs: leave them cut, for the next layer, cut by rows, takes them so": [
                torch.cat(y, -1)
            ]
            * size,
            "slices of different outputs were added up over the ranks: they lie side by side, so forward needs no "
            "message (the all_reduce is for backward)": [torch.stack(y).sum(0)] * size,
            "the bias is missing": [x @ one.t() for one in weights],
        },
        what="the output",
    )
    if not right:
        return

    parts = [one @ a for one, a in zip(above, weights, strict=True)]
    whole = torch.stack(parts).sum(0)
    judge.equal(
        INPUT,
        [value["x"] for value in values],
        [whole] * size,
        {
            "no gradient arrives at x: the output must come from x by operations that autograd has recorded, and f's "
            "backward must return a gradient": [None] * size,
            "x.grad of each rank is what its own slice of outputs does to x: f's backward must all_reduce the "
            "gradient": parts,
            f"x.grad is the mean over the {size} ranks: each slice adds its part to the whole, so take the sum": [
                whole / size
            ]
            * size,
            f"x.grad is {size} times what it should be: it is added up over the ranks twice": [whole * size] * size,
            "only rank 0 has the whole gradient of x: the layer below needs it on every rank": [whole, *parts[1:]],
        },
        what="x.grad",
    )

    rows = x.flatten(0, 1)
    of_weight, of_bias = [one.flatten(0, 1).t() @ rows for one in above], [one.sum((0, 1)) for one in above]
    mixed = torch.stack(of_weight).sum(0), torch.stack(of_bias).sum(0)
    judge.equal(
        OWN,
        [[value["weight"], value["bias"]] for value in values],
        list(map(list, zip(of_weight, of_bias, strict=True))),
        {
            "the gradients of weight and bias are added up over the ranks: those are slices of different outputs, and "
            "each keeps its own": [list(mixed)] * size,
            "the gradients of weight and bias are averaged over the ranks, as in data parallel: these ranks hold "
            "different slices, and each keeps its own": [[one / size for one in mixed]] * size,
            "no gradient arrives at weight and bias: compute the output from them by operations that autograd has "
            "recorded, or return their gradients from your backward": [[None, None]] * size,
        },
        what="the gradient of weight or bias",
    )
    for rank in range(size):
        judge.that(MESSAGES, *_messages(outcome, rank, x.nbytes))


def _messages(outcome: Outcome, rank: int, needed: int) -> tuple[bool, str]:
    """Whether the messages of a rank are right, and what is wrong with them."""
    begins = next((call.number for call in calls_of(outcome, rank, group="mark")), len(outcome.calls))
    calls = calls_of(outcome, rank, group="tp")
    forward, backward = [c for c in calls if c.number < begins], [c for c in calls if c.number > begins]
    if forward:
        return False, f"rank {rank} calls {forward[0]} forward: f does nothing there"
    if len(backward) == 1 and backward[0].op == "all_reduce" and backward[0].bytes == needed:
        return True, ""
    made = ", ".join(map(str, backward)) or "nothing"
    return False, (
        f"backward, rank {rank} calls {made}; one all_reduce of the gradient of x, {needed} bytes, is all that is "
        "needed: weights, their gradients and the outputs stay on their rank"
    )
