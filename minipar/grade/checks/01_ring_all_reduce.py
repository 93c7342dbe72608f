"""Exercise 1: a ring all-reduce from send and recv."""

import torch

from minipar.grade.judging import Case, Draw, Judge, Outcome, calls_of

TITLE, MINUTES, LESSON = "Ring all-reduce", 30, 0
CHECKS = {"every rank has the sum": 3, "the ring: only neighbours talk": 2, "no rank sends more than 2 (N-1)/N": 3}
HINTS = [
    "Cut the buffer into as many pieces as there are ranks. In one step every rank sends one piece and receives one.",
    "First N-1 steps in which what arrives is added: rank r sends piece (r - step) mod N, and receives the one before.",
    "After them rank r has the finished piece (r + 1) mod N. N-1 more steps pass finished pieces on, without adding.",
    "All ranks send at the same time: launch the receive with async_op=True before you send, and wait for it after.",
]


def harness(student, group, buffer):  # type: ignore[no-untyped-def]
    return student.ring_all_reduce(buffer, group)


def cases(draw: Draw) -> list[Case]:
    some = []
    for size in (2, 3, draw.integer(4, 6)):
        length = size * draw.integer(1, 4)
        some.append(Case([{"buffer": draw.normal(length)} for _ in range(size)]))
    return some


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    buffers = [inputs["buffer"] for inputs in case.inputs]
    size, total = case.size, sum(buffers)
    half = [_after_half(buffers, rank) for rank in range(size)]
    judge.equal(
        "every rank has the sum",
        outcome.values,
        [total] * size,
        {
            "each rank returns what it began with: nothing was added up": buffers,
            f"the sum was divided by the {size} ranks: an all-reduce adds up, and whoever wants the mean divides": [
                total / size
            ]
            * size,
            "each rank has one finished piece, and the others are unfinished: the second half of the ring is missing, "
            "in which finished pieces are passed on": half,
        },
        what="the buffer",
    )
    for rank in range(size):
        calls = calls_of(outcome, rank)
        others = sorted({call.op for call in calls} - {"send", "recv"})
        to = {call.peer for call in calls if call.op == "send"}
        judge.that(
            "the ring: only neighbours talk",
            not others and to == {(rank + 1) % size},
            f"rank {rank} called {', '.join(others)}: build it from send and recv alone"
            if others
            else f"rank {rank} sends to {sorted(to) or 'nobody'}: in a ring it sends to rank {(rank + 1) % size} only",
        )
        sent = sum(call.bytes for call in calls if call.op == "send")
        most = 2 * (size - 1) * buffers[rank].nbytes // size
        judge.that(
            "no rank sends more than 2 (N-1)/N",
            0 < sent <= most,
            f"rank {rank} sends {sent} bytes for a buffer of {buffers[rank].nbytes} on {size} ranks: a ring needs "
            f"{most}. Send one piece in a step, not the whole buffer"
            if sent
            else f"rank {rank} sends nothing with `send`",
        )


def _after_half(buffers, rank):  # type: ignore[no-untyped-def]
    """What a rank has after the first N-1 steps."""
    size = len(buffers)
    held = [list(buffer.chunk(size)) for buffer in buffers]
    for step in range(size - 1):
        before = [list(pieces) for pieces in held]
        for to in range(size):
            piece = (to - 1 - step) % size
            held[to][piece] = before[to][piece] + before[(to - 1) % size][piece]
    return torch.cat(held[rank])
