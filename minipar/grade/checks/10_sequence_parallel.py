"""Exercise 10: all_gather and reduce_scatter over the sequence, each the other's backward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minipar.grade.judging import Case, Draw, Judge, Outcome, bytes_of, calls_of

TITLE, MINUTES, LESSON = "Sequence parallel", 25, 3
CHECKS = {
    "enter, forward": 2,
    "enter, backward": 3,
    "leave, forward": 2,
    "leave, backward": 3,
    "no all_reduce, no more bytes": 3,
}
HINTS = [
    "Forget autograd first: write two plain functions, gather(x, group) and scatter(x, group), which swap dimensions 0 "
    "and 1, call the collective, and swap them back.",
    "Which ranks use the slice of rank r once it is gathered? All of them. So its gradient is the sum of what all "
    "ranks send back for it: a reduce_scatter.",
    "What leaves is a sum, and each rank's part goes into it with factor 1. So the gradient of the part is the "
    "gradient of the sum, of the whole sequence: gathered from the ranks.",
    "class Enter(torch.autograd.Function): forward stores ctx.group = group and returns gather(x, group); backward "
    "returns scatter(grad, ctx.group), None. Leave is the same with the two exchanged.",
]


def harness(student, group, part, part_grad, whole, whole_grad):  # type: ignore[no-untyped-def]
    found = {}
    for name, x, grad in (("enter", part, whole_grad), ("leave", whole, part_grad)):
        x = x.clone().requires_grad_()
        y = getattr(student, name)(x, group)
        found[f"{name}, forward"] = y
        right = type(y) is torch.Tensor and y.shape == grad.shape
        if right and y.requires_grad:
            (y * grad).sum().backward()
        found[f"{name}, backward"] = x.grad
        found[f"{name}, connected"] = not right or y.requires_grad
    return found


def cases(draw: Draw) -> list[Case]:
    some = []
    for size in (2, 3, draw.choice([4, 5])):
        batch, slice_, width = size if size == 2 else draw.integer(2, 3), draw.integer(2, 3), draw.integer(2, 4)
        inputs = [
            {
                "part": draw.normal(batch, slice_, width),
                "part_grad": draw.normal(batch, slice_, width),
                "whole": draw.normal(batch, size * slice_, width),
                "whole_grad": draw.normal(batch, size * slice_, width),
            }
            for _ in range(size)
        ]
        some.append(Case(inputs, about=f"B={batch}, T={size * slice_}, D={width} on {size} ranks"))
    return some


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    parts, wholes, part_grads, whole_grads = (
        [inputs[name] for inputs in case.inputs] for name in ("part", "whole", "part_grad", "whole_grad")
    )
    for name, found, slices, partial in (
        ("enter", "enter, forward", parts, None),
        ("enter", "enter, backward", None, whole_grads),
        ("leave", "leave, forward", None, wholes),
        ("leave", "leave, backward", part_grads, None),
    ):
        connected = all(value[f"{name}, connected"] for value in outcome.values)
        if found.endswith("backward") and not judge.that(
            found,
            connected,
            f"autograd knows nothing of the result of {name}: what passes through a message is cut off. Write a "
            "torch.autograd.Function, and call its apply",
        ):
            continue
        values = [value[found] for value in outcome.values]
        if any(value is None for value in values):
            judge.that(found, False, f"no gradient to judge: the result of {name} does not have its shape yet")
            continue
        what = "the gradient of x" if found.endswith("backward") else "the result"
        if slices is not None:
            expected, mistakes = [torch.cat(slices, 1)] * case.size, _wrong_gathers(slices)
        else:
            expected, mistakes = list(sum(partial or []).chunk(case.size, 1)), _wrong_scatters(partial or [])
        judge.equal(found, values, expected, mistakes, what=f"{case.about}: {what}")
    for rank in range(case.size):
        _communication(case, outcome, rank, judge)


def _communication(case: Case, outcome: Outcome, rank: int, judge: Judge) -> None:
    calls = calls_of(outcome, rank)
    reduced = [call for call in calls if call.op == "all_reduce"]
    one_way = (case.size - 1) * case.inputs[rank]["part"].nbytes
    found, most = bytes_of(outcome, rank), 4 * one_way
    if reduced:
        why = f"{reduced[0]}: it brings each rank the whole sum, and a slice is enough. That is a reduce_scatter"
    elif found > most:
        largest = max(calls, key=lambda call: call.bytes)
        why = f"the largest is {largest}. To gather all partial sums and add them up is what reduce_scatter spares you"
    else:
        why = "each of the four directions needs one collective"
    judge.that(
        "no all_reduce, no more bytes",
        not reduced and found == most,
        f"{case.about}: rank {rank} sends {found} bytes, and {most} are needed, {one_way} for each of enter and leave, "
        f"forward and backward: {why}",
    )


def _wrong_gathers(slices: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """What is found instead of the whole sequence: the result of enter, the gradient of leave."""
    size, first = len(slices), torch.cat(list(slices))
    wide = first.reshape(slices[0].shape[0], -1, slices[0].shape[2])
    alone = [torch.cat([one if rank == r else torch.zeros_like(one) for r in range(size)], 1)
             for rank, one in enumerate(slices)]  # fmt: skip
    return {
        "slices stand one after the other along the batch (dimension 0), not the sequence: swap dimensions 0 and 1 "
        "before and after": [first] * size,
        "the right numbers in the wrong order: a reshape mixes batch and sequence. Swap dimensions with transpose "
        "before the collective, and back after it": [wide] * size,
        "only this rank's slice is there, and zeros for the others: slices are to be gathered": alone,
        "this rank's slice, again and again: the others' are to be gathered": [
            one.repeat(1, size, 1) for one in slices
        ],
        f"divided by the {size} ranks: nothing is averaged here": [torch.cat(list(slices), 1) / size] * size,
        f"{size} times too large: a slice is gathered, not added up": [torch.cat(list(slices), 1) * size] * size,
    }


def _wrong_scatters(partial: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """What is found instead of a slice of the sum: the result of leave, the gradient of enter."""
    size, total = len(partial), sum(partial)
    mine = list(total.chunk(size, 1))
    flat = total.reshape(-1, *mine[0].shape) if total.numel() % mine[0].numel() == 0 else total
    return {
        "this rank's slice of its own part: those of the other ranks are to be added to it": [
            one.chunk(size, 1)[rank] for rank, one in enumerate(partial)
        ],
        f"the mean over the {size} ranks: parts are added up, and nothing divided": [one / size for one in mine],
        f"the sum is there {size} times: it is added up once more": [one * size for one in mine],
        "a slice of the batch (dimension 0), not of the sequence: swap dimensions 0 and 1 before and after": list(
            total.chunk(size)
        ),
        "the whole sum: each rank keeps only its slice": [total] * size,
        "numbers of the sum in a wrong order: a reshape mixes batch and sequence. Swap dimensions with transpose "
        "before the collective, and back after it": list(flat)[:size],
        "every rank has the slice of rank 0: take the one of your rank": [mine[0]] * size,
    }
