"""Exercise 18: ZeRO stage 2, in which gradients are reduced as they come, and each rank keeps its pieces."""

import torch
from torch import Tensor

from minipar.grade.judging import Case, Draw, Judge, Outcome, bytes_of, calls_of

TITLE, MINUTES, LESSON = "ZeRO stage 2: share the gradients", 25, 5
CHECKS = {
    "each rank has its piece of the sum": 4,
    "a gradient is reduced as soon as it is there": 2,
    "whole gradients are let go": 2,
    "only the bytes of a reduce_scatter": 2,
}
HINTS = [
    "One loop over `gradients`. Inside: flatten, pad, reduce_scatter, and keep what comes back.",
    "padded = torch.nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % group.size))",
    "In the first micro-batch store the piece; in the others add to it: the sum over micro-batches is kept in pieces.",
    "Put gradients into no list: what a list holds stays in memory. If you launch with async_op=True, wait for it "
    "before the next one but one.",
]


def harness(student, group, batches):  # type: ignore[no-untyped-def]
    from torch.multiprocessing.reductions import StorageWeakRef

    made, most = [], 0

    def backward():
        nonlocal most
        for batch in batches:
            for layer in reversed(range(len(batch))):
                most = max(most, sum(not one.expired() for one in made))
                group.broadcast(torch.empty(0), tag="backward")  # so that the grader sees when
                gradient = batch[layer].clone()
                made.append(StorageWeakRef(gradient.untyped_storage()))
                yield layer, gradient
                del gradient

    pieces = student.reduce_as_they_come(backward(), len(batches[0]), group)
    return {"pieces": [pieces[layer] for layer in range(len(batches[0]))], "held": most}


def cases(draw: Draw) -> list[Case]:
    some = []
    for size, micro_batches in ((2, 2), (3, 3), (5, 1), (draw.choice([3, 4]), 2)):
        layers = draw.integer(4, 5)
        shapes = [(draw.integer(2, 5), draw.integer(2, 5)) for _ in range(layers)]
        shapes[draw.integer(0, layers - 1)] = (draw.choice([3, 5, 7]), 3)
        inputs = [
            {"batches": [[draw.normal(*shape) for shape in shapes] for _ in range(micro_batches)]} for _ in range(size)
        ]
        some.append(Case(inputs, about=f"{size} ranks, {layers} layers, {micro_batches} micro-batches"))
    return some


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    size, local = case.size, [inputs["batches"] for inputs in case.inputs]
    micro_batches, layers = len(local[0]), len(local[0][0])
    over_ranks = [[sum(one[b][n] for one in local) for n in range(layers)] for b in range(micro_batches)]
    total = [sum(batch[n] for batch in over_ranks) for n in range(layers)]
    pieces = [[_pieces(whole, size)[rank] for whole in total] for rank in range(size)]
    own = [[sum(batch[n] for batch in one) for n in range(layers)] for one in local]
    judge.equal(
        "each rank has its piece of the sum",
        [one["pieces"] for one in outcome.values],
        pieces,
        {
            "only the last micro-batch is left: add each micro-batch's piece to what is there": [
                [_pieces(whole, size)[rank] for whole in over_ranks[-1]] for rank in range(size)
            ],
            "only the first micro-batch is there: add the others to it": [
                [_pieces(whole, size)[rank] for whole in over_ranks[0]] for rank in range(size)
            ],
            f"it is divided by the {size} ranks: losses are divided by the tokens of the whole batch already, so sum": [
                [piece / size for piece in mine] for mine in pieces
            ],
            "these are pieces of this rank's own gradient: they must be summed over the ranks": [
                [_pieces(whole, size)[rank] for whole in own[rank]] for rank in range(size)
            ],
            "this is all of the summed gradient: a rank shall keep its own piece only": [total] * size,
            "this is all of the summed gradient, flat: a rank shall keep its own piece only": [
                [torch.cat(_pieces(whole, size)) for whole in total]
            ]
            * size,
            "every rank has the first piece: take piece group.rank": [pieces[0]] * size,
            "the padding was cut off: keep it, so that pieces are equally long on all ranks": [
                [piece[: max(0, whole.numel() - rank * len(piece))] for piece, whole in zip(mine, total, strict=True)]
                for rank, mine in enumerate(pieces)
            ],
            "the pieces are right, but in the order in which they came: return them by layer, the first one first": [
                mine[::-1] for mine in pieces
            ],
        },
        what=f"the list of pieces ({case.about})",
    )
    _judge_behaviour(case, outcome, judge, layers * micro_batches)


def _judge_behaviour(case: Case, outcome: Outcome, judge: Judge, gradients: int) -> None:
    size = case.size
    needed = sum(len(_pieces(g, size)[0]) * 8 * (size - 1) for batch in case.inputs[0]["batches"] for g in batch)
    for rank, value in enumerate(outcome.values):
        calls = calls_of(outcome, rank)
        reduces = [call for call in calls if call.op in ("reduce_scatter", "all_reduce", "all_to_all")]
        done = late = 0
        for number, call in enumerate(c for c in calls if c.tag == "backward" or c in reduces):
            made = number - done  # gradients before this one
            late = max(late, made - done) if call.tag == "backward" else late
            done += call in reduces
        late = max(late, gradients - done)
        judge.that(
            "a gradient is reduced as soon as it is there",
            late <= 1,
            f"rank {rank} has made {late} gradients which it has not reduced yet: call reduce_scatter inside of the "
            f"loop, for each one that comes ({gradients} in all)",
        )
        judge.that(
            "whole gradients are let go",
            value["held"] <= 2,
            f"rank {rank} holds {value['held']} whole gradients at once: keep the piece that comes back, and put the "
            "gradient itself into no list",
        )
        sent = bytes_of(outcome, rank)
        judge.that(
            "only the bytes of a reduce_scatter",
            sent <= needed,
            f"rank {rank} sends {sent} bytes, where reduce_scatter needs {needed}: "
            + (
                "all_reduce brings the whole sum to every rank, for twice the bytes, and most of it is thrown away"
                if any(call.op == "all_reduce" for call in reduces)
                else "send nothing but the gradients, each of them once"
            ),
        )


def _pieces(whole: Tensor, size: int) -> list[Tensor]:
    flat = whole.flatten()
    return list(torch.nn.functional.pad(flat, (0, -len(flat) % size)).chunk(size))
