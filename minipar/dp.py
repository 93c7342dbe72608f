"""Data parallel: cut the batch, and keep a whole model on every rank.

Idea    Each rank computes gradients on its own rows of the batch; then the ranks add them up, so that every replica
        takes the same step and stays the same. Gradients are laid in buckets, filled from the model's last layer to
        its first as backward produces them; a full bucket is all_reduced at once, while backward goes on with the
        layers below. What is left to wait for at the end is the last bucket.

            backward    layer 4 | layer 3 | layer 2 | layer 1 |
            messages            [ bucket 0 (4, 3)  ]   [ bucket 1 (2, 1) ]
                                                               ^ exposed: only this

Cost    One all_reduce of every gradient a step, whatever the batch: 2 (n-1)/n times their bytes through each rank's
        link by a ring. Memory: everything, on every rank; see `zero.py`.
Source  Li et al. 2020, 'PyTorch Distributed: Experiences on Accelerating Data Parallel Training'.
Read    `flat.py` before; `zero.py` after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm import Group, Pending, Reduction
from minipar.flat import Flat, Kept, LaunchOrder, Piece, Write, bucket_plan, optimizer_values, uses


class DataParallel:
    """Keeps replicas equal: broadcasts the parameters at the start, and combines gradients every step.

    >>> replicas = DataParallel(model.parameters(), mesh.dp)
    >>> optimizer = torch.optim.AdamW(replicas.parameter_groups())
    >>> replicas.start(micro_batches=2)
    >>> for rows in batch.chunk(2): loss(model, rows).backward()     # the second backward launches the all_reduces
    >>> replicas.finish(); optimizer.step()

    `parameters` come in the order of use, for backward finishes them in the reverse order: any other order keeps full
    buckets waiting for the end. `parameter_groups` are as for a torch optimizer; default: one group of all.

    `op` is "sum" when each loss was divided by the tokens of the whole batch: right also when ranks hold different
    numbers of tokens. "mean" averages the ranks' gradients, which is the same only when they hold equally many.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: Group,
        *,
        parameter_groups: Sequence[dict[str, Any]] | None = None,
        bucket_bytes: int = 8 << 20,
        op: Reduction = "sum",
    ) -> None:
        self.group, self.op, self._parameters = group, op, list(parameters)
        self._groups = list(parameter_groups) if parameter_groups is not None else [{"params": self._parameters}]
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        for parameter in self._parameters:
            if not parameter.requires_grad:
                group.broadcast(parameter.data, tag="dp.first weights")
        sizes = [p.numel() * p.element_size() for p in trained]
        plan = bucket_plan(sizes, bucket_bytes, [p.dtype for p in trained])
        self.flats = [Flat([trained[index] for index in bucket]) for bucket in plan]
        for flat in self.flats:
            flat.adopt(group, "dp.first weights")
        self.buffers = [flat.buffer(group) for flat in self.flats]
        self._order = LaunchOrder([sum(map(uses, flat.parameters)) for flat in self.flats], self._launch)
        self._pending: list[Pending] = []
        self._listening = True
        self._pieces: list[Piece] = []
        for bucket, (flat, buffer) in enumerate(zip(self.flats, self.buffers, strict=True)):
            for parameter, view in zip(flat.parameters, flat.views(buffer), strict=True):
                self._listen(bucket, parameter, view)
                self._pieces.append(Piece(parameter, 0, view.view(-1)))

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What to hand to an optimizer."""
        return self._groups

    def start(self, micro_batches: int = 1) -> None:
        """Begin a step in which every parameter receives a gradient from each of `micro_batches` backwards."""
        for flat in self.flats:
            for parameter in flat.parameters:
                parameter.grad = None
        self._order.start(micro_batches=micro_batches)

    def finish(self) -> None:
        """Wait until every gradient is the whole group's."""
        for piece in self._pieces:
            if piece.parameter.grad is None:
                piece.parameter.grad = piece.gradient.zero_().view_as(piece.parameter)
        self._order.finish()
        for pending in self._pending:
            pending.wait()
        self._pending.clear()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update: every replica takes the same step."""
        optimizer.step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only add to the gradients: they are not among the `micro_batches` that `start` expects."""
        self._listening = False
        try:
            yield
        finally:
            self._listening = True

    def pieces(self) -> list[Piece]:
        """Every gradient, whole, as views."""
        return self._pieces

    def kept(self, optimizer: torch.optim.Optimizer) -> list[Kept]:
        """Every parameter's weight and optimizer states, whole, as views: what a checkpoint saves and loads."""
        return [Kept(p, 0, {"weight": p.data.view(-1), **optimizer_values(optimizer, p)}) for p in self._parameters]

    def loaded(self) -> None:
        """The weights have been written from outside, the same on every rank."""

    def held_bytes(self) -> dict[str, int]:
        """Bytes of parameters and gradients that this rank holds."""
        return {
            "parameters": sum(p.numel() * p.element_size() for p in self._parameters),
            "gradients": sum(buffer.numel() * buffer.element_size() for buffer in self.buffers),
        }

    def _listen(self, bucket: int, parameter: nn.Parameter, view: Tensor) -> None:
        """Have the parameter's gradients gather in its place of the bucket."""

        def arrived() -> None:
            parameter.grad = view  # where autograd adds the next ones
            if self._listening:
                self._order.arrived(bucket)

        def from_autograd(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if parameter.grad.data_ptr() != view.data_ptr():  # the first of the step
                view.copy_(parameter.grad)
            arrived()

        def from_layer(write: Write) -> None:
            write(view, parameter.grad is None)
            arrived()

        parameter.register_post_accumulate_grad_hook(from_autograd)
        parameter.take_gradient = from_layer  # type: ignore[attr-defined]

    def _launch(self, bucket: int) -> None:
        buffer = self.buffers[bucket]
        self._pending.append(self.group.all_reduce(buffer, self.op, tag=f"dp.grad bucket {bucket}", async_op=True))
