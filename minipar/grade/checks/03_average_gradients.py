"""Exercise 3: the mean of gradients over all tokens of all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minipar.grade.judging import Case, Draw, Judge, Outcome, bytes_of, calls_of

TITLE, MINUTES, LESSON = "Average the gradients", 20, 2
CHECKS = {
    "gradients are the mean over all tokens": 4,
    "parameters stay as they are": 1,
    "the bytes of an all_reduce": 3,
}
HINTS = [
    "A mean over all tokens is a sum over all tokens, divided by their number. What makes a rank's gradient a sum?",
    "Multiply the gradient by this rank's tokens, and add up over the ranks with all_reduce.",
    "The number of all tokens is known to no rank: add that up over the ranks as well, in a tensor of one number.",
    "Write the quotient into parameter.grad. (One message will do: lay all gradients and the count end to end.)",
]


def harness(student, group, values, gradients, tokens):  # type: ignore[no-untyped-def]
    parameters = [torch.nn.Parameter(value) for value in values]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    student.average_gradients(parameters, tokens, group)
    return {"gradients": [parameter.grad for parameter in parameters], "parameters": parameters}


def cases(draw: Draw) -> list[Case]:
    some = []
    for size in (2, 3, 5):
        high, wide = draw.integer(2, 4), draw.integer(3, 5)
        shapes = [(high, wide), (high,), (2, high, 3)]
        values = [draw.normal(*shape) for shape in shapes]
        tokens = [3 * rank + draw.integer(2, 4) for rank in range(size)]
        inputs = [
            {"values": values, "gradients": [draw.normal(*shape) for shape in shapes], "tokens": had} for had in tokens
        ]
        some.append(Case(inputs, about=f"{size} ranks with {tokens} tokens"))
    return some


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    gradients = [inputs["gradients"] for inputs in case.inputs]
    tokens = [inputs["tokens"] for inputs in case.inputs]
    size, total, local = case.size, sum(tokens), [_flat(some, some) for some in gradients]

    def summed(weight: Callable[[int], float], by: float = 1.0) -> Tensor:
        return torch.stack([weight(rank) * some for rank, some in enumerate(local)]).sum(0) / by

    by_tokens, equally = tokens.__getitem__, lambda rank: 1.0
    mean = summed(by_tokens, total)
    judge.equal(
        "gradients are the mean over all tokens",
        [_flat(value["gradients"], gradients[0]) for value in outcome.values],
        [mean] * size,
        {
            "every rank still has its own gradients: all_reduce them, and write the result into parameter.grad": local,
            "only rank 0 has the mean: every replica takes the step, so every rank needs it": [mean, *local[1:]],
            f"this is the mean over the {size} ranks, in which all count the same, though they had {tokens} tokens: "
            "multiply each rank's gradient by its tokens first": [summed(equally, size)] * size,
            "the ranks' gradients are added up, but not weighted by tokens and not divided": [summed(equally)] * size,
            "the sum over all tokens is right, but it is not divided by the number of all tokens": [summed(by_tokens)]
            * size,
            f"the sum over all tokens is divided by the {size} ranks: divide it by the tokens of all ranks": [
                summed(by_tokens, size)
            ]
            * size,
            "each rank divides the sum by its own tokens, so the ranks differ from now on: add the numbers of tokens "
            "up over the ranks too": [summed(by_tokens, own) for own in tokens],
            f"divided twice: by the tokens of all ranks, and once more by the {size} ranks (is it an all_reduce with "
            '"mean"?)': [summed(by_tokens, total * size)] * size,
        },
        what="the list of gradients, end to end,",
    )
    values = case.inputs[0]["values"]
    judge.equal(
        "parameters stay as they are",
        [_flat(value["parameters"], values) for value in outcome.values],
        [_flat(values, values)] * size,
        what="parameters have changed, and only gradients should: the list of parameters, end to end,",
    )
    whole = local[0].nbytes
    for rank in range(size):
        sent, needed = bytes_of(outcome, rank), round(2 * (size - 1) / size * whole)
        used = ", ".join(sorted({call.op for call in calls_of(outcome, rank)})) or "no message"
        judge.that(
            "the bytes of an all_reduce",
            0 < sent <= needed + 2 * 16,
            f"rank {rank} of {size} sends {sent} bytes ({used}) for gradients of {whole}: an all_reduce of them sends "
            f"{needed}. Send the weighted gradients and the number of tokens, nothing else",
        )


def _flat(some: Any, like: Sequence[Tensor]) -> Any:
    """Tensors end to end, if they have the shapes of these; else as they came."""
    fits = [type(one) is Tensor and one.shape == other.shape for one, other in zip(some, like, strict=False)]
    return torch.cat([one.flatten() for one in some]) if all(fits) and len(some) == len(like) else some
