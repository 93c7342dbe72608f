"""Every topology against one process.

Idea    `reference` trains the plain model in one process, in float64, with torch's own loss, clipping and AdamW, and
        with none of the cuts. `observe` trains the same on ranks and puts gradients and weights together again. The
        two must agree: in float64 to 1e-9 relative. Gradients are compared, not only losses: under Adam a gradient
        that is too large by a constant factor would not show in any loss.

Read    `train.py` before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.mesh import Mesh
from minipar.model import IGNORED, build
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


def train_and_part(mesh: Mesh, config: TrainConfig, batches: Any, steps: int) -> tuple[list[Any], dict[str, Part]]:
    """On each rank: train, then return (loss, norm) by step and this rank's parts by parameter name."""
    engine = Engine(mesh, config)
    rows = config.global_batch // mesh.dp.size
    results = []
    for step in range(steps):
        results.append(engine.step(batches.rows(step, mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows)))
    return [(result.loss, result.gradient_norm) for result in results], parts(engine)


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


def together(mesh: Mesh, by_rank: Sequence[tuple[list[Any], dict[str, Part]]], tied: bool = False) -> Observed:
    """Put the ranks' parts together again, and note where ranks that hold the same thing hold different bits."""
    losses, norms = zip(*by_rank[0][0], strict=True)
    answer = Observed(list(losses), list(norms), {}, {})
    answer.unequal = [f"losses of rank {rank}" for rank, (results, _) in enumerate(by_rank) if results != by_rank[0][0]]
    names = dict.fromkeys(name for _, held in by_rank for name in held)
    for name in names:
        holders = [rank for rank, (_, held) in enumerate(by_rank) if name in held]
        places = {rank: mesh.coordinates(rank) for rank in holders}
        weights, gradients = [], []
        for tp_rank in range(mesh.shape["tp"]):
            column = [by_rank[rank][1][name] for rank in holders if places[rank]["tp"] == tp_rank]
            if any(not torch.equal(part.weight, column[0].weight) for part in column):
                answer.unequal.append(f"{name} over dp")
            weights.append(column[0].weight)
            gradients.append(_gradient(name, column, answer.unequal))
        split = by_rank[holders[0]][1][name].split
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
            differences.append((abs(a - b) / max(abs(b), 1e-30), f"{what} of step {step}"))
    for what in ("gradients", "weights"):
        ours, theirs = getattr(seen, what), getattr(truth, what)
        if ours.keys() != theirs.keys():
            return float("inf"), f"{what}: {sorted(ours.keys() ^ theirs.keys())} on one side only"
        largest = max(float(t.abs().max()) for t in theirs.values())
        for name, b in theirs.items():
            scale = max(float(b.abs().max()), 1e-6 * largest, 1e-30)  # a gradient that should be zero is only rounding
            difference = float((ours[name].double() - b).abs().max()) / scale if b.numel() else 0.0
            differences.append((float("inf") if difference != difference else difference, f"{what} of {name}"))
    return max(differences)
