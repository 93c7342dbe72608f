"""Exercise 2: a reduce-scatter and an all-gather, the halves of a ring, from send and recv."""

import torch
from torch import Tensor

from minipar.grade.judging import Case, Draw, Judge, Outcome, calls_of

TITLE, MINUTES, LESSON = "Reduce-scatter and all-gather", 30, 0
CHECKS = {
    "reduce_scatter: rank r has piece r of the sum": 3,
    "all_gather: every rank has all pieces, in order": 3,
    "the ring: only neighbours talk": 2,
    "no rank sends more than (N-1)/N": 2,
}
HINTS = [
    "Both are N-1 steps of one kind: send a piece to the right, and take one from the left. Write that step first.",
    "In an all_gather rank r first sends its own piece; from then on it passes on what it received a step ago.",
    "In a reduce_scatter, what arrives is added to your own piece of that number, and that sum is what you pass on.",
    "Piece r has to come to its end on rank r: so it sets out on rank r + 1. In step s, rank r sends piece "
    "(r - 1 - s) mod N, and receives the one before.",
    "All ranks send at the same time: launch the receive with async_op=True before you send, and wait for it after.",
]


def harness(student, group, buffer=None, piece=None):  # type: ignore[no-untyped-def]
    if piece is None:
        return student.reduce_scatter(buffer, group)
    try:
        return student.all_gather(piece, group)
    except NotImplementedError:
        return None


def cases(draw: Draw) -> list[Case]:
    some = []
    for size in (2, 3, draw.integer(4, 5)):
        length = draw.integer(2, 4)
        some.append(Case([{"buffer": draw.normal(size * length)} for _ in range(size)], about=f"{size} ranks reduce"))
    for size in (3, draw.choice([2, 4, 5])):
        length = draw.integer(2, 4)
        some.append(Case([{"piece": draw.normal(length)} for _ in range(size)], about=f"{size} ranks gather"))
    return some


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    if "buffer" in case.inputs[0]:
        buffers = [inputs["buffer"] for inputs in case.inputs]
        _judge_sum(buffers, outcome, judge)
        _judge_messages("reduce_scatter", buffers[0].nbytes, outcome, judge)
    else:
        pieces = [inputs["piece"] for inputs in case.inputs]
        _judge_gathered(pieces, outcome, judge)
        _judge_messages("all_gather", pieces[0].nbytes * case.size, outcome, judge)


def _judge_sum(buffers: list[Tensor], outcome: Outcome, judge: Judge) -> None:
    size, total = len(buffers), torch.stack(buffers).sum(0)
    pieces = total.chunk(size)
    judge.equal(
        "reduce_scatter: rank r has piece r of the sum",
        outcome.values,
        pieces,
        {
            "rank r returns piece r of its own buffer: nothing was added up": [
                buffer.chunk(size)[rank] for rank, buffer in enumerate(buffers)
            ],
            "the piece is finished, but rank r has piece r + 1, as after half of a ring all-reduce: let rank r begin "
            "one piece earlier, with piece r - 1": [pieces[(rank + 1) % size] for rank in range(size)],
            "every rank returns the whole sum: that is an all_reduce; return piece r alone": [total] * size,
            f"the sum was divided by the {size} ranks: a reduce_scatter adds up, and whoever wants the mean divides": [
                piece / size for piece in pieces
            ],
        },
        what="the piece",
    )


def _judge_gathered(pieces: list[Tensor], outcome: Outcome, judge: Judge) -> None:
    size, zero = len(pieces), torch.zeros_like(pieces[0])
    arrived = [[pieces[(rank - step) % size] for step in range(size)] for rank in range(size)]
    after_one = [
        torch.cat([pieces[place] if place in (rank, (rank - 1) % size) else zero for place in range(size)])
        for rank in range(size)
    ]
    judge.equal(
        "all_gather: every rank has all pieces, in order",
        outcome.values,
        [torch.cat(pieces)] * size,
        {
            "all_gather is not written yet": [None] * size,
            "every rank returns its own piece alone: nothing has been passed on": pieces,
            "the pieces are laid in the order in which they arrived, which differs from rank to rank: what arrives in "
            "step s at rank r is piece r - 1 - s, and belongs in that place": [torch.cat(some) for some in arrived],
            "only the left neighbour's piece has arrived, which is enough for 2 ranks: N ranks need N-1 steps, and in "
            "each you pass on what you received last": after_one,
        },
        what="the gathered buffer",
    )


def _judge_messages(name: str, whole: int, outcome: Outcome, judge: Judge) -> None:
    size = len(outcome.values)
    most = whole * (size - 1) // size
    for rank in range(size):
        calls = calls_of(outcome, rank)
        others = sorted({call.op for call in calls} - {"send", "recv"})
        to = sorted({call.peer for call in calls if call.op == "send"})
        judge.that(
            "the ring: only neighbours talk",
            not others and to == [(rank + 1) % size],
            f"in {name} rank {rank} called {', '.join(others)}: build it from send and recv alone"
            if others
            else f"in {name} rank {rank} sends to {', '.join(f'rank {one}' for one in to) or 'nobody'}: in a ring it "
            f"sends to rank {(rank + 1) % size} only",
        )
        sent = sum(call.bytes for call in calls if call.op == "send")
        judge.that(
            "no rank sends more than (N-1)/N",
            0 < sent <= most,
            f"in {name} rank {rank} of {size} sends {sent} bytes, and {most} are needed, (N-1)/N of {whole}: "
            "send one piece in a step, and stop after N-1 steps",
        )
