"""What a process holds of the machine's memory: its peak, and what becomes of memory that is freed.

Idea    A training step frees what it has used, and the next step needs as much again. By default the C library gives
        much of it back to the system, which hands it out again page by page, cleared: a fault for each 4 kB, 4,600
        of them in each step of the bench's model, 3% of its time. So ranks keep what they free.
Read    `rank.py`, which settles a rank; `bench.py`, which measures peaks.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's numbers for the options of mallopt
MOST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more


def keep_freed() -> None:
    """Have the C library keep freed memory for this process (glibc; nothing is done elsewhere)."""
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, MOST_MMAP_THRESHOLD)
        libc.mallopt(TRIM_THRESHOLD, 1 << 30)


def peak_bytes(reset: bool = False) -> int:
    """The peak of this process's resident memory; with `reset`, forget the peak so far (Linux only)."""
    status = Path("/proc/self/status")
    if status.exists():
        if reset:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
