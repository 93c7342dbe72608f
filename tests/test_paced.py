"""Stages that sleep: real ranks keep to the schedule, and take as long as the simulator says."""

from __future__ import annotations

import json

import pytest

from minipar import paced
from minipar import schedule as schedules
from minipar.cli import main
from minipar.facts import Kind, Timeline
from minipar.order import Schedule, ScheduleError
from minipar.simulate import simulate

WITHIN = 0.03
SHAPES = [(name, ranks, 2 if name == "naive" else 8) for ranks in (4, 8) for name in schedules.NAMES]


def order_of(seen: Timeline) -> list[list[str]]:
    return [[str(span.action) for span in seen.by_rank(rank)] for rank in range(seen.ranks)]


@pytest.mark.parametrize("name", schedules.NAMES)
def test_ranks_do_what_the_schedule_says_in_its_order(name: str) -> None:
    schedule = schedules.by_name(name, 3, 3, 2 if name == "interleaved" else 1)
    seen = paced.measure(schedule, 0.001, 0.001, 0.001, steps=1)
    assert order_of(seen) == [[str(action) for action in row] for row in schedule.actions]
    assert min(span.start for span in seen.spans) == 0


def test_a_schedule_of_ones_own_runs_and_each_stage_and_micro_batch_has_its_cost() -> None:
    schedule = schedules.parse("rank 0  F0 F1 B0 B1\nrank 1  F0 B0 F1 B1 W1 W0", name="mine")
    costs = {"forward": [0.01, 0.03], "backward": lambda stage, m: 0.02 * (m + 1), "weight": 0.015}
    seen = paced.measure(schedule, **costs, steps=1)  # type: ignore[arg-type]
    expected = simulate(schedule, **costs)  # type: ignore[arg-type]
    for span in expected.spans:
        assert span.seconds <= seen.span(span.action).seconds < span.seconds + 0.02, span
    assert {span.kind for span in seen.by_rank(1)} == {Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT}
    needs = [(span, seen.span(span.action)) for span in expected.spans]
    for one, real in needs:
        for other, before in needs:
            assert not one.start >= other.end or one.stage != other.stage or real.start >= before.end - 1e-3


def measured_and_predicted(schedule: Schedule, pace: float) -> tuple[Timeline, Timeline]:
    cost = pace / schedule.chunks
    return paced.measure(schedule, cost, cost, cost, steps=2), simulate(schedule, cost, cost, cost)


def difference(seen: Timeline, expected: Timeline) -> float:
    """How far the measured bubble, idle over busy time, is from the predicted one, as a share of the step."""
    return max(
        abs(seen.duration / expected.duration - 1), abs(seen.idle - expected.idle) / (seen.ranks * seen.duration)
    )


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SHAPES)
def test_the_measured_bubble_is_the_predicted_one(name: str, ranks: int, micro_batches: int) -> None:
    """Within 3% of the step. On a busy machine a sleep may end late: then slower paces are tried, in which that is
    less of a step; a wrong order or a message that waits grows with the pace, and fails at each."""
    schedule = schedules.by_name(name, ranks, micro_batches, 2 if name == "interleaved" else 1)
    found = []
    for pace in (0.03, 0.06, 0.12):
        found.append(difference(*measured_and_predicted(schedule, pace)))
        if found[-1] <= WITHIN:
            return
    pytest.fail(f"measured differs from predicted by {found}")


def test_another_schedule_is_told_from_the_one_that_was_predicted() -> None:
    """The check above can fail: GPipe's memory order with 1F1B's name, and a rank that waits where it need not."""
    gpipe, naive = schedules.by_name("gpipe", 4, 8), schedules.by_name("naive", 4, 8)
    seen = paced.measure(naive, 0.005, 0.005, 0.005, steps=1)
    assert difference(seen, simulate(gpipe, 0.005, 0.005, 0.005)) > 10 * WITHIN


def test_what_cannot_run_is_refused_before_any_rank_starts() -> None:
    with pytest.raises(ScheduleError):
        paced.measure(schedules.parse("rank 0  B0 F0\nrank 1  F0 B0", name="stuck"))
    with pytest.raises(ValueError, match=r"forward=.*the 4 stages"):
        paced.measure(schedules.by_name("1f1b", 4, 4), forward=[1.0, 2.0])


# On the command line.


def answer(asked: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(asked)
    return int(stopped.value.code or 0)


def test_the_command_measures_what_it_draws(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--measure", "5"]) == 0
    text = capsys.readouterr().out
    assert "measured on 2 real ranks, asleep 5 ms for a second" in text and "predicted 50 %" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_comparison_has_a_column_for_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["schedule", "--compare", "gpipe,zb-h1", "--stages", "2", "--micro-batches", "2", "--measure", "5"]
    assert answer(asked) == 0
    assert "measured" in capsys.readouterr().out
    assert answer([*asked, "--json"]) == 0
    for one in json.loads(capsys.readouterr().out):
        assert one["duration"] <= one["measured"]["duration"] and len(one["spans"]) == len(one["measured"]["spans"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--measure", "0"], "out of range"),
        (["--measure", "much"], "is not a number"),
        (["--measure", "100000"], "would take"),
        (["--measure", "--send", "1"], "take their own time"),
    ],
)
def test_measures_that_make_no_sense_are_refused(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["schedule", "1f1b", *options]) == 2
    assert told in capsys.readouterr().err
