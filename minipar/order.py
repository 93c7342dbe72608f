"""What follows from the order of actions: who needs what, who sends what to whom, and whether it can run at all.

Idea    F needs the F of the stage before, B the B of the stage after, W its own B: with that, the order of actions on
        each rank decides everything else. `messages` puts the sends and receives between the actions, so that nobody
        writes them twice; `validate` refuses, before anything runs, what is incomplete or would wait for ever, and
        says who waits for whom; `draw` shows who works when.
Cost    Each is one walk over the actions.
Read    `schedule.py` for the schedules themselves; `pp.py` and `simulate.py`, which run what is derived here.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

from typing_extensions import assert_never

from minipar.facts import Action, Kind

Sends = Literal["asynchronous", "blocking"]


def needs(action: Action, stages: int) -> list[Action]:
    """The actions whose results `action` uses. Every reader of a schedule learns its dependencies from here."""
    stage, micro_batch = action.stage, action.micro_batch
    match action.kind:
        case Kind.FORWARD:
            return [Action(Kind.FORWARD, stage - 1, micro_batch)] if stage > 0 else []
        case Kind.BACKWARD:
            own = Action(Kind.FORWARD, stage, micro_batch)
            return [own, Action(Kind.BACKWARD, stage + 1, micro_batch)] if stage + 1 < stages else [own]
        case Kind.WEIGHT:
            return [Action(Kind.BACKWARD, stage, micro_batch)]
        case _:
            assert_never(action.kind)


def goes_to(action: Action, stages: int) -> int:
    """The stage that uses the result of `action`: the next for F, the one before for B; its own if no other does."""
    match action.kind:
        case Kind.FORWARD:
            return min(action.stage + 1, stages - 1)
        case Kind.BACKWARD:
            return max(action.stage - 1, 0)
        case Kind.WEIGHT:
            return action.stage
        case _:
            assert_never(action.kind)


class ScheduleError(ValueError):
    """A schedule that cannot run; `faults` lists all that is wrong with it."""

    def __init__(self, what: str, faults: Sequence[str]) -> None:
        super().__init__(what, tuple(faults))
        self.what, self.faults = what, tuple(faults)

    def __str__(self) -> str:
        between = " " if len(self.faults) == 1 else "\n  "
        return between.join([f"{self.what}:", *self.faults])


@dataclass(frozen=True)
class Schedule:
    """The order of the actions on each rank: `schedule.actions[rank]`. Stage s lives on rank s % ranks, so with
    several stages on a rank (chunks) every micro-batch goes round all ranks several times."""

    name: str
    ranks: int
    stages: int
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return self.stages // self.ranks

    def rank_of(self, stage: int) -> int:
        """The rank on which `stage` lives."""
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        """The stages that live on `rank`, one for each chunk."""
        return range(rank, self.stages, self.ranks)

    @cached_property
    def splits_backward(self) -> frozenset[int]:
        """The stages whose weight gradient is an action of its own."""
        return frozenset(action.stage for action in chain(*self.actions) if action.kind is Kind.WEIGHT)

    @cached_property
    def size(self) -> int:
        """How many actions there are when all are there."""
        return (2 * self.stages + len(self.splits_backward)) * self.micro_batches

    def validate(self, sends: Sends = "asynchronous") -> Schedule:
        """This schedule, if it can run; else `ScheduleError`. See `validate`."""
        return validate(self, sends)

    def __str__(self) -> str:
        return draw(self)


# What follows from a schedule: who sends what to whom.


@dataclass(frozen=True, slots=True)
class Compute:
    """Take this action."""

    action: Action


@dataclass(frozen=True, slots=True)
class Send:
    """Send the result of `action`, which was just computed, to rank `to`, and go on without waiting."""

    action: Action
    to: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Take the next message from rank `source`: it is the result of `action`."""

    action: Action
    source: int


Step = Compute | Send | Receive


def messages(schedule: Schedule) -> list[list[Step]]:
    """For each rank its actions with the messages between them: F goes to the next stage, B to the one before.

    A message is named by the action whose result it carries. Stages on one rank hand results over without any.
    Messages from one rank to another arrive in the order sent, so they are received in that order: with the one that
    an action needs come all that were sent before it.
    """
    rows, stages, rank_of = _possible(schedule), schedule.stages, schedule.rank_of
    present = set[Action]().union(*rows)
    outbox: dict[Action, int] = {}  # for each message the rank to which it goes
    wires = defaultdict[tuple[int, int], deque[Action]](deque)  # (from, to): what is sent and not yet received
    for rank, row in enumerate(rows):
        for action in row:
            user = Action(action.kind, goes_to(action, stages), action.micro_batch)
            if rank_of(user.stage) != rank and user in present:
                outbox[action] = rank_of(user.stage)
                wires[rank, outbox[action]].append(action)
    steps: list[list[Step]] = [[] for _ in rows]
    for rank, row in enumerate(rows):
        received = set[Action]()
        for action in row:
            for need in needs(action, stages):
                source = rank_of(need.stage)
                while need in outbox and source != rank and need not in received:
                    received.add(wires[source, rank][0])
                    steps[rank].append(Receive(wires[source, rank].popleft(), source))
            steps[rank].append(Compute(action))
            if action in outbox:
                steps[rank].append(Send(action, outbox[action]))
    return steps


# Refusing what cannot run.


def walk(schedule: Schedule) -> Iterator[tuple[Action, list[Action]]]:
    """Let each rank go on until it waits for another: all actions, in one order in which the ranks could take them,
    each with what it needs. Where ranks wait for ever, the walk ends early: after less than `schedule.size` actions.
    """
    rows = [deque(row) for row in _possible(schedule)]
    done = set[Action]()
    waiting: list[list[int]] = [[] for _ in range(schedule.ranks)]  # for each rank, those that wait for it
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        row, before = rows[rank], len(done)
        while row:
            inputs = needs(row[0], schedule.stages)
            if late := [need for need in inputs if need not in done]:
                waiting[late[0].stage % schedule.ranks].append(rank)
                break
            done.add(row[0])
            yield row.popleft(), inputs
        if len(done) > before:
            ready += waiting[rank]
            waiting[rank].clear()


def _possible(schedule: Schedule) -> list[dict[Action, None]]:
    """The actions of each rank in order, without the impossible and the doubled."""
    micro_batches = range(schedule.micro_batches)
    return [
        dict.fromkeys(action for action in row if action.stage in own and action.micro_batch in micro_batches)
        for row, own in zip(schedule.actions, map(schedule.stages_of, range(schedule.ranks)), strict=False)
    ]


def validate(schedule: Schedule, sends: Sends = "asynchronous") -> Schedule:
    """The schedule, if it is complete and every rank comes to its end; else `ScheduleError` with every fault."""
    runs = sum(1 for _ in walk(schedule)) == sum(map(len, schedule.actions)) == schedule.size
    faults = [] if runs else _misfits(schedule) + _too_early(schedule)
    circle = None if runs and sends == "asynchronous" else deadlock(schedule, sends)
    if circle:
        faults.append(f"deadlock with {sends} sends: {circle}")
    if faults:
        raise ScheduleError(f"schedule {schedule.name} cannot run", faults)
    return schedule


def _misfits(schedule: Schedule) -> list[str]:
    """In words, the actions that are impossible, doubled or missing."""
    if len(schedule.actions) != schedule.ranks:
        return [f"{schedule.ranks} ranks, but {len(schedule.actions)} rows of actions: give one row for each rank"]
    faults = []
    for rank, row in enumerate(schedule.actions):
        for action, times in Counter(row).items():
            home = schedule.rank_of(action.stage)
            if not 0 <= action.stage < schedule.stages:
                faults.append(f"{action.place} on rank {rank}: there are only stages 0 to {schedule.stages - 1}")
            elif not 0 <= action.micro_batch < schedule.micro_batches:
                faults.append(f"{action.place}: there are only micro-batches 0 to {schedule.micro_batches - 1}")
            elif rank != home:
                faults.append(f"{action.place} stands on rank {rank}: stage {action.stage} lives on rank {home}")
            elif times > 1:
                faults.append(f"{action.place} stands {times} times on rank {rank}: leave one")
    present = set[Action]().union(*_possible(schedule))
    for stage in range(schedule.stages):
        for kind in Kind if stage in schedule.splits_backward else (Kind.FORWARD, Kind.BACKWARD):
            wanted = [Action(kind, stage, m) for m in range(schedule.micro_batches)]
            if absent := " ".join(str(action) for action in wanted if action not in present):
                why = ": a stage has W for all its micro-batches or for none" if kind is Kind.WEIGHT else ""
                faults.append(f"{absent} of stage {stage} missing on rank {schedule.rank_of(stage)}{why}")
    return faults


def _too_early(schedule: Schedule) -> list[str]:
    """In words, the actions that come before what they need from their own rank, such as B before F."""
    faults = []
    for rank, row in enumerate(_possible(schedule)):
        later = set(row)
        for action in row:
            later.remove(action)
            late = [need for need in needs(action, schedule.stages) if need in later]
            faults += [f"{action.place} comes before {need.place} on rank {rank}, and needs it" for need in late]
    return faults


def deadlock(schedule: Schedule, sends: Sends = "asynchronous") -> str | None:
    """Who waits for whom in a circle, or None if no ranks wait for each other.

    "asynchronous" sends never wait: minipar's. "blocking" ones wait until the receiver has come to its receive, as a
    plain `send` of a large message does; then even 1F1B stands still.
    """
    if sends not in ("asynchronous", "blocking"):
        raise ValueError(f"sends={sends!r}: choose asynchronous or blocking")
    stuck = _stuck(messages(schedule), blocking=sends == "blocking")
    if not stuck:
        return None
    trail = [min(stuck)]
    while (rank := _peer(stuck[trail[-1]])) not in trail:
        trail.append(rank)
    waits = []
    for step in (stuck[rank] for rank in trail[trail.index(rank) :]):
        to_receive = f"rank {_peer(step)} to receive {step.action.place}"
        waits.append(to_receive if isinstance(step, Send) else f"{step.action.place} (on rank {_peer(step)})")
    return f"rank {rank} waits for {', which waits for '.join(waits)}: a circle, in which nobody can go first"


def _peer(step: Send | Receive) -> int:
    return step.to if isinstance(step, Send) else step.source


def _stuck(steps: list[list[Step]], blocking: bool) -> dict[int, Send | Receive]:
    """Let all ranks run, and return the message at which each rank that does not come to its end stands."""
    stuck: dict[int, Send | Receive] = {}
    here: dict[Action, int] = {}  # the rank that stands at this message
    sent = set[Action]()
    turn, ready = [iter(row) for row in steps], list(range(len(steps)))
    while ready:
        rank = ready.pop()
        for step in turn[rank]:
            if isinstance(step, Compute):
                continue
            if isinstance(step, Send) and not blocking:
                sent.add(step.action)
            if step.action in here:  # both sides are: they go on together
                other = here.pop(step.action)
                del stuck[other]
                ready.append(other)
            elif step.action not in sent:
                here[step.action], stuck[rank] = rank, step
                break
    return stuck


# A schedule on paper: `schedule.parse` reads it back.


def draw(schedule: Schedule) -> str:
    """A row for each rank, a column for the time of one action, "." where a rank waits: `parse` reads it back.

    What cannot run to its end is drawn without the waiting.
    """
    rows: list[list[str]] = [[] for _ in schedule.actions]
    column: dict[Action, int] = {}
    for action, inputs in walk(schedule):
        row = rows[schedule.rank_of(action.stage)]
        column[action] = max([len(row), *(column[need] + 1 for need in inputs)])
        row += ["."] * (column[action] - len(row)) + [_cell(action, schedule)]
    if len(column) < sum(map(len, schedule.actions)):
        rows = [[_cell(action, schedule) for action in row] for row in schedule.actions]
        column = {}
    end = max(map(len, rows)) if column else 0
    width = max((len(cell) for row in rows for cell in row), default=0)
    label = len(f"rank {len(rows) - 1}")
    lines = [" ".join(cell.ljust(width) for cell in row + ["."] * (end - len(row))) for row in rows]
    return "\n".join(f"{f'rank {rank}':{label}}  {line}".rstrip() for rank, line in enumerate(lines))


def _cell(action: Action, schedule: Schedule) -> str:
    return str(action) if schedule.chunks == 1 else f"{action}.{action.stage // schedule.ranks}"
