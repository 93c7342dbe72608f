"""Exercise 4: gradients in buckets, whose all_reduces travel while backward goes on."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minipar.grade.judging import Call, Case, Draw, Judge, Outcome, calls_of

TITLE, MINUTES, LESSON = "Gradients in buckets", 40, 2
VALUES, BUCKETS = "every gradient is the mean over the ranks", "buckets are as full as the limit allows"
LAUNCHED, WAITS = "a bucket is launched as soon as it is full", "waits once, after the last launch"
CHECKS = {VALUES: 3, BUCKETS: 2, LAUNCHED: 3, WAITS: 2}
HINTS = [
    "Go through the gradients with one for loop, and keep a list: the bucket that is being filled.",
    "Before you put a gradient into the bucket, see whether it fits (tensor.nbytes). If not, launch the bucket, note "
    "it together with what all_reduce returned, and begin an empty one.",
    "To launch: torch.cat([g.flatten() for g in bucket]), and all_reduce it with async_op=True. One bucket is left "
    "after the loop: launch it too.",
    "Then a second loop, over the launched buckets: wait, divide by group.size, split into the lengths that were put "
    "together, and give each part its shape back.",
]


def harness(student, groups, gradients, limit):  # type: ignore[no-untyped-def]
    all_reduce = groups.dp.all_reduce

    def mark(what):  # type: ignore[no-untyped-def]
        groups.mark.all_gather(torch.zeros(1), tag=what)  # to nobody: it only marks the place among the calls

    def watched(tensor, *arguments, **options):  # type: ignore[no-untyped-def]
        pending = all_reduce(tensor, *arguments, **options)
        if not isinstance(pending, torch.Tensor):
            wait = pending.wait
            pending.wait = lambda: (mark("wait"), wait())[1]
        return pending

    def backward():  # type: ignore[no-untyped-def]
        for gradient in gradients:
            mark("gradient")
            yield gradient
        mark("end")

    groups.dp.all_reduce = watched
    return student.all_reduce_in_buckets(backward(), limit, groups.dp)


def cases(draw: Draw) -> list[Case]:
    return [_case(draw, 2, False), _case(draw, 3, True), _case(draw, draw.choice([4, 5]), draw.choice([True, False]))]


def _case(draw: Draw, size: int, one_too_large: bool) -> Case:
    shapes = [draw.choice([(2,), (3,), (2, 2), (5,), (1, 3)]) for _ in range(draw.integer(10, 13))]
    limit = 8 * draw.integer(10, 12) + draw.integer(0, 7)
    if one_too_large:
        shapes[draw.integer(3, 6)] = (5, 3)
    inputs = [{"gradients": [draw.normal(*shape) for shape in shapes], "limit": limit} for _ in range(size)]
    groups = {"dp": [list(range(size))], "mark": [[rank] for rank in range(size)]}
    return Case(inputs, groups, f"{size} ranks, {len(shapes)} gradients, at most {limit} bytes")


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    size, limit, like = case.size, case.inputs[0]["limit"], case.inputs[0]["gradients"]
    buckets = _buckets(like, limit)
    local = [_flat(inputs["gradients"], like) for inputs in case.inputs]
    total = torch.stack(local).sum(0)
    means = [
        part.view_as(one) for part, one in zip((total / size).split([one.numel() for one in like]), like, strict=True)
    ]
    last = sum(like[place].numel() for place in buckets[-1])
    judge.equal(
        VALUES,
        [_flat(value, like) for value in outcome.values],
        [total / size] * size,
        {
            f"the gradients are added up: divide by the {size} ranks": [total] * size,
            "every rank has its own gradients still: a result is there only after wait(), and in the tensor that was "
            "sent; a copy that was taken before has not got it": local,
            f"every rank has its own gradients, divided by {size}: you have not waited for the sum before you divide": [
                one / size for one in local
            ],
            "the last bucket has not been averaged: it is not full, but has to be launched after the loop": [
                torch.cat([total[:-last] / size, one[-last:]]) for one in local
            ],
            "the gradients of the last bucket are missing: it is not full, but has to be launched after the loop": [
                means[: buckets[-1][0]]
            ]
            * size,
        },
        what="the list of gradients, end to end,",
    )
    for rank in range(size):
        calls = calls_of(outcome, rank)
        launches = [call for call in calls if call.group == "dp"]
        judge.that(BUCKETS, *_full(launches, rank, like, buckets, limit))
        judge.that(LAUNCHED, *_early(calls, rank, buckets, len(like)))
        judge.that(WAITS, *_late(calls, rank))


def _buckets(gradients: Sequence[Tensor], limit: int) -> list[list[int]]:
    """Which gradients, by number, lie in each bucket."""
    buckets: list[list[int]] = [[]]
    for number, gradient in enumerate(gradients):
        if buckets[-1] and sum(gradients[one].nbytes for one in buckets[-1]) + gradient.nbytes > limit:
            buckets.append([])
        buckets[-1].append(number)
    return buckets


def _full(
    launches: list[Call], rank: int, gradients: Sequence[Tensor], buckets: list[list[int]], limit: int
) -> tuple[bool, str]:
    """Whether these are the messages of those buckets, and what is wrong with them."""
    others = [call for call in launches if call.op != "all_reduce"]
    found, right = [call.bytes for call in launches], [sum(gradients[n].nbytes for n in bucket) for bucket in buckets]
    if others:
        return False, f"rank {rank} calls {others[0]}: all_reduce is enough"
    if found == right:
        return True, ""
    if found == [gradient.nbytes for gradient in gradients]:
        return False, f"rank {rank} sends each of the {len(found)} gradients by itself: put several into one bucket"
    if len(found) == 1:
        return False, f"rank {rank} sends all gradients in one message of {found[0]} bytes: the limit is {limit}"
    if sum(found) < sum(right):
        return False, f"rank {rank} sends {sum(found)} bytes in all, and has {sum(right)}: a bucket is left behind"
    if over := [size for size in found if size > limit and size not in right]:
        return False, (
            f"rank {rank} sends a bucket of {over[0]} bytes, over the limit of {limit}: see whether a gradient fits "
            "before you put it in"
        )
    return False, (
        f"rank {rank} sends buckets of {found} bytes, expected {right}: with a limit of {limit}, a gradient goes into "
        "the open bucket if that then has at most so many bytes, and else begins a new one"
    )


def _early(calls: list[Call], rank: int, buckets: list[list[int]], gradients: int) -> tuple[bool, str]:
    """Whether all launches are asynchronous, and each comes before too many gradients have been given."""
    given, launched = 0, 0
    for call in calls:
        if call.tag == "gradient" and call.group == "mark":
            given += 1
        elif call.group == "dp":
            if call.waits:
                return False, f"rank {rank} stands still in {call}: with async_op=True, backward goes on meanwhile"
            if launched < len(buckets) - 1 and given > buckets[launched + 1][0] + 1:
                when = "after the last gradient" if given == gradients else f"when {given} gradients are there"
                return False, (
                    f"rank {rank} launches bucket {launched} {when}, but it was full as soon as gradient "
                    f"{buckets[launched + 1][0]} did not fit: launch inside the loop over the gradients"
                )
            launched += 1
    return bool(launched), f"rank {rank} launches nothing"


def _late(calls: list[Call], rank: int) -> tuple[bool, str]:
    """Whether each launch is waited for, and none before all are launched."""
    launches = [call for call in calls if call.group == "dp"]
    waits = [call for call in calls if call.group == "mark" and call.tag == "wait"]
    still = [call for call in launches if call.waits]
    if still:
        return False, f"rank {rank} waits in each all_reduce, for it is not launched with async_op=True"
    if waits and waits[0].number < launches[-1].number:
        early = sum(call.number < waits[0].number for call in launches)
        return False, (
            f"rank {rank} waits when {early} of its {len(launches)} buckets are launched: then backward stands still. "
            "Keep what all_reduce returns in a list, and wait for all after the last launch"
        )
    if len(waits) < len(launches):
        return False, (
            f"rank {rank} launches {len(launches)} buckets and waits for {len(waits)}: the sum is in a bucket only "
            "after its wait()"
        )
    return bool(launches), f"rank {rank} launches nothing"


def _flat(some: Any, like: Sequence[Tensor]) -> Any:
    """Tensors end to end, if they have the shapes of these; else as they came."""
    if type(some) is not list or len(some) != len(like):
        return some
    fits = [type(one) is Tensor and one.shape == other.shape for one, other in zip(some, like, strict=True)]
    return torch.cat([one.flatten() for one in some]) if all(fits) else some
