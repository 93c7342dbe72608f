"""How functions and values travel between the launcher and its ranks: as bytes, by value.

Idea    pickle sends a function by its name, and the other side imports it. That fails for a function from a notebook
        cell, a lambda, or a script that must not be run twice. cloudpickle sends its code. One thing is added here:
        newer versions of cloudpickle drop the name of the file that code comes from; tracebacks need it.
"""

from __future__ import annotations

import importlib
import io
import linecache
import os
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]


def dumps(value: Any, prefix: bytes = b"") -> memoryview:
    """`prefix`, then the pickled value: for `pickle.loads` on the other side."""
    file = io.BytesIO()
    file.write(prefix)
    Pickler(file).dump(value)
    return file.getbuffer()


def reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    """How a code object is pickled: as cloudpickle does it, with its own file name beside."""
    make, pieces = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make_code, (code.co_filename, make, pieces)


def make_code(filename: str, make: Callable[..., CodeType], pieces: tuple[Any, ...]) -> CodeType:
    """A code object again, and its file name with it."""
    return make(*pieces).replace(co_filename=filename)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, with file names kept."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: reduce_code})

    def reducer_override(self, value: Any) -> Any:
        """A module of a class of its own goes by its name, as others do: torch has such (`torch.distributed.config`),
        and cloudpickle sends them along with any function that says `torch` and `config`."""
        if isinstance(value, ModuleType) and type(value) is not ModuleType and sys.modules.get(value.__name__) is value:
            return importlib.import_module, (value.__name__,)
        return super().reducer_override(value)


def cell_sources() -> dict[str, Any]:
    """The source of notebook cells, which are in no file, as `linecache` has it: for tracebacks on the ranks."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)}
