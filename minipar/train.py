"""3D: one training step, composed of the cuts.

Idea    Build this rank's stages of the model, cut their layers over tp, keep replicas over dp (whole, or in ZeRO's
        shares), and run a pipeline schedule over pp. Then a step is: run the schedule, finish the
        gradients, divide them by the tokens of the whole batch, clip them by the norm of the whole model's gradient,
        update.

            pipeline       pp tp  forwards and backwards; dp or ZeRO sends full buckets of gradients meanwhile
            finish         dp     wait for the gradients
                           tp     by sequence: parameters that saw a slice of it add up their gradients
                           pp     tied embeddings: first and last stage add up theirs
            count          world  how many tokens are learned; sent before the forward, needed only now
            measure        world  losses, and the norm of the gradient, each parameter once; needed now only to clip
            scale          -      the loss is the mean over all tokens, however unevenly they lie; clip
            update         dp     ZeRO 1 and 2 gather the new parameters

Read    `dp.py`, `tp.py`, `pp.py`, `zero.py` before; `ledger.py` for what each line costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import cos, isfinite, pi
from typing import Any, cast

import torch
from torch import Tensor

from minipar import precision as precisions
from minipar import recompute, tp
from minipar import schedule as schedules
from minipar.batches import IGNORED
from minipar.comm import Pending
from minipar.compute import RECOMPUTE
from minipar.dp import DataParallel
from minipar.flat import Piece
from minipar.mesh import Mesh
from minipar.model import GPT, GPTConfig, materialise, tie
from minipar.pp import MicroBatch, Pipeline, split_layers
from minipar.precision import LossScale, MasterOptimizer
from minipar.split import split_of
from minipar.zero import Zero


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run, but for the mesh and the data."""

    model: GPTConfig = field(default_factory=GPTConfig)
    global_batch: int = 16
    micro_batches: int = 4
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    precision: str = "fp32"
    loss_scale: float = 0.0  # of fp16, at first; 0: 65,536
    scale_window: int = 2000  # steps without overflow, after which it is doubled
    recompute: str = "none"
    steps: int = 20
    lr: float = 1e-3
    warmup: int = 5
    decay_steps: int = 0  # 0: the learning rate stays
    weight_decay: float = 0.1
    clip: float = 1.0  # 0: not at all
    seed: int = 0
    bucket_bytes: int = 25 << 20


def micro_batches_of(config: TrainConfig, dp: int) -> int:
    """How many micro-batches a replica runs: as many as asked, but none without a row."""
    return min(config.micro_batches, config.global_batch // dp)


def check(config: TrainConfig, shape: dict[str, int]) -> None:
    """Raise `ValueError` with a line for every number that does not fit the others."""
    dp, pp, tp_ranks = shape["dp"], shape["pp"], shape["tp"]
    model, faults = config.model, []
    for name in ("global_batch", "micro_batches", "chunks", "steps"):
        if getattr(config, name) < 1:
            faults.append(f"{name.replace('_', '-')} {getattr(config, name)}: choose a whole number from 1")
    faults += precisions.misfits(config.precision, config.loss_scale, config.scale_window)
    if config.recompute not in RECOMPUTE:
        faults.append(f"unknown recompute {config.recompute!r}: choose from {', '.join(RECOMPUTE)}")
    if config.zero not in (0, 1, 2, 3):
        faults.append(f"ZeRO has no stage {config.zero}: choose 0 (off), 1, 2 or 3")
    if not config.lr > 0:
        faults.append(f"lr {config.lr:g}: choose a learning rate above 0")
    if not config.clip >= 0:
        faults.append(f"clip {config.clip:g}: choose a norm above 0, or 0 for none")
    if not faults and config.global_batch % dp:
        faults.append(
            f"a global batch of {config.global_batch} rows cannot be shared by dp={dp} replicas: "
            f"choose a multiple of {dp}, such as {-(-config.global_batch // dp) * dp}"
        )
    if not faults and (config.global_batch // dp) % micro_batches_of(config, dp):
        rows = config.global_batch // dp
        choices = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        faults.append(
            f"{rows} rows on each replica do not divide into {config.micro_batches} micro-batches: "
            f"choose from {choices}"
        )
    try:
        tp.check(model.heads, model.key_value_heads, model.sequence if config.sequence_parallel else 0, tp_ranks)
    except ValueError as error:
        faults.append(str(error))
    try:
        split_layers(model, pp * max(config.chunks, 1))
        if not faults:
            schedules.by_name(config.schedule, pp, micro_batches_of(config, dp), config.chunks)
    except ValueError as error:
        faults.append(str(error))
    if faults:
        raise ValueError("; ".join(faults))


@dataclass
class StepResult:
    """The mean loss over the tokens of the global batch, and the norm of the whole gradient before clipping; whether
    the step was `skipped`, since that was not finite, and the loss scale with which it was taken."""

    loss: float
    gradient_norm: float
    skipped: bool = False
    loss_scale: float = 1.0


class Engine:
    """One rank's part of the model, and how it takes a step together with the others."""

    def __init__(self, mesh: Mesh, config: TrainConfig) -> None:
        check(config, mesh.shape)
        self.mesh, self.config = mesh, config
        self.device = torch.device("cuda", torch.cuda.current_device()) if mesh.world.backend == "nccl" else "cpu"
        self.dtype = precisions.DTYPES[config.precision]
        self.scale = LossScale.for_precision(config.precision, config.loss_scale, config.scale_window)
        self.micro_batches = micro_batches_of(config, mesh.dp.size)
        self.schedule = schedules.by_name(config.schedule, mesh.pp.size, self.micro_batches, config.chunks).validate()
        self.stages = self._build_stages()
        self.tied = self._tied_copies()
        self.replicas = self._build_replicas()
        self._speakers = shared_out(self.replicas.pieces(), 1 if config.zero else mesh.dp.size)
        self._spoken_for = [piece.gradient for piece in self.replicas.pieces() if self._counts(piece)]
        self._silent = [  # which should be as on the rank that speaks for it
            piece.gradient for piece in self.replicas.pieces() if not self._counts(piece) and self._replicated(piece)
        ]
        self.optimizer = self._build_optimizer()
        self.pipeline = Pipeline(self.stages, self.schedule, mesh.pp, dtype=self.dtype, device=self.device)
        self.step_number = self.updates = 0  # steps taken, and those of them that changed the weights

    # What this rank holds.

    def _build_stages(self) -> dict[int, GPT]:
        config, mesh = self.config, self.mesh
        layers = split_layers(config.model, self.schedule.stages)
        stages = {}
        for stage in range(mesh.pp.rank, self.schedule.stages, mesh.pp.size):
            last = stage == self.schedule.stages - 1
            with torch.device("meta"):
                part = GPT(config.model, layers[stage], first=stage == 0, last=last, seed=config.seed)
                tp.parallelize(part, mesh.tp, sequence_parallel=config.sequence_parallel)
            whole = materialise(part, config.seed, self.dtype, self.device)
            stages[stage] = recompute.apply(whole, config.recompute)
        return stages

    def _tied_copies(self) -> list[torch.nn.Parameter]:
        """Tied embeddings whose two uses are on different stages: this rank's copies (first stage's, last stage's)."""
        first, last = self.stages.get(0), self.stages.get(self.schedule.stages - 1)
        if not self.config.model.tied or self.schedule.stages == 1:
            return []
        if first is not None and last is not None:  # both stages here: one parameter again
            assert first.embedding is not None and last.head is not None
            tie(first.embedding, last.head)
            return []
        parts = [
            first.embedding.word if first and first.embedding else None,
            last.head.output if last and last.head else None,
        ]
        return [cast(torch.nn.Parameter, part.weight) for part in parts if part is not None]

    def _build_replicas(self) -> DataParallel | Zero:
        config, group = self.config, self.mesh.dp
        parameters = list(self.parameters().values())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        if not config.zero:
            return DataParallel(parameters, group, parameter_groups=groups, bucket_bytes=config.bucket_bytes)
        units = [unit for part in self.stages.values() for unit in (part.embedding, *part.blocks.values(), part.head)]
        return Zero(
            [unit for unit in units if unit is not None],
            group,
            stage=config.zero,
            parameter_groups=groups,
            alone=self.tied,
            bucket_bytes=config.bucket_bytes,
        )

    def _build_optimizer(self) -> Any:
        groups, config = self.replicas.parameter_groups(), self.config
        adam = lambda groups: torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
        return MasterOptimizer(adam, groups) if precisions.is_mixed(config.precision) else adam(groups)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by the names they have in the whole model; a parameter used twice appears once."""
        names: dict[torch.nn.Parameter, str] = {}
        for part in self.stages.values():
            for name, parameter in part.named_parameters():
                names.setdefault(parameter, name)
        return {name: parameter for parameter, name in names.items()}

    # A step.

    def step(self, batch: Any) -> StepResult:
        """Train on this replica's rows of a global batch: `.tokens`, `.targets` [rows, T] and `.samples` [rows]."""
        self.replicas.start(self.micro_batches)
        every = self.config.global_batch * batch.targets.shape[1]  # tokens, if all of them are learned
        counting = self._count((batch.targets != IGNORED).sum())
        loss = self.pipeline.run(self._cut(batch), self._activation_shape(batch), self.scale.value / every)
        self.replicas.finish()
        self._sum_slices()
        self._sum_tied()
        measuring = self._measure(loss)
        learned = max(counting.wait().item(), 1.0)
        factor = every / learned / self.scale.value
        norm = lambda: self._norm(measuring.wait(), factor)
        unsure = self.config.clip > 0 or not self.scale.fixed  # else nothing has to wait for the norm
        skipped, scale = unsure and not isfinite(norm()), self.scale.value
        if not skipped:
            self._update(factor * (self._clipped(norm()) if self.config.clip else 1.0))
        self.scale.update(skipped)
        self.step_number += 1
        return StepResult(measuring.wait()[0].item() / learned, norm(), skipped, scale)

    def evaluate(self, batch: Any) -> tuple[float, float]:
        """The sum of losses of this replica's rows and all others', and how many tokens they are; nothing is learned.

        All ranks call it, each with the rows of its replica.
        """
        for part in self.stages.values():
            part.eval()
        with torch.no_grad():
            loss = self.pipeline.look(self._cut(batch), self._activation_shape(batch))
        for part in self.stages.values():
            part.train()
        mesh = self.mesh
        last, first = mesh.pp.rank == mesh.pp.size - 1, mesh.pp.rank == 0
        tokens = (batch.targets != IGNORED).sum().double()
        speaks = mesh.tp.rank == 0
        totals = torch.stack([loss * (speaks and last), tokens * (speaks and first)])
        losses, learned = mesh.world.all_reduce(totals, tag="train.evaluate").tolist()
        return losses, learned

    def _update(self, factor: float) -> None:
        """Take the step, with gradients that are multiplied by `factor`: in 32 bits, where they have 16."""
        if isinstance(self.optimizer, MasterOptimizer):
            self.optimizer.factor = factor
        else:
            self._scale_gradients(factor)
        for options in self.optimizer.param_groups:
            options["lr"] = learning_rate(self.config, self.step_number)
        self.replicas.step(self.optimizer)
        self.updates += 1

    def _cut(self, batch: Any) -> list[MicroBatch]:
        parts = (batch.tokens.chunk(self.micro_batches), batch.targets.chunk(self.micro_batches))
        samples = batch.samples.chunk(self.micro_batches)
        return [
            MicroBatch(tokens.to(self.device), targets.to(self.device), rows.tolist())
            for tokens, targets, rows in zip(*parts, samples, strict=True)
        ]

    def _activation_shape(self, batch: Any) -> tuple[int, int, int]:
        rows, sequence = batch.tokens.shape
        split = self.mesh.tp.size if self.config.sequence_parallel else 1
        return rows // self.micro_batches, sequence // split, self.config.model.hidden

    def _sum_slices(self) -> None:
        """Sequence parallel: a LayerNorm has seen only this rank's slice of the sequence."""
        slices = [piece.gradient for piece in self.replicas.pieces() if tp.sees_a_slice(piece.parameter)]
        if slices and self.mesh.tp.size > 1:
            together = torch.cat(slices)
            self.mesh.tp.all_reduce(together, tag="train.sequence slices")
            for gradient, total in zip(slices, together.split([len(piece) for piece in slices]), strict=True):
                gradient.copy_(total)

    def _sum_tied(self) -> None:
        """Tied embeddings: the word embedding is used on the first stage and on the last, and its gradient is both."""
        pp = self.mesh.pp
        peer = pp.size - 1 if pp.rank == 0 else 0
        for piece in self._tied_pieces():
            other = torch.empty_like(piece.gradient)
            arriving = pp.recv(other, peer, tag="train.tied", async_op=True)
            leaving = pp.send(piece.gradient.clone(), peer, tag="train.tied", async_op=True)
            arriving.wait()
            leaving.wait()
            piece.gradient.add_(other)

    def _tied_pieces(self) -> list[Piece]:
        return [piece for piece in self.replicas.pieces() if any(piece.parameter is copy for copy in self.tied)]

    def _count(self, tokens: Tensor) -> Pending:
        """How many tokens of the batch are learned, over all ranks; every rank of a replica has the same."""
        speaks = self.mesh.tp.rank == 0 and self.mesh.pp.rank == 0
        answer: Pending = self.mesh.world.all_reduce(tokens.double() * speaks, tag="train.tokens", async_op=True)
        return answer

    def _measure(self, loss: Tensor) -> Pending:
        """The sum of losses, the squared norm of the gradient, and whether what no other rank speaks for is finite,
        over all ranks: `[3]`. One message for all: each costs the step some of its time however small it is."""
        mesh = self.mesh
        speaks = mesh.tp.rank == 0 and mesh.pp.rank == mesh.pp.size - 1  # every rank of tp has the same loss
        bad = (~self._squares(self._silent).isfinite()).double()
        totals = torch.stack([loss * speaks, self._squares(self._spoken_for), bad])
        answer: Pending = mesh.world.all_reduce(totals, tag="train.loss, norm", async_op=True)
        return answer

    def _squares(self, gradients: list[Tensor]) -> Tensor:
        wide = torch.float32 if self.dtype.itemsize == 2 else None
        norms = torch._foreach_norm(gradients, 2, wide) if gradients else [torch.zeros((), device=self.device)]
        return torch.stack(list(norms)).double().square().sum()

    def _norm(self, measured: Tensor, factor: float) -> float:
        """The gradient's norm; NaN if it is not finite, on any rank."""
        _, squares, bad = measured.tolist()
        return float("nan") if bad or not isfinite(squares) else factor * squares**0.5

    def _replicated(self, piece: Piece) -> bool:
        """Whether tensor parallel or the pipeline, and not data parallel, has the same piece elsewhere: data parallel's
        copies come out of one sum and are equal, these have been computed on each rank."""
        whole = split_of(piece.parameter) is None and self.mesh.tp.size > 1
        return whole or any(piece.parameter is tied for tied in self.tied)

    def _counts(self, piece: Piece) -> bool:
        """Whether this rank speaks for the piece in the norm: of all ranks that hold it, exactly one does."""
        mesh = self.mesh
        split = split_of(piece.parameter) is not None or mesh.tp.rank == 0
        shared = self.config.zero > 0 or self._speakers[id(piece.parameter)] == mesh.dp.rank
        copy = mesh.pp.rank > 0 and any(piece.parameter is tied for tied in self.tied)
        return split and shared and not copy

    def _clipped(self, norm: float) -> float:
        """What is left of a gradient of this norm."""
        return min(1.0, self.config.clip / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it

    def _scale_gradients(self, factor: float) -> None:
        if factor != 1:
            torch._foreach_mul_([piece.gradient for piece in self.replicas.pieces()], factor)


def shared_out(pieces: Iterable[Piece], ranks: int) -> dict[int, int]:
    """Which of the replicas reads a parameter's gradient for the norm, by the parameter's id: all hold the same, so
    each reads as much as the others."""
    owner, load = {}, [0] * ranks
    for piece in pieces:
        owner[id(piece.parameter)] = load.index(min(load))
        load[owner[id(piece.parameter)]] += len(piece.gradient)
    return owner


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then constant, or half a cosine down to a tenth where `decay_steps` are given."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if not config.decay_steps:
        return config.lr
    done = (step - config.warmup) / max(1, config.decay_steps - config.warmup)
    return config.lr * (0.1 + 0.45 * (1 + cos(pi * min(done, 1.0))))
