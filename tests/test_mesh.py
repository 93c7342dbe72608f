"""Ranks as coordinates in a box: tp innermost, dp outermost, and a group along each axis."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minipar
from minipar.mesh import AXES, Mesh, check_fits, plan

cloudpickle.register_pickle_by_value(sys.modules[__name__])

degrees = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES})


@settings(deadline=None)
@given(degrees)
def test_every_rank_has_coordinates_and_every_coordinate_a_rank(shape: dict[str, int]) -> None:
    mesh = plan(**shape)
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank_of(**place) for place in places] == list(range(mesh.size))
    assert len({tuple(place.items()) for place in places}) == mesh.size
    assert all(0 <= place[axis] < shape[axis] for place in places for axis in AXES)


@settings(deadline=None)
@given(degrees)
def test_the_groups_of_an_axis_hold_each_rank_once_and_differ_in_that_coordinate_only(shape: dict[str, int]) -> None:
    mesh = plan(**shape)
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        for group in groups:
            places = [mesh.coordinates(rank) for rank in group]
            assert [place.pop(axis) for place in places] == list(range(shape[axis]))
            assert all(place == places[0] for place in places)


def test_tensor_parallel_ranks_are_neighbours_and_replicas_are_furthest_apart() -> None:
    mesh = plan(dp=2, pp=3, tp=4)
    assert mesh.groups("tp")[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.groups("pp")[:2] == [[0, 4, 8], [1, 5, 9]]
    assert mesh.groups("dp")[:2] == [[0, 12], [1, 13]]
    assert mesh.rank_of(dp=1, pp=2, tp=3) == 12 + 8 + 3


def test_the_picture_of_the_module_is_true() -> None:
    mesh = plan(dp=2, pp=2, tp=2)
    assert [mesh.rank_of(dp=d, pp=p, tp=t) for d in (0, 1) for p in (0, 1) for t in (0, 1)] == list(range(8))
    assert (mesh.size, mesh.coordinates(5)) == (8, {"dp": 1, "pp": 0, "tp": 1})


def test_a_plan_outside_of_ranks_has_sizes_travels_and_says_what_it_is_not() -> None:
    mesh = Mesh(pp=3, dp=2)
    assert (mesh.size, mesh.pp.size, mesh.dp.size, mesh.tp.size) == (6, 3, 2, 1)
    again = pickle.loads(pickle.dumps(mesh))
    assert again.shape == mesh.shape and repr(again) == "Mesh(dp=2, pp=3, tp=1)"
    with pytest.raises(ValueError, match=r"Mesh\(dp=2, pp=3, tp=1\) is a plan.*minipar\.run"):
        _ = mesh.rank
    with pytest.raises(ValueError, match=r"is a plan.*minipar\.run"):
        _ = mesh.world


def look_around(mesh: Any) -> dict[str, Any]:
    copy = pickle.loads(pickle.dumps(mesh))
    return {
        "rank": mesh.rank,
        "ranks": {axis: getattr(mesh, axis).ranks for axis in AXES},
        "places": {axis: getattr(mesh, axis).rank for axis in AXES},
        "names": [mesh.dp.name, mesh.pp.name, mesh.tp.name, mesh.world.name],
        "sums": {axis: float(getattr(mesh, axis).all_reduce(torch.tensor(2.0**mesh.rank))) for axis in AXES},
        "copy": (copy.shape, isinstance(copy.dp, minipar.comm.Group)),
    }


@pytest.mark.parametrize(
    ("pp", "dp", "tp"), [(1, 1, 1), (3, 1, 1), (1, 3, 1), (1, 1, 3), (3, 2, 1), (1, 2, 3), (2, 2, 2)]
)
def test_each_rank_joins_the_groups_that_the_plan_says(pp: int, dp: int, tp: int) -> None:
    mesh = plan(pp=pp, dp=dp, tp=tp)
    for rank, seen in enumerate(minipar.run(look_around, mesh)):
        assert seen["rank"] == rank
        assert seen["places"] == mesh.coordinates(rank)
        for axis in AXES:
            (group,) = [group for group in mesh.groups(axis) if rank in group]
            assert seen["ranks"][axis] == group
            assert seen["sums"][axis] == sum(2.0**member for member in group)
        assert seen["names"] == ["dp", "pp", "tp", "world"]
        assert seen["copy"] == (mesh.shape, False)  # what travels is the plan, not the connections


def join_in_a_rank(group: Any) -> list[int]:
    mesh = Mesh(dp=2, tp=2)
    return [mesh.dp.rank, mesh.tp.rank, mesh.pp.rank, mesh.rank]


def test_in_a_rank_a_mesh_joins_at_once() -> None:
    assert minipar.run(join_in_a_rank, 4) == [[0, 0, 0, 0], [0, 1, 0, 1], [1, 0, 0, 2], [1, 1, 0, 3]]


@pytest.mark.parametrize(
    ("shape", "ranks", "text"),
    [
        (
            {"dp": 2, "pp": 2, "tp": 2},
            4,
            "dp 2 x pp 2 x tp 2 = 8 ranks, but there are 4: choose --dp 1, or start 8 ranks",
        ),
        (
            {"dp": 1, "pp": 3, "tp": 1},
            6,
            "dp 1 x pp 3 x tp 1 = 3 ranks, but there are 6: choose --dp 2, or start 3 ranks",
        ),
        (
            {"dp": 1, "pp": 3, "tp": 2},
            8,
            "dp 1 x pp 3 x tp 2 = 6 ranks, but there are 8: choose degrees whose product is 8, or start 6 ranks",
        ),
        (
            {"dp": 1, "pp": 3, "tp": 1},
            2,
            "dp 1 x pp 3 x tp 1 = 3 ranks, but there are 2: choose degrees whose product is 2, or start 3 ranks",
        ),
    ],
)
def test_a_misfit_names_the_numbers_and_the_choices(shape: dict[str, int], ranks: int, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_fits(shape, ranks)
    assert str(caught.value) == text


def test_a_mesh_that_does_not_fit_its_ranks_is_refused_on_them() -> None:
    with pytest.raises(minipar.RankError, match="dp 3 x pp 1 x tp 1 = 3 ranks, but there are 2"):
        minipar.run(lambda group: minipar.Mesh(dp=3), 2)


@pytest.mark.parametrize("degree", [0, -1, 2.0, "2", None])
def test_a_degree_must_be_a_whole_number_from_1(degree: Any) -> None:
    with pytest.raises(ValueError, match=rf"tp={degree!r} is not a number of ranks: choose a whole number from 1"):
        Mesh(tp=degree)
    with pytest.raises(ValueError, match=rf"dp={degree!r} is not a number of ranks: choose a whole number from 1"):
        plan(dp=degree)
