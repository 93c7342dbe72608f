"""Exercise 12: the schedule 1F1B as lists of actions."""

from collections import Counter
from typing import Any

from minipar.grade.judging import Case, Draw, Judge, Outcome
from minipar.schedule import Schedule, ScheduleError, gpipe, in_flight, parse
from minipar.simulate import simulate

TITLE, MINUTES, LESSON = "1F1B", 25, 4
COMPLETE, RUNS, HELD = "each rank does all its work once", "no rank waits for ever", "rank r holds at most p - r"
BUBBLE, TURNS = "the bubble is GPipe's", "warm-up, one and one in turn, drain"
CHECKS = {COMPLETE: 2, RUNS: 2, HELD: 3, BUBBLE: 3, TURNS: 1}
HINTS = [
    "Look at the picture from below. The last rank can do B0 right after F0. How many more forwards can the rank "
    "before it do until B0 comes back?",
    "The warm-up of rank r is stages - r - 1 forwards. Then come pairs: the next forward, the next backward.",
    "The warm-up cannot have more forwards than there are micro-batches: take the smaller number.",
    "With warmup = min(stages - rank - 1, micro_batches): warmup forwards; then, for i from 0 to micro_batches - "
    "warmup - 1, F(warmup + i) and B(i); then the backwards that are left, warmup of them.",
]


def harness(student, group, sizes):  # type: ignore[no-untyped-def]
    return [student.one_f_one_b(stages, micro_batches) for stages, micro_batches in sizes]


def cases(draw: Draw) -> list[Case]:
    some = [[3, draw.integer(4, 7)], [draw.integer(4, 6), draw.integer(9, 12)], [2, 5], [5, draw.integer(2, 3)]]
    return [Case([{"sizes": [*some, [4, 4], [1, 3]]}], about="schedules of 1 to 6 stages")]


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    for (stages, micro_batches), rows in zip(case.inputs[0]["sizes"], outcome.values[0], strict=True):
        where = f"{stages} stages, {micro_batches} micro-batches: "
        fault = _incomplete(rows, stages, micro_batches)
        if not judge.that(COMPLETE, not fault, where + fault):
            for name in (RUNS, HELD, BUBBLE, TURNS):
                judge.that(name, False, "not judged before every rank does all its work")
            continue
        schedule = parse("\n".join(f"rank {rank}  {' '.join(row)}" for rank, row in enumerate(rows)))
        _held(where, schedule, rows, judge)
        try:
            found = simulate(schedule.validate()).bubble
        except ScheduleError as error:
            judge.that(RUNS, False, f"{where}{error.faults[0]}. Who is further down the pipeline warms up less")
            judge.that(BUBBLE, False, "not judged before the schedule comes to its end")
            continue
        judge.that(RUNS, True, "")
        _bubble(where, found, schedule, rows, judge)


def _held(where: str, schedule: Schedule, rows: list[list[str]], judge: Judge) -> None:
    stages, micro_batches = schedule.ranks, schedule.micro_batches
    for rank, held in enumerate(in_flight(schedule)):
        first = _before_backward(rows[rank])
        like = ": that is GPipe, which holds them all" if held == micro_batches > stages - rank else ""
        judge.that(
            HELD,
            held <= stages - rank,
            f"{where}rank {rank} holds {held} micro-batches at once, and {stages - rank} are enough{like}. It has done "
            f"{first} forwards before its first backward, with which activations are freed",
        )


def _bubble(where: str, found: float, schedule: Schedule, rows: list[list[str]], judge: Judge) -> None:
    stages, micro_batches = schedule.ranks, schedule.micro_batches
    expected = simulate(gpipe(stages, micro_batches)).bubble
    needed = [min(stages - rank, micro_batches) for rank in range(stages)]
    short = [rank for rank, row in enumerate(rows) if _before_backward(row) < needed[rank]]
    why = (
        f"Rank {short[0]} does {_before_backward(rows[short[0]])} of the forwards before its first backward, and "
        f"waits: it has time for {needed[short[0]]} until that gradient comes back. The warm-up is too short"
        if short
        else "After the warm-up take one forward and one backward in turn, each in the order of the micro-batches"
    )
    judge.that(
        BUBBLE, abs(found - expected) < 1e-9, f"{where}idle / busy is {found:.3f}, GPipe's {expected:.3f}. {why}"
    )
    for rank, row in enumerate(rows):
        warm = needed[rank]
        kinds, wanted = "".join(cell[0] for cell in row), "F" * warm + "BF" * (micro_batches - warm) + "B" * warm
        judge.that(TURNS, kinds == wanted, f"{where}rank {rank} does {kinds}, and in 1F1B it does {wanted}")


def _before_backward(row: list[str]) -> int:
    """How many forwards stand before the first backward."""
    return next(place for place, cell in enumerate(row) if cell[0] == "B")


def _incomplete(rows: Any, stages: int, micro_batches: int) -> str:
    """What is missing, or too much; "" if nothing."""
    if type(rows) is not list or len(rows) != stages or any(type(row) is not list for row in rows):
        return f"return one list for each rank, so a list of {stages} lists"
    wanted = [f"{kind}{number}" for kind in "FB" for number in range(micro_batches)]
    for rank, row in enumerate(rows):
        if odd := [cell for cell in row if cell not in wanted]:
            forward = str(odd[0])[:1] == "F"
            more = ": the warm-up has at most as many forwards as there are micro-batches" if forward else ""
            return f"rank {rank} has {odd[0]!r:.40}, and there are only micro-batches 0 to {micro_batches - 1}{more}"
        times = Counter(row)
        if absent := [cell for cell in wanted if not times[cell]]:
            drain = ": after the pairs come the backwards of the warm-up" if absent[0][0] == "B" else ""
            return f"{' '.join(absent)} of rank {rank} missing{drain}"
        if double := [cell for cell in wanted if times[cell] > 1]:
            return f"{double[0]} stands {times[double[0]]} times on rank {rank}: leave one"
    return ""
