"""A notebook cell as one rank runs it: the rank's half of `%%ranks`.

Idea    Each rank keeps a namespace in its state, as a notebook does; a cell is executed in it. If the last line is an
        expression, its value is shown. The cell's text is registered under its name, so that a traceback can quote
        the line that failed.
Read    `magic.py` after: the notebook's half.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import minipar


@dataclass(frozen=True)
class Cell:
    """Python source, and the name that tracebacks give it: '<cell 3>'."""

    name: str
    source: str

    def parse(self) -> ast.Module:
        """Raises `SyntaxError`."""
        return ast.parse(self.source, self.name)

    def register(self) -> None:
        """Let `linecache`, and so tracebacks, find the source."""
        linecache.cache[self.name] = (len(self.source), None, self.source.splitlines(keepends=True), self.name)


@dataclass(frozen=True)
class Outcome:
    """What a cell leaves on one rank: the text of its last expression, and the variables to bring back."""

    shown: str | None
    pulled: dict[str, Any]
    missing: list[str]


def run_cell(place: Any, cell: Cell, push: Mapping[str, Any], pull: Sequence[str], check: bool) -> Outcome:
    """Execute `cell` on this rank, in the namespace that it keeps, after `push` was copied into it."""
    group = getattr(place, "world", place)
    group.wire.check = check
    names = namespace(place)
    names.update(push)
    cell.register()
    shown = execute(cell, names)
    return Outcome(
        shown, {name: names[name] for name in pull if name in names}, [name for name in pull if name not in names]
    )


def namespace(place: Any) -> dict[str, Any]:
    """This rank's variables: at first `rank`, `size`, `group`, `torch`, `minipar`, and `mesh` if there is one."""
    import torch

    group = getattr(place, "world", place)
    if not hasattr(group.state, "cells"):
        main = sys.modules["__main__"] = ModuleType("__main__")  # where classes made in a cell say they are from
        group.state.cells = vars(main)
        group.state.cells.update(rank=group.rank, size=group.size, group=group, torch=torch, minipar=minipar)
        if place is not group:
            group.state.cells["mesh"] = place
    names: dict[str, Any] = group.state.cells
    return names


def execute(cell: Cell, names: dict[str, Any]) -> str | None:
    """Run the cell; the text of its last expression, unless that is None or ends in a semicolon."""
    body = cell.parse().body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, type_ignores=[]), cell.name, "exec", dont_inherit=True), names)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), cell.name, "eval", dont_inherit=True), names)
    names["_"] = value
    return None if value is None or cell.source.rstrip().endswith(";") else repr(value)
