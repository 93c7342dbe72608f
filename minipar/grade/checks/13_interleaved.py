"""Exercise 13: interleaved 1F1B as lists of actions."""

from collections import Counter
from typing import Any

from minipar.grade.judging import Case, Draw, Judge, Outcome
from minipar.schedule import Schedule, ScheduleError, in_flight, parse
from minipar.schedule import interleaved as megatron
from minipar.simulate import simulate

TITLE, MINUTES, LESSON = "Interleaved 1F1B", 40, 4
COMPLETE = "each rank does all its work once"
FORWARDS, BACKWARDS = "forwards in rounds of p", "backwards in rounds of p"
RUNS, HELD = "no rank waits for ever", "no more is held than in Megatron-LM"
BUBBLE, SLOW = "the bubble is (p-1)/(chunks m)", "messages are on their way while ranks work"
CHECKS = {COMPLETE: 2, FORWARDS: 2, BACKWARDS: 2, RUNS: 1, HELD: 2, BUBBLE: 3, SLOW: 2}
TRAVELS = 0.5  # of a message, in forwards
HINTS = [
    "First write the forwards of one rank, without backwards, as three loops: rounds, chunks, micro-batches of the "
    "round. They are the same on all ranks. Then the backwards, with the chunks the other way round.",
    "Then weave them together as in 1F1B: warmup forwards, pairs of a forward and a backward, the rest of the "
    "backwards. What is left to find is the warm-up of rank r.",
    "The last rank must come to its last chunk: (chunks - 1) * p forwards, then it pairs. Each rank before it needs "
    "one more, since the gradient reaches it a step later, and one to have work while messages are on their way.",
    "warmup = (chunks - 1) * p + 2 * (p - rank - 1), and no more than there are forwards.",
]


def harness(student, group, sizes):  # type: ignore[no-untyped-def]
    return [student.interleaved(ranks, micro_batches, chunks) for ranks, micro_batches, chunks in sizes]


def cases(draw: Draw) -> list[Case]:
    wide = draw.integer(4, 5)
    sizes = [[3, 6, 2], [2, 2 * draw.integer(2, 4), 3], [wide, wide * draw.integer(2, 3), 2]]
    sizes.append([4, 4, draw.integer(2, 3)])
    return [Case([{"sizes": sizes}], about="schedules of 2 to 5 ranks")]


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    for (ranks, micro_batches, chunks), rows in zip(case.inputs[0]["sizes"], outcome.values[0], strict=True):
        where = f"{ranks} ranks, {micro_batches} micro-batches, {chunks} chunks: "
        fault = _incomplete(rows, ranks, micro_batches, chunks)
        if not judge.that(COMPLETE, not fault, where + fault):
            for name in list(CHECKS)[1:]:
                judge.that(name, False, "not judged before every rank does all its work")
            continue
        _order(where, rows, ranks, micro_batches, chunks, judge)
        schedule = parse("\n".join(f"rank {rank}  {' '.join(row)}" for rank, row in enumerate(rows)))
        _held(where, schedule, rows, judge)
        try:
            found = simulate(schedule.validate()).bubble
        except ScheduleError as error:
            judge.that(RUNS, False, f"{where}{error.faults[0]}{_warm_ups(rows, schedule)}")
            for name in (BUBBLE, SLOW):
                judge.that(name, False, "not judged before the schedule comes to its end")
            continue
        judge.that(RUNS, True, "")
        expected = (ranks - 1) / (chunks * micro_batches)
        judge.that(
            BUBBLE,
            abs(found - expected) < 1e-9,
            f"{where}idle / busy is {found:.3f}, and can be {expected:.3f}{_warm_ups(rows, schedule)}",
        )
        slow = simulate(schedule, send=TRAVELS).bubble
        expected = simulate(megatron(ranks, micro_batches, chunks), send=TRAVELS).bubble
        judge.that(
            SLOW,
            slow < expected + 1e-9,
            f"{where}when a message is on its way for half a forward, idle / busy is {slow:.3f}, and Megatron-LM's "
            f"{expected:.3f}: with one forward more for each rank behind, there is work meanwhile"
            f"{_warm_ups(rows, schedule)}",
        )


def _order(where: str, rows: list[list[str]], ranks: int, micro_batches: int, chunks: int, judge: Judge) -> None:
    rounds = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    for name, kind, order in ((FORWARDS, "F", range(chunks)), (BACKWARDS, "B", range(chunks)[::-1])):
        wanted = [f"{kind}{m}.{chunk}" for turn in rounds for chunk in order for m in turn]
        forms = {
            "all micro-batches go through a chunk before the next chunk begins: only a round of p does": [
                f"{kind}{m}.{chunk}" for chunk in order for m in range(micro_batches)
            ],
            "each micro-batch goes through all chunks before the next begins, and the ranks wait for it: send p "
            "through a chunk at a time": [f"{kind}{m}.{chunk}" for m in range(micro_batches) for chunk in order],
            "the chunks are the wrong way round: a backward begins on the last chunk": [
                f"{kind}{m}.{chunk}" for turn in rounds for chunk in order[::-1] for m in turn
            ],
        }
        for rank, row in enumerate(rows):
            found = [cell for cell in row if cell[0] == kind]
            at = next((place for place, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]), -1)
            why = next((advice for advice, form in forms.items() if form == found), "go by rounds, then chunks")
            said = f"{where}rank {rank} begins with {' '.join(found[: at + 1])}: {wanted[at]} comes last there"
            judge.that(name, at < 0, f"{said}; {why}")


def _held(where: str, schedule: Schedule, rows: list[list[str]], judge: Judge) -> None:
    for rank, held in enumerate(in_flight(schedule)):
        most = min(schedule.chunks * schedule.micro_batches, _warm(schedule, rank) + 1)
        judge.that(
            HELD,
            held <= most,
            f"{where}rank {rank} holds {held} micro-batches on one chunk or another, and {most} are enough"
            f"{_warm_ups(rows, schedule)}",
        )


def _warm(schedule: Schedule, rank: int) -> int:
    return (schedule.chunks - 1) * schedule.ranks + 2 * (schedule.ranks - rank - 1)


def _warm_ups(rows: list[list[str]], schedule: Schedule) -> str:
    """On which rank the warm-up is too short or too long; "" if on none."""
    for rank, row in enumerate(rows):
        found = next(place for place, cell in enumerate(row) if cell[0] == "B") - 1
        most = schedule.chunks * schedule.micro_batches
        if found != min(_warm(schedule, rank), most - 1):
            long = "short" if found < _warm(schedule, rank) else "long"
            return f". The warm-up of rank {rank} is too {long}: {found} forwards, and then one and one in turn"
    return ". The warm-ups are right: look at the order behind them"


def _incomplete(rows: Any, ranks: int, micro_batches: int, chunks: int) -> str:
    """What is missing, or too much; "" if nothing."""
    if type(rows) is not list or len(rows) != ranks or any(type(row) is not list for row in rows):
        return f"return one list for each rank, so a list of {ranks} lists"
    wanted = [f"{kind}{m}.{chunk}" for kind in "FB" for chunk in range(chunks) for m in range(micro_batches)]
    for rank, row in enumerate(rows):
        if odd := [cell for cell in row if cell not in wanted]:
            return (
                f"rank {rank} has {odd[0]!r:.40}: there are F0.0 to F{micro_batches - 1}.{chunks - 1}, the micro-batch "
                "and then the rank's own chunk, counted from 0 on each rank, and the same with B"
            )
        times = Counter(row)
        if absent := [cell for cell in wanted if not times[cell]]:
            return f"{' '.join(absent[:6])} of rank {rank} missing: each micro-batch goes through each chunk, both ways"
        if double := [cell for cell in wanted if times[cell] > 1]:
            return f"{double[0]} stands {times[double[0]]} times on rank {rank}: leave one"
    return ""
