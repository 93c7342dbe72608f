"""`minipar links`: layouts of the same ranks over links of several speeds, measured beside predicted.

    minipar links
    minipar links --ranks 2 --links 10gbit,1gbit,100mbit --hidden 512

Idea    Each layout trains the same model on the same rows. First at full speed; then by the way that messages between
        nodes take, but not held back: what the ranks launch and wait for then says, by `replay.py`, what a step will
        take over each link. Then over each link, on real messages. What decides
        is what crosses between the nodes: of tensor parallel the activations, several times for every layer and
        micro-batch, so that its bytes grow with the tokens of a step; of data parallel the gradients, which grow with
        the parameters, once a step; of a pipeline the activations at one border.
Cost    A minute or two.
Read    `link.py` and `replay.py` before.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median
from time import perf_counter
from typing import Any

from minipar import launch, link, replay
from minipar.batches import RandomBatches
from minipar.files import as_json, check_writable, write_whole
from minipar.mesh import Mesh, plan
from minipar.model import GPTConfig
from minipar.train import Engine, TrainConfig, check

WARM_UP, STEPS = 3, 5


@dataclass(frozen=True)
class Cell:
    """Seconds of a step over one link."""

    link: str
    measured: float
    predicted: float


@dataclass(frozen=True)
class Row:
    """A layout; seconds of a step at full speed, and over each link."""

    layout: str
    full_speed: float
    cells: list[Cell]


def take(mesh: Mesh, engine: Engine, batch: Any) -> replay.Step:
    """A step that all ranks begin together: when it began and ended, and its messages."""
    messages = mesh.world.wire.messages
    mesh.world.barrier()
    messages.clear()
    begin = perf_counter()
    engine.step(batch)
    return replay.Step(begin, perf_counter(), list(messages))


def on_rank(mesh: Mesh, config: TrainConfig, links: Sequence[link.Link], nodes: int) -> list[list[replay.Step]]:
    """Steps at full speed; then for each link steps unhindered and steps over it, in turn, so that both see the same
    moods of the machine."""
    engine, model = Engine(mesh, config), config.model
    batches = RandomBatches(vocab=model.vocab, sequence=model.sequence, global_batch=config.global_batch)
    rows = config.global_batch // mesh.dp.size
    batch = batches.rows(0, mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows)
    answer = [[take(mesh, engine, batch) for _ in range(WARM_UP + STEPS)][WARM_UP:]]
    for one in links:
        free, held = list[replay.Step](), list[replay.Step]()
        for _ in range(1 + STEPS):
            for speed, steps in ((link.UNHINDERED, free), (one, held)):
                with link.through(mesh.world, link.Network(nodes, mesh.size, speed)):
                    steps.append(take(mesh, engine, batch))
        answer += [free[1:], held[1:]]
    return answer


def seconds_of(steps: Sequence[replay.Step]) -> float:
    """A step of all ranks, as long as its slowest."""
    return max(step.end - step.begin for step in steps)


def measure(mesh: Mesh, config: TrainConfig, links: Sequence[link.Link], nodes: int) -> Row:
    """A layout over each link, on real ranks."""
    with launch.World(mesh, backend="gloo", timeout=None) as world:
        by_rank = world.run(on_rank, config, links, nodes)
    full, *pairs = [list(zip(*steps, strict=True)) for steps in zip(*by_rank, strict=True)]
    cells = []
    for one, free, held in zip(links, pairs[::2], pairs[1::2], strict=True):
        network = link.Network(nodes, mesh.size, one)
        predicted = median(replay.predict(step, cache(mesh.members), network) for step in free)
        cells.append(Cell(str(one), median(map(seconds_of, held)), predicted))
    return Row(name_of(mesh), median(map(seconds_of, full)), cells)


def name_of(mesh: Mesh) -> str:
    """'dp2 tp2'."""
    return " ".join(f"{axis}{size}" for axis, size in mesh.shape.items() if size > 1) or "one rank"


def layouts(ranks: int, config: TrainConfig) -> list[Mesh]:
    """Every way to lay out so many ranks over at most two axes, of those that the model allows."""
    found = []
    for tp in range(1, ranks + 1):
        for pp in range(1, ranks // tp + 1):
            if ranks % (tp * pp) or (tp > 1 and pp > 1 and tp * pp < ranks):
                continue
            mesh = plan(dp=ranks // (tp * pp), pp=pp, tp=tp)
            try:
                check(config, mesh.shape)
            except ValueError:
                continue
            found.append(mesh)
    return found


def parse_layout(text: str) -> Mesh:
    """'dp2 tp2' or 'dp2.tp2'. Raises `ValueError` for anything else."""
    parts = re.split(r"[ .x]+", text.strip())
    found = [re.fullmatch(r"(dp|pp|tp)([1-9]\d?)", part) for part in parts]
    if not all(found) or len({one[1] for one in found if one}) < len(parts):
        raise ValueError(f"layout {text!r}: give degrees such as dp4 or dp2.tp2")
    return plan(**{one[1]: int(one[2]) for one in found if one})


# The command.


def command(options: Namespace) -> int:
    """`minipar links`"""
    if launch.under_torchrun():
        raise ValueError("minipar links starts ranks of its own: call it without torchrun")
    check_writable(options.report)
    links = [link.parse(text) for text in options.links.split(",")]
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "heads", "vocab", "sequence")}
    config = TrainConfig(
        model=GPTConfig(**sizes),
        global_batch=options.global_batch,
        micro_batches=options.micro_batches,
        zero=options.zero,
        warmup=0,
    )
    link.Network(options.nodes, options.ranks, links[0])
    asked = None if options.layouts is None else [parse_layout(text) for text in options.layouts.split(",")]
    meshes = asked if asked is not None else layouts(options.ranks, config)
    for mesh in meshes:
        if mesh.size != options.ranks:
            raise ValueError(f"layout {name_of(mesh)} has {mesh.size} ranks and not {options.ranks}: add --ranks")
        check(config, mesh.shape)
    if not meshes:
        raise ValueError(f"no layout of {options.ranks} ranks fits this model: choose other sizes, or --layouts")
    say: Callable[[str], None] = (lambda text: None) if options.json else lambda text: print(text, flush=True)
    say(heading(options, config, links))
    rows = []
    for mesh in meshes:
        rows.append(measure(mesh, config, links, options.nodes))
        say(line(rows[-1]))
    say("\n" + note(rows))
    answer: Any = [asdict(row) for row in rows]
    if options.report:
        write_whole(options.report, as_json(answer, indent=1))
    if options.json:
        print(as_json(answer, indent=1), end="")
    return 0


def heading(options: Namespace, config: TrainConfig, links: Sequence[link.Link]) -> str:
    """What is measured, and the head of the table."""
    model = config.model
    return (
        f"{options.ranks} ranks on {options.nodes} nodes. A step of {config.global_batch} x {model.sequence} tokens, "
        f"{model.layers} layers, hidden {model.hidden}.\n"
        "Milliseconds of a step: at full speed; over a link measured / predicted.\n\n"
        f"{'layout':<10}{'full':>6}" + "".join(f"{one!s:>18}" for one in links)
    )


def line(row: Row) -> str:
    """A row of the table."""
    cells = (
        f"{1e3 * cell.measured:.0f} /{1e3 * cell.predicted:5.0f} {cell.predicted / cell.measured - 1:+4.0%}"
        for cell in row.cells
    )
    return f"{row.layout:<10}{1e3 * row.full_speed:>6.0f}" + "".join(f"{cell:>18}" for cell in cells)


def note(rows: Sequence[Row]) -> str:
    """Which layout is the fastest at each speed."""
    best = lambda key: min(rows, key=key).layout
    lines = [f"fastest at full speed: {best(lambda row: row.full_speed)}"]
    for place, cell in enumerate(rows[0].cells):
        lines.append(f"fastest over {cell.link}: {best(lambda row, place=place: row.cells[place].measured)}")
    return "\n".join(lines)
