"""`%%ranks`: a notebook cell as each rank runs it, with the ranks' variables kept from cell to cell.

    %load_ext minipar

    %%ranks 4
    x = torch.tensor(float(rank))
    group.all_reduce(x)               # shown as: [ranks 0-3] tensor(6.)

Idea    A `World` is kept between cells. A cell's source is sent to its ranks, which execute it in their own namespace
        (`cells.py`). What they print or show alike is folded into one line, and what fails is one error that names
        the rank and the line of the cell.
Read    `launch.py` and `cells.py` before.
"""

from __future__ import annotations

import argparse
import re
import shlex
import traceback
from collections.abc import Sequence
from time import strftime
from typing import Any, NoReturn

from IPython.core.error import UsageError

from minipar.cells import Cell, Outcome, run_cell
from minipar.launch import World
from minipar.output import fold, name_ranks


def load(shell: Any) -> None:
    """Register `%%ranks` and `%ranks` with an IPython shell."""
    notebook = Notebook(shell)
    shell.register_magic_function(notebook.cell, "cell", "ranks")
    shell.register_magic_function(notebook.status, "line", "ranks")


class CellSyntaxError(ValueError):
    """A cell that is not Python, found before it was sent to any rank."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Notebook:
    """The ranks that a notebook keeps."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._world: World | None = None
        self._shape: Any = None  # the number of ranks, or the degrees of the mesh
        self._cells = 0
        self._since = ""

    def cell(self, line: str, cell: str) -> None:
        """`%%ranks 4 [--pp 2 --dp 2 --tp 1] [--only 0,2] [--push a,b] [--pull x] [--timeout 60] [--no-check]`

        Runs the cell on each rank. Ranks have `rank`, `size`, `group`, `torch`, `minipar`, with --pp, --dp or --tp
        also `mesh`, and keep their variables until `%ranks stop` or another number of ranks.
        """
        options = parse(line)
        if options.help:
            print(parser().format_help())
            return
        # The first line is the magic itself, so that lines count as the notebook counts them.
        source = Cell(f"<cell {self._shell.execution_count}>", f"#%%ranks {line}\n{cell}")
        try:
            source.parse()
        except SyntaxError as error:
            raise CellSyntaxError("".join(traceback.format_exception_only(error))) from None
        source.register()
        push = self._variables(options.push)
        world = self._ensure_world(options)
        only = chosen(options.only, world.size)
        try:
            task = (source, push, options.pull, options.check)
            outcomes = world.call(run_cell, task, timeout=options.timeout or None, only=only, keep=True)
        finally:
            self._note_end()
        self._cells += 1
        self._show(only, outcomes, options.pull)

    def status(self, line: str) -> None:
        """`%ranks` tells what runs; `%ranks stop` ends it."""
        order = line.strip()
        if order not in ("", "stop"):
            raise UsageError(f"%ranks {order}: say %ranks, %ranks stop, or %%ranks 4 at the top of a cell")
        if self._world is None:
            print("no ranks: %%ranks 4 at the top of a cell starts 4")
        elif order == "stop":
            self._world.close()
            self._world = None
            print(f"{describe(self._shape)} stopped")
        else:
            print(f"{describe(self._shape)} since {self._since}, {self._cells} cells run")

    def _ensure_world(self, options: argparse.Namespace) -> World:
        """The world that the options ask for: the one there is, or a new one."""
        shape = asked_shape(options) or self._shape
        if self._world is not None and shape == self._shape:
            return self._world
        if shape is None:
            raise UsageError("%%ranks: how many ranks? For example %%ranks 4")
        try:
            world = World(plan(shape), fold=True, backend=options.backend)
        except ValueError as error:
            raise UsageError(f"%%ranks: {error}") from None
        if self._world is not None:
            print(f"{describe(self._shape)} ended, and their variables are gone; {describe(shape)} start")
            self._world.close()
        self._world = world
        self._shape, self._cells, self._since = shape, 0, strftime("%H:%M")
        return self._world

    def _note_end(self) -> None:
        """Say so when the world has ended under the notebook's feet."""
        if self._world is not None and self._world.closed:
            print(f"{describe(self._shape)} ended, and their variables are gone: the next %%ranks starts new ones")
            self._world = None

    def _variables(self, names: Sequence[str]) -> dict[str, Any]:
        missing = [name for name in names if name not in self._shell.user_ns]
        if missing:
            raise UsageError(f"--push: the notebook has no variable {', '.join(missing)}")
        return {name: self._shell.user_ns[name] for name in names}

    def _show(self, ranks: Sequence[int], outcomes: Sequence[Outcome], pull: Sequence[str]) -> None:
        """Show the values of the last expressions, and bring back what was asked for."""
        by_rank = dict(zip(ranks, outcomes, strict=True))
        print(fold({rank: outcome.shown for rank, outcome in by_rank.items() if outcome.shown is not None}), end="")
        for name in pull:
            lacking = [rank for rank, outcome in by_rank.items() if name in outcome.missing]
            if lacking:
                raise UsageError(f"--pull: no variable {name} on {name_ranks(lacking)}")
            self._shell.user_ns[name] = [outcome.pulled[name] for outcome in outcomes]


# The line behind %%ranks.


class Parser(argparse.ArgumentParser):
    """An argument parser that tells the notebook what is wrong, instead of ending it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%ranks: {message}")


def parser() -> Parser:
    """The options of `%%ranks`."""
    options = Parser(prog="%%ranks", add_help=False, allow_abbrev=False, description="Run the cell on each rank.")
    options.add_argument("ranks", nargs="?", type=int, help="how many ranks; if left out, those that there are")
    options.add_argument("--pp", type=int, help="pipeline stages of the mesh")
    options.add_argument("--dp", type=int, help="data-parallel replicas of the mesh")
    options.add_argument("--tp", type=int, help="tensor-parallel slices of the mesh")
    options.add_argument("--only", type=ranks_of, help="run on these ranks alone: 0,2 or 0-3")
    options.add_argument("--push", type=names_of, default=[], help="copy these notebook variables to the ranks: a,b")
    options.add_argument("--pull", type=names_of, default=[], help="bring back these variables, as lists by rank")
    options.add_argument("--timeout", type=float, default=60.0, help="seconds for the cell; 0 for no limit")
    options.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="explain unlike calls")
    options.add_argument("--backend", default="gloo", help="gloo, or nccl for tensors on GPUs (default gloo)")
    options.add_argument("-h", "--help", action="store_true", help="show this")
    return options


def parse(line: str) -> argparse.Namespace:
    """The options on the line; raises `UsageError`."""
    try:
        return parser().parse_args(shlex.split(line))
    except ValueError as error:
        raise UsageError(f"%%ranks: {error}") from None


def names_of(text: str) -> list[str]:
    """"a,b" -> ["a", "b"]."""
    names = [name.strip() for name in text.split(",")]
    if not all(name.isidentifier() for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names: a,b")
    return names


def ranks_of(text: str) -> list[int]:
    """"0,2-3" -> [0, 2, 3]."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks: 0,2 or 0-3")
    spans = [[int(end) for end in span.split("-")] for span in text.split(",")]
    return sorted({rank for span in spans for rank in range(span[0], span[-1] + 1)})


def chosen(only: list[int] | None, size: int) -> list[int]:
    """The ranks that a cell speaks to."""
    ranks = list(range(size)) if only is None else only
    if not ranks or ranks[-1] >= size:
        raise UsageError(f"--only: there are ranks 0 to {size - 1}")
    return ranks


def asked_shape(options: argparse.Namespace) -> int | dict[str, int] | None:
    """The number of ranks, or the degrees of a mesh; None when neither was said."""
    degrees = {name: getattr(options, name) for name in ("pp", "dp", "tp")}
    if all(degree is None for degree in degrees.values()):
        return check_number(options.ranks)
    shape = {name: 1 if degree is None else int(degree) for name, degree in degrees.items()}
    product = shape["pp"] * shape["dp"] * shape["tp"]
    if options.ranks not in (None, product):
        said = " x ".join(f"{name} {degree}" for name, degree in shape.items())
        raise UsageError(f"%%ranks: {said} = {product} ranks, but {options.ranks} are asked for: make the two equal")
    return shape


def check_number(ranks: int | None) -> int | None:
    """The number of ranks, or None where none was said; raises `UsageError` below 1."""
    if ranks is not None and ranks < 1:
        raise UsageError(f"%%ranks {ranks}: choose a number of ranks from 1")
    return ranks


def plan(shape: int | dict[str, int]) -> Any:
    """What a `World` is made of: the number, or a mesh."""
    from minipar.mesh import Mesh

    return shape if isinstance(shape, int) else Mesh(pp=shape["pp"], dp=shape["dp"], tp=shape["tp"])


def describe(shape: int | dict[str, int]) -> str:
    """'4 ranks', or '4 ranks (pp 2, dp 2, tp 1)'."""
    if isinstance(shape, int):
        return f"{shape} rank{'s' if shape > 1 else ''}"
    size = shape["pp"] * shape["dp"] * shape["tp"]
    return f"{size} rank{'s' if size > 1 else ''} ({', '.join(f'{name} {degree}' for name, degree in shape.items())})"
