"""Ranks as coordinates: which replica, which pipeline stage, which slice of a layer.

Idea    Lay the ranks out in a box of (dp, pp, tp). Ranks that differ in one coordinate only form a group, and each
        cut talks within its own groups. Tensor parallel talks most, so its ranks are neighbours (the innermost
        coordinate, the same node); data parallel talks least, so its groups reach furthest (the outermost).

            Mesh(dp=2, pp=2, tp=2)            tp
                                          0 ----- 1
            dp 0   stage 0             rank 0   rank 1
                   stage 1             rank 2   rank 3
            dp 1   stage 0             rank 4   rank 5
                   stage 1             rank 6   rank 7

Cost    One communicator for each group, made once.
Source  Narayanan et al. 2021, arXiv:2104.04473: tensor parallel inside a node, the others across nodes.
Read    `comm.py` before; `tp.py`, `pp.py`, `dp.py` after.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, cast

from minipar import comm
from minipar.comm import Group

AXES = ("dp", "pp", "tp")  # outermost first


@dataclass(frozen=True)
class Axis:
    """One dimension of a mesh that is still a plan: it has a size, and no rank yet."""

    name: str
    size: int
    rank: int = 0


class Mesh:
    """A box of `dp * pp * tp` ranks, and in a rank its three groups.

    >>> mesh = Mesh(dp=2, pp=2, tp=2)      # outside of ranks: a plan, to hand to `minipar.run` or `World`
    >>> mesh.size, mesh.coordinates(5)
    (8, {'dp': 1, 'pp': 0, 'tp': 1})

    In a rank, `Mesh(...)` joins the groups at once (every rank must make the same mesh), and `mesh.tp`, `mesh.pp`,
    `mesh.dp` are `comm.Group`s with `.rank` and `.size`; `mesh.world` is the group of all. Raises `ValueError` when
    the degrees don't multiply to the number of ranks.
    """

    def __init__(self, pp: int = 1, dp: int = 1, tp: int = 1, *, world: Group | None = None) -> None:
        self.shape = degrees(pp, dp, tp)
        self._world = world if world is not None else comm.current_world()
        if self._world is None:
            self._plan()
            return
        check_fits(self.shape, self._world.size)
        device = "cuda" if self._world.backend == "nccl" else "cpu"
        device_mesh = comm.device_mesh(list(self.shape.values()), AXES, device)
        self.dp, self.pp, self.tp = (comm.mesh_group(device_mesh, name, self._world.wire) for name in AXES)

    def _plan(self) -> None:
        """A plan's axes have sizes and send nothing: whoever uses them as groups is told so by Python."""
        self.dp, self.pp, self.tp = (cast(Group, Axis(name, self.shape[name])) for name in AXES)

    def __reduce__(self) -> tuple[Any, ...]:
        return plan, (self.shape["pp"], self.shape["dp"], self.shape["tp"])

    def __repr__(self) -> str:
        return "Mesh(" + ", ".join(f"{name}={degree}" for name, degree in self.shape.items()) + ")"

    @property
    def size(self) -> int:
        return self.shape["dp"] * self.shape["pp"] * self.shape["tp"]

    @property
    def world(self) -> Group:
        """The group of all ranks."""
        if self._world is None:
            raise ValueError(f"{self} is a plan, which no rank has joined: hand it to minipar.run or minipar.World")
        return self._world

    @property
    def rank(self) -> int:
        """This rank's number in the world."""
        return self.world.rank

    def on(self, world: Group) -> Mesh:
        """The same mesh over the ranks of `world`: every rank calls it."""
        return Mesh(self.shape["pp"], self.shape["dp"], self.shape["tp"], world=world)

    def rank_of(self, *, dp: int = 0, pp: int = 0, tp: int = 0) -> int:
        """The world's number of the rank at these coordinates."""
        return (dp * self.shape["pp"] + pp) * self.shape["tp"] + tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank of the world lies in the box."""
        rest, tp = divmod(rank, self.shape["tp"])
        dp, pp = divmod(rest, self.shape["pp"])
        return {"dp": dp, "pp": pp, "tp": tp}

    def groups(self, axis: str) -> list[list[int]]:
        """All groups along one axis, as lists of world ranks."""
        others = [name for name in AXES if name != axis]
        return [
            [self.rank_of(**dict(zip(others, place, strict=True)), **{axis: i}) for i in range(self.shape[axis])]
            for place in product(*(range(self.shape[name]) for name in others))
        ]

    def members(self, rank: int, name: str) -> list[int]:
        """The world ranks of a rank's group along an axis; of "world", all."""
        return list(range(self.size)) if name == "world" else next(g for g in self.groups(name) if rank in g)


def plan(pp: int = 1, dp: int = 1, tp: int = 1) -> Mesh:
    """A mesh that no rank has joined, wherever it is called."""
    mesh = Mesh.__new__(Mesh)
    mesh.shape, mesh._world = degrees(pp, dp, tp), None
    mesh._plan()
    return mesh


def degrees(pp: int, dp: int, tp: int) -> dict[str, int]:
    """The sizes of a mesh by axis, outermost first. Raises `ValueError` for what is not a number of ranks."""
    for name, degree in (("pp", pp), ("dp", dp), ("tp", tp)):
        if not isinstance(degree, int) or degree < 1:
            raise ValueError(f"{name}={degree!r} is not a number of ranks: choose a whole number from 1")
    return {"dp": dp, "pp": pp, "tp": tp}


def check_fits(shape: dict[str, int], ranks: int) -> None:
    """Raise `ValueError`, with the numbers and the choices, unless the degrees multiply to `ranks`."""
    asked = shape["dp"] * shape["pp"] * shape["tp"]
    if asked == ranks:
        return
    rest, odd = divmod(ranks, shape["pp"] * shape["tp"])
    choice = f"--dp {rest}" if rest and not odd else f"degrees whose product is {ranks}"
    raise ValueError(
        f"dp {shape['dp']} x pp {shape['pp']} x tp {shape['tp']} = {asked} ranks, but there are {ranks}: "
        f"choose {choice}, or start {asked} ranks"
    )
