"""A solution of exercise 13."""


def interleaved(ranks, micro_batches, chunks):
    rounds = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    forwards = [f"F{m}.{chunk}" for turn in rounds for chunk in range(chunks) for m in turn]
    backwards = [f"B{m}.{chunk}" for turn in rounds for chunk in reversed(range(chunks)) for m in turn]
    return [woven(forwards, backwards, (chunks - 1) * ranks + 2 * (ranks - rank - 1)) for rank in range(ranks)]


def woven(forwards, backwards, warmup):
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += [forward, backward]
    return row + backwards[len(row) - len(forwards) :]
