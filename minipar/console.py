"""What `minipar train` shows while it runs, and at the end."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from minipar import report as reports


class Progress:
    """A progress bar with loss and tokens/s on a terminal; elsewhere a line from time to time."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(file=sys.stderr if quiet else sys.stdout, quiet=quiet, highlight=False)
        width = None if self.console.is_terminal else 80
        if width:
            self.console = Console(file=self.console.file, quiet=quiet, width=width, highlight=False)
        self._bar: Bar | None = None
        self._task: Any = None
        self._steps = self._shown = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()

    def hear(self, event: dict[str, Any]) -> None:
        """An event of `job.run`."""
        match event["event"]:
            case "corpus":
                self.console.print(event["statistics"], markup=False)
                self.console.print()
            case "start":
                self._start(event)
            case "step":
                self._step(event)
            case "restart":
                self._say([*event["damaged"], f"{event['reason']}: starting again from step {event['step']}"])
            case "rollback":
                to = "nowhere to go back to" if event["to"] is None else f"back to the weights of step {event['to']}"
                self._say([f"step {event['step'] + 1}: the loss is {event['loss']:.3f}, {to}"])

    def finish(self, report: dict[str, Any]) -> None:
        """The closing tables."""
        self._stop()
        self.console.print()
        reports.show(report, self.console)

    def _start(self, event: dict[str, Any]) -> None:
        self._stop()
        self._steps = event["steps"]
        if self.console.is_interactive and not self.console.quiet:
            text = TextColumn("loss {task.fields[loss]}  norm {task.fields[norm]}  {task.fields[pace]}")
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(16), text, TimeRemainingColumn())
            self._bar = Bar(*columns, console=self.console)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._steps, loss="  -  ", norm="  -  ", pace="")

    def _step(self, event: dict[str, Any]) -> None:
        loss, norm = f"{event['loss']:.3f}", "skipped" if event["skipped"] else f"{event['norm']:.2f}"
        pace = f"{event['tokens'] / event['seconds']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=event["step"] + 1, loss=loss, norm=norm, pace=pace)
        elif event["step"] in (0, self._steps - 1) or 10 * event["step"] // self._steps > self._shown:
            self._shown = 10 * event["step"] // self._steps
            self.console.print(f"step {event['step'] + 1:>4}/{self._steps}  loss {loss}  norm {norm}  {pace}")

    def _say(self, lines: list[str]) -> None:
        for line in lines:
            self.console.print(line, markup=False)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
