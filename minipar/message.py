"""What is recorded of a message, and what the groups of a rank share.

Idea    Each call to the message layer leaves a `Message` behind: what was sent, in which group, why, how many bytes,
        when. A `Pending` is a message on its way, and a `Wire` is what all groups of one rank have in common: the
        record, and the board on which the launcher sees what a rank waits for.
Read    `comm.py` next: the groups, which send.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minipar.link import Line


@dataclass(slots=True)
class Message:
    """One call to the layer, as its rank saw it.

    `bytes` is the payload this rank handed to the call: the buffer of an all_reduce or broadcast, the shard of an
    all_gather, the whole input of a reduce_scatter, nothing for a recv. `launched` and `finished` are
    `time.perf_counter()` seconds; `waited` is the part of that time in which the rank could do nothing else.
    """

    op: str
    group: str
    tag: str
    bytes: int
    launched: float
    peer: int | None = None
    waited: float = 0.0
    finished: float = 0.0


@dataclass
class Wire:
    """What all groups of one rank share: the record of messages, and the board on which a waiting rank is seen.

    `waiting(text)` is called before a rank may block, `waiting("")` after, and `waiting(None)` while a slow link holds
    back a message; the launcher reads it when ranks are stuck. With `check` on, the ranks of a group first agree on
    each call (operation, tag, size), and a call that differs raises `ValueError` instead of a wrong sum or an abort;
    that doubles the number of messages. A `line` slows down what goes to other nodes. `number` is the rank in the
    world; `folder` belongs to the world, if all of its ranks are on one machine, and ends with it; `attempts` is how
    often torchrun had started this world before.
    """

    messages: list[Message] = field(default_factory=list)
    waiting: Callable[[str | None], None] = lambda text: None
    check: bool = False
    state: SimpleNamespace = field(default_factory=SimpleNamespace)
    number: int = 0
    folder: Path | None = None
    line: Line | None = None
    attempts: int = 0


class Pending:
    """An asynchronous message. Keep it, and do not touch its buffer, until `wait()` has returned the result."""

    def __init__(self, wire: Wire, message: Message | None, works: Sequence[Any], finish: Callable[[], Tensor]) -> None:
        self._wire, self._message, self._works, self._finish = wire, message, works, finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Block until the message is complete; the result (for a send: the tensor that was sent)."""
        if self._result is None:
            start = perf_counter()
            if self._message is not None:
                self._wire.waiting(describe(self._message))
            for work in self._works:
                work.wait()
            self._result = self._finish()
            if self._message is not None:
                self._wire.waiting("")
                self._message.finished = perf_counter()
                self._message.waited += self._message.finished - start
        return self._result


HALF = (torch.bfloat16, torch.float16)  # added up in 32 bits, and rounded once


def combined(combine: Callable[[Tensor, Tensor], Tensor], parts: Sequence[Tensor]) -> Tensor:
    """Parts of all ranks put together, in their order; those of 16 bits in 32."""
    wide = [part.float() for part in parts] if len(parts) > 1 and parts[0].dtype in HALF else parts
    return functools.reduce(combine, wide)


class Background:
    """Work that goes on in a thread of its own until `wait()` returns."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            with torch.no_grad():  # which is off in a new thread
                work()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Block until it is done; raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def describe(message: Message) -> str:
    """'all_reduce of 4096 bytes in dp (dp.grad bucket 3)': how errors and stuck ranks speak of a message."""
    peer = "" if message.peer is None else f" {'to' if message.op == 'send' else 'from'} rank {message.peer}"
    size = f" of {message.bytes} bytes" if message.bytes else ""
    return f"{message.op}{size}{peer} in {message.group}" + (f" ({message.tag})" if message.tag else "")


# What check mode sends ahead of a message: how much will come, and of what.

_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool]


def header_of(tensor: Tensor) -> Tensor:
    """Number of elements, and of the dtype: `[2]`."""
    dtype = _DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else -1
    return torch.tensor([tensor.numel(), dtype], device=tensor.device)


def sized(header: Tensor) -> str:
    """'12 float32'."""
    numel, dtype = header.tolist()
    return f"{numel} {str(_DTYPES[dtype]).removeprefix('torch.')}"


class Announced:
    """A receive that first hears what comes, and refuses what does not fit. A thread does so, since its rank may have
    to send before anything can come. `take` then receives; `who` begins the complaint."""

    def __init__(self, first: Any, header: Tensor, tensor: Tensor, take: Callable[[], Any], who: str) -> None:
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._receive, args=(first, header, tensor, take, who), daemon=True)
        self._thread.start()

    def _receive(self, first: Any, header: Tensor, tensor: Tensor, take: Callable[[], Any], who: str) -> None:
        try:
            first.wait()
            here = header_of(tensor)
            if not torch.equal(header, here):
                raise ValueError(f"{who} sent {sized(header)}, but the buffer here has {sized(here)}")
            take().wait()
        except BaseException as fault:
            self._fault = fault

    def wait(self) -> None:
        self._thread.join()
        if self._fault is not None:
            raise self._fault


def check_rows(tensor: Tensor, op: str, ranks: int) -> None:
    """Raise unless `tensor` has a dimension 0 that divides among so many ranks."""
    if not tensor.dim():
        raise ValueError(f"{op} of a single number: it needs a dimension 0 to work along, so call reshape(1) first")
    if tensor.shape[0] % ranks:
        raise ValueError(
            f"{op} of {tuple(tensor.shape)} over {ranks} ranks: dimension 0 must divide; pad it to "
            f"{-(-tensor.shape[0] // ranks) * ranks}"
        )
