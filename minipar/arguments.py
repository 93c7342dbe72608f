"""What the commands share in reading their arguments: numbers with limits, and complaints of one line.

Under torchrun every rank reads the same arguments and finds the same fault, so it is told once on each machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from time import sleep
from typing import Any, NoReturn

PROGRAM = "minipar"
PATIENCE = 10.0  # seconds in which torchrun, once the first rank has failed, ends the others
LARGEST = 2**31 - 1  # of numbers that have no smaller limit


def in_torchrun() -> bool:
    """Whether torchrun has started this process, as one of its ranks."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


def complain(text: str) -> None:
    """Say it on standard error: once on each machine, though torchrun's ranks mostly fail all alike. The first speaks,
    and when it has ended, torchrun ends the others. One that is still there then has failed alone, and speaks."""
    if in_torchrun() and os.environ["LOCAL_RANK"] != "0":
        sleep(PATIENCE)
    print(text, file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """argparse, whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        complain(f"{self.prog}: {message} (see {self.prog} --help)")
        sys.exit(2)


def number(low: float, kind: Callable[[str], Any] = int, high: float | None = None) -> Callable[[str], Any]:
    """An argparse type: a number from `low` to `high`; by default to `LARGEST` if it is whole, else any finite one."""
    if high is None:
        high = LARGEST if kind is int else float("inf")

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            shown = repr(text if len(text) < 40 else text[:40] + "...")
            raise argparse.ArgumentTypeError(f"{shown} is not a {'whole ' if kind is int else ''}number") from None
        if not low <= value <= high or value == float("inf"):
            upper = "up" if high == float("inf") else f"to {high:,}"
            raise argparse.ArgumentTypeError(f"{text} is out of range: choose from {low:g} {upper}")
        return value

    read.__name__ = "number"
    return read
