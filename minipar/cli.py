"""The command line: `minipar train`, `minipar verify`, `minipar bench`, `minipar doctor`.

Every command has `--help`. What cannot run is refused in one line that says what to change, with exit code 2; a run
that fails exits with 1. Under torchrun the first rank alone speaks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

PROGRAM = "minipar"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    sys.exit(guarded(options.command, options))


def guarded(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run the command; turn what goes wrong into one readable message and an exit code."""
    from minipar.faults import RankError

    try:
        return command(options)
    except KeyboardInterrupt:
        complain(options, "interrupted: all ranks have ended")
        return 130
    except BrokenPipeError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RankError as error:
        complain(options, str(error))
        return 1
    except (ValueError, OSError) as error:
        complain(options, " ".join(str(error).split()))
        return 2


def complain(options: argparse.Namespace, text: str) -> None:
    """One line to standard error; of torchrun's ranks, from the first alone."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{PROGRAM} {options.name}: {text}", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """argparse, whose complaints are one line and come from torchrun's first rank only."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr, flush=True)
        sys.exit(2)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(prog=PROGRAM, description="Distributed training on real ranks, on one laptop or on many GPUs.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND", parser_class=Parser)
    add_train(commands)
    add_verify(commands)
    add_bench(commands)
    add_doctor(commands)
    return parser


def number(low: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """An argparse type: a number from `low` on."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' if kind is int else ''}number") from None
        if not low <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is out of range: choose from {low:g} up")
        return value

    read.__name__ = "number"
    return read


# minipar train


def add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a GPT on real text in 3D, and report what happened",
        description="Train a GPT on real text, cut over data, tensor and pipeline parallel ranks. Without --dp, --tp "
        "and --pp: 2 x 2 x 2 = 8 ranks. Under torchrun, on the ranks that it has started.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    cuts = parser.add_argument_group("how the work is cut")
    cuts.add_argument("--dp", type=number(1), help="replicas; each trains on its share of the batch")
    cuts.add_argument("--tp", type=number(1), help="ranks that share each layer")
    cuts.add_argument("--pp", type=number(1), help="pipeline stages")
    cuts.add_argument("--zero", type=number(0), default=0, metavar="STAGE", help="ZeRO over the replicas: 0, 1, 2 or 3")
    cuts.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved, zb-h1 or naive")
    cuts.add_argument("--micro-batches", type=number(1), default=4, help="parts of each replica's batch")
    cuts.add_argument("--chunks", type=number(1), default=1, help="stages on each rank, for interleaved")
    cuts.add_argument("--sequence-parallel", action="store_true", help="share the sequence between split layers")
    model = parser.add_argument_group("the model")
    for name, value, what in (
        ("layers", 4, "blocks"),
        ("hidden", 128, "width"),
        ("heads", 4, "attention heads"),
        ("vocab", 1024, "size of the vocabulary"),
        ("sequence", 128, "tokens in a row"),
    ):
        model.add_argument(f"--{name}", type=number(1), default=value, help=what)
    model.add_argument("--kv-heads", type=number(0), default=0, help="key/value heads; 0: as many as heads")
    model.add_argument("--dropout", type=number(0, float), default=0.0, help="share of activations set to zero")
    model.add_argument("--tied", action="store_true", help="one matrix for embedding and projection")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=number(1), default=60)
    training.add_argument("--global-batch", type=number(1), default=16, help="rows of a step, over all replicas")
    training.add_argument("--lr", type=number(0, float), default=2e-3, help="learning rate of AdamW after warm-up")
    training.add_argument("--warmup", type=number(0), default=10, help="steps to reach it")
    training.add_argument("--decay-steps", type=number(0), default=0, help="length of the cosine decay; 0: none")
    training.add_argument("--clip", type=number(0, float), default=1.0, help="largest gradient norm; 0: any")
    training.add_argument("--precision", default="fp32", help="fp32 or fp64")
    training.add_argument("--seed", type=number(0), default=0)
    training.add_argument("--data", help="a file or folder of text; default: Python's own standard library")
    training.add_argument("--backend", default="", help="gloo or nccl; default: nccl if each rank has a GPU")
    keeping = parser.add_argument_group("checkpoints")
    keeping.add_argument("--save", metavar="FOLDER", help="write a checkpoint at the end")
    keeping.add_argument("--save-every", type=number(1), metavar="N", help="and every N steps")
    keeping.add_argument("--resume", metavar="FOLDER", help="go on from its latest checkpoint, up to --steps in all")
    output = parser.add_argument_group("what is told")
    output.add_argument("--report", metavar="FILE", help="write the report as JSON")
    output.add_argument("--json", action="store_true", help="print the report as JSON, and nothing else")
    parser.set_defaults(command=train)


def degrees(options: argparse.Namespace) -> dict[str, int]:
    """The mesh that the options ask for: what is not named is 1, and 2 x 2 x 2 if nothing is; under torchrun the
    replicas are as many as its ranks allow."""
    asked = {axis: getattr(options, axis) for axis in ("dp", "pp", "tp")}
    world = int(os.environ.get("WORLD_SIZE", 0)) if "RANK" in os.environ else 0
    if not any(asked.values()) and world in (0, 8):
        return {"dp": 2, "pp": 2, "tp": 2}
    found = {axis: degree or 1 for axis, degree in asked.items()}
    if world and not asked["dp"] and world % (found["pp"] * found["tp"]) == 0:
        found["dp"] = world // (found["pp"] * found["tp"])
    return found


def train(options: argparse.Namespace) -> int:
    """`minipar train`"""
    from minipar import job
    from minipar.mesh import check_fits, plan
    from minipar.model import GPTConfig
    from minipar.train import TrainConfig

    for path in (options.report,):
        check_writable(path)
    model = GPTConfig(
        **{name: getattr(options, name) for name in ("layers", "hidden", "heads", "vocab", "sequence")},
        kv_heads=options.kv_heads,
        dropout=options.dropout,
        tied=options.tied,
    )
    taken = {field.name for field in fields(TrainConfig)} & vars(options).keys()
    config = TrainConfig(model=model, **{name: getattr(options, name) for name in taken})
    shape = degrees(options)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        check_fits(shape, int(os.environ["WORLD_SIZE"]))
    from minipar.console import Progress

    with Progress(quiet=options.json) as progress:
        kept = {"save": options.save, "save_every": options.save_every or 0, "resume": options.resume}
        report = job.run(job.Job(config, plan(**shape), options.data, options.backend, **kept), progress.hear)
        if report is None:
            return 0
        progress.finish(report)
    if options.report:
        write_atomically(options.report, json.dumps(report, indent=1) + "\n")
    if options.json:
        print(json.dumps(report))
    return 0


# minipar verify


def add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="every topology against one process",
        description="Train the same model on many topologies and in one plain process in float64, and compare losses, "
        "gradients and weights. Exit code 1 if any differ by more than 1e-9 relative.",
    )
    parser.add_argument("--fuzz", type=number(1), metavar="N", help="draw N topologies, options and sizes at random")
    parser.add_argument("--seed", type=number(0), default=0, help="of the draws")
    parser.add_argument("--ranks", type=number(1), default=8, help="at most so many ranks (default 8)")
    parser.add_argument("--report", metavar="FILE", help="write the rows as JSON")
    parser.set_defaults(command=verify)


def verify(options: argparse.Namespace) -> int:
    """`minipar verify`"""
    check_writable(options.report)
    from minipar import verify

    rows = verify.command(options.fuzz, options.seed, options.ranks)
    if options.report:
        write_atomically(options.report, json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["equal"] for row in rows) else 1


# minipar bench


def add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="minipar beside what you would use instead, as ratios",
        description="Step times beside those of torch's own DDP, ZeroRedundancyOptimizer, fully_shard, DTensor and "
        "pipelining, taken in turn on the same ranks.",
    )
    parser.add_argument("--only", metavar="WORK", help="some of dp, zero1, zero2, zero3, tp, pp, by comma")
    parser.add_argument("--pairs", type=number(1), help="timed pairs of steps for each comparison")
    parser.add_argument("--report", metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, and nothing else")
    parser.set_defaults(command=bench)


def bench(options: argparse.Namespace) -> int:
    """`minipar bench`"""
    check_writable(options.report)
    from minipar import bench

    return bench.command(options)


# minipar doctor


def add_doctor(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="what this machine can run, checked by running it")
    parser.set_defaults(command=doctor)


def doctor(options: argparse.Namespace) -> int:
    """`minipar doctor`"""
    from minipar import doctor

    return doctor.command()


# Files.


def check_writable(path: str | None) -> None:
    """Raise `ValueError` now, not after the run, if `path` could not be written."""
    if path is None:
        return
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(13, "no permission to write it")
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error.strerror}): choose another place") from None


def write_atomically(path: str, text: str) -> None:
    """The whole file or nothing: a reader never sees half of it."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
