"""Exercise 2. Reduce-scatter and all-gather (30 minutes; lesson 0)

A ring all-reduce has two halves, and each is a collective of its own. In the first, sums travel: in the end every rank
holds one piece of the sum, finished. In the second, finished pieces travel: in the end every rank holds all of them.
ZeRO calls the first for gradients and the second for parameters, and does its work in between, on 1/N of everything.

    N = 3, pieces a b c        reduce_scatter             all_gather
                               a = a0 + a1 + a2
    rank 0   a0 b0 c0          a . .                      a b c
    rank 1   a1 b1 c1    ->    . b .                ->    a b c
    rank 2   a2 b2 c2          . . c                      a b c

Rank r ends with piece r: that decides with which piece it begins. Every rank talks to its right and left neighbours
only, and sends (N-1)/N of a buffer in each half.

    group.rank, group.size
    group.send(tensor, to)                          blocks until rank `to` receives
    pending = group.recv(tensor, source, async_op=True) ; pending.wait()        into `tensor`, in place
"""

import torch


def reduce_scatter(buffer, group):
    """Piece `group.rank` of the sum of all ranks' buffers.

    buffer: [n] on each rank, n a multiple of group.size. Returns a tensor [n / group.size].
    """
    raise NotImplementedError


def all_gather(piece, group):
    """The pieces of all ranks, one after the other in the order of ranks.

    piece: [m] on each rank. Returns a tensor [m * group.size], the same on all ranks.
    """
    raise NotImplementedError
