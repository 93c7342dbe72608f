"""Schedules: against the pictures in the papers, an independent walker, and every way to spoil them."""

from __future__ import annotations

import pickle
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from textwrap import dedent
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipar.schedule import (
    NAMES,
    Action,
    Compute,
    Kind,
    Receive,
    Schedule,
    ScheduleError,
    Send,
    by_name,
    deadlock,
    gpipe,
    in_flight,
    interleaved,
    messages,
    naive,
    one_f_one_b,
    parse,
    validate,
    walk,
    zb_h1,
    zb_h2,
)

Key = tuple[str, int, int]


def keys(schedule: Schedule) -> list[list[Key]]:
    return [[(a.kind.value, a.stage, a.micro_batch) for a in row] for row in schedule.actions]


def inputs(key: Key, stages: int) -> set[Key]:
    """The dependencies once more, written independently of `needs`."""
    kind, stage, m = key
    wanted = {"F": {("F", stage - 1, m)}, "B": {("F", stage, m), ("B", stage + 1, m)}, "W": {("B", stage, m)}}[kind]
    return {(k, s, m) for k, s, m in wanted if 0 <= s < stages}


def brute_force(rows: list[list[Key]], stages: int) -> set[Key]:
    """What gets done when every rank in turn takes its next action if it can, until none can."""
    done: set[Key] = set()
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and inputs(row[at[rank]], stages) <= done:
                done.add(row[at[rank]])
                at[rank] += 1
                moved = True
    return done


def is_valid(schedule: Schedule) -> bool:
    split = {a.stage for row in schedule.actions for a in row if a.kind is Kind.WEIGHT}
    wanted = Counter(
        (kind, stage, m)
        for stage, m in product(range(schedule.stages), range(schedule.micro_batches))
        for kind in ("FBW" if stage in split else "FB")
    )
    rows = keys(schedule)
    placed = all(stage % schedule.ranks == rank for rank, row in enumerate(rows) for _, stage, _ in row)
    complete = Counter(key for row in rows for key in row) == wanted
    return placed and complete and brute_force(rows, schedule.stages) == set(wanted)


def every_schedule(ranks: range, micro_batches: range) -> Iterator[Schedule]:
    for p, m in product(ranks, micro_batches):
        yield from (naive(p, m), gpipe(p, m), one_f_one_b(p, m), zb_h1(p, m), zb_h2(p, m))
        if m % p == 0:
            yield from (interleaved(p, m, 2), interleaved(p, m, 3))


@st.composite
def any_order(draw: st.DrawFn) -> Schedule:
    """A schedule in which each step takes any action that is ready: right, but never sensible."""
    ranks, chunks, m = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    stages, kinds, rng = ranks * chunks, draw(st.sampled_from(["FB", "FBW"])), random.Random(draw(st.integers()))
    todo = [(kind, s, i) for kind in kinds for s in range(stages) for i in range(m)]
    done: set[Key] = set()
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    while todo:
        kind, stage, micro_batch = key = rng.choice([key for key in todo if inputs(key, stages) <= done])
        todo.remove(key)
        done.add(key)
        rows[stage % ranks].append(Action(Kind(kind), stage, micro_batch))
    return Schedule("any", ranks, stages, m, tuple(map(tuple, rows)))


# The pictures.


def test_1f1b_looks_as_in_the_paper() -> None:
    assert str(one_f_one_b(3, 4)) == dedent("""\
        rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        rank 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .""")


def test_interleaved_visits_chunks_depth_first_as_megatron() -> None:
    first = interleaved(2, 4, 2).actions[0]
    forwards = [(a.stage // 2, a.micro_batch) for a in first if a.kind is Kind.FORWARD]
    backwards = [(a.stage // 2, a.micro_batch) for a in first if a.kind is Kind.BACKWARD]
    assert forwards == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert backwards == [(1, 0), (1, 1), (0, 0), (0, 1), (1, 2), (1, 3), (0, 2), (0, 3)]
    assert "".join(a.kind.value for a in first) == "FFFFFBFBFBFBBBBB"  # warm-up of 2 (p-1) + (v-1) p = 4


@pytest.mark.parametrize(
    "schedule",
    [naive(3, 2), gpipe(3, 4), one_f_one_b(3, 4), interleaved(2, 2, 2), zb_h1(3, 4), zb_h2(3, 5)],
    ids=lambda schedule: schedule.name,
)
def test_the_picture_in_the_docstring_is_the_schedule(schedule: Schedule) -> None:
    lines = [line.strip() for line in (NAMES[schedule.name].__doc__ or "").splitlines()]
    assert "\n".join(line for line in lines if line.startswith("rank ")) == str(schedule)


def test_a_schedule_that_cannot_run_is_drawn_without_waiting() -> None:
    assert str(parse("F0 B0 F1 B1\nF0 F1 B0 B1")) == "rank 0  F0 B0 F1 B1\nrank 1  F0 F1 B0 B1"


# What every schedule keeps.


def test_every_schedule_is_valid_for_any_number_of_stages_and_micro_batches() -> None:
    for schedule in every_schedule(range(1, 7), range(1, 13)):
        assert is_valid(schedule), str(schedule)
        assert schedule.validate() is schedule
        assert sum(map(len, schedule.actions)) == schedule.size


def test_one_rank_computes_each_micro_batch_forward_and_back() -> None:
    for name in ("naive", "1f1b", "interleaved"):
        assert str(by_name(name, 1, 2)) == "rank 0  F0 B0 F1 B1"
    assert str(zb_h1(1, 2)) == "rank 0  F0 B0 W0 F1 B1 W1"


def test_activations_in_flight_follow_the_table() -> None:
    for p, m in product(range(1, 7), range(1, 13)):
        assert in_flight(naive(p, m)) == [1] * p
        assert in_flight(gpipe(p, m)) == [m] * p
        assert in_flight(one_f_one_b(p, m)) == [min(m, p - r) for r in range(p)]
        assert in_flight(zb_h1(p, m)) == [min(m, p)] * p
        assert in_flight(zb_h2(p, m)) == [min(m, 2 * p - 1)] * p
        for v in (2, 3) if m % p == 0 else ():
            assert in_flight(interleaved(p, m, v)) == [min(v * m, (v - 1) * p + 2 * (p - r) - 1) for r in range(p)]


def test_only_zero_bubble_splits_the_backward() -> None:
    assert zb_h1(3, 4).splits_backward == {0, 1, 2}
    assert all(not s.splits_backward for s in every_schedule(range(1, 4), range(1, 4)) if not s.name.startswith("zb-h"))


def test_walk_visits_all_actions_after_what_they_need() -> None:
    for schedule in every_schedule(range(1, 5), range(1, 9)):
        seen: set[Action] = set()
        for action, needed in walk(schedule):
            assert seen.issuperset(needed)
            seen.add(action)
        assert len(seen) == schedule.size


def test_64_stages_with_512_micro_batches_are_made_and_validated_quickly() -> None:
    start = process_time()
    one_f_one_b(64, 512).validate()
    assert process_time() - start < 1.5


# Messages.


def check_messages(schedule: Schedule) -> None:
    steps = messages(schedule)
    for rank, row in enumerate(steps):
        assert tuple(step.action for step in row if isinstance(step, Compute)) == schedule.actions[rank]
        here: set[Key] = set()
        for before, step in zip([None, *row], row, strict=False):
            action = (step.action.kind.value, step.action.stage, step.action.micro_batch)
            if isinstance(step, Compute):
                assert inputs(action, schedule.stages) <= here, "all that an action needs is computed or received here"
            elif isinstance(step, Send):
                assert before == Compute(step.action) and step.to != rank
            else:
                assert step.source != rank
            here.add(action)
    for source, to in product(range(schedule.ranks), repeat=2):
        sent = [step.action for step in steps[source] if isinstance(step, Send) and step.to == to]
        received = [step.action for step in steps[to] if isinstance(step, Receive) and step.source == source]
        assert sent == received, "first in, first out"
    borders = sum(schedule.rank_of(s) != schedule.rank_of(s + 1) for s in range(schedule.stages - 1))
    assert sum(isinstance(step, Send) for row in steps for step in row) == 2 * borders * schedule.micro_batches


def test_messages_are_received_in_the_order_sent() -> None:
    for schedule in every_schedule(range(1, 7), range(1, 13)):
        check_messages(schedule)


@settings(max_examples=150, deadline=None)
@given(any_order())
def test_messages_are_received_in_the_order_sent_whatever_the_order_of_use(schedule: Schedule) -> None:
    check_messages(schedule)
    assert schedule.validate() is schedule
    assert deadlock(schedule) is None, "receiving in the order sent never makes a rank wait for ever"


def test_a_message_that_is_sent_early_is_received_early() -> None:
    first, second, use = (Action(Kind.FORWARD, stage, m) for stage, m in ((0, 0), (0, 1), (1, 1)))
    assert messages(parse("F0 F1 B1 B0\nF1 B1 F0 B0"))[1][:3] == [Receive(first, 0), Receive(second, 0), Compute(use)]


# Faults.


def faults(schedule: Schedule) -> tuple[str, ...]:
    with pytest.raises(ScheduleError) as caught:
        schedule.validate()
    assert all(fault in str(caught.value) for fault in caught.value.faults)
    return caught.value.faults


def with_row(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    rows = [tuple(row) if r == rank else old for r, old in enumerate(schedule.actions)]
    return replace(schedule, actions=tuple(rows))


SMALL = [naive(2, 2), gpipe(2, 3), one_f_one_b(3, 3), zb_h1(2, 3), zb_h1(3, 2), interleaved(2, 2, 2)]
each_small = pytest.mark.parametrize("schedule", SMALL, ids=lambda s: f"{s.name} {s.ranks}x{s.micro_batches}")


@each_small
def test_deleting_any_action_is_refused_as_missing(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            spoilt = with_row(schedule, rank, [*row[:index], *row[index + 1 :]])
            assert not is_valid(spoilt)
            (fault,) = faults(spoilt)
            assert fault.startswith(f"{action} of stage {action.stage} missing on rank {rank}")
            assert ("W for all its micro-batches or for none" in fault) == (action.kind is Kind.WEIGHT)
            with pytest.raises(ScheduleError, match="missing"):
                spoilt.validate("blocking")


@each_small
def test_doubling_any_action_anywhere_is_refused(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.actions):
        for action, place in product(row, range(len(row) + 1)):
            found = faults(with_row(schedule, rank, [*row[:place], action, *row[place:]]))
            assert found[0] == f"{action.place} stands 2 times on rank {rank}: leave one"


@each_small
def test_moving_any_action_to_another_rank_is_refused(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            other = (rank + 1) % schedule.ranks
            spoilt = with_row(schedule, rank, [*row[:index], *row[index + 1 :]])
            found = faults(with_row(spoilt, other, [action, *schedule.actions[other]]))
            home = f"{action.place} stands on rank {other}: stage {action.stage} lives on rank {rank}"
            assert found[0] == home and found[1].startswith(f"{action.place} missing on rank {rank}")
            assert len(found) == 2


@each_small
def test_any_other_order_is_refused_exactly_if_it_cannot_run(schedule: Schedule) -> None:
    refused = 0
    for rank, row in enumerate(schedule.actions):
        for one, two in product(range(len(row)), repeat=2):
            swapped, moved = list(row), list(row)
            swapped[one], swapped[two] = row[two], row[one]
            moved.insert(two, moved.pop(one))
            for changed in (with_row(schedule, rank, swapped), with_row(schedule, rank, moved)):
                if is_valid(changed):
                    changed.validate()
                else:
                    refused += 1
                    check_refusal(changed)
    assert refused


def check_refusal(schedule: Schedule) -> None:
    """Each fault that is named is one."""
    rows = keys(schedule)
    done = brute_force(rows, schedule.stages)
    early = 0
    for fault in faults(schedule):
        action = r"(.)(\d+) of stage (\d+)"
        if found := re.fullmatch(rf"{action} comes before {action} on rank (\d+), and needs it", fault):
            kind, m, stage, other, n, below, rank = found.groups()
            first, second = (kind, int(stage), int(m)), (other, int(below), int(n))
            assert second in inputs(first, schedule.stages)
            assert rows[int(rank)].index(first) < rows[int(rank)].index(second)
            early += 1
        else:
            assert fault.startswith("deadlock with asynchronous sends: rank ")
            circle = re.findall(r"waits for (.)(\d+) of stage (\d+) \(on rank (\d+)\)", fault)
            assert len(circle) >= 2
            for kind, m, stage, rank in circle:
                assert (kind, int(stage), int(m)) not in done and int(stage) % schedule.ranks == int(rank)
    pairs = [(row.index(key), need, row) for row in rows for key in row for need in inputs(key, schedule.stages)]
    assert early == sum(need in row[index + 1 :] for index, need, row in pairs)


def test_a_deadlock_is_told_as_a_circle() -> None:
    assert faults(parse("F0 B0 F1 B1\nF0 F1 B0 B1")) == (
        "deadlock with asynchronous sends: rank 0 waits for B0 of stage 1 (on rank 1), which waits for "
        "F1 of stage 0 (on rank 0): a circle, in which nobody can go first",
    )


def test_a_circle_is_found_behind_a_rank_that_only_waits_for_it() -> None:
    told = deadlock(parse("F0 F1 B0 B1\nF0 B0 F1 B1\nF0 F1 B0 B1"))
    assert told == (
        "rank 1 waits for B0 of stage 2 (on rank 2), which waits for F1 of stage 1 (on rank 1): "
        "a circle, in which nobody can go first"
    )


def test_all_faults_are_listed_at_once() -> None:
    spoilt = replace(parse("F0 B0 F1 B1 F1 F7\nB0 F0 F1 F2"), micro_batches=2)
    wrong = with_row(spoilt, 0, [*spoilt.actions[0], Action(Kind.FORWARD, 1, 0), Action(Kind.BACKWARD, 5, 0)])
    assert faults(wrong) == (
        "F1 of stage 0 stands 2 times on rank 0: leave one",
        "F7 of stage 0: there are only micro-batches 0 to 1",
        "F0 of stage 1 stands on rank 0: stage 1 lives on rank 1",
        "B0 of stage 5 on rank 0: there are only stages 0 to 1",
        "F2 of stage 1: there are only micro-batches 0 to 1",
        "B1 of stage 1 missing on rank 1",
        "B0 of stage 1 comes before F0 of stage 1 on rank 1, and needs it",
    )


def test_misfits_and_a_deadlock_are_told_together() -> None:
    found = faults(parse("F0 B0 F1 B1 W0\nF0 F1 B0 B1"))
    assert found[0] == "W1 of stage 0 missing on rank 0: a stage has W for all its micro-batches or for none"
    assert found[1].startswith("deadlock") and len(found) == 2


def test_weight_before_backward_is_refused() -> None:
    assert faults(parse("F0 W0 B0")) == ("W0 of stage 0 comes before B0 of stage 0 on rank 0, and needs it",)


def test_some_stages_may_split_the_backward_and_others_not() -> None:
    assert parse("F0 B0\nF0 B0 W0").validate().splits_backward == {1}


def test_one_row_for_each_rank() -> None:
    assert faults(replace(gpipe(3, 2), actions=gpipe(2, 2).actions))[0].startswith("3 ranks, but 2 rows of actions")
    assert faults(replace(gpipe(2, 2), actions=gpipe(3, 2).actions))[0].startswith("2 ranks, but 3 rows of actions")


def test_the_error_survives_the_way_from_another_process() -> None:
    error = pickle.loads(pickle.dumps(ScheduleError("no", ["one", "two"])))
    assert str(error) == "no:\n  one\n  two" and error.faults == ("one", "two")


# Blocking sends.


def blocking_brute_force(schedule: Schedule) -> bool:
    """Whether all come to their end if a send and its receive happen only together."""
    steps = messages(schedule)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(steps):
            if row and isinstance(row[0], Compute):
                row.pop(0)
                moved = True
            elif row and isinstance(row[0], Send) and steps[row[0].to][:1] == [Receive(row[0].action, rank)]:
                steps[row[0].to].pop(0)
                row.pop(0)
                moved = True
    return not any(steps)


def test_1f1b_with_blocking_sends_deadlocks_and_gpipe_does_not() -> None:
    assert gpipe(2, 2).validate("blocking") == gpipe(2, 2)
    with pytest.raises(ScheduleError, match="deadlock with blocking sends") as caught:
        validate(one_f_one_b(2, 2), sends="blocking")
    assert caught.value.faults == (
        "deadlock with blocking sends: rank 0 waits for rank 1 to receive F1 of stage 0, which waits for rank 0 to "
        "receive B0 of stage 1: a circle, in which nobody can go first",
    )


def test_blocking_deadlocks_are_those_of_an_independent_walker() -> None:
    for schedule in every_schedule(range(1, 5), range(1, 9)):
        assert (deadlock(schedule, "blocking") is None) == blocking_brute_force(schedule), str(schedule)


@settings(max_examples=150, deadline=None)
@given(any_order())
def test_blocking_deadlocks_of_any_order(schedule: Schedule) -> None:
    assert (deadlock(schedule, sends="blocking") is None) == blocking_brute_force(schedule)


# On paper and by name.


def test_what_is_drawn_is_read_back() -> None:
    for schedule in every_schedule(range(1, 7), range(1, 13)):
        assert parse(str(schedule), schedule.name) == schedule


def test_labels_idle_cells_and_comments_are_understood() -> None:
    text = """
        # warm up
        stage 1:  - - F0 B0   # the last stage
        0:   F0 . . B0
    """
    assert parse(text, "gpipe") == gpipe(2, 1)
    assert parse("F0 B0\nF0 .. -- B0", "gpipe") == gpipe(2, 1)


def test_cells_that_are_no_actions_are_named_by_row_and_cell() -> None:
    with pytest.raises(ScheduleError) as caught:
        parse("rank 0  F0 X1 B0\nrank 1  F0 . B")
    first, second = caught.value.faults
    assert first.startswith("row 1 (rank 0), cell 2: 'X1' is not an action: write F, B or W")
    assert second.startswith("row 2 (rank 1), cell 3: 'B' is not an action")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no row"),
        ("rank 0 F0 B0\nrank 2 F0 B0", "row 2 stands for rank 2: label the rows rank 0 to rank 1"),
        ("rank 0 F0 B0\nrank 0 F0 B0", "row 2 stands for rank 0: label the rows rank 0 to rank 1"),
        ("F0 f0", "'f0' is not an action"),
        ("F99999999999", "is not an action"),
    ],
)
def test_grids_that_cannot_be_read_are_refused(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(words)):
        parse(text)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: by_name("pipe", 2, 4), "unknown schedule 'pipe': choose from naive, gpipe, 1f1b, interleaved, zb-h1"),
        (lambda: by_name("1f1b", 2, 4, 2), "1f1b has one stage on each rank, not 2 chunks: choose interleaved"),
        (lambda: interleaved(4, 6, 2), "choose 4 or 8 micro-batches, or the schedule 1f1b"),
        (lambda: interleaved(4, 3, 2), "choose 4 micro-batches, or the schedule 1f1b"),
        (lambda: gpipe(0, 3), "stages=0"),
        (lambda: one_f_one_b(2, 0), "micro_batches=0"),
        (lambda: interleaved(2, 2, 0), "chunks=0"),
        (lambda: deadlock(gpipe(2, 2), "never"), "choose asynchronous or blocking"),  # type: ignore[arg-type]
    ],
)
def test_wrong_numbers_are_answered_with_a_choice(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_by_name_makes_each_schedule() -> None:
    for name in NAMES:
        assert by_name(name, 2, 4).name == name
    assert by_name("interleaved", 2, 4, 3) == interleaved(2, 4, 3)
