"""Which tokens a step sees: a function of the seed and the number of the step, and of nothing else.

Idea    A data loader with a state must save it, and every rank must keep it in step. Here there is none: sample number
        n = step * global_batch + row is window n % windows of epoch n // windows, in the order that the epoch's own
        shuffle gives. So every topology sees the same batch, a rank makes only its own rows, and a run resumes at any
        step as if it had never stopped.

            tokens   |--- window 0 ---|--- window 1 ---|--- window 2 ---| tail: too short, left out
            epoch 0  2 0 1   epoch 1  1 2 0   ...                        S = sequence, B = global_batch
            step 0   [2 0]   step 1   [1 1]   step 2  [2 0]   ...

Source  The global sample number is Megatron-LM's `consumed_samples` (Narayanan et al. 2021).
Cost    Nothing is sent. One shuffle of the window numbers per epoch; a batch copies B (S + 1) tokens.
Read    `corpus.py` before: where the tokens come from. `dp.py` after: who takes which rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minipar.clean import CorpusError

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # a target that is not to be learned: torch's cross_entropy skips it


@dataclass(frozen=True)
class Batch:
    """What a step learns from; all int64.

    tokens   [B, S]
    targets  [B, S]   the token after each, or -100 where nothing is to be learned
    samples  [B]      global sample numbers, step * B + row
    """

    tokens: Tensor
    targets: Tensor
    samples: Tensor


def make_batch(tokens: NDArray[Any], targets: NDArray[Any], samples: NDArray[Any]) -> Batch:
    """The arrays as tensors. torch is imported here, on the first batch: preparing text needs none of it."""
    import torch

    return Batch(*(torch.from_numpy(np.array(array, np.int64, order="C")) for array in (tokens, targets, samples)))


def generator(*numbers: int) -> np.random.RandomState:
    """Random numbers for these numbers. RandomState, whose stream numpy has promised never to change."""
    digest = blake2b(repr(numbers).encode(), digest_size=32).digest()
    return np.random.RandomState(np.frombuffer(digest, "<u4").astype(np.uint32))


@lru_cache(maxsize=2)  # a batch touches two epochs at most, unless the text is tiny
def shuffle(seed: int, epoch: int, windows: int) -> NDArray[np.int64]:
    """The order in which an epoch visits its windows."""
    return generator(seed, epoch).permutation(windows)


def check_sizes(sequence: int, global_batch: int) -> None:
    """Both must be positive; raises `CorpusError`."""
    for name, value in (("sequence", sequence), ("global_batch", global_batch)):
        if value < 1:
            raise CorpusError(f"{name}={value} must be at least 1")


def check_rows(step: int, start: int, stop: int, global_batch: int) -> None:
    """Rows start:stop of a step must exist; raises `IndexError`."""
    if step < 0:
        raise IndexError(f"step {step}: steps count from 0")
    if not 0 <= start <= stop <= global_batch:
        raise IndexError(f"rows {start}:{stop} are not in a global batch of {global_batch}")


class Batches:
    """Endless batches for training: `batches[step]`, or `batches.rows(step, start, stop)` for one rank's share.

    >>> batches = Batches(corpus.train, sequence=128, global_batch=8, seed=0)
    >>> batches[1000].tokens.shape
    torch.Size([8, 128])

    Windows start every `sequence` tokens and reach one further, for the last target; up to `sequence` - 1 tokens at
    the end of the text are left out. Raises `CorpusError` when the text is shorter than one window.
    """

    def __init__(self, tokens: ArrayLike, *, sequence: int, global_batch: int, seed: int = 0) -> None:
        check_sizes(sequence, global_batch)
        self.tokens: NDArray[Any] = np.asarray(tokens)
        self.sequence, self.global_batch, self.seed = sequence, global_batch, seed
        self.windows = (len(self.tokens) - 1) // sequence
        if self.windows < 1:
            raise CorpusError(
                f"sequence={sequence} needs {sequence + 1} tokens and the text has {len(self.tokens)}: "
                "choose a shorter sequence or more text"
            )

    def __getitem__(self, step: int) -> Batch:
        return self.rows(step, 0, self.global_batch)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Rows start:stop of the batch of this step, without making the others."""
        check_rows(step, start, stop, self.global_batch)
        samples = step * self.global_batch + np.arange(start, stop)  # [B]
        epochs, places = np.divmod(samples, self.windows)
        windows = [
            shuffle(self.seed, epoch, self.windows)[place]
            for epoch, place in zip(epochs.tolist(), places.tolist(), strict=True)
        ]
        starts = np.array(windows, np.int64)[:, None] * self.sequence
        taken = self.tokens[starts + np.arange(self.sequence + 1)]  # [B, S + 1]
        return make_batch(taken[:, :-1], taken[:, 1:], samples)


class EvaluationBatches:
    """A finite pass over held-out text, in reading order: every token is an input once, and a target once.

    Only the first token is no target, for nothing comes before it. The last batch is filled up with rows of
    nothing to learn (targets -100), so that all batches have one shape and every data-parallel rank its rows.

    >>> for step in range(len(evaluation)): loss_of(evaluation.rows(step, start, stop))
    """

    def __init__(self, tokens: ArrayLike, *, sequence: int, global_batch: int) -> None:
        check_sizes(sequence, global_batch)
        self.tokens: NDArray[Any] = np.asarray(tokens)
        self.sequence, self.global_batch = sequence, global_batch
        if len(self.tokens) < 2:
            raise CorpusError(f"evaluation needs 2 tokens and the text has {len(self.tokens)}: hold out more text")

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // (self.sequence * self.global_batch))

    def __iter__(self) -> Iterator[Batch]:
        return (self[step] for step in range(len(self)))

    def __getitem__(self, step: int) -> Batch:
        return self.rows(step, 0, self.global_batch)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Rows start:stop of the batch of this step."""
        check_rows(step, start, stop, self.global_batch)
        if step >= len(self):
            raise IndexError(f"step {step}: the held-out text ends after {len(self)} batches")
        samples = step * self.global_batch + np.arange(start, stop)  # [B]
        inputs = samples[:, None] * self.sequence + np.arange(self.sequence)  # [B, S], positions in the text
        last = len(self.tokens) - 1
        real = inputs < last
        tokens = np.where(real, self.tokens[np.minimum(inputs, last)], 0)
        targets = np.where(real, self.tokens[np.minimum(inputs + 1, last)].astype(np.int64), IGNORED)
        return make_batch(tokens, targets, samples)


class RandomBatches:
    """Endless batches of random tokens, for tests and benchmarks: no files, and no text to prepare.

    `ragged` takes a random number of the targets away from each row, and all of them from the first quarter of the
    rows (one at least, where there are two or more): micro-batches then differ in tokens, and one may have none.
    """

    def __init__(self, *, vocab: int, sequence: int, global_batch: int, seed: int = 0, ragged: bool = False) -> None:
        check_sizes(sequence, global_batch)
        if vocab < 1:
            raise CorpusError(f"vocab={vocab} must be at least 1")
        self.vocab, self.sequence, self.global_batch = vocab, sequence, global_batch
        self.seed, self.ragged = seed, ragged

    def __getitem__(self, step: int) -> Batch:
        return self.rows(step, 0, self.global_batch)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Rows start:stop of the batch of this step, without making the others."""
        check_rows(step, start, stop, self.global_batch)
        samples = step * self.global_batch + np.arange(start, stop)  # [B]
        taken = np.empty((len(samples), self.sequence + 1), np.int64)  # [B, S + 1]
        ignored = np.zeros((len(samples), self.sequence), bool)  # [B, S]
        empty_rows = max(1, self.global_batch // 4) if self.global_batch > 1 else 0
        for i, sample in enumerate(samples.tolist()):
            random = generator(self.seed, sample)
            taken[i] = random.randint(self.vocab, size=self.sequence + 1)
            if self.ragged:
                learned = random.randint(1, self.sequence + 1) if start + i >= empty_rows else 0
                ignored[i, random.permutation(self.sequence)[learned:]] = True
        return make_batch(taken[:, :-1], np.where(ignored, IGNORED, taken[:, 1:]), samples)
