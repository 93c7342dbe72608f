"""A command from its start to its end: streams that are there, signals that clear away, one line for what went wrong.

Idea    What cannot run is refused in one line that says what to change, with exit code 2; a run that fails exits with
        1, one that is interrupted with 128 + the signal. Whatever happens, ranks and half-written files are gone.
Read    `cli.py`, whose commands run in here.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from minipar.arguments import PROGRAM, complain, in_torchrun


def guarded(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run the command; turn what goes wrong into one readable message and an exit code."""
    name = f"{PROGRAM} {options.name}"
    try:
        with on_signals(raise_interrupt):
            from minipar.faults import RankError, lost_peer

            return command(options)
    except KeyboardInterrupt as interrupt:
        complain(f"{name}: interrupted, all ranks have ended")
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    except BrokenPipeError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RankError as error:
        refusal = next((failure.refusal for failure in error.failures if failure.refusal), "")
        complain(f"{name}: {refusal or error}")
        return 2 if refusal else 1
    except (ValueError, OSError) as error:
        complain(f"{name}: {' '.join(str(error).split())}")
        return 2
    except RuntimeError as error:
        if not lost_peer(error):
            raise
        complain(f"{name}: another rank has ended, and this one cannot go on without it: torchrun says which")
        return 1


@contextmanager
def on_signals(react: Callable[[int, Any], NoReturn]) -> Iterator[None]:
    """Within, `react` to Ctrl-C and to SIGTERM. Not on torchrun's ranks: one that waits for a message would not notice,
    and they have nothing to clear away."""
    if in_torchrun() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, react) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_interrupt(number: int, frame: Any) -> NoReturn:
    """End the command as Ctrl-C does, so that ranks and files are cleared away."""
    raise KeyboardInterrupt(number)


def end_at_once(number: int, frame: Any) -> NoReturn:
    """For the time of imports: nothing is there to clear away yet, and torch's import may swallow an exception."""
    print(f"{PROGRAM}: interrupted, no rank had started", file=sys.stderr, flush=True)
    os._exit(128 + number)


def open_streams() -> None:
    """Standard streams that are there whoever started us, and that never fail for a character they cannot show."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: whatever is opened next would take its number
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
