"""What a user would pick instead: torch's own data, tensor and pipeline parallelism, each at its best on these ranks.

Idea    Each peer trains the same `model.GPT` from the same first weights on the same rows with the same AdamW, so that
        `bench.py` can compare like with like. A peer is built on every rank and answers with a step: a function from
        this rank's rows to the mean loss over them, or to None on a rank that sees no loss. Peers do less than
        minipar's engine: no tokens are counted, no norm is computed, and the loss stays where it is.
Source  torch: DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard, parallelize_module, pipelining.
Cost    As the cut that each of them makes: see `dp.py`, `zero.py`, `tp.py`, `pp.py`.
Read    `train.py` before; `bench.py` after.

Options were chosen by trying: those written here were the fastest of all that the peer offers, with gloo.
This and `comm.py` are the only files that import torch.distributed: here a library that has its own messages is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.mesh import Mesh
from minipar.model import Attention, GPTConfig, build
from minipar.pp import split_layers
from minipar.train import TrainConfig, micro_batches_of

Step = Callable[[Any], "Tensor | None"]


class Missing(Exception):
    """The installed torch lacks this peer; says what."""


def grouped(parameters: Iterable[nn.Parameter], config: TrainConfig) -> list[dict[str, Any]]:
    """Weight decay for matrices only, as in `train.Engine`."""
    listed = list(parameters)
    return [
        {"params": [p for p in listed if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in listed if p.dim() == 1], "weight_decay": 0.0},
    ]


def adam(config: TrainConfig) -> dict[str, Any]:
    """The options of `train.Engine`'s AdamW."""
    return {"lr": config.lr, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}


def mean_loss(total: Tensor, batch: Any) -> Tensor:
    return total / batch.targets.numel()


def plain_steps(model: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Step:
    """The training loop that everybody writes."""

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model(batch.tokens, batch.targets), batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def single(config: TrainConfig) -> Step:
    """One process, without any messages."""
    model = build(config.model, config.seed)
    return plain_steps(model, torch.optim.AdamW(grouped(model.parameters(), config), **adam(config)))


# Data parallel and ZeRO.


def ddp(mesh: Mesh, config: TrainConfig, **options: Any) -> Step:
    """DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    model = build(config.model, config.seed)
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 25, **options}
    replica = DistributedDataParallel(model, process_group=mesh.dp.handle, **options)
    return plain_steps(replica, torch.optim.AdamW(grouped(model.parameters(), config), **adam(config)))


def zero_redundancy(mesh: Mesh, config: TrainConfig, bucket_view: bool = True, **options: Any) -> Step:
    """DistributedDataParallel with ZeroRedundancyOptimizer: stage 1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = build(config.model, config.seed)
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 25, **options}
    replica = DistributedDataParallel(model, process_group=mesh.dp.handle, **options)
    optimizer = ZeroRedundancyOptimizer(
        grouped(model.parameters(), config),
        torch.optim.AdamW,
        process_group=mesh.dp.handle,
        parameters_as_bucket_view=bucket_view,
        **adam(config),
    )
    return plain_steps(replica, optimizer)


def fsdp(mesh: Mesh, config: TrainConfig, *, reshard: bool, units: str = "blocks", fused: bool = True, prefetch: int = 0) -> Step:
    """fully_shard: stage 2, or with `reshard` stage 3."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = build(config.model, config.seed)
    ranks = DeviceMesh.from_group(mesh.dp.handle, "cpu")
    blocks = list(model.blocks.values())
    if units == "blocks":
        for block in blocks:
            fully_shard(block, mesh=ranks, reshard_after_forward=reshard)
    if units == "pairs":
        for i in range(0, len(blocks), 2):
            fully_shard(blocks[i:i+2], mesh=ranks, reshard_after_forward=reshard)
    if units == "quads":
        for i in range(0, len(blocks), 4):
            fully_shard(blocks[i:i+4], mesh=ranks, reshard_after_forward=reshard)
    fully_shard(model, mesh=ranks, reshard_after_forward=reshard)
    options = adam(config)
    if not fused:
        options["fused"] = False
        options["foreach"] = True
    if prefetch:
        for i, b in enumerate(blocks):
            b.set_modules_to_forward_prefetch(blocks[i+1:i+1+prefetch])
            b.set_modules_to_backward_prefetch(blocks[max(0,i-prefetch):i][::-1])
    return plain_steps(model, torch.optim.AdamW(grouped(model.parameters(), config), **options))


# Tensor parallel.


class ThreeProjections(Attention):
    """Attention with a projection each for query, key and value: a DTensor that is cut by rows of the fused matrix
    would mix them. Same weights, same result."""

    def __init__(self, fused: Attention, config: GPTConfig) -> None:
        nn.Module.__init__(self)
        sizes = [n * config.head_size for n in (config.heads, config.key_value_heads, config.key_value_heads)]
        self.head_size, self.out = config.head_size, fused.out
        weights, biases = fused.qkv.weight.detach().split(sizes), fused.qkv.bias.detach().split(sizes)
        self.query, self.key, self.value = (nn.Linear(config.hidden, size) for size in sizes)
        for layer, weight, bias in zip((self.query, self.key, self.value), weights, biases, strict=True):
            layer.weight.data.copy_(weight)
            layer.bias.data.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D] -> [B, T, D]
        B, T, _ = x.shape
        q, k, v = (
            layer(x).view(B, T, -1, self.head_size).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )  # [B, H/tp, T, D/H]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(B, T, -1))


def dtensor(mesh: Mesh, config: TrainConfig, vocab: str = "both", fused: bool = True, out_loss: bool = True) -> Step:
    """DTensor tensor parallel."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    model = build(config.model, config.seed)
    ranks = DeviceMesh.from_group(mesh.tp.handle, "cpu")
    plan: dict[str, Any] = {}
    for name, block in model.blocks.items():
        block.attention = ThreeProjections(block.attention, config.model)
        for layer in ("attention.query", "attention.key", "attention.value", "mlp.up"):
            plan[f"blocks.{name}.{layer}"] = ColwiseParallel()
        for layer in ("attention.out", "mlp.down"):
            plan[f"blocks.{name}.{layer}"] = RowwiseParallel()
    if vocab == "both":
        plan["embedding.word"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if vocab in ("both", "head"):
        plan["head.output"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    if vocab == "gather":
        plan["head.output"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, ranks, plan)
    from torch.distributed.tensor import DTensor
    ps = list(model.parameters())
    groups = grouped([p for p in ps if isinstance(p, DTensor)], config) + grouped([p for p in ps if not isinstance(p, DTensor)], config)
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], **adam(config))
    if not fused:
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], **{**adam(config), "fused": False, "foreach": True})

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        if vocab in ("both", "head"):
            with loss_parallel():
                logits = model(batch.tokens).flatten(0, 1)
                loss = F.cross_entropy(logits, batch.targets.flatten())
                loss.backward()
        else:
            logits = model(batch.tokens).flatten(0, 1)
            loss = F.cross_entropy(logits, batch.targets.flatten())
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# Pipeline parallel.


def pipelining(mesh: Mesh, config: TrainConfig, schedule: str, even: bool = False, meta: bool = False) -> Step:
    """torch.distributed.pipelining: ScheduleGPipe or Schedule1F1B."""
    from torch.distributed import pipelining as torch_pp

    pp, stages = mesh.pp, mesh.pp.size
    layers = split_layers(config.model, stages)
    if even:
        n = config.model.layers // stages
        layers = [range(i * n, i * n + n) for i in range(stages)]
    model = build(config.model, config.seed)
    first, last = pp.rank == 0, pp.rank == stages - 1
    for name in list(model.blocks):
        if int(name) not in layers[pp.rank]:
            del model.blocks[name]
    model.embedding = model.embedding if first else None
    model.head = model.head if last else None
    count = micro_batches_of(config, 1)
    kind = {"gpipe": torch_pp.ScheduleGPipe, "1f1b": torch_pp.Schedule1F1B}[schedule]
    stage = torch_pp.PipelineStage(model, pp.rank, stages, torch.device("cpu"), group=pp.handle)
    runner = kind(stage, count, loss_fn=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()))
    optimizer = torch.optim.AdamW(grouped(model.parameters(), config), **adam(config))

    def step(batch: Any) -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if first:
            runner.step(batch.tokens, return_outputs=False)
        elif last:
            runner.step(target=batch.targets, losses=losses, return_outputs=False)
        else:
            runner.step(return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean().detach() if last else None

    return step
