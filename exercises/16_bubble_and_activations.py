"""Exercise 16. Bubble and activations (20 minutes; lesson 4)

Whoever plans a run asks before it: which share of the time is lost to the bubble, how many micro-batches make that
tolerable, and how many activations must fit into memory? For equal stages three short formulas answer. Find them by
counting in pictures (`minipar schedule` draws them).

    1F1B, p = 3 stages, m = 4 micro-batches: a backward takes twice as long as a forward, and a message no time

    rank 0   F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    rank 1   .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
    rank 2   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .

    busy: m forwards and m backwards. Idle: how many forwards and backwards long?
    The bubble is here idle time / BUSY time.

    Interleaved: each rank holds `chunks` stages, each 1/chunks of its layers, so each action is that much shorter. A
    rank warms up with (chunks - 1) p + 2 (p - rank - 1) forwards; then come one forward and one backward in turn.

    Nothing is called.
"""


def bubble(schedule, stages, micro_batches, chunks):
    """Idle time / busy time.

    schedule: "gpipe", "1f1b" or "interleaved"; stages: p, the number of ranks, from 2; micro_batches: m, for
    "interleaved" a multiple of p; chunks: stages on each rank, from 2 for "interleaved", else 1. Returns a number such
    as 0.5.
    """
    raise NotImplementedError


def enough_micro_batches(schedule, stages, chunks, percent):
    """The smallest number of micro-batches with which idle time is at most so many percent of busy time.

    percent: a whole number from 1. For "interleaved" the number must be a multiple of `stages`. Returns a whole number.
    """
    raise NotImplementedError


def held(schedule, stages, micro_batches, chunks, rank):
    """The most micro-batches whose activations this rank holds at once.

    Activations are held from a forward to its backward. For "interleaved" a micro-batch counts on each chunk where it
    is held. Returns a whole number.
    """
    raise NotImplementedError
