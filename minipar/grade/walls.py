"""The hardened mode: an answer's processes behind walls of the kernel's.

Idea    What an interpreter's hook cannot stop, a namespace can: in there is no network, all of the system can only be
        read, and the checks, the solutions and other submissions are not there at all. Only the answer's own folder is
        written.
Source  bubblewrap (github.com/containers/bubblewrap), Debian's package of that name.
Read    `nursery.py` before, for the mode without walls.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CHECKS, SOLUTIONS = (Path(__file__).resolve().parent / name for name in ("checks", "solutions"))
ROOT = Path(__file__).resolve().parents[2]
HIDDEN = (CHECKS, SOLUTIONS, ROOT / "tests", ROOT / ".git")  # from answers; both of the last have solutions in them


def command(folder: str, hidden: Sequence[Path]) -> list[str]:
    """What to put before a command so that it runs behind the walls."""
    parts = ["bwrap", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--cap-drop", "ALL", "--die-with-parent"]
    parts += ["--new-session"]
    parts += ["--ro-bind", "/", "/", "--dev", "/dev", "--tmpfs", "/tmp"]
    for own in (sys.prefix, str(ROOT)):
        if own.startswith("/tmp/"):
            parts += ["--ro-bind", own, own]
    parts += ["--bind", folder, folder]
    for path in hidden:
        if path.is_dir():
            parts += ["--tmpfs", str(path.resolve())]
    return parts


def check() -> None:
    """Raise `ValueError`, one line, if there can be no walls here."""
    if shutil.which("bwrap") is None:
        raise ValueError("--isolate needs bubblewrap: apt install bubblewrap, or leave it out")
    with tempfile.TemporaryDirectory() as folder:
        behind = [*command(folder, HIDDEN), sys.executable, "-I", "-c", "import minipar.grade.frames"]
        tried = subprocess.run(behind, capture_output=True, text=True, check=False)
    if tried.returncode:
        why = " ".join(tried.stderr.split())[-160:]
        raise ValueError(f"--isolate does not work here ({why}): it needs namespaces, and Python outside of /tmp")
