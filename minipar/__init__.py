"""Distributed training, taught by running it: a small engine for data, tensor and pipeline parallelism.

`minipar.run` and `minipar.World` run a function on real ranks, `minipar.Mesh` lays the ranks out; the other modules
are imported by name (`minipar.schedule`, `minipar.ledger`, ...). Importing `minipar` alone imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minipar.launch import RankError, World, run, warm
    from minipar.mesh import Mesh

__all__ = ["Mesh", "RankError", "World", "load_ipython_extension", "run", "warm"]

_HOMES = {"Mesh": "mesh", "RankError": "launch", "World": "launch", "run": "launch", "warm": "launch"}


def __getattr__(name: str) -> Any:
    """Names are imported when they are first asked for; so are modules, as `minipar.schedule`."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"minipar.{_HOMES[name]}"), name)
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"minipar.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"minipar.{name}":
                raise
    raise AttributeError(f"module 'minipar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext minipar`: the magics `%%ranks` and `%%grade`, and a server that is warm when the first ranks are asked
    for."""
    from minipar import magic
    from minipar.grade import panel
    from minipar.launch import warm

    warm()
    magic.load(ipython)
    panel.load(ipython)
