"""Exercise 16: formulas for the bubble and for what is held, judged by schedules that are simulated."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import ceil, floor
from typing import Any

from minipar.grade.judging import Case, Draw, Judge, Outcome, same
from minipar.schedule import by_name, in_flight
from minipar.simulate import simulate

TITLE, MINUTES, LESSON = "Bubble and activations", 20, 4
BUBBLE, ENOUGH, HELD = "the bubble", "enough micro-batches", "what a rank holds"
CHECKS = {BUBBLE: 3, ENOUGH: 3, HELD: 3}
NAMES = ("gpipe", "1f1b", "interleaved")
HINTS = [
    "Every rank is busy for m forwards and m backwards. Rank 0 waits from its last forward of the warm-up until the "
    "first gradient has come back: that is p - 1 forwards and p - 1 backwards of others.",
    "So idle / busy is (p-1)/m, for GPipe and 1F1B alike. With chunks the pipeline fills in steps of 1/chunks the "
    "size, while busy time stays: (p-1)/(chunks m).",
    "Solve (p-1)/(chunks m) <= percent/100 for m, and round up; with interleaved, up to a multiple of p. Work with "
    "whole numbers: -(-a // b) is a / b rounded up, without the errors of floating point.",
    "GPipe holds m. The others hold one more than their warm-up: 1F1B p - rank, interleaved (chunks - 1) p + "
    "2 (p - rank) - 1. But never more than there is: m, and chunks m.",
]


def harness(student, group, bubble, enough, held):  # type: ignore[no-untyped-def]
    return {
        "bubble": [student.bubble(*question) for question in bubble],
        "enough": [student.enough_micro_batches(*question) for question in enough],
        "held": [student.held(*question) for question in held],
    }


def cases(draw: Draw) -> list[Case]:
    bubble, enough, held = [], [], []
    for name in NAMES * 3:
        stages, chunks = draw.integer(3, 6), draw.integer(2, 3) if name == "interleaved" else 1
        micro_batches = stages * draw.integer(1, 3) + (0 if name == "interleaved" else draw.integer(1, 2))
        bubble.append([name, stages, micro_batches, chunks])
        enough.append([name, stages, chunks, draw.integer(3, 30)])
        held.append([name, stages, micro_batches, chunks, draw.integer(1, stages - 1)])
    enough += [["gpipe", 4, 1, 5], ["1f1b", 8, 1, 7], ["1f1b", 5, 1, 30]]
    enough += [["interleaved", 4, 2, 25], ["interleaved", 5, 2, 9]]
    held += [["1f1b", 6, 2, 1, 1], ["1f1b", 4, 8, 1, 0], ["interleaved", 4, 4, 2, 0], ["interleaved", 3, 9, 2, 1]]
    return [Case([{"bubble": bubble, "enough": enough, "held": held}], about="formulas")]


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    asked, found = case.inputs[0], outcome.values[0]
    _compare(judge, BUBBLE, "bubble", asked["bubble"], found["bubble"], _bubble, {
        "this is idle time / ALL time, (p-1)/(m+p-1); asked for is idle / BUSY, divide by m": _of_all_time,
        "in percent: a bubble of a half is 0.5, not 50": lambda *q: 100 * _bubble(*q),
        "a pipeline of p stages fills while p - 1 of them are passed, not p": lambda n, p, m, v: p / m / v,
        "with interleaved each action is 1/chunks as long, and so is the bubble, but not busy time: divide by chunks":
            lambda n, p, m, v: (p - 1) / m,
        "interleaved has a smaller bubble, not a larger one: divide by chunks": lambda n, p, m, v: (p - 1) * v / m,
        "1F1B has the bubble of GPipe: what it saves is memory": lambda n, p, m, v:
            (p - 1) / m / (2 if n == "1f1b" else v),
    })  # fmt: skip
    _compare(judge, ENOUGH, "enough_micro_batches", asked["enough"], found["enough"], _enough, {
        "rounded down, the bubble is too large: round up": lambda *q: _enough(*q, rounding=floor),
        "interleaved takes its micro-batches in rounds of p: round up to a multiple of p": lambda n, p, v, percent:
            ceil(Fraction(100 * (p - 1), v * percent)),
        "this keeps idle / ALL time below it; asked for is idle / BUSY": lambda n, p, v, percent:
            _enough(n, p, v, percent, less=1),
        "with interleaved the bubble is 1/chunks as large, so fewer micro-batches will do": lambda n, p, v, percent:
            _enough(n, p, 1, percent),
        "one too many where it fits exactly: at most so many percent is enough, and floating point may round a whole "
        "number up; calculate with whole numbers": lambda n, p, v, percent:
            _enough(n, p, v, percent, rounding=lambda x: floor(x) + 1),
    })  # fmt: skip
    _compare(judge, HELD, "held", asked["held"], found["held"], _held, {
        "all micro-batches are held at once in GPipe alone: the others begin with backwards earlier":
            lambda n, p, m, v, r: m * v,
        "1F1B holds p on its first rank, and one less on each that follows: p - rank": lambda n, p, m, v, r:
            min(m, p) if n == "1f1b" else _held(n, p, m, v, r),
        "that is the warm-up: after it comes one more forward before the first backward": lambda n, p, m, v, r:
            _warm(n, p, m, v, r),
        "a rank cannot hold more micro-batches than there are: m, and chunks m": lambda n, p, m, v, r:
            m if n == "gpipe" else _warm(n, p, m, v, r) + 1,
        "interleaved warms up longer than 1F1B: count the forwards of all chunks": lambda n, p, m, v, r:
            m if n == "gpipe" else min(m, p - r),
        "of interleaved count a micro-batch on each chunk where it is held; do not divide by chunks": lambda *q:
            _held(*q) / q[3],
    })  # fmt: skip


def _compare(
    judge: Judge, name: str, function: str, asked: Sequence[Any], found: Sequence[Any], truth: Callable[..., Any],
    mistakes: Mapping[str, Callable[..., Any]],
) -> None:  # fmt: skip
    """Question by question; a mistake is named if it explains all answers."""
    right = [truth(*question) for question in asked]
    wrong = [place for place, pair in enumerate(zip(found, right, strict=True)) if not same(*pair)]
    if not wrong:
        judge.that(name, True, "")
        return
    at = wrong[0]
    question = ", ".join(repr(part) for part in asked[at])
    message = f"{function}({question}) is {found[at]!r:.40}, and the schedule, drawn and counted, has {right[at]:.6g}"
    if type(found[at]) is float and found[at] == right[at]:
        message = f"{function}({question}) is {found[at]!r}: return a whole number, an int"
    for advice, mistake in mistakes.items():
        if all(same(one, mistake(*question)) for one, question in zip(found, asked, strict=True)):
            message += f": {advice}"
            break
    judge.that(name, False, message)


def _bubble(name: str, stages: int, micro_batches: int, chunks: int) -> float:
    return simulate(by_name(name, stages, micro_batches, chunks)).bubble


def _of_all_time(name: str, stages: int, micro_batches: int, chunks: int) -> float:
    bubble = (stages - 1) / micro_batches / chunks
    return bubble / (1 + bubble)


def _enough(
    name: str, stages: int, chunks: int, percent: int, rounding: Callable[[Fraction], int] = ceil, less: int = 0
) -> int:
    """Rounds of p for interleaved, else any number; `less` is 1 for idle / all time."""
    step = stages if name == "interleaved" else 1
    needed = (stages - 1) * (Fraction(100, percent) - less) / chunks
    return max(step, step * rounding(needed / step))


def _held(name: str, stages: int, micro_batches: int, chunks: int, rank: int) -> int:
    return in_flight(by_name(name, stages, micro_batches, chunks))[rank]


def _warm(name: str, stages: int, micro_batches: int, chunks: int, rank: int) -> int:
    later = stages - rank - 1
    return {"gpipe": micro_batches, "1f1b": later, "interleaved": (chunks - 1) * stages + 2 * later}[name]
