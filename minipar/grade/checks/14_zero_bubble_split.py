"""Exercise 14: a backward in two parts, and 1F1B with the second part in its bubbles."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from minipar.grade.judging import Case, Draw, Judge, Outcome
from minipar.schedule import ScheduleError, in_flight, one_f_one_b, parse
from minipar.simulate import simulate

TITLE, MINUTES, LESSON = "Zero bubble: a backward is two things", 35, 4
INPUT, WEIGHT = "B: the gradient of the input", "W: the gradient of the weight"
COMPLETE, RUNS = "each rank does all its work once", "no rank waits for ever"
HELD, SMALLER, THIRD = "no rank holds more than p", "a smaller bubble than 1F1B", "a third of 1F1B's bubble"
CHECKS = {INPUT: 2, WEIGHT: 2, COMPLETE: 1, RUNS: 1, HELD: 2, SMALLER: 2, THIRD: 2}
HINTS = [
    "For one token y = weight @ x. Its gradient goes back through the transposed matrix: grad @ weight, for all tokens "
    "at once. The weight meets every token, so its gradient is a sum over tokens: flatten all dimensions but the last.",
    "Write 1F1B first (exercise 12), with the same order of F and B. Then go through each row, and decide after each "
    "action whether a W is due.",
    "A W right after each B gives two thirds of the bubble. All W at the end would give less, but hold everything.",
    "Keep a list of the W that rank r owes. Each B adds one; whenever there are more than r in it, do the oldest. What "
    "is left comes at the end of the row.",
]


def harness(student, group, sizes, x, weight, grad):  # type: ignore[no-untyped-def]
    return {
        "input": student.input_gradient(grad.clone(), weight.clone()),
        "weight": student.weight_gradient(grad.clone(), x.clone()),
        "schedules": [student.zero_bubble(stages, micro_batches) for stages, micro_batches in sizes],
    }


def cases(draw: Draw) -> list[Case]:
    wide, batch, tokens, into, out = draw.integer(4, 6), *(draw.integer(2, 5) for _ in range(4))
    sizes = [[3, draw.integer(4, 7)], [wide, draw.integer(wide, 12)], [2, draw.integer(2, 6)], [4, 4]]
    x, grad = draw.normal(batch, tokens, into), draw.normal(batch, tokens, out)
    inputs = {"sizes": sizes, "x": x, "weight": draw.normal(out, into), "grad": grad}
    return [Case([inputs], about="a linear layer, and schedules of 2 to 6 stages")]


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    inputs, found = case.inputs[0], outcome.values[0]
    _gradients(inputs["x"], inputs["weight"], inputs["grad"], found, judge)
    for (stages, micro_batches), rows in zip(inputs["sizes"], found["schedules"], strict=True):
        _schedule(stages, micro_batches, rows, judge)


def _gradients(x: Tensor, weight: Tensor, grad: Tensor, found: Any, judge: Judge) -> None:
    leaf, matrix = x.clone().requires_grad_(), weight.clone().requires_grad_()
    (leaf @ matrix.t() * grad).sum().backward()
    tokens = x.shape[0] * x.shape[1]
    assert leaf.grad is not None and matrix.grad is not None
    judge.equal(
        INPUT,
        [found["input"]],
        [leaf.grad],
        {"summed over the tokens: each token has a gradient of its own": [leaf.grad.sum((0, 1))]},
        what="the gradient of the input",
    )
    by_row = torch.einsum("bto,bti->boi", grad, x)
    judge.equal(
        WEIGHT,
        [found["weight"]],
        [matrix.grad],
        {
            "transposed: the weight is [out, in], and so is its gradient, grad^T x": [matrix.grad.t().contiguous()],
            "one gradient for each row of the batch: sum over them, flattening all dimensions but the last": [by_row],
            "of the first row of the batch only: sum over all": [by_row[0]],
            "of the last row of the batch only: sum over all": [by_row[-1]],
            "divided by the number of tokens: a gradient is a sum, and the loss has its mean already": [
                matrix.grad / tokens
            ],
            "divided by the rows of the batch: a gradient is a sum": [matrix.grad / x.shape[0]],
        },
        what="the gradient of the weight",
    )


def _schedule(stages: int, micro_batches: int, rows: Any, judge: Judge) -> None:
    where = f"{stages} stages, {micro_batches} micro-batches: "
    fault = _incomplete(rows, stages, micro_batches)
    if not judge.that(COMPLETE, not fault, where + fault):
        for name in (RUNS, HELD, SMALLER, THIRD):
            judge.that(name, False, "not judged before every rank does all its work")
        return
    schedule = parse("\n".join(f"rank {rank}  {' '.join(row)}" for rank, row in enumerate(rows)))
    for rank, held in enumerate(in_flight(schedule)):
        judge.that(
            HELD,
            held <= stages,
            f"{where}rank {rank} holds {held} micro-batches at once, and 1F1B nowhere more than {stages}. Activations "
            f"are held until W, and the rank owes up to {_owed(rows[rank])} of them: do some earlier",
        )
    try:
        found = simulate(schedule.validate()).bubble
    except ScheduleError as error:
        judge.that(RUNS, False, f"{where}{error.faults[0]}")
        for name in (SMALLER, THIRD):
            judge.that(name, False, "not judged before the schedule comes to its end")
        return
    judge.that(RUNS, True, "")
    before = simulate(one_f_one_b(stages, micro_batches)).bubble
    why = "B is no earlier than before: all that stands between a B and the next must be needed there"
    judge.that(SMALLER, found < before - 1e-9, f"{where}idle / busy is {found:.3f}, and 1F1B has {before:.3f}: {why}")
    early = [rank for rank, row in enumerate(rows) if _owed(row) < rank]
    why = f"rank {early[0]} owes at most {_owed(rows[early[0]])} W" if early else "some W come too early"
    judge.that(
        THIRD,
        found <= before / 3 + 1e-9,
        f"{where}idle / busy is {found:.3f}, and a third of 1F1B's is {before / 3:.3f}: {why}. Let rank r owe r, "
        "while B and F go first",
    )


def _owed(row: list[str]) -> int:
    """The most W that a rank owes when it does something else."""
    owed = most = 0
    for cell in row:
        most = most if cell[0] == "W" else max(most, owed)
        owed += (cell[0] == "B") - (cell[0] == "W")
    return most


def _incomplete(rows: Any, stages: int, micro_batches: int) -> str:
    """What is missing, or too much; "" if nothing."""
    if type(rows) is not list or len(rows) != stages or any(type(row) is not list for row in rows):
        return f"return one list for each rank, so a list of {stages} lists"
    wanted = [f"{kind}{number}" for kind in "FBW" for number in range(micro_batches)]
    for rank, row in enumerate(rows):
        if odd := [cell for cell in row if cell not in wanted]:
            return f"rank {rank} has {odd[0]!r:.40}: there are F, B and W of micro-batches 0 to {micro_batches - 1}"
        times = Counter(row)
        if absent := [cell for cell in wanted if not times[cell]]:
            rest = ": what a rank still owes comes at the end of its row" if absent[0][0] == "W" else ""
            return f"{' '.join(absent)} of rank {rank} missing{rest}"
        if double := [cell for cell in wanted if times[cell] > 1]:
            return f"{double[0]} stands {times[double[0]]} times on rank {rank}: leave one"
    return ""
