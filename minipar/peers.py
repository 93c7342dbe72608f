"""What a user would pick instead: torch's own data, tensor and pipeline parallelism, each at its best on these ranks.

Idea    Each peer trains the same `model.GPT` from the same first weights on the same rows with the same AdamW, so that
        `bench.py` can compare like with like. A peer is built on every rank and answers with a step: a function from
        this rank's rows to the mean loss over them, or to None on a rank that sees no loss. Peers do less than
        minipar's engine: no tokens are counted, no norm is computed, and the loss stays where it is.
Source  torch: DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard, parallelize_module, pipelining.
Cost    As the cut that each of them makes: see `dp.py`, `zero.py`, `tp.py`, `pp.py`.
Read    `train.py` before; `bench.py` after.

Options were chosen by trying; each docstring says which others were tried. Here and in `comm.py` torch.distributed is
imported: a library that has messages of its own is run here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from minipar.comm import Group
from minipar.mesh import Mesh, plan
from minipar.model import Attention, GPTConfig, build
from minipar.pp import split_layers
from minipar.train import TrainConfig, micro_batches_of

Step = Callable[[Any], "Tensor | None"]  # this rank's rows -> their mean loss


def grouped(parameters: Iterable[nn.Parameter], config: TrainConfig) -> list[dict[str, Any]]:
    """Weight decay for matrices only, as in `train.Engine`; groups without a parameter are left out."""
    listed = list(parameters)
    matrices, vectors = [p for p in listed if p.dim() > 1], [p for p in listed if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adam(config: TrainConfig) -> dict[str, Any]:
    """The options of `train.Engine`'s AdamW."""
    return {"lr": config.lr, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}


def plain_steps(loss_sum: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    """The training loop that everybody writes, over a model that answers with the sum of the losses."""

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_sum(batch.tokens, batch.targets) / batch.targets.numel()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def single(config: TrainConfig) -> Step:
    """One process, without any messages."""
    model = build(config.model, config.seed)
    return plain_steps(model, torch.optim.AdamW(grouped(model.parameters(), config), **adam(config)))


def device_mesh(group: Group) -> DeviceMesh:
    """The ranks of a group as torch's libraries want them."""
    assert group.handle is not None
    return DeviceMesh.from_group(group.handle, "cpu")


# Data parallel and ZeRO.


def replica(mesh: Mesh, model: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel. Also tried: buckets of 8 and 100 MB, without static_graph, without bucket
    views, with batched_grad_copy."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(
        model, process_group=mesh.dp.handle, bucket_cap_mb=25, gradient_as_bucket_view=True, static_graph=True
    )


def ddp(mesh: Mesh, config: TrainConfig) -> Step:
    """DistributedDataParallel."""
    model = replica(mesh, build(config.model, config.seed))
    return plain_steps(model, torch.optim.AdamW(grouped(model.parameters(), config), **adam(config)))


def zero_redundancy(mesh: Mesh, config: TrainConfig) -> Step:
    """ZeroRedundancyOptimizer on top of DistributedDataParallel: stage 1. Also tried: parameters not in buckets. Its
    overlap with DistributedDataParallel is not for gloo, says torch, for it may hang."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = replica(mesh, build(config.model, config.seed))
    optimizer = ZeroRedundancyOptimizer(
        grouped(model.parameters(), config),
        torch.optim.AdamW,
        process_group=mesh.dp.handle,
        parameters_as_bucket_view=True,
        **adam(config),
    )
    return plain_steps(model, optimizer)


def fully_sharded(mesh: Mesh, config: TrainConfig, *, reshard: bool, blocks_together: int = 1) -> Step:
    """fully_shard, block by block and then the rest, as its documentation has it: stage 2, or with `reshard` stage 3.

    Several `blocks_together` are faster here (4 of them by a tenth), but then stage 3 holds as many at once. Also
    tried: prefetching one block ahead; AdamW with foreach in place of fused.
    """
    from torch.distributed.fsdp import fully_shard

    model = build(config.model, config.seed)
    ranks, blocks = device_mesh(mesh.dp), list(model.blocks.values())
    for first in range(0, len(blocks), blocks_together):
        fully_shard(blocks[first : first + blocks_together], mesh=ranks, reshard_after_forward=reshard)
    fully_shard(model, mesh=ranks, reshard_after_forward=reshard)
    return plain_steps(model, torch.optim.AdamW(grouped(model.parameters(), config), **adam(config)))


def shard_gradients(mesh: Mesh, config: TrainConfig) -> Step:
    """fully_shard that keeps the parameters from forward to backward: stage 2."""
    return fully_sharded(mesh, config, reshard=False)


def shard_parameters(mesh: Mesh, config: TrainConfig) -> Step:
    """fully_shard that drops the parameters after each forward: stage 3."""
    return fully_sharded(mesh, config, reshard=True)


# Tensor parallel.


class ThreeProjections(nn.Module):
    """Attention with a projection each for query, key and value: a DTensor that is cut by rows of the fused matrix
    would mix them. Same weights, same result."""

    def __init__(self, fused: Attention, config: GPTConfig) -> None:
        super().__init__()
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


def dtensor(mesh: Mesh, config: TrainConfig) -> Step:
    """parallelize_module, with embedding, projection and loss cut by words. Also tried: the loss alone cut; whole
    logits; AdamW with foreach in place of fused."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    model = build(config.model, config.seed)
    plan: dict[str, Any] = {
        "embedding.word": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head.output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for name, block in model.blocks.items():
        block.attention = ThreeProjections(cast(Attention, block.attention), config.model)
        columns, rows = ("attention.query", "attention.key", "attention.value", "mlp.up"), ("attention.out", "mlp.down")
        plan |= {f"blocks.{name}.{layer}": ColwiseParallel() for layer in columns}
        plan |= {f"blocks.{name}.{layer}": RowwiseParallel() for layer in rows}
    parallelize_module(model, device_mesh(mesh.tp), plan)
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW([*grouped(cut, config), *grouped(whole, config)], **adam(config))

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        with loss_parallel():
            loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten())
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# Pipeline parallel.


def pipelining(mesh: Mesh, config: TrainConfig) -> Step:
    """torch.distributed.pipelining with the schedule of the config, and with minipar's split of the layers. Also
    tried: as many layers on each stage, which took as long."""
    from torch.distributed import pipelining as torch_pp

    group = mesh.pp
    first, last = group.rank == 0, group.rank == group.size - 1
    model = build(config.model, config.seed)
    mine = split_layers(config.model, group.size)[group.rank]
    model.blocks = nn.ModuleDict({name: block for name, block in model.blocks.items() if int(name) in mine})
    model.embedding, model.head = model.embedding if first else None, model.head if last else None
    stage = torch_pp.PipelineStage(model, group.rank, group.size, torch.device("cpu"), group=group.handle)
    loss = lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    schedules: dict[str, Any] = {"gpipe": torch_pp.ScheduleGPipe, "1f1b": torch_pp.Schedule1F1B}
    schedule = schedules[config.schedule](stage, micro_batches_of(config, 1), loss_fn=loss)
    optimizer = torch.optim.AdamW(grouped(model.parameters(), config), **adam(config))

    def step(batch: Any) -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        tokens = (batch.tokens,) if first else ()
        targets = {"target": batch.targets, "losses": losses} if last else {}
        schedule.step(*tokens, **targets, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean().detach() if last else None

    return step


# What is compared with what.


@dataclass(frozen=True)
class Work:
    """One comparison: how minipar is set, what it is compared with, and the ratio that it should not exceed."""

    name: str
    peer: str
    build: Callable[[Mesh, TrainConfig], Step]
    goal: float
    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def mesh(self) -> Mesh:
        return plan(pp=self.pp, dp=self.dp, tp=self.tp)


DDP, FSDP, PP = "DistributedDataParallel", "fully_shard", "torch.distributed.pipelining"
WORKS = (
    Work("dp", DDP, ddp, 1.0, dp=2),
    Work("zero1", f"ZeroRedundancyOptimizer, {DDP}", zero_redundancy, 1.0, dp=2, zero=1),
    Work("zero2", f"{FSDP}, reshard_after_forward=False", shard_gradients, 0.9, dp=2, zero=2),
    Work("zero3", f"{FSDP}, reshard_after_forward=True", shard_parameters, 0.9, dp=2, zero=3),
    Work("tp", "parallelize_module (DTensor), loss_parallel", dtensor, 0.8, tp=2),
    Work("pp gpipe", f"{PP}, ScheduleGPipe", pipelining, 1.0, pp=2, schedule="gpipe"),
    Work("pp 1f1b", f"{PP}, Schedule1F1B", pipelining, 1.0, pp=2, schedule="1f1b"),
    Work("pp gpipe", f"{PP}, ScheduleGPipe", pipelining, 1.0, pp=4, schedule="gpipe"),
    Work("pp 1f1b", f"{PP}, Schedule1F1B", pipelining, 1.0, pp=4, schedule="1f1b"),
)
