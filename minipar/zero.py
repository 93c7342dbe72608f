"""ZeRO: data parallel without its redundancy. n replicas keep n copies of everything; let each keep a share.

Idea    Lay the parameters end to end in buckets and give each of the n ranks a share of every bucket. A rank runs the
        optimizer for its share alone. So it needs the optimizer's state only there (stage 1); the summed gradient
        only there (stage 2: a reduce_scatter, where data parallel has an all_reduce, and the rest is dropped at
        once); and, if the parameters are gathered just before a layer uses them and dropped just after, the
        parameters only there (stage 3).

            per rank         parameters   gradients   optimizer        bytes a parameter (mixed precision Adam)
            data parallel    ##########   ##########  ##########       2 + 2 + 12
            stage 1          ##########   ##########  ##               2 + 2 + 12/n
            stage 2          ##########   ##          ##               2 + (2 + 12)/n
            stage 3          ##           ##          ##               (2 + 2 + 12)/n

Cost    Stages 1 and 2: a reduce_scatter of the gradients and an all_gather of the parameters, together the bytes of
        data parallel's all_reduce. Stage 2 reduces for every micro-batch, for it has nowhere to keep a sum. Stage 3
        gathers each layer twice for every micro-batch, forward and backward: 1.5 times the bytes at one micro-batch.
Source  Rajbhandari et al. 2020, 'ZeRO: Memory Optimizations Toward Training Trillion Parameter Models'.
Read    `dp.py` and `flat.py` before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm import Group, Pending
from minipar.flat import Flat, Kept, LaunchOrder, Piece, Write, bucket_plan, optimizer_values, uses


class Shard:
    """A bucket of parameters cut over the group: `full` is the whole bucket, `mine` this rank's share of it.

    In stages 1 and 2 `mine` is a view into `full`; in stage 3 it stands alone, and `full` is empty between uses.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group, name: str, *, keep: bool) -> None:
        self.flat, self.group, self.name, self.keep = Flat(parameters, group.size), group, name, keep
        self.full = self.flat.adopt(group, f"zero.first weights {name}", shared=keep)
        self.mine = self.full.chunk(group.size)[group.rank]
        self.gathering: Pending | None = None
        self.here = True
        if not keep:
            self.mine = self.mine.clone()
            self.free()

    def gather(self) -> None:
        """Start to bring the whole bucket here, unless it is here or on its way."""
        if self.here:
            return
        self.here = True
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        self.gathering = self.group.all_gather(
            self.mine, into=self.full, tag=f"zero.parameters {self.name}", async_op=True
        )

    def wait(self) -> None:
        """Return when the whole bucket is here."""
        self.gather()
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def free(self) -> None:
        """Give the memory back: the parameters' values are gone until the next gather, their shapes stay."""
        if self.keep:
            return
        if self.gathering is not None:
            self.wait()
        self.here = False
        self.full.untyped_storage().resize_(0)

    def publish(self) -> Pending:
        """After the optimizer has updated `mine`: tell the others."""
        return self.group.all_gather(self.mine, into=self.full, tag=f"zero.parameters {self.name}", async_op=True)


class Zero:
    """Shards optimizer states (stage 1), gradients as well (2), parameters as well (3) over `group`.

    >>> replicas = Zero([model.embedding, *model.blocks, model.head], mesh.dp, stage=2)
    >>> optimizer = torch.optim.AdamW(replicas.parameter_groups())       # any element-wise optimizer
    >>> replicas.start(micro_batches=2)
    >>> for rows in batch.chunk(2): loss(model, rows).backward()
    >>> replicas.finish(); replicas.step(optimizer)

    `units` are the modules in order of use: stage 3 gathers one of them at a time. `parameter_groups` are as for a
    torch optimizer, for example with different weight decay; default: one group of all. `alone` are parameters that
    get a bucket to themselves, so that another rank with other neighbours still cuts them at the same places.
    Losses are to be divided by the tokens of the whole batch: gradients are summed.
    """

    def __init__(
        self,
        units: Sequence[nn.Module],
        group: Group,
        *,
        stage: int,
        parameter_groups: Sequence[dict[str, Any]] | None = None,
        alone: Sequence[nn.Parameter] = (),
        bucket_bytes: int = 8 << 20,
    ) -> None:
        if stage not in (1, 2, 3):
            raise ValueError(f"ZeRO has no stage {stage}: choose 1 (optimizer), 2 (gradients) or 3 (parameters)")
        self.group, self.stage = group, stage
        parameters = list(dict.fromkeys(p for unit in units for p in unit.parameters()))
        self.frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        for parameter in self.frozen:
            group.broadcast(parameter.data, tag="zero.first weights")
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._options = parameter_groups or [{"params": trained}]
        self.shards = self._shard(units, trained, {id(p) for p in alone}, bucket_bytes)
        self._order = LaunchOrder([sum(map(uses, shard.flat.parameters)) for shard in self.shards], self._launch)
        self._filled: list[set[int]] = [set() for _ in self.shards]
        if stage == 1:  # whole gradients stay, and the sum of this rank's share lands in its place among them
            self._buffers: list[Tensor | None] = [shard.flat.buffer(group) for shard in self.shards]
            self._gradients = [buffer.chunk(group.size)[group.rank] for buffer in self._buffers if buffer is not None]
        else:
            self._buffers = [None] * len(self.shards)
            self._gradients = [torch.zeros_like(shard.mine) for shard in self.shards]
        self._pending: list[tuple[int, Pending, Tensor]] = []
        self._spare: list[Tensor] = []
        for bucket, shard in enumerate(self.shards):
            for index, parameter in enumerate(shard.flat.parameters):
                self._listen(bucket, index, parameter)
        self._pieces = [
            piece
            for shard, gradient in zip(self.shards, self._gradients, strict=True)
            for piece in shard.flat.pieces(group.rank, gradient)
        ]
        self._runs = [self._optimizer_runs(bucket) for bucket in range(len(self.shards))]
        if stage == 3:
            self._gather_around(units)

    def _shard(
        self, units: Sequence[nn.Module], trained: list[nn.Parameter], alone: set[int], limit: int
    ) -> list[Shard]:
        home: dict[int, Any] = {}  # which parameters may share a bucket: in stage 3, those of a unit
        for number, unit in enumerate(units):
            for parameter in unit.parameters():
                home.setdefault(id(parameter), number if self.stage == 3 else "all")
        keys = [(p.dtype, ("alone", id(p)) if id(p) in alone else home[id(p)]) for p in trained]
        sizes = [p.numel() * p.element_size() for p in trained]
        plan = bucket_plan(sizes, sum(sizes) if self.stage == 3 else limit, keys)
        return [
            Shard([trained[i] for i in sorted(bucket)], self.group, f"bucket {number}", keep=self.stage < 3)
            for number, bucket in enumerate(plan)
        ]

    # What the optimizer sees: its own share, as runs of elements with the same options.

    def _optimizer_runs(self, bucket: int) -> list[tuple[int, nn.Parameter]]:
        shard, gradient = self.shards[bucket], self._gradients[bucket]
        option = {id(p): number for number, options in enumerate(self._options) for p in options["params"]}
        runs: list[tuple[int, int, int]] = []  # option, first and last element of `mine`
        for piece in shard.flat.pieces(self.group.rank, gradient):
            start = int(piece.gradient.storage_offset() - gradient.storage_offset())
            number, end = option[id(piece.parameter)], start + len(piece.gradient)
            if runs and runs[-1][0] == number:
                runs[-1] = (number, runs[-1][1], end)
            else:
                runs.append((number, start, end))
        answer = []
        for number, start, end in runs:
            run = nn.Parameter(shard.mine[start:end])
            run.grad = gradient[start:end]
            answer.append((number, run))
        return answer

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What to hand to an optimizer: this rank's share of each of the given groups."""
        return [
            {**options, "params": [run for runs in self._runs for owner, run in runs if owner == number]}
            for number, options in enumerate(self._options)
        ]

    # A step.

    def start(self, micro_batches: int = 1) -> None:
        """Begin a step in which every parameter receives a gradient from each of `micro_batches` backwards."""
        for gradient in self._gradients if self.stage > 1 else []:
            gradient.zero_()
        self._order.start(micro_batches=micro_batches, rounds=1 if self.stage == 1 else micro_batches)

    def finish(self) -> None:
        """Wait until this rank's share of every gradient is the whole group's."""
        self._order.finish()
        self._settle(0)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update this rank's share; in stages 1 and 2 every rank then gets the others'."""
        optimizer.step()
        for pending in [shard.publish() for shard in self.shards if shard.keep]:
            pending.wait()
        for shard in self.shards:
            shard.free()  # what was gathered ahead is old now

    def gather(self) -> None:
        """Bring every parameter here, whole: in stage 3 for reading them, until the next use frees them."""
        for shard in self.shards:
            shard.wait()

    def pieces(self) -> list[Piece]:
        """The gradients of this rank's share, as views."""
        return self._pieces

    def kept(self, optimizer: torch.optim.Optimizer) -> list[Kept]:
        """Weights and optimizer states of this rank's share, as views: what a checkpoint saves and loads."""
        answer = [Kept(p, 0, {"weight": p.data.view(-1)}) for p in self.frozen]
        for bucket, shard in enumerate(self.shards):
            states = [(run, optimizer_values(optimizer, run)) for _, run in self._runs[bucket]]
            for piece in shard.flat.pieces(self.group.rank, shard.mine):
                begin = piece.gradient.storage_offset()
                end = begin + piece.gradient.numel()
                values = {"weight": piece.gradient}
                for run, named in states:
                    first = run.storage_offset()
                    if first <= begin and end <= first + run.numel():
                        values |= {name: value[begin - first : end - first] for name, value in named.items()}
                answer.append(Kept(piece.parameter, piece.start, values))
        return answer

    def loaded(self) -> None:
        """The weights of this rank's share have been written from outside: tell the others."""
        for shard in self.shards:
            if shard.keep:
                shard.publish().wait()
            shard.free()

    def held_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds between steps: parameters and gradients, with the padding of the buckets, and
        `buffers`, in which gradients wait for their reduce_scatter (stages 2 and 3)."""
        size = lambda tensors: sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        return {
            "parameters": size(self.frozen)
            + size(s.full for s in self.shards)
            + size(s.mine for s in self.shards if not s.keep),
            "gradients": size(self._buffers if self.stage == 1 else self._gradients),
            "buffers": size(self._spare),
        }

    def _listen(self, bucket: int, index: int, parameter: nn.Parameter) -> None:
        """Have the parameter's gradients gather in its place of the bucket, and autograd keep none."""
        flat, filled = self.shards[bucket].flat, self._filled[bucket]

        def from_layer(write: Write) -> None:
            write(flat.view(self._buffer(bucket), index), index not in filled)
            filled.add(index)
            self._order.arrived(bucket)
            if self.stage == 3:
                self._close(parameter)

        def from_autograd(parameter: Tensor) -> None:
            grad, parameter.grad = parameter.grad, None
            assert grad is not None
            from_layer(lambda place, fresh: place.copy_(grad) if fresh else place.add_(grad))

        parameter.register_post_accumulate_grad_hook(from_autograd)
        parameter.take_gradient = from_layer  # type: ignore[attr-defined]

    def _buffer(self, bucket: int) -> Tensor:
        """The whole bucket's gradients as they arrive: a spare buffer if one fits, or a new one."""
        buffer, full = self._buffers[bucket], self.shards[bucket].full
        if buffer is None:
            fits = [i for i, spare in enumerate(self._spare) if spare.shape == full.shape and spare.dtype == full.dtype]
            buffer = self._buffers[bucket] = self._spare.pop(fits[0]) if fits else self.shards[bucket].flat.buffer()
        return buffer

    def _launch(self, bucket: int) -> None:
        buffer, gradient = self._buffer(bucket), self._gradients[bucket]
        flat = self.shards[bucket].flat
        for index in set(range(len(flat.parameters))) - self._filled[bucket]:
            flat.view(buffer, index).zero_()
        self._filled[bucket].clear()
        into = gradient if self.stage == 1 else None
        pending = self.group.reduce_scatter(buffer, into=into, tag=f"zero.grad bucket {bucket}", async_op=True)
        self._pending.append((bucket, pending, buffer))
        if self.stage > 1:
            self._buffers[bucket] = None
            self._settle(1)

    def _settle(self, in_flight: int) -> None:
        """Add what has arrived to this rank's gradients, until at most `in_flight` messages are left."""
        while len(self._pending) > in_flight:
            bucket, pending, buffer = self._pending.pop(0)
            arrived = pending.wait()
            if self.stage > 1:
                self._gradients[bucket].add_(arrived)
                self._spare.append(buffer)

    # Stage 3: a unit's parameters are here only while it computes.

    def _gather_around(self, units: Sequence[nn.Module]) -> None:
        owner = {id(p): shard for shard in self.shards for p in shard.flat.parameters}
        self._uses = [list(dict.fromkeys(owner[id(p)] for p in unit.parameters() if id(p) in owner)) for unit in units]
        self._open: dict[int, set[int]] = {}
        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(lambda module, args, n=number: self._before_forward(n, args))
            unit.register_forward_hook(lambda module, args, output, n=number: self._after_forward(n, args, output))

    def _enter(self, number: int, then: int) -> None:
        """Bring a unit's parameters here, and start to bring those of the unit that comes `then`."""
        for shard in self._uses[number] + (self._uses[then] if 0 <= then < len(self._uses) else []):
            shard.gather()
        for shard in self._uses[number]:
            shard.wait()

    def _leave(self, number: int) -> None:
        for shard in self._uses[number]:
            shard.free()

    def _before_forward(self, number: int, args: Any) -> Any:
        self._enter(number, number + 1)
        first, *rest = args
        return (_Then.apply(first, lambda: self._leave(number)), *rest) if first.requires_grad else args

    def _after_forward(self, number: int, args: Any, output: Tensor) -> Tensor:
        self._leave(number)

        def before_backward() -> None:
            self._enter(number, number - 1)
            if not args[0].requires_grad:  # no gradient leaves at its other end: it ends with its parameters' gradients
                parameters = (p for shard in self._uses[number] for p in shard.flat.parameters)
                self._open[number] = {id(p) for p in parameters if p.requires_grad}

        return _Then.apply(output, before_backward) if output.requires_grad else output

    def _close(self, parameter: Tensor) -> None:
        """A parameter has its gradient: of a unit that waits only for these, drop the parameters after the last."""
        for number, missing in list(self._open.items()):
            missing.discard(id(parameter))
            if not missing:
                del self._open[number]
                self._leave(number)


class _Then(torch.autograd.Function):
    """The same tensor; when its gradient comes by, `call` is called."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Any) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.call()
        return grad, None
