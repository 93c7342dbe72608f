"""What a step costs in time, bytes and memory: the facts that a prediction and a measurement share.

Idea    Each fact is made twice, once by arithmetic (`simulate.py`, `ledger.py`) and once by running (`trace.py`,
        `comm.py`), as the same type, and read once: a drawing cannot tell which of the two it shows, and
        predicted against measured is a subtraction. The two origins never import each other: they meet here.
Cost    None: plain frozen data, no torch.
Read    `schedule.py` next: the order of a pipeline's actions. `simulate.py` after it gives them times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property


class Kind(Enum):
    """What is computed. BACKWARD is the gradient of the stage's input, and that of its weights too, unless the
    schedule has WEIGHT actions for the stage: nobody waits for those, so they can fill a bubble."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    __hash__ = object.__hash__  # large schedules look up many actions, and Enum's own hash is slow


@dataclass(frozen=True, slots=True)
class Action:
    """One micro-batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """"F3": the stage is said by the row in which it stands."""
        return f"{self.kind.value}{self.micro_batch}"

    @property
    def place(self) -> str:
        """"F3 of stage 1": how errors speak of an action."""
        return f"{self} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Span:
    """An action with the time that it took, in seconds on one clock for all ranks."""

    rank: int
    start: float
    end: float
    kind: Kind
    stage: int
    micro_batch: int

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def action(self) -> Action:
        return Action(self.kind, self.stage, self.micro_batch)


@dataclass(frozen=True)
class Timeline:
    """What each rank did when, predicted or measured: the actions of one training step.

    `critical_path` is the chain of spans, from the first to the last, each of which had to wait for the one before
    it: only making these faster makes the step faster. It is empty where nobody knows (in measurements).
    """

    spans: tuple[Span, ...]
    ranks: int
    critical_path: tuple[Span, ...] = ()

    @cached_property
    def _rows(self) -> list[tuple[Span, ...]]:
        rows: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
        return [tuple(sorted(row, key=lambda span: (span.start, span.end))) for row in rows]

    @cached_property
    def _by_action(self) -> dict[Action, Span]:
        return {span.action: span for span in self.spans}

    def by_rank(self, rank: int) -> tuple[Span, ...]:
        """The spans of one rank, in the order of time."""
        return self._rows[rank]

    def span(self, action: Action) -> Span:
        """When `action` started and ended."""
        return self._by_action[action]

    @cached_property
    def duration(self) -> float:
        """Seconds from the start of the first action to the end of the last: the time of the step."""
        starts = min((span.start for span in self.spans), default=0.0)
        return max((span.end for span in self.spans), default=0.0) - starts

    @cached_property
    def busy(self) -> float:
        """Seconds of work, summed over the ranks."""
        return sum(span.seconds for span in self.spans)

    @property
    def idle(self) -> float:
        """Seconds without work, summed over the ranks."""
        return self.ranks * self.duration - self.busy

    @property
    def bubble(self) -> float:
        """Idle time / busy time of the whole pipeline: (p-1)/m for 1F1B with equal stages, 0 at best."""
        return self.idle / self.busy if self.busy else 0.0

    def activations(self, rank: int, activation_bytes: float = 1) -> list[tuple[float, float]]:
        """How much `rank` holds over time, as (second, held from then on).

        Activations are held from the start of F to the end of B, or of W where the stage has any. In micro-batches
        on one stage; in bytes, given the `activation_bytes` that one micro-batch leaves on a stage.
        """
        split = {span.stage for span in self.by_rank(rank) if span.kind is Kind.WEIGHT}
        held, curve = 0, list[tuple[float, float]]()
        for span in self.by_rank(rank):
            if span.kind is Kind.FORWARD:
                held += 1
                curve.append((span.start, held * activation_bytes))
            elif span.kind is (Kind.WEIGHT if span.stage in split else Kind.BACKWARD):
                held -= 1
                curve.append((span.end, held * activation_bytes))
        return curve

    def peak_activations(self, activation_bytes: float = 1) -> list[float]:
        """For each rank the peak of `activations`: in micro-batches, or in bytes."""
        curves = [self.activations(rank, activation_bytes) for rank in range(self.ranks)]
        return [max((held for _, held in curve), default=0) for curve in curves]


@dataclass(frozen=True, slots=True)
class Volume:
    """How many calls, and how many bytes of payload one rank hands to them."""

    calls: int = 0
    bytes: int = 0

    def __sub__(self, other: Volume) -> Volume:
        return Volume(self.calls - other.calls, self.bytes - other.bytes)


@dataclass(frozen=True)
class Traffic:
    """What one rank sends: `volumes["dp", "all_reduce"]` is a `Volume`, by group and operation.

    Equal traffic subtracts to `Traffic()`; anything else leaves the differences.
    """

    volumes: Mapping[tuple[str, str], Volume] = field(default_factory=dict)

    def __getitem__(self, key: tuple[str, str]) -> Volume:
        return self.volumes.get(key, Volume())

    def __sub__(self, other: Traffic) -> Traffic:
        keys = [*self.volumes, *(key for key in other.volumes if key not in self.volumes)]
        return Traffic({key: self[key] - other[key] for key in keys if self[key] != other[key]})


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that one rank holds, by purpose; `activations` at their peak."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations

    def __sub__(self, other: Footprint) -> Footprint:
        return Footprint(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))
