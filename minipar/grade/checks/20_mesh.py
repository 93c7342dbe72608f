"""Exercise 20: coordinates of a rank in (dp, pp, tp), and its three groups."""

from typing import Any

from minipar.grade.judging import Case, Draw, Judge, Outcome

TITLE, MINUTES, LESSON = "Ranks in a box", 10, 6
CHECKS = {"coordinates: tp runs fastest": 3, "tp groups": 2, "pp groups": 2, "dp groups": 2}
HINTS = [
    "Write the ranks of a small box down, as in the picture, and look at how far apart the ranks of a group are.",
    "The rank at (d, p, t) has the number (d * pp + p) * tp + t. Coordinates are that, undone: divmod by tp, then pp.",
    "A group: keep two of the coordinates, let the third run from 0 to its size, and number each place. Neighbours in "
    "a tp group are 1 apart, in a pp group tp apart, in a dp group pp * tp apart.",
]


def harness(student, group, dp, pp, tp):  # type: ignore[no-untyped-def]
    ranks = range(dp * pp * tp)
    places = [list(student.coordinates(rank, dp, pp, tp)) for rank in ranks]
    groups = [student.groups(rank, dp, pp, tp) for rank in ranks]
    return {"places": places, **{axis: [list(some[axis]) for some in groups] for axis in ("dp", "pp", "tp")}}


def cases(draw: Draw) -> list[Case]:
    shapes = [(2, 3, 4), (2, 2, 2), (draw.choice([3, 5]), draw.integer(2, 4), draw.choice([2, 5, 6])), (1, 3, 1)]
    return [Case([{"dp": dp, "pp": pp, "tp": tp}], about=f"dp {dp}, pp {pp}, tp {tp}") for dp, pp, tp in shapes]


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    dp, pp, tp = (case.inputs[0][axis] for axis in ("dp", "pp", "tp"))
    ranks, found = range(dp * pp * tp), outcome.values[0]
    places = [[rank // (pp * tp), rank // tp % pp, rank % tp] for rank in ranks]
    judge.equal(
        "coordinates: tp runs fastest",
        found["places"],
        places,
        {
            "dp runs fastest: then the ranks of a tp group lie far apart, perhaps in different machines. Let tp run "
            "fastest": [[rank % dp, rank // dp % pp, rank // (dp * pp)] for rank in ranks],
            "pp runs fastest: take tp out of the rank first, and then pp": [
                [rank // (pp * tp), rank % pp, rank // pp % tp] for rank in ranks
            ],
            "dp runs before pp: of the three, dp shall be outermost": [
                [rank // tp % dp, rank // (tp * dp), rank % tp] for rank in ranks
            ],
            "the coordinates are right, but in the order (tp, pp, dp): return (dp, pp, tp)": [p[::-1] for p in places],
            "this takes the bits of the rank, which is right only if every axis has 2 places: divide by the sizes": [
                [rank >> 2 & 1, rank >> 1 & 1, rank & 1] for rank in ranks
            ],
        },
        what=f"the place, for {case.about},",
    )
    for axis in ("tp", "pp", "dp"):
        _judge_groups(axis, places, found, case, judge)


def _judge_groups(axis: str, places: list[list[int]], found: dict[str, Any], case: Case, judge: Judge) -> None:
    """Ranks of a group have the same coordinates, but for one."""
    ranks, axes = range(len(places)), ("dp", "pp", "tp")
    right = {name: [_alike(places, rank, n) for rank in ranks] for n, name in enumerate(axes)}
    size, number = case.inputs[0][axis], axes.index(axis)
    mistakes = {
        f"these are {other} groups: the ranks of a {axis} group differ in {axis}, and in nothing else": right[other]
        for other in right
        if other != axis
    }
    blocks = [list(range(rank // size * size, rank // size * size + size)) for rank in ranks]
    without = [[other for other in right[axis][rank] if other != rank] for rank in ranks]
    slices = [[other for other in ranks if places[other][number] == places[rank][number]] for rank in ranks]
    mistakes |= {
        f"the {axis} groups are runs of neighbours: only tp groups are. Keep the other two coordinates, and let "
        f"{axis} run": blocks,
        "a rank belongs to its own groups: it is left out": without,
        f"these ranks have the same {axis}: a {axis} group has those that differ in {axis}, one for each value, and "
        "agree in the others": slices,
    }
    judge.equal(f"{axis} groups", found[axis], right[axis], mistakes, what=f"the {axis} group, for {case.about},")


def _alike(places: list[list[int]], rank: int, free: int) -> list[int]:
    """The ranks that agree with `rank` in all coordinates but the free one."""
    kept = [n for n in range(3) if n != free]
    return [other for other, place in enumerate(places) if all(place[n] == places[rank][n] for n in kept)]
