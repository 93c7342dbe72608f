"""Every topology against one process.

Idea    `reference` trains the plain model in one process, in float64, with torch's own loss, clipping and AdamW, and
        with none of the cuts. `train_and_part` trains the same on ranks, and `together` puts gradients and weights
        together again. The two must agree: in float64 to 1e-9 relative. Gradients are compared, not only losses:
        under Adam a gradient that is too large by a constant factor would not show in any loss. The bytes that each
        rank has sent must be those that the ledger predicts, exactly.

Read    `train.py` before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from minipar import launch, ledger, trace
from minipar.batches import IGNORED, RandomBatches
from minipar.facts import Traffic
from minipar.mesh import Mesh, plan
from minipar.model import GPTConfig, build
from minipar.report import shape_of
from minipar.split import Split, split_of
from minipar.train import Engine, TrainConfig, learning_rate
from minipar.zero import Zero


@dataclass
class Observed:
    """What a run did: losses and gradient norms by step; the last step's clipped gradients and the weights after it,
    whole, by name; and which ranks disagree about a value that they should share bit for bit."""

    losses: list[float]
    gradient_norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    unequal: list[str] = field(default_factory=list)


def reference(config: TrainConfig, batches: Any, steps: int, frozen: Sequence[str] = ()) -> Observed:
    """One process, float64, whole batches: the truth. `batches[step]` is a global batch."""
    model = build(config.model, config.seed, torch.float64)
    named = {name: parameter for name, parameter in model.named_parameters()}
    for name, parameter in named.items():
        parameter.requires_grad_(name not in frozen)
    trained = [parameter for parameter in named.values() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    answer = Observed([], [], {}, {})
    for step in range(steps):
        batch = batches[step]
        model.draw.samples = batch.samples.tolist()
        optimizer.zero_grad()
        tokens = max(1, int((batch.targets != IGNORED).sum()))
        logits = model(batch.tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED, reduction="sum") / tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, config.clip or float("inf"))
        for options in optimizer.param_groups:
            options["lr"] = learning_rate(config, step)
        answer.gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        optimizer.step()
        answer.losses.append(loss.item())
        answer.gradient_norms.append(norm.item())
    answer.weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    return answer


# On ranks.


@dataclass
class Part:
    """What one rank holds of one parameter: its piece of the weights, and runs of that piece's gradient."""

    shape: tuple[int, ...]
    split: Split | None
    weight: Tensor
    gradient: list[tuple[int, Tensor]]


@dataclass
class RankRun:
    """What one rank has to show: (loss, norm) by step, its parts by parameter name, what the last step sent."""

    results: list[tuple[float, float]]
    parts: dict[str, Part]
    traffic: Traffic


def train_and_part(mesh: Mesh, config: TrainConfig, batches: Any, steps: int) -> RankRun:
    """On each rank: train, and tell of it."""
    assert mesh.world is not None
    engine, messages = Engine(mesh, config), mesh.world.wire.messages
    rows = config.global_batch // mesh.dp.size
    results = []
    for step in range(steps):
        messages.clear()
        results.append(engine.step(batches.rows(step, mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows)))
    sent = trace.traffic(messages)
    return RankRun([(result.loss, result.gradient_norm) for result in results], parts(engine), sent)


def parts(engine: Engine) -> dict[str, Part]:
    """What this rank holds, by parameter name; ZeRO's stage 3 gathers its parameters for it."""
    if isinstance(engine.replicas, Zero):
        engine.replicas.gather()
    pieces = engine.replicas.pieces()
    return {
        name: Part(
            tuple(p.shape),
            split_of(p),
            p.detach().clone(),
            [(piece.start, piece.gradient.clone()) for piece in pieces if piece.parameter is p],
        )
        for name, p in engine.parameters().items()
    }


def together(mesh: Mesh, by_rank: Sequence[RankRun], tied: bool = False) -> Observed:
    """Put the ranks' parts together again, and note where ranks that hold the same thing hold different bits."""
    losses, norms = zip(*by_rank[0].results, strict=True)
    answer = Observed(list(losses), list(norms), {}, {})
    first = by_rank[0].results
    answer.unequal = [f"losses of rank {rank}" for rank, run in enumerate(by_rank) if run.results != first]
    names = dict.fromkeys(name for run in by_rank for name in run.parts)
    for name in names:
        holders = [rank for rank, run in enumerate(by_rank) if name in run.parts]
        places = {rank: mesh.coordinates(rank) for rank in holders}
        weights, gradients = [], []
        for tp_rank in range(mesh.shape["tp"]):
            column = [by_rank[rank].parts[name] for rank in holders if places[rank]["tp"] == tp_rank]
            if any(not torch.equal(part.weight, column[0].weight) for part in column):
                answer.unequal.append(f"{name} over dp")
            weights.append(column[0].weight)
            gradients.append(_gradient(name, column, answer.unequal))
        split = by_rank[holders[0]].parts[name].split
        if split is None and any(not torch.equal(weight, weights[0]) for weight in weights):
            answer.unequal.append(f"{name} over tp")
        answer.weights[name] = split.join(weights) if split else weights[0]
        answer.gradients[name] = split.join(gradients) if split else gradients[0]
    if tied and "head.output.weight" in answer.weights:
        copy = answer.weights.pop("head.output.weight")
        answer.gradients.pop("head.output.weight")
        if not torch.equal(copy, answer.weights["embedding.word.weight"]):
            answer.unequal.append("tied embedding over pp")
    return answer


def _gradient(name: str, column: Sequence[Part], unequal: list[str]) -> Tensor:
    """One tp rank's gradient of a parameter, from the shares of its replicas."""
    whole = column[0].weight.new_full((column[0].weight.numel(),), float("nan"))
    for part in column:
        for start, run in part.gradient:
            place = whole[start : start + len(run)]
            if not place.isnan().all() and not torch.equal(place, run):
                unequal.append(f"gradient of {name} over dp")
            place.copy_(run)
    return whole.view(column[0].shape)


def worst_difference(seen: Observed, truth: Observed) -> tuple[float, str]:
    """The largest relative difference, and where it is. A tensor's differences are relative to its largest value."""
    differences = [(0.0, "nothing")]
    for what in ("losses", "gradient_norms"):
        for step, (a, b) in enumerate(zip(getattr(seen, what), getattr(truth, what), strict=True)):
            differences.append((_known(abs(a - b) / max(abs(b), 1e-30)), f"{what} of step {step}"))
    for what in ("gradients", "weights"):
        ours, theirs = getattr(seen, what), getattr(truth, what)
        if ours.keys() != theirs.keys():
            return float("inf"), f"{what}: {sorted(ours.keys() ^ theirs.keys())} on one side only"
        largest = max(float(t.abs().max()) for t in theirs.values())
        for name, b in theirs.items():
            scale = max(float(b.abs().max()), 1e-6 * largest, 1e-30)  # a gradient that should be zero is only rounding
            difference = float((ours[name].double() - b).abs().max()) / scale if b.numel() else 0.0
            differences.append((_known(difference), f"{what} of {name}"))
    return max(differences)


def _known(difference: float) -> float:
    """Infinity for what is no number, which no maximum would ever find."""
    return float("inf") if difference != difference else difference


# Which topologies.

TOLERANCE = 1e-9  # relative, in float64
SMALL = TrainConfig(
    model=GPTConfig(layers=5, hidden=24, heads=4, vocab=37, sequence=8),
    global_batch=8,
    micro_batches=2,
    precision="fp64",
    clip=0.5,
    warmup=2,
    lr=1e-2,
    bucket_bytes=8000,
)


@dataclass(frozen=True)
class Case:
    """One topology, and how it is trained on what."""

    degrees: dict[str, int]
    config: TrainConfig
    ragged: bool = True
    steps: int = 3

    def __str__(self) -> str:
        plain = TrainConfig(model=self.config.model)
        shown = ("zero", "schedule", "chunks", "micro_batches", "sequence_parallel")
        options = [
            f"{n.replace('_', '-')} {getattr(self.config, n)}"
            for n in shown
            if getattr(self.config, n) != getattr(plain, n)
        ]
        model = [
            f"{n} {getattr(self.config.model, n)}"
            for n in ("tied", "dropout", "kv_heads")
            if getattr(self.config.model, n)
        ]
        return ", ".join(
            [" ".join(f"{axis}{n}" for axis, n in self.degrees.items() if n > 1) or "one rank", *options, *model]
        )


def cases(ranks: int = 8) -> Iterator[Case]:
    """The topologies of `minipar verify`: each cut alone, in pairs, and all of them, on at most `ranks`."""
    tied = replace(SMALL, model=replace(SMALL.model, tied=True))
    mixed = replace(SMALL, model=replace(SMALL.model, tied=True, kv_heads=2, dropout=0.1), sequence_parallel=True)
    listed: list[tuple[TrainConfig, dict[str, Any], tuple[int, int, int]]] = [
        *((SMALL, {}, (dp, 1, 1)) for dp in (1, 2, 4)),
        *((SMALL, {}, (1, 1, tp)) for tp in (2, 4)),
        *((SMALL, {"sequence_parallel": True}, (1, 1, tp)) for tp in (2, 4)),
        *((SMALL, {"schedule": name}, (1, pp, 1)) for pp in (2, 4) for name in ("gpipe", "1f1b", "zb-h1")),
        (SMALL, {"schedule": "interleaved", "chunks": 2, "micro_batches": 4}, (1, 2, 1)),
        (SMALL, {"micro_batches": 1}, (1, 4, 1)),
        *((SMALL, {"zero": stage}, (dp, 1, 1)) for stage in (1, 2, 3) for dp in (2, 4)),
        (tied, {}, (1, 4, 1)),
        *((tied, {"zero": stage}, (2, 2, 1)) for stage in (0, 1, 2, 3)),
        *((mixed, {"zero": stage}, (2, 1, 2)) for stage in (0, 1, 2, 3)),
        *((mixed, {"zero": stage}, (2, 2, 2)) for stage in (0, 1, 2, 3)),
        (mixed, {"zero": 2, "schedule": "zb-h1", "micro_batches": 4}, (2, 2, 2)),
        (mixed, {"zero": 3, "schedule": "interleaved", "chunks": 2}, (2, 2, 2)),
    ]
    for config, options, (dp, pp, tp) in listed:
        if dp * pp * tp <= ranks:
            yield Case({"dp": dp, "pp": pp, "tp": tp}, replace(config, **options))


def draw(choose: Callable[[Sequence[Any]], Any], ranks: int = 8) -> Case:
    """A topology, options and sizes at random: `choose` picks one of what it is given, the simplest first."""
    shapes = [shape for shape in product((1, 2, 3, 4), repeat=3) if prod(shape) <= ranks]
    dp, pp, tp = choose(sorted(shapes, key=prod))
    schedule = choose(["1f1b", "gpipe", "zb-h1", "zb-h2", "naive", *(["interleaved"] if pp < 4 else [])])
    chunks = choose([1, 2]) if schedule == "interleaved" else 1
    micro_batches = choose([n for n in (1, 2, 3, 4, 6) if schedule != "interleaved" or chunks == 1 or n % pp == 0])
    kv_heads = tp * choose([1, 2])
    heads = kv_heads * choose([1, 2])
    sequence_parallel = choose([False, True])
    model = GPTConfig(
        layers=pp * chunks + choose([0, 1, 3]),
        # At a width of 1 or 2 LayerNorm's output hardly depends on its input: its gradient is rounding, which Adam
        # makes as large as any other.
        hidden=heads * choose([n for n in (2, 1, 5, 3) if n * heads > 2]),
        heads=heads,
        kv_heads=kv_heads,
        vocab=choose([11, 5, 40]),
        sequence=choose([4, 1, 7]) * (tp if sequence_parallel else 1),
        dropout=choose([0.0, 0.2]),
        tied=choose([False, True]),
    )
    config = replace(
        SMALL,
        model=model,
        global_batch=dp * micro_batches * choose([1, 2]),
        micro_batches=micro_batches,
        schedule=schedule,
        chunks=chunks,
        zero=choose([0, 1, 2, 3]),
        sequence_parallel=sequence_parallel,
        clip=choose([0.0, 0.3, 1e6]),
        lr=1e-3,  # ten times that is chaos on so few tokens: rounding grows a hundred thousand fold in 20 steps
        bucket_bytes=choose([8 << 20, 1000, 1]),
        seed=choose([0, 1]),
    )
    return Case({"dp": dp, "pp": pp, "tp": tp}, config, ragged=choose([False, True]), steps=20)


def compare(case: Case) -> tuple[float, str]:
    """Run a case on ranks and in one process: the worst relative difference, and where. Infinite if ranks that share
    a value hold different bits of it, or if a rank has sent other bytes than the ledger predicts."""
    return differences(case)[0]


def differences(case: Case) -> list[tuple[float, str]]:
    """All that a case differs in, the gravest first: bits between ranks, bytes from the ledger's, numbers from one
    process's."""
    config, mesh = case.config, plan(**case.degrees)
    batches = RandomBatches(
        vocab=config.model.vocab,
        sequence=config.model.sequence,
        global_batch=config.global_batch,
        seed=config.seed,
        ragged=case.ragged,
    )
    by_rank = launch.run(train_and_part, mesh, config, batches, case.steps)
    seen = together(mesh, by_rank, config.model.tied)
    bytes_differ = unpredicted_bytes(config, mesh, [run.traffic for run in by_rank])
    found = [worst_difference(seen, reference(config, batches, case.steps))]
    if bytes_differ:
        found.insert(0, (float("inf"), f"bytes differ: {'; '.join(bytes_differ[:3])}"))
    if seen.unequal:
        found.insert(0, (float("inf"), f"ranks differ: {', '.join(seen.unequal[:3])}"))
    return found


def unpredicted_bytes(config: TrainConfig, mesh: Mesh, by_rank: Sequence[Traffic]) -> list[str]:
    """'rank 3 tp all_reduce 1024 counted, 2048 predicted': where a rank's step has sent what the ledger denies."""
    shape, lines = shape_of(config, mesh), []
    for rank, traffic in enumerate(by_rank):
        place = mesh.coordinates(rank)
        predicted = ledger.communication_bytes(shape, dp_rank=place["dp"], pp_rank=place["pp"])
        for key in sorted(predicted.keys() | traffic.volumes.keys()):
            counted, said = traffic[key].bytes, predicted.get(key, 0)
            if counted != said:
                lines.append(f"rank {rank} {' '.join(key)} {counted} counted, {said} predicted")
    return lines


def command(fuzz: int | None, seed: int, ranks: int) -> list[dict[str, Any]]:
    """`minipar verify`: print a line for each topology; all of them as rows."""
    console = Console(highlight=False, soft_wrap=True)
    chance = random.Random(seed)
    chosen = cases(ranks) if fuzz is None else (draw(chance.choice, ranks) for _ in range(fuzz))
    rows: list[dict[str, Any]] = []
    console.print("worst relative difference to one process in float64, over losses, gradients and weights\n")
    for case in chosen:
        start = perf_counter()
        worst, where = compare(case)
        equal = worst <= TOLERANCE
        rows.append({"topology": str(case), "worst": worst, "where": where, "equal": equal})
        verdict = "equal " if equal else "DIFFERS"
        console.print(
            f"{verdict} {worst:8.1e}  {perf_counter() - start:4.1f} s  {case}" + ("" if equal else f"  ({where})")
        )
        if not equal and fuzz is not None:
            console.print(f"        {case!r}")
    different = sum(not row["equal"] for row in rows)
    console.print(f"\n{len(rows)} topologies, " + (f"{different} differ" if different else "all equal"))
    return rows
