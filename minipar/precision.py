"""Mixed precision: numbers of 16 bits to compute with, of 32 to learn with.

Idea    Half as many bits are half the memory and half the traffic, and products run several times as fast. But a step
        is often smaller than a thousandth of the weight it changes, and 16 bits would lose it. So the optimizer keeps a
        copy of each weight in 32 bits, its master, updates that, and rounds it for the next step. float16 also has too
        small a range: gradients vanish below 6e-8. The loss is therefore scaled up before the backward, the gradient
        scaled down in 32 bits, and when it overflows, the step is skipped on all ranks alike and the scale halved.

            weights [16]  -> forward, backward ->  gradients [16], scaled
                 ^                                     | / scale, clip
            round|                                     v
            masters [32]  <------ Adam [32 + 32] <- gradients [32]

Cost    2 + 2 + 12 bytes a parameter in place of 4 + 4 + 8; more only while a step is taken.
Source  Micikevicius et al. 2018, 'Mixed Precision Training'. bfloat16 has the range of float32 and needs no scale:
        Kalamkar et al. 2019, 'A Study of BFLOAT16 for Deep Learning Training'.
Read    `train.py`, which decides together with all ranks whether a step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
ACCOUNTS = {"fp32": "fp32", "fp64": "fp64", "bf16": "mixed", "fp16": "mixed"}  # as `ledger.model_state_bytes` says it
FIRST_SCALE, LARGEST_SCALE = 2.0**16, 2.0**32


def misfits(precision: str, loss_scale: float, window: int) -> list[str]:
    """What is wrong with these options, a line each."""
    faults = []
    if precision not in DTYPES:
        faults.append(f"unknown precision {precision!r}: choose from {', '.join(DTYPES)}")
    if loss_scale and not 1 <= loss_scale <= LARGEST_SCALE:
        faults.append(f"loss scale {loss_scale:g}: choose from 1 to {LARGEST_SCALE:,.0f}, or 0 for the usual one")
    if loss_scale and precision != "fp16":
        faults.append(f"a loss scale is for fp16, and precision is {precision}: leave one of them out")
    if window < 1:
        faults.append(f"scale window {window}: choose a number of steps from 1")
    return faults


def is_mixed(precision: str) -> bool:
    """Whether weights have a master copy."""
    return ACCOUNTS[precision] == "mixed"


class MasterOptimizer:
    """Any torch optimizer, over 32-bit copies of the parameters that it is given.

    >>> optimizer = MasterOptimizer(lambda groups: torch.optim.AdamW(groups, lr=1e-3), replicas.parameter_groups())
    >>> optimizer.factor = 1 / loss_scale                                # gradients are multiplied by it, in 32 bits
    >>> optimizer.step()
    """

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], groups: Sequence[dict[str, Any]]) -> None:
        self.factor = 1.0
        self._masters: dict[Tensor, nn.Parameter] = {}
        made = []
        for options in groups:
            masters = [nn.Parameter(parameter.detach().float()) for parameter in options["params"]]
            self._masters |= dict(zip(options["params"], masters, strict=True))
            made.append({**options, "params": masters})
        self.inner = make(made)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own, whose options may be changed."""
        return self.inner.param_groups

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """For each parameter, what is kept of it in 32 bits: its master as "weight", and the optimizer's states."""
        return {p: {**self.inner.state.get(master, {}), "weight": master.data} for p, master in self._masters.items()}

    def step(self) -> None:
        """Update the masters with the parameters' gradients, and round them for the parameters."""
        for parameter, master in self._masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float().mul_(self.factor)
        self.inner.step()
        for master in self._masters.values():
            master.grad = None
        self.write_down()

    def write_down(self) -> None:
        """Round the masters for the parameters."""
        for parameter, master in self._masters.items():
            parameter.data.copy_(master.data)


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer that does the work."""
    inner: torch.optim.Optimizer = optimizer.inner if isinstance(optimizer, MasterOptimizer) else optimizer
    return inner


@dataclass
class LossScale:
    """The factor by which a loss is scaled up, from step to step: halved when a gradient overflows, doubled after
    `window` steps without."""

    value: float = 1.0
    window: int = 2000
    good: int = 0
    fixed: bool = True

    @classmethod
    def for_precision(cls, precision: str, first: float = 0.0, window: int = 2000) -> LossScale:
        """A scale that moves for float16, and one that stays 1 for all others. `first` of 0 is the usual 65,536."""
        if precision != "fp16":
            return cls()
        return cls(first or FIRST_SCALE, window, fixed=False)

    def update(self, overflow: bool) -> None:
        """After a step."""
        if self.fixed:
            return
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.value = max(1.0, self.value / 2)
        elif self.good >= self.window:
            self.value, self.good = min(LARGEST_SCALE, self.value * 2), 0
