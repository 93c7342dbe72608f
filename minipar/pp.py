"""Pipeline parallel: cut the depth. Each rank holds some layers, and micro-batches pass from rank to rank.

Idea    A stage computes the forward of a micro-batch when the activation arrives from the stage below, and its
        backward when the gradient arrives from the stage above. In which order, the schedule says: one executor runs
        them all, for a schedule is only a list of actions and `schedule.messages` has put the messages in between.
        A send never blocks; a receive is posted before it is needed, so that the message travels meanwhile.

            rank 0   F0 F1 F2 .  .  B0 F3 B1 ...          layers 0-3
                       \\  \\  \\      /     /                   activations [B, T, D] down, their gradients up
            rank 1   .  F0 F1 F2 B0 ...                   layers 4-7

Cost    One activation and one gradient of [B, T, D] for each micro-batch at each border between stages; idle while
        the pipeline fills and drains: (p-1)/m of the busy time, for p stages and m micro-batches of equal cost.
Source  Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B); Qi et al. 2024 (weight gradients of their own).
Read    `schedule.py` before; `train.py` after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

import torch
from torch import Tensor, nn

from minipar.comm import Group, Pending
from minipar.facts import Action, Kind, Span
from minipar.flat import Write, write_gradient
from minipar.model import GPT, GPTConfig
from minipar.order import Compute, Receive, Schedule, Send, messages


def split_layers(config: GPTConfig, stages: int) -> list[range]:
    """Which layers each stage holds: neighbours, so that the slowest stage is as fast as can be. The projection to the
    vocabulary, on the last stage, counts as the layers that its multiplications cost.

    Raises `ValueError` when there are more stages than layers.
    """
    if stages > config.layers:
        raise ValueError(
            f"{config.layers} layers cannot fill {stages} stages: choose at most {config.layers} stages, or more layers"
        )
    layer = 24 * config.hidden**2 + 4 * config.sequence * config.hidden  # FLOPs a token, forward
    head = 2 * config.hidden * config.vocab / layer

    def counts(limit: float) -> list[int]:
        """Fill the stages up to `limit` layers' cost from the last on, leaving at least one layer for each other."""
        left, answer = config.layers, list[int]()
        for below in reversed(range(stages)):
            room = int(limit - (head if not answer else 0) + 1e-9)
            answer.append(left if below == 0 else max(1, min(room, left - below)))
            left -= answer[-1]
        return answer[::-1]

    candidates = sorted({n + extra for n in range(1, config.layers + 1) for extra in (0.0, head)})
    cost = lambda n: max([*n[:-1], n[-1] + head])
    best = min((counts(limit) for limit in candidates), key=cost)
    ends = list(accumulate(best))
    return [range(end - n, end) for n, end in zip(best, ends, strict=True)]


@dataclass
class MicroBatch:
    """Some rows of the batch, and the numbers of these samples."""

    tokens: Tensor  # [B, T]
    targets: Tensor  # [B, T]
    samples: list[int]


class Pipeline:
    """Runs a schedule over the stages that this rank holds.

    `stages[s]` is stage s, for each stage of this rank; the first takes tokens, the last gives the sum of losses.
    `shape` of an activation between stages is that of one micro-batch. `spans` records what this rank computed when,
    in `time.perf_counter()` seconds.
    """

    def __init__(
        self,
        stages: dict[int, GPT],
        schedule: Schedule,
        group: Group,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.stages, self.schedule, self.group, self.dtype, self.device = stages, schedule, group, dtype, device
        self.steps = messages(schedule)[group.rank]
        self.spans: list[Span] = []
        self._postponed: dict[tuple[int, int], list[tuple[nn.Parameter, Write]]] = {}

    def run(self, micro_batches: Sequence[MicroBatch], shape: Sequence[int], scale: float = 1.0) -> Tensor:
        """Forward and backward of all micro-batches: the sum of losses (zero unless the last stage is here).

        Gradients are those of the losses times `scale`.
        """
        self.micro_batches, self.shape = micro_batches, tuple(shape)
        self.scale = scale
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.results: dict[Action, Tensor] = {}  # computed here, for another stage
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # what a backward will need
        self.arriving: dict[Action, Pending] = {}
        self.leaving: dict[Action, Pending] = {}
        posted = 0
        for index, step in enumerate(self.steps):
            posted = self._post(max(posted, index), self._horizon(index))
            match step:
                case Compute(action):
                    self._compute(action)
                case Send(action, peer):
                    self.leaving[action] = self.group.send(
                        self.results.pop(action), peer, tag=f"pp.{action.place}", async_op=True
                    )
                case Receive():
                    pass  # posted ahead
        for pending in self.leaving.values():
            pending.wait()
        return self.loss

    def look(self, micro_batches: Sequence[MicroBatch], shape: Sequence[int]) -> Tensor:
        """Forward only, one micro-batch after another: the sum of losses (zero unless the last stage is here). Nothing
        is kept and nothing learned."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        order, leaving = self.schedule, list[Pending]()
        for number, rows in enumerate(micro_batches):
            handed = rows.tokens  # from stage to stage of this rank
            for stage, module in sorted(self.stages.items()):
                x = handed
                if stage > 0 and (source := order.rank_of(stage - 1)) != self.group.rank:
                    x = torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
                    self.group.recv(x, source, tag=f"pp.look {number}")
                module.draw.samples = rows.samples
                if module.head is not None:
                    loss += module(x, rows.targets)
                    continue
                handed, to = module(x), order.rank_of(stage + 1)
                if to != self.group.rank:
                    leaving.append(self.group.send(handed, to, tag=f"pp.look {number}", async_op=True))
        for pending in leaving:
            pending.wait()
        return loss

    def _horizon(self, index: int) -> int:
        """Receives are posted one action ahead: up to the second computation from here."""
        computes = 0
        while index < len(self.steps) and computes < 2:
            computes += isinstance(self.steps[index], Compute)
            index += 1
        return index

    def _post(self, first: int, end: int) -> int:
        for step in self.steps[first:end]:
            if isinstance(step, Receive):
                buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
                self.arriving[step.action] = self.group.recv(
                    buffer, step.source, tag=f"pp.{step.action.place}", async_op=True
                )
        return max(first, end)

    def _take(self, action: Action) -> Tensor:
        """The result of an action: from this rank, or from the message that brings it."""
        return self.results.pop(action) if action in self.results else self.arriving.pop(action).wait()

    def _compute(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        match action.kind:
            case Kind.FORWARD:
                source = None if stage == 0 else self._take(Action(Kind.FORWARD, stage - 1, micro_batch))
                start = perf_counter()
                self._forward(action, source)
            case Kind.BACKWARD:
                last = stage == self.schedule.stages - 1
                gradient = None if last else self._take(Action(Kind.BACKWARD, stage + 1, micro_batch))
                sent = self.leaving.pop(Action(Kind.FORWARD, stage, micro_batch), None)
                if sent is not None:
                    sent.wait()  # long done: its gradient has come back
                start = perf_counter()
                self._backward(action, gradient)
            case Kind.WEIGHT:
                start = perf_counter()
                with torch.no_grad():
                    for parameter, write in self._postponed.pop((stage, micro_batch), []):
                        write_gradient(parameter, write)
        self.spans.append(Span(self.group.rank, start, perf_counter(), action.kind, stage, micro_batch))

    def _forward(self, action: Action, source: Tensor | None) -> None:
        module, rows = self.stages[action.stage], self.micro_batches[action.micro_batch]
        module.draw.samples = rows.samples
        self._postpone_for(module, action)
        x = rows.tokens if source is None else source.detach().requires_grad_()
        if module.head is not None:
            y = module(x, rows.targets)
            self.loss += y.detach()
        else:
            y = module(x)
            self.results[action] = y.detach()
        self.kept[action.stage, action.micro_batch] = (x, y)

    def _backward(self, action: Action, gradient: Tensor | None) -> None:
        x, y = self.kept.pop((action.stage, action.micro_batch))
        torch.autograd.backward(y, y.new_full((), self.scale) if gradient is None else gradient)
        if action.stage > 0:
            assert x.grad is not None
            self.results[action] = x.grad

    def _postpone_for(self, module: GPT, action: Action) -> None:
        """Where the schedule has W actions, layers leave their weight gradient to the W of this micro-batch."""
        if action.stage not in self.schedule.splits_backward:
            return
        queue = self._postponed[action.stage, action.micro_batch] = []
        for layer in module.modules():
            if hasattr(layer, "postpone"):
                setattr(layer, "postpone", lambda *entry: queue.append(entry))  # noqa: B010
