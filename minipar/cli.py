"""The command line: `minipar train`, `minipar schedule`, `minipar plan` and the others.

Every command has `--help`. What cannot run is refused in one line that says what to change, with exit code 2; a run
that fails exits with 1, one that is interrupted with 130. Under torchrun the first rank of each machine speaks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from minipar import launch
from minipar.arguments import PROGRAM, Parser, number
from minipar.files import as_json, check_writable, write_whole
from minipar.guard import end_at_once, guarded, on_signals, open_streams
from minipar.link import FORM


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit."""
    open_streams()
    if launch.under_torchrun():
        launch.end_with_torchrun()
    with on_signals(end_at_once):
        options = build_parser().parse_args(arguments)
    sys.exit(guarded(options.command, options))


def own_version() -> str:
    """The version that is installed."""
    try:
        return version(PROGRAM)
    except PackageNotFoundError:  # it runs from a checkout
        return "0"


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(prog=PROGRAM, description="Distributed training on real ranks, on one laptop or on many GPUs.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {own_version()}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND", parser_class=Parser)
    add_train(commands)
    add_verify(commands)
    add_bench(commands)
    add_evaluate(commands)
    add_generate(commands)
    add_export(commands)
    add_arithmetic(commands)
    add_links(commands)
    add_course(commands)
    add_doctor(commands)
    return parser


# minipar train


def add_train(commands: Any) -> None:
    """The options of `minipar train`."""
    from minipar import train_command

    parser = commands.add_parser(
        "train",
        help="train a GPT on real text in 3D, and report what happened",
        description="Train a GPT on real text, cut over data, tensor and pipeline parallel ranks. Without --dp, --tp "
        "and --pp: 2 x 2 x 2 = 8 ranks. Under torchrun, on the ranks that it has started.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    train_command.add_arguments(parser)
    parser.set_defaults(command=train_command.command)


# minipar evaluate, minipar generate


def add_evaluate(commands: Any) -> None:
    """The options of `minipar evaluate`."""
    parser = commands.add_parser(
        "evaluate",
        help="the loss of a checkpoint on text that it has not seen",
        description="The loss and the perplexity of a checkpoint on the held-out part of its text, on ranks of any "
        "topology.",
    )
    parser.add_argument("folder", help="that --save has written")
    for axis, what in (("dp", "replicas"), ("tp", "ranks that share each layer"), ("pp", "pipeline stages")):
        parser.add_argument(f"--{axis}", type=number(1), default=1, help=f"{what} (default 1)")
    parser.add_argument("--zero", type=number(0, high=3), default=0, metavar="STAGE", help="ZeRO stage: 0, 1, 2 or 3")
    parser.add_argument("--rows", type=number(1, high=10**6), default=16, help="read at once (default 16)")
    parser.add_argument("--data", help="the text with which it was trained, if that has moved")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, and nothing else")
    parser.set_defaults(command=evaluate)


def evaluate(options: argparse.Namespace) -> int:
    """`minipar evaluate`"""
    with on_signals(end_at_once):
        from minipar import evaluate
        from minipar.mesh import plan
    mesh = plan(dp=options.dp, tp=options.tp, pp=options.pp)
    found = evaluate.evaluate(options.folder, mesh, data=options.data, rows=options.rows, zero=options.zero)
    if options.json:
        print(as_json(found), end="")
    else:
        print(
            f"step {found['step']}: loss {found['loss']:.4f}, perplexity {found['perplexity']:.1f}, over "
            f"{found['tokens']:,} held-out tokens"
        )
    return 0


def add_generate(commands: Any) -> None:
    """The options of `minipar generate`."""
    parser = commands.add_parser(
        "generate",
        help="a sample of what a checkpoint writes",
        description="Let a checkpoint go on from a prompt, token by token.",
    )
    parser.add_argument("folder", help="that --save has written")
    parser.add_argument("--prompt", default="", help="where it begins")
    parser.add_argument("--tokens", type=number(1, high=100_000), default=100, help="to write (default 100)")
    parser.add_argument("--temperature", type=number(0, float, 100), default=0.8, help="0: the likeliest (default 0.8)")
    parser.add_argument("--top-k", type=number(0), default=40, help="among so many; 0: all (default 40)")
    parser.add_argument("--seed", type=number(0, high=2**63 - 1), default=0, help="of the draws (default 0)")
    parser.set_defaults(command=generate)


def generate(options: argparse.Namespace) -> int:
    """`minipar generate`"""
    with on_signals(end_at_once):
        from minipar import evaluate
    names = ("tokens", "temperature", "top_k", "seed")
    print(evaluate.generate(options.folder, options.prompt, **{name: getattr(options, name) for name in names}))
    return 0


# minipar export


def add_export(commands: Any) -> None:
    """The options of `minipar export`."""
    parser = commands.add_parser(
        "export",
        help="whole weights out of a checkpoint",
        description="Put the pieces of a checkpoint together, and write whole weights, by the names of the model, into "
        "one file of safetensors: for other programs, or for minipar train --init.",
    )
    parser.add_argument("folder", help="that --save has written")
    parser.add_argument("file", help="to write, such as weights.safetensors")
    parser.set_defaults(command=export)


def export(options: argparse.Namespace) -> int:
    """`minipar export`"""
    check_writable(options.file)
    with on_signals(end_at_once):
        from minipar import exchange
    number_of_parameters = exchange.export(options.folder, options.file)
    print(f"written: {options.file}, {number_of_parameters:,} parameters")
    return 0


# minipar verify


def add_verify(commands: Any) -> None:
    """The options of `minipar verify`."""
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
    with on_signals(end_at_once):
        from minipar import verify
    rows = verify.command(options.fuzz, options.seed, options.ranks)
    if options.report:
        write_whole(options.report, as_json(rows, indent=1))
    return 0 if all(row["equal"] for row in rows) else 1


# minipar bench


def add_bench(commands: Any) -> None:
    """The options of `minipar bench`."""
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
    with on_signals(end_at_once):
        from minipar import bench
    return bench.command(options)


# minipar schedule, minipar ledger, minipar plan: arithmetic, in files of their own


def add_arithmetic(commands: Any) -> None:
    """The options of the commands that need no ranks."""
    from minipar import ledger_command, plan_command, schedule_command

    for name, home, short, long in (
        (
            "schedule",
            schedule_command,
            "draw, compare and check pipeline schedules",
            "Draw a pipeline schedule in the terminal, compare several, or check one of your own.",
        ),
        (
            "ledger",
            ledger_command,
            "the accounts of a model on a cluster",
            "Compute, memory, communication, data and stability of a training run, by arithmetic: the textbook's "
            "figures, and what real life takes off them.",
        ),
        (
            "plan",
            plan_command,
            "the layout of a model on a cluster, and why",
            "Try every layout of a model on a cluster by arithmetic, drop what does not fit, and explain the fastest: "
            "which bottleneck each cut answers, and what it costs.",
        ),
    ):
        parser = commands.add_parser(name, help=short, description=long)
        home.add_arguments(parser)
        parser.set_defaults(command=home.command)


# minipar links


def add_links(commands: Any) -> None:
    """The options of `minipar links`."""
    from minipar import train_command

    parser = commands.add_parser(
        "links",
        help="layouts of the same ranks over slow links between nodes",
        description="Train on each layout of some ranks, dealt to nodes that a slow link joins: the time of a step, "
        "measured beside predicted.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=number(2, high=64), default=4, help="of all nodes")
    parser.add_argument("--nodes", type=number(2, high=64), default=2, help="machines to deal them to")
    parser.add_argument("--links", default="10gbit,1gbit,200mbit", help=f"between the nodes, each {FORM}")
    parser.add_argument("--layouts", help="by comma: dp4,dp2.tp2; without: all over up to two axes")
    train_command.add_sizes(parser, layers=4, hidden=256, heads=8, vocab=1024, sequence=128)
    train_command.add_batch(parser, global_batch=16, micro_batches=4)
    parser.add_argument("--zero", type=number(0, high=3), default=0, metavar="STAGE", help="ZeRO stage: 0, 1, 2 or 3")
    parser.add_argument("--report", metavar="FILE", help="write the table as JSON")
    parser.add_argument("--json", action="store_true", help="print the table as JSON, and nothing else")
    parser.set_defaults(command=links)


def links(options: argparse.Namespace) -> int:
    """`minipar links`"""
    from minipar.links import command

    return command(options)


# minipar lab, minipar book


def add_course(commands: Any) -> None:
    """The options of the commands that open the lessons."""
    from minipar import book_command, lab_command
    from minipar.grade import command as grading

    for name, add, run, short, long in (
        (
            "lab",
            lab_command.add_arguments,
            lab_command.command,
            "JupyterLab on the lessons",
            "Open JupyterLab at a lesson, on this machine only.",
        ),
        (
            "book",
            book_command.add_arguments,
            book_command.command,
            "the lessons as a site to read",
            "Run the lessons, and make pages of them that need no server; animations play.",
        ),
        (
            "grade",
            grading.add_grade_arguments,
            grading.grade,
            "an answer to an exercise, or a folder of submissions",
            "Run an answer on several ranks, and say what is right and what is wrong.",
        ),
        (
            "exercises",
            grading.add_exercises_arguments,
            grading.exercises,
            "the exercises, your progress, hints",
            "The list with your best marks; an exercise's text, its next hint, our solution after yours has passed.",
        ),
    ):
        parser = commands.add_parser(name, help=short, description=long)
        add(parser)
        parser.set_defaults(command=run)


# minipar doctor


def add_doctor(commands: Any) -> None:
    """The options of `minipar doctor`."""
    parser = commands.add_parser("doctor", help="what this machine can run, checked by running it")
    parser.set_defaults(command=doctor)


def doctor(options: argparse.Namespace) -> int:
    """`minipar doctor`"""
    with on_signals(end_at_once):
        from minipar import doctor
    return doctor.command()
