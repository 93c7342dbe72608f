"""`minipar schedule`: draw a schedule, compare several, or check one's own.

    minipar schedule 1f1b --stages 4 --micro-batches 8
    minipar schedule --compare gpipe,1f1b,interleaved,zb-h1
    minipar schedule --file my_schedule.txt --svg my_schedule.svg
    minipar schedule 1f1b --measure

Idea    A schedule is data, so it is drawn, timed and refused before any rank exists. Costs are of all layers of a rank:
        where it has several stages (chunks), each takes its share, so that all schedules do the same work. With
        `--measure` ranks run it, too, and sleep as long as an action costs: what is measured stands beside the rest.
Read    `schedule.py`, `simulate.py` and `paced.py` for what is computed here, `show/` for how it is drawn.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from minipar import schedule as schedules
from minipar.facts import Timeline
from minipar.files import as_json, check_ending, check_outputs, write_whole
from minipar.order import Schedule, ScheduleError, Send, messages
from minipar.show import palette, reading, terminal, units, words
from minipar.show.animation import animate
from minipar.show.drawing import Drawing
from minipar.show.overlays import overlay
from minipar.show.timelines import compare, timeline
from minipar.simulate import simulate

MOST_ACTIONS = 400_000
LONGEST_MEASURE = 600  # seconds
LARGEST_FILE = 1 << 20  # bytes of a typed schedule
EXAMPLE = "rank 0  F0 F1 B0 B1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minipar schedule`."""
    from minipar.arguments import number

    parser.add_argument("schedule", nargs="?", help=f"which to draw: {', '.join(schedules.NAMES)}")
    parser.add_argument("--compare", metavar="NAMES", help="a table of several, by comma: gpipe,1f1b,interleaved,zb-h1")
    parser.add_argument(
        "--file", help="your own: a row for each rank, such as 'rank 0  F0 F1 B0 B1'; - reads the input"
    )
    shape = parser.add_argument_group("the pipeline")
    shape.add_argument("--stages", type=number(1, high=1024), help="ranks of the pipeline (default 4)")
    shape.add_argument("--micro-batches", type=number(1, high=100_000), help="parts of the batch (default 8)")
    shape.add_argument("--chunks", type=number(1, high=64), help="stages on each rank, for interleaved (default 2)")
    costs = parser.add_argument_group("what things cost, in seconds, for all layers of a rank and one micro-batch")
    for name, cost, what in (
        ("forward", 1.0, "a forward"),
        ("backward", 1.0, "the gradient of the input"),
        ("weight", 1.0, "the gradient of the weights: part of B where the schedule has no W"),
        ("send", 0.0, "a message from rank to rank"),
    ):
        costs.add_argument(f"--{name}", type=number(0, float, 10**9), default=cost, help=f"{what} (default {cost:g})")
    costs.add_argument(
        "--measure",
        nargs="?",
        type=number(1, float, 10**6),
        const=20.0,
        metavar="MS",
        help="run it on real ranks as well, which sleep MS milliseconds for each second of these costs (default 20)",
    )
    output = parser.add_argument_group("what is told")
    output.add_argument("--json", action="store_true", help="print the answer as JSON, and nothing else")
    for ending, what in (("svg", "the picture"), ("png", "the picture in pixels"), ("html", "a page that plays")):
        output.add_argument(f"--{ending}", metavar="FILE", help=f"write {what}")


@dataclass(frozen=True)
class Run:
    """A schedule, what it will do, and what it did on real ranks."""

    name: str
    order: Schedule
    timeline: Timeline
    measured: Timeline | None = None


def command(options: argparse.Namespace) -> int:
    """`minipar schedule`: 0 if all went well, 2 for a schedule that cannot run (then its faults are printed)."""
    check_outputs(**{ending: getattr(options, ending) for ending in ("svg", "png", "html")})
    for ending in ("svg", "png", "html"):
        check_ending(getattr(options, ending), f".{ending}")
    try:
        runs = [run(order, options) for order in asked(options)]
    except ScheduleError as error:
        print(f"minipar schedule: {error}", file=sys.stderr, flush=True)
        return 2
    if options.measure:
        check_time(runs, options)
        runs = [measure(one, options) for one in runs]
    save(runs, options)
    if options.json:
        print(as_json([facts(one) for one in runs] if options.compare else facts(runs[0])), end="")
    else:
        show(runs, options)
    return 0


# What is asked for.


def asked(options: argparse.Namespace) -> list[Schedule]:
    """The schedules that the options name. Raises `ValueError` where they contradict each other."""
    named = [options.schedule, options.compare, options.file]
    if sum(name is not None for name in named) != 1:
        what = "more than one thing" if any(named) else "nothing"
        raise ValueError(f"{what} to draw: name a schedule (such as 1f1b), or --compare NAMES, or --file FILE")
    if options.file is not None:
        return [read_file(options)]
    names = [options.schedule] if options.schedule is not None else list(filter(None, options.compare.split(",")))
    if not names:
        raise ValueError(f"--compare {options.compare!r} names no schedule: choose from {', '.join(schedules.NAMES)}")
    return [by_name(name.strip(), options) for name in names]


def by_name(name: str, options: argparse.Namespace) -> Schedule:
    """A schedule of the asked size. Chunks are for interleaved alone; others of a comparison do without."""
    stages, micro_batches, chunks = options.stages or 4, options.micro_batches or 8, options.chunks
    check_size(stages, micro_batches, chunks or 1)
    if name == "interleaved":
        return schedules.by_name(name, stages, micro_batches, chunks or 2)
    return schedules.by_name(name, stages, micro_batches, 1 if options.compare else chunks or 1)


def check_size(stages: int, micro_batches: int, chunks: int) -> None:
    """Raise `ValueError` for a schedule that would take minutes to draw."""
    actions = 3 * stages * micro_batches * chunks
    if actions > MOST_ACTIONS:
        raise ValueError(
            f"{stages} stages x {micro_batches:,} micro-batches are up to {actions:,} actions, more than "
            f"{MOST_ACTIONS:,}: choose fewer micro-batches; the bubble of m of them is (stages - 1) / m"
        )


def read_file(options: argparse.Namespace) -> Schedule:
    """A typed schedule, that can run. Raises `ScheduleError` with all its faults."""
    for name in ("stages", "micro_batches", "chunks"):
        if getattr(options, name) is not None:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} {getattr(options, name)} with --file: the file says its {option} itself")
    path = options.file
    data = sys.stdin.buffer.read(LARGEST_FILE + 1) if path == "-" else read_bytes(path)
    if len(data) > LARGEST_FILE:
        raise ValueError(
            f"{path} has more than {units.size(LARGEST_FILE)}: name the text of a schedule, like {EXAMPLE!r}"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text: name the text of a schedule, like {EXAMPLE!r}") from None
    order = schedules.parse(text, name="typed" if path == "-" else Path(path).stem).validate()
    if not order.size:
        raise ValueError(f"{path} has no actions: write some, like {EXAMPLE!r}")
    return order


def read_bytes(path: str) -> bytes:
    """The file, as far as a schedule may be long."""
    try:
        with open(path, "rb") as file:
            return file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot read {path!r} ({why}): name the text of a schedule, like {EXAMPLE!r}") from None


def run(order: Schedule, options: argparse.Namespace) -> Run:
    """What the schedule will do at the asked costs, each stage having its share of the rank's layers."""
    v = order.chunks
    seen = simulate(order, options.forward / v, options.backward / v, options.weight / v, options.send)
    if seen.duration <= 0:
        raise ValueError("--forward, --backward and --weight are all 0: give at least one of them some seconds")
    return Run(reading.name_of(order), order, seen)


def check_time(runs: list[Run], options: argparse.Namespace) -> None:
    """Raise `ValueError` where measuring would take very long, or messages are to cost what they don't."""
    from minipar import paced  # with torch, which drawing alone does not need

    seconds = sum(one.timeline.duration for one in runs) * options.measure / 1e3 * paced.STEPS
    if seconds > LONGEST_MEASURE:
        raise ValueError(
            f"--measure {options.measure:g} would take {units.time(seconds)}: choose fewer milliseconds or "
            "micro-batches, or lower costs"
        )
    if options.send:
        raise ValueError(f"--send {options.send:g} with --measure: messages between real ranks take their own time")


def measure(one: Run, options: argparse.Namespace) -> Run:
    """Have real ranks run it, and read their clocks in the unit of the costs."""
    from minipar import paced

    scale = options.measure / 1e3
    costs = (cost * scale / one.order.chunks for cost in (options.forward, options.backward, options.weight))
    seen = paced.measure(one.order, *costs)
    spans = (replace(span, start=span.start / scale, end=span.end / scale) for span in seen.spans)
    return replace(one, measured=Timeline(tuple(spans), seen.ranks))


# What is answered.


def facts(one: Run) -> dict[str, Any]:
    """The answer for programs. Times are in seconds; `held` is in micro-batches on one stage."""
    order, seen = one.order, one.timeline
    return {
        "schedule": order.name,
        "ranks": order.ranks,
        "stages": order.stages,
        "chunks": order.chunks,
        "micro_batches": order.micro_batches,
        "bubble": seen.bubble,
        "duration": seen.duration,
        "held": seen.peak_activations(),
        "held_whole": held_whole(one),
        "messages_per_step": sends(order),
        "actions": [[str(action) for action in row] for row in order.actions],
        "spans": listed(seen),
    } | ({"measured": measured_facts(one.measured)} if one.measured else {})


def measured_facts(seen: Timeline) -> dict[str, Any]:
    """What real ranks did, in the unit of the costs."""
    return {"bubble": seen.bubble, "duration": seen.duration, "spans": listed(seen)}


def listed(seen: Timeline) -> list[dict[str, Any]]:
    """The spans of a timeline for programs."""
    return [{**asdict(span), "kind": span.kind.value} for span in seen.spans]


def held_whole(one: Run) -> float:
    """The most that any rank holds, in micro-batches of all its layers: with v stages, v of them make one."""
    return max(one.timeline.peak_activations(1 / one.order.chunks))


def sends(order: Schedule) -> int:
    """Messages of one step, over all ranks."""
    return sum(isinstance(step, Send) for row in messages(order) for step in row)


def save(runs: list[Run], options: argparse.Namespace) -> None:
    """The pictures that were asked for."""
    if options.svg or options.png:
        drawing = draw(runs)
        for path, make in ((options.svg, drawing.to_svg), (options.png, drawing.to_png)):
            if path:
                write_whole(path, make())
    if options.html:
        playing = animate(runs[0].timeline, runs[0].name, send=options.send) if len(runs) == 1 else draw(runs)
        write_whole(options.html, playing.to_html())


def draw(runs: list[Run]) -> Drawing:
    """One timeline, the measured over the predicted if there is one; or all on one time axis."""
    if len(runs) == 1 and runs[0].measured:
        return overlay(runs[0].measured, runs[0].timeline, runs[0].name)
    if len(runs) == 1:
        return timeline(runs[0].timeline, runs[0].name)
    return compare([one.timeline for one in runs], [one.name for one in runs])


def show(runs: list[Run], options: argparse.Namespace) -> None:
    """The answer for people, on a terminal in colour and as wide as it is, elsewhere in 80 columns."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else terminal.COLUMNS)
    if options.compare:
        console.print(message(runs) + "\n", markup=False)
        console.print(table(runs))
    else:
        console.print(coloured(runs[0], min(console.width, 200)), soft_wrap=True)
        if runs[0].measured:
            console.print(measured_lines(runs[0], options.measure), markup=False, soft_wrap=True)
    for path in filter(None, (options.svg, options.png, options.html)):
        console.print(f"written: {path}", markup=False, soft_wrap=True)


def coloured(one: Run, columns: int) -> Text:
    """The drawing of `terminal.text`, each kind of action on its colour, and the number of messages."""
    styles = {kind: Style(color=palette.ink_on(fill), bgcolor=fill) for kind, fill in palette.FILL.items()}
    text = Text()
    for line in terminal.lines(one.timeline, one.name, columns):
        for cell in line:
            text.append(cell.text, styles[cell.kind] if cell.kind else None)
        text.append("\n")
    return text.append(f"{'sends':6}  {units.count(sends(one.order), 'message')} in a step")


def measured_lines(one: Run, milliseconds: float) -> str:
    """What real ranks took, beside what was predicted."""
    seen, expected = one.measured, one.timeline
    assert seen is not None
    longer = seen.duration / expected.duration - 1
    return (
        f"\nmeasured on {units.count(one.order.ranks, 'real rank')}, asleep {milliseconds:g} ms for a second:\n"
        f"bubble  {units.share(seen.bubble)}, predicted {units.share(expected.bubble)}\n"
        f"step    {seen.duration:.2f} s, predicted {expected.duration:.2f} s ({longer:+.1%})"
    )


def message(runs: list[Run]) -> str:
    """What the table shows."""
    first = runs[0].order
    said = words.comparison([one.timeline for one in runs], [one.name for one in runs])
    return f"{units.count(first.ranks, 'rank')}, {first.micro_batches:,} micro-batches: {said}"


def table(runs: list[Run]) -> Table:
    """A row for each schedule."""
    found = Table(box=None, pad_edge=False, caption_justify="left")
    measured = ("measured",) if runs[0].measured else ()
    for heading in ("schedule", "bubble", *measured, "step", "held at most", "messages"):
        found.add_column(heading, justify="left" if heading == "schedule" else "right")
    unit = units.unit_for(max(one.timeline.duration for one in runs))
    for one in runs:
        chunks = one.order.chunks
        found.add_row(
            one.name if chunks == 1 else f"{one.name}, {chunks} chunks",
            units.share(one.timeline.bubble),
            *([units.share(one.measured.bubble)] if one.measured else []),
            units.time(one.timeline.duration, unit),
            units.plain(held_whole(one)),
            f"{sends(one.order):,}",
        )
    found.caption = "bubble: idle / busy time. held: micro-batches of a rank's layers."
    if measured:
        found.caption += "\nmeasured: the bubble on real ranks that sleep as long as an action costs."
    return found
