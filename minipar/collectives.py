"""What a collective costs on a network: bytes through each rank's link, and seconds, by arithmetic.

Idea    A ring of n ranks passes an n-th of the buffer from neighbour to neighbour: n-1 steps to add it up, n-1 more to
        hand the sums round. So each rank sends 2 (n-1)/n of the buffer however many ranks there are, and the steps,
        each with the link's latency, are what grows. The alpha-beta model puts the two together.

            all_reduce        2 (n-1)/n B        2 (n-1) steps
            all_gather          (n-1)/n B          n-1     B: the whole result, of which a rank holds 1/n
            reduce_scatter      (n-1)/n B          n-1     B: the whole input
            broadcast                   B          n-1     (in pieces, which follow each other)
            send                        B          1
            all_to_all          (n-1)/n B          n-1

Source  Thakur, Rabenseifner and Gropp 2005, 'Optimization of Collective Communication Operations in MPICH'; Hockney
        1994, 'The communication challenge for MPP', for latency + bytes / bandwidth.
Read    `catalogue.py` for links; `plan.py`, which adds these up over a step.
"""

from __future__ import annotations

from minipar.catalogue import Link
from minipar.compute import positive

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "all_to_all")


def ring_bytes(op: str, payload: float, ranks: int) -> float:
    """Bytes that each rank sends by a ring, for a `payload` as the ledger counts it: an all_reduce's buffer, a
    reduce_scatter's whole input, an all_gather's own shard, what is sent."""
    share, _ = _shape(op, ranks)
    return share * payload


def collective_seconds(op: str, payload: float, ranks: int, link: Link) -> float:
    """Seconds from the last rank's call to the end: steps x latency + ring bytes / bandwidth; 0 for one rank."""
    _, steps = _shape(op, ranks)
    return steps * link.latency + ring_bytes(op, payload, ranks) / link.bandwidth if steps else 0.0


def _shape(op: str, ranks: int) -> tuple[float, int]:
    """Bytes sent for each byte of payload, and steps."""
    positive(ranks=ranks)
    others = ranks - 1
    if not others:
        return 0.0, 0
    shapes = {
        "all_reduce": (2 * others / ranks, 2 * others),
        "all_gather": (float(others), others),
        "reduce_scatter": (others / ranks, others),
        "broadcast": (1.0, others),
        "send": (1.0, 1),
        "all_to_all": (others / ranks, others),
    }
    if op not in shapes:
        raise ValueError(f"unknown operation {op!r}: choose from {', '.join(OPERATIONS)}")
    return shapes[op]
