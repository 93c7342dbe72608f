"""Exercise 24. Cut for four, needed for six (20 minutes; lesson 6)

A run with tensor parallel over `saved` ranks has written one file for each: its piece of a weight. Now the run goes on
over more ranks, or fewer. Nobody wants to put the whole weight together on every rank: each reads the files in which
its own new piece begins and ends, and those between.

    saved by 2       [   file 0   |   file 1   ]
    needed by 3      [ rank 0 | rank 1 | rank 2 ]        rank 1 reads the end of file 0 and the beginning of file 1

Weights for queries, keys and values are often fused into one. Each of these blocks is cut by itself, so a file holds
its share of each, one after the other:

    blocks q k v, saved by 2        file 0   [ q0 k0 v0 ]        file 1   [ q1 k1 v1 ]

No messages are needed. group.rank, group.size: the new ranks.
"""

import torch


def load_piece(read, saved, dim, blocks, group):
    """This rank's new piece.

    read(n): reads file n, a tensor, the piece of old rank n; slow, so read each at most once, and no more than needed.
    saved: how many files. dim: the dimension that is cut, 0 or 1. blocks: the lengths along `dim` of the whole weight's
    blocks, each of them a multiple of `saved` and of group.size. Returns a tensor.
    """
    raise NotImplementedError
