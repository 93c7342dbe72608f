"""How an answer is judged: named checks, each with words that teach when it fails.

Idea    A check compares what ranks handed back with a truth that was computed here, or what the switch has seen with
        what is right. When values differ, the likeliest mistakes are tried: if "not divided by the number of ranks"
        gives exactly what was handed back, that is what is said. A check is passed if it is passed in every case.
Read    `trial.py` before; a file in `checks/` for how it is used.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isclose
from typing import Any

import torch
from torch import Tensor

from minipar.grade.switch import Call
from minipar.grade.trial import Case, Outcome

RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class Draw:
    """Random sizes and values for cases, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random, self._tensors = random.Random(seed), torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return self._random.randint(low, high)

    def choice(self, some: Sequence[Any]) -> Any:
        return self._random.choice(list(some))

    def normal(self, *shape: int) -> Tensor:
        """Normally distributed values in float64."""
        return torch.randn(*shape, generator=self._tensors, dtype=torch.float64)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Whole numbers from 0 to `high` - 1."""
        return torch.randint(high, shape, generator=self._tensors)


@dataclass
class Check:
    """A named check: its points, and what was wrong in the first case in which it failed."""

    name: str
    points: int = 1
    message: str = ""
    passed: bool = True
    seen: bool = False


@dataclass
class Judge:
    """Collects what the checks of an exercise found, over all of its cases."""

    checks: dict[str, Check] = field(default_factory=dict)
    another_kind: bool = False  # nothing that was handed back is even of the kind that was asked for

    @classmethod
    def of(cls, names: Mapping[str, int]) -> Judge:
        """For checks with so many points each."""
        return cls({name: Check(name, points) for name, points in names.items()})

    def that(self, name: str, passed: bool, message: str) -> bool:
        """Note that a check was passed, or why not."""
        check = self.checks[name]
        check.seen = True
        if not passed and check.passed:
            check.passed, check.message = False, message
        return passed

    def equal(
        self,
        name: str,
        found: Sequence[Any],
        expected: Sequence[Any],
        mistakes: Mapping[str, Sequence[Any]] | None = None,
        what: str = "the result",
    ) -> bool:
        """By rank, or by item: whether all that was found is what is expected. `mistakes` maps advice to what would
        have been found, had that mistake been made."""
        wrong = [place for place, pair in enumerate(zip(found, expected, strict=True)) if not same(*pair)]
        if not wrong:
            return self.that(name, True, "")
        self.another_kind |= all(_kind(one) != _kind(other) for one, other in zip(found, expected, strict=True))
        for advice, instead in (mistakes or {}).items():
            if all(same(a, b) for a, b in zip(found, instead, strict=True)):
                return self.that(name, False, advice)
        ranks = "every rank" if len(wrong) == len(expected) > 1 else f"rank {', '.join(map(str, wrong))}"
        whose = f" of {ranks}" if len(expected) > 1 else ""
        return self.that(name, False, f"{what}{whose} is wrong: {difference(found[wrong[0]], expected[wrong[0]])}")

    def failed(self, outcome: Outcome) -> None:
        """The answer did not come to its end: no check is passed, and the first one says why."""
        for number, check in enumerate(self.checks.values()):
            self.that(check.name, False, outcome.failure if number == 0 else "not reached, see the first check")


def same(found: Any, expected: Any) -> bool:
    """Whether it is the expected value: a tensor of that shape and dtype, to rounding; finite; or an equal number."""
    if isinstance(expected, Tensor):
        if type(found) is not Tensor or found.shape != expected.shape or found.dtype != expected.dtype:
            return False
        if not expected.is_floating_point():
            return bool(torch.equal(found, expected))
        if not expected.numel():
            return True
        tolerance = RELATIVE[expected.dtype]
        scale = float(expected.abs().max()) or 1.0
        return bool(torch.isfinite(found).all()) and bool((found - expected).abs().max() <= tolerance * scale)
    if isinstance(expected, dict):
        alike = type(found) is dict and found.keys() == expected.keys()
        return alike and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return type(found) is list and len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, float):
        return type(found) in (int, float) and isclose(_float(found), expected, rel_tol=1e-9, abs_tol=1e-39)
    return type(found) is type(expected) and bool(found == expected)


def _kind(value: Any) -> str:
    kinds: dict[str, Any] = {"tensor": Tensor, "flag": bool, "number": (int, float), "text": str, "dict": dict}
    kinds["list"] = (list, tuple)
    return next((name for name, kind in kinds.items() if isinstance(value, kind)), "nothing")


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # a whole number with hundreds of digits
        return inf


def difference(found: Any, expected: Any) -> str:
    """In a few words, how they differ."""
    if type(found) is list and isinstance(expected, list | tuple) and len(found) == len(expected):
        place = next((n for n, pair in enumerate(zip(found, expected, strict=True)) if not same(*pair)), 0)
        return f"at {place}: {difference(found[place], expected[place])}"
    if not isinstance(expected, Tensor):
        return f"got {_short(found)}, expected {_short(expected)}"
    if type(found) is not Tensor:
        return f"got {_short(found)}, expected a tensor of {tuple(expected.shape)}"
    if found.shape != expected.shape:
        return f"it has shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if found.dtype != expected.dtype:
        return f"it is {found.dtype}, expected {expected.dtype}".replace("torch.", "")
    if found.is_floating_point() and not torch.isfinite(found).all():
        return "it has values that are no numbers"
    if (ratio := factor(found, expected)) is not None:
        return f"it is exactly {ratio:g} times what it should be"
    place = int((found.double() - expected.double()).abs().flatten().argmax())
    here, there = float(found.flatten()[place]), float(expected.flatten()[place])
    return f"at place {place} it is {here:.6g}, expected {there:.6g}"


def factor(found: Tensor, expected: Tensor) -> float | None:
    """By what it is too large, if it is everywhere by the same."""
    a, b = found.double().flatten(), expected.double().flatten()
    large = b.abs() > 1e-6 * float(b.abs().max() or 1)
    ratios = a[large] / b[large]
    first = float(ratios[0]) if len(ratios) else 1.0
    if first in (0, 1) or bool((ratios - first).abs().max() > 1e-6 * abs(first)):
        return None
    return round(first, 6)


def _short(value: Any) -> str:
    text = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) < 80 else text[:77] + "..."


# What the switch has seen.


def calls_of(outcome: Outcome, rank: int, *ops: str, group: str = "") -> list[Call]:
    """The calls of a rank, of some operations or all, in their order."""
    return [c for c in outcome.calls if c.rank == rank and (not ops or c.op in ops) and (not group or c.group == group)]


def bytes_of(outcome: Outcome, rank: int, *, group: str = "") -> int:
    """What a rank would send in a ring for the calls that it made: 2 (N-1)/N of a buffer for an all_reduce, (N-1)/N for
    a reduce_scatter, N-1 pieces for an all_gather; a message as it is."""
    total = 0.0
    for call in calls_of(outcome, rank, group=group):
        size = call.ranks
        share = {"all_reduce": 2 * (size - 1) / size, "reduce_scatter": (size - 1) / size, "all_gather": size - 1.0,
                 "all_to_all": (size - 1) / size, "broadcast": 1.0, "send": 1.0}  # fmt: skip
        total += share.get(call.op, 0.0) * call.bytes
    return round(total)


__all__ = ["Call", "Case", "Check", "Draw", "Judge", "Outcome", "bytes_of", "calls_of", "factor", "same"]
