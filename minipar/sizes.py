"""The options by which `minipar plan` and `minipar ledger` are told of a model and of a cluster.

Idea    Either a name of the catalogue, or a number of parameters (then the usual shape of that size), or the shape
        itself. Numbers are read as people write them: see `quantities.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minipar import catalogue, quantities
from minipar.architecture import WORDS, Architecture, of_size
from minipar.layout import Cluster, Job

MOST = {"layers": 10_000, "hidden": 10_000_000, "heads": 100_000, "vocab": 100_000_000, "kv_heads": 100_000}
MOST_GPUS, LONGEST, LARGEST_BATCH = 1_000_000, 100_000_000, 100_000_000


def reads(read: Callable[[str], float], high: float = 1e30, whole: bool = False) -> Callable[[str], Any]:
    """An argparse type: an amount that `read` understands, at most `high`; with `whole`, a whole number."""

    def value(text: str) -> float | int:
        try:
            found = read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if found > high:
            raise argparse.ArgumentTypeError(f"{text} is out of range: choose at most {high:,.0f}")
        if whole and found != int(found):
            raise argparse.ArgumentTypeError(f"{text} is not a whole number")
        return int(found) if whole else found

    value.__name__ = "amount"
    return value


def add_model(parser: argparse.ArgumentParser) -> None:
    """What is trained."""
    group = parser.add_argument_group("the model: by name, by size or by shape")
    group.add_argument("--model", metavar="NAME", help=f"{', '.join(catalogue.MODELS)}")
    group.add_argument("--params", type=reads(quantities.count, 1e15), help="parameters: 7B, 70e9, 1T")
    for name, what in (
        ("layers", "blocks"),
        ("hidden", "width"),
        ("heads", "attention heads (default: hidden / 128)"),
        ("kv-heads", "key/value heads (default: as many as heads)"),
        ("vocab", f"size of the vocabulary (default {WORDS:,})"),
    ):
        most = MOST[name.replace("-", "_")]
        group.add_argument(f"--{name}", type=reads(quantities.count, most, whole=True), help=what)
    group.add_argument("--inner", type=reads(quantities.count, 1e8, whole=True), help="width of the MLP (default 4 x)")
    group.add_argument("--gated", action="store_true", help="a gated MLP, of three matrices")


def model_of(options: argparse.Namespace, sequence: int) -> Architecture:
    """The model that the options name. Raises `ValueError`, one line, where they contradict each other."""
    shape = {
        name: getattr(options, name) for name in ("hidden", "heads", "kv_heads", "inner") if getattr(options, name)
    }
    named = [options.model is not None, options.params is not None, options.layers is not None or bool(shape)]
    if sum(named) > 1:
        raise ValueError("a model has one description: give --model, or --params, or --layers and --hidden")
    if options.model is not None:
        return catalogue.model(options.model)
    if options.params is not None:
        return of_size(options.params, vocab=options.vocab or WORDS, sequence=sequence)
    if not (options.layers and options.hidden):
        raise ValueError("which model? give --params 7B, or --model llama3-8b, or --layers 32 --hidden 4096")
    heads = options.heads or max(1, options.hidden // 128)
    made = Architecture(
        "model", options.layers, options.hidden, heads, options.vocab or WORDS, options.kv_heads or 0,
        options.inner or 0, positions=sequence, gated=options.gated,
    )  # fmt: skip
    return replace(made, name=f"{made.parameters / 1e9:.3g}B")


def add_cluster(parser: argparse.ArgumentParser, *, gpu: str | None = None, gpus: int | None = None) -> None:
    """What it is trained on."""
    group = parser.add_argument_group("the cluster")
    default = f" (default {gpu})" if gpu else ""
    group.add_argument("--gpu", default=gpu, metavar="NAME", help=f"{', '.join(catalogue.GPUS)}{default}")
    group.add_argument(
        "--gpus", type=reads(quantities.count, MOST_GPUS, whole=True), default=gpus, help="how many in all"
    )
    group.add_argument(
        "--gpus-per-node", type=reads(quantities.count, 1024, whole=True), default=8, help="in a machine (default 8)"
    )
    links = f"{', '.join(catalogue.LINKS)}, or 400Gb/s"
    group.add_argument("--inside", metavar="LINK", help=f"what joins the GPUs of a machine: {links}")
    group.add_argument("--outside", metavar="LINK", help="what each GPU has to other machines, likewise")


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The cluster that the options name, with the links that its GPU usually has."""
    gpu = catalogue.gpu(options.gpu)
    inside, outside = (catalogue.link(text) for text in (options.inside or gpu.inside, options.outside or gpu.outside))
    gpus, per_node = options.gpus, options.gpus_per_node
    if gpus > per_node and gpus % per_node:
        raise ValueError(
            f"{gpus:,} GPUs are no whole machines of {per_node}: choose {gpus // per_node * per_node:,} or "
            f"{-(-gpus // per_node) * per_node:,} GPUs, or other --gpus-per-node"
        )
    return Cluster(gpu, gpus, per_node, inside, outside)


def add_job(parser: argparse.ArgumentParser, *, sequence: int, global_batch: int) -> None:
    """How it is trained."""
    group = parser.add_argument_group("training")
    group.add_argument(
        "--sequence", type=reads(quantities.count, LONGEST, whole=True), default=sequence,
        help=f"tokens in a row (default {sequence:,})",
    )  # fmt: skip
    group.add_argument(
        "--global-batch", type=reads(quantities.count, LARGEST_BATCH, whole=True), default=global_batch,
        help=f"rows of a step (default {global_batch:,})",
    )  # fmt: skip
    group.add_argument("--tokens", type=reads(quantities.count, 1e18), help="of the whole run: 300B, 1T, 15e12")
    group.add_argument(
        "--attention", choices=("flash", "plain"), default="flash",
        help="plain attention writes its scores to memory (default flash)",
    )  # fmt: skip


def job_of(options: argparse.Namespace) -> Job:
    """The training that the options name."""
    model = model_of(options, options.sequence)
    if 0 < model.positions < options.sequence:
        raise ValueError(
            f"{model.name} has learned {model.positions:,} positions: choose --sequence {model.positions} or less"
        )
    return Job(model, options.sequence, options.global_batch, flash=options.attention == "flash")


def described(model: Architecture) -> str:
    """'70B: 88 layers of hidden 8,192, 64 heads, vocabulary 51,200: 71.3 billion parameters'."""
    return (
        f"{model.name}: {model.layers:,} layers of hidden {model.hidden:,}, {model.heads:,} heads, vocabulary "
        f"{model.vocab:,}: {model.parameters / 1e9:,.4g} billion parameters"
    )
