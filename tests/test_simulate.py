"""The simulator: against closed formulas, and against a fixpoint that knows no order of events."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule import any_order

from minipar.facts import Footprint, Span, Timeline, Traffic, Volume
from minipar.schedule import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    gpipe,
    in_flight,
    interleaved,
    naive,
    one_f_one_b,
    parse,
    zb_h1,
)
from minipar.simulate import simulate

SIZES = [(p, m) for p, m in product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 16, 32))]


# Closed formulas.


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubbles_are_those_of_the_table(p: int, m: int) -> None:
    assert simulate(naive(p, m)).bubble == pytest.approx(p - 1)
    for schedule in (gpipe(p, m), one_f_one_b(p, m)):
        assert simulate(schedule).bubble == pytest.approx((p - 1) / m)
        assert simulate(schedule).duration == pytest.approx((m + p - 1) * 3)
    for v in (2, 3) if m % p == 0 else ():
        assert simulate(interleaved(p, m, v)).bubble == pytest.approx((p - 1) / (v * m))
        assert simulate(interleaved(p, m, v), 1 / v, 1 / v, 1 / v).duration == pytest.approx(3 * m + 3 * (p - 1) / v)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zero_bubble_takes_3m_plus_p_minus_1(p: int, m: int) -> None:
    timeline = simulate(zb_h1(p, m))
    assert timeline.duration == (3 * m + p - 1 if m >= p else 2 * m + 2 * p - 1)
    assert timeline.duration <= simulate(one_f_one_b(p, m)).duration
    if m >= p:
        assert timeline.bubble == pytest.approx((p - 1) / (3 * m))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_peak_activations_are_those_of_the_order(p: int, m: int) -> None:
    for schedule in (naive(p, m), gpipe(p, m), one_f_one_b(p, m), zb_h1(p, m), interleaved(p, p * m, 2)):
        assert simulate(schedule).peak_activations() == in_flight(schedule)
    assert simulate(one_f_one_b(p, m)).peak_activations(1000) == [1000 * min(m, p - r) for r in range(p)]


def test_the_slowest_stage_sets_the_pace() -> None:
    """In the limit of many micro-batches, each costs what it costs on the slowest stage."""
    costs = [1.0, 2.0, 1.5]
    many, more = (simulate(one_f_one_b(3, m), costs, costs, costs).duration for m in (100, 200))
    assert (more - many) / 100 == pytest.approx(3 * max(costs))


def test_a_message_delays_what_needs_it() -> None:
    first, last = (simulate(gpipe(2, 1), send=0.5).by_rank(rank) for rank in (0, 1))
    assert [(span.start, span.end) for span in (*first, *last)] == [(0, 1), (5, 7), (1.5, 2.5), (2.5, 4.5)]
    assert simulate(gpipe(2, 1), send=lambda source, to: 0.5 if source == 0 else 0.0).duration == 6.5


def test_a_slow_link_passes_one_message_after_the_other() -> None:
    """Four activations of 10 bytes at 2 bytes a second: the last arrives 20 seconds after the first was ready."""
    timeline = simulate(gpipe(2, 4), backward=0, weight=0, bytes_per_message=10, bandwidth=2)
    assert timeline.span(Action(Kind.FORWARD, 1, 3)).start == 1 + 4 * 5


def test_chunks_on_one_rank_pass_results_on_without_a_message() -> None:
    assert simulate(interleaved(1, 2, 3), send=100.0).bubble == 0


# A fixpoint over all that must hold, without any order of events.


def fixpoint(
    schedule: Schedule,
    seconds: Callable[[Action], float],
    send: Callable[[int, int], float],
    transfer: float,
) -> dict[Action, tuple[float, float]]:
    """Raise each start to what its needs demand until nothing changes."""
    spans = {action: (0.0, 0.0) for row in schedule.actions for action in row}
    while True:
        arrivals = all_arrivals(schedule, spans, send, transfer)
        raised = {}
        for row in schedule.actions:
            for before, a in zip([None, *row], row, strict=False):
                needs = {Kind.FORWARD: replace(a, stage=a.stage - 1), Kind.BACKWARD: replace(a, stage=a.stage + 1)}
                start = max(spans[before][1] if before else 0.0, arrivals.get(needs.get(a.kind), 0.0))
                raised[a] = (start, start + seconds(a))
        if raised == spans:
            return spans
        spans = raised


def all_arrivals(
    schedule: Schedule,
    spans: dict[Action, tuple[float, float]],
    send: Callable[[int, int], float],
    transfer: float,
) -> dict[Action | None, float]:
    """When each result is on the stage that needs it, if the actions end as in `spans`."""
    arrivals: dict[Action | None, float] = {}
    for rank, to in product(range(schedule.ranks), repeat=2):
        passed = 0.0
        for action in schedule.actions[rank]:
            stage = action.stage + {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: 0}[action.kind]
            if stage % schedule.ranks == to and rank == to:
                arrivals[action] = spans[action][1]
            elif stage % schedule.ranks == to and 0 <= stage < schedule.stages:
                passed = max(passed, spans[action][1]) + transfer
                arrivals[action] = passed + send(rank, to)
    return arrivals


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    p, m, make = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.sampled_from("abcde"))
    match make:
        case "a":
            return naive(p, m)
        case "b":
            return gpipe(p, m)
        case "c":
            return one_f_one_b(p, m)
        case "d":
            return zb_h1(p, m)
        case _:
            return interleaved(p, p * draw(st.integers(1, 2)), draw(st.integers(2, 3)))


@settings(max_examples=200, deadline=None)
@given(schedules() | any_order(), st.integers(), st.booleans(), st.booleans())
def test_every_start_is_that_of_the_fixpoint(schedule: Schedule, seed: int, slow_link: bool, delay: bool) -> None:
    rng = random.Random(seed)
    actions = product("FBW", range(schedule.stages), range(schedule.micro_batches))
    cost = {action: rng.choice([0.0, rng.random(), 5 * rng.random()]) for action in actions}
    latency = {pair: rng.random() * delay for pair in product(range(schedule.ranks), repeat=2)}

    def seconds(a: Action) -> float:
        own = cost[a.kind.value, a.stage, a.micro_batch]
        both = a.kind is Kind.BACKWARD and a.stage not in schedule.splits_backward
        return own + cost["W", a.stage, a.micro_batch] * both

    timeline = simulate(
        schedule,
        lambda s, m: cost["F", s, m],
        lambda s, m: cost["B", s, m],
        lambda s, m: cost["W", s, m],
        lambda source, to: latency[source, to],
        bytes_per_message=3 * slow_link,
        bandwidth=4,
    )
    want = fixpoint(schedule, seconds, lambda source, to: latency[source, to], 0.75 * slow_link)
    assert {span.action: (span.start, span.end) for span in timeline.spans} == want
    check_timeline(timeline, schedule)
    check_critical_path(timeline, without_messages=not slow_link and not delay)


def check_timeline(timeline: Timeline, schedule: Schedule) -> None:
    assert timeline.ranks == schedule.ranks
    for rank, row in enumerate(schedule.actions):
        assert tuple(span.action for span in timeline.by_rank(rank)) == row
        assert all(span.rank == rank for span in timeline.by_rank(rank))
    assert timeline.busy + timeline.idle == pytest.approx(timeline.duration * timeline.ranks)
    assert timeline.peak_activations() == in_flight(schedule)


def check_critical_path(timeline: Timeline, without_messages: bool) -> None:
    path = timeline.critical_path
    assert path[0].start == 0 and path[-1].end == pytest.approx(timeline.duration)
    assert all(one.end <= two.start for one, two in pairwise(path))
    if without_messages:
        assert all(one.end == two.start for one, two in pairwise(path))


def test_making_the_critical_path_faster_makes_the_step_faster() -> None:
    schedule, costs = one_f_one_b(3, 4), [1.0, 3.0, 1.0]
    slow = simulate(schedule, costs, costs, costs)
    assert {span.stage for span in slow.critical_path if span.kind is Kind.FORWARD} >= {0, 1}
    critical = {span.action for span in slow.critical_path}
    faster = simulate(schedule, lambda s, m: costs[s] - 0.1 * (Action(Kind.FORWARD, s, m) in critical), costs, costs)
    spare = simulate(schedule, lambda s, m: costs[s] - 0.1 * (Action(Kind.FORWARD, s, m) not in critical), costs, costs)
    assert faster.duration < slow.duration == spare.duration


# What is refused, and how fast it is.


@pytest.mark.parametrize(
    "text", ["F0 B0 F1 B1\nF0 F1 B0 B1", "F0 B0\nF0", "F0 B0 B0\nF0 B0", "B0 F0", "F0 B0 F1 B1 W0", "F1 B1"]
)
def test_what_cannot_run_is_refused_with_the_words_of_the_validator(text: str) -> None:
    with pytest.raises(ScheduleError) as by_validator:
        parse(text).validate()
    with pytest.raises(ScheduleError) as by_simulator:
        simulate(parse(text))
    assert str(by_simulator.value) == str(by_validator.value)


def test_actions_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ScheduleError, match="there are only micro-batches 0 to 0"):
        simulate(replace(gpipe(2, 2), micro_batches=1))
    with pytest.raises(ScheduleError, match="stage 1 lives on rank 1"):
        simulate(replace(gpipe(2, 1), actions=gpipe(2, 1).actions[::-1]))


def test_costs_must_fit_the_stages() -> None:
    with pytest.raises(ValueError, match=r"forward=\[1, 2, 3\]: give seconds, or a list for the 2 stages"):
        simulate(gpipe(2, 2), [1, 2, 3])
    with pytest.raises(ValueError, match="weight=-1"):
        simulate(gpipe(2, 2), weight=-1)
    with pytest.raises(ValueError, match="bandwidth=0"):
        simulate(gpipe(2, 2), bandwidth=0)


def test_64_stages_with_512_micro_batches_take_about_a_second_at_most() -> None:
    schedule = one_f_one_b(64, 512)
    took = []
    for _ in range(3):  # other programs share the caches: the best of three is ours
        start = process_time()
        timeline = simulate(schedule)
        took.append(process_time() - start)
    assert min(took) < 1.5
    assert timeline.bubble == pytest.approx(63 / 512)


# The facts.


def test_a_measured_timeline_reads_as_a_predicted_one() -> None:
    """Clocks do not start at zero, and spans come in any order."""
    predicted = simulate(one_f_one_b(2, 3))
    spans = [replace(span, start=span.start + 100, end=span.end + 100) for span in predicted.spans]
    measured = Timeline(tuple(reversed(spans)), ranks=2)
    assert measured.duration == predicted.duration and measured.bubble == predicted.bubble
    assert measured.peak_activations() == predicted.peak_activations()
    assert [s.action for s in measured.by_rank(1)] == [s.action for s in predicted.by_rank(1)]


def test_activations_are_held_until_the_backward_or_the_weight_gradient() -> None:
    assert simulate(parse("F0 B0 F1 B1")).activations(0) == [(0, 1), (3, 0), (3, 1), (6, 0)]
    assert simulate(parse("F0 B0 F1 W0 B1 W1")).activations(0, 8) == [(0, 8), (2, 16), (4, 8), (6, 0)]


def test_a_timeline_of_nothing_has_no_bubble() -> None:
    empty = Timeline((), ranks=2)
    assert (empty.duration, empty.busy, empty.idle, empty.bubble) == (0, 0, 0, 0)
    assert empty.peak_activations() == [0, 0]
    assert Span(0, 1.0, 3.0, Kind.FORWARD, 0, 0).seconds == 2.0


def test_equal_traffic_subtracts_to_nothing() -> None:
    one = Traffic({("dp", "all_reduce"): Volume(2, 100), ("pp", "send"): Volume(1, 8)})
    two = Traffic({("dp", "all_reduce"): Volume(2, 100), ("tp", "all_reduce"): Volume(1, 4)})
    assert one - one == Traffic()
    assert one - two == Traffic({("pp", "send"): Volume(1, 8), ("tp", "all_reduce"): Volume(-1, -4)})
    assert one["pp", "recv"] == Volume(0, 0)


def test_a_footprint_is_the_sum_of_its_parts() -> None:
    one, two = Footprint(1, 2, 4, 8), Footprint(activations=3)
    assert one.total == 15 and (one - two) == Footprint(1, 2, 4, 5)
