"""`minipar train`: train a GPT on real text, in any combination of cuts.

    minipar train --dp 2 --tp 2 --pp 2
    minipar train --dp 4 --zero 3 --precision bf16 --report r.json

Idea    The options become a `train.TrainConfig` and a `job.Job`; whatever can be refused is refused before a rank is
        started, in one line.
Read    `job.py` after, which runs it.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import fields, replace
from typing import Any

from minipar import inject, quantities
from minipar.arguments import LARGEST, PROGRAM, complain, in_torchrun, number
from minipar.files import as_json, check_outputs, write_whole
from minipar.guard import end_at_once, on_signals
from minipar.link import FORM, asked_network
from minipar.sizes import reads

KEEPING = ("save", "save_aside", "resume", "init", "keep", "restarts", "rollback")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minipar train`."""
    add_cuts(parser.add_argument_group("how the work is cut"))
    add_model(parser.add_argument_group("the model"))
    add_training(parser.add_argument_group("training"))
    slow = parser.add_argument_group("a slow network, on one machine")
    slow.add_argument("--nodes", type=number(1), help="deal the ranks to so many nodes, neighbours together")
    slow.add_argument("--link", metavar="SPEED", help=f"what joins the nodes, {FORM}; see minipar links")
    keeping = parser.add_argument_group("checkpoints")
    keeping.add_argument("--save", metavar="FOLDER", help="write a checkpoint at the end")
    keeping.add_argument("--save-every", type=number(1), metavar="N", help="and every N steps")
    keeping.add_argument("--save-aside", action="store_true", help="write them while training goes on")
    keeping.add_argument("--keep", type=number(1), default=2, metavar="N", help="the last N stay")
    keeping.add_argument("--restarts", type=number(0), default=0, metavar="N",
                         help="go on from the last one, up to N times, when a rank is lost")  # fmt: skip
    keeping.add_argument("--rollback", type=number(1, float), default=0.0, metavar="TIMES",
                         help="go back to the last one when the loss is TIMES what it was")  # fmt: skip
    keeping.add_argument(
        "--inject", action="append", default=[], metavar="FAULT", help=f"make it go wrong: {inject.FORM}"
    )
    keeping.add_argument("--init", metavar="FILE", help="begin with the weights that minipar export has written")
    keeping.add_argument("--resume", metavar="FOLDER", help="go on from its latest checkpoint, up to --steps in all")
    output = parser.add_argument_group("what is told")
    output.add_argument("--report", metavar="FILE", help="write the report as JSON")
    output.add_argument("--log", metavar="FILE", help="write each step, as a line of JSON, as soon as it is over")
    output.add_argument("--tensorboard", metavar="FOLDER", help="and for TensorBoard, with its own library")
    output.add_argument("--peak-flops", type=reads(quantities.speed), metavar="SPEED",
                        help="of each rank, such as 312TFLOP/s: then the log has the MFU")  # fmt: skip
    output.add_argument("--picture", metavar="FILE", help="draw the last step, measured over simulated: .svg or .png")
    output.add_argument("--trace", metavar="FILE", help="write the last steps for Perfetto or chrome://tracing")
    output.add_argument("--json", action="store_true", help="print the report as JSON, and nothing else")


def add_cuts(group: Any) -> None:
    """The options that lay out the ranks."""
    group.add_argument("--dp", type=number(1), help="replicas; each trains on its share of the batch")
    group.add_argument("--tp", type=number(1), help="ranks that share each layer")
    group.add_argument("--pp", type=number(1), help="pipeline stages")
    group.add_argument("--zero", type=number(0), default=0, metavar="STAGE", help="ZeRO stage: 0, 1, 2 or 3")
    group.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved, zb-h1, zb-h2 or naive")
    group.add_argument("--chunks", type=number(1), default=1, help="stages on each rank, for interleaved")
    group.add_argument("--sequence-parallel", action="store_true", help="share the sequence between split layers")


def add_sizes(group: Any, **defaults: int) -> None:
    """The sizes of a model, with these defaults."""
    for name, high, what in (
        ("layers", 100_000, "blocks"),
        ("hidden", LARGEST, "width"),
        ("heads", LARGEST, "attention heads"),
        ("vocab", LARGEST, "size of the vocabulary"),
        ("sequence", LARGEST, "tokens in a row"),
    ):
        group.add_argument(f"--{name}", type=number(1, high=high), default=defaults[name], help=what)


def add_batch(group: Any, *, global_batch: int, micro_batches: int) -> None:
    """The size of the batch and of its parts, with these defaults."""
    group.add_argument(
        "--global-batch", type=number(1, high=10**6), default=global_batch, help="rows of a step, of all replicas"
    )
    group.add_argument(
        "--micro-batches", type=number(1, high=100_000), default=micro_batches, help="parts of each replica's batch"
    )


def add_model(group: Any) -> None:
    """The options that size the model."""
    add_sizes(group, layers=4, hidden=128, heads=4, vocab=1024, sequence=128)
    group.add_argument("--kv-heads", type=number(0), default=0, help="key/value heads; 0: as many as heads")
    group.add_argument("--dropout", type=number(0, float), default=0.0, help="share of activations set to zero")
    group.add_argument("--tied", action="store_true", help="one matrix for embedding and projection")


def add_training(group: Any) -> None:
    """The options that say how long, on what and how it learns."""
    group.add_argument("--steps", type=number(1), default=60, help="updates of the weights")
    add_batch(group, global_batch=16, micro_batches=4)
    group.add_argument("--lr", type=number(0, float), default=2e-3, help="learning rate of AdamW after warm-up")
    group.add_argument("--warmup", type=number(0), default=10, help="steps to reach it")
    group.add_argument("--decay-steps", type=number(0), default=0, help="length of the cosine decay; 0: none")
    group.add_argument("--clip", type=number(0, float), default=1.0, help="largest gradient norm; 0: any")
    group.add_argument("--precision", default="fp32", help="fp32, bf16, fp16 or fp64")
    group.add_argument("--recompute", default="none", help="none, selective or full: keep less, compute it again")
    group.add_argument("--loss-scale", type=number(0, float), default=0.0, help="of fp16, at first; 0: 65,536")
    group.add_argument("--scale-window", type=number(1), default=2000, help="good steps until it is doubled")
    group.add_argument("--seed", type=number(0, high=2**63 - 1), default=0, help="of the weights, batches and dropout")
    group.add_argument("--data", help="a file or folder of text; default: Python's own standard library")
    group.add_argument("--backend", default="", help="gloo or nccl; default: nccl if each rank has a GPU")


def degrees(options: argparse.Namespace) -> dict[str, int]:
    """The mesh that the options ask for: what is not named is 1, and 2 x 2 x 2 if nothing is; under torchrun the
    replicas are as many as its ranks allow."""
    asked = {axis: getattr(options, axis) for axis in ("dp", "pp", "tp")}
    world = int(os.environ["WORLD_SIZE"]) if in_torchrun() else 0
    if not any(asked.values()) and world in (0, 8):
        return {"dp": 2, "pp": 2, "tp": 2}
    found = {axis: degree or 1 for axis, degree in asked.items()}
    if world and not asked["dp"] and world % (found["pp"] * found["tp"]) == 0:
        found["dp"] = world // (found["pp"] * found["tp"])
    return found


def check_train(options: argparse.Namespace) -> tuple[inject.Fault, ...]:
    """Raise `ValueError` for options that contradict each other, before anything is imported; the faults to make."""
    outputs = {name: getattr(options, name) for name in ("report", "trace", "picture", "log")}
    check_outputs(**outputs, inputs={name: getattr(options, name) for name in ("data", "init", "resume")})
    if options.picture:
        from minipar.show import saving

        saving.check_ending(options.picture)
    for name in ("save", "resume", "init", "tensorboard", "data"):
        if getattr(options, name) == "":
            raise ValueError(f"--{name} '' names nothing: name a file or folder, or leave the option out")
    if options.peak_flops and not (options.log or options.tensorboard):
        raise ValueError("--peak-flops is for the MFU in a log: add --log FILE or --tensorboard FOLDER")
    if options.restarts and in_torchrun():
        raise ValueError("torchrun restarts its ranks itself: leave out --restarts, and give torchrun --max-restarts")
    for name in ("save_every", "save_aside", "restarts", "rollback"):
        asked = getattr(options, name)
        if asked and options.save is None:
            value = "" if asked is True else f" {asked:g}"
            raise ValueError(f"--{name.replace('_', '-')}{value} needs checkpoints: add --save FOLDER")
    return tuple(inject.parse(text) for text in options.inject)


def command(options: argparse.Namespace) -> int:
    """`minipar train`: 0, or an error that `guard.py` tells."""
    wrong = check_train(options)
    with on_signals(end_at_once):
        from minipar import checkpoint, job, metrics  # noqa: F401 -- `job` will import it, later than it should
        from minipar.console import Progress
        from minipar.mesh import check_fits, plan
        from minipar.model import GPTConfig
        from minipar.train import TrainConfig
    model = GPTConfig(
        **{name: getattr(options, name) for name in ("layers", "hidden", "heads", "vocab", "sequence")},
        kv_heads=options.kv_heads,
        dropout=options.dropout,
        tied=options.tied,
    )
    taken = {field.name for field in fields(TrainConfig)} & vars(options).keys()
    config = TrainConfig(model=model, **{name: getattr(options, name) for name in taken})
    shape = degrees(options)
    if in_torchrun():
        check_fits(shape, int(os.environ["WORLD_SIZE"]))
    speaks = not in_torchrun() or os.environ["RANK"] == "0"
    with Progress(quiet=options.json or not speaks) as progress:
        kept = {name: getattr(options, name) for name in KEEPING}
        kept |= {"save_every": options.save_every or 0, "inject": wrong, "trace": options.trace is not None}
        kept["log"] = bool(options.log or options.tensorboard)
        kept["network"] = asked_network(options.nodes, options.link, plan(**shape).size)
        made = job.Job(config, plan(**shape), options.data, options.backend, **kept)
        peak, tell = options.peak_flops or 0.0, lambda text: complain(f"{PROGRAM} train: {text}")
        with metrics.Log(options.log, options.tensorboard, peak_flops=peak, complain=tell) as log:
            outcome = job.run(made, told(progress.hear, log.hear))
        if outcome is None:
            return 0
        progress.finish(outcome.report)
    if options.report:
        write_whole(options.report, as_json(outcome.report, indent=1))
    write_pictures(options, config, plan(**shape), outcome)
    if options.json:
        print(as_json(outcome.report), end="")
    return 0


def told(*hearers: Any) -> Any:
    """One hearer of events for several."""

    def hear(event: Any) -> None:
        for one in hearers:
            one(event)

    return hear


def write_pictures(options: argparse.Namespace, config: Any, mesh: Any, outcome: Any) -> None:
    """The files that `--picture` and `--trace` name."""
    from minipar import report, show

    if options.picture:
        title = f"{config.schedule} on {mesh.shape['pp']} real ranks"
        show.report_picture(report.compared(config, mesh, outcome.facts), title).save(options.picture)
    if options.trace:
        spans = [
            [replace(span, rank=rank) for step in facts.spans for span in step]
            for rank, facts in enumerate(outcome.facts)
        ]
        messages = [[message for step in facts.messages for message in step] for facts in outcome.facts]
        start = min(span.start for row in spans for span in row)
        groups = {axis: mesh.groups(axis) for axis in ("dp", "pp", "tp")}
        write_whole(options.trace, show.trace_json(spans, messages, start, groups=groups))
