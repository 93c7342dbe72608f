"""Recompute: keep less from forward to backward, and compute it again when it is needed.

Idea    A block's backward needs what its forward computed. Either that is kept, 34 bytes and more for each value of the
        block's input, or only the input is, 2 bytes, and the forward runs again just before the backward: a third more
        FLOPs. Selective recomputation does so only for attention's inside, which is large and cheap.

            none        keeps  x | norm q k v scores mixed norm up gelu ...        computes nothing again
            selective   keeps  x | norm q k v              norm up gelu ...        scores again
            full        keeps  x                                                   everything again

Cost    full: a third of the FLOPs more, tensor parallel's forward messages once more, and in memory a block's input for
        each block and micro-batch, and the inside of one block. Nothing changes in the numbers: masks of dropout are
        functions of the sample, so the second forward draws the same.
Source  Chen et al. 2016, 'Training Deep Nets with Sublinear Memory Cost'; Korthikanti et al. 2022, section 5.
Read    `model.py` before; `activations.py` for the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minipar.compute import checked_recompute
from minipar.model import GPT

Forward = Callable[[Tensor], Tensor]


def apply(model: GPT, recompute: str) -> GPT:
    """Have the model (or stage) keep less: "none", "selective" or "full". In place."""
    if checked_recompute(recompute) == "none":
        return model
    for block in model.layers:
        if recompute == "full":
            setattr(block, "forward", _again(block, block.forward, model))  # noqa: B010
        else:
            attention = block.attention
            setattr(attention, "mix", _again(attention, attention.mix, model))  # noqa: B010
    return model


def _again(owner: nn.Module, forward: Forward, model: GPT) -> Forward:
    """The same forward, of which only the input is kept."""

    def forward_again(x: Tensor) -> Tensor:
        kept: Tensor = _Again.apply(x, owner, forward, model) if x.requires_grad else forward(x)
        return kept

    return forward_again


class _Again(torch.autograd.Function):
    """Forward without a graph; backward runs the forward once more, with one, and walks that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: nn.Module, forward: Forward, model: GPT) -> Tensor:
        ctx.save_for_backward(x)
        ctx.run, ctx.model, ctx.samples = forward, model, model.draw.samples
        # Where schedules split the backward, layers know in which queue this micro-batch's weight gradients go.
        ctx.queues = [(layer, layer.postpone) for layer in owner.modules() if hasattr(layer, "postpone")]
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        before = ctx.model.draw.samples
        ctx.model.draw.samples = ctx.samples
        for layer, queue in ctx.queues:
            layer.postpone = queue
        with torch.enable_grad():
            y = ctx.run(x)
        ctx.model.draw.samples = before
        torch.autograd.backward(y, grad)
        return x.grad, None, None, None
