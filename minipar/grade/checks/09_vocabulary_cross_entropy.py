"""Exercise 9: cross entropy where each rank has the logits of its own words."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minipar.grade.judging import Case, Draw, Judge, Outcome, calls_of, same

TITLE, MINUTES, LESSON = "Cross entropy over a split vocabulary", 30, 3
LOSS, GRADIENT = "the loss of each token", "the gradient of the local logits"
BYTES, KEPT = "a few numbers for each token travel", "the logits stay as they are"
CHECKS = {LOSS: 4, GRADIENT: 3, BYTES: 3, KEPT: 1}
HINTS = [
    "Write the loss of one token for one process, with the largest logit subtracted. Which parts run over all words? "
    "Each of them is one all_reduce of one number for each token.",
    "First highest = logits.amax(1), all_reduce with max. Then sums of exp(logits - highest), all_reduce with sum.",
    "The target belongs to one rank: mine = targets - first is its column, if it is from 0 to the number of words less "
    "1. The other ranks add 0 to the sum, whatever they find in their own columns.",
    "loss = log(total) - target, if highest is subtracted in both. The gradient needs no message: exp(logits - "
    "highest) / total, and minus 1 in column `mine` of the tokens whose target is here.",
]


def harness(student, group, logits, targets, first):  # type: ignore[no-untyped-def]
    before = logits.clone()
    loss, gradient = student.vocabulary_cross_entropy(logits, targets, first, group)
    return {"loss": loss, "gradient": gradient, "kept": bool(torch.equal(before, logits))}


def cases(draw: Draw) -> list[Case]:
    some = []
    for size, even in ((2, True), (3, False), (draw.choice([4, 5]), False)):
        share, tokens = draw.integer(12, 16), draw.integer(6, 9)
        words = [share if even else share + draw.integer(-3, 3) for _ in range(size)]
        logits = 3 * draw.normal(tokens, sum(words))
        logits[:2] += torch.tensor([[900.0], [-900.0]])  # exp of the first is infinite, of the second 0
        targets = draw.integers(sum(words), tokens)
        targets[:size] = torch.tensor(words).cumsum(0) - 1  # each rank has one: the last of its words
        inputs, first = [], 0
        for count in words:
            inputs.append({"logits": logits[:, first : first + count].contiguous(), "targets": targets, "first": first})
            first += count
        some.append(Case(inputs, about=f"{tokens} tokens, {' + '.join(map(str, words))} words on {size} ranks"))
    return some


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    parts, targets, size = [i["logits"] for i in case.inputs], case.inputs[0]["targets"], case.size
    whole = torch.cat(parts, 1)
    loss = F.cross_entropy(whole, targets, reduction="none")
    softmax, hot = whole.softmax(1), F.one_hot(targets, whole.shape[1])
    losses, gradients = [v["loss"] for v in outcome.values], [v["gradient"] for v in outcome.values]
    overflow = "has values that are no numbers: exp of a large logit is infinite, and of many small ones the sum is 0. "
    overflow += "Subtract from each logit the largest of its token, over all words of all ranks"
    if judge.that(LOSS, not _broken(losses), f"{case.about}: the loss {overflow}"):
        mistakes = _wrong_losses(case, losses, whole, loss)
        judge.equal(LOSS, losses, [loss] * size, mistakes, what=f"{case.about}: the loss")
    if judge.that(GRADIENT, not _broken(gradients), f"{case.about}: the gradient {overflow}"):
        judge.equal(
            GRADIENT,
            gradients,
            _cut(softmax - hot, parts),
            _wrong_gradients(case, softmax, hot),
            what=f"{case.about}: the gradient",
        )
    _communication(case, outcome, judge)


def _communication(case: Case, outcome: Outcome, judge: Judge) -> None:
    for rank, inputs in enumerate(case.inputs):
        calls, column = calls_of(outcome, rank), inputs["targets"].shape[0] * 8
        largest = max(calls, key=lambda call: call.bytes, default=None)
        total = sum(call.bytes for call in calls)
        judge.that(
            BYTES,
            0 < total <= 4 * column,
            f"{case.about}: rank {rank} hands over {total} bytes in {len(calls)} calls, the largest {largest}. Three "
            f"numbers for each token are {3 * column}: share maximum, sum and target's logit, never the logits"
            if total
            else f"{case.about}: rank {rank} talks to nobody, and cannot know of the others' words",
        )
        kept = outcome.values[rank]["kept"]
        judge.that(KEPT, kept, f"rank {rank} has changed its logits in place: they must stay as they are")


def _wrong_losses(case: Case, found: list[Any], whole: Tensor, loss: Tensor) -> dict[str, list[Any]]:
    parts, targets, size = [i["logits"] for i in case.inputs], case.inputs[0]["targets"], case.size
    tokens, highest = torch.arange(len(targets)), whole.amax(1)
    own = [part.amax(1) for part in parts]
    known = [_known(inputs) for inputs in case.inputs]
    right = whole[tokens, targets]
    sums = sum((part - high.unsqueeze(1)).exp().sum(1) for part, high in zip(parts, own, strict=True))
    shifted = sum((right - high) * here for high, here in zip(own, known, strict=True))
    guessed = sum(_guessed(inputs) - highest for inputs in case.inputs)
    never = "each rank has subtracted the largest of its own words, so what is added up has different scales: share "
    never += "the maximum first, with all_reduce(..., 'max')"
    alone = "only the rank that has the target's logit has subtracted it: all_reduce it, with 0 from the other ranks"
    return {
        never: _either(
            found,
            [sums.log() - shifted] * size,
            [sums.log() + high - right for high in own],
            [sums.log() - right] * size,
        ),
        alone: _either(
            found, [loss + right * ~here for here in known], [loss + (right - highest) * ~here for here in known]
        ),
        "the sum of exponentials is of this rank's words only: add up those of all ranks": [
            (part - highest.unsqueeze(1)).exp().sum(1).log() + highest - right for part in parts
        ],
        "ranks without the target have added a logit of another word: of a target that is not here, take 0": [
            loss + right - highest - guessed
        ]
        * size,
        "the target's logit is of a wrong column: `targets` number the whole vocabulary, so subtract `first`": [
            loss + right - part[tokens, targets.clamp(max=part.shape[1] - 1)] for part in parts
        ],
        "this is one number: the loss is asked for each token": _either(
            found, [loss.sum()] * size, [loss.mean()] * size
        ),
        f"{size} times too large: it is added up over the ranks, and was the same on each": [loss * size] * size,
        "the highest logit, which was subtracted before exp, is still missing in the loss: subtract it from the "
        "target's logit as well": [loss - highest] * size,
        "only the loss of rank 0 is right: all ranks return it": [loss, *[torch.zeros_like(loss)] * (size - 1)],
    }


def _wrong_gradients(case: Case, softmax: Tensor, hot: Tensor) -> dict[str, list[Tensor]]:
    parts, tokens, size = [i["logits"] for i in case.inputs], len(hot), case.size
    everywhere = []
    for part, inputs in zip(_cut(softmax, parts), case.inputs, strict=True):
        mine = (inputs["targets"] - inputs["first"]) * _known(inputs)
        everywhere.append(part - F.one_hot(mine, part.shape[1]))
    return {
        "that is softmax: the 1 at the target is not yet subtracted": _cut(softmax, parts),
        "divided by the number of tokens: it is the gradient of the sum, not of the mean": _cut(
            (softmax - hot) / tokens, parts
        ),
        "the sign: softmax minus 1 at the target, not the other way round": _cut(hot - softmax, parts),
        "softmax over this rank's words only: divide by the sum over all ranks": [
            part.softmax(1) - one for part, one in zip(parts, _cut(hot, parts), strict=True)
        ],
        "1 is subtracted on every rank: only where the target is a word of this rank": everywhere,
        f"{size} times too large: nothing is to be added up over the ranks, each has columns of its own": _cut(
            (softmax - hot) * size, parts
        ),
    }


def _either(found: list[Any], *ways: list[Any]) -> list[Any]:
    """Of the ways to make a mistake, the one that gives what was found; else the first."""
    return next((way for way in ways if all(map(same, found, way))), ways[0])


def _known(inputs: Any) -> Tensor:
    """Which targets are words of the rank."""
    mine = inputs["targets"] - inputs["first"]
    return (mine >= 0) & (mine < inputs["logits"].shape[1])


def _guessed(inputs: Any) -> Tensor:
    """The target's logit; of a target that is elsewhere, that of column 0."""
    mine = (inputs["targets"] - inputs["first"]) * _known(inputs)
    return inputs["logits"].gather(1, mine.unsqueeze(1)).squeeze(1)


def _cut(whole: Tensor, parts: list[Tensor]) -> list[Tensor]:
    return list(whole.split([part.shape[1] for part in parts], 1))


def _broken(found: list[Any]) -> bool:
    return any(isinstance(one, Tensor) and not bool(torch.isfinite(one).all()) for one in found)
