"""Exercise 5: gradients of several micro-batches, added up, and synchronised once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minipar.grade.judging import Case, Draw, Judge, Outcome, bytes_of, calls_of

TITLE, MINUTES, LESSON = "Accumulate, then synchronise once", 25, 2
VALUES, ONE = "gradients are the mean over all micro-batches of all ranks", "one micro-batch at a time"
LATE, BYTES = "no message before the last backward", "the bytes of one all_reduce"
CHECKS = {VALUES: 4, ONE: 2, LATE: 3, BYTES: 2}
HINTS = [
    "backward() adds to .grad. What has to be in there when the first micro-batch begins?",
    "Go forward and backward with one micro-batch, then with the next: so only one has its activations in memory.",
    "A mean over micro-batches: divide each loss by their number before backward. And what about the ranks?",
    "After the loop over micro-batches, one more over parameters: group.all_reduce(parameter.grad, 'mean').",
]


def harness(student, groups, values, stale, micro_batches):  # type: ignore[no-untyped-def]
    parameters = [torch.nn.Parameter(value) for value in values]
    for parameter, gradient in zip(parameters, stale, strict=True):
        parameter.grad = gradient.clone()

    def mark(what):  # type: ignore[no-untyped-def]
        groups.mark.all_gather(torch.zeros(1), tag=what)  # to nobody: it only marks the place among the calls

    def loss_of(micro_batch):  # type: ignore[no-untyped-def]
        mark("forward")
        x, y = micro_batch
        loss = ((torch.tanh(x @ parameters[0] + parameters[1]) @ parameters[2] - y) ** 2).mean()
        loss.register_hook(lambda grad: mark("backward"))
        return loss

    student.accumulate(micro_batches, loss_of, parameters, groups.dp)
    return [parameter.grad for parameter in parameters]


def cases(draw: Draw) -> list[Case]:
    return [_case(draw, size, count) for size, count in ((2, 3), (3, draw.choice([2, 4])), (5, 2))]


def _case(draw: Draw, size: int, count: int) -> Case:
    wide = draw.integer(3, 5)
    shapes = [(4, wide), (wide,), (wide, 2)]
    values, stale = [draw.normal(*shape) for shape in shapes], [draw.normal(*shape) for shape in shapes]
    inputs = [
        {
            "values": values,
            "stale": stale,
            "micro_batches": [[draw.normal(3, 4), draw.normal(3, 2)] for _ in range(count)],
        }
        for _ in range(size)
    ]
    groups = {"dp": [list(range(size))], "mark": [[rank] for rank in range(size)]}
    return Case(inputs, groups, f"{size} ranks with {count} micro-batches each")


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    size, values = case.size, case.inputs[0]["values"]
    count = len(case.inputs[0]["micro_batches"])
    each = [[_gradient(values, one) for one in inputs["micro_batches"]] for inputs in case.inputs]
    own = [torch.stack(some).mean(0) for some in each]
    mean, last = torch.stack(own).mean(0), torch.stack([some[-1] for some in each]).mean(0)
    stale = _flat(case.inputs[0]["stale"], values)
    judge.equal(
        VALUES,
        [_flat(value, values) for value in outcome.values],
        [mean] * size,
        {
            "each rank has the gradients of its own micro-batches only: all_reduce them after the last": own,
            f"{count} times too large: backward adds up, so divide by the {count} micro-batches": [mean * count] * size,
            f"{size} times too large: all_reduce adds up, so divide by the {size} ranks (or use its mean)": [
                mean * size
            ]
            * size,
            f"{size * count} times too large: divide by the {count} micro-batches and by the {size} ranks": [
                mean * size * count
            ]
            * size,
            f"{count} times too small: divided by the {count} micro-batches twice": [mean / count] * size,
            f"{size} times too small: divided by the {size} ranks twice": [mean / size] * size,
            "the gradient of the step before is still in there: backward adds to .grad, so empty it first": [
                mean + stale
            ]
            * size,
            "the gradient of the step before is still in there, divided: backward adds to .grad, so empty it first": [
                mean + stale / count
            ]
            * size,
            "only the last micro-batch is in the gradient: empty .grad once, not before each": [last] * size,
            f"only the last micro-batch is in the gradient, divided by {count}: empty .grad once, not before each": [
                last / count
            ]
            * size,
        },
        what="the list of gradients, end to end,",
    )
    needed = round(2 * (size - 1) / size * mean.nbytes)
    for rank in range(size):
        turns = [call.tag for call in calls_of(outcome, rank, group="mark")]
        judge.that(ONE, *_one_at_a_time(turns, rank, count))
        judge.that(LATE, *_only_late(outcome, rank, count))
        sent = bytes_of(outcome, rank, group="dp")
        judge.that(
            BYTES,
            0 < sent <= needed + 2,
            f"rank {rank} of {size} sends {sent} bytes; one all_reduce of {mean.nbytes} bytes of gradients sends "
            f"{needed}, whether there is one micro-batch or {count}",
        )


def _gradient(values: Sequence[Tensor], micro_batch: Sequence[Tensor]) -> Tensor:
    """The gradients of the mean loss of a micro-batch, end to end."""
    one, bias, two = (value.clone().requires_grad_() for value in values)
    x, y = micro_batch
    loss = ((torch.tanh(x @ one + bias) @ two - y) ** 2).mean()
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, [one, bias, two])])


def _one_at_a_time(turns: list[str], rank: int, count: int) -> tuple[bool, str]:
    if turns == ["forward", "backward"] * count:
        return True, ""
    ahead = turns.index("backward") if "backward" in turns else len(turns)
    if ahead > 1:
        return False, (
            f"rank {rank} goes forward with {ahead} micro-batches before the first backward: all their activations are "
            "in memory at once. Go backward with each before the next one's forward"
        )
    forwards = turns.count("forward")
    return False, f"rank {rank} goes forward {forwards} times, and has {count} micro-batches: each once, then backward"


def _only_late(outcome: Outcome, rank: int, count: int) -> tuple[bool, str]:
    calls, done = calls_of(outcome, rank), 0
    for call in calls:
        if call.group == "mark":
            done += call.tag == "backward"
        elif done < count:
            return False, (
                f"rank {rank} calls {call} after {done} of {count} backwards: gradients that are not complete need not "
                "be sent. Move it behind the loop"
            )
    return any(call.group == "dp" for call in calls), f"rank {rank} sends nothing"


def _flat(some: Any, like: Sequence[Tensor]) -> Any:
    """Tensors end to end, if they have the shapes of these; else as they came."""
    if type(some) is not list or len(some) != len(like):
        return some
    fits = [type(one) is Tensor and one.shape == other.shape for one, other in zip(some, like, strict=True)]
    return torch.cat([one.flatten() for one in some]) if all(fits) else some
