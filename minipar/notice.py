"""In a notebook cell that takes longer than two seconds: a line that says what goes on, and goes away at the end.

Idea    Whoever waits wants to know that it goes on, how far it is and how to stop it. A short cell says nothing. The
        line is one output that is replaced, so it never scrolls, and nothing of it stays in a saved notebook.
Read    `launch.py`, which ticks while it waits for ranks; `lesson.py`, which tells how far a training run is.
"""

from __future__ import annotations

import sys
from html import escape
from time import monotonic
from typing import Any

AFTER, EVERY = 2.0, 0.5  # seconds


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


class Notice:
    """The line. `tick` it as often as there is time; `close` it at the end, however that comes."""

    def __init__(self, what: str, *, active: bool | None = None) -> None:
        self.what, self.share = what, 0.0  # what goes on, and which part of it is done, 0 where that is not known
        self._active = in_notebook() if active is None else active
        self._started = self._told = monotonic()
        self._handle: Any = None

    def tick(self) -> None:
        """Say it, if it is time to."""
        now = monotonic()
        if not self._active or now - self._started < AFTER or (self._handle and now - self._told < EVERY):
            return
        self._told = now
        self._display(self._html(now - self._started))

    def close(self) -> None:
        if self._handle is not None:
            self._display("")
            self._handle = None

    def _display(self, html: str) -> None:
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(html), display_id=True)
        else:
            self._handle.update(HTML(html))

    def _html(self, seconds: float) -> str:
        bar = ""
        if self.share:
            bar = (
                f'<progress value="{self.share:.3f}" max="1" style="width:220px;vertical-align:middle"></progress> '
                f"{self.share:.0%} "
            )
        text = f"{escape(self.what)}, {seconds:.0f} s (the stop button ends it)"
        return f'<div role="status" style="font:13px system-ui,sans-serif;color:#57606a">{bar}{text}</div>'
