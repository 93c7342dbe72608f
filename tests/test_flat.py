"""Buckets hold every parameter once, shares cover every element once, and launches never overtake each other."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minipar.flat import Flat, LaunchOrder, bucket_plan

sizes = st.lists(st.integers(1, 20), min_size=1, max_size=12)


def parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """Parameters with all values different and none zero."""
    made, first = [], 1
    for shape in shapes:
        count = torch.Size(shape).numel()
        made.append(nn.Parameter(torch.arange(first, first + count, dtype=torch.float64).reshape(shape)))
        first += count
    return made


# Which parameters share a bucket.


@settings(deadline=None)
@given(sizes, st.integers(0, 60))
def test_buckets_hold_every_parameter_once_from_the_last_to_the_first(sizes: list[int], limit: int) -> None:
    assert [index for bucket in bucket_plan(sizes, limit) for index in bucket] == list(reversed(range(len(sizes))))


@settings(deadline=None)
@given(sizes, st.integers(0, 60))
def test_a_bucket_keeps_to_the_limit_unless_one_parameter_alone_breaks_it(sizes: list[int], limit: int) -> None:
    for bucket in bucket_plan(sizes, limit):
        assert len(bucket) == 1 or sum(sizes[index] for index in bucket) <= limit


@settings(deadline=None)
@given(sizes, st.integers(0, 60))
def test_a_bucket_is_closed_only_when_the_next_parameter_would_not_fit(sizes: list[int], limit: int) -> None:
    for full, after in pairwise(bucket_plan(sizes, limit)):
        assert sum(sizes[index] for index in full) + sizes[after[0]] > limit


@settings(deadline=None)
@given(sizes, st.integers(0, 60), st.data())
def test_parameters_with_different_keys_never_share_a_bucket(sizes: list[int], limit: int, data: Any) -> None:
    keys = data.draw(st.lists(st.sampled_from("ab"), min_size=len(sizes), max_size=len(sizes)))
    plan = bucket_plan(sizes, limit, keys)
    assert [index for bucket in plan for index in bucket] == list(reversed(range(len(sizes))))
    assert all(len({keys[index] for index in bucket}) == 1 for bucket in plan)


def test_the_example_of_the_docstring_and_no_parameters_at_all() -> None:
    assert bucket_plan([5, 4, 3, 2], limit=6) == [[3, 2], [1], [0]]
    assert bucket_plan([], limit=6) == []


# Where they lie in the buffer.

shapes = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)


@settings(deadline=None)
@given(shapes, st.integers(1, 5))
def test_views_are_the_parameters_end_to_end_and_then_padding(shapes: list[tuple[int, ...]], ranks: int) -> None:
    made = parameters(shapes)
    flat = Flat(made, ranks)
    buffer = flat.buffer()
    for view, parameter in zip(flat.views(buffer), made, strict=True):
        assert view.shape == parameter.shape
        view.copy_(parameter.data)
    total = sum(parameter.numel() for parameter in made)
    assert flat.numel % ranks == 0 and 0 <= flat.numel - total < ranks
    assert torch.equal(buffer[:total], torch.arange(1, total + 1, dtype=torch.float64))
    assert not buffer[total:].any()


@settings(deadline=None)
@given(shapes, st.integers(1, 5))
def test_the_pieces_of_all_ranks_hold_every_element_exactly_once(shapes: list[tuple[int, ...]], ranks: int) -> None:
    made = parameters(shapes)
    flat = Flat(made, ranks)
    gradient = flat.buffer()
    for view, parameter in zip(flat.views(gradient), made, strict=True):
        view.copy_(parameter.data)
    seen = {id(parameter): torch.zeros(parameter.numel()) for parameter in made}
    for rank in range(ranks):
        share = gradient.chunk(ranks)[rank]
        for piece in flat.pieces(rank, share):
            end = piece.start + len(piece.gradient)
            seen[id(piece.parameter)][piece.start : end] += 1
            assert torch.equal(piece.gradient, piece.parameter.data.flatten()[piece.start : end])
    assert all(bool((count == 1).all()) for count in seen.values())


def test_scaling_a_piece_scales_the_gradient_behind_it() -> None:
    flat = Flat(parameters([(5,)]), 2)
    share = torch.ones(3, dtype=torch.float64)
    (piece,) = flat.pieces(0, share)
    piece.gradient.mul_(3)
    assert share.tolist() == [3, 3, 3]


def test_the_picture_of_the_module_is_true() -> None:
    a_weight, a_bias, b_weight = parameters([(5,), (2,), (3,)])
    flat = Flat([a_weight, a_bias, b_weight], 2)
    assert flat.numel == 10 and flat.share == 5  # ten elements divide by two: no pad
    assert [(p.start, len(p.gradient)) for p in flat.pieces(0, torch.zeros(5))] == [(0, 5)]
    assert [(p.start, len(p.gradient)) for p in flat.pieces(1, torch.zeros(5))] == [(0, 2), (0, 3)]


# In which order they are sent.


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 3), st.booleans(), st.data())
def test_buckets_are_launched_in_order_whatever_the_order_of_arrival(
    counts: list[int], micro_batches: int, each: bool, data: Any
) -> None:
    launched: list[int] = []
    order = LaunchOrder(counts, launched.append)
    rounds = micro_batches if each else 1
    order.start(micro_batches=micro_batches, rounds=rounds)
    for _ in range(micro_batches):
        arrivals = [bucket for bucket, count in enumerate(counts) for _ in range(count)]
        for bucket in data.draw(st.permutations(arrivals)):
            order.arrived(bucket)
    assert launched == list(range(len(counts))) * rounds  # nothing is left for finish
    order.finish()
    assert launched == list(range(len(counts))) * rounds


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 3), st.booleans(), st.data())
def test_gradients_that_never_come_hold_their_bucket_back_until_the_end(
    counts: list[int], micro_batches: int, each: bool, data: Any
) -> None:
    launched: list[int] = []
    order = LaunchOrder(counts, launched.append)
    rounds = micro_batches if each else 1
    order.start(micro_batches=micro_batches, rounds=rounds)
    everything = [bucket for bucket, count in enumerate(counts) for _ in range(count * micro_batches)]
    some = data.draw(st.permutations(everything))[: data.draw(st.integers(0, len(everything)))]
    for bucket in some:
        order.arrived(bucket)
    early = list(launched)
    order.finish()
    assert launched == list(range(len(counts))) * rounds
    if not each:  # what went early had all its gradients
        assert all(some.count(bucket) == counts[bucket] * micro_batches for bucket in early)


def test_a_bucket_waits_for_the_one_before_it() -> None:
    launched: list[int] = []
    order = LaunchOrder([1, 2], launched.append)
    order.start(micro_batches=1)
    order.arrived(1)
    order.arrived(1)
    assert launched == []
    order.arrived(0)
    assert launched == [0, 1]


def test_a_step_forgets_the_one_before() -> None:
    launched: list[int] = []
    order = LaunchOrder([1], launched.append)
    for _ in range(2):
        order.start(micro_batches=2)
        order.arrived(0)
        assert launched == []
        order.arrived(0)
        assert launched.pop() == 0


@pytest.mark.parametrize("rounds", [1, 2])
def test_no_parameters_means_no_launches(rounds: int) -> None:
    order = LaunchOrder([], lambda bucket: pytest.fail("there is nothing to launch"))
    order.start(micro_batches=2, rounds=rounds)
    order.finish()
