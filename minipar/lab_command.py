"""`minipar lab`: JupyterLab on the lessons.

Idea    One command from the shell to the first lesson. The server listens on this machine only, needs its token, and
        ends with its window: with it go the kernels, and with them their ranks.
Source  JupyterLab itself, in this process.
Read    `course.py` before.
"""

from __future__ import annotations

import argparse
import os
import webbrowser
from typing import Any

from minipar import course
from minipar.arguments import in_torchrun, number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minipar lab`."""
    parser.add_argument("lesson", nargs="?", default="0", help="the number of the lesson to open (default 0)")
    parser.add_argument("--port", type=number(1, high=65535), default=8888, help="or the next free one (default 8888)")
    parser.add_argument("--no-browser", action="store_true", help="only say the address")


def command(options: argparse.Namespace) -> int:
    """`minipar lab`"""
    if in_torchrun():
        raise ValueError("minipar lab is for one person: call it without torchrun")
    (lesson,) = course.chosen(options.lesson.partition(",")[0])
    try:
        from jupyterlab.labapp import LabApp  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("minipar lab needs JupyterLab: pip install -e '.[lab]'") from None
    browser = not options.no_browser and has_browser()
    server: Any = LabApp.initialize_server(argv=arguments(lesson, options.port, browser))
    address = server.connection_url.rstrip("/") + f"/lab/tree/{lesson.path.name}?token={server.identity_provider.token}"
    print(f"{lesson.title}: {address}", flush=True)
    print("Ctrl-C here ends JupyterLab, its kernels and their ranks.", flush=True)
    server.start()
    return 0


def arguments(lesson: course.Lesson, port: int, browser: bool) -> list[str]:
    """What JupyterLab is told."""
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.root_dir": course.FOLDER,
        "ServerApp.open_browser": browser,
        "ServerApp.answer_yes": True,  # Ctrl-C ends it, and is not asked about
        "ServerApp.allow_root": hasattr(os, "geteuid") and os.geteuid() == 0,
        "ServerApp.log_level": 40,
        "LabApp.log_level": 40,
        "LabApp.default_url": f"/lab/tree/{lesson.path.name}",
        "LabApp.news_url": None,  # nothing is asked for elsewhere
        "LabApp.extension_manager": "readonly",
    }
    return [f"--{name}={value}" for name, value in options.items()]


def has_browser() -> bool:
    """Whether a browser can be opened from here."""
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True
