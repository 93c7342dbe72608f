"""Which piece of a parameter a tensor-parallel rank holds.

Idea    A `Split` is attached to every parameter that tensor parallelism cuts, as `parameter.tp_split`. It takes a
        rank's piece out of the whole parameter and joins the pieces again: for the first weights (the same whatever the
        topology), for checkpoints that change topology, and for comparing gradients with one process.

            rows in 3 blocks (query, key, value), 2 ranks          rank 0 takes   q0 k0 v0
            q0 q1 | k0 k1 | v0 v1                                  rank 1 takes   q1 k1 v1

Read    `tp.py`, which decides the splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Cut along `dim` over `size` ranks, block by block.

    `blocks` are the lengths, along `dim` of the whole parameter, of parts that are each cut by themselves: one for a
    plain matrix, three for fused query, key and value. A part that does not divide is padded with zeros at its end.
    """

    dim: int
    rank: int
    size: int
    blocks: tuple[int, ...]

    @property
    def shares(self) -> tuple[int, ...]:
        """The length of each block on one rank, padding included."""
        return tuple(-(-block // self.size) for block in self.blocks)

    def take(self, whole: Tensor, rank: int | None = None) -> Tensor:
        """The piece of `rank` (this one, unless said otherwise) of the whole parameter."""
        rank = self.rank if rank is None else rank
        pieces = []
        for block, share in zip(whole.split(list(self.blocks), self.dim), self.shares, strict=True):
            start = min(rank * share, block.shape[self.dim])
            piece = block.narrow(self.dim, start, min(share, block.shape[self.dim] - start))
            missing = list(piece.shape)
            missing[self.dim] = share - piece.shape[self.dim]
            pieces.append(torch.cat([piece, piece.new_zeros(missing)], self.dim) if missing[self.dim] else piece)
        return torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].contiguous()

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole parameter from the pieces of all ranks, in the order of ranks; padding is dropped."""
        parts = zip(*(piece.split(list(self.shares), self.dim) for piece in pieces), strict=True)
        return torch.cat(
            [torch.cat(part, self.dim).narrow(self.dim, 0, n) for part, n in zip(parts, self.blocks, strict=True)],
            self.dim,
        )

    def whole_shape(self, piece: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole parameter, given that of a piece."""
        shape = list(piece)
        shape[self.dim] = sum(self.blocks)
        return tuple(shape)


def split_of(parameter: Tensor) -> Split | None:
    """How tensor parallelism cuts this parameter; None if every rank of the group holds it whole."""
    return getattr(parameter, "tp_split", None)
