"""Exercise 7: a linear layer whose inputs are cut over tensor-parallel ranks."""

import torch

from minipar.grade.judging import Case, Draw, Judge, Outcome, calls_of

TITLE, MINUTES, LESSON = "A linear layer cut by rows", 30, 3
CUT, FORWARD = "cut: this rank's slice of the inputs", "forward: the sum of all parts, and the bias once"
OWN, BIAS = "backward: x and weight have those of their slices", "backward: bias has the same on all ranks"
RECORDED, MESSAGES = "g is a function of autograd", "one all_reduce forward, no message backward"
CHECKS = {CUT: 1, FORWARD: 3, OWN: 2, BIAS: 2, RECORDED: 1, MESSAGES: 3}
HINTS = [
    "cut: torch keeps the weight as [out, in], so a slice of the inputs is one of dimension 1: see `chunk`.",
    "Forward: F.linear(x, weight), without bias, is this rank's part; then g; and the bias is added to what g gives.",
    "g is a torch.autograd.Function: forward(ctx, x, group) returns group.all_reduce(x.clone()), and backward(ctx, "
    "grad) returns grad as it is, and None for the group.",
    "y = Leave.apply(F.linear(x, weight), group) + bias. So every rank adds its own copy of the bias to a sum that is "
    "finished: once in y, and with a gradient on every rank.",
]


def harness(student, groups, whole, weight, bias, x, upstream):  # type: ignore[no-untyped-def]
    x, weight, bias = (one.clone().requires_grad_() for one in (x, weight, bias))
    all_reduce, recorded = groups.tp.all_reduce, []

    def watched(tensor, *arguments, **options):  # type: ignore[no-untyped-def]
        recorded.append(tensor.requires_grad and torch.is_grad_enabled())
        return all_reduce(tensor, *arguments, **options)

    groups.tp.all_reduce = watched
    piece = student.cut(whole, groups.tp)
    y = student.row_linear(x, weight, bias, groups.tp)
    if isinstance(y, torch.Tensor) and y.requires_grad and y.shape == upstream.shape:
        groups.mark.barrier()
        (y * upstream).sum().backward()
    grads = {"x": x.grad, "weight": weight.grad, "bias": bias.grad}
    return {"cut": piece, "y": y, "recorded": any(recorded), **grads}


def cases(draw: Draw) -> list[Case]:
    return [_case(draw, size) for size in (2, 3, draw.choice([4, 5]))]


def _case(draw: Draw, size: int) -> Case:
    D, share, T = draw.integer(3, 4), draw.integer(2, 3), draw.integer(2, 3)
    weight, bias = draw.normal(D, size * share), draw.normal(D)
    x, upstream = draw.normal(2, T, size * share), draw.normal(2, T, D)
    inputs = [
        {"whole": weight, "weight": w, "bias": bias, "x": slice_, "upstream": upstream}
        for w, slice_ in zip(weight.chunk(size, 1), x.chunk(size, -1), strict=True)
    ]
    # A group of one rank sends nothing: a call in it marks where the backward begins.
    groups = {"tp": [list(range(size))], "mark": [[rank] for rank in range(size)]}
    return Case(inputs, groups, f"{size} ranks, {D} outputs of {size * share} inputs")


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    size, values, whole = case.size, outcome.values, case.inputs[0]["whole"]
    bias, above = case.inputs[0]["bias"], case.inputs[0]["upstream"]
    weights, xs = [inputs["weight"] for inputs in case.inputs], [inputs["x"] for inputs in case.inputs]

    judge.equal(
        CUT,
        [value["cut"] for value in values],
        weights,
        {
            "the weight is cut along its first dimension, its outputs: torch has it as [out, in], so cut dimension 1": [
                *whole.tensor_split(size)
            ],
            "rank r takes every N-th input, beginning with r: take inputs that lie together": [
                whole[:, rank::size] for rank in range(size)
            ],
        },
        what="the slice",
    )

    parts = [x @ one.t() for x, one in zip(xs, weights, strict=True)]
    total = torch.stack(parts).sum(0)
    right = judge.equal(
        FORWARD,
        [value["y"] for value in values],
        [total + bias] * size,
        {
            f"the bias is added on each of the {size} ranks before the sum, so it is in the output {size} times: add "
            "it to what comes of the all_reduce": [total + size * bias] * size,
            "each rank returns its own part of the sum: an all_reduce has to add the parts up": [
                part + bias for part in parts
            ],
            "each rank returns its own part of the sum, without the bias: an all_reduce has to add the parts up": parts,
            "the bias is missing": [total] * size,
            "only one rank adds the bias after the all_reduce, so the ranks have different outputs: each adds it": [
                total + bias,
                *[total] * (size - 1),
            ],
            f"the output is the mean of the parts, not their sum: do not divide by the {size} ranks": [
                total / size + bias
            ]
            * size,
            f"the parts were averaged over the {size} ranks: add them up, and then add the bias": [
                (total + bias) / size
            ]
            * size,
        },
        what="the output",
    )
    if not right:
        return

    rows = above.flatten(0, 1)
    own = [[above @ one, rows.t() @ x.flatten(0, 1)] for x, one in zip(xs, weights, strict=True)]
    of_bias = rows.sum(0)
    judge.equal(
        OWN,
        [[value["x"], value["weight"]] for value in values],
        own,
        {
            f"these gradients are {size} times what they should be: backward adds up over the ranks, but all of them "
            "have the whole gradient of the outputs already. g does nothing backward": [
                [size * one for one in some] for some in own
            ],
            f"these gradients are {size} times too small: g passes the gradient of the outputs on as it is": [
                [one / size for one in some] for some in own
            ],
            "no gradient arrives at x and weight: autograd does not see messages, so g must be a Function whose "
            "backward returns the gradient": [[None, None]] * size,
        },
        what="the gradient of x or weight",
    )
    judge.equal(
        BIAS,
        [value["bias"] for value in values],
        [of_bias] * size,
        {
            "only rank 0 adds the bias, so only its copy has a gradient: after a step the copies differ. Let every "
            "rank add its own copy after the all_reduce": [of_bias, *[None] * (size - 1)],
            "only rank 0 adds the bias, so the other copies' gradients are 0: after a step the copies differ. Let "
            "every rank add its own copy after the all_reduce": [of_bias, *[torch.zeros_like(of_bias)] * (size - 1)],
            f"the bias' gradient is {size} times what it should be: it is in the output once, so do not add it up "
            "over the ranks": [size * of_bias] * size,
            f"the bias' gradient is {size} times too small: it is in the output of every rank once, whole": [
                of_bias / size
            ]
            * size,
        },
        what="bias.grad",
    )
    judge.that(
        RECORDED,
        not any(value["recorded"] for value in values),
        "all_reduce changes, in place, a tensor that autograd has recorded, and autograd does not know of it: it may "
        "be right by luck, on this engine. Call it inside the forward of an autograd.Function",
    )
    for rank in range(size):
        judge.that(MESSAGES, *_messages(outcome, rank, above.nbytes))


def _messages(outcome: Outcome, rank: int, needed: int) -> tuple[bool, str]:
    """Whether the messages of a rank are right, and what is wrong with them."""
    begins = next((call.number for call in calls_of(outcome, rank, group="mark")), len(outcome.calls))
    calls = calls_of(outcome, rank, group="tp")
    forward, backward = [c for c in calls if c.number < begins], [c for c in calls if c.number > begins]
    if backward:
        return False, f"rank {rank} calls {backward[0]} backward: g does nothing there"
    if len(forward) == 1 and forward[0].op == "all_reduce" and forward[0].bytes == needed:
        return True, ""
    made = ", ".join(map(str, forward)) or "nothing"
    return False, (
        f"forward, rank {rank} calls {made}; one all_reduce of the outputs, {needed} bytes, is all that is needed: the "
        "slices of inputs and weights stay on their rank"
    )
