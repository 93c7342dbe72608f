"""Exercise 11: GPipe as lists of actions."""

from collections import Counter
from typing import Any

from minipar.grade.judging import Case, Draw, Judge, Outcome
from minipar.schedule import ScheduleError, parse
from minipar.simulate import simulate

TITLE, MINUTES, LESSON = "GPipe", 15, 4
COMPLETE, ORDER, BUBBLE = "each rank does all its work once", "all forwards come first", "the bubble is (p-1)/m"
CHECKS = {COMPLETE: 2, ORDER: 3, BUBBLE: 3}
HINTS = [
    "Which rank starts when is not your concern: write only the order in which each rank works. Is it another order on "
    "another rank?",
    "Every rank has the same list: first the forwards of all micro-batches, then the backwards of all.",
    '[f"F{m}" for m in range(micro_batches)] are the forwards of one rank.',
]


def harness(student, group, sizes):  # type: ignore[no-untyped-def]
    return [student.gpipe(stages, micro_batches) for stages, micro_batches in sizes]


def cases(draw: Draw) -> list[Case]:
    sizes = [[3, draw.integer(4, 7)], [draw.integer(4, 6), draw.integer(2, 3)], [2, 5], [5, draw.integer(5, 8)], [1, 3]]
    return [Case([{"sizes": sizes}], about="schedules of 1 to 6 stages")]


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    for (stages, micro_batches), rows in zip(case.inputs[0]["sizes"], outcome.values[0], strict=True):
        where = f"{stages} stages, {micro_batches} micro-batches: "
        fault = _incomplete(rows, stages, micro_batches)
        if not judge.that(COMPLETE, not fault, where + fault):
            for name in (ORDER, BUBBLE):
                judge.that(name, False, "not judged before every rank does all its work")
            continue
        fault = next(filter(None, map(_disorder, range(stages), rows)), "")
        judge.that(ORDER, not fault, where + fault)
        expected = (stages - 1) / micro_batches
        try:
            found = simulate(parse("\n".join(f"rank {rank}  {' '.join(row)}" for rank, row in enumerate(rows)))).bubble
        except ScheduleError as error:
            judge.that(BUBBLE, False, f"{where}the ranks never come to the end: {error.faults[0]}")
            continue
        judge.that(
            BUBBLE,
            abs(found - expected) < 1e-9,
            f"{where}idle / busy is {found:.3f}, and GPipe has (p-1)/m = {expected:.3f}: all ranks must take the "
            "micro-batches in the same order, and none may wait for a backward before its last forward",
        )


def _incomplete(rows: Any, stages: int, micro_batches: int) -> str:
    """What is missing, or too much; "" if nothing."""
    if type(rows) is not list or len(rows) != stages or any(type(row) is not list for row in rows):
        return f"return one list for each rank, so a list of {stages} lists"
    wanted = [f"{kind}{number}" for kind in "FB" for number in range(micro_batches)]
    for rank, row in enumerate(rows):
        if odd := [cell for cell in row if cell not in wanted]:
            last = micro_batches - 1
            return f"rank {rank} has {odd[0]!r:.40}: there are only F0 to F{last} and B0 to B{last}"
        times = Counter(row)
        if absent := [cell for cell in wanted if not times[cell]]:
            return f"{' '.join(absent)} of rank {rank} missing: each micro-batch goes through each stage, both ways"
        if double := [cell for cell in wanted if times[cell] > 1]:
            return f"{double[0]} stands {times[double[0]]} times on rank {rank}: leave one"
    return ""


def _disorder(rank: int, row: list[str]) -> str:
    """Which forward comes after a backward; "" if none."""
    first = next(place for place, cell in enumerate(row) if cell[0] == "B")
    late = [cell for cell in row[first:] if cell[0] == "F"]
    return f"rank {rank} does {row[first]} before {late[0]}: GPipe does all forwards first" if late else ""
