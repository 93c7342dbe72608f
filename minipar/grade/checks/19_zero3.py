"""Exercise 19: ZeRO stage 3, in which a layer's weight is gathered for use and freed after it."""

from itertools import pairwise

import torch
from torch import Tensor

from minipar.grade.judging import Case, Draw, Judge, Outcome, calls_of

TITLE, MINUTES, LESSON = "ZeRO stage 3: share the parameters", 40, 5
CHECKS = {
    "outputs are those of whole weights": 2,
    "each rank has its piece of the summed gradient": 4,
    "a layer is gathered just before it computes": 2,
    "gradients are reduced layer by layer, last one first": 2,
    "whole weights are freed": 3,
    "no more messages than needed": 2,
}
HINTS = [
    "Write a small function that gathers one layer: all_gather the piece, cut the padding off, give it its shape.",
    "Forward: for each layer keep x, gather the weight, compute. Put the weight into no list.",
    "Backward: from the last layer to the first gather the weight again, call backward(weight, kept x, dy), flatten "
    "and pad dweight, reduce_scatter it. dx is the dy of the layer before.",
    "group.all_gather(piece)[: numel].view(shape), with numel the product of the shape: shape.numel() of a torch.Size, "
    "or math.prod(shape).",
]


def harness(student, group, pieces, shapes, x, upstream):  # type: ignore[no-untyped-def]
    from torch.multiprocessing.reductions import StorageWeakRef

    used, most = {}, 0  # weights that a layer has computed with, by their storage

    def watch(what, weight):
        nonlocal most
        group.broadcast(torch.empty(0), tag=what)  # so that the grader sees when
        alive = {place: one for place, one in used.items() if not one.expired()}
        used.clear()
        used.update({**alive, weight.untyped_storage()._cdata: StorageWeakRef(weight.untyped_storage())})
        most = max(most, len(used))

    def forward(weight, x):
        watch("forward", weight)
        return torch.tanh(x @ weight)

    def backward(weight, x, dy):
        watch("backward", weight)
        inner = dy * (1 - torch.tanh(x @ weight) ** 2)
        return inner @ weight.T, x.T @ inner

    y, gradients = student.zero3(pieces, shapes, x, upstream, forward, backward, group)
    return {"y": y, "gradients": list(gradients), "whole": most}


def cases(draw: Draw) -> list[Case]:
    return [_case(draw, size, layers) for size, layers in ((2, 3), (3, 5), (draw.choice([4, 5]), 4))]


def _case(draw: Draw, size: int, layers: int) -> Case:
    while True:  # until a message's bytes tell its layer
        widths = [draw.integer(3, 11) for _ in range(layers + 1)]
        shares = [-(-a * b // size) for a, b in pairwise(widths)]
        if len(set(shares)) == layers and any(a * b % size for a, b in pairwise(widths)):
            break
    weights = [draw.normal(a, b) / a**0.5 for a, b in pairwise(widths)]
    inputs = []
    for rank in range(size):
        rows = draw.integer(2, 4)
        mine = [_pieces(weight, size)[rank] for weight in weights]
        more = {"x": draw.normal(rows, widths[0]), "upstream": draw.normal(rows, widths[-1])}
        inputs.append({"pieces": mine, "shapes": [list(weight.shape) for weight in weights], **more})
    return Case(inputs, about=f"{size} ranks, {layers} layers")


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    size, first = case.size, case.inputs[0]
    whole = [torch.cat(pieces) for pieces in zip(*(inputs["pieces"] for inputs in case.inputs), strict=True)]
    weights = [w[: a * b].view(a, b).requires_grad_() for w, (a, b) in zip(whole, first["shapes"], strict=True)]
    outputs, local = [], []
    for inputs in case.inputs:
        y = inputs["x"]
        for weight in weights:
            y = torch.tanh(y @ weight)
        outputs.append(y.detach())
        local.append(torch.autograd.grad(y, weights, inputs["upstream"]))
    summed = [sum(some) for some in zip(*local, strict=True)]
    pieces = [[_pieces(gradient, size)[rank] for gradient in summed] for rank in range(size)]
    judge.equal(
        "outputs are those of whole weights",
        [one["y"] for one in outcome.values],
        outputs,
        {"it is the input: return the output of the last layer": [inputs["x"] for inputs in case.inputs]},
        what="the output",
    )
    judge.equal(
        "each rank has its piece of the summed gradient",
        [one["gradients"] for one in outcome.values],
        pieces,
        {
            "these are pieces of this rank's own gradient: reduce_scatter it, so that all rows count": [
                [_pieces(gradient, size)[rank] for gradient in local[rank]] for rank in range(size)
            ],
            f"the sum is divided by the {size} ranks: here gradients are summed": [
                [piece / size for piece in mine] for mine in pieces
            ],
            "the gradients are right, but in the order of backward: return them by layer, the first one first": [
                mine[::-1] for mine in pieces
            ],
            "these are whole gradients: a rank keeps its own piece": [summed] * size,
            "these are whole gradients, flat: a rank keeps its own piece": [
                [torch.cat(_pieces(gradient, size)) for gradient in summed]
            ]
            * size,
            "every rank has the first piece: take piece group.rank": [pieces[0]] * size,
        },
        what=f"the list of gradients ({case.about})",
    )
    for rank in range(size):
        _judge_order(rank, [len(piece) * 8 for piece in first["pieces"]], case.size, outcome, judge)


def _judge_order(rank: int, shares: list[int], size: int, outcome: Outcome, judge: Judge) -> None:
    """What a rank has called, and when: `shares` are the bytes of its pieces by layer, each different."""
    layers, calls = len(shares), calls_of(outcome, rank)
    gathers = [shares.index(c.bytes) if c.bytes in shares else -1 for c in calls if c.op == "all_gather"]
    forward, back = list(range(layers)), list(reversed(range(layers)))
    if gathers == forward:
        why = "all layers were gathered once: so they were kept until backward. Free them, and gather them again"
    else:
        why = f"layers were gathered in the order {gathers}: gather {[*forward, *back]}, each just before it computes"
    seen = computed = ahead = 0
    for call in calls:
        computed += call.tag in ("forward", "backward")
        seen += call.op == "all_gather"
        ahead = max(ahead, seen - computed)
    if gathers in ([*forward, *back], [*forward, *back[1:]]) and ahead > 2:
        why = f"{ahead} layers are gathered ahead of their use: gather one, compute with it, and then the next"
    fine = gathers in ([*forward, *back], [*forward, *back[1:]]) and ahead <= 2
    judge.that("a layer is gathered just before it computes", fine, f"rank {rank}: {why}")
    _judge_reduces(rank, shares, size, outcome, judge)
    held = outcome.values[rank]["whole"]
    judge.that(
        "whole weights are freed",
        held <= 2,
        f"rank {rank} holds {held} of {layers} whole weights at once: let go of each after its layer has computed (no "
        "list, no closure may hold it), and gather it again in backward",
    )
    others = sorted({c.op for c in calls} - {"all_gather", "reduce_scatter", "broadcast"})
    judge.that(
        "no more messages than needed",
        not others and len(gathers) <= 2 * layers,
        f"rank {rank} calls {', '.join(others)}: all_gather for weights and reduce_scatter for gradients are enough"
        if others
        else f"rank {rank} gathers {len(gathers)} times: twice for each of {layers} layers will do; gradients stay cut",
    )


def _judge_reduces(rank: int, shares: list[int], size: int, outcome: Outcome, judge: Judge) -> None:
    order, steps, behind, back = [], 0, 0, list(reversed(range(len(shares))))
    for call in calls_of(outcome, rank):
        steps += call.tag == "backward"
        if call.op == "reduce_scatter":
            order.append(shares.index(call.bytes // size) if call.bytes // size in shares else -1)
            behind = max(behind, steps - len(order))
    judge.that(
        "gradients are reduced layer by layer, last one first",
        order == back and behind <= 1,
        f"rank {rank} reduces layers in the order {order}: call reduce_scatter in the order of backward, {back}"
        if order != back
        else f"rank {rank} has {behind + 1} whole gradients before it reduces the first of them: reduce each as soon "
        "as it is there, and keep its piece",
    )


def _pieces(whole: Tensor, size: int) -> list[Tensor]:
    flat = whole.flatten()
    return list(torch.nn.functional.pad(flat, (0, -len(flat) % size)).chunk(size))
